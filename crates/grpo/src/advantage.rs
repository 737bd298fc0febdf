//! From rewards to advantages.

use serde::{Deserialize, Serialize};

use crate::GroupLayout;

/// What the centred rewards are divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdvantageScale {
    /// Population standard deviation of all rewards of the batch, plus 1e-4 (Flash-GRPO, Flow-GRPO).
    #[default]
    BatchStd,
    /// Population standard deviation of the prompt's group, plus 1e-4.
    GroupStd,
    /// Unbiased standard deviation (n - 1) of the prompt's group, plus 1e-8 (DanceGRPO).
    GroupStdUnbiased,
    /// 1: keep the units of the reward (Dr. GRPO).
    None,
}

/// Group-relative advantages, one per reward:
///
/// ```text
/// A_i = clamp( (R_i - mean of the prompt's group) / scale, -clip, +clip )
/// ```
///
/// A group whose rewards are all equal gets exact zeros; its samples stay in the batch and in every denominator
/// (Deviation D5, docs/deviations.md). The published clip is 5.
///
/// A reward that is not finite is absent: its sample gets 0 and counts in no mean and no deviation; likewise all of a group that is left
/// with fewer than two.
///
/// # Panics
/// If there is not one reward per sample of the layout.
pub fn advantages(rewards: &[f64], layout: &GroupLayout, scale: AdvantageScale, clip: f64) -> Vec<f64> {
    assert_eq!(rewards.len(), layout.num_samples(), "one reward per sample");
    let batch_std = std(&finite(rewards), 0.0);
    let mut result = Vec::with_capacity(rewards.len());
    for prompt in 0..layout.num_prompts() {
        let (all, group) = (&rewards[layout.samples(prompt)], finite(&rewards[layout.samples(prompt)]));
        if group.len() < 2 {
            result.extend(all.iter().map(|_| 0.0));
            continue;
        }
        let divisor = match scale {
            AdvantageScale::BatchStd => batch_std + 1e-4,
            AdvantageScale::GroupStd => std(&group, 0.0) + 1e-4,
            AdvantageScale::GroupStdUnbiased => std(&group, 1.0) + 1e-8,
            AdvantageScale::None => 1.0,
        };
        let constant = group.iter().all(|&reward| reward == group[0]);
        let centre = if constant { group[0] } else { mean(&group) };
        let of = |reward: &f64| if reward.is_finite() { ((reward - centre) / divisor).clamp(-clip, clip) } else { 0.0 };
        result.extend(all.iter().map(of));
    }
    result
}

fn finite(values: &[f64]) -> Vec<f64> {
    values.iter().copied().filter(|value| value.is_finite()).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Standard deviation with `lost` degrees of freedom (0: population, 1: unbiased).
fn std(values: &[f64], lost: f64) -> f64 {
    let centre = mean(values);
    let sum: f64 = values.iter().map(|value| (value - centre).powi(2)).sum();
    (sum / (values.len() as f64 - lost)).sqrt()
}
