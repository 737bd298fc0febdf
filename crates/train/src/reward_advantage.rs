//! Which of several rewards drives the training.

use crate::stats::{mean, std_of};
use serde::Serialize;

/// What one reward would teach alone, `n_i` (normalised within its groups, see [`reward::group_normalised`]), against what is taught, `A_i`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct RewardAdvantage {
    /// mean abs(n): about 0.8 where every group has a spread, 0 where none has.
    pub mean_abs: f64,
    /// Pearson's correlation of n and A over the samples that have both: 1, this reward alone decides; 0, it has no say; below 0, it loses.
    pub correlation: f64,
}

impl RewardAdvantage {
    /// Of normalised values and advantages, one each per sample; absent ones are NaN, and advantages of absent samples 0.
    pub fn of(normalised: &[f64], advantages: &[f64]) -> Self {
        let (own, taught): (Vec<f64>, Vec<f64>) =
            normalised.iter().zip(advantages).filter(|(n, a)| n.is_finite() && a.is_finite()).map(|(n, a)| (*n, *a)).unzip();
        let (own_mean, taught_mean) = (mean(own.iter().copied()), mean(taught.iter().copied()));
        let covariance = mean(own.iter().zip(&taught).map(|(n, a)| (n - own_mean) * (a - taught_mean)));
        let scale = std_of(&own) * std_of(&taught);
        Self { mean_abs: mean(own.iter().map(|n| n.abs())), correlation: if scale > 0.0 { covariance / scale } else { 0.0 } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_decides_correlates() {
        let taught = [1.0, -1.0, 0.5, -0.5, 0.0];
        let alone = RewardAdvantage::of(&[2.0, -2.0, 1.0, -1.0, f64::NAN], &taught);
        assert!((alone.correlation - 1.0).abs() < 1e-12 && alone.mean_abs == 1.5);
        assert!((RewardAdvantage::of(&[-2.0, 2.0, -1.0, 1.0, 0.0], &taught).correlation + 1.0).abs() < 1e-12);
        assert_eq!(RewardAdvantage::of(&[0.0; 5], &taught), RewardAdvantage::default(), "no spread, no say");
        assert_eq!(RewardAdvantage::of(&[f64::NAN; 5], &taught), RewardAdvantage::default());
    }
}
