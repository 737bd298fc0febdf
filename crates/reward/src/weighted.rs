//! Several rewards as one.

use crate::{Reward, RewardBreakdown, RewardError, Sample};

/// `sum_i weight_i reward_i`; a sample that one of them cannot score has no reward.
pub struct Weighted {
    rewards: Vec<(f64, Box<dyn Reward>)>,
}

impl Weighted {
    /// Rewards with their weights.
    pub fn new(rewards: Vec<(f64, Box<dyn Reward>)>) -> Self {
        Self { rewards }
    }
}

impl Reward for Weighted {
    fn name(&self) -> &str {
        "weighted"
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Result<RewardBreakdown, RewardError>> {
        let mut sums = vec![Ok(RewardBreakdown::default()); batch.len()];
        for (weight, reward) in &self.rewards {
            for (sum, score) in sums.iter_mut().zip(reward.score(batch)) {
                add(sum, *weight, reward.name(), score);
            }
        }
        sums
    }
}

fn add(sum: &mut Result<RewardBreakdown, RewardError>, weight: f64, name: &str, score: Result<RewardBreakdown, RewardError>) {
    match (sum.as_mut(), score) {
        (Ok(sum), Ok(score)) => {
            sum.value += weight * score.value;
            sum.components.insert(name.to_owned(), score.value);
            sum.components.extend(score.components.into_iter().map(|(part, value)| (format!("{name}.{part}"), value)));
        }
        (Ok(_), Err(error)) => *sum = Err(error),
        (Err(_), _) => {}
    }
}
