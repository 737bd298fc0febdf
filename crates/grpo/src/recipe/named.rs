//! The published methods, each a few lines apart from another.

use super::{Decay, InitialNoise, Recipe, StepSharing, StochasticSteps, TrainedSteps};
use crate::{AdvantageScale, LossWeight, NoiseLevel, RatioKind};

impl Recipe {
    /// Names [`Recipe::named`] knows.
    pub const NAMES: [&'static str; 16] = [
        "flash-grpo",
        "no-itg",
        "no-tgr",
        "no-itg-no-tgr",
        "flow-grpo",
        "flow-grpo-wan",
        "flow-grpo-fast-1",
        "flow-grpo-fast-2",
        "flow-grpo-cps",
        "flow-dppo",
        "mixgrpo",
        "mixgrpo-random",
        "mixgrpo-decay",
        "dancegrpo",
        "tempflow",
        "grpo-guard",
    ];

    /// The method of that name, with its published parameters; `None` for a name not in [`Recipe::NAMES`].
    ///
    /// | name | what |
    /// |---|---|
    /// | `flash-grpo` | the paper: [`Recipe::flash_grpo`] |
    /// | `no-itg` | ablation: each rollout draws its own step (no iso-temporal grouping) |
    /// | `no-tgr` | ablation: uniform loss (no temporal gradient rectification) |
    /// | `no-itg-no-tgr` | both; also the paper's "Flow-GRPO-Fast1" baseline |
    /// | `flow-grpo`, `flow-grpo-wan` | full trajectory; with Wan's linear noise level |
    /// | `flow-grpo-fast-1`, `-2` | 1 or 2 consecutive steps, start drawn once per iteration |
    /// | `flow-grpo-cps` | Flow-GRPO-Fast 1 with coefficient-preserving steps |
    /// | `flow-dppo` | Flow-GRPO with a KL mask instead of the clip |
    /// | `mixgrpo`, `mixgrpo-random`, `mixgrpo-decay` | a window of 4: sliding; random, its first step one of the first 8; sliding faster towards the data |
    /// | `dancegrpo` | all steps noisy, a random 60 % trained |
    /// | `tempflow` | one branch step per seed, weighted by its noise |
    /// | `grpo-guard` | Flow-GRPO-Fast 1 with the normalised ratio and its gradient reweighting |
    pub fn named(name: &str) -> Option<Recipe> {
        Some(match name {
            "flash-grpo" => Recipe::flash_grpo(),
            "no-itg" => Recipe { sharing: StepSharing::PerRollout, ..Recipe::flash_grpo() },
            "no-tgr" => Recipe { loss_weight: LossWeight::Uniform, ..Recipe::flash_grpo() },
            "no-itg-no-tgr" => Recipe { sharing: StepSharing::PerRollout, ..Recipe::named("no-tgr")? },
            "flow-grpo" => Recipe::flow_grpo(),
            "flow-grpo-wan" => Recipe { noise_level: NoiseLevel::Linear { eta: 1.0 }, ..Recipe::flow_grpo() },
            "flow-grpo-fast-1" => Recipe::flow_grpo_fast(1),
            "flow-grpo-fast-2" => Recipe::flow_grpo_fast(2),
            "flow-grpo-cps" => Recipe { noise_level: NoiseLevel::named("cps")?, ..Recipe::flow_grpo_fast(1) },
            "flow-dppo" => Recipe { kl_mask: Some(1e-4), ..Recipe::flow_grpo() },
            "mixgrpo" => Recipe::mixgrpo(None),
            "mixgrpo-random" => Recipe { stochastic: StochasticSteps::Random { count: 4, pool: 8 }, ..Recipe::mixgrpo(None) },
            "mixgrpo-decay" => Recipe::mixgrpo(Some(Decay { rate: 0.1, from: 13 })),
            "dancegrpo" => Recipe::dancegrpo(),
            "tempflow" => Recipe::tempflow(),
            "grpo-guard" => Recipe::grpo_guard(),
            _ => return None,
        })
    }

    /// Flash-GRPO as published (arXiv 2605.15980): one stochastic step out of the first 10 (of 20), shared by the rollouts
    /// of a prompt, its loss rectified.
    pub fn flash_grpo() -> Recipe {
        Recipe {
            stochastic: StochasticSteps::Random { count: 1, pool: 10 },
            trained: TrainedSteps::All,
            sharing: StepSharing::PerPrompt,
            noise_level: NoiseLevel::Linear { eta: 1.0 },
            loss_weight: LossWeight::Rectified,
            initial_noise: InitialNoise::Independent,
            advantage: AdvantageScale::BatchStd,
            ratio: RatioKind::Plain,
            kl_mask: None,
        }
    }

    /// Flow-GRPO (arXiv 2505.05470): noise in every step but the last, all trained.
    fn flow_grpo() -> Recipe {
        Recipe {
            stochastic: StochasticSteps::All,
            sharing: StepSharing::PerIteration,
            noise_level: NoiseLevel::Flow { a: 0.7 },
            loss_weight: LossWeight::Uniform,
            ..Recipe::flash_grpo()
        }
    }

    /// Flow-GRPO-Fast (same repository): a short window that starts in the first half.
    fn flow_grpo_fast(count: usize) -> Recipe {
        Recipe { stochastic: StochasticSteps::Random { count, pool: 10 }, noise_level: NoiseLevel::Flow { a: 0.8 }, ..Recipe::flow_grpo() }
    }

    /// MixGRPO (arXiv 2507.21802): a window of 4 steps moves from noise to data, the rollouts of a prompt share their noise.
    fn mixgrpo(decay: Option<Decay>) -> Recipe {
        Recipe {
            stochastic: StochasticSteps::Sliding { size: 4, stride: 1, every: 25, decay },
            initial_noise: InitialNoise::SharedInGroup,
            advantage: AdvantageScale::GroupStd,
            ..Recipe::flow_grpo()
        }
    }

    /// DanceGRPO (arXiv 2505.07818): all steps noisy, a random 60 % of them trained.
    ///
    /// Its last step draws noise too, but what is decoded is the prediction before that noise: the same as no noise there.
    fn dancegrpo() -> Recipe {
        Recipe {
            trained: TrainedSteps::Fraction { fraction: 0.6 },
            sharing: StepSharing::PerRollout,
            noise_level: NoiseLevel::Constant { eta: 0.3 },
            initial_noise: InitialNoise::SharedInGroup,
            advantage: AdvantageScale::GroupStdUnbiased,
            ..Recipe::flow_grpo()
        }
    }

    /// TempFlow-GRPO (arXiv 2508.04324): a seed branches into its group at one step, whose noise weighs the loss.
    fn tempflow() -> Recipe {
        Recipe {
            stochastic: StochasticSteps::Random { count: 1, pool: 10 },
            sharing: StepSharing::PerPrompt,
            loss_weight: LossWeight::NoiseLevel,
            initial_noise: InitialNoise::SharedInGroup,
            advantage: AdvantageScale::GroupStd,
            ..Recipe::flow_grpo()
        }
    }

    /// GRPO-Guard (arXiv 2510.22319) on Flow-GRPO-Fast 1. Its reference divides the loss by the step length `h`; ours by
    /// `|b|`, which is `h` up to the SDE's drift correction and exactly flat.
    fn grpo_guard() -> Recipe {
        Recipe { ratio: RatioKind::Normalised, loss_weight: LossWeight::Rectified, ..Recipe::flow_grpo_fast(1) }
    }
}
