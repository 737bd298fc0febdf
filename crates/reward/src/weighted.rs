//! Several rewards as one.

use crate::{Reward, RewardBreakdown, RewardError, Sample};

/// `sum_i weight_i reward_i`; a sample that one of them cannot score has no reward.
pub struct Weighted {
    rewards: Vec<(f64, Box<dyn Reward>)>,
    /// Names of the parts: the reward's, with a number from the second of that name on.
    names: Vec<String>,
}

impl Weighted {
    /// Rewards with their weights.
    pub fn new(rewards: Vec<(f64, Box<dyn Reward>)>) -> Self {
        let name = |i: usize| {
            let name = rewards[i].1.name();
            let earlier = rewards[..i].iter().filter(|(_, reward)| reward.name() == name).count();
            if earlier == 0 { name.to_owned() } else { format!("{name}-{}", earlier + 1) }
        };
        let names = (0..rewards.len()).map(name).collect();
        Self { rewards, names }
    }
}

impl Reward for Weighted {
    fn name(&self) -> &str {
        "weighted"
    }

    fn check_prompt(&self, prompt: &str) -> Result<(), RewardError> {
        self.rewards.iter().try_for_each(|(_, reward)| reward.check_prompt(prompt))
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Result<RewardBreakdown, RewardError>> {
        let mut sums = vec![Ok(RewardBreakdown::default()); batch.len()];
        for ((weight, reward), name) in self.rewards.iter().zip(&self.names) {
            for (sum, score) in sums.iter_mut().zip(reward.score(batch)) {
                add(sum, *weight, name, score);
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
