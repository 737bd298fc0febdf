//! Whether a reward is fit to train on: does it answer, how fast, is it repeatable, does it tell rollouts of a prompt apart, and does it rank
//! good videos above bad ones.

mod measure;
mod spoil;
mod table;

pub use spoil::{Spoiled, spoil};

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::{Reward, Sample, Scored, parallel};
use measure::{auc, deviation, mean, quantile};

/// What is tried.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// Samples of a call, ascending.
    pub batch_sizes: Vec<usize>,
    /// Calls at once, ascending.
    pub concurrencies: Vec<usize>,
    /// Samples that each of their combinations scores, at most; more of them take longer and are steadier.
    pub timed_samples: usize,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { batch_sizes: vec![1, 4, 16], concurrencies: vec![1, 4], timed_samples: 16 }
    }
}

/// Videos that should score low.
pub struct Bad<'a> {
    /// What is wrong with them.
    pub name: &'a str,
    /// The videos.
    pub samples: Vec<Sample<'a>>,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RewardCheck {
    /// The reward's name.
    pub name: String,
    /// Samples scored, good and bad, once each.
    pub samples: usize,
    /// Those of them that could not be scored.
    pub errors: usize,
    /// Why the first one could not.
    pub first_error: Option<String>,
    /// Seconds of a call with one sample: median and 95th percentile.
    pub latency_s: [f64; 2],
    /// Samples per second by size and number of calls.
    pub throughput: Vec<Throughput>,
    /// The cheapest combination within a tenth of the fastest one; absent where nothing could be timed.
    pub recommended: Option<Throughput>,
    /// `sqrt(mean (r - r')^2 / 2)` over good samples scored twice: the deviation of a repetition. 0 is deterministic.
    pub noise: f64,
    /// Mean over prompts of the standard deviation among their good samples: what a policy can learn from. Absent without two of a prompt.
    pub group_spread: Option<f64>,
    /// Good against each kind of bad.
    pub ranking: Vec<Ranking>,
    /// What is worth a look, in sentences; none if all is well.
    pub warnings: Vec<String>,
}

/// Speed of one combination.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Samples of a call.
    pub batch_size: usize,
    /// Calls at once.
    pub concurrency: usize,
    /// Samples per second.
    pub samples_per_s: f64,
}

/// Good against bad.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ranking {
    /// What is wrong with the bad ones.
    pub against: String,
    /// Mean reward of the good ones.
    pub good: f64,
    /// Mean reward of the bad ones.
    pub bad: f64,
    /// `P(good > bad) + P(good = bad)/2` over all pairs: 1 ranks perfectly, 1/2 is chance.
    pub auc: f64,
}

/// Scores good and bad videos, the good ones twice, and times the reward. Give it a reward without a cache.
pub fn check(reward: &dyn Reward, good: &[Sample<'_>], bad: &[Bad<'_>], options: &CheckOptions) -> RewardCheck {
    let (first, second) = (reward.score(good), reward.score(good));
    let worse: Vec<Vec<Scored>> = bad.iter().map(|bad| reward.score(&bad.samples)).collect();
    let failed: Vec<String> =
        first.iter().chain(worse.iter().flatten()).filter_map(|s| s.as_ref().err().map(ToString::to_string)).collect();
    let throughput = throughput(reward, good, options);
    let result = RewardCheck {
        name: reward.name().to_owned(),
        samples: first.len() + worse.iter().map(Vec::len).sum::<usize>(),
        errors: failed.len(),
        first_error: failed.first().cloned(),
        latency_s: latency(reward, good, options.timed_samples),
        recommended: recommended(&throughput),
        throughput,
        noise: noise(&first, &second),
        group_spread: group_spread(good, &first),
        ranking: bad.iter().zip(&worse).map(|(bad, scores)| ranking(bad.name, &values(&first), &values(scores))).collect(),
        warnings: Vec::new(),
    };
    RewardCheck { warnings: warnings(&result), ..result }
}

fn values(scores: &[Scored]) -> Vec<f64> {
    scores.iter().filter_map(|score| score.as_ref().ok()).map(|score| score.value).collect()
}

fn latency(reward: &dyn Reward, samples: &[Sample<'_>], most: usize) -> [f64; 2] {
    let seconds = |sample: &Sample<'_>| {
        let start = Instant::now();
        let _ = reward.score(std::slice::from_ref(sample));
        start.elapsed().as_secs_f64()
    };
    let seconds: Vec<f64> = samples.iter().take(most.max(1)).map(seconds).collect();
    [quantile(&seconds, 0.5), quantile(&seconds, 0.95)]
}

fn throughput(reward: &dyn Reward, samples: &[Sample<'_>], options: &CheckOptions) -> Vec<Throughput> {
    let samples = &samples[..samples.len().min(options.timed_samples)];
    let mut results = Vec::new();
    for &batch_size in options.batch_sizes.iter().filter(|&&size| size > 0 && size <= samples.len()) {
        let calls: Vec<&[Sample<'_>]> = samples.chunks(batch_size).collect();
        for &concurrency in options.concurrencies.iter().filter(|&&n| n > 0 && n <= calls.len()) {
            let start = Instant::now();
            parallel::map(&calls, concurrency, |call| drop(reward.score(call)));
            let samples_per_s = samples.len() as f64 / start.elapsed().as_secs_f64().max(1e-9);
            results.push(Throughput { batch_size, concurrency, samples_per_s });
        }
    }
    results
}

/// Small calls and few of them at once need the least memory and lose the least when one fails.
fn recommended(throughput: &[Throughput]) -> Option<Throughput> {
    let fastest = throughput.iter().map(|t| t.samples_per_s).fold(0.0, f64::max);
    let enough = throughput.iter().filter(|t| t.samples_per_s >= 0.9 * fastest);
    enough.min_by_key(|t| (t.batch_size * t.concurrency, t.concurrency)).copied()
}

fn noise(first: &[Scored], second: &[Scored]) -> f64 {
    let both = first.iter().zip(second).filter_map(|(a, b)| Some((a.as_ref().ok()?.value, b.as_ref().ok()?.value)));
    mean(both.map(|(a, b)| (a - b).powi(2) / 2.0)).unwrap_or(0.0).sqrt()
}

fn group_spread(samples: &[Sample<'_>], scores: &[Scored]) -> Option<f64> {
    let mut groups: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (sample, score) in samples.iter().zip(scores) {
        groups.entry(sample.prompt).or_default().extend(score.as_ref().ok().map(|score| score.value));
    }
    mean(groups.values().filter(|group| group.len() > 1).map(|group| deviation(group)))
}

fn ranking(against: &str, good: &[f64], bad: &[f64]) -> Ranking {
    let mean_of = |values: &[f64]| mean(values.iter().copied()).unwrap_or(f64::NAN);
    Ranking { against: against.to_owned(), good: mean_of(good), bad: mean_of(bad), auc: auc(good, bad) }
}

fn warnings(found: &RewardCheck) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(error) = &found.first_error {
        warnings.push(format!("{} of {} samples could not be scored; the first: {error}", found.errors, found.samples));
    }
    match found.group_spread {
        Some(spread) if spread <= 1e-9 => {
            warnings.push("all videos of a prompt have the same reward: there is nothing to learn".to_owned());
        }
        Some(spread) if found.noise > 0.2 * spread => {
            let share = found.noise / spread;
            warnings.push(format!("scoring the same video twice differs by {share:.2} of what tells videos apart: average several scores"));
        }
        _ => {}
    }
    for ranking in found.ranking.iter().filter(|ranking| ranking.auc < 0.75) {
        warnings.push(format!("good videos hardly rank above `{}` (auc {:.2}): a policy may turn into that", ranking.against, ranking.auc));
    }
    warnings
}
