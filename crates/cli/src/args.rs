//! The command line.

use crate::commands;
use clap::{Parser, Subcommand};

/// Aligns video diffusion models with rewards by Flash-GRPO.
#[derive(Debug, Parser)]
#[command(name = "flash-grpo", version, propagate_version = true)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Align a model with its rewards, as a recipe says.
    Train(commands::train::TrainArgs),
    /// Evaluate a model on held-out prompts, or an adapter against its base.
    Eval(commands::eval::EvalArgs),
    /// Show a resolved recipe, its step table, and what is trained.
    Inspect(commands::inspect::InspectArgs),
    /// Show what a run will take: memory, operations, time, and what to change if it does not fit.
    Plan(commands::plan::PlanArgs),
    /// Recompute recorded transitions: log-probs, ratios, loss, gradient norm, updates.
    Replay(commands::replay::ReplayArgs),
    /// Train a small model from scratch: moving shapes, or signs.
    Pretrain(commands::pretrain::PretrainArgs),
    /// Run recipes side by side, at equal compute, over several seeds.
    Compare(commands::compare::CompareArgs),
    /// Write one HTML file about runs and comparisons: tables, curves, videos before and after, numbers.
    Report(commands::report::ReportArgs),
    /// Find out whether rewards are fit to train on.
    Reward(commands::reward::RewardArgs),
    /// Fetch a model from the hub into the cache that the Python libraries use.
    #[cfg(feature = "download")]
    Download(commands::download::DownloadArgs),
    /// Write a model folder of a released size with random weights, to rehearse a run.
    RandomModel(commands::random_model::RandomModelArgs),
    /// List the devices that can compute, and let each of them try.
    Doctor(commands::doctor::DoctorArgs),
    /// Make a video from a prompt.
    Sample(Box<commands::sample::SampleArgs>),
}
