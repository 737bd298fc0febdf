//! What a video is worth. A [`Reward`] scores frames against their prompt; several are added with their weights.
//!
//! A failed sample is an error, never a number.
//!
//! Reading order: this file (the contract), [`RewardEntry`] (what a recipe says), [`protocol`] and [`http`] (a server of one's own), then the
//! other kinds.

mod spec;

mod aggregate;
mod cache;
mod combine;
mod encode;
mod error;
mod guarded;
mod parallel;
mod select;
mod shapes_reward;
mod stop;
mod weighted;

pub mod builtin;
pub mod chat;
pub mod check;
pub mod command;
pub mod flow_grpo;
pub mod http;
pub mod net;
pub mod ocr;
pub mod onnx;
pub mod pickle;
pub mod protocol;

pub use aggregate::Aggregation;
pub use cache::Cached;
pub use combine::{Normalised, group_normalised, per_reward};
pub use encode::Encoding;
pub use error::{RewardError, SetupError};
pub use guarded::Guarded;
pub use select::FrameSelection;
pub use shapes_reward::ShapesReward;
pub use spec::{BuildOptions, RewardEntry, RewardSpec, build, leading_frames, samples_at_once};
pub use stop::Stop;
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
    /// Frames per second at which the video is meant to play.
    pub fps: f64,
    /// Whatever belongs to the prompt, for instance the text that should be legible; passed on as it is.
    pub metadata: Option<&'a serde_json::Value>,
}

impl<'a> Sample<'a> {
    /// Wan's videos play at 16 frames per second.
    pub const FPS: f64 = 16.0;

    /// A video at [`Sample::FPS`] without metadata.
    pub fn new(prompt: &'a str, frames: &'a Frames) -> Self {
        Self { prompt, frames, fps: Self::FPS, metadata: None }
    }
}

/// A reward and what it is made of.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
pub struct RewardBreakdown {
    /// The reward.
    pub value: f64,
    /// Named parts, for people; training sees only `value`.
    pub components: BTreeMap<String, f64>,
}

impl From<f64> for RewardBreakdown {
    fn from(value: f64) -> Self {
        Self { value, components: BTreeMap::new() }
    }
}

/// How samples are handed to whoever scores them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batching {
    /// Samples of a request.
    pub batch_size: usize,
    /// Requests at once.
    pub concurrency: usize,
}

impl Batching {
    /// The most that a recipe may ask for.
    pub const LARGEST: Self = Self { batch_size: 4096, concurrency: 256 };
}

/// What becomes of one sample.
pub type Scored = Result<RewardBreakdown, RewardError>;

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

    /// Contacts or starts what scoring needs. Called once before a run, so that a wrong address is known at once; scoring works
    /// without it.
    ///
    /// # Errors
    /// A server that does not answer, a program that does not start.
    fn prepare(&self) -> Result<(), SetupError> {
        Ok(())
    }

    /// What values depend on besides the sample: kind, settings, version. `None` where that is not known; such a reward is not cached.
    fn identity(&self) -> Option<String> {
        None
    }

    /// What kept values belong to: the [`identity`](Self::identity), and the address of a server that cannot say who it is. Behind two
    /// addresses there may be two servers; a run that goes on with its server at another one has the same reward all the same.
    fn cache_key(&self) -> Option<String> {
        self.identity()
    }

    /// One result per sample, in order.
    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored>;

    /// The most that [`score_batched`](Self::score_batched) can do; `None` where there is nothing to choose.
    fn largest_batching(&self) -> Option<Batching> {
        None
    }

    /// [`score`](Self::score) with another batching than the recipe's, to find out which is fast.
    fn score_batched(&self, batch: &[Sample<'_>], _batching: Batching) -> Vec<Scored> {
        self.score(batch)
    }
}

impl<R: Reward + ?Sized> Reward for Box<R> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn check_prompt(&self, prompt: &str) -> Result<(), RewardError> {
        (**self).check_prompt(prompt)
    }

    fn prepare(&self) -> Result<(), SetupError> {
        (**self).prepare()
    }

    fn identity(&self) -> Option<String> {
        (**self).identity()
    }

    fn cache_key(&self) -> Option<String> {
        (**self).cache_key()
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        (**self).score(batch)
    }

    fn largest_batching(&self) -> Option<Batching> {
        (**self).largest_batching()
    }

    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        (**self).score_batched(batch, batching)
    }
}

/// The Rust of docs/rewards.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/rewards.md")]
struct Document;
