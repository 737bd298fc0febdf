//! Adapter files: PEFT folder, diffusers, ComfyUI (original names), musubi/kohya.
//!
//! Internally every layout is `NAME.lora_A|lora_B.weight` with the diffusers name of the layer, plus one (rank, alpha).

use super::scale::Scales;
use super::{Lora, LoraConfig, LoraInit, METADATA_KEY};
use crate::error::{Error, Result};
use crate::layers::LinearSite;
use crate::original;
use crate::weights::{WeightFiles, pt_metadata, write_atomically, write_each, write_safetensors};
use burn::tensor::Device;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

const DIFFUSERS_FILE: &str = "pytorch_lora_weights.safetensors";
const PEFT_FILE: &str = "adapter_model.safetensors";
/// What PEFT puts before a layer's name.
const PEFT_PREFIX: &str = "base_model.model.";
const PEFT_CONFIG: &str = "adapter_config.json";

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
    /// Layers the model does not have, or shapes that do not fit: not the layers it was read for.
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
    write_renamed(&dir.join(PEFT_FILE), lora, PEFT_PREFIX, pt_metadata())?;
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
    write_renamed(&dir.join(DIFFUSERS_FILE), lora, "transformer.", metadata)
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

fn write_renamed(path: &Path, lora: &Lora, prefix: &str, metadata: HashMap<String, String>) -> Result<()> {
    let tensors = lora.params.iter().map(|slot| (format!("{prefix}{}", slot.name), (slot.shape.clone(), slot))).collect();
    write_each(path, &tensors, Some(metadata), |slot| values(slot).into())
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
/// Nothing readable at `path`, keys of no known layout, an A without its B, a config that asks for another kind of adapter, shapes that do not
/// fit the layers.
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
    let scales = match &peft {
        Some(config) => Some(Scales::of_config(config)?),
        None => files.metadata().and_then(|m| m.get(METADATA_KEY)).map(|text| Scales::of_metadata(&file, text)).transpose()?.flatten(),
    };
    if scales.is_none() && files.names().any(|key| key.starts_with(PEFT_PREFIX)) && pairs.values().all(|pair| pair.alpha.is_none()) {
        let reason = format!("its names are PEFT's, but there is no `{PEFT_CONFIG}` with their alpha");
        return Err(Error::invalid(&file, reason, "give the folder that holds both files"));
    }
    if let Some(scales) = &scales {
        let layers: Vec<&str> = sites.iter().map(|site| site.name.as_str()).collect();
        scales.check(peft.unwrap_or_else(|| file.clone()), &layers)?;
    }
    assemble(&file, pairs, scales.as_ref(), sites)
}

fn locate(path: &Path) -> Result<(PathBuf, Option<PathBuf>)> {
    if !path.is_dir() {
        let config = path.with_file_name(PEFT_CONFIG);
        let is_peft = path.file_name().is_some_and(|name| name == PEFT_FILE) && config.is_file();
        return Ok((path.into(), is_peft.then_some(config)));
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

/// The two matrices of a layer, and the alpha with which `alpha / rank` is its scale.
struct Layer {
    name: String,
    rank: usize,
    alpha: f64,
    a: Vec<f32>,
    b: Vec<f32>,
}

/// One rank and one alpha for the whole adapter: those of the largest layers. Others are filled up with zeros, and the difference in scale is
/// put into their B. An alpha of 0 switches its layer off, as in PEFT and ComfyUI, and says nothing about the others.
fn assemble(file: &Path, pairs: BTreeMap<String, Pair>, scales: Option<&Scales>, sites: &[LinearSite]) -> Result<AdapterFile> {
    let bad = |reason: String| Error::invalid(file, reason, "the adapter file is incomplete or of an unsupported kind");
    let mut layers = Vec::with_capacity(pairs.len());
    for (name, pair) in pairs {
        let ((a_shape, a), (b_shape, b)) = pair.a.zip(pair.b).ok_or_else(|| bad(format!("layer `{name}` has only one of A and B")))?;
        let site = sites.iter().find(|site| site.name == name).ok_or_else(|| super::unknown_layer(&name, sites))?;
        let rank = rank_of(site, &a_shape, &b_shape).ok_or_else(|| {
            let (inputs, outputs) = (site.in_features, site.out_features);
            let reason = format!("layer `{name}` has A {a_shape:?} and B {b_shape:?}, expected [rank, {inputs}] and [{outputs}, rank]");
            Error::invalid(file, reason, "the adapter belongs to another model, or is of an unsupported kind")
        })?;
        let alpha = scales.map(|scales| scales.alpha(&name, rank)).or(pair.alpha).unwrap_or(rank as f64);
        if !(alpha as f32).is_finite() {
            let hint = "the file is damaged, or its training diverged; 0 switches a layer off";
            return Err(Error::invalid(file, format!("layer `{name}` has alpha {alpha}"), hint));
        }
        layers.push(Layer { name, rank, alpha, a, b });
    }
    let rank = layers.iter().map(|layer| layer.rank).max().ok_or_else(|| bad("it holds no LoRA tensor".into()))?;
    // the first of the largest rank
    let on = layers.iter().rev().filter(|layer| layer.alpha != 0.0).max_by_key(|layer| layer.rank);
    let alpha = on.map_or(rank as f64, |layer| layer.alpha);
    let tensors: Vec<_> = layers.into_iter().map(|layer| layer.with(rank, alpha)).collect();
    let target_modules = tensors.iter().map(|(layer, ..)| layer.clone()).collect();
    let config = LoraConfig { rank, alpha, target_modules, init: LoraInit::default() };
    Ok(AdapterFile { config, tensors, path: file.into() })
}

/// Rank of the A [rank, in] and B [out, rank] of a layer. Those of a convolution may have its kernel: A [rank, ..kernel], B [out, rank, 1, ..].
fn rank_of(site: &LinearSite, a: &[usize], b: &[usize]) -> Option<usize> {
    let (&[rank, ref inputs @ ..], &[outputs, columns, ref ones @ ..]) = (a, b) else { return None };
    let a_fits = inputs == [site.in_features] || inputs == site.kernel;
    let b_fits = [outputs, columns] == [site.out_features, rank] && ones.iter().all(|&size| size == 1);
    (a_fits && b_fits && rank > 0).then_some(rank)
}

impl Layer {
    /// (name, A, B) of the same product in an adapter of another rank and alpha.
    fn with(self, rank: usize, alpha: f64) -> (String, Vec<f32>, Vec<f32>) {
        let Self { name, mut a, mut b, .. } = self;
        if (rank, alpha) == (self.rank, self.alpha) {
            return (name, a, b);
        }
        let scale = (self.alpha / self.rank as f64) / (alpha / rank as f64);
        if scale != 1.0 {
            b.iter_mut().for_each(|value| *value *= scale as f32);
        }
        if rank != self.rank {
            a.resize(a.len() / self.rank * rank, 0.0);
            b = b.chunks_exact(self.rank).flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, rank - self.rank))).collect();
        }
        (name, a, b)
    }
}

/// Every spelling of every layer's name -> the diffusers name.
fn layer_names(sites: &[LinearSite]) -> HashMap<String, String> {
    let mut names = HashMap::new();
    for site in sites {
        let original = original_name(&site.name);
        names.insert(format!("lora_unet_{}", original.replace('.', "_")), site.name.clone());
        names.insert(format!("diffusion_model.{original}"), site.name.clone());
        for prefix in ["", "transformer.", PEFT_PREFIX, "diffusion_model."] {
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
    use std::collections::BTreeSet;

    /// Matrices among the published tensors that are no tables: what an adapter can sit on.
    fn published_layers(model: &str) -> BTreeSet<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../golden/real/{model}.transformer.shapes.json"));
        let shapes: BTreeMap<String, Vec<usize>> = crate::config::read_json(&path).expect("names and shapes");
        let layers = shapes.iter().filter(|(_, shape)| shape.len() > 1);
        layers.filter_map(|(name, _)| Some(name.strip_suffix(".weight")?.to_owned())).collect()
    }

    /// B A scaled, [out, in].
    fn product(a: &[f32], b: &[f32], rank: usize, alpha: f64) -> Vec<f32> {
        let inputs = a.len() / rank;
        let entry = |row: &[f32], i: usize| (0..rank).map(|k| row[k] * a[k * inputs + i]).sum::<f32>() * (alpha / rank as f64) as f32;
        b.chunks_exact(rank).flat_map(|row| (0..inputs).map(move |i| entry(row, i))).collect()
    }

    #[test]
    fn a_layer_of_lower_rank_is_filled_up_to_the_same_product() {
        let (a, b) = (vec![1.0, 2.0, 3.0, -4.0, 5.0, 6.0], vec![1.0, -2.0, 3.0, 4.0]);
        let layer = Layer { name: "x".into(), rank: 2, alpha: 4.0, a: a.clone(), b: b.clone() };
        let (_, padded_a, padded_b) = layer.with(8, 2.0);
        assert_eq!((padded_a.len(), padded_b.len()), (8 * 3, 2 * 8));
        assert_eq!(product(&padded_a, &padded_b, 8, 2.0), product(&a, &b, 2, 4.0));
    }

    #[test]
    fn shapes_of_adapters() {
        let sites = WanTransformer::sites(TransformerConfig::wan21_1_3b()).expect("sizes of a released model");
        for (name, a, b, rank) in [
            ("proj_out", vec![4, 1536], vec![64, 4], Some(4)),
            ("patch_embedding", vec![4, 64], vec![1536, 4], Some(4)),
            ("patch_embedding", vec![4, 16, 1, 2, 2], vec![1536, 4, 1, 1, 1], Some(4)),
            ("patch_embedding", vec![4, 16, 2, 1, 2], vec![1536, 4, 1, 1, 1], None),
            ("patch_embedding", vec![4, 16, 1, 2, 2], vec![1536, 4, 1, 1, 2], None),
            ("proj_out", vec![4, 1536], vec![64, 5], None),
            ("proj_out", vec![4, 1535], vec![64, 4], None),
            ("proj_out", vec![4, 1536], vec![63, 4], None),
            ("proj_out", vec![1536, 4], vec![4, 64], None),
            ("proj_out", vec![0, 1536], vec![64, 0], None),
            ("proj_out", vec![1 << 62, 0], vec![0, 1 << 62], None),
            ("proj_out", vec![], vec![], None),
        ] {
            let site = sites.iter().find(|site| site.name == name).expect("layer");
            assert_eq!(rank_of(site, &a, &b), rank, "{name} {a:?} {b:?}");
        }
    }

    #[test]
    fn every_layout_names_every_layer_of_the_released_models() {
        for (config, model) in [(TransformerConfig::wan21_1_3b(), "wan2.1-t2v-1.3b"), (TransformerConfig::wan21_14b(), "wan2.1-t2v-14b")] {
            let sites = WanTransformer::sites(config).expect("sizes of a released model");
            let layers = published_layers(model);
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
