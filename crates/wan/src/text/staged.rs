//! Encoding prompts without holding the encoder in memory.

use super::{PromptEmbeds, PromptTokenizer, TextEncoder, check_vocabulary, no_prompt};
use crate::error::Result;
use crate::umt5::{Umt5Config, encode_in_stages};
use burn::tensor::{DType, Device, Tensor};
use std::path::{Path, PathBuf};

/// A text encoder in memory, or one that is read when it is needed.
#[derive(Debug)]
pub enum PromptEncoder {
    /// In memory.
    Resident(TextEncoder),
    /// On disk, one layer in memory at a time.
    Staged(StagedTextEncoder),
}

/// Bytes of an encoder beyond which it is not held in memory.
const RESIDENT_LIMIT: usize = 1 << 30;

impl PromptEncoder {
    /// The text encoder of a model folder: held in memory if it is small, or if it is wanted in another dtype than f32.
    ///
    /// # Errors
    /// A missing, malformed or unsupported file, by name.
    pub fn open(model_dir: &Path, device: &Device, dtype: DType) -> Result<Self> {
        let staged = StagedTextEncoder::open(model_dir, device)?;
        if dtype == DType::F32 && 4 * staged.config.num_parameters() > RESIDENT_LIMIT {
            return Ok(Self::Staged(staged));
        }
        Ok(Self::Resident(TextEncoder::load(model_dir, device, dtype)?))
    }

    /// Embeddings of prompts, cleaned and cut to `max_sequence_length` tokens.
    ///
    /// # Errors
    /// No prompt, `max_sequence_length` 0, a text the tokenizer refuses; weights that cannot be read.
    pub fn encode(&self, prompts: &[&str], max_sequence_length: usize) -> Result<PromptEmbeds> {
        match self {
            Self::Resident(encoder) => encoder.encode(prompts, max_sequence_length),
            Self::Staged(encoder) => {
                let tokens = |prompt: &&str| encoder.tokenizer.encode(prompt, max_sequence_length);
                let ids: Vec<Vec<u32>> = prompts.iter().map(tokens).collect::<Result<_>>()?;
                if ids.is_empty() {
                    return Err(no_prompt());
                }
                Ok(PromptEmbeds::from_rows(encoder.encode(&ids, &mut |_, _| {})?, max_sequence_length).to_device(&encoder.device))
            }
        }
    }
}

/// The text encoder of a model folder, read layer by layer whenever there is something to encode.
#[derive(Debug)]
pub struct StagedTextEncoder {
    /// Text to token ids.
    pub tokenizer: PromptTokenizer,
    /// Sizes of the encoder.
    pub config: Umt5Config,
    dir: PathBuf,
    device: Device,
}

impl StagedTextEncoder {
    /// Reads tokenizer and config of a diffusers model folder.
    ///
    /// # Errors
    /// A missing, malformed or unsupported file, by name.
    pub fn open(model_dir: &Path, device: &Device) -> Result<Self> {
        let dir = model_dir.join("text_encoder");
        let (tokenizer, config) = (PromptTokenizer::load(&model_dir.join("tokenizer"))?, Umt5Config::load(&dir)?);
        check_vocabulary(&tokenizer, &config)?;
        Ok(Self { tokenizer, config, dir, device: device.clone() })
    }

    /// The folder with the encoder's files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Embeddings [n, D] of token ids, each a function of its ids alone.
    ///
    /// # Errors
    /// Weights that cannot be read or do not fit the config.
    pub fn encode(&self, ids: &[Vec<u32>], progress: &mut dyn FnMut(usize, usize)) -> Result<Vec<Tensor<2>>> {
        encode_in_stages(&self.dir, ids, &self.device, progress)
    }
}
