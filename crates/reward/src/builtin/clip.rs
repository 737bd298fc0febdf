//! How a clip moves.

use video::Frames;

use super::{luminance, mean};

/// The share of pixels that [`ClipMeasure::DynamicDegree`] looks at.
const MOVING: f64 = 0.05;

/// A number for a clip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClipMeasure {
    /// `1 - mean_f mean_p |Y_f - (Y_{f-1} + Y_{f+1})/2|`: how well each frame is what lies between its neighbours. In [0, 1]; a still
    /// clip has 1. Needs three frames. (VBench interpolates with a network; this is the simplest interpolation.)
    MotionSmoothness,
    /// `mean_f (mean of the largest 5 % over p of |Y_{f+1} - Y_f|)`: how much the pixels change that change most, so that a small object
    /// counts. In [0, 1]; a still clip has 0. Needs two frames. (VBench takes the largest 5 % of the optical flow.)
    DynamicDegree,
    /// `mean_f mean_p min(|a|, |b|) where a b < 0, else 0`, with `a = Y_f - Y_{f-1}`, `b = Y_{f+1} - Y_f`: what goes one way and at once back.
    /// In [0, 1]; steady motion and a still clip have about 0. Needs three frames. More is worse: give it a negative weight.
    TemporalFlicker,
}

impl ClipMeasure {
    /// Its name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::MotionSmoothness => "motion-smoothness",
            Self::DynamicDegree => "dynamic-degree",
            Self::TemporalFlicker => "temporal-flicker",
        }
    }

    /// Its value for a clip.
    ///
    /// # Errors
    /// Too few frames.
    pub fn of(self, clip: &Frames) -> Result<f64, String> {
        let needed = if self == Self::DynamicDegree { 2 } else { 3 };
        if clip.num_frames() < needed {
            return Err(format!("`{}` needs at least {needed} frames, the clip has {}", self.name(), clip.num_frames()));
        }
        let frames: Vec<Vec<f64>> = (0..clip.num_frames()).map(|index| luminance(clip, index)).collect();
        Ok(match self {
            Self::MotionSmoothness => 1.0 - mean(frames.windows(3).map(|w| over_pixels(w, |[a, b, c]| (b - (a + c) / 2.0).abs()))),
            Self::TemporalFlicker => mean(frames.windows(3).map(|w| over_pixels(w, reversal))),
            Self::DynamicDegree => mean(frames.windows(2).map(|w| largest_changes(&w[0], &w[1]))),
        })
    }
}

/// Mean over the pixels of three neighbouring frames.
fn over_pixels(frames: &[Vec<f64>], of: impl Fn([f64; 3]) -> f64) -> f64 {
    mean((0..frames[0].len()).map(|p| of([frames[0][p], frames[1][p], frames[2][p]])))
}

fn reversal([before, now, after]: [f64; 3]) -> f64 {
    let (a, b) = (now - before, after - now);
    if a * b < 0.0 { a.abs().min(b.abs()) } else { 0.0 }
}

fn largest_changes(now: &[f64], after: &[f64]) -> f64 {
    let mut changes: Vec<f64> = now.iter().zip(after).map(|(a, b)| (b - a).abs()).collect();
    changes.sort_by(|a, b| b.total_cmp(a));
    let count = ((MOVING * changes.len() as f64) as usize).max(1);
    mean(changes.into_iter().take(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames of 4x4, each of one grey.
    fn greys(values: &[f32]) -> Frames {
        Frames::new(values.len(), 4, 4, values.iter().flat_map(|&v| [v; 48]).collect()).expect("frames")
    }

    fn of(measure: ClipMeasure, values: &[f32]) -> f64 {
        measure.of(&greys(values)).expect("value")
    }

    #[test]
    fn steady_change_is_smooth_and_flicker_is_not() {
        let (steady, flicker, still) = ([0.0, 0.25, 0.5, 0.75], [0.5, 0.7, 0.5, 0.7], [0.5; 4]);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(close(of(ClipMeasure::MotionSmoothness, &steady), 1.0) && close(of(ClipMeasure::MotionSmoothness, &still), 1.0));
        assert!(close(of(ClipMeasure::MotionSmoothness, &flicker), 0.8));
        assert!(close(of(ClipMeasure::TemporalFlicker, &steady), 0.0) && close(of(ClipMeasure::TemporalFlicker, &flicker), 0.2));
        assert!(close(of(ClipMeasure::DynamicDegree, &steady), 0.25) && close(of(ClipMeasure::DynamicDegree, &still), 0.0));
    }

    #[test]
    fn too_few_frames_are_an_error() {
        let error = ClipMeasure::MotionSmoothness.of(&greys(&[0.0, 1.0])).expect_err("two frames");
        assert_eq!(error, "`motion-smoothness` needs at least 3 frames, the clip has 2");
    }
}
