//! The steps one rollout treats specially.

use rand_chacha::ChaCha8Rng;

use crate::random::{index_below, partial_shuffle};
use crate::{Decay, Key, Purpose, Recipe, StepSharing, StochasticSteps};

/// Which steps of one rollout draw noise, and which of them are trained; both ascending.
///
/// A plan is a function of (seed, iteration, prompt, rollout): a resumed run, or another rank, computes the same one with no
/// state and no broadcast, and no iteration is skipped (Deviation D3, docs/deviations.md).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// Steps that draw noise.
    pub stochastic: Vec<usize>,
    /// Steps that receive a gradient, a subset of `stochastic`.
    pub trained: Vec<usize>,
}

impl StepPlan {
    pub(crate) fn new(recipe: &Recipe, seed: u64, iteration: u64, who: [u64; 2], num_steps: usize) -> StepPlan {
        // Sharing is nothing but forgetting coordinates: whoever has the same key has the same plan.
        let [prompt, rollout] = match recipe.sharing {
            StepSharing::PerIteration => [0, 0],
            StepSharing::PerPrompt => [who[0], 0],
            StepSharing::PerRollout => who,
        };
        let mut rng = Key { seed, iteration, prompt, rollout, purpose: Purpose::Plan }.rng();
        let stochastic = stochastic_steps(recipe, iteration, num_steps, &mut rng);
        assert!(stochastic.iter().all(|&step| step + 1 < num_steps), "the recipe does not fit {num_steps} steps");
        let mut trained = stochastic.clone();
        let count = recipe.trained.count(trained.len());
        if count < trained.len() {
            partial_shuffle(&mut rng, &mut trained, count);
            trained.truncate(count);
            trained.sort_unstable();
        }
        StepPlan { stochastic, trained }
    }

    /// Whether `step` draws noise.
    pub fn is_stochastic(&self, step: usize) -> bool {
        self.stochastic.contains(&step)
    }

    /// Whether `step` receives a gradient.
    pub fn is_trained(&self, step: usize) -> bool {
        self.trained.contains(&step)
    }

    /// Number of leading deterministic steps: with shared initial noise and a shared plan they are the same for the whole group.
    pub fn prefix_len(&self) -> usize {
        self.stochastic.first().copied().unwrap_or(usize::MAX)
    }
}

fn stochastic_steps(recipe: &Recipe, iteration: u64, num_steps: usize, rng: &mut ChaCha8Rng) -> Vec<usize> {
    let window = |start: usize, len: usize| (start..start + len).collect();
    match recipe.stochastic {
        StochasticSteps::All => window(0, num_steps - 1),
        StochasticSteps::Random { count, pool } => window(index_below(rng, pool), count),
        StochasticSteps::Sliding { size, stride, every, decay } => {
            let places = num_steps - size; // the last step stays out
            window(window_start(iteration, places, stride, |start| stay(every, decay, start)), size)
        }
    }
}

/// Iterations that the window at `start` stays for.
fn stay(every: u64, decay: Option<Decay>, start: usize) -> u64 {
    let Some(Decay { rate, from }) = decay else { return every };
    ((every as f64 * (-rate * start.saturating_sub(from) as f64).exp()).floor() as u64).max(1)
}

/// Where the window is that stays `stay(start)` iterations at each place, moves by `stride` and starts over after the last place.
fn window_start(iteration: u64, places: usize, stride: usize, stay: impl Fn(usize) -> u64) -> usize {
    let starts = || (0..places).map(|i| i.wrapping_mul(stride) % places);
    let cycle = starts().map(&stay).fold(0, u64::saturating_add);
    let mut left = iteration % cycle;
    for start in starts() {
        if left < stay(start) {
            return start;
        }
        left -= stay(start);
    }
    0
}
