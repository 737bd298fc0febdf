//! Stage 1: the autoencoder.

use super::Progress;
use super::data::{clip, key, video_tensor};
use super::settings::PretrainSettings;
use burn::tensor::{Device, Tensor, TensorData};
use std::path::Path;
use wan::error::Result;
use wan::vae::AutoencoderKlWan;

/// Weight of the divergence from a unit normal, per latent element: keeps the latents at unit scale and smooth.
const KL_WEIGHT: f64 = 1e-4;

/// Trains, or reads, the autoencoder.
///
/// ```text
/// loss = mean|x^ - x| + mean (x^ - x)^2 + KL_WEIGHT * mean 1/2 (mu^2 + s^2 - 1 - ln s^2)
/// ```
pub(super) fn train(
    settings: &PretrainSettings,
    work: &Path,
    device: &Device,
    report: &mut dyn FnMut(Progress),
) -> Result<AutoencoderKlWan> {
    let stage = &settings.autoencoder;
    let vae = AutoencoderKlWan::random(stage.config.clone(), settings.seed, device)?;
    let scenes = settings.data.world.scenes();
    let mut loss_of = |step: usize| {
        let clips: Vec<_> = (0..stage.batch_size).map(|i| clip(settings, &scenes, 1 + i as u64, pick(settings, step, i)).0).collect();
        let x = video_tensor(&clips, device).autodiff();
        let posterior = vae.encode(x.clone());
        let (mean, logvar) = (posterior.mean, posterior.logvar);
        let noise = key(settings.seed, 200, step).normals(mean.shape().num_elements());
        let noise: Tensor<5> = Tensor::from_data(TensorData::new(noise, mean.dims()), device);
        let z = mean.clone() + logvar.clone().mul_scalar(0.5).exp() * noise.autodiff();
        let error = vae.decode_unclamped(z) - x;
        let reconstruction = error.clone().abs().mean() + error.powi_scalar(2).mean();
        let divergence = (mean.powi_scalar(2) + logvar.clone().exp() - logvar).sub_scalar(1.0).mean().mul_scalar(0.5);
        reconstruction + divergence.mul_scalar(KL_WEIGHT)
    };
    super::stage::run("autoencoder", stage, &vae.params, work, report, &mut loss_of)?;
    Ok(vae)
}

/// Which clip is sample `i` of `step`: no two steps see the same.
fn pick(settings: &PretrainSettings, step: usize, i: usize) -> usize {
    // a stride coprime to the 72 captions and to the 1000 signs, so that a batch mixes what they are made of
    (step * settings.autoencoder.batch_size + i) * 31
}
