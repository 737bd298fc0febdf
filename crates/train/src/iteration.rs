//! One iteration of the method: prompts -> plan -> rollout -> decode -> reward -> advantages -> update.

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::events::{Event, Watch};
use crate::recording;
use crate::replay::TransitionBatch;
use crate::reward_advantage::RewardAdvantage;
use crate::rollout::Rollouts;
use crate::stats::{mean, std_of};
use crate::step_metrics::StepMetrics;
use crate::trainer::Trainer;
use crate::update::{UpdateMetrics, update};
use reward::{RewardBreakdown, Scored};
use serde::Serialize;
use std::collections::BTreeMap;
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

/// Failed samples of an iteration that are told of one by one.
const SHOWN_FAILURES: usize = 3;

/// Runs iteration `index`.
///
/// # Errors
/// A request to stop, before anything has changed; a sample that cannot be scored; more samples or updates that are not
/// finite than `train.max_skipped` allows (weights, optimizer and average are then those of before).
pub fn iteration(trainer: &mut Trainer, index: u64, watch: &mut Watch<'_>) -> Result<IterationMetrics> {
    let mut clock = Clock::start();
    let batch = Batch::plan(&trainer.settings, trainer.train_prompts.len(), index)?;
    let (rollouts, scores) = batch.sample(trainer, trainer.settings.rollout.retain_step, watch, &mut clock)?;
    let rewards_skipped = batch.report_rewards(trainer, &scores, watch)?;
    let rewards: Vec<RewardBreakdown> = scores.into_iter().map(or_absent).collect();
    let advantages = batch.advantages(trainer, &rewards);
    let transitions = batch.transitions(&rollouts, &advantages);
    if trainer.settings.debug.save_rollouts {
        let path = trainer.settings.output_dir.join(format!("rollouts-{index:06}.safetensors"));
        recording::save(trainer, &transitions.concat(), &path)?;
    }
    let updates = batch.update(trainer, &transitions, rewards_skipped, watch)?;
    clock.lap("update");
    Ok(batch.metrics(trainer, &rollouts, &rewards, &advantages, &updates, clock))
}

impl Batch {
    fn update(
        &self,
        trainer: &mut Trainer,
        updates: &[Vec<TransitionBatch>],
        rewards_skipped: usize,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<UpdateMetrics>> {
        watch(Event::Phase { name: "update", total: updates.len() as u64 });
        let before = trainer.state();
        let mut metrics: Vec<UpdateMetrics> = Vec::new();
        for batches in updates {
            let due = (trainer.optimizer.updates + 1).is_multiple_of(trainer.settings.train.ema_every as u64);
            let ema = trainer.ema.as_mut().filter(|_| due);
            let made = update(&trainer.policy, &mut trainer.optimizer, ema, &trainer.objective, batches, &*trainer.collective);
            self.report_update(trainer, &made, watch);
            metrics.push(made);
            watch(Event::Progress(metrics.len() as u64));
        }
        watch(Event::Done);
        let transitions = metrics.iter().map(|m| m.skipped.len()).sum::<usize>();
        let skipped_updates = metrics.iter().filter(|m| m.is_skipped).count();
        let checked = self
            .tolerate("samples", rewards_skipped + transitions, self.prompt_ids.len(), trainer)
            .and_then(|()| self.tolerate("updates", skipped_updates, updates.len(), trainer));
        if checked.is_err() {
            trainer.restore(before);
        }
        checked.map(|()| metrics)
    }

    /// Tells of samples without a reward; how many there are.
    fn report_rewards(&self, trainer: &Trainer, scores: &[Scored], watch: &mut Watch<'_>) -> Result<usize> {
        let mut absent = 0;
        for (sample, score) in scores.iter().enumerate() {
            let why = match score {
                Ok(score) if score.value.is_finite() => continue,
                Ok(score) => format!("is {}", score.value),
                Err(error) => format!("is missing: {}", error.reason),
            };
            absent += 1;
            let prompt = &trainer.train_prompts.texts[self.prompt_ids[sample]];
            if absent <= SHOWN_FAILURES {
                watch(Event::Warning(&format!(
                    "iteration {}: the reward of sample {sample} (`{prompt}`) {why}; it is left out",
                    self.index
                )));
            }
        }
        if absent > SHOWN_FAILURES {
            watch(Event::Warning(&format!("iteration {}: {} more samples have no reward", self.index, absent - SHOWN_FAILURES)));
        }
        self.tolerate("samples", absent, scores.len(), trainer).map(|()| absent)
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

    fn tolerate(&self, what: &'static str, skipped: usize, all: usize, trainer: &Trainer) -> Result<()> {
        let allowed = trainer.settings.train.max_skipped;
        if skipped as f64 <= allowed * all as f64 {
            return Ok(());
        }
        Err(Error::NotFinite { what, skipped, all, allowed, iteration: self.index })
    }

    fn metrics(
        &self,
        trainer: &Trainer,
        rollouts: &[Rollouts],
        rewards: &[RewardBreakdown],
        advantages: &[f64],
        updates: &[UpdateMetrics],
        clock: Clock,
    ) -> IterationMetrics {
        let finite =
            |values: &[RewardBreakdown]| -> Vec<f64> { values.iter().map(|reward| reward.value).filter(|v| v.is_finite()).collect() };
        let values = finite(rewards);
        let groups: Vec<f64> = (0..self.layout.num_prompts()).map(|p| std_of(&finite(&rewards[self.layout.samples(p)]))).collect();
        let over_updates = |of: fn(&UpdateMetrics) -> f64| mean(updates.iter().map(of));
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
            skipped_samples: rewards.len() - values.len() + updates.iter().map(|u| u.skipped.len()).sum::<usize>(),
            skipped_updates: updates.iter().filter(|u| u.is_skipped).count(),
            ratio_deviation: updates.first().map_or(0.0, UpdateMetrics::ratio_deviation),
            steps: by_step(updates),
            noise_power: mean(rollouts.iter().map(|r| r.noise_power)),
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

fn component_means(rewards: &[RewardBreakdown]) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for (name, value) in rewards.iter().flat_map(|reward| &reward.components) {
        *sums.entry(name.clone()).or_insert(0.0) += value / rewards.len() as f64;
    }
    sums
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
