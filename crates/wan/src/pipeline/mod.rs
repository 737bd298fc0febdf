//! From a prompt, and an image for some models, to a video: the pipeline over a diffusers model folder.
//!
//! Legend: `B` batch, `C` latent channels, `f`, `h`, `w` size of the latents, `F`, `H`, `W` size of the video.

mod folder;
mod request;
mod scheduler;

pub use request::SampleRequest;
pub use scheduler::SchedulerConfig;

use crate::clip::{ClipVision, ClipVisionConfig};
use crate::error::{Error, Result};
use crate::experts::{Boundary, Experts, SECOND, SecondExpert};
use crate::guidance::{GuidanceBatching, GuidanceScales, GuidedText, GuidedVelocity};
use crate::image::{ImageCondition, ImageInput};
use crate::solver::{Solver, SolverKind};
use crate::text::PromptEncoder;
use crate::transformer::{TransformerConfig, WanTransformer};
use crate::umt5::Umt5Config;
use crate::vae::{AutoencoderKlWan, VaeConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use grpo::{Key, Purpose, Schedule};
use std::path::Path;

/// A whole text-to-video or image-to-video model.
#[derive(Debug)]
pub struct WanPipeline {
    /// The velocity network; where there are two, that of the noisy steps.
    pub transformer: WanTransformer,
    /// The one for the other steps, if there is one.
    pub second: Option<SecondExpert>,
    /// Latents to video and back; always f32.
    pub vae: AutoencoderKlWan,
    /// Prompts to embeddings.
    pub text_encoder: PromptEncoder,
    /// Images to what the network attends to, in Wan2.1 image-to-video.
    pub image_encoder: Option<ClipVision>,
    /// How images reach the network.
    pub image_input: ImageInput,
    /// How the model's authors sample from it.
    pub scheduler: SchedulerConfig,
    device: Device,
}

/// What the pipeline made.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Denoised latents [1, C, f, h, w], as the transformer knows them (normalised).
    pub latents: Tensor<5>,
    /// The video [1, 3, F, H, W] in [0, 1].
    pub frames: Tensor<5>,
}

impl WanPipeline {
    /// Reads a model folder. The frozen weights of the transformer are held as `dtype` (f32 or bf16), the rest is f32; a large text encoder
    /// is not held at all, but read whenever there is a prompt to encode.
    ///
    /// # Errors
    /// No such folder; files missing (all named at once); another kind of model; a part that cannot be read, or whose
    /// sizes do not fit the others.
    pub fn load(dir: &Path, device: &Device, dtype: DType) -> Result<Self> {
        let (transformer, vae) = Self::load_without_text(dir, device, dtype)?;
        let second = SecondExpert::load(dir, device, dtype)?;
        let text_encoder = PromptEncoder::open(dir, device, DType::F32)?;
        let scheduler = SchedulerConfig::load(&dir.join("scheduler"))?;
        let image_encoder = Self::load_image_encoder(dir, &transformer.config, device)?;
        let image_input = ImageInput::of_folder(dir)?;
        Ok(Self { scheduler, transformer, second, vae, text_encoder, image_encoder, image_input, device: device.clone() })
    }

    /// The image encoder, if the network needs one.
    ///
    /// # Errors
    /// As [`ClipVision::load`].
    pub fn load_image_encoder(dir: &Path, transformer: &TransformerConfig, device: &Device) -> Result<Option<ClipVision>> {
        transformer.image_dim.map(|_| ClipVision::load(dir, device)).transpose()
    }

    /// The parts that denoise and decode, for a caller that has the embeddings of its prompts already; a second network is
    /// [`SecondExpert::load`]'s. Dtypes as for [`load`](Self::load).
    ///
    /// # Errors
    /// As [`load`](Self::load); the text encoder has to be there, but its weights are not read.
    pub fn load_without_text(dir: &Path, device: &Device, dtype: DType) -> Result<(WanTransformer, AutoencoderKlWan)> {
        Self::check(dir)?;
        let transformer = WanTransformer::load(&dir.join("transformer"), device, dtype)?;
        Ok((transformer, AutoencoderKlWan::load(&dir.join("vae"), device, DType::F32)?))
    }

    /// Whether a folder holds a model that can be loaded; reads its configs.
    ///
    /// # Errors
    /// As [`load`](Self::load), but for the weights.
    pub fn check(dir: &Path) -> Result<()> {
        folder::check(dir)?;
        SchedulerConfig::load(&dir.join("scheduler"))?;
        let transformer = TransformerConfig::load(&dir.join("transformer/config.json"))?;
        let vae = VaeConfig::read(&dir.join("vae/config.json"))?;
        let text = Umt5Config::load(&dir.join("text_encoder"))?;
        check_parts(dir, &transformer, &vae, &text)?;
        if Boundary::of_folder(dir)?.is_none() {
            return Ok(());
        }
        let second = TransformerConfig::load(&dir.join(SECOND).join("config.json"))?;
        let places = |config: &TransformerConfig| (config.patch_size, config.rope_max_seq_len);
        if places(&second) != places(&transformer) {
            let [first, second] = [places(&transformer), places(&second)];
            let reason = format!("`patch_size` and `rope_max_seq_len` are {first:?} in transformer/ and {second:?} in {SECOND}/");
            return Err(Error::invalid(dir, reason, "both networks must be those of one model"));
        }
        check_parts(dir, &second, &vae, &text)
    }

    /// Whether the model in a folder can serve a request; reads its configs.
    ///
    /// # Errors
    /// As [`check`](Self::check) and [`sample`](Self::sample).
    pub fn check_request(dir: &Path, request: &SampleRequest) -> Result<()> {
        Self::check(dir)?;
        let transformer = TransformerConfig::load(&dir.join("transformer/config.json"))?;
        let shape = request.check(&transformer, &VaeConfig::read(&dir.join("vae/config.json"))?)?;
        request.check_guidance(Boundary::of_folder(dir)?.is_some())?;
        request.schedule(&SchedulerConfig::load(&dir.join("scheduler"))?)?;
        request.check_start(shape)?;
        let encoder = transformer.image_dim.map(|_| ClipVisionConfig::of_folder(dir)).transpose()?;
        request.image(ImageInput::of_folder(dir)?, encoder.as_ref(), &Device::flex()).map(drop)
    }

    /// The velocity networks.
    pub fn experts(&self) -> Experts<'_> {
        Experts { first: &self.transformer, second: self.second.as_ref() }
    }

    /// Makes one video. `on_step(done, total)` is called after every denoising step.
    ///
    /// # Errors
    /// A request that this model cannot serve.
    pub fn sample(&self, request: &SampleRequest, on_step: &mut dyn FnMut(usize, usize)) -> Result<Sample> {
        let shape = request.check(&self.transformer.config, &self.vae.config)?;
        request.check_guidance(self.second.is_some())?;
        let schedule = request.schedule(&self.scheduler)?;
        let latents = request.start(shape, &self.device)?;
        let encoder = self.image_encoder.as_ref();
        let image = request.image(self.image_input, encoder.map(|encoder| &encoder.config), &self.device)?;
        let image = image.map(|image| ImageCondition::new(self.image_input, &self.vae, encoder, image, request.num_frames));
        let text = self.guided_text(request, image.as_ref())?;
        let velocity = self.guided_velocity(&text, request.guidance(), shape).with_image(image);
        let solver = request.solver.unwrap_or(self.scheduler.solver);
        let total = schedule.num_steps();
        let latents = denoise(&velocity, solver, &schedule, latents, &mut |step, _| on_step(step + 1, total));
        let frames = self.vae.decode_to_frames(latents.clone());
        Ok(Sample { latents, frames })
    }

    fn guided_text(&self, request: &SampleRequest, image: Option<&ImageCondition>) -> Result<GuidedText> {
        // in one call: a large encoder is read once for both
        let mut prompts = vec![request.prompt.as_str()];
        prompts.extend(request.has_guidance().then_some(request.negative_prompt.as_str()));
        let embeds = self.text_encoder.encode(&prompts, request.max_sequence_length)?;
        let negative = (prompts.len() > 1).then(|| embeds.select(&[1]));
        let features = image.and_then(|image| image.features.clone());
        Ok(GuidedText::with_image(self.experts(), &embeds.select(&[0]), negative.as_ref(), features, false))
    }

    /// The guided velocity of one sample with latents of `shape`.
    fn guided_velocity(&self, text: &GuidedText, guidance: GuidanceScales, shape: [usize; 5]) -> GuidedVelocity<'_> {
        let batching = GuidanceBatching::for_tokens(self.transformer.num_tokens(shape));
        GuidedVelocity::new(self.experts(), text, &[0], guidance, batching)
    }
}

/// The parts must agree about the latents and about the text.
fn check_parts(dir: &Path, transformer: &TransformerConfig, vae: &VaeConfig, text: &Umt5Config) -> Result<()> {
    let read = match transformer.starts_with_image() {
        true => ("vae z_dim, with the channels of an image,", vae.z_dim + ImageCondition::num_channels(vae)),
        false => ("vae z_dim", vae.z_dim),
    };
    let encoder = transformer.image_dim.map(|dim| Ok::<_, Error>((dim, ClipVisionConfig::of_folder(dir)?.hidden_size))).transpose()?;
    let (image_dim, features) = encoder.unwrap_or_default();
    let pairs = [
        ("transformer image_dim", image_dim, "image_encoder hidden_size", features),
        ("transformer in_channels", transformer.in_channels, read.0, read.1),
        ("transformer out_channels", transformer.out_channels, "vae z_dim", vae.z_dim),
        ("transformer text_dim", transformer.text_dim, "text_encoder d_model", text.d_model),
    ];
    for (name, size, other, expected) in pairs {
        if size != expected {
            let reason = format!("{name} is {size}, but {other} is {expected}");
            return Err(Error::invalid(dir, reason, "transformer/, vae/ and text_encoder/ must be those of one model"));
        }
    }
    Ok(())
}

/// Takes latents [B, C, f, h, w] from noise to data. `on_step(step, next_latents)` is called after every step, with the part that is denoised
/// ([`GuidedVelocity::unknown`]).
pub fn denoise(
    velocity: &GuidedVelocity<'_>,
    solver: SolverKind,
    schedule: &Schedule,
    latents: Tensor<5>,
    on_step: &mut dyn FnMut(usize, &Tensor<5>),
) -> Tensor<5> {
    let mut solver = Solver::new(solver, schedule.clone());
    let mut latents = velocity.unknown(latents);
    for step in 0..schedule.num_steps() {
        let v = velocity.velocity(latents.clone(), &[schedule.timestep(step)]);
        latents = solver.step(step, v, latents);
        on_step(step, &latents);
    }
    velocity.whole(latents)
}

/// Standard normal latents of `shape`: a function of the key, drawn on the CPU in f32.
pub fn initial_noise(key: &Key, shape: [usize; 5], device: &Device) -> Tensor<5> {
    let values = key.normals(shape.iter().product());
    Tensor::from_data(TensorData::new(values, shape), &device.clone().inner())
}

/// The noise of a single sample: evaluation noise of prompt 0.
fn sample_key(seed: u64) -> Key {
    Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::EvalNoise }
}
