//! The configuration of a run: typed text -> validated settings -> used.
//!
//! A recipe is a TOML file; the built-in one is used when none is named. [`Settings::load`] merges the named method's
//! published values, the file, and `--set` overrides, in that order, and refuses what cannot work before any model is opened.
//! [`Settings::to_toml`] prints what came out: a complete recipe that reproduces the run.

use std::path::{Path, PathBuf};

use grpo::{InitialNoise, PolicyLoss, Recipe, Schedule};
use serde::{Deserialize, Serialize};

mod changes;
mod error;
mod inspect;
mod parse;
mod prompts;
mod sections;
mod source;
mod validate;
mod wording;

pub use changes::Change;
pub use error::SettingsError;
pub use inspect::StepRow;
pub use prompts::{Prompt, PromptSource, read_prompt_file};

pub use sections::*;
pub(crate) use wording::hint_for_choice;

/// The recipe used when none is named.
pub const DEFAULT_RECIPE: &str = include_str!("../../../../recipes/moving_shapes_cpu.toml");
/// How messages call it.
pub const DEFAULT_RECIPE_NAME: &str = "moving_shapes_cpu.toml (built in)";

/// Everything a run needs to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Seed of every random number of the run.
    #[serde(default = "sections::default::seed")]
    pub seed: u64,
    /// Where the run is written; relative to the current directory, as all paths.
    #[serde(default = "sections::default::output_dir")]
    pub output_dir: PathBuf,
    /// What is trained.
    pub model: ModelSettings,
    /// What it is asked for.
    pub prompts: PromptSettings,
    /// How videos are made.
    pub sampling: SamplingSettings,
    /// The GRPO method.
    pub method: MethodSettings,
    /// How much is sampled per iteration.
    pub rollout: RolloutSettings,
    /// Which weights are trained.
    pub policy: PolicySettings,
    /// AdamW.
    #[serde(default)]
    pub optimizer: OptimizerSettings,
    /// The loop.
    pub train: TrainSettings,
    /// The pinned evaluation before, during and after.
    #[serde(default)]
    pub eval: EvalSettings,
    /// What is rewarded; the rewards are added with their weights.
    pub reward: Vec<RewardSettings>,
    /// What the evaluation counts instead; never trained on. Without any, it counts what is trained on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eval_reward: Vec<RewardSettings>,
    /// How rewards become advantages.
    #[serde(default)]
    pub scoring: ScoringSettings,
    /// When the state is saved.
    #[serde(default)]
    pub checkpoint: CheckpointSettings,
    /// Extra output for debugging.
    #[serde(default)]
    pub debug: DebugSettings,
}

impl Settings {
    /// Reads a recipe (`None`: the built-in one), applies `a.b=c` overrides, and checks every value.
    ///
    /// The value of an override is TOML (`1e-4`, `true`, `[1, 2]`, `{ type = "all" }`); anything else is a string.
    /// Nothing but the recipe is opened; see [`check_files`](Settings::check_files) for the rest.
    ///
    /// # Errors
    /// The first thing that is wrong, with its place, field, value and a hint.
    pub fn load(path: Option<&Path>, overrides: &[String]) -> Result<Settings, SettingsError> {
        match path {
            None => Settings::parse(DEFAULT_RECIPE_NAME, DEFAULT_RECIPE, overrides),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| SettingsError::unreadable(path, &error))?;
                Settings::parse(&path.display().to_string(), &text, overrides)
            }
        }
    }

    /// The complete recipe, with every default and override resolved; loading it gives these settings again.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| format!("# cannot be written as TOML: {error}\n"))
    }

    /// The model's folder: `model.path`, or where the cache of the Hugging Face hub keeps the model of that id.
    ///
    /// # Errors
    /// An id that the cache does not hold.
    pub fn model_folder(&self) -> Result<PathBuf, wan::Error> {
        wan::hub::resolve(&self.model.path)
    }

    /// The sigmas of the rollouts.
    ///
    /// # Errors
    /// None after [`Settings::load`]; values set by hand may not make a schedule.
    pub fn schedule(&self) -> Result<Schedule, grpo::Error> {
        Schedule::new(self.sampling.grid, self.sampling.num_inference_steps, self.sampling.shift)
    }

    /// The sigmas of the evaluation: the same grid with its own number of steps.
    ///
    /// # Errors
    /// As [`Settings::schedule`].
    pub fn eval_schedule(&self) -> Result<Schedule, grpo::Error> {
        Schedule::new(self.sampling.grid, self.eval.num_inference_steps, self.sampling.shift)
    }

    /// Whether the rollouts of a prompt have a prefix in common, which is computed once.
    pub fn shares_prefix(&self) -> bool {
        self.rollout.shared_prefix && self.method.initial_noise == InitialNoise::SharedInGroup
    }

    /// The loss of the method.
    ///
    /// # Errors
    /// None after [`Settings::load`]; values set by hand may not make a loss.
    pub fn loss(&self) -> Result<PolicyLoss, grpo::Error> {
        let (train, method) = (&self.train, &self.method);
        let loss = PolicyLoss { ratio: method.ratio, clip_range: train.clip_range, kl_mask: method.kl_mask, kl_beta: train.kl_beta };
        loss.validate().map(|()| loss)
    }

    /// The method as a value.
    pub fn recipe(&self) -> Recipe {
        let method = &self.method;
        Recipe {
            stochastic: method.stochastic,
            trained: method.trained,
            sharing: method.sharing,
            noise_level: method.noise_level,
            loss_weight: method.loss_weight,
            initial_noise: method.initial_noise,
            advantage: method.advantage,
            ratio: method.ratio,
            kl_mask: method.kl_mask,
        }
    }
}
