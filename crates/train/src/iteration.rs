//! One iteration of the method: prompts -> plan -> rollout -> decode -> reward -> advantages -> update.

use crate::error::{Error, Result};
use crate::events::{Event, Watch};
use crate::prompts;
use crate::recording;
use crate::replay::TransitionBatch;
use crate::rollout::{Rollouts, Start, rollout};
use crate::scoring::{Job, overlapped};
use crate::settings::Combination;
use crate::settings::Settings;
use crate::sharing::{Shares, Work};
use crate::trainer::Trainer;
use crate::update::{UpdateMetrics, update};
use burn::tensor::{Tensor, TensorData};
use grpo::{GroupLayout, InitialNoise, Key, Purpose, StepPlan, advantages};
use reward::{RewardBreakdown, Scored, group_normalised, per_reward};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// One line of metrics.jsonl; docs/metrics.md explains each entry.
#[derive(Debug, Clone, Default, Serialize)]
pub struct IterationMetrics {
    /// Iteration, from 0.
    pub iteration: u64,
    /// Optimizer updates made so far.
    pub updates: u64,
    /// Model forwards of one sample, rollouts and updates; see [`Work::forwards`].
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
    Ok(batch.metrics(trainer, &rollouts, &rewards, &updates, clock))
}

/// The samples of an iteration: which prompts, which steps.
pub struct Batch {
    index: u64,
    layout: GroupLayout,
    num_steps: usize,
    /// Prompt id of every sample.
    pub prompt_ids: Vec<usize>,
    /// Steps of every sample.
    pub plans: Vec<StepPlan>,
    /// Samples of every update, cut into micro-batches. Rollout and replay use the same cuts, so that a sample always
    /// meets the same neighbours.
    pub updates: Vec<Vec<Range<usize>>>,
    /// Whether rollouts of a prompt have anything in common.
    shares_prefix: bool,
    /// See [`Shares::suffix`].
    suffix: Option<usize>,
}

impl Batch {
    /// Chooses prompts and steps: a function of (seed, iteration).
    ///
    /// # Errors
    /// None for settings that were loaded.
    pub fn plan(settings: &Settings, num_prompts: usize, index: u64) -> Result<Self> {
        let layout = GroupLayout::new(settings.rollout.prompts_per_iteration, settings.rollout.group_size)?;
        let prompts = prompts::of_iteration(settings.seed, index, layout.num_prompts(), num_prompts);
        let (recipe, num_steps) = (settings.recipe(), settings.schedule()?.num_steps());
        let plan = |i: usize| recipe.plan(settings.seed, index, layout.prompt(i) as u64, layout.rollout(i) as u64, num_steps);
        Ok(Self {
            index,
            layout,
            num_steps,
            prompt_ids: (0..layout.num_samples()).map(|i| prompts[layout.prompt(i)]).collect(),
            plans: (0..layout.num_samples()).map(plan).collect(),
            updates: cut(layout.num_samples(), settings.train.updates_per_iteration, settings.rollout.micro_batch),
            shares_prefix: settings.shares_prefix(),
            suffix: settings.rollout.compressed_suffix,
        })
    }

    fn chunks(&self) -> impl Iterator<Item = &Range<usize>> {
        self.updates.iter().flatten()
    }

    /// Rolls out, decodes and scores, micro-batch by micro-batch; a score per sample. Scoring goes on beside the next rollouts, and
    /// `clock` counts as \"reward\" the time spent waiting for it.
    ///
    /// `retain` keeps the graphs of the trained steps for the first update; for later ones the weights have changed.
    ///
    /// # Errors
    /// A request to stop.
    pub fn sample(
        &self,
        trainer: &Trainer,
        retain: bool,
        watch: &mut Watch<'_>,
        clock: &mut Clock,
    ) -> Result<(Vec<Rollouts>, Vec<Scored>)> {
        watch(Event::Phase { name: "rollout", total: self.prompt_ids.len() as u64 });
        let (rollouts, scores) = overlapped(&trainer.reward, |queue| -> Result<Vec<Rollouts>> {
            let mut done = Vec::new();
            for chunk in self.chunks() {
                trainer.stop.check()?;
                let rollouts = self.roll_out(trainer, chunk, retain && self.is_first(chunk));
                clock.lap("rollout");
                queue.put(Job { texts: self.texts(trainer, chunk), clips: trainer.decode(rollouts.latents.clone())? });
                clock.lap("decode");
                done.push(rollouts);
                watch(Event::Progress(chunk.end as u64));
            }
            Ok(done)
        });
        clock.lap("reward");
        watch(Event::Done);
        Ok((rollouts?, scores))
    }

    /// The prompts of a micro-batch.
    fn texts<'a>(&self, trainer: &'a Trainer, chunk: &Range<usize>) -> Vec<&'a str> {
        self.prompt_ids[chunk.clone()].iter().map(|&id| trainer.train_prompts.texts[id].as_str()).collect()
    }

    /// What each sample did better than the others of its prompt. The rewards are added as they are, or each normalised in its group first.
    pub fn advantages(&self, trainer: &Trainer, rewards: &[RewardBreakdown]) -> Vec<f64> {
        let values: Vec<f64> = match trainer.settings.scoring.combination {
            Combination::WeightedSum => rewards.iter().map(|reward| reward.value).collect(),
            Combination::GroupNormalised => {
                let present: Vec<Option<&RewardBreakdown>> =
                    rewards.iter().map(|reward| reward.value.is_finite().then_some(reward)).collect();
                let (names, weights): (Vec<&str>, Vec<f64>) = trainer.reward.parts().unzip();
                let groups: Vec<Range<usize>> = (0..self.layout.num_prompts()).map(|prompt| self.layout.samples(prompt)).collect();
                group_normalised(&per_reward(&present, names.into_iter()), &weights, &groups).values
            }
        };
        advantages(&values, &self.layout, trainer.recipe.advantage, trainer.settings.train.advantage_clip)
    }

    /// Whether a micro-batch belongs to the first update.
    fn is_first(&self, chunk: &Range<usize>) -> bool {
        self.updates.first().is_some_and(|chunks| chunks.contains(chunk))
    }

    fn roll_out(&self, trainer: &Trainer, chunk: &Range<usize>, retain: bool) -> Rollouts {
        let [c, f, h, w] = trainer.latent_shape();
        let elements = c * f * h * w;
        let initial: Vec<f32> = chunk.clone().flat_map(|i| self.initial_key(trainer, i).normals(elements)).collect();
        let step_noise = |sample: usize, step: usize| self.step_key(trainer, chunk.start + sample, step).normals(elements);
        let start = Start {
            latents: Tensor::from_data(TensorData::new(initial, [chunk.len(), c, f, h, w]), &trainer.device),
            conditioning: trainer.conditioning(&trainer.train_prompts, &self.prompt_ids[chunk.clone()]),
            shares: Shares { plans: &self.plans[chunk.clone()], leaders: &self.leaders(chunk), suffix: self.suffix },
            retain,
            step_noise: &step_noise,
        };
        rollout(&trainer.policy, &trainer.objective.schedule, &trainer.recipe.noise_level, start)
    }

    /// See [`Shares::leaders`].
    fn leaders(&self, chunk: &Range<usize>) -> Vec<usize> {
        let first = |sample: usize| {
            let group = self.layout.samples(self.layout.prompt(sample)).start;
            group.max(chunk.start) - chunk.start
        };
        let own = |sample: usize| sample - chunk.start;
        chunk.clone().map(|sample| if self.shares_prefix { first(sample) } else { own(sample) }).collect()
    }

    /// What the iteration costs.
    pub fn work(&self, retain: bool) -> Work {
        let of = |chunk: &Range<usize>| {
            let shares = Shares { plans: &self.plans[chunk.clone()], leaders: &self.leaders(chunk), suffix: self.suffix };
            shares.work(self.num_steps, retain && self.is_first(chunk))
        };
        self.chunks().map(of).sum()
    }

    fn initial_key(&self, trainer: &Trainer, sample: usize) -> Key {
        let rollout = match trainer.recipe.initial_noise {
            InitialNoise::Independent => trainer.layout.rollout(sample) as u64,
            InitialNoise::SharedInGroup => 0,
        };
        self.key(trainer, sample, rollout, Purpose::InitialNoise)
    }

    /// Each step of a rollout has its own stream: the step is folded into the rollout's coordinate.
    fn step_key(&self, trainer: &Trainer, sample: usize, step: usize) -> Key {
        let rollout = trainer.layout.rollout(sample) as u64 + ((step as u64) << 32);
        self.key(trainer, sample, rollout, Purpose::StepNoise)
    }

    fn key(&self, trainer: &Trainer, sample: usize, rollout: u64, purpose: Purpose) -> Key {
        Key { seed: trainer.settings.seed, iteration: self.index, prompt: trainer.layout.prompt(sample) as u64, rollout, purpose }
    }

    /// The micro-batches of every update, with their advantages.
    pub fn transitions(&self, rollouts: &[Rollouts], advantages: &[f64]) -> Vec<Vec<TransitionBatch>> {
        let mut rollouts = rollouts.iter();
        let mut with_advantages = |chunk: &Range<usize>| -> Vec<TransitionBatch> {
            let Some(rollouts) = rollouts.next() else { return Vec::new() };
            let global = |batch: &TransitionBatch| {
                let batch = batch.with_advantages(&advantages[chunk.clone()]);
                TransitionBatch { samples: batch.samples.iter().map(|sample| chunk.start + sample).collect(), ..batch }
            };
            rollouts.transitions.iter().map(global).collect()
        };
        self.updates.iter().map(|chunks| chunks.iter().flat_map(&mut with_advantages).collect()).collect()
    }

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
        updates: &[UpdateMetrics],
        clock: Clock,
    ) -> IterationMetrics {
        let finite =
            |values: &[RewardBreakdown]| -> Vec<f64> { values.iter().map(|reward| reward.value).filter(|v| v.is_finite()).collect() };
        let values = finite(rewards);
        let groups: Vec<f64> = (0..trainer.layout.num_prompts()).map(|p| std_of(&finite(&rewards[trainer.layout.samples(p)]))).collect();
        let over_updates = |of: fn(&UpdateMetrics) -> f64| mean(updates.iter().map(of));
        IterationMetrics {
            iteration: self.index,
            updates: trainer.optimizer.updates,
            forwards: self.work(trainer.settings.rollout.retain_step).forwards(trainer.settings.sampling.guidance_scale),
            reward_mean: mean(values.iter().copied()),
            reward_std: std_of(&values),
            reward_group_std: mean(groups.iter().copied()),
            zero_spread_groups: groups.iter().filter(|&&std| std < 1e-9).count(),
            reward_components: component_means(rewards),
            loss: over_updates(|u| u.loss),
            kl: over_updates(|u| u.kl),
            grad_norm: over_updates(|u| u.grad_norm),
            clip_fraction: over_updates(|u| u.clip_fraction),
            skipped_samples: rewards.len() - values.len() + updates.iter().map(|u| u.skipped.len()).sum::<usize>(),
            skipped_updates: updates.iter().filter(|u| u.is_skipped).count(),
            ratio_deviation: updates.first().map_or(0.0, UpdateMetrics::ratio_deviation),
            noise_power: mean(rollouts.iter().map(|r| r.noise_power)),
            seconds: clock.laps,
        }
    }
}

/// `samples` in `parts` nearly equal consecutive parts, each cut into pieces of at most `size`.
pub(crate) fn cut(samples: usize, parts: usize, size: usize) -> Vec<Vec<Range<usize>>> {
    let bound = |part: usize| part * samples / parts;
    let pieces = |from: usize, to: usize| (from..to).step_by(size).map(|start| start..(start + size).min(to)).collect();
    (0..parts).map(|part| pieces(bound(part), bound(part + 1))).collect()
}

/// The reward of a sample, NaN if it has none.
pub fn or_absent(score: Scored) -> RewardBreakdown {
    score.unwrap_or(RewardBreakdown { value: f64::NAN, components: BTreeMap::new() })
}

fn component_means(rewards: &[RewardBreakdown]) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for (name, value) in rewards.iter().flat_map(|reward| &reward.components) {
        *sums.entry(name.clone()).or_insert(0.0) += value / rewards.len() as f64;
    }
    sums
}

/// Mean; 0 of nothing.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / f64::from(count) }
}

/// Population standard deviation.
pub(crate) fn std_of(values: &[f64]) -> f64 {
    let mean_value = mean(values.iter().copied());
    mean(values.iter().map(|v| (v - mean_value).powi(2))).sqrt()
}

/// Seconds by phase.
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
