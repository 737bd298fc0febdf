//! What a video is worth. A [`Reward`] scores frames against their prompt; several are added with their weights.
//!
//! A failed sample is an error, never a number.

mod shapes_reward;
mod weighted;

pub use shapes_reward::ShapesReward;
pub use weighted::Weighted;

use std::collections::BTreeMap;
use video::Frames;

/// A video to score.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// What was asked for.
    pub prompt: &'a str,
    /// The decoded frames: never a compressed file.
    pub frames: &'a Frames,
}

/// A reward and what it is made of.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
pub struct RewardBreakdown {
    /// The reward.
    pub value: f64,
    /// Named parts, for people; training sees only `value`.
    pub components: BTreeMap<String, f64>,
}

/// Why a sample could not be scored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("reward `{reward}` cannot score the prompt `{prompt}`: {reason}")]
pub struct RewardError {
    /// The reward's name.
    pub reward: String,
    /// The sample's prompt.
    pub prompt: String,
    /// What is wrong.
    pub reason: String,
}

/// Scores videos.
pub trait Reward: Send + Sync {
    /// Name in metrics.
    fn name(&self) -> &str;

    /// Whether videos of this prompt can be scored; asked for every prompt before a run starts.
    ///
    /// # Errors
    /// A prompt that the reward does not understand.
    fn check_prompt(&self, _prompt: &str) -> Result<(), RewardError> {
        Ok(())
    }

    /// One result per sample, in order.
    fn score(&self, batch: &[Sample<'_>]) -> Vec<Result<RewardBreakdown, RewardError>>;
}
