//! Prompts: where they come from, their embeddings, and which ones an iteration uses.

use crate::embedding_cache::EmbeddingCache;
use crate::error::Result;
use crate::first_frames::FirstFrames;
use crate::settings::{Prompt, PromptSource, read_prompt_file};
use grpo::random::{Key, Purpose, partial_shuffle};
use wan::text::{PromptEmbeds, PromptEncoder, StagedTextEncoder};

/// A list of prompts with their embeddings, encoded once.
#[derive(Debug, Clone)]
pub struct PromptSet {
    /// The texts; the index is the prompt's id.
    pub texts: Vec<String>,
    /// [P, L, D]
    pub embeds: PromptEmbeds,
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
        let mut embeds: Option<PromptEmbeds> = None;
        for batch in texts.chunks(ENCODE_BATCH) {
            let batch: Vec<&str> = batch.iter().map(String::as_str).collect();
            let more = encoder.encode(&batch, max_sequence_length)?;
            embeds = Some(match embeds {
                None => more,
                Some(embeds) => PromptEmbeds::cat(&embeds, &more),
            });
        }
        let Some(embeds) = embeds else { return Self::encode(vec![String::new()], encoder, max_sequence_length) };
        Ok(Self { texts, embeds, images: None })
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
        let lists: Vec<Vec<String>> = lists.into_iter().map(|texts| if texts.is_empty() { vec![String::new()] } else { texts }).collect();
        let ids: Vec<Vec<u32>> = lists.iter().flatten().map(tokens).collect::<wan::Result<_>>()?;
        let encode = |ids: &[Vec<u32>]| Ok(encoder.encode(ids, &mut |_, _| {})?);
        let mut rows = match cache {
            Some(cache) => cache.get_or_encode(&ids, encode)?,
            None => encode(&ids)?,
        }
        .into_iter();
        let set = |texts: Vec<String>| {
            let embeds = PromptEmbeds::from_rows(rows.by_ref().take(texts.len()).collect(), max_sequence_length);
            Self { texts, embeds, images: None }
        };
        Ok(lists.into_iter().map(set).collect())
    }

    /// The same prompts, whose videos start with `images`.
    pub fn with_images(self, images: Option<FirstFrames>) -> Self {
        Self { images, ..self }
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
