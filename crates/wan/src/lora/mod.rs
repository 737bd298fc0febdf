//! Low-rank adapters: attached to any linear layer by name, saved and loaded in every layout in use.

mod files;
mod scale;

pub use files::{AdapterFile, load, save_comfyui, save_diffusers, save_peft};

use crate::error::{Error, Result};
use crate::layers::{Adapter, LinearSite};
use crate::param::{Param, ParamSet, Slot};
use burn::tensor::{Device, Tensor, TensorData};
use grpo::random::{Key, Purpose};
use serde::{Deserialize, Serialize};

/// Where the header of a file of diffusers has the adapter's config.
const METADATA_KEY: &str = "lora_adapter_metadata";

/// How `lora_A` starts; `lora_B` always starts at zero, so that a new adapter changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoraInit {
    /// Normal with standard deviation 1/rank (PEFT's `gaussian`, the published setting).
    #[default]
    Gaussian,
    /// Uniform in +-1/sqrt(in), PEFT's default.
    Kaiming,
}

/// An adapter's shape; names as in PEFT.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rank r.
    pub rank: usize,
    /// alpha; the scale is alpha / rank.
    pub alpha: f64,
    /// Layers to adapt: a full name, or the end of one at a dot (`to_q`, `ffn.net.0.proj`).
    pub target_modules: Vec<String>,
    /// Start of `lora_A`.
    #[serde(default)]
    pub init: LoraInit,
}

/// An attached adapter.
#[derive(Debug, Clone)]
pub struct Lora {
    /// Its shape.
    pub config: LoraConfig,
    /// `NAME.lora_A.weight` [rank, in] and `NAME.lora_B.weight` [out, rank] per adapted layer; of a convolution as
    /// [`LinearSite::adapter_shapes`] has them.
    pub params: ParamSet,
}

impl Lora {
    /// Puts a new adapter on every layer that `target_modules` names.
    ///
    /// # Errors
    /// rank 0, or an entry of `target_modules` that matches no layer.
    pub fn attach(sites: &[LinearSite], config: &LoraConfig, seed: u64, device: &Device) -> Result<Self> {
        Self::attach_to(0, sites, config, seed, device)
    }

    /// As [`attach`](Self::attach), to one of a model's networks: layers of the same name start differently in each.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn attach_to(network: u64, sites: &[LinearSite], config: &LoraConfig, seed: u64, device: &Device) -> Result<Self> {
        let targets = matching_sites(sites, &config.target_modules)?;
        let tensors = targets.iter().map(|site| {
            let prompt = crate::weights::name_id(&site.name);
            let key = Key { seed, iteration: 0, prompt, rollout: network, purpose: Purpose::AdapterInit };
            let a = initial_a(&key, [config.rank, site.in_features], config.init);
            (site.name.clone(), a, vec![0.0; site.out_features * config.rank])
        });
        Self::attach_values(sites, config, tensors.collect(), device)
    }

    /// Puts given values on layers: (name, A row-major [rank, in], B row-major [out, rank]).
    ///
    /// # Errors
    /// An unknown layer, or a number of elements that does not fit it.
    pub fn attach_values(
        sites: &[LinearSite],
        config: &LoraConfig,
        tensors: Vec<(String, Vec<f32>, Vec<f32>)>,
        device: &Device,
    ) -> Result<Self> {
        if config.rank == 0 {
            return Err(argument("rank", 0, "an adapter needs rank 1 or more", "16 is the published value"));
        }
        let mut params = ParamSet::default();
        for (name, a, b) in tensors {
            let site = sites.iter().find(|site| site.name == name).ok_or_else(|| unknown_layer(&name, sites))?;
            let [of_a, of_b] = site.adapter_shapes(config.rank);
            let a = slot(format!("{name}.lora_A.weight"), of_a, a, device)?;
            let b = slot(format!("{name}.lora_B.weight"), of_b, b, device)?;
            site.set_adapter(Some(Adapter {
                a: Param::matrix(a.clone()),
                b: Param::matrix(b.clone()),
                scale: config.alpha / config.rank as f64,
            }));
            params.push(a);
            params.push(b);
        }
        Ok(Self { config: config.clone(), params })
    }

    /// Takes every adapter off the layers.
    pub fn detach(sites: &[LinearSite]) {
        sites.iter().for_each(|site| site.set_adapter(None));
    }
}

/// The layers that `targets` name, in model order.
///
/// # Errors
/// An entry that matches no layer, with examples of layers that exist.
pub fn matching_sites<'a>(sites: &'a [LinearSite], targets: &[String]) -> Result<Vec<&'a LinearSite>> {
    for target in targets {
        if !sites.iter().any(|site| is_named(&site.name, target)) {
            return Err(argument("target_modules", target, "matches no linear layer of the model", &examples(sites)));
        }
    }
    Ok(sites.iter().filter(|site| targets.iter().any(|target| is_named(&site.name, target))).collect())
}

/// Whether `target` is the layer's name, or the end of it after a dot.
pub fn is_named(layer: &str, target: &str) -> bool {
    layer.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn initial_a(key: &Key, [rank, inputs]: [usize; 2], init: LoraInit) -> Vec<f32> {
    match init {
        LoraInit::Gaussian => key.normals(rank * inputs).into_iter().map(|z| z / rank as f32).collect(),
        LoraInit::Kaiming => crate::weights::uniform(key, rank * inputs, 1.0 / (inputs as f64).sqrt()),
    }
}

/// Whether a tensor of an adapter has as many elements as the layer asks for.
fn check_count(name: &str, shape: &[usize], count: usize) -> Result<()> {
    if shape.iter().try_fold(1, |product: usize, &size| product.checked_mul(size)) == Some(count) {
        return Ok(());
    }
    Err(argument("adapter tensor", name, &format!("{count} elements, expected shape {shape:?}"), "the adapter belongs to another model"))
}

fn slot(name: String, shape: Vec<usize>, values: Vec<f32>, device: &Device) -> Result<std::sync::Arc<Slot>> {
    check_count(&name, &shape, values.len())?;
    let count = values.len();
    let tensor = Tensor::from_data(TensorData::new(values, [count]), &device.clone().inner());
    Ok(Slot::new(name, shape, tensor))
}

fn unknown_layer(name: &str, sites: &[LinearSite]) -> Error {
    argument("adapter layer", name, "the model has no such linear layer", &examples(sites))
}

fn examples(sites: &[LinearSite]) -> String {
    let mut names: Vec<&str> = sites.iter().map(|site| site.name.as_str()).filter(|name| name.starts_with("blocks.0.")).collect();
    names.truncate(12);
    format!("layers of the first block: {}", names.join(", "))
}

fn argument(field: &'static str, value: impl ToString, reason: &str, hint: &str) -> Error {
    Error::Argument { field, value: value.to_string(), reason: reason.into(), hint: hint.into() }
}
