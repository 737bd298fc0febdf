//! Training the embedded moving-shapes model from scratch: autoencoder first, then text encoder and transformer together by
//! flow matching on its latents.
//!
//! Each stage keeps its progress in `OUTPUT/.pretrain/` and continues from there.

mod autoencoder;
mod data;
mod flow;
mod settings;
mod stage;

pub use settings::PretrainSettings;

use burn::tensor::Device;
use std::path::Path;
use wan::error::{Error, Result};

/// What a stage reports while it runs.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// `autoencoder`, `latents` or `flow`.
    pub stage: &'static str,
    /// Steps done.
    pub step: usize,
    /// Steps in all.
    pub steps: usize,
    /// Mean loss since the last report.
    pub loss: f64,
}

/// Runs or continues all stages and writes the model folder `settings.output`.
///
/// # Errors
/// A folder that cannot be written, or progress of a different recipe in it.
pub fn pretrain(settings: &PretrainSettings, device: &Device, report: &mut dyn FnMut(Progress)) -> Result<()> {
    let work = settings.output.join(".pretrain");
    std::fs::create_dir_all(&work).map_err(|e| Error::write(&work, e))?;
    let vae = autoencoder::train(settings, &work, device, report)?;
    let latents = data::Latents::encode(settings, &vae, device, report);
    let vae = latents.normalised_by(vae);
    let model = flow::train(settings, &latents, &work, device, report)?;
    write_model(settings, &vae, &model, &settings.output)
}

/// Writes the diffusers folder layout.
fn write_model(settings: &PretrainSettings, vae: &wan::vae::AutoencoderKlWan, model: &flow::FlowModel, dir: &Path) -> Result<()> {
    for part in ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"] {
        let part = dir.join(part);
        std::fs::create_dir_all(&part).map_err(|e| Error::write(&part, e))?;
    }
    vae.save(&dir.join("vae"))?;
    model.save(dir)?;
    let json = |path: &str, value: serde_json::Value| wan::weights::write_atomically(&dir.join(path), format!("{value:#}\n").as_bytes());
    json("scheduler/scheduler_config.json", settings.scheduler_config())?;
    json("model_index.json", settings::model_index())
}
