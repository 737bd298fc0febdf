//! Whether a reward is fit to train on: does it answer, how fast, is it repeatable, does it tell rollouts of a prompt apart, and does it rank
//! good videos above bad ones.

mod measure;
mod spoil;
mod table;

pub use spoil::Spoil;

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::{Batching, Reward, Sample, Scored};
use measure::{auc, deviation, mean, quantile};

/// What is tried.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// Samples of a request, ascending; the largest that the reward can do stands for those beyond.
    pub batch_sizes: Vec<usize>,
    /// Requests at once, likewise.
    pub concurrencies: Vec<usize>,
    /// Samples that each of their combinations scores, at most; more of them take longer and are steadier.
    pub timed_samples: usize,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { batch_sizes: vec![1, 4, 16], concurrencies: vec![1, 4], timed_samples: 16 }
    }
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RewardCheck {
    /// The reward's name.
    pub name: String,
    /// Samples scored, good and bad, once each.
    pub samples: usize,
    /// Those of them that could not be scored.
    pub errors: usize,
    /// Why the first one could not.
    pub first_error: Option<String>,
    /// Seconds of a call with one sample: median and 95th percentile; absent where none was scored.
    pub latency_s: Option<[f64; 2]>,
    /// Samples per second by size and number of requests; none of a reward that makes no requests.
    pub throughput: Vec<Throughput>,
    /// The cheapest combination within a tenth of the fastest one; absent where nothing could be timed.
    pub recommended: Option<Throughput>,
    /// `sqrt(mean (r - r')^2 / 2)` over good samples scored twice: the deviation of a repetition. 0 is deterministic; absent where none was
    /// scored twice.
    pub noise: Option<f64>,
    /// Mean over prompts of the standard deviation among their good samples: what a policy can learn from. Absent without two of a prompt.
    pub group_spread: Option<f64>,
    /// Good against each kind of bad of which one was scored.
    pub ranking: Vec<Ranking>,
    /// What is worth a look, in sentences; none if all is well.
    pub warnings: Vec<String>,
}

impl RewardCheck {
    /// Whether it can score anything.
    pub fn scores(&self) -> bool {
        self.errors < self.samples
    }
}

/// Speed of one combination.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Samples of a request.
    pub batch_size: usize,
    /// Requests at once.
    pub concurrency: usize,
    /// Samples per second.
    pub samples_per_s: f64,
    /// Samples that could not be scored this way; then the speed says nothing.
    pub errors: usize,
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

/// Scores good videos twice, then every [`Spoil`] of them, one kind in memory at a time, and times the reward. Give it a reward without a cache.
///
/// Where no good video can be scored, that is all that is tried: a server that does not answer takes its time for every call.
pub fn check(reward: &dyn Reward, good: &[Sample<'_>], options: &CheckOptions) -> RewardCheck {
    let first = reward.score(good);
    if first.iter().all(Result::is_err) {
        let errors = first.len();
        let first_error = first.into_iter().find_map(Result::err).map(|error| error.to_string());
        return RewardCheck { name: reward.name().to_owned(), samples: errors, errors, first_error, ..RewardCheck::default() };
    }
    let second = reward.score(good);
    let worse: Vec<(Spoil, Vec<Scored>)> = Spoil::ALL.into_iter().map(|spoil| (spoil, spoil.score(reward, good))).collect();
    let all = || first.iter().chain(worse.iter().flat_map(|(_, scores)| scores));
    let failed: Vec<String> = all().filter_map(|score| score.as_ref().err().map(ToString::to_string)).collect();
    // what is tried for throughput may be more than a server survives
    let latency_s = latency(reward, good, options.timed_samples);
    let throughput = throughput(reward, good, options);
    let result = RewardCheck {
        name: reward.name().to_owned(),
        samples: all().count(),
        errors: failed.len(),
        first_error: failed.first().cloned(),
        latency_s,
        recommended: recommended(&throughput),
        throughput,
        noise: noise(&first, &second),
        group_spread: group_spread(good, &first),
        ranking: worse.iter().filter_map(|(spoil, scores)| ranking(spoil.name(), &values(&first), &values(scores))).collect(),
        warnings: Vec::new(),
    };
    RewardCheck { warnings: warnings(&result), ..result }
}

fn values(scores: &[Scored]) -> Vec<f64> {
    scores.iter().filter_map(|score| score.as_ref().ok()).map(|score| score.value).collect()
}

fn latency(reward: &dyn Reward, samples: &[Sample<'_>], most: usize) -> Option<[f64; 2]> {
    let seconds = |sample: &Sample<'_>| {
        let start = Instant::now();
        let scored = reward.score(std::slice::from_ref(sample));
        let seconds = start.elapsed().as_secs_f64();
        scored.iter().all(Result::is_ok).then_some(seconds)
    };
    let seconds: Vec<f64> = samples.iter().take(most.max(1)).filter_map(seconds).collect();
    Some([quantile(&seconds, 0.5)?, quantile(&seconds, 0.95)?])
}

fn throughput(reward: &dyn Reward, samples: &[Sample<'_>], options: &CheckOptions) -> Vec<Throughput> {
    let Some(largest) = reward.largest_batching() else { return Vec::new() };
    let samples = &samples[..samples.len().min(options.timed_samples)];
    let mut results = Vec::new();
    for batch_size in up_to(largest.batch_size.min(samples.len()), &options.batch_sizes) {
        let requests = samples.len().div_ceil(batch_size);
        for concurrency in up_to(largest.concurrency.min(requests), &options.concurrencies) {
            let timed = time(reward, samples, Batching { batch_size, concurrency });
            results.push(timed);
            if timed.errors > 0 {
                // More at a time will not do either, and failing can take long.
                return results;
            }
        }
    }
    results
}

/// The sizes, with `most` in place of those beyond; ascending and distinct.
fn up_to(most: usize, sizes: &[usize]) -> Vec<usize> {
    let mut sizes: Vec<usize> = sizes.iter().map(|&size| size.min(most)).filter(|&size| size > 0).collect();
    sizes.dedup();
    sizes
}

fn time(reward: &dyn Reward, samples: &[Sample<'_>], batching: Batching) -> Throughput {
    let start = Instant::now();
    let scored = reward.score_batched(samples, batching);
    let samples_per_s = samples.len() as f64 / start.elapsed().as_secs_f64().max(1e-9);
    let errors = scored.iter().filter(|scored| scored.is_err()).count();
    Throughput { batch_size: batching.batch_size, concurrency: batching.concurrency, samples_per_s, errors }
}

/// Small requests and few of them at once need the least memory and lose the least when one fails.
fn recommended(throughput: &[Throughput]) -> Option<Throughput> {
    let answered = || throughput.iter().filter(|t| t.errors == 0);
    let fastest = answered().map(|t| t.samples_per_s).fold(0.0, f64::max);
    let enough = answered().filter(|t| t.samples_per_s >= 0.9 * fastest);
    enough.min_by_key(|t| (t.batch_size * t.concurrency, t.concurrency)).copied()
}

fn noise(first: &[Scored], second: &[Scored]) -> Option<f64> {
    let both = first.iter().zip(second).filter_map(|(a, b)| Some((a.as_ref().ok()?.value, b.as_ref().ok()?.value)));
    mean(both.map(|(a, b)| (a - b).powi(2) / 2.0)).map(f64::sqrt)
}

fn group_spread(samples: &[Sample<'_>], scores: &[Scored]) -> Option<f64> {
    let mut groups: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (sample, score) in samples.iter().zip(scores) {
        groups.entry(sample.prompt).or_default().extend(score.as_ref().ok().map(|score| score.value));
    }
    mean(groups.values().filter(|group| group.len() > 1).map(|group| deviation(group)))
}

fn ranking(against: &str, good: &[f64], bad: &[f64]) -> Option<Ranking> {
    let mean_of = |values: &[f64]| mean(values.iter().copied());
    Some(Ranking { against: against.to_owned(), good: mean_of(good)?, bad: mean_of(bad)?, auc: auc(good, bad)? })
}

fn warnings(found: &RewardCheck) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(error) = &found.first_error {
        warnings.push(format!("{} of {} samples could not be scored; the first: {error}", found.errors, found.samples));
    }
    match (found.group_spread, found.noise) {
        (Some(spread), _) if spread <= 1e-9 => {
            warnings.push("all videos of a prompt have the same reward: there is nothing to learn".to_owned());
        }
        (Some(spread), Some(noise)) if noise > 0.2 * spread => {
            let share = noise / spread;
            warnings.push(format!("scoring the same video twice differs by {share:.2} of what tells videos apart: average several scores"));
        }
        _ => {}
    }
    for ranking in found.ranking.iter().filter(|ranking| ranking.auc < 0.75) {
        warnings.push(format!("good videos hardly rank above `{}` (auc {:.2}): a policy may turn into that", ranking.against, ranking.auc));
    }
    warnings
}
