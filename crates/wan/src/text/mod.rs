//! From a prompt to what the transformer attends to: cleaning, tokens, embeddings.

mod clean;
mod embeds;
mod staged;
mod tokenizer;
mod words;

pub use clean::prompt_clean;
pub use embeds::PromptEmbeds;
pub use staged::{PromptEncoder, StagedTextEncoder};
pub use tokenizer::PromptTokenizer;
pub use words::{WORD_TOKENIZER_CONFIG_JSON, word_tokenizer_json, word_tokenizer_vocab_size};

use crate::error::{Error, Result};
use crate::umt5::{Umt5Config, Umt5Encoder};
use burn::tensor::{DType, Device};
use std::path::Path;

/// Tokenizer and encoder of one model.
#[derive(Debug)]
pub struct TextEncoder {
    /// Text to token ids.
    pub tokenizer: PromptTokenizer,
    /// Token ids to embeddings.
    pub encoder: Umt5Encoder,
}

impl TextEncoder {
    /// Pairs a tokenizer with its encoder.
    ///
    /// # Errors
    /// The tokenizer has ids for which the encoder has no embedding.
    pub fn new(tokenizer: PromptTokenizer, encoder: Umt5Encoder) -> Result<Self> {
        check_vocabulary(&tokenizer, &encoder.config)?;
        Ok(Self { tokenizer, encoder })
    }

    /// Reads `tokenizer/` and `text_encoder/` of a diffusers model folder.
    ///
    /// # Errors
    /// A missing, malformed or unsupported file, by name.
    pub fn load(model_dir: &Path, device: &Device, dtype: DType) -> Result<Self> {
        let tokenizer = PromptTokenizer::load(&model_dir.join("tokenizer"))?;
        Self::new(tokenizer, Umt5Encoder::load(&model_dir.join("text_encoder"), device, dtype)?)
    }

    /// Embeddings of prompts, cleaned and cut to `max_sequence_length` tokens, without any graph.
    ///
    /// # Errors
    /// No prompt, `max_sequence_length` 0, or a text the tokenizer refuses.
    pub fn encode(&self, prompts: &[&str], max_sequence_length: usize) -> Result<PromptEmbeds> {
        self.run(prompts, max_sequence_length, false)
    }

    /// As [`encode`](Self::encode), recorded: gradients reach the trainable weights of the encoder.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_recorded(&self, prompts: &[&str], max_sequence_length: usize) -> Result<PromptEmbeds> {
        self.run(prompts, max_sequence_length, true)
    }

    fn run(&self, prompts: &[&str], max_sequence_length: usize, record: bool) -> Result<PromptEmbeds> {
        if prompts.is_empty() {
            return Err(no_prompt());
        }
        let encode = |prompt: &&str| self.tokenizer.encode(prompt, max_sequence_length);
        let ids: Vec<Vec<u32>> = prompts.iter().map(encode).collect::<Result<_>>()?;
        let lengths = ids.iter().map(Vec::len).collect();
        Ok(PromptEmbeds { embeds: self.encoder.forward(&ids, record), lengths, padded_length: max_sequence_length })
    }
}

fn no_prompt() -> Error {
    let (reason, hint) = ("there is nothing to encode".into(), "give at least one prompt".into());
    Error::Argument { field: "prompts", value: "[]".into(), reason, hint }
}

fn check_vocabulary(tokenizer: &PromptTokenizer, encoder: &Umt5Config) -> Result<()> {
    let (tokens, rows) = (tokenizer.vocab_size(), encoder.vocab_size);
    if tokens <= rows {
        return Ok(());
    }
    let reason = format!("{tokens} tokens, but the text encoder has vocab_size {rows}");
    Err(Error::invalid(tokenizer.path(), reason, "tokenizer/ and text_encoder/ must belong together"))
}
