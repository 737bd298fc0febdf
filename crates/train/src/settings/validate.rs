//! What a recipe must satisfy beyond its types. One function per section, in the order of the file.

use std::collections::HashSet;
use std::path::Path;

use grpo::{GroupLayout, LossWeights, Schedule, StochasticSteps};
use wan::experts::Boundary;
use wan::pipeline::SampleRequest;
use wan::transformer::TransformerConfig;
use wan::vae::VaeConfig;

use super::prompts::{check_prompt, read_prompt_file};
use super::{MixedPrecision, PolicySettings, PromptSource, Settings, SettingsError};

type Checked = Result<(), SettingsError>;

/// Smallest unit of a video of any model: 8 pixels per latent (VAE), 2 latents per patch (transformer). That of the model at hand is asked
/// for by [`Settings::check_size`].
const PIXELS_PER_PATCH: usize = 16;

impl Settings {
    /// Checks every value; opens nothing. The error has no place yet.
    pub(super) fn validate(&self) -> Checked {
        require(!self.output_dir.as_os_str().is_empty(), "output_dir", "", "a folder", "for instance `runs/mine`")?;
        require(!self.model.path.as_os_str().is_empty(), "model.path", "", "a folder", "for instance `models/moving-shapes`")?;
        check_prompt(&self.prompts.negative, "", "prompts.negative")?;
        self.validate_sampling()?;
        self.validate_method()?;
        self.validate_rollout()?;
        self.validate_policy()?;
        self.validate_optimizer()?;
        self.validate_train()?;
        self.validate_eval()?;
        self.validate_reward()?;
        self.validate_checkpoint()
    }

    fn validate_sampling(&self) -> Checked {
        let sampling = &self.sampling;
        multiple_of_patch("sampling.height", sampling.height)?;
        multiple_of_patch("sampling.width", sampling.width)?;
        let (field, frames) = ("sampling.num_frames", sampling.num_frames);
        let below = frames.saturating_sub(1) / 4 * 4 + 1;
        let hint = format!("the nearest are {below} and {}: one frame, then four per latent", below + 4);
        require(frames % 4 == 1, field, frames, "4k + 1", &hint)?;
        let fps = sampling.fps;
        let hint = "Wan2.1 makes 16 frames a second, Wan2.2 TI2V-5B 24";
        require(fps > 0.0 && fps <= video::MAX_FPS, "sampling.fps", fps, "a number above 0, up to 1000", hint)?;
        let (field, length) = ("sampling.max_sequence_length", sampling.max_sequence_length);
        require((1..=512).contains(&length), field, length, "1 to 512", "Wan is trained with 512")?;
        let guides = |field: &str, scale: f64| {
            let hint = "1 switches guidance off; Wan uses 4.5 to 6; below 1 the prompt counts less than without guidance";
            require(scale.is_finite() && scale >= 1.0, field, scale, "a number from 1", hint)
        };
        guides("sampling.guidance_scale", sampling.guidance_scale)?;
        sampling.guidance_scale_2.map_or(Ok(()), |scale| guides("sampling.guidance_scale_2", scale))?;
        self.schedule().map_err(|error| from_grpo("sampling", &error)).map(drop)
    }

    fn validate_method(&self) -> Checked {
        let schedule = self.schedule().map_err(|error| from_grpo("sampling", &error))?;
        LossWeights::new(&self.recipe(), &schedule).map_err(|error| from_grpo("method", &error)).map(drop)
    }

    fn validate_rollout(&self) -> Checked {
        let rollout = &self.rollout;
        GroupLayout::new(rollout.prompts_per_iteration, rollout.group_size).map_err(|error| from_grpo("rollout", &error))?;
        at_least_one("rollout.micro_batch", rollout.micro_batch, "1 needs the least memory")?;
        let hint = "one of them keeps the graph of a step, the other gives it up to save memory; switch one off";
        let both = rollout.retain_step && self.train.activation_checkpointing;
        require(!both, "rollout.retain_step", true, "false with `train.activation_checkpointing`", hint)?;
        let Some(steps) = rollout.compressed_suffix else { return Ok(()) };
        let field = "rollout.compressed_suffix";
        at_least_one(field, steps, "leave it out to take every step of the schedule")?;
        let all_random = matches!(self.method.stochastic, StochasticSteps::All);
        let hint = "every step but the last draws noise, so there is no deterministic end to shorten; leave the key out";
        require(!all_random, field, steps, "nothing with `method.stochastic = { type = \"all\" }`", hint)
    }

    fn validate_policy(&self) -> Checked {
        let PolicySettings::Lora { rank, alpha, target_modules, .. } = &self.policy else {
            return Ok(());
        };
        at_least_one("policy.rank", *rank, "16 is the published value")?;
        positive("policy.alpha", *alpha, "the adapter counts alpha / rank; 32 with rank 16 is the published value")?;
        let hint = "the published ones are `to_q`, `to_k`, `to_v`, `to_out.0`";
        require(!target_modules.is_empty(), "policy.target_modules", "[]", "at least one name", hint)?;
        let mut seen = HashSet::new();
        let repeated = target_modules.iter().find(|name| name.is_empty() || !seen.insert(name.as_str()));
        repeated.map_or(Ok(()), |name| require(false, "policy.target_modules", name, "distinct, non-empty names", hint))
    }

    fn validate_optimizer(&self) -> Checked {
        let optimizer = &self.optimizer;
        positive("optimizer.learning_rate", optimizer.learning_rate, "1e-4 is the published value")?;
        for beta in optimizer.betas {
            let fits = (0.0..1.0).contains(&beta);
            require(fits, "optimizer.betas", beta, "two numbers from 0 to below 1", "[0.9, 0.999] are the published values")?;
        }
        not_negative("optimizer.weight_decay", optimizer.weight_decay, "0 switches it off")?;
        positive("optimizer.epsilon", optimizer.epsilon, "1e-8 is the published value")?;
        positive("optimizer.max_grad_norm", optimizer.max_grad_norm, "1.0 is the published value; a large one never clips")
    }

    fn validate_train(&self) -> Checked {
        let train = &self.train;
        at_least_one("train.iterations", train.iterations, "one iteration is one rollout phase")?;
        at_least_one("train.updates_per_iteration", train.updates_per_iteration, "2 is the published value")?;
        let (updates, samples) = (train.updates_per_iteration, self.rollout.prompts_per_iteration.saturating_mul(self.rollout.group_size));
        let hint = format!("an iteration has {samples} samples, and an update takes at least one of them; 2 is the published value");
        require(updates <= samples, "train.updates_per_iteration", updates, &format!("at most {samples}"), &hint)?;
        self.loss().map_err(|error| from_grpo("train", &error))?;
        positive("train.advantage_clip", train.advantage_clip, "5 is the published value")?;
        let decay = train.ema_decay;
        require((0.0..1.0).contains(&decay), "train.ema_decay", decay, "a number from 0 to below 1", "0 switches it off")?;
        let share = train.max_skipped;
        require((0.0..1.0).contains(&share), "train.max_skipped", share, "a share from 0 to below 1", "0.1 is the default")?;
        at_least_one("train.ema_every", train.ema_every, "`ema_decay = 0` switches the average off")?;
        let rounded = train.mixed_precision == MixedPrecision::Bf16 && self.policy == PolicySettings::Full;
        let hint =
            "an optimizer's step is smaller than the spacing of bf16 weights and would be lost; train an adapter, or all weights in f32";
        require(!rounded, "train.mixed_precision", "bf16", "\"no\" with `policy.type = \"full\"`", hint)
    }

    fn validate_eval(&self) -> Checked {
        let eval = &self.eval;
        at_least_one("eval.num_prompts", eval.num_prompts, "the interval needs about 30")?;
        at_least_one("eval.samples_per_prompt", eval.samples_per_prompt, "1 video per prompt is enough with many prompts")?;
        at_least_one("eval.bootstrap", eval.bootstrap, "10000 resamplings take a second")?;
        Schedule::new(self.sampling.grid, eval.num_inference_steps, self.sampling.shift)
            .map_err(|error| from_grpo("eval", &error))
            .map(drop)
    }

    fn validate_reward(&self) -> Checked {
        let hint = "add `[[reward]]` with `type = \"shapes\"`";
        require(!self.reward.is_empty(), "reward", "[]", "at least one reward", hint)?;
        for (section, rewards) in [("reward", &self.reward), ("eval_reward", &self.eval_reward)] {
            let mut numbered = rewards.iter().enumerate();
            numbered.try_for_each(|(i, reward)| reward.validate().map_err(|error| from_reward(&format!("{section}.{i}"), error)))?;
        }
        Ok(())
    }

    fn validate_checkpoint(&self) -> Checked {
        let checkpoint = &self.checkpoint;
        at_least_one("checkpoint.keep_last", checkpoint.keep_last, "the last checkpoint is what a run leaves behind")?;
        let best_is_known = checkpoint.keep_best == 0 || self.eval.every > 0;
        let hint =
            "which checkpoints are the best is known from evaluations on the way: set `eval.every`, for instance to `checkpoint.every`";
        require(best_is_known, "checkpoint.keep_best", checkpoint.keep_best, "0 with `eval.every = 0`", hint)
    }

    /// Checks that the files the recipe names are there and usable: the model folder and both prompt lists.
    ///
    /// Separate from [`Settings::load`], so that a recipe can be inspected on a machine that has no model.
    ///
    /// # Errors
    /// The first missing or unusable file.
    pub fn check_files(&self) -> Result<(), SettingsError> {
        check_model(&self.model.path)?;
        if self.sampling.guidance_scale_2.is_some() {
            // a folder whose index is broken is reported when it is loaded
            let boundary = self.model_folder().and_then(|folder| Boundary::of_folder(&folder));
            boundary.map_or(Ok(()), |boundary| self.check_networks(boundary))?;
        }
        for (field, source) in [("prompts.train", &self.prompts.train), ("prompts.eval", &self.prompts.eval)] {
            if let PromptSource::File(path) = source {
                read_prompt_file(path, field)?;
            }
        }
        Ok(())
    }
}

impl Settings {
    /// Checks what goes with the pictures that videos start with, where the prompts of training and of evaluation have some.
    ///
    /// # Errors
    /// Pictures in one of the two lists only; a video of one frame, which the picture would be.
    pub fn check_images(&self, [train, eval]: [bool; 2]) -> Result<(), SettingsError> {
        let error =
            |field: &str, message: String, hint: &str| Err(SettingsError::new(self.model.path.display().to_string(), field, message, hint));
        if train != eval {
            let [with, without] = if train { ["prompts.train", "prompts.eval"] } else { ["prompts.eval", "prompts.train"] };
            let message = format!("the prompts of `{with}` have images, those of `{without}` have none");
            return error(without, message, "what is evaluated should be what is trained: give both lists images, or neither");
        }
        if train && self.sampling.num_frames == 1 {
            let message = "`sampling.num_frames` is `1`, but the videos start with an image".to_owned();
            return error("sampling.num_frames", message, "choose at least 5");
        }
        Ok(())
    }

    /// Checks that the model has a use for every setting, given where its second network takes over, if it has one.
    ///
    /// # Errors
    /// A scale of guidance for a network that is not there.
    pub fn check_networks(&self, boundary: Option<Boundary>) -> Result<(), SettingsError> {
        let Some(scale) = self.sampling.guidance_scale_2.filter(|_| boundary.is_none()) else { return Ok(()) };
        let (name, field) = (self.model.path.display(), "sampling.guidance_scale_2");
        let message = format!("`{field}` is `{scale}`, but the model has one transformer");
        Err(SettingsError::new(name.to_string(), field, message, "leave it out: `sampling.guidance_scale` is that of every step"))
    }
}

impl Settings {
    /// Checks that a model can make videos of the recipe's size, as `flash-grpo sample` does: whole patches, and within the reach of its
    /// rotary table. ([`Settings::load`] knows no model; Wan2.2 TI2V-5B wants multiples of 32.)
    ///
    /// # Errors
    /// The first of height, width and frames that the model cannot make, with the nearest values that it can.
    pub fn check_size(&self, transformer: &TransformerConfig, vae: &VaeConfig) -> Result<(), SettingsError> {
        let check = |height, width, num_frames| {
            SampleRequest { height, width, num_frames, ..SampleRequest::default() }.check(transformer, vae).map(drop)
        };
        let [height, width, frames] = [self.sampling.height, self.sampling.width, self.sampling.num_frames];
        let Err(wan::Error::Argument { field, reason, hint, .. }) = check(height, width, frames) else { return Ok(()) };
        let size = |value| match field {
            "height" => check(value, width, frames),
            "width" => check(height, value, frames),
            _ => check(height, width, value),
        };
        // another field may be wrong as well: its turn comes later
        let fits = |value: &usize| !matches!(size(*value), Err(wan::Error::Argument { field: same, .. }) if same == field);
        let got = match field {
            "height" => height,
            "width" => width,
            _ => frames,
        };
        let nearest = [(1..got).rev().take(REACH).find(fits), (got + 1..).take(REACH).find(fits)];
        let hint = match nearest {
            [Some(below), Some(above)] => format!("the nearest are {below} and {above}"),
            [Some(one), None] | [None, Some(one)] => format!("the nearest is {one}"),
            [None, None] => hint,
        };
        let field = format!("sampling.{field}");
        let message = format!("`{field}` is `{got}`: {reason}");
        Err(SettingsError::new(self.model.path.display().to_string(), field, message, hint))
    }
}

/// How far from a size that a model cannot make another is looked for.
const REACH: usize = 256;

fn check_model(path: &Path) -> Checked {
    let name = path.display();
    let hint = "a folder in the diffusers layout, relative to the current directory (`models/moving-shapes` is in the repository), or a hub id, `Wan-AI/Wan2.1-T2V-1.3B-Diffusers`, once `flash-grpo download` has fetched it";
    let error = |what: &str| {
        let message = format!("`model.path` is `{name}`, {what}");
        SettingsError::new(name.to_string(), "model.path", message, hint)
    };
    let Ok(path) = wan::hub::resolve(path) else {
        return Err(error("which does not exist, nor does the hub's cache hold a model of that id"));
    };
    if !path.exists() {
        return Err(error("which does not exist"));
    }
    if !path.is_dir() {
        return Err(error("which is not a folder"));
    }
    if !path.join("model_index.json").is_file() {
        return Err(error("which has no `model_index.json`"));
    }
    Ok(())
}

fn require(fits: bool, field: &str, got: impl ToString, expected: &str, hint: &str) -> Checked {
    if fits {
        return Ok(());
    }
    Err(SettingsError::new("", field, format!("`{field}` is `{}`, expected {expected}", got.to_string()), hint))
}

fn multiple_of_patch(field: &str, pixels: usize) -> Checked {
    let below = (pixels / PIXELS_PER_PATCH * PIXELS_PER_PATCH).max(PIXELS_PER_PATCH);
    let hint = format!("the nearest are {below} and {}", below + PIXELS_PER_PATCH);
    let fits = pixels > 0 && pixels.is_multiple_of(PIXELS_PER_PATCH);
    require(fits, field, pixels, "a multiple of 16 (VAE 8, patch 2)", &hint)
}

fn at_least_one(field: &str, got: usize, hint: &str) -> Checked {
    require(got >= 1, field, got, "at least 1", hint)
}

fn positive(field: &str, got: f64, hint: &str) -> Checked {
    require(got.is_finite() && got > 0.0, field, got, "a positive number", hint)
}

fn not_negative(field: &str, got: f64, hint: &str) -> Checked {
    require(got.is_finite() && got >= 0.0, field, got, "0 or a positive number", hint)
}

/// An error of the rewards' library, whose fields are named within a section.
fn from_reward(section: &str, error: reward::SetupError) -> SettingsError {
    if error.field.is_empty() {
        return SettingsError::new("", section, format!("`{section}`: {}", error.message), error.hint);
    }
    let field = format!("{section}.{}", error.field);
    let message = error.message.replacen(&format!("`{}`", error.field), &format!("`{field}`"), 1);
    SettingsError::new("", field, message, error.hint)
}

/// An error of the method's library, whose fields are named within a section.
fn from_grpo(section: &str, error: &grpo::Error) -> SettingsError {
    let section = if error.field() == "num_inference_steps" && section == "method" { "sampling" } else { section };
    let field = format!("{section}.{}", error.field());
    let message = error.to_string().replacen(&format!("`{}`", error.field()), &format!("`{field}`"), 1);
    SettingsError::new("", field, message, error.hint())
}
