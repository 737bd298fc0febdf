//! A model folder of a released size with random weights: enough to rehearse a full-size run (loading, memory, time) where the real
//! weights are not at hand. Only the videos are worth nothing.
//!
//! Weights are bf16 in shards with an index, as the released ones; they are drawn while they are written, so that 14B need no more memory
//! than 1.3B. A value is a function of (seed, network, name, place).

use crate::error::{Error, Result};
use crate::experts::{Boundary, SECOND};
use crate::text::{WORD_TOKENIZER_CONFIG_JSON, word_tokenizer_json};
use crate::transformer::{TransformerConfig, WanTransformer};
use crate::umt5::{Umt5Config, Umt5Encoder};
use crate::vae::{AutoencoderKlWan, VaeConfig};
use crate::weights::{Declared, Init, UNFINISHED, Weights, header, initial_values, name_id, pt_metadata, write_atomically, write_streamed};
use burn::tensor::DType;
use grpo::random::{Key, Purpose};
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::Path;

/// The parts that have weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// `transformer/`
    Transformer,
    /// `transformer_2/`, in a model with two networks.
    Transformer2,
    /// `vae/`
    Vae,
    /// `text_encoder/`: 5.7B parameters, 11.4 GB.
    TextEncoder,
}

/// What to write.
#[derive(Debug, Clone)]
pub struct RandomModel {
    /// Sizes of the transformer, or of both; autoencoder and text encoder are the same for every Wan2.1 and for Wan2.2 A14B.
    pub transformer: TransformerConfig,
    /// Where the second network takes over, if there is one.
    pub boundary: Option<Boundary>,
    /// Sizes of the autoencoder.
    pub vae: VaeConfig,
    /// Sizes of the text encoder.
    pub text_encoder: Umt5Config,
    /// Words that are one token each in the stand-in for the tokenizer; others are spelled.
    pub words: Vec<String>,
    /// Parts whose weights are written. The small files of the others are there too.
    pub parts: Vec<Part>,
    /// Seed of the weights.
    pub seed: u64,
    /// Largest file, unless a single tensor is larger.
    pub shard_bytes: u64,
}

/// So that every part but the autoencoder has several.
pub const DEFAULT_SHARD_BYTES: u64 = 2_000_000_000;

impl RandomModel {
    /// Names, shapes and starts of a part's weights.
    ///
    /// # Errors
    /// Sizes that no model can have.
    pub fn declared(&self, part: Part) -> Result<Vec<Declared>> {
        match part {
            Part::Transformer | Part::Transformer2 => Weights::declared(|w| WanTransformer::new(self.transformer.clone(), w, DType::BF16)),
            Part::Vae => Weights::declared(|w| Ok(AutoencoderKlWan::new(self.vae.clone(), &w))),
            Part::TextEncoder => Weights::declared(|w| Umt5Encoder::new(self.text_encoder.clone(), &w)),
        }
    }

    /// Bytes of the weights that [`write`](Self::write) writes.
    ///
    /// # Errors
    /// As [`declared`](Self::declared).
    pub fn bytes(&self) -> Result<u64> {
        self.parts.iter().map(|&part| Ok(self.declared(part)?.iter().map(bytes).sum::<u64>())).sum()
    }

    /// Writes the folder, which has its name once it is whole. `progress` is called with the number of bytes written since the last call.
    ///
    /// # Errors
    /// The folder exists and is not empty, or cannot be written.
    pub fn write(&self, dir: &Path, progress: &mut dyn FnMut(u64)) -> Result<()> {
        if std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some()) {
            return Err(Error::invalid(dir, "the folder is not empty", "name a new folder: nothing is overwritten"));
        }
        let wrap = |e| Error::write(dir, e);
        let name = dir.file_name().ok_or_else(|| Error::invalid(dir, "it has no name of its own", "name a new folder"))?;
        let beside = dir.with_file_name(format!("{UNFINISHED}{}", name.to_string_lossy()));
        if beside.exists() {
            std::fs::remove_dir_all(&beside).map_err(wrap)?;
        }
        self.write_all(&beside, progress)?;
        if dir.exists() {
            std::fs::remove_dir(dir).map_err(wrap)?;
        }
        std::fs::rename(&beside, dir).map_err(wrap)
    }

    fn write_all(&self, dir: &Path, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let second = self.boundary.map(|_| SECOND);
        for part in ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"].into_iter().chain(second).map(|part| dir.join(part)) {
            std::fs::create_dir_all(&part).map_err(|e| Error::write(&part, e))?;
        }
        let small = [
            ("model_index.json", self.model_index()),
            ("scheduler/scheduler_config.json", scheduler_config()),
            ("tokenizer/tokenizer.json", word_tokenizer_json(&self.words.iter().map(String::as_str).collect::<Vec<_>>())),
            ("tokenizer/tokenizer_config.json", WORD_TOKENIZER_CONFIG_JSON.to_owned()),
            ("transformer/config.json", self.transformer.to_json()),
            ("vae/config.json", self.vae.to_json()),
            ("text_encoder/config.json", self.text_encoder.to_json()),
        ];
        for (path, text) in small {
            write_atomically(&dir.join(path), text.as_bytes())?;
        }
        if let Some(second) = second {
            write_atomically(&dir.join(second).join("config.json"), self.transformer.to_json().as_bytes())?;
        }
        for &part in &self.parts {
            let (folder, stem) = match part {
                Part::Transformer => ("transformer", "diffusion_pytorch_model"),
                Part::Transformer2 => (SECOND, "diffusion_pytorch_model"),
                Part::Vae => ("vae", "diffusion_pytorch_model"),
                Part::TextEncoder => ("text_encoder", "model"),
            };
            let network = u64::from(part == Part::Transformer2);
            self.write_part(&dir.join(folder), stem, network, &self.declared(part)?, progress)?;
        }
        Ok(())
    }

    /// The shards, then the index that makes them a model.
    fn write_part(&self, dir: &Path, stem: &str, network: u64, tensors: &[Declared], progress: &mut dyn FnMut(u64)) -> Result<()> {
        let shards = cut(tensors, self.shard_bytes);
        let name = |i: usize| match shards.len() {
            1 => format!("{stem}.safetensors"),
            count => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let mut weight_map = Map::new();
        for (i, shard) in shards.iter().enumerate() {
            let places = shard.iter().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice()));
            write_streamed(&dir.join(name(i)), |file| {
                file.write_all(&header("BF16", 2, places, Some(pt_metadata())))?;
                shard.iter().try_for_each(|tensor| write_values(file, tensor, [self.seed, network], progress))
            })?;
            weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), Value::from(name(i)))));
        }
        if shards.len() == 1 {
            return Ok(());
        }
        let total: u64 = tensors.iter().map(bytes).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_atomically(&dir.join(format!("{stem}.safetensors.index.json")), format!("{index:#}\n").as_bytes())
    }

    /// Of TI2V-5B, the only one with the residual autoencoder, every token has a timestep.
    fn model_index(&self) -> String {
        let class = if self.transformer.starts_with_image() { "WanImageToVideoPipeline" } else { "WanPipeline" };
        let mut index = json!({
            "_class_name": class,
            "_diffusers_version": "0.33.0.dev0",
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            "tokenizer": ["transformers", "T5TokenizerFast"],
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLWan"],
        });
        if self.vae.is_residual {
            index["expand_timesteps"] = true.into();
        }
        if let Some(boundary) = self.boundary {
            index["boundary_ratio"] = boundary.ratio().into();
            index[SECOND] = json!(["diffusers", "WanTransformer3DModel"]);
        }
        format!("{index:#}\n")
    }
}

/// Bytes of a tensor in bf16.
fn bytes(tensor: &Declared) -> u64 {
    2 * tensor.num_elements() as u64
}

/// Consecutive tensors of at most `limit` bytes together.
fn cut(tensors: &[Declared], limit: u64) -> Vec<&[Declared]> {
    let (mut shards, mut start, mut size) = (Vec::new(), 0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        if i > start && size + bytes(tensor) > limit {
            shards.push(&tensors[start..i]);
            (start, size) = (i, 0);
        }
        size += bytes(tensor);
    }
    shards.push(&tensors[start..]);
    shards
}

/// Values drawn from one key.
const CHUNK: usize = 1 << 18;
/// Chunks drawn at once, on all threads.
const CHUNKS: usize = 16;

fn write_values(file: &mut dyn Write, tensor: &Declared, seed: [u64; 2], progress: &mut dyn FnMut(u64)) -> std::io::Result<()> {
    let count = tensor.num_elements();
    let chunks = count.div_ceil(CHUNK);
    for first in (0..chunks).step_by(CHUNKS) {
        let draw = |chunk: usize| values(tensor, seed, chunk, CHUNK.min(count - chunk * CHUNK));
        let parts: Vec<Vec<u8>> = (first..chunks.min(first + CHUNKS)).into_par_iter().map(draw).collect();
        for part in parts {
            file.write_all(&part)?;
            progress(part.len() as u64);
        }
    }
    Ok(())
}

fn values(tensor: &Declared, [seed, network]: [u64; 2], chunk: usize, count: usize) -> Vec<u8> {
    let key = Key { seed, iteration: chunk as u64, prompt: name_id(&tensor.name), rollout: network, purpose: Purpose::Data };
    // biases off zero: a forgotten one would show
    let init = if tensor.init == Init::Zeros { Init::Normal(0.02) } else { tensor.init };
    let values = initial_values(&key, count, &tensor.shape, init);
    values.into_iter().flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect()
}

fn scheduler_config() -> String {
    let config = json!({
        "_class_name": "UniPCMultistepScheduler",
        "_diffusers_version": "0.33.0.dev0",
        "flow_shift": 3.0,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "solver_order": 2,
        "solver_type": "bh2",
        "use_flow_sigmas": true,
    });
    format!("{config:#}\n")
}
