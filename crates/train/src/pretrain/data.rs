//! Clips of the moving-shapes world as tensors, and their latents.

use super::Progress;
use super::settings::PretrainSettings;
use burn::tensor::{Device, Tensor, TensorData};
use grpo::random::{Key, Purpose, index_below};
use rand_chacha::rand_core::Rng;
use shapes::{RenderOptions, Scene};
use video::Frames;
use wan::vae::AutoencoderKlWan;
use wan::weights::to_floats;

/// Stream of random numbers number `index` of a kind (`tag`).
pub(super) fn key(seed: u64, tag: u64, index: usize) -> Key {
    Key { seed, iteration: tag, prompt: index as u64, rollout: 0, purpose: Purpose::Data }
}

/// A uniform number in [0, 1).
pub(super) fn uniform(rng: &mut impl Rng) -> f64 {
    f64::from(rng.next_u32()) / 4_294_967_296.0
}

/// Clips [B, 3, F, H, W] in [-1, 1].
pub(super) fn video_tensor(clips: &[Frames], device: &Device) -> Tensor<5> {
    let (f, h, w) = (clips[0].num_frames(), clips[0].height(), clips[0].width());
    let values: Vec<f32> = clips.iter().flat_map(|clip| clip.data().iter().map(|v| v * 2.0 - 1.0)).collect();
    let channels_last: Tensor<5> = Tensor::from_data(TensorData::new(values, [clips.len(), f, h, w, 3]), device);
    channels_last.permute([0, 4, 1, 2, 3])
}

/// The clip number `index` of a world with these scenes, and what it shows.
pub(super) fn clip(settings: &PretrainSettings, scenes: &[Scene], tag: u64, index: usize) -> (Frames, Scene) {
    let scene = scenes[index % scenes.len()];
    let data = &settings.data;
    let options = RenderOptions { num_frames: data.num_frames, height: data.height, width: data.width };
    (scene.render(&mut key(settings.seed, tag, index).rng(), &options), scene)
}

/// The latents of every training clip, normalised per channel.
pub(super) struct Latents {
    /// `[N]`[Z f h w]
    values: Vec<Vec<f32>>,
    /// Of each clip.
    shown: Vec<Scene>,
    /// All that the world has.
    scenes: Vec<Scene>,
    shape: [usize; 4],
    mean: Vec<f64>,
    std: Vec<f64>,
}

const ENCODE_BATCH: usize = 16;
const CLIP_TAG: u64 = 100;

impl Latents {
    /// Encodes every clip (posterior means) and measures mean and standard deviation of each channel.
    pub(super) fn encode(settings: &PretrainSettings, vae: &AutoencoderKlWan, device: &Device, report: &mut dyn FnMut(Progress)) -> Self {
        let scenes = settings.data.world.scenes();
        let count = scenes.len() * settings.data.clips_per_caption;
        let (mut values, mut shown, mut shape) = (Vec::new(), Vec::new(), [0; 4]);
        for from in (0..count).step_by(ENCODE_BATCH) {
            let to = (from + ENCODE_BATCH).min(count);
            let (clips, names): (Vec<_>, Vec<_>) = (from..to).map(|i| clip(settings, &scenes, CLIP_TAG, i)).unzip();
            let latents = vae.encode(video_tensor(&clips, device)).mean;
            let [_, z, f, h, w] = latents.dims();
            shape = [z, f, h, w];
            values.extend(to_floats(latents).chunks(z * f * h * w).map(<[f32]>::to_vec));
            shown.extend(names);
            report(Progress { stage: "latents", step: to, steps: count, loss: 0.0 });
        }
        let (mean, std) = channel_statistics(&values, shape);
        let per_channel = shape[1] * shape[2] * shape[3];
        for (i, value) in values.iter_mut().flat_map(|clip| clip.iter_mut().enumerate()) {
            let channel = i / per_channel;
            *value = ((f64::from(*value) - mean[channel]) / std[channel]) as f32;
        }
        Self { values, shown, scenes, shape, mean, std }
    }

    /// The autoencoder with these statistics in its configuration.
    pub(super) fn normalised_by(&self, mut vae: AutoencoderKlWan) -> AutoencoderKlWan {
        vae.config.latents_mean = self.mean.clone();
        vae.config.latents_std = self.std.clone();
        vae
    }

    /// A batch of clips drawn for `step`: latents [B, Z, f, h, w] and captions as the model gets to see them.
    pub(super) fn batch(&self, settings: &PretrainSettings, step: usize, device: &Device) -> (Tensor<5>, Vec<String>) {
        let mut rng = key(settings.seed, 101, step).rng();
        let [z, f, h, w] = self.shape;
        let size = settings.flow.batch_size;
        let (mut values, mut captions) = (Vec::with_capacity(size * z * f * h * w), Vec::with_capacity(size));
        for _ in 0..size {
            let index = index_below(&mut rng, self.values.len());
            values.extend_from_slice(&self.values[index]);
            captions.push(self.seen_caption(index, settings, &mut rng));
        }
        (Tensor::from_data(TensorData::new(values, [size, z, f, h, w]), device), captions)
    }

    /// The caption of a clip with noise: each part may be another of its kind, all may be gone.
    fn seen_caption(&self, index: usize, settings: &PretrainSettings, rng: &mut impl Rng) -> String {
        let mut scene = self.shown[index];
        for part in 0..scene.parts() {
            let (noise, other) = (uniform(rng), self.scenes[index_below(rng, self.scenes.len())]);
            if noise < settings.data.caption_noise {
                scene.take_from(&other, part);
            }
        }
        if uniform(rng) < settings.data.caption_dropout { String::new() } else { scene.to_string() }
    }
}

fn channel_statistics(clips: &[Vec<f32>], [z, f, h, w]: [usize; 4]) -> (Vec<f64>, Vec<f64>) {
    let per_channel = f * h * w;
    let count = (clips.len() * per_channel) as f64;
    let channel = |c: usize| clips.iter().flat_map(move |clip| &clip[c * per_channel..(c + 1) * per_channel]).map(|&v| f64::from(v));
    let mean: Vec<f64> = (0..z).map(|c| channel(c).sum::<f64>() / count).collect();
    let variance = |c: usize| channel(c).map(|v| (v - mean[c]).powi(2)).sum::<f64>() / count;
    let std = (0..z).map(|c| variance(c).sqrt().max(1e-6)).collect();
    (mean, std)
}
