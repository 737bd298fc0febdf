//! Rewards that need nothing but the frames: for experiments, for penalties beside a learned reward, and to see reward hacking happen.
//!
//! Legend: Y is the luminance (BT.709) of a pixel in [0, 1], F the number of frames, p a pixel, and `mean_p` a mean over pixels.

mod clip;
mod frame;

pub use clip::ClipMeasure;
pub use frame::FrameMeasure;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use video::Frames;

use crate::{Aggregation, FrameSelection, Reward, RewardError, Sample, Scored, SetupError};

/// Which frames are looked at, and what their values become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FrameSettings {
    /// The frames.
    pub frames: FrameSelection,
    /// From their values to the clip's.
    pub aggregate: Aggregation,
}

impl FrameSettings {
    pub(crate) fn validate(self) -> Result<(), SetupError> {
        self.frames.validate()?;
        self.aggregate.validate()
    }
}

/// A measure of frames, aggregated.
#[derive(Clone, Copy, Debug)]
pub struct FrameReward {
    /// What is measured.
    pub measure: FrameMeasure,
    /// Of which frames.
    pub settings: FrameSettings,
}

impl Reward for FrameReward {
    fn name(&self) -> &str {
        self.measure.name()
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        batch.par_iter().map(|sample| self.score_one(sample)).collect()
    }
}

impl FrameReward {
    fn score_one(&self, sample: &Sample<'_>) -> Scored {
        let error = |reason: String| RewardError::new(self.name(), sample.prompt, reason);
        let indices = self.settings.frames.indices(sample.frames.num_frames(), sample.fps);
        let values: Result<Vec<f64>, String> = indices.iter().map(|&index| self.measure.of(sample.frames, index)).collect();
        let value = self.settings.aggregate.of(&values.map_err(error)?);
        value.map(Into::into).ok_or_else(|| error("no frame is selected".to_owned()))
    }
}

/// A measure of a clip as a whole.
#[derive(Clone, Copy, Debug)]
pub struct ClipReward(pub ClipMeasure);

impl Reward for ClipReward {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        let score = |sample: &Sample<'_>| {
            let value = self.0.of(sample.frames);
            value.map(Into::into).map_err(|reason| RewardError::new(self.name(), sample.prompt, reason))
        };
        batch.par_iter().map(score).collect()
    }
}

/// Y of frame `index`, `[H W]`.
pub(crate) fn luminance(frames: &Frames, index: usize) -> Vec<f64> {
    let value = |v: f32| f64::from(v.clamp(0.0, 1.0));
    frames.frame(index).chunks_exact(3).map(|p| 0.2126 * value(p[0]) + 0.7152 * value(p[1]) + 0.0722 * value(p[2])).collect()
}

pub(crate) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0usize), |(sum, count), value| (sum + value, count + 1));
    sum / count.max(1) as f64
}
