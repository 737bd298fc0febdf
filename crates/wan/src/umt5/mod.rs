//! UMT5, the text encoder of Wan: a T5 encoder in which every layer has its own relative position bias
//! (Chung et al. 2023, "UniMax"; Raffel et al. 2020 for the architecture).
//!
//! Legend: `B` batch, `L` tokens, `D` d_model, `H` heads, `K` features per head.

mod block;
mod config;
mod staged;

pub use block::{Block, Positions, relative_position_bucket};
pub use config::Umt5Config;

use staged::check_files;
pub use staged::encode_in_stages;

use crate::error::Result;
use crate::layers::RmsNorm;
use crate::param::{Param, ParamSet};
use crate::weights::{Init, WeightFiles, Weights};
use burn::tensor::{DType, Device, Int, Tensor};
use std::path::Path;

/// The encoder with its weights.
#[derive(Debug)]
pub struct Umt5Encoder {
    /// Sizes.
    pub config: Umt5Config,
    /// All weights by name.
    pub params: ParamSet,
    /// The layers, for tests and inspection.
    pub blocks: Vec<Block>,
    embedding: Param<2>,
    final_norm: RmsNorm,
    device: Device,
}

impl Umt5Encoder {
    /// The encoder of `config` with weights from `weights`.
    ///
    /// The token embedding is read as `shared.weight` or `encoder.embed_tokens.weight`, whichever the file has.
    ///
    /// # Errors
    /// [`Error::Weights`](crate::Error::Weights) names every tensor that is missing, mis-shaped or left over.
    pub fn new(config: Umt5Config, weights: &Weights) -> Result<Self> {
        let name = EMBEDDING_NAMES.into_iter().find(|name| weights.contains(name)).unwrap_or(EMBEDDING_NAMES[0]);
        // T5 draws embeddings with standard deviation 1: the first layer normalises them.
        let embedding = weights.param(name, [config.vocab_size, config.d_model], Init::Normal(1.0));
        let encoder = weights.sub("encoder");
        let blocks = (0..config.num_layers).map(|i| Block::new(&encoder.sub("block").sub(i), &config)).collect();
        let final_norm = RmsNorm::new(&encoder.sub("final_layer_norm"), config.d_model, config.layer_norm_epsilon);
        let device = weights.device().clone();
        let (params, _) = weights.clone().finish(&EMBEDDING_NAMES)?;
        Ok(Self { config, params, blocks, embedding, final_norm, device })
    }

    /// Reads `config.json` and `model.safetensors` (one file, or shards with an index) of a `text_encoder` folder.
    ///
    /// # Errors
    /// A missing or malformed file, an unsupported configuration, or weights of another model.
    pub fn load(dir: &Path, device: &Device, dtype: DType) -> Result<Self> {
        let config = Umt5Config::load(dir)?;
        let files = WeightFiles::open_folder(dir, "model")?;
        check_files(&files, &config)?;
        Self::new(config, &Weights::from_files(files, device, dtype))
    }

    /// `last_hidden_state` [B, L, D] of token ids, `L` the longest row of `ids`; rows past the end of a shorter
    /// prompt are zero.
    ///
    /// Padding keys are masked out, so no row depends on how far the batch is padded: running at `L` gives the rows
    /// that the reference computes at 512. With `record` the result is an autodiff tensor that leads back to every
    /// trainable weight.
    ///
    /// # Panics
    /// If `ids` is empty, has an empty row, or an id is not below `vocab_size`.
    pub fn forward(&self, ids: &[Vec<u32>], record: bool) -> Tensor<3> {
        let length = ids.iter().map(Vec::len).max().unwrap_or(0);
        let hidden = self.forward_padded(ids, length, record);
        let lengths: Vec<usize> = ids.iter().map(Vec::len).collect();
        zero_rows_past(hidden, &lengths)
    }

    /// As [`forward`](Self::forward), padded to `length` tokens and with the rows of padding tokens as they come out
    /// [B, length, D].
    ///
    /// # Panics
    /// As [`forward`](Self::forward), and if a row is longer than `length`.
    pub fn forward_padded(&self, ids: &[Vec<u32>], length: usize, record: bool) -> Tensor<3> {
        let lengths: Vec<usize> = ids.iter().map(Vec::len).collect();
        let positions = Positions::new(&self.config, length, &lengths, &self.device);
        let embedded = self.embed(ids, length, record);
        let hidden = self.blocks.iter().fold(embedded, |x, block| block.forward(x, &positions));
        self.final_norm.forward(hidden)
    }

    /// Embeddings [B, length, D] of ids padded with token 0.
    ///
    /// # Panics
    /// As [`forward_padded`](Self::forward_padded).
    pub fn embed(&self, ids: &[Vec<u32>], length: usize, record: bool) -> Tensor<3> {
        assert!(!ids.is_empty() && ids.iter().all(|row| !row.is_empty()), "every prompt needs at least one token");
        let mut padded = vec![PAD_ID; ids.len() * length];
        for (row, ids) in padded.chunks_exact_mut(length).zip(ids) {
            assert!(ids.len() <= length, "{} tokens do not fit in {length}", ids.len());
            for (slot, &id) in row.iter_mut().zip(ids) {
                assert!((id as usize) < self.config.vocab_size, "token {id} of {}", self.config.vocab_size);
                *slot = id as i32;
            }
        }
        let indices = Tensor::<1, Int>::from_ints(padded.as_slice(), &self.device);
        let rows = self.embedding_table(record).select(0, indices);
        rows.reshape([ids.len(), length, self.config.d_model])
    }

    /// The table [vocab_size, D]. Integer ids cannot carry the wish to record, so the table itself does: what follows
    /// sees an autodiff input and asks for the trainable leaves.
    fn embedding_table(&self, record: bool) -> Tensor<2> {
        if !record {
            return self.embedding.value();
        }
        let recording = Tensor::<1>::zeros([1], &self.device).autodiff();
        self.embedding.suit(&recording).autodiff()
    }

    /// The device of the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// Files carry either name, or both for the same values.
const EMBEDDING_NAMES: [&str; 2] = ["shared.weight", "encoder.embed_tokens.weight"];

const PAD_ID: i32 = 0;

/// x [B, L, D] with the rows of sequence `b` from `lengths[b]` on set to zero.
fn zero_rows_past(x: Tensor<3>, lengths: &[usize]) -> Tensor<3> {
    let [batch, length, _] = x.dims();
    if lengths.iter().all(|&n| n == length) {
        return x;
    }
    let keep: Vec<f32> = lengths.iter().flat_map(|&n| (0..length).map(move |i| f32::from(i < n))).collect();
    let keep = Tensor::<1>::from_floats(keep.as_slice(), &x.device()).reshape([batch, length, 1]);
    let keep = crate::layers::cast(keep, x.dtype());
    x * keep
}
