//! Values that were computed once.

use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{Reward, RewardBreakdown, RewardError, Sample, Scored, SetupError};

/// Part of every key: changes whenever its layout does.
const LAYOUT: &str = "flash-grpo reward cache 1";

/// A reward whose values are kept in a folder, one small file each:
///
/// ```text
/// FOLDER/ab/cdef...json,  abcdef... = sha256(layout, cache key of the reward, prompt, fps, metadata, F, H, W, frames)
/// ```
///
/// Any number of processes may share the folder: a file appears whole or not at all, and equal keys have equal contents. Errors are not kept.
/// A file that cannot be read or written only costs time. A reward whose [`Reward::cache_key`] is unknown is not cached.
pub struct Cached<R> {
    inner: R,
    folder: PathBuf,
}

impl<R: Reward> Cached<R> {
    /// Keeps the values of `inner` in `folder`, which is made when the first one is written.
    pub fn new(inner: R, folder: &Path) -> Self {
        Self { inner, folder: folder.to_owned() }
    }

    fn path(&self, of_reward: &str, sample: &Sample<'_>) -> PathBuf {
        let key = key(of_reward, sample);
        self.folder.join(&key[..2]).join(format!("{}.json", &key[2..]))
    }
}

impl<R: Reward> Reward for Cached<R> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn check_prompt(&self, prompt: &str) -> Result<(), RewardError> {
        self.inner.check_prompt(prompt)
    }

    fn prepare(&self) -> Result<(), SetupError> {
        self.inner.prepare()
    }

    fn identity(&self) -> Option<String> {
        self.inner.identity()
    }

    fn cache_key(&self) -> Option<String> {
        self.inner.cache_key()
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        let Some(of_reward) = self.cache_key() else { return self.inner.score(batch) };
        let paths: Vec<PathBuf> = batch.iter().map(|sample| self.path(&of_reward, sample)).collect();
        let mut scores: Vec<Option<Scored>> = paths.iter().map(|path| read(path).map(Ok)).collect();
        let absent: Vec<usize> = (0..batch.len()).filter(|&i| scores[i].is_none()).collect();
        let samples: Vec<Sample<'_>> = absent.iter().map(|&i| batch[i]).collect();
        let computed = if samples.is_empty() { Vec::new() } else { self.inner.score(&samples) };
        for (&i, score) in absent.iter().zip(computed) {
            if let Ok(score) = &score
                && score.value.is_finite()
            {
                // A full disk must not end a run that can go on without the cache.
                let _ = write(&paths[i], score);
            }
            scores[i] = Some(score);
        }
        let lost = |i: usize| Err(RewardError::new(self.name(), batch[i].prompt, "the reward gave no result"));
        scores.into_iter().enumerate().map(|(i, score)| score.unwrap_or_else(|| lost(i))).collect()
    }
}

fn key(of_reward: &str, sample: &Sample<'_>) -> String {
    let metadata = sample.metadata.map(ToString::to_string).unwrap_or_default();
    let mut hash = Sha256::new();
    // With its length before each, no two different lists of texts are the same bytes.
    for text in [LAYOUT, of_reward, sample.prompt, &metadata] {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    hash.update(sample.fps.to_le_bytes());
    for size in [sample.frames.num_frames(), sample.frames.height(), sample.frames.width()] {
        hash.update((size as u64).to_le_bytes());
    }
    hash_floats(&mut hash, sample.frames.data());
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn hash_floats(hash: &mut Sha256, values: &[f32]) {
    let mut bytes = Vec::with_capacity(1 << 14);
    for values in values.chunks(1 << 12) {
        bytes.clear();
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        hash.update(&bytes);
    }
}

/// A kept value; none where the file is absent or is not one.
fn read(path: &Path) -> Option<RewardBreakdown> {
    let kept: RewardBreakdown = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    kept.value.is_finite().then_some(kept)
}

fn write(path: &Path, score: &RewardBreakdown) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().prefix(".writing-").tempfile_in(folder)?;
    file.write_all(serde_json::to_string(score)?.as_bytes())?;
    // Not synced, unlike everything else that is written: a file that a power cut spoils is computed again, and a busy disk would hold up
    // every sample.
    file.persist(path)?;
    Ok(())
}
