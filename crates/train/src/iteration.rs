//! One iteration of the method: prompts -> plan -> rollout -> decode -> reward -> advantages -> update.

use crate::batch::{Batch, Sampled};
use crate::checks::check_spread;
use crate::error::Result;
use crate::events::{Event, Watch};
use crate::recording;
use crate::replay::TransitionBatch;
use crate::reward_advantage::RewardAdvantage;
use crate::stats::{mean, std_of};
use crate::step_metrics::StepMetrics;
use crate::trainer::Trainer;
use crate::update::{UpdateMetrics, update};
use reward::{RewardBreakdown, Scored};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// One line of metrics.jsonl; docs/metrics.md explains each entry.
#[derive(Debug, Clone, Default, Serialize)]
pub struct IterationMetrics {
    /// Iteration, from 0.
    pub iteration: u64,
    /// Optimizer updates made so far.
    pub updates: u64,
    /// Model forwards of one sample, rollouts and updates; see [`crate::sharing::Work::forwards`].
    pub forwards: u64,
    /// Mean reward of the rollouts.
    pub reward_mean: f64,
    /// Population standard deviation of all rewards.
    pub reward_std: f64,
    /// Mean of the groups' standard deviations: what the method learns from.
    pub reward_group_std: f64,
    /// Groups whose rewards are all equal: they teach nothing.
    pub zero_spread_groups: usize,
    /// Means of the rewards' parts.
    pub reward_components: BTreeMap<String, f64>,
    /// With several rewards, how each took part in the advantages.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub reward_advantages: BTreeMap<String, RewardAdvantage>,
    /// Mean loss over the updates.
    pub loss: f64,
    /// Mean KL to the reference policy.
    pub kl: f64,
    /// Mean norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Mean share of ratios outside the clip range.
    pub clip_fraction: f64,
    /// max |ratio - 1| in the first update, where it must be 0.
    pub ratio_deviation: f64,
    /// By denoising step, over all updates.
    pub steps: BTreeMap<usize, StepMetrics>,
    /// Power of the stochastic steps' noise relative to std^2, which must be about 1.
    pub noise_power: f64,
    /// Samples left out because their reward or a log-probability was not finite.
    pub skipped_samples: usize,
    /// Updates left out because their gradient was not finite.
    pub skipped_updates: usize,
    /// Seconds by phase; a line of timings.jsonl.
    #[serde(skip)]
    pub seconds: BTreeMap<&'static str, f64>,
}

/// Runs iteration `index`.
///
/// # Errors
/// A request to stop; more samples or updates that are not finite, or have no reward, than `train.max_skipped` allows; in the first iteration,
/// rewards without any spread. Weights, optimizer and average are then those of before.
pub fn iteration(trainer: &mut Trainer, index: u64, watch: &mut Watch<'_>) -> Result<IterationMetrics> {
    let mut clock = Clock::start();
    let batch = Batch::plan(&trainer.settings, trainer.train_prompts.len(), index)?;
    let Sampled { transitions, noise_power, scores } = batch.sample(trainer, trainer.settings.rollout.retain_step, watch, &mut clock)?;
    let rewards: Vec<RewardBreakdown> = scores.into_iter().map(or_absent).collect();
    if index == 0 {
        check_spread(&batch.spreads(&rewards), batch.layout.group_size())?;
    }
    let advantages = batch.advantages(trainer, &rewards);
    let transitions = batch.transitions(&transitions, &advantages);
    if trainer.settings.debug.save_rollouts {
        let path = trainer.settings.output_dir.join(format!("rollouts-{index:06}.safetensors"));
        recording::save(trainer, &transitions.concat(), &path)?;
    }
    let updates = batch.update(trainer, &transitions, &rewards, watch)?;
    clock.lap("update");
    Ok(batch.metrics(trainer, noise_power, &rewards, &advantages, &updates, clock))
}

impl Batch {
    /// All updates, or none: the state is that of before where more than `train.max_skipped` allows had to be left out, and where it was asked
    /// to stop.
    fn update(
        &self,
        trainer: &mut Trainer,
        updates: &[Vec<TransitionBatch>],
        rewards: &[RewardBreakdown],
        watch: &mut Watch<'_>,
    ) -> Result<Vec<UpdateMetrics>> {
        let before = trainer.state();
        let made = self.make_updates(trainer, updates, watch).and_then(|metrics| {
            let place = || format!("iteration {}", self.index);
            trainer.tolerate("samples", skipped_samples(rewards, &metrics), rewards.len(), place)?;
            trainer.tolerate("updates", metrics.iter().filter(|m| m.is_skipped).count(), updates.len(), place)?;
            Ok(metrics)
        });
        if made.is_err() {
            trainer.restore(before);
        }
        made
    }

    fn make_updates(&self, trainer: &mut Trainer, updates: &[Vec<TransitionBatch>], watch: &mut Watch<'_>) -> Result<Vec<UpdateMetrics>> {
        watch(Event::Phase { name: "update", total: updates.len() as u64 });
        let mut metrics: Vec<UpdateMetrics> = Vec::new();
        for batches in updates {
            let due = (trainer.optimizer.updates + 1).is_multiple_of(trainer.settings.train.ema_every as u64);
            let ema = trainer.ema.as_mut().filter(|_| due);
            let (objective, collective) = (&trainer.objective, &*trainer.collective);
            let made = update(&trainer.policy, &mut trainer.optimizer, ema, objective, batches, collective, &trainer.stop)?;
            self.report_update(trainer, &made, watch);
            metrics.push(made);
            watch(Event::Progress(metrics.len() as u64));
        }
        watch(Event::Done);
        Ok(metrics)
    }

    fn report_update(&self, trainer: &Trainer, made: &UpdateMetrics, watch: &mut Watch<'_>) {
        for &(sample, step) in &made.skipped {
            let prompt = &trainer.train_prompts.texts[self.prompt_ids[sample]];
            let text = format!(
                "iteration {}: the log-probability of sample {sample} (`{prompt}`) at step {step} is not finite; it is left out",
                self.index
            );
            watch(Event::Warning(&text));
        }
        if made.is_skipped {
            let (index, norm) = (self.index, made.grad_norm);
            let text =
                format!("iteration {index}: the norm of the gradient is {norm}; the update is left out. Lower `optimizer.learning_rate`");
            watch(Event::Warning(&text));
        }
    }

    /// Standard deviation of the rewards of each group in which at least two are there.
    fn spreads(&self, rewards: &[RewardBreakdown]) -> Vec<f64> {
        let groups = (0..self.layout.num_prompts()).map(|prompt| present(&rewards[self.layout.samples(prompt)]));
        groups.filter(|group| group.len() > 1).map(|group| std_of(&group)).collect()
    }

    fn metrics(
        &self,
        trainer: &Trainer,
        noise_power: f64,
        rewards: &[RewardBreakdown],
        advantages: &[f64],
        updates: &[UpdateMetrics],
        clock: Clock,
    ) -> IterationMetrics {
        let (values, groups) = (present(rewards), self.spreads(rewards));
        // what was left out counts only where nothing is left
        let made: Vec<&UpdateMetrics> = updates.iter().filter(|update| !update.is_skipped).collect();
        let made = if made.is_empty() { updates.iter().collect() } else { made };
        let over_updates = |of: fn(&UpdateMetrics) -> f64| mean(made.iter().copied().map(of));
        IterationMetrics {
            iteration: self.index,
            updates: trainer.optimizer.updates,
            forwards: self.work(trainer.settings.rollout.retain_step).forwards(trainer.settings.sampling.widest_guidance()),
            reward_mean: mean(values.iter().copied()),
            reward_std: std_of(&values),
            reward_group_std: mean(groups.iter().copied()),
            zero_spread_groups: groups.iter().filter(|&&std| std < 1e-9).count(),
            reward_components: component_means(rewards),
            reward_advantages: self.reward_advantages(trainer, rewards, advantages),
            loss: over_updates(|u| u.loss),
            kl: over_updates(|u| u.kl),
            grad_norm: over_updates(|u| u.grad_norm),
            clip_fraction: over_updates(|u| u.clip_fraction),
            skipped_samples: skipped_samples(rewards, updates),
            skipped_updates: updates.iter().filter(|u| u.is_skipped).count(),
            ratio_deviation: updates.first().map_or(0.0, UpdateMetrics::ratio_deviation),
            steps: by_step(updates),
            noise_power,
            seconds: clock.laps,
        }
    }
}

/// The reward of a sample, NaN if it has none.
pub fn or_absent(score: Scored) -> RewardBreakdown {
    score.unwrap_or(RewardBreakdown { value: f64::NAN, components: BTreeMap::new() })
}

fn by_step(updates: &[UpdateMetrics]) -> BTreeMap<usize, StepMetrics> {
    let mut steps: BTreeMap<usize, StepMetrics> = BTreeMap::new();
    for (&step, metrics) in updates.iter().flat_map(|update| &update.steps) {
        steps.entry(step).or_default().merge(metrics);
    }
    steps
}

/// The rewards that are there.
fn present(rewards: &[RewardBreakdown]) -> Vec<f64> {
    rewards.iter().map(|reward| reward.value).filter(|value| value.is_finite()).collect()
}

/// Samples without a reward, or of which an update left out a step.
fn skipped_samples(rewards: &[RewardBreakdown], updates: &[UpdateMetrics]) -> usize {
    let mut samples: BTreeSet<usize> = updates.iter().flat_map(|update| &update.skipped).map(|&(sample, _)| sample).collect();
    samples.extend((0..rewards.len()).filter(|&sample| !rewards[sample].value.is_finite()));
    samples.len()
}

/// Of each part, the mean over the samples that have it.
fn component_means(rewards: &[RewardBreakdown]) -> BTreeMap<String, f64> {
    let mut parts: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
    for (name, value) in rewards.iter().flat_map(|reward| &reward.components) {
        parts.entry(name).or_default().push(*value);
    }
    parts.into_iter().map(|(name, values)| (name.clone(), mean(values.into_iter()))).collect()
}

/// Seconds by phase.
pub struct Clock {
    last: Instant,
    laps: BTreeMap<&'static str, f64>,
}

impl Clock {
    /// From now on.
    pub fn start() -> Self {
        Self { last: Instant::now(), laps: BTreeMap::new() }
    }

    /// Adds the time since the last lap to a phase.
    pub fn lap(&mut self, phase: &'static str) {
        *self.laps.entry(phase).or_default() += self.last.elapsed().as_secs_f64();
        self.last = Instant::now();
    }
}
