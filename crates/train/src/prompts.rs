//! Prompts: where they come from, their embeddings, and which ones an iteration uses.

use crate::embedding_cache::EmbeddingCache;
use crate::error::Result;
use crate::first_frames::FirstFrames;
use crate::scoring::Asked;
use crate::settings::{Prompt, PromptSource, read_prompt_file};
use burn::tensor::{Device, Tensor};
use grpo::random::{Key, Purpose, partial_shuffle};
use serde_json::Value;
use wan::text::{PromptEmbeds, PromptEncoder, StagedTextEncoder};

/// A list of prompts with their embeddings, encoded once. The embeddings wait in the memory of the host, without padding, until it is
/// their prompt's turn: those of ten thousand prompts would fill a GPU.
#[derive(Debug, Clone)]
pub struct PromptSet {
    /// The texts; the index is the prompt's id.
    pub texts: Vec<String>,
    /// [n, D] of each prompt, on the CPU.
    pub rows: Vec<Tensor<2>>,
    /// Rows that a prompt stands for, see [`PromptEmbeds`].
    padded_length: usize,
    /// What rewards should know of them beside the text.
    metadata: Vec<Option<Value>>,
    /// What their videos start with, for models of image-to-video.
    pub images: Option<FirstFrames>,
}

/// Prompts encoded at once.
const ENCODE_BATCH: usize = 32;

impl PromptSet {
    /// Encodes `texts`.
    ///
    /// # Errors
    /// A text that the tokenizer refuses.
    pub fn encode(texts: Vec<String>, encoder: &PromptEncoder, max_sequence_length: usize) -> Result<Self> {
        let texts = or_empty_prompt(texts);
        let mut rows = Vec::with_capacity(texts.len());
        for batch in texts.chunks(ENCODE_BATCH) {
            let batch: Vec<&str> = batch.iter().map(String::as_str).collect();
            rows.extend(encoder.encode(&batch, max_sequence_length)?.into_rows());
        }
        Ok(Self::new(texts, rows, max_sequence_length))
    }

    fn new(texts: Vec<String>, rows: Vec<Tensor<2>>, padded_length: usize) -> Self {
        let rows = rows.into_iter().map(|row| row.to_device(&Device::flex())).collect();
        Self { texts, rows, padded_length, metadata: Vec::new(), images: None }
    }

    /// Encodes several lists at once with an encoder that is not held in memory: only what the cache lacks, each layer once.
    ///
    /// # Errors
    /// As [`encode`](Self::encode); weights that cannot be read; a cache that cannot be written.
    pub fn encode_staged(
        lists: Vec<Vec<String>>,
        encoder: &StagedTextEncoder,
        cache: Option<&EmbeddingCache>,
        max_sequence_length: usize,
    ) -> Result<Vec<Self>> {
        let tokens = |text: &String| encoder.tokenizer.encode(text, max_sequence_length);
        let lists: Vec<Vec<String>> = lists.into_iter().map(or_empty_prompt).collect();
        let ids: Vec<Vec<u32>> = lists.iter().flatten().map(tokens).collect::<wan::Result<_>>()?;
        let encode = |ids: &[Vec<u32>]| Ok(encoder.encode(ids, &mut |_, _| {})?);
        let mut rows = match cache {
            Some(cache) => cache.get_or_encode(&ids, encode)?,
            None => encode(&ids)?,
        }
        .into_iter();
        let set = |texts: Vec<String>| {
            let own = rows.by_ref().take(texts.len()).collect();
            Self::new(texts, own, max_sequence_length)
        };
        Ok(lists.into_iter().map(set).collect())
    }

    /// The same prompts, whose videos start with `images`.
    pub fn with_images(self, images: Option<FirstFrames>) -> Self {
        Self { images, ..self }
    }

    /// The same prompts with what rewards should know of them.
    pub fn with_metadata(self, metadata: Vec<Option<Value>>) -> Self {
        Self { metadata, ..self }
    }

    /// The embeddings of some prompts, in that order, on a device.
    ///
    /// # Panics
    /// If there is none, or one is not of the list.
    pub fn embeds(&self, prompts: &[usize], device: &Device) -> PromptEmbeds {
        let rows = prompts.iter().map(|&prompt| self.rows[prompt].clone().to_device(device)).collect();
        PromptEmbeds::from_rows(rows, self.padded_length)
    }

    /// What the video of a prompt should be, at `fps` frames a second.
    pub fn asked(&self, prompt: usize, fps: f64) -> Asked<'_> {
        let metadata = self.metadata.get(prompt).and_then(Option::as_ref);
        Asked { prompt: &self.texts[prompt], metadata, fps }
    }

    /// Number of prompts.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Whether there is no prompt.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }
}

/// The list, or a single empty prompt: tensors have rows.
fn or_empty_prompt(texts: Vec<String>) -> Vec<String> {
    if texts.is_empty() { vec![String::new()] } else { texts }
}

/// The prompts a recipe names.
///
/// # Errors
/// A file that cannot be read or holds no usable prompt.
pub fn load(source: &PromptSource, field: &str) -> Result<Vec<Prompt>> {
    match source {
        PromptSource::File(path) => Ok(read_prompt_file(path, field)?),
        PromptSource::World(captions) => Ok(captions.texts().into_iter().map(Prompt::from).collect()),
    }
}

/// Ids of the prompts of an iteration: consecutive places of a list that is shuffled anew for every pass over the prompts.
///
/// A function of its arguments: a resumed run continues in the middle of a pass.
pub fn of_iteration(seed: u64, iteration: u64, count: usize, num_prompts: usize) -> Vec<usize> {
    let first = iteration as usize * count;
    (first..first + count).map(|place| shuffled(seed, (place / num_prompts) as u64, num_prompts)[place % num_prompts]).collect()
}

fn shuffled(seed: u64, pass: u64, num_prompts: usize) -> Vec<usize> {
    let mut rng = Key { seed, iteration: pass, prompt: 0, rollout: 0, purpose: Purpose::Prompts }.rng();
    let mut ids: Vec<usize> = (0..num_prompts).collect();
    partial_shuffle(&mut rng, &mut ids, num_prompts);
    ids
}

#[cfg(test)]
mod tests {
    use super::of_iteration;

    #[test]
    fn every_pass_uses_every_prompt_once() {
        let drawn: Vec<usize> = (0..27).flat_map(|iteration| of_iteration(7, iteration, 8, 54)).collect();
        for pass in drawn.chunks(54) {
            let mut sorted = pass.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..54).collect::<Vec<_>>());
        }
        assert_ne!(drawn[..54], drawn[54..108]);
        assert_eq!(of_iteration(7, 13, 8, 54), drawn[13 * 8..14 * 8]);
    }
}
