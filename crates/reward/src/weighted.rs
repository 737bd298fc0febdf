//! Several rewards as one.

use crate::{Reward, RewardBreakdown, RewardError, Sample, Scored, SetupError, parallel};

/// `sum_i weight_i reward_i`; a sample that one of them cannot score has no reward.
pub struct Weighted {
    rewards: Vec<(f64, Box<dyn Reward>)>,
    /// Names of the parts: the reward's, with a number where it is taken; no two are equal.
    names: Vec<String>,
}

impl Weighted {
    /// Rewards with their weights.
    pub fn new(rewards: Vec<(f64, Box<dyn Reward>)>) -> Self {
        let mut names: Vec<String> = Vec::with_capacity(rewards.len());
        for (_, reward) in &rewards {
            names.push(free_name(reward.name(), &names));
        }
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

/// `name`, else the first of `name-2`, `name-3`, .. that is not taken.
fn free_name(name: &str, taken: &[String]) -> String {
    let mut free = name.to_owned();
    for number in 2.. {
        if !taken.contains(&free) {
            break;
        }
        free = format!("{name}-{number}");
    }
    free
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_names_are_equal() {
        let named = |names: &[&str]| names.iter().fold(Vec::new(), |taken, name| [&taken[..], &[free_name(name, &taken)]].concat());
        assert_eq!(named(&["a", "b", "a", "a"]), ["a", "b", "a-2", "a-3"]);
        assert_eq!(named(&["a", "a", "a-2"]), ["a", "a-2", "a-2-2"]);
        assert_eq!(named(&["a", "a-2", "a"]), ["a", "a-2", "a-3"]);
    }
}
