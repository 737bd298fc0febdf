//! Which frames of a clip are looked at.

use serde::{Deserialize, Serialize};

use crate::SetupError;
use crate::error::require;

/// The frames that a reward sees, in order; always at least one. With F frames, numbered from 0:
///
/// ```text
/// "all"            0 .. F-1
/// "first"          0
/// { every = n }    0, n, 2n, ..
/// { fps = x }      round(k clip_fps / x) for k = 0, 1, ..; all of them where x is not below the clip's
/// { count = n }    n frames from the first to the last, evenly: round(k (F-1)/(n-1)); the middle one for n = 1; all for n >= F
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FrameSelection {
    /// Every frame.
    #[default]
    All,
    /// The first frame.
    First,
    /// Every n-th frame, from the first on.
    Every(usize),
    /// So many frames of each second.
    Fps(f64),
    /// So many frames in all.
    Count(usize),
}

impl FrameSelection {
    /// Numbers of the selected frames of a clip, ascending and distinct.
    pub fn indices(self, num_frames: usize, clip_fps: f64) -> Vec<usize> {
        let last = num_frames.saturating_sub(1);
        let mut indices: Vec<usize> = match self {
            Self::All => (0..num_frames).collect(),
            Self::First => vec![0],
            Self::Every(n) => (0..num_frames).step_by(n.max(1)).collect(),
            Self::Fps(fps) if fps < clip_fps => {
                let at = |k: usize| (k as f64 * clip_fps / fps).round();
                (0..num_frames).map(at).take_while(|&i| i <= last as f64).map(|i| i as usize).collect()
            }
            Self::Fps(_) => (0..num_frames).collect(),
            Self::Count(n) if n >= num_frames => (0..num_frames).collect(),
            Self::Count(n) if n < 2 => vec![last / 2],
            Self::Count(n) => (0..n).map(|k| (k as f64 * last as f64 / (n - 1) as f64).round() as usize).collect(),
        };
        indices.dedup();
        indices
    }

    /// Frames from the start of a clip that decide the selection: from a clip that is cut after them, or later, the same are selected. What
    /// `count` selects depends on the length, so it needs all.
    pub fn leading(self, num_frames: usize, clip_fps: f64) -> usize {
        match self {
            Self::Count(_) => num_frames,
            _ => self.indices(num_frames, clip_fps).last().map_or(num_frames, |last| last + 1),
        }
    }

    /// # Errors
    /// A number that selects nothing.
    pub(crate) fn validate(self) -> Result<(), SetupError> {
        let hint = "for instance `\"all\"`, `\"first\"`, `{ every = 4 }`, `{ fps = 2 }` or `{ count = 8 }`";
        match self {
            Self::All | Self::First => Ok(()),
            Self::Every(n) => require(n > 0, "frames", format!("{{ every = {n} }}"), "at least 1", hint),
            Self::Count(n) => require(n > 0, "frames", format!("{{ count = {n} }}"), "at least 1", hint),
            Self::Fps(x) => require(x > 0.0 && x.is_finite(), "frames", format!("{{ fps = {x} }}"), "a number above 0", hint),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn examples() {
        assert_eq!(FrameSelection::Every(4).indices(9, 16.0), [0, 4, 8]);
        assert_eq!(FrameSelection::Fps(4.0).indices(9, 16.0), [0, 4, 8]);
        assert_eq!(FrameSelection::Fps(32.0).indices(3, 16.0), [0, 1, 2]);
        assert_eq!(FrameSelection::Count(3).indices(9, 16.0), [0, 4, 8]);
        assert_eq!(FrameSelection::Count(1).indices(9, 16.0), [4]);
        assert_eq!(FrameSelection::First.indices(9, 16.0), [0]);
        let leading = |selection: FrameSelection| selection.leading(17, 16.0);
        assert_eq!([FrameSelection::First, FrameSelection::Every(10), FrameSelection::Fps(3.0)].map(leading), [1, 11, 17]);
        assert_eq!([FrameSelection::All, FrameSelection::Count(1), FrameSelection::Count(4)].map(leading), [17; 3]);
    }

    proptest! {
        #[test]
        fn ascending_inside_and_never_empty(kind in 0..5, n in 1usize..40, x in 0.01f64..60.0, frames in 1usize..90, fps in 0.5f64..60.0) {
            let selections = [FrameSelection::All, FrameSelection::First, FrameSelection::Every(n), FrameSelection::Fps(x), FrameSelection::Count(n)];
            let indices = selections[kind as usize].indices(frames, fps);
            prop_assert!(!indices.is_empty());
            prop_assert!(indices.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(indices.iter().all(|&i| i < frames));
            let leading = selections[kind as usize].leading(frames, fps);
            prop_assert!((1..=frames).contains(&leading));
            for cut in leading..=frames {
                prop_assert_eq!(&selections[kind as usize].indices(cut, fps), &indices);
            }
            if kind == 4 {
                prop_assert_eq!(indices.len(), n.min(frames));
            }
        }
    }
}
