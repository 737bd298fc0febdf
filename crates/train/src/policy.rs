//! What is trained: a transformer with an adapter, or all of its weights; of a model with two networks, both.

use crate::settings::{PolicySettings, Settings, SettingsError, hint_for_choice};
use burn::tensor::{DType, Device, Tensor};
use std::path::Path;
use wan::error::{Error, Result};
use wan::experts::{Experts, SECOND, SecondExpert};
use wan::lora::{self, Lora, LoraConfig, is_named};
use wan::param::ParamSet;
use wan::transformer::{TransformerConfig, WanTransformer};
use wan::weights::{write_atomically, write_params};

/// A velocity network and the weights of it that the optimizer updates.
#[derive(Debug)]
pub struct Policy {
    /// The network; where there are two, that of the noisy steps.
    pub transformer: WanTransformer,
    /// The adapter; without one all weights are trained.
    pub lora: Option<Lora>,
    /// The network of the other steps, if there is one.
    pub second: Option<SecondExpert>,
    /// Its adapter.
    pub second_lora: Option<Lora>,
    /// Whether an update computes activations again, block by block, instead of keeping them (`train.activation_checkpointing`).
    pub activation_checkpointing: bool,
    /// The trained weights: those of the first network, then those of the second.
    params: ParamSet,
    /// The trained weights at the start: the reference policy.
    reference: Vec<Tensor<1>>,
}

impl Policy {
    /// Adapts `transformer` as `settings` say and makes the trained weights trainable.
    ///
    /// # Errors
    /// An entry of `target_modules` that matches no layer; rank 0.
    pub fn new(transformer: WanTransformer, settings: &PolicySettings, seed: u64, device: &Device) -> Result<Self> {
        Self::of_experts(transformer, None, settings, seed, device)
    }

    /// The same, of one network or of two.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_experts(
        transformer: WanTransformer,
        second: Option<SecondExpert>,
        settings: &PolicySettings,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let adapt = |network: u64, transformer: &WanTransformer| match settings {
            PolicySettings::Full => Ok(None),
            PolicySettings::Lora { rank, alpha, target_modules, init } => {
                let config = LoraConfig { rank: *rank, alpha: *alpha, target_modules: target_modules.clone(), init: *init };
                Lora::attach_to(network, &transformer.linears, &config, seed, device).map(Some)
            }
        };
        let lora = adapt(0, &transformer)?;
        let second_lora = second.as_ref().map(|second| adapt(1, &second.transformer)).transpose()?.flatten();
        Ok(Self::from_experts((transformer, lora), second.map(|second| (second, second_lora))))
    }

    /// A policy from a network whose adapter is already in place.
    pub fn from_parts(transformer: WanTransformer, lora: Option<Lora>) -> Self {
        Self::from_experts((transformer, lora), None)
    }

    /// A policy from one network or two, whose adapters are already in place.
    pub fn from_experts(first: (WanTransformer, Option<Lora>), second: Option<(SecondExpert, Option<Lora>)>) -> Self {
        let ((transformer, lora), (second, second_lora)) = (first, second.map_or((None, None), |(second, lora)| (Some(second), lora)));
        let mut params = trained(&transformer, lora.as_ref()).clone();
        if let Some(second) = &second {
            trained(&second.transformer, second_lora.as_ref()).iter().for_each(|slot| params.push(slot.clone()));
        }
        params.set_trainable(true);
        let reference = params.snapshot();
        Self { transformer, lora, second, second_lora, activation_checkpointing: false, params, reference }
    }

    /// The velocity networks.
    pub fn experts(&self) -> Experts<'_> {
        Experts { first: &self.transformer, second: self.second.as_ref() }
    }

    /// Runs `work` with activations of another dtype over the same weights, in all networks: see [`WanTransformer::with_activations`].
    pub fn with_activations<R>(&self, dtype: DType, work: impl FnOnce() -> R) -> R {
        self.transformer.with_activations(dtype, || match &self.second {
            Some(second) => second.transformer.with_activations(dtype, work),
            None => work(),
        })
    }

    /// The network, 0 or 1, that takes the step at a timestep.
    pub fn network(&self, timestep: f64) -> usize {
        self.experts().boundary().map_or(0, |boundary| boundary.network(timestep))
    }

    /// Where the weights are.
    pub fn device(&self) -> Device {
        self.params.iter().next().map_or_else(Device::flex, |slot| slot.value().device().inner())
    }

    /// The trained weights.
    pub fn params(&self) -> &ParamSet {
        &self.params
    }

    /// Of each trained weight, in the order of [`params`](Self::params): its network, and a name that it has alone.
    pub fn names(&self) -> Vec<(usize, String)> {
        let of_first = trained(&self.transformer, self.lora.as_ref()).len();
        let name = |(i, name): (usize, &String)| if i < of_first { (0, name.clone()) } else { (1, format!("{SECOND}.{name}")) };
        self.params.iter().map(|slot| &slot.name).enumerate().map(name).collect()
    }

    /// Runs `work` with other values of the trained weights, then puts the present ones back.
    pub fn with_weights<R>(&self, values: &[Tensor<1>], work: impl FnOnce() -> R) -> R {
        self.params().with_values(values, work)
    }

    /// Runs `work` with the reference policy: the weights at the start of the run.
    pub fn with_reference<R>(&self, work: impl FnOnce() -> R) -> R {
        self.with_weights(&self.reference, work)
    }

    /// Writes what was trained into `dir`: an adapter in the layouts of PEFT, diffusers and ComfyUI, or `transformer/`; that of a second
    /// network likewise into `transformer_2/`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn save(&self, dir: &Path) -> Result<()> {
        match &self.lora {
            Some(lora) => save_adapter(lora, dir)?,
            None => save_transformer(&self.transformer, &dir.join("transformer"))?,
        }
        match (&self.second, &self.second_lora) {
            (None, _) => Ok(()),
            (Some(_), Some(lora)) => save_adapter(lora, &dir.join(SECOND)),
            (Some(second), None) => save_transformer(&second.transformer, &dir.join(SECOND)),
        }
    }
}

/// The linear layers of a network that `policy.target_modules` names: (name, inputs, outputs). None where all weights are trained.
///
/// # Errors
/// An entry that no layer has as its name, or as the end of its name at a dot.
pub fn adapted_layers(settings: &Settings, config: &TransformerConfig) -> Result<Vec<(String, usize, usize)>, SettingsError> {
    let PolicySettings::Lora { target_modules, .. } = &settings.policy else { return Ok(Vec::new()) };
    let layers = config.linear_layers();
    for target in target_modules {
        if !layers.iter().any(|(name, ..)| is_named(name, target)) {
            let field = "policy.target_modules";
            let message = format!("`{field}` has `{target}`, which matches no linear layer of the model");
            let place = settings.model.path.display().to_string();
            return Err(SettingsError::new(place, field, message, hint_for_choice(target, &endings(&layers))));
        }
    }
    Ok(layers.into_iter().filter(|(name, ..)| target_modules.iter().any(|target| is_named(name, target))).collect())
}

/// What to call layers: those of the blocks by what all blocks have in common, then the others.
fn endings(layers: &[(String, usize, usize)]) -> Vec<&str> {
    let names = || layers.iter().map(|(name, ..)| name.as_str());
    let of_blocks = names().filter_map(|name| name.strip_prefix("blocks.")?.split_once('.')).map(|(_, layer)| {
        let attention = ["attn1.", "attn2."].iter().find_map(|attention| layer.strip_prefix(attention));
        attention.unwrap_or(layer)
    });
    let mut endings: Vec<&str> = Vec::new();
    for ending in of_blocks.chain(names().filter(|name| !name.starts_with("blocks."))) {
        if !endings.contains(&ending) {
            endings.push(ending);
        }
    }
    endings
}

/// The weights of a network that are trained.
fn trained<'a>(transformer: &'a WanTransformer, lora: Option<&'a Lora>) -> &'a ParamSet {
    lora.map_or(&transformer.params, |lora| &lora.params)
}

fn save_adapter(lora: &Lora, dir: &Path) -> Result<()> {
    lora::save_peft(lora, dir)?;
    lora::save_diffusers(lora, dir)?;
    lora::save_comfyui(lora, &dir.join("comfyui.safetensors"))
}

fn save_transformer(transformer: &WanTransformer, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|e| Error::write(dir, e))?;
    write_atomically(&dir.join("config.json"), transformer.config.to_json().as_bytes())?;
    write_params(&dir.join("diffusion_pytorch_model.safetensors"), &transformer.params)
}
