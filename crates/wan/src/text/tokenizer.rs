//! Text to token ids, by the model's own `tokenizer.json`.

use super::prompt_clean;
use crate::error::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// A tokenizer that ends every prompt with `</s>`.
#[derive(Debug, Clone)]
pub struct PromptTokenizer {
    tokenizer: Tokenizer,
    path: PathBuf,
    end: u32,
}

impl PromptTokenizer {
    /// Reads `DIR/tokenizer.json`.
    ///
    /// # Errors
    /// A missing or malformed file, or a tokenizer that does not append `</s>`.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let json = crate::config::read_text(&path)?;
        Self::from_json(&json, &path)
    }

    /// From the text of a `tokenizer.json`; `path` is where it came from, for messages.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_json(json: &str, path: &Path) -> Result<Self> {
        let hint = "this must be the tokenizer.json of a T5 tokenizer";
        let invalid = |reason: String| Error::invalid(path, reason, hint);
        let mut tokenizer: Tokenizer = json.parse().map_err(|e| invalid(format!("not a tokenizer that can be read ({e})")))?;
        // Whatever the file says about lengths: the caller of `encode` decides.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| invalid(e.to_string()))?;
        let end = tokenizer.token_to_id(END).ok_or_else(|| invalid(format!("no token `{END}`")))?;
        if !appends_end(json) {
            return Err(invalid(format!("its post-processor does not append `{END}`")));
        }
        Ok(Self { tokenizer, path: path.into(), end })
    }

    /// Token ids of the cleaned prompt, `</s>` last, also if the text had to be cut to `max_length` tokens. No padding.
    ///
    /// # Errors
    /// `max_length` 0, or a text the tokenizer refuses.
    pub fn encode(&self, prompt: &str, max_length: usize) -> Result<Vec<u32>> {
        if max_length == 0 {
            let (reason, hint) = ("a prompt has at least one token, `</s>`".into(), "the usual value is 512".into());
            return Err(Error::Argument { field: "max_sequence_length", value: "0".into(), reason, hint });
        }
        let cleaned = prompt_clean(prompt);
        let encoding = self
            .tokenizer
            .encode(cleaned.as_str(), false)
            .map_err(|e| Error::invalid(&self.path, format!("cannot encode `{cleaned}` ({e})"), "change the prompt or the tokenizer"))?;
        let mut ids = encoding.get_ids().to_vec();
        ids.truncate(max_length - 1);
        ids.push(self.end);
        Ok(ids)
    }

    /// The token of an id, for messages and reports.
    pub fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        let highest = self.tokenizer.get_vocab(true).into_values().max();
        highest.map_or(0, |id| id as usize + 1)
    }

    /// The file it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether the post-processor is the template "prompt, `</s>`": we append the token ourselves, since the library panics at a template
/// that names a token it does not define.
fn appends_end(json: &str) -> bool {
    let Ok(file) = serde_json::from_str::<Value>(json) else { return false };
    let single = file.pointer("/post_processor/single").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    match single {
        [sequence, last] => sequence.get("Sequence").is_some() && last.pointer("/SpecialToken/id").and_then(Value::as_str) == Some(END),
        _ => false,
    }
}

/// The token that ends every prompt.
const END: &str = "</s>";
