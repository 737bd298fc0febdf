//! `flash-grpo reward check`: whether the rewards of a recipe are fit to train on.

use super::train::RecipeArgs;
use crate::device::DeviceArg;
use crate::progress;
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use reward::Sample;
use reward::check::{CheckOptions, RewardCheck, check};
use std::path::PathBuf;
use train::evaluate::sample_clips;
use train::scoring::Asked;
use train::trainer::Trainer;
use video::Frames;

/// Arguments of `reward`.
#[derive(Debug, Args)]
pub struct RewardArgs {
    #[command(subcommand)]
    command: RewardCommand,
}

#[derive(Debug, Subcommand)]
enum RewardCommand {
    /// Contact every reward of a recipe, score the model's own videos and spoiled ones, and tell speed, repeatability, spread and ranking.
    Check(CheckArgs),
}

/// Arguments of `reward check`.
#[derive(Debug, Args)]
struct CheckArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Held-out prompts.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    prompts: u16,
    /// Videos of each prompt.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..))]
    samples_per_prompt: u16,
    /// An adapter: its videos are better known to be good than those of the base.
    #[arg(long, value_name = "PATH")]
    lora: Option<PathBuf>,
    /// Adapter of the second transformer, in a model with two [default: the folder `transformer_2` in that of `--lora`, if there is one].
    #[arg(long, value_name = "PATH", requires = "lora")]
    lora_2: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// Bad input; a reward that cannot be used, or scores nothing.
pub fn run_command(args: &RewardArgs) -> Result<()> {
    let RewardCommand::Check(args) = &args.command;
    let mut settings = args.recipe.load()?;
    settings.scoring.cache = PathBuf::new(); // what is known already says nothing about the reward
    let device = args.device.open()?;
    let trainer = Trainer::new(settings, &device)?;
    if let Some(path) = &args.lora {
        let experts = trainer.policy.experts();
        experts.detach();
        experts.attach(experts.read_adapters(path, args.lora_2.as_deref())?, &device)?;
    }
    let bar = progress::bar("videos".to_owned(), usize::from(args.prompts) * usize::from(args.samples_per_prompt));
    let clips = sample_clips(&trainer, args.prompts.into(), args.samples_per_prompt.into(), |done| bar.set_position(done))?;
    bar.finish_and_clear();
    let checks = check_all(&trainer, &clips);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&checks)?);
    } else {
        checks.iter().for_each(|check| println!("{check}"));
    }
    match checks.iter().find(|check| !check.scores()) {
        Some(RewardCheck { name, first_error: Some(error), .. }) => {
            bail!("`{name}` could score no video; the first: {error}\nhint: nothing can be trained on it before that is put right")
        }
        _ => Ok(()),
    }
}

/// Every reward of training and of evaluation.
fn check_all(trainer: &Trainer, clips: &[(usize, Frames)]) -> Vec<RewardCheck> {
    let good: Vec<Sample<'_>> = clips.iter().map(|(prompt, frames)| sample(trainer, *prompt, frames)).collect();
    let rewards = trainer.reward.rewards().chain(trainer.eval_reward.iter().flat_map(reward::Weighted::rewards));
    rewards.map(|(name, reward)| RewardCheck { name: name.to_owned(), ..check(reward, &good, &CheckOptions::default()) }).collect()
}

/// A clip of a held-out prompt as an evaluation shows it to rewards.
fn sample<'a>(trainer: &'a Trainer, prompt: usize, frames: &'a Frames) -> Sample<'a> {
    let Asked { prompt, metadata, fps } = trainer.eval_prompts.asked(prompt, trainer.settings.sampling.fps);
    Sample { prompt, frames, fps, metadata }
}
