//! What is trained: a transformer with an adapter, or all of its weights.

use crate::settings::PolicySettings;
use burn::tensor::{Device, Tensor};
use std::path::Path;
use wan::error::{Error, Result};
use wan::lora::{self, Lora, LoraConfig};
use wan::param::ParamSet;
use wan::transformer::WanTransformer;
use wan::weights::{write_atomically, write_params};

/// A velocity network and the weights of it that the optimizer updates.
#[derive(Debug)]
pub struct Policy {
    /// The network.
    pub transformer: WanTransformer,
    /// The adapter; without one all weights are trained.
    pub lora: Option<Lora>,
    /// Whether an update computes activations again, block by block, instead of keeping them (`train.activation_checkpointing`).
    pub activation_checkpointing: bool,
    /// The trained weights at the start: the reference policy.
    reference: Vec<Tensor<1>>,
}

impl Policy {
    /// Adapts `transformer` as `settings` say and makes the trained weights trainable.
    ///
    /// # Errors
    /// An entry of `target_modules` that matches no layer; rank 0.
    pub fn new(transformer: WanTransformer, settings: &PolicySettings, seed: u64, device: &Device) -> Result<Self> {
        let lora = match settings {
            PolicySettings::Full => None,
            PolicySettings::Lora { rank, alpha, target_modules, init } => {
                let config = LoraConfig { rank: *rank, alpha: *alpha, target_modules: target_modules.clone(), init: *init };
                Some(Lora::attach(&transformer.linears, &config, seed, device)?)
            }
        };
        Ok(Self::from_parts(transformer, lora))
    }

    /// A policy from a network whose adapter is already in place.
    pub fn from_parts(transformer: WanTransformer, lora: Option<Lora>) -> Self {
        let policy = Self { reference: Vec::new(), transformer, lora, activation_checkpointing: false };
        policy.params().set_trainable(true);
        Self { reference: policy.params().snapshot(), ..policy }
    }

    /// The trained weights.
    pub fn params(&self) -> &ParamSet {
        self.lora.as_ref().map_or(&self.transformer.params, |lora| &lora.params)
    }

    /// Runs `work` with other values of the trained weights, then puts the present ones back.
    pub fn with_weights<R>(&self, values: &[Tensor<1>], work: impl FnOnce() -> R) -> R {
        self.params().with_values(values, work)
    }

    /// Runs `work` with the reference policy: the weights at the start of the run.
    pub fn with_reference<R>(&self, work: impl FnOnce() -> R) -> R {
        self.with_weights(&self.reference, work)
    }

    /// Writes what was trained into `dir`: an adapter in the layouts of PEFT, diffusers and ComfyUI, or `transformer/`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let Some(lora) = &self.lora else {
            let dir = dir.join("transformer");
            std::fs::create_dir_all(&dir).map_err(|e| Error::write(&dir, e))?;
            write_atomically(&dir.join("config.json"), self.transformer.config.to_json().as_bytes())?;
            return write_params(&dir.join("diffusion_pytorch_model.safetensors"), self.params());
        };
        lora::save_peft(lora, dir)?;
        lora::save_diffusers(lora, dir)?;
        lora::save_comfyui(lora, &dir.join("comfyui.safetensors"))
    }
}
