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
    /// Make a video from a prompt.
    Sample(commands::sample::SampleArgs),
}
