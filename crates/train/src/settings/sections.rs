//! The sections of a recipe, as they stand in the file.

use std::path::PathBuf;

use burn::tensor::DType;
use grpo::{AdvantageScale, InitialNoise, LossWeight, NoiseLevel, RatioKind, SigmaGrid, StepSharing, StochasticSteps, TrainedSteps};
use serde::{Deserialize, Serialize};
use wan::vae::Tiling;

pub use crate::optimizer::AdamWConfig as OptimizerSettings;
pub use reward::RewardEntry as RewardSettings;
pub use wan::lora::LoraInit;
pub use wan::solver::SolverKind as Solver;

use super::PromptSource;

/// `[model]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// A folder in the diffusers layout (`model_index.json`, `transformer/`, `vae/`, ...), or the id of such a model on the Hugging Face hub
    /// (`Wan-AI/Wan2.1-T2V-1.3B-Diffusers`) that is in its cache already.
    pub path: PathBuf,
    /// Folder for the embeddings of prompts: what is in it is not encoded again, by no run. The text encoder is then read layer by layer,
    /// and not at all when nothing is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_cache: Option<PathBuf>,
}

/// `[prompts]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptSettings {
    /// Prompts of the rollouts.
    pub train: PromptSource,
    /// Held-out prompts of the evaluation.
    pub eval: PromptSource,
    /// Negative prompt, used when `guidance_scale` is above 1.
    #[serde(default)]
    pub negative: String,
}

/// `[sampling]`: the rollout's video size and solver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingSettings {
    /// Pixels, a multiple of 16; of 32 for Wan2.2 TI2V-5B ([`Settings::check_size`](super::Settings::check_size)).
    pub height: usize,
    /// Pixels, likewise.
    pub width: usize,
    /// Frames, 4k + 1.
    pub num_frames: usize,
    /// Frames a second: what rewards are told, and how video files play. Wan2.1 and Wan2.2 A14B make 16, TI2V-5B 24.
    #[serde(default = "default::fps")]
    pub fps: f64,
    /// Denoising steps of a rollout.
    pub num_inference_steps: usize,
    /// Classifier-free guidance in rollout and training; 1 is off.
    #[serde(default = "default::one")]
    pub guidance_scale: f64,
    /// That of the steps which the second network takes, in a model with two (Wan2.2 A14B); if absent, the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guidance_scale_2: Option<f64>,
    /// Layout of the sigmas.
    #[serde(default)]
    pub grid: SigmaGrid,
    /// Shift of the sigmas.
    #[serde(default = "default::shift")]
    pub shift: f64,
    /// Text tokens, padding included.
    #[serde(default = "default::max_sequence_length")]
    pub max_sequence_length: usize,
    /// Encode and decode large frames in overlapping tiles of 256x256 pixels (`wan::vae::Tiling`): less memory, more work, and slightly other videos.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vae_tiling: bool,
}

impl SamplingSettings {
    /// The tiles, where frames are to be divided.
    pub fn tiling(&self) -> Option<Tiling> {
        self.vae_tiling.then(Tiling::default)
    }

    /// The scale that tells how many branches a velocity has; that of the second network where only that is guided, which counts the first
    /// as guided too.
    pub fn widest_guidance(&self) -> f64 {
        if self.guidance_scale == 1.0 { self.guidance_scale_2.unwrap_or(1.0) } else { self.guidance_scale }
    }
}

/// `[method]`: a named base, each choice of which can be replaced. See [`grpo::Recipe`] for the choices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MethodSettings {
    /// One of [`grpo::Recipe::NAMES`].
    pub name: String,
    /// Which steps draw noise.
    pub stochastic: StochasticSteps,
    /// Which of them are trained.
    pub trained: TrainedSteps,
    /// Who shares the choice.
    pub sharing: StepSharing,
    /// How much noise.
    pub noise_level: NoiseLevel,
    /// Weight of each step's loss.
    pub loss_weight: LossWeight,
    /// Starting latents.
    pub initial_noise: InitialNoise,
    /// Divisor of the centred rewards.
    pub advantage: AdvantageScale,
    /// Form of the probability ratio.
    pub ratio: RatioKind,
    /// Largest KL per element that a step may move, instead of `train.clip_range`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_mask: Option<f64>,
}

/// `[rollout]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutSettings {
    /// Prompts (groups) per iteration.
    pub prompts_per_iteration: usize,
    /// Rollouts per prompt.
    pub group_size: usize,
    /// Samples that run through the network at once.
    #[serde(default = "default::micro_batch")]
    pub micro_batch: usize,
    /// Compute what the rollouts of a prompt have in common once, if they start from the same noise: everything up to their stochastic
    /// step, in sampling and in the update; else there is nothing to share. Only those of a micro-batch share: with `micro_batch` 1, none.
    /// Rollouts are the same, bit for bit, where a sample's velocity does not depend on the rest of the batch (CPU); gradients up to the order
    /// of their sums.
    #[serde(default = "default::shared_prefix")]
    pub shared_prefix: bool,
    /// After its last stochastic step a rollout takes this many steps of UniPC instead of all that are left; leave it out for all.
    /// Saves forwards, and changes the videos a little: rewards are those of another solver than the evaluation's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed_suffix: Option<usize>,
    /// Keep the computation of the trained steps for the first update, which then needs no forward: the same gradients, bit for bit
    /// (CPU, f32), for the memory of all graphs of an update at once.
    #[serde(default)]
    pub retain_step: bool,
}

/// `[policy]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PolicySettings {
    /// Low-rank adapters; the base weights stay.
    Lora {
        /// Rank of the adapters.
        rank: usize,
        /// The adapter counts `alpha / rank`.
        alpha: f64,
        /// Name endings of the linear layers that get one, as in PEFT.
        target_modules: Vec<String>,
        /// How `A` starts; `B` starts at zero, so that the policy starts as the base.
        #[serde(default)]
        init: LoraInit,
    },
    /// All weights of the transformer.
    Full,
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainSettings {
    /// Rollout phases.
    pub iterations: usize,
    /// Optimizer steps per rollout phase.
    #[serde(default = "default::updates_per_iteration")]
    pub updates_per_iteration: usize,
    /// Clip range of the ratio, in per-element units.
    #[serde(default = "default::clip_range")]
    pub clip_range: f64,
    /// Weight of the KL to the base; 0 is off.
    #[serde(default)]
    pub kl_beta: f64,
    /// Advantages are clamped to this magnitude.
    #[serde(default = "default::advantage_clip")]
    pub advantage_clip: f64,
    /// Decay of the averaged weights; 0 is off.
    #[serde(default = "default::ema_decay")]
    pub ema_decay: f64,
    /// Updates between two steps of the average.
    #[serde(default = "default::ema_every")]
    pub ema_every: usize,
    /// Share of an iteration's samples or updates that may be left out because they are not finite; more of them end the run.
    #[serde(default = "default::max_skipped")]
    pub max_skipped: f64,
    /// Keep only what each block of the transformer starts from and compute the rest again in backward: a fraction of the memory for one
    /// more forward pass. The gradients are the same, bit for bit, on the CPU in f32.
    #[serde(default)]
    pub activation_checkpointing: bool,
    /// Numbers of the transformer, in training and in evaluation.
    #[serde(default)]
    pub mixed_precision: MixedPrecision,
}

/// What the frozen weights and the activations of the transformer are held in. Adapters, gradients, optimizer, latents and the mathematics of
/// the steps are f32 or f64 in either case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MixedPrecision {
    /// f32.
    #[default]
    No,
    /// bf16, but for what the reference keeps in f32: timestep embedding, modulation, layer norms, gated sums, rotation.
    Bf16,
}

impl MixedPrecision {
    /// The dtype of the frozen weights.
    pub fn dtype(self) -> DType {
        match self {
            Self::No => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// `[eval]`: deterministic sampling of held-out prompts from fixed noise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalSettings {
    /// Prompts taken from `prompts.eval`.
    pub num_prompts: usize,
    /// Videos per prompt.
    pub samples_per_prompt: usize,
    /// Iterations between evaluations; 0 is only before and after.
    pub every: usize,
    /// Denoising steps.
    pub num_inference_steps: usize,
    /// Solver of the ODE.
    pub solver: Solver,
    /// Seed of the noise, not that of the run: all runs are compared on the same.
    pub seed: u64,
    /// Resamplings of the paired bootstrap interval.
    pub bootstrap: usize,
    /// Videos written before and after, one for a prompt at most.
    pub videos: usize,
}

/// `[scoring]`: how rewards become advantages, and what is kept of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScoringSettings {
    /// How several rewards become one.
    pub combination: Combination,
    /// Folder for the values of rewards from servers and programs, so that a clip is scored once, over resumed and compared runs; empty is
    /// none.
    pub cache: PathBuf,
}

/// How several rewards become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Combination {
    /// Their weighted sum as it is.
    #[default]
    WeightedSum,
    /// Each is normalised within its group, then weighted and added (GDPO): a weight then says what it seems to say, whatever the units.
    GroupNormalised,
}

impl Default for ScoringSettings {
    fn default() -> Self {
        ScoringSettings { combination: Combination::default(), cache: "runs/reward-cache".into() }
    }
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSettings {
    /// Iterations between checkpoints; 0 is only at the end.
    pub every: usize,
    /// Newest checkpoints kept.
    pub keep_last: usize,
    /// Checkpoints of highest held-out reward that are kept besides; needs `eval.every`.
    pub keep_best: usize,
}

/// `[debug]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DebugSettings {
    /// Write the transitions of each iteration, for `flash-grpo replay`.
    pub save_rollouts: bool,
}

/// What holds where a recipe says nothing (docs/recipe.md). Many are published values; guidance and `mixed_precision` are off instead.
pub(super) mod default {
    use std::path::PathBuf;

    pub fn seed() -> u64 {
        1
    }
    pub fn output_dir() -> PathBuf {
        "runs/run".into()
    }
    pub fn one() -> f64 {
        1.0
    }
    pub fn shift() -> f64 {
        3.0
    }
    pub fn fps() -> f64 {
        reward::Sample::FPS
    }
    pub fn max_sequence_length() -> usize {
        512
    }
    pub fn micro_batch() -> usize {
        1
    }
    pub fn shared_prefix() -> bool {
        true
    }
    pub fn updates_per_iteration() -> usize {
        2
    }
    pub fn clip_range() -> f64 {
        1e-3
    }
    pub fn advantage_clip() -> f64 {
        5.0
    }
    pub fn ema_decay() -> f64 {
        0.9
    }
    pub fn ema_every() -> usize {
        8
    }
    pub fn max_skipped() -> f64 {
        0.1
    }
}

impl Default for EvalSettings {
    fn default() -> Self {
        EvalSettings {
            num_prompts: 32,
            samples_per_prompt: 1,
            every: 0,
            num_inference_steps: 50,
            solver: Solver::Euler,
            seed: 0,
            bootstrap: 10_000,
            videos: 4,
        }
    }
}

impl Default for CheckpointSettings {
    fn default() -> Self {
        CheckpointSettings { every: 10, keep_last: 2, keep_best: 0 }
    }
}
