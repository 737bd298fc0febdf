//! Several rewards, each normalised within its group before they are added (GDPO, arXiv 2601.05242).
//!
//! Legend: K rewards, N samples.

use std::ops::Range;

use crate::RewardBreakdown;

/// Added to a deviation before it divides, as in [the advantages](https://arxiv.org/abs/2505.05470) of a single reward.
const EPSILON: f64 = 1e-4;

/// What [`group_normalised`] gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Normalised {
    /// The weighted sums `[N]`: take these in place of the rewards' values. NaN where a reward is absent.
    pub values: Vec<f64>,
    /// Each reward's normalised values, before its weight `[K][N]`; NaN where absent.
    pub per_reward: Vec<Vec<f64>>,
}

/// Each reward on its own scale, then the weighted sum:
///
/// ```text
/// n_ki = (r_ki - mean_g(r_k)) / (std_g(r_k) + 1e-4)       g: the group of sample i, population std
/// v_i  = sum_k w_k n_ki
/// ```
///
/// Rewards that are added raw are in the unit of the one with the largest spread; here a weight says what it seems to say. GDPO then
/// divides by the standard deviation of the whole batch: that is the advantage scale `batch-std`, applied to [`Normalised::values`]
/// (their mean in every group is 0 already).
///
/// A sample that lacks any finite reward is absent: it gets NaN and counts in no mean. A group that is left with fewer than two is absent.
/// A reward that is constant within a group contributes exact zeros there.
///
/// # Panics
/// If there is not one weight per reward, or a group reaches beyond the samples.
pub fn group_normalised(scores: &[Vec<f64>], weights: &[f64], groups: &[Range<usize>]) -> Normalised {
    assert_eq!(scores.len(), weights.len(), "one weight per reward");
    let samples = scores.first().map_or(0, Vec::len);
    let mut per_reward = vec![vec![f64::NAN; samples]; scores.len()];
    let mut values = vec![f64::NAN; samples];
    for group in groups {
        let present: Vec<usize> = group.clone().filter(|&i| scores.iter().all(|reward| reward[i].is_finite())).collect();
        if present.len() < 2 {
            continue;
        }
        for (normalised, reward) in per_reward.iter_mut().zip(scores) {
            let (mean, divisor) = moments(present.iter().map(|&i| reward[i]));
            present.iter().for_each(|&i| normalised[i] = (reward[i] - mean) / divisor);
        }
        for &i in &present {
            values[i] = per_reward.iter().zip(weights).map(|(reward, weight)| weight * reward[i]).sum();
        }
    }
    Normalised { values, per_reward }
}

/// Mean, and population standard deviation plus [`EPSILON`]; the mean of equal values is that value, without rounding.
fn moments(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let first = values.clone().next().unwrap_or_default();
    let mean = first + values.clone().map(|value| value - first).sum::<f64>() / count;
    let variance = values.map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    (mean, variance.sqrt() + EPSILON)
}

/// Values of each named reward `[K][N]` out of the components of [`crate::Weighted`]; NaN for samples without a reward.
pub fn per_reward<'a>(breakdowns: &[Option<&RewardBreakdown>], names: impl Iterator<Item = &'a str>) -> Vec<Vec<f64>> {
    let value =
        |name: &str, breakdown: &Option<&RewardBreakdown>| breakdown.and_then(|b| b.components.get(name).copied()).unwrap_or(f64::NAN);
    names.map(|name| breakdowns.iter().map(|breakdown| value(name, breakdown)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn groups(count: usize, size: usize) -> Vec<Range<usize>> {
        (0..count).map(|g| g * size..(g + 1) * size).collect()
    }

    #[test]
    fn a_reward_in_thousands_does_not_drown_one_in_units() {
        let (large, small) = (vec![1000.0, 3000.0, 1000.0, 3000.0], vec![0.2, 0.2, 0.8, 0.8]);
        let raw: Vec<f64> = large.iter().zip(&small).map(|(a, b)| a + b).collect();
        assert!(raw[0] < raw[2] && (raw[2] - raw[0]) < 1e-3 * (raw[1] - raw[0]));
        let normalised = group_normalised(&[large, small], &[1.0, 1.0], &groups(1, 4)).values;
        assert!((normalised[2] - normalised[0] - (normalised[1] - normalised[0])).abs() < 1e-2, "{normalised:?}");
    }

    #[test]
    fn absent_samples_count_nowhere() {
        let scores = vec![vec![1.0, f64::NAN, 3.0, 5.0, 6.0, f64::INFINITY], vec![0.0, 1.0, 1.0, 2.0, 2.0, 2.0]];
        let result = group_normalised(&scores, &[1.0, 1.0], &groups(2, 3));
        assert!(result.values[1].is_nan() && result.values[5].is_nan());
        assert!((result.values[0] + result.values[2]).abs() < 1e-12);
        assert_eq!(result.per_reward[1][3..5], [0.0, 0.0], "constant in its group");
        let alone = group_normalised(&[vec![1.0, f64::NAN]], &[1.0], &groups(1, 2));
        assert!(alone.values.iter().all(|v| v.is_nan()), "one sample has nothing to be compared with");
    }

    proptest! {
        #[test]
        fn unit_and_offset_of_a_reward_do_not_matter(values in prop::collection::vec(-1.0f64..1.0, 8), scale in 10.0f64..1e4, offset in -1e3f64..1e3) {
            // The epsilon does matter where the spread is as small as it is.
            prop_assume!(values.chunks(4).all(|g| g.iter().copied().fold(f64::MIN, f64::max) - g.iter().copied().fold(f64::MAX, f64::min) > 0.5));
            let other = values.iter().map(|v| v * scale + offset).collect();
            let of = |values: Vec<f64>| group_normalised(&[values], &[2.0], &groups(2, 4)).values;
            let (a, b) = (of(values), of(other));
            for (a, b) in a.iter().zip(&b) {
                prop_assert!((a - b).abs() < 2e-3, "{a} {b}");
            }
        }
    }
}
