//! Adapter files: PEFT folder, diffusers, ComfyUI (original names), musubi/kohya.
//!
//! Internally every layout is `NAME.lora_A|lora_B.weight` with the diffusers name of the layer, plus one (rank, alpha).

use super::{Lora, LoraConfig, LoraInit};
use crate::error::{Error, Result};
use crate::layers::LinearSite;
use crate::original;
use crate::weights::{WeightFiles, write_atomically, write_safetensors};
use burn::tensor::Device;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

const DIFFUSERS_FILE: &str = "pytorch_lora_weights.safetensors";
const PEFT_FILE: &str = "adapter_model.safetensors";
const PEFT_CONFIG: &str = "adapter_config.json";
const METADATA_KEY: &str = "lora_adapter_metadata";

/// An adapter read from disk, not yet attached.
#[derive(Debug, Clone)]
pub struct AdapterFile {
    /// Rank, alpha and adapted layers.
    pub config: LoraConfig,
    /// (layer, A [rank, in], B [out, rank]), row-major.
    pub tensors: Vec<(String, Vec<f32>, Vec<f32>)>,
    /// The file it was read from.
    pub path: PathBuf,
}

impl AdapterFile {
    /// Puts the adapter on a model.
    ///
    /// # Errors
    /// Layers the model does not have, or shapes that do not fit.
    pub fn attach(self, sites: &[LinearSite], device: &Device) -> Result<Lora> {
        Lora::attach_values(sites, &self.config, self.tensors, device).map_err(|error| error.in_file(&self.path))
    }
}

/// Writes `DIR/adapter_config.json` and `DIR/adapter_model.safetensors`, as `PeftModel.from_pretrained` reads them.
///
/// # Errors
/// The folder cannot be written.
pub fn save_peft(lora: &Lora, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|e| Error::write(dir, e))?;
    write_safetensors(&dir.join(PEFT_FILE), &renamed(lora, "base_model.model."), Some(pt_metadata()))?;
    let config = json!({
        "peft_type": "LORA",
        "auto_mapping": {
            "base_model_class": "WanTransformer3DModel",
            "parent_library": "diffusers.models.transformers.transformer_wan",
        },
        "base_model_name_or_path": null,
        "task_type": null,
        "inference_mode": true,
        "r": lora.config.rank,
        "lora_alpha": lora.config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": match lora.config.init { LoraInit::Gaussian => json!("gaussian"), LoraInit::Kaiming => json!(true) },
        "target_modules": lora.config.target_modules,
    });
    write_atomically(&dir.join(PEFT_CONFIG), format!("{config:#}\n").as_bytes())
}

/// Writes `DIR/pytorch_lora_weights.safetensors`, as `pipe.load_lora_weights(DIR)` reads it.
///
/// The header metadata carries alpha: without it diffusers takes alpha = rank, silently.
///
/// # Errors
/// The folder cannot be written.
pub fn save_diffusers(lora: &Lora, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|e| Error::write(dir, e))?;
    let config = json!({
        "transformer.r": lora.config.rank,
        "transformer.lora_alpha": lora.config.alpha,
        "transformer.target_modules": lora.config.target_modules,
    });
    let mut metadata = pt_metadata();
    metadata.insert(METADATA_KEY.into(), config.to_string());
    write_safetensors(&dir.join(DIFFUSERS_FILE), &renamed(lora, "transformer."), Some(metadata))
}

/// Writes one file with the original Wan names and `.alpha` tensors, as ComfyUI's LoRA loader reads it.
///
/// # Errors
/// The file cannot be written.
pub fn save_comfyui(lora: &Lora, path: &Path) -> Result<()> {
    let mut tensors = Tensors::new();
    for slot in lora.params.iter() {
        let (layer, end) = split_name(&slot.name);
        let layer = format!("diffusion_model.{}", original_name(layer));
        let end = if end == "lora_A" { "lora_down" } else { "lora_up" };
        tensors.insert(format!("{layer}.{end}.weight"), (slot.shape.clone(), values(slot)));
        tensors.insert(format!("{layer}.alpha"), (vec![], vec![lora.config.alpha as f32]));
    }
    write_safetensors(path, &tensors, Some(pt_metadata()))
}

fn pt_metadata() -> HashMap<String, String> {
    HashMap::from([("format".to_owned(), "pt".to_owned())])
}

fn renamed(lora: &Lora, prefix: &str) -> Tensors {
    lora.params.iter().map(|slot| (format!("{prefix}{}", slot.name), (slot.shape.clone(), values(slot)))).collect()
}

fn values(slot: &crate::param::Slot) -> Vec<f32> {
    crate::weights::to_floats(slot.value())
}

/// `X.lora_A.weight` -> (X, lora_A)
fn split_name(name: &str) -> (&str, &str) {
    let stem = name.trim_end_matches(".weight");
    stem.rsplit_once('.').unwrap_or((stem, ""))
}

/// Reads an adapter: a PEFT folder, a folder with `pytorch_lora_weights.safetensors`, or a file in any of the layouts.
///
/// `sites` are the model's layers: musubi's names cannot be undone without them.
///
/// # Errors
/// Nothing readable at `path`, keys of no known layout, an A without its B, ranks that differ between layers.
pub fn load(path: &Path, sites: &[LinearSite]) -> Result<AdapterFile> {
    let (file, peft) = locate(path)?;
    let files = WeightFiles::open_file(&file)?;
    let names = layer_names(sites);
    let mut pairs: BTreeMap<String, Pair> = BTreeMap::new();
    for key in files.names() {
        let (layer, part) = parse_key(key, &names).ok_or_else(|| {
            Error::invalid(
                &file,
                format!("tensor `{key}` belongs to no known LoRA layout, or to no layer of the model"),
                "supported: PEFT, diffusers, ComfyUI (diffusion_model.) and musubi (lora_unet_) names of Wan",
            )
        })?;
        pairs.entry(layer).or_default().add(part, files.floats(key)?, files.shape(key).unwrap_or_default());
    }
    let alpha = match peft {
        Some(config) => Some(config_alpha(&config, "")?),
        None => files.metadata().and_then(|m| m.get(METADATA_KEY)).and_then(|text| metadata_alpha(text)),
    };
    assemble(&file, pairs, alpha)
}

fn locate(path: &Path) -> Result<(PathBuf, Option<PathBuf>)> {
    if !path.is_dir() {
        return Ok((path.into(), None));
    }
    let (peft, diffusers) = (path.join(PEFT_FILE), path.join(DIFFUSERS_FILE));
    if peft.exists() {
        return Ok((peft, Some(path.join(PEFT_CONFIG))));
    }
    if diffusers.exists() {
        return Ok((diffusers, None));
    }
    Err(Error::invalid(
        path,
        format!("holds neither `{PEFT_FILE}` nor `{DIFFUSERS_FILE}`"),
        "give an adapter folder or a .safetensors file",
    ))
}

fn config_alpha(path: &Path, prefix: &str) -> Result<f64> {
    let config: serde_json::Value = crate::config::read_json(path)?;
    let key = format!("{prefix}lora_alpha");
    let alpha = config.get(&key).and_then(serde_json::Value::as_f64);
    alpha.ok_or_else(|| Error::invalid(path, format!("`{key}` is missing or not a number"), "PEFT writes it beside the weights"))
}

fn metadata_alpha(text: &str) -> Option<f64> {
    let config: serde_json::Value = serde_json::from_str(text).ok()?;
    config.get("transformer.lora_alpha")?.as_f64()
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Part {
    A,
    B,
    Alpha,
}

#[derive(Debug, Default)]
struct Pair {
    a: Option<(Vec<usize>, Vec<f32>)>,
    b: Option<(Vec<usize>, Vec<f32>)>,
    alpha: Option<f64>,
}

impl Pair {
    fn add(&mut self, part: Part, values: Vec<f32>, shape: Vec<usize>) {
        match part {
            Part::A => self.a = Some((shape, values)),
            Part::B => self.b = Some((shape, values)),
            Part::Alpha => self.alpha = values.first().map(|&v| f64::from(v)),
        }
    }
}

/// One rank and one alpha for the whole adapter; a layer with its own alpha has the difference put into its B.
fn assemble(file: &Path, pairs: BTreeMap<String, Pair>, alpha: Option<f64>) -> Result<AdapterFile> {
    let bad = |reason: String| Error::invalid(file, reason, "the adapter file is incomplete or of an unsupported kind");
    let mut tensors = Vec::new();
    let (mut rank, mut common) = (0, alpha);
    for (layer, pair) in pairs {
        let ((a_shape, a), (b_shape, mut b)) = pair.a.zip(pair.b).ok_or_else(|| bad(format!("layer `{layer}` has only one of A and B")))?;
        let fits = a_shape.len() == 2 && b_shape.len() == 2 && a_shape[0] == b_shape[1] && a_shape[0] > 0;
        if !fits {
            return Err(bad(format!("layer `{layer}` has A {a_shape:?} and B {b_shape:?}")));
        }
        if rank != 0 && rank != a_shape[0] {
            return Err(bad(format!("layer `{layer}` has rank {}, others {rank}", a_shape[0])));
        }
        rank = a_shape[0];
        let own = alpha.or(pair.alpha).unwrap_or(rank as f64);
        let common = *common.get_or_insert(own);
        if own != common {
            b.iter_mut().for_each(|v| *v *= (own / common) as f32);
        }
        tensors.push((layer, a, b));
    }
    if tensors.is_empty() {
        return Err(bad("it holds no LoRA tensor".into()));
    }
    let target_modules = tensors.iter().map(|(layer, ..)| layer.clone()).collect();
    let config = LoraConfig { rank, alpha: common.unwrap_or(rank as f64), target_modules, init: LoraInit::default() };
    Ok(AdapterFile { config, tensors, path: file.into() })
}

/// Every spelling of every layer's name -> the diffusers name.
fn layer_names(sites: &[LinearSite]) -> HashMap<String, String> {
    let mut names = HashMap::new();
    for site in sites {
        let original = original_name(&site.name);
        names.insert(format!("lora_unet_{}", original.replace('.', "_")), site.name.clone());
        names.insert(format!("diffusion_model.{original}"), site.name.clone());
        for prefix in ["", "transformer.", "base_model.model.", "diffusion_model."] {
            names.insert(format!("{prefix}{}", site.name), site.name.clone());
        }
    }
    names
}

fn parse_key(key: &str, names: &HashMap<String, String>) -> Option<(String, Part)> {
    const ENDS: [(&str, Part); 5] = [
        (".lora_A.weight", Part::A),
        (".lora_B.weight", Part::B),
        (".lora_down.weight", Part::A),
        (".lora_up.weight", Part::B),
        (".alpha", Part::Alpha),
    ];
    let (layer, part) = ENDS.iter().find_map(|(end, part)| key.strip_suffix(end).map(|layer| (layer, *part)))?;
    names.get(layer).map(|name| (name.clone(), part))
}

/// The name of a layer in the original Wan checkpoints.
fn original_name(name: &str) -> String {
    original::original_name(name).unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transformer::{TransformerConfig, WanTransformer};
    use crate::weights::Weights;
    use burn::tensor::DType;
    use std::collections::BTreeSet;

    /// The linear layers of a released model.
    fn sites(config: TransformerConfig) -> Vec<LinearSite> {
        let mut sites = Vec::new();
        Weights::declared(|w| {
            sites = WanTransformer::new(config, w, DType::BF16)?.linears;
            Ok(())
        })
        .expect("sizes of a released model");
        sites
    }

    /// Matrices among the published tensors that are no tables: what an adapter can sit on.
    fn published_layers(model: &str) -> BTreeSet<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../golden/real/{model}.transformer.shapes.json"));
        let shapes: BTreeMap<String, Vec<usize>> = crate::config::read_json(&path).expect("names and shapes");
        let layers = shapes.iter().filter(|(_, shape)| shape.len() > 1);
        layers.filter_map(|(name, _)| Some(name.strip_suffix(".weight")?.to_owned())).collect()
    }

    #[test]
    fn every_layout_names_every_layer_of_the_released_models() {
        for (config, model) in [(TransformerConfig::wan21_1_3b(), "wan2.1-t2v-1.3b"), (TransformerConfig::wan21_14b(), "wan2.1-t2v-14b")] {
            let (sites, layers) = (sites(config), published_layers(model));
            assert!(sites.iter().map(|site| site.name.clone()).collect::<BTreeSet<_>>() == layers, "{model}");
            let names = layer_names(&sites);
            let mut keys = BTreeSet::new();
            for layer in &layers {
                let original = original_name(layer);
                for (stem, ends) in [
                    (format!("transformer.{layer}"), ["lora_A", "lora_B"]),
                    (format!("base_model.model.{layer}"), ["lora_A", "lora_B"]),
                    (format!("diffusion_model.{original}"), ["lora_down", "lora_up"]),
                    (format!("lora_unet_{}", original.replace('.', "_")), ["lora_down", "lora_up"]),
                ] {
                    let keyed = [(ends[0], Part::A), (ends[1], Part::B)].map(|(end, part)| (format!("{stem}.{end}.weight"), part));
                    for (key, part) in keyed.into_iter().chain([(format!("{stem}.alpha"), Part::Alpha)]) {
                        assert_eq!(parse_key(&key, &names), Some((layer.clone(), part)), "{key}");
                        assert!(keys.insert(key.clone()), "{key} stands for two layers");
                    }
                }
            }
            assert_eq!(keys.len(), 4 * 3 * layers.len());
        }
    }
}
