//! A GRPO method for flow models, as a value.

use serde::{Deserialize, Serialize};

use crate::{AdvantageScale, LossWeight, NoiseLevel, RatioKind, StepPlan};

mod named;
mod validate;

/// Which denoising steps draw noise. The last step never does: it ends at sigma 0, where noise stays in the video.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum StochasticSteps {
    /// Every step but the last (Flow-GRPO, DanceGRPO).
    All,
    /// `count` consecutive steps; the first of them is uniform over the first `pool` steps of the schedule
    /// (Flash-GRPO: 1 of 10; Flow-GRPO-Fast: 1 or 2).
    Random {
        /// Number of consecutive stochastic steps.
        #[serde(default = "one")]
        count: usize,
        /// Number of possible starts: steps `0..pool`.
        pool: usize,
    },
    /// A window of `size` steps that moves by `stride` every `every` iterations, and starts over after the last place
    /// (MixGRPO).
    Sliding {
        /// Steps in the window.
        size: usize,
        /// Steps it moves by, around the N - `size` places it can have. One that has a divisor in common with their number leaves places out.
        stride: usize,
        /// Iterations it stays for.
        every: u64,
        /// Stays shorter towards the data.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        decay: Option<Decay>,
    },
}

/// The window that starts at step `l` stays for `max(1, floor(every exp(-rate max(0, l - from))))` iterations (MixGRPO, section 3.2):
/// early steps decide more, so they are trained longer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decay {
    /// Rate per step.
    pub rate: f64,
    /// The step from which on it decays.
    pub from: usize,
}

fn one() -> usize {
    1
}

impl StochasticSteps {
    /// All steps that can become stochastic in a schedule of `num_steps`.
    pub fn pool(&self, num_steps: usize) -> Vec<usize> {
        let end = match *self {
            StochasticSteps::All | StochasticSteps::Sliding { .. } => num_steps.saturating_sub(1),
            StochasticSteps::Random { count, pool } => pool + count.saturating_sub(1),
        };
        (0..end).collect()
    }

    /// The fewest stochastic steps a rollout can have.
    fn count(&self, num_steps: usize) -> usize {
        match *self {
            StochasticSteps::All => num_steps.saturating_sub(1),
            StochasticSteps::Random { count, .. } => count,
            StochasticSteps::Sliding { size, .. } => size,
        }
    }
}

/// Which of the stochastic steps receive a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum TrainedSteps {
    /// Every stochastic step.
    All,
    /// A random share of them, `floor(fraction * count)`, drawn as [`StepSharing`] says (DanceGRPO: 0.6).
    Fraction {
        /// In (0, 1].
        fraction: f64,
    },
}

impl TrainedSteps {
    /// How many of `count` stochastic steps are trained.
    pub fn count(&self, count: usize) -> usize {
        match *self {
            TrainedSteps::All => count,
            // the margin keeps 0.6 * 15 = 9 from becoming 8
            TrainedSteps::Fraction { fraction } => (fraction * count as f64 + 1e-9).floor() as usize,
        }
    }
}

/// Who shares the random choice of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepSharing {
    /// All rollouts of an iteration.
    PerIteration,
    /// All rollouts of a prompt: iso-temporal grouping (Flash-GRPO section 3.2).
    PerPrompt,
    /// Nobody.
    PerRollout,
}

/// Which latents the rollouts of a prompt start from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InitialNoise {
    /// Each from its own (Flash-GRPO as published).
    #[default]
    Independent,
    /// All from the same: rewards then differ by the stochastic steps alone, and the steps before them are the same for all.
    SharedInGroup,
}

/// One GRPO method for flow models; the fields are independent choices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Which denoising steps draw noise.
    pub stochastic: StochasticSteps,
    /// Which of those receive a gradient.
    pub trained: TrainedSteps,
    /// Who shares the choice of steps.
    pub sharing: StepSharing,
    /// How much noise.
    pub noise_level: NoiseLevel,
    /// Weight of the policy loss per step.
    pub loss_weight: LossWeight,
    /// Starting latents.
    pub initial_noise: InitialNoise,
    /// Divisor of the centred rewards.
    pub advantage: AdvantageScale,
    /// How the probability ratio is formed.
    #[serde(default)]
    pub ratio: RatioKind,
    /// Largest KL per element that a step may move before its samples are masked, instead of the clip of the ratio; see
    /// [`PolicyLoss`](crate::PolicyLoss).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_mask: Option<f64>,
}

impl Default for Recipe {
    fn default() -> Self {
        Recipe::flash_grpo()
    }
}

impl Recipe {
    /// Which steps of this rollout draw noise and which are trained: a pure function of its arguments.
    ///
    /// # Panics
    /// If the recipe does not [`validate`](Recipe::validate) for `num_steps`.
    pub fn plan(&self, seed: u64, iteration: u64, prompt: u64, rollout: u64, num_steps: usize) -> StepPlan {
        StepPlan::new(self, seed, iteration, [prompt, rollout], num_steps)
    }
}
