//! The verifier of the moving-shapes world.

use crate::{Reward, RewardBreakdown, RewardError, Sample, Scored};
use rayon::prelude::*;
use shapes::Caption;

/// How well a clip shows its caption, in [0, 1]; see [`shapes::score`].
#[derive(Debug, Clone, Copy, Default)]
pub struct ShapesReward;

impl Reward for ShapesReward {
    fn name(&self) -> &str {
        "shapes"
    }

    fn check_prompt(&self, prompt: &str) -> Result<(), RewardError> {
        self.caption(prompt).map(drop)
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        batch.par_iter().map(|sample| self.score_one(sample)).collect()
    }
}

impl ShapesReward {
    fn caption(&self, prompt: &str) -> Result<Caption, RewardError> {
        prompt.parse().map_err(|error: shapes::CaptionError| RewardError::new(self.name(), prompt, error))
    }

    fn score_one(&self, sample: &Sample<'_>) -> Scored {
        let caption = self.caption(sample.prompt)?;
        let score = shapes::score(sample.frames, &caption);
        let parts = [("color", score.color), ("shape", score.shape), ("motion", score.motion), ("object", score.object)];
        let components = parts.map(|(name, value)| (name.to_owned(), f64::from(value))).into();
        Ok(RewardBreakdown { value: f64::from(score.total), components })
    }
}
