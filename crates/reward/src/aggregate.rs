//! From the values of frames to the value of a clip.

use serde::{Deserialize, Serialize};

use crate::SetupError;
use crate::error::require;

/// The value of a clip, from those of its n selected frames:
///
/// ```text
/// "mean"               mean of all
/// "max"                the best frame
/// "last"               the last frame
/// { top_mean = s }     mean of the max(1, floor(s n)) best ones; published video scores use s = 0.3
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Mean of all frames.
    #[default]
    Mean,
    /// The best frame.
    Max,
    /// The last frame.
    Last,
    /// Mean of the best share of the frames, of at least one.
    TopMean(f64),
}

impl Aggregation {
    /// The clip's value; `None` without values.
    pub fn of(self, values: &[f64]) -> Option<f64> {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let last = *values.last()?;
        Some(match self {
            // A number that is none stays visible: `f64::max` would drop it.
            _ if values.iter().any(|value| !value.is_finite()) => f64::NAN,
            Self::Mean => mean(values),
            Self::Max => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            Self::Last => last,
            Self::TopMean(share) => {
                let mut sorted = values.to_vec();
                sorted.sort_by(|a, b| b.total_cmp(a));
                mean(&sorted[..((share * values.len() as f64) as usize).clamp(1, values.len())])
            }
        })
    }

    /// # Errors
    /// A share outside (0, 1].
    pub(crate) fn validate(self) -> Result<(), SetupError> {
        let Self::TopMean(share) = self else { return Ok(()) };
        let found = format!("{{ top_mean = {share} }}");
        require(share > 0.0 && share <= 1.0, "aggregate", found, "a share above 0, at most 1", "0.3 is the published value")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples() {
        let values = [0.1, 0.9, 0.5, 0.3];
        assert_eq!(Aggregation::Mean.of(&values), Some(0.45));
        assert_eq!(Aggregation::Max.of(&values), Some(0.9));
        assert_eq!(Aggregation::Last.of(&values), Some(0.3));
        assert_eq!(Aggregation::TopMean(0.5).of(&values), Some(0.7));
        assert_eq!(Aggregation::TopMean(0.01).of(&values), Some(0.9), "at least one frame");
        assert_eq!(Aggregation::TopMean(1.0).of(&values), Aggregation::Mean.of(&[0.9, 0.5, 0.3, 0.1]));
        assert_eq!(Aggregation::Mean.of(&[]), None);
    }

    #[test]
    fn a_number_that_is_none_is_not_hidden() {
        for kind in [Aggregation::Mean, Aggregation::Max, Aggregation::Last, Aggregation::TopMean(0.3)] {
            assert!(kind.of(&[f64::NAN, 1.0, 2.0]).is_some_and(f64::is_nan), "{kind:?}");
        }
    }
}
