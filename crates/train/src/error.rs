//! The crate's one error type.

use std::path::{Path, PathBuf};

/// What can stop a run. Every message says what was found and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The recipe.
    #[error(transparent)]
    Settings(#[from] crate::settings::SettingsError),
    /// The model, an adapter or a file.
    #[error(transparent)]
    Wan(#[from] wan::Error),
    /// The method.
    #[error("{0}\nhint: {hint}", hint = .0.hint())]
    Grpo(#[from] grpo::Error),
    /// A reward that cannot score.
    #[error(
        "{0}\nhint: prompts must be such as the reward understands, and servers must answer; a run that was begun goes on with `--resume`"
    )]
    Reward(#[from] reward::RewardError),
    /// A reward that cannot be used at all.
    #[error(transparent)]
    RewardSetup(#[from] reward::SetupError),
    /// A video that cannot be written.
    #[error("{0}\nhint: check free space and permissions of the run folder")]
    Video(#[from] video::VideoError),
    /// A picture that a video should start with.
    #[error(transparent)]
    Picture(video::VideoError),
    /// A self-check at the start of a run.
    #[error("self-check `{check}` failed: {found}\nhint: {hint}")]
    Check {
        /// Which check.
        check: &'static str,
        /// What was measured.
        found: String,
        /// What to do.
        hint: &'static str,
    },
    /// Too many numbers that are none, after the self-checks passed.
    #[error(
        "{skipped} of {all} {what} of {place} are not finite or have no reward, more than `train.max_skipped` = {allowed} allows; the last good state is kept\nhint: look at the warnings above; see to the reward's server and resume, lower `optimizer.learning_rate`, or raise `train.max_skipped`"
    )]
    NotFinite {
        /// `samples` or `updates`.
        what: &'static str,
        /// How many are not finite.
        skipped: usize,
        /// Of how many.
        all: usize,
        /// The share that is tolerated.
        allowed: f64,
        /// `iteration N`, or which evaluation.
        place: String,
    },
    /// Somebody asked the run to end; the caller of the iteration saves and reports.
    #[error("stopped by signal {signal}")]
    Stopped {
        /// What it was asked with.
        signal: usize,
    },
    /// The run ended early, as it was asked; everything is saved.
    #[error("stopped after {iterations} iterations\nhint: {hint}")]
    Interrupted {
        /// What it was asked with.
        signal: usize,
        /// Iterations made and saved.
        iterations: u64,
        /// How it goes on.
        hint: String,
    },
    /// A checkpoint that cannot be used.
    #[error("checkpoint `{path}`: {reason}\nhint: {hint}", path = path.display())]
    Checkpoint {
        /// Its folder.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        hint: &'static str,
    },
    /// A resumed run with another recipe.
    #[error(
        "the recipe is not that of the checkpoint `{path}`:{changes}\nhint: the result would be that of neither recipe; to go on all the same, add `--allow-change`",
        path = path.display()
    )]
    ChangedRecipe {
        /// The checkpoint.
        path: PathBuf,
        /// Lines `key = old -> new`.
        changes: String,
    },
    /// The run folder.
    #[error("`output_dir` is `{path}`: {reason}\nhint: {hint}", path = path.display())]
    RunFolder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        hint: &'static str,
    },
    /// A comparison of recipes.
    #[error("{reason}\nhint: {hint}")]
    Compare {
        /// What is wrong.
        reason: String,
        /// What to do.
        hint: &'static str,
    },
    /// A file of recorded rollouts.
    #[error("`{path}`: {reason}\nhint: {hint}", path = path.display())]
    Recording {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        hint: &'static str,
    },
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An [`Error::RunFolder`].
    pub fn run_folder(path: impl AsRef<Path>, reason: impl ToString, hint: &'static str) -> Self {
        Self::RunFolder { path: path.as_ref().into(), reason: reason.to_string(), hint }
    }

    /// An [`Error::Recording`].
    pub fn recording(path: impl AsRef<Path>, reason: impl ToString, hint: &'static str) -> Self {
        Self::Recording { path: path.as_ref().into(), reason: reason.to_string(), hint }
    }
}
