//! Randomness as a function of its key, never of call order.
//!
//! A resumed run, another rank or a reordered loop draws the same numbers, because every draw names what it is for.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};

/// What the numbers are for. Two purposes never share a stream.
///
/// The discriminants are part of the format of a run: never renumber, only append.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Purpose {
    /// The latents a rollout starts from.
    InitialNoise = 1,
    /// The noise of stochastic steps.
    StepNoise = 2,
    /// Which steps are stochastic and trained.
    Plan = 3,
    /// Which prompts an iteration uses.
    Prompts = 4,
    /// Initial adapter weights.
    AdapterInit = 5,
    /// The pinned noise of evaluation.
    EvalNoise = 6,
    /// Resampling for confidence intervals.
    Bootstrap = 7,
    /// Generated data (pretraining).
    Data = 8,
}

/// Names one stream of random numbers.
///
/// Set the coordinates that do not apply to 0; noise shared by a group has `rollout` 0, for instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Seed of the run.
    pub seed: u64,
    /// Iteration (rollout phase), from 0.
    pub iteration: u64,
    /// Prompt id.
    pub prompt: u64,
    /// Rollout within the prompt's group.
    pub rollout: u64,
    /// What for.
    pub purpose: Purpose,
}

impl Key {
    /// The generator of this key.
    ///
    /// ChaCha is a keyed function, so the coordinates *are* its key: 32 bytes = `seed`, `iteration`, `prompt`, `rollout`, each
    /// little endian; the 64-bit stream number is the purpose. Distinct keys are distinct streams by construction: there is
    /// no hash that could collide.
    pub fn rng(&self) -> ChaCha8Rng {
        let mut key = [0; 32];
        let words = [self.seed, self.iteration, self.prompt, self.rollout];
        for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let mut rng = ChaCha8Rng::from_seed(key);
        rng.set_stream(self.purpose as u64);
        rng
    }

    /// The first `n` standard normal deviates of this key; a shorter request is a prefix of a longer one.
    pub fn normals(&self, n: usize) -> Vec<f32> {
        let mut rng = self.rng();
        (0..n).map(|_| StandardNormal.sample(&mut rng)).collect()
    }
}

/// A uniform index below `bound`: the high half of a 128-bit product (bias below `bound / 2^64`).
///
/// # Panics
/// If `bound` is 0.
pub fn index_below(rng: &mut impl Rng, bound: usize) -> usize {
    assert!(bound > 0, "no index below 0");
    ((u128::from(rng.next_u64()) * bound as u128) >> 64) as usize
}

/// Shuffles the first `take` places: afterwards `items[..take]` is a uniform sample without replacement, in random order.
pub fn partial_shuffle<T>(rng: &mut impl Rng, items: &mut [T], take: usize) {
    for place in 0..take.min(items.len()) {
        let other = place + index_below(rng, items.len() - place);
        items.swap(place, other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(rollout: u64, purpose: Purpose) -> Key {
        Key { seed: 1, iteration: 2, prompt: 3, rollout, purpose }
    }

    #[test]
    fn streams_are_pinned() {
        // A change here changes every run of every user: it is a format break, to be announced.
        let words: Vec<u64> = {
            let mut rng = key(4, Purpose::Plan).rng();
            (0..2).map(|_| rng.next_u64()).collect()
        };
        assert_eq!(words, PINNED);
    }
    const PINNED: [u64; 2] = [5722302799565271678, 12300639922850811080];

    #[test]
    fn coordinates_and_purposes_separate_streams() {
        let reference = key(0, Purpose::InitialNoise).normals(16);
        assert_eq!(reference, key(0, Purpose::InitialNoise).normals(16));
        assert_eq!(reference[..5], key(0, Purpose::InitialNoise).normals(5));
        assert_ne!(reference, key(1, Purpose::InitialNoise).normals(16));
        assert_ne!(reference, key(0, Purpose::StepNoise).normals(16));
    }

    #[test]
    fn normals_are_standard() {
        let x = key(0, Purpose::Data).normals(100_000);
        let n = x.len() as f64;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let variance = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n - mean * mean;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }

    #[test]
    fn partial_shuffle_permutes() {
        let mut items: Vec<usize> = (0..10).collect();
        partial_shuffle(&mut key(0, Purpose::Prompts).rng(), &mut items, 10);
        assert_ne!(items, (0..10).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..10).collect::<Vec<_>>());
    }
}
