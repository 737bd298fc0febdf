//! Several rewards as one.

use crate::{Reward, RewardBreakdown, RewardError, Sample, Scored, SetupError, parallel};

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

    /// Name and weight of each reward; under that name, [`RewardBreakdown::components`] has its raw value.
    pub fn parts(&self) -> impl Iterator<Item = (&str, f64)> {
        self.names.iter().map(String::as_str).zip(self.rewards.iter().map(|(weight, _)| *weight))
    }

    /// The rewards themselves, with their names in metrics.
    pub fn rewards(&self) -> impl Iterator<Item = (&str, &dyn Reward)> {
        self.names.iter().map(String::as_str).zip(self.rewards.iter().map(|(_, reward)| &**reward))
    }
}

impl Reward for Weighted {
    fn name(&self) -> &str {
        "weighted"
    }

    fn check_prompt(&self, prompt: &str) -> Result<(), RewardError> {
        self.rewards.iter().try_for_each(|(_, reward)| reward.check_prompt(prompt))
    }

    fn prepare(&self) -> Result<(), SetupError> {
        self.rewards.iter().try_for_each(|(_, reward)| reward.prepare())
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        // One server is not waited for before the next is asked; the sum is in the order of the recipe all the same.
        let scores = parallel::map(&self.rewards, self.rewards.len(), |(_, reward)| reward.score(batch));
        let mut sums = vec![Ok(RewardBreakdown::default()); batch.len()];
        for (((weight, _), name), scores) in self.rewards.iter().zip(&self.names).zip(scores) {
            for (sum, score) in sums.iter_mut().zip(scores) {
                add(sum, *weight, name, score);
            }
        }
        sums
    }
}

fn add(sum: &mut Scored, weight: f64, name: &str, score: Scored) {
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
