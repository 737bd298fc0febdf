//! The samples of an iteration: planned, rolled out, scored, and cut into updates.

use crate::error::Result;
use crate::events::{Event, Watch};
use crate::iteration::Clock;
use crate::prompts;
use crate::replay::{Conditioning, TransitionBatch};
use crate::reward_advantage::RewardAdvantage;
use crate::rollout::{Rollouts, Start, rollout};
use crate::scoring::{Job, failure, overlapped};
use crate::settings::{Combination, Settings};
use crate::sharing::{Shares, Work};
use crate::stats::mean;
use crate::trainer::Trainer;
use burn::tensor::{Device, Tensor, TensorData};
use grpo::{GroupLayout, InitialNoise, Key, PolicyLoss, Purpose, StepPlan, advantages};
use reward::{Normalised, RewardBreakdown, Scored, group_normalised, per_reward};
use std::collections::BTreeMap;
use std::ops::Range;
use wan::text::PromptEmbeds;

/// Samples of a micro-batch that are decoded, and handed to the rewards, together: as many as those like, but at least 2, for on two cores two clips
/// take as long each as eight do, and a single one a third longer.
pub fn decoded_at_once(settings: &Settings) -> usize {
    reward::samples_at_once(&settings.reward).clamp(2, settings.rollout.micro_batch.max(2))
}

/// Failed samples that are told of one by one.
pub(crate) const SHOWN_FAILURES: usize = 3;

/// What came of a batch's samples.
pub struct Sampled {
    /// The trained transitions of each micro-batch, in the memory of the host (those with a graph excepted).
    pub transitions: Vec<Vec<TransitionBatch>>,
    /// See [`Rollouts::noise_power`].
    pub noise_power: f64,
    /// A score per sample.
    pub scores: Vec<Scored>,
}

/// What is left of a micro-batch's rollouts once their latents are decoded.
struct Recorded {
    transitions: Vec<TransitionBatch>,
    noise_power: f64,
}

/// Takes transitions to the memory of the host, what they have in common only once.
struct ToHost<'a> {
    loss: &'a PolicyLoss,
    /// The negative prompt of all samples.
    negative: Option<PromptEmbeds>,
}

impl ToHost<'_> {
    /// Only what an update with this loss asks for.
    fn recorded(&mut self, rollouts: Rollouts) -> Recorded {
        let mut transitions: Vec<TransitionBatch> = Vec::with_capacity(rollouts.transitions.len());
        for batch in rollouts.transitions {
            let batch = TransitionBatch { old_velocity: batch.old_velocity.filter(|_| self.loss.needs_change()), ..batch };
            // steps of the same samples have the same prompts
            let known = transitions.iter().find(|other| other.retained.is_none() && other.samples == batch.samples);
            let conditioning = known.map(|other| other.conditioning.clone());
            transitions.push(if batch.retained.is_some() { batch } else { self.moved(batch, conditioning) });
        }
        Recorded { transitions, noise_power: rollouts.noise_power }
    }

    fn moved(&mut self, batch: TransitionBatch, known: Option<Conditioning>) -> TransitionBatch {
        let host = Device::flex();
        let conditioning = known.unwrap_or_else(|| {
            let own = batch.conditioning.clone();
            let negative = own.negative.as_ref().map(|own| self.negative.get_or_insert_with(|| own.to_device(&host)).clone());
            Conditioning { negative, ..Conditioning { negative: None, ..own }.to_device(&host) }
        });
        TransitionBatch { conditioning, ..batch.latents_to_device(&host) }
    }
}

/// The samples of an iteration: which prompts, which steps.
pub struct Batch {
    pub(crate) index: u64,
    pub(crate) layout: GroupLayout,
    pub(crate) num_steps: usize,
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

    /// Rolls out, decodes and scores, micro-batch by micro-batch. Scoring goes on beside the next rollouts, and `clock` counts as \"reward\" the
    /// time spent waiting for it. Clips are decoded in as small pieces as the reward likes: it begins early, and at the end a piece is waited for
    /// rather than a micro-batch. What was recorded waits in the memory of the host: the device has no room for all of it.
    ///
    /// `retain` keeps the graphs of the trained steps for the first update; for later ones the weights have changed.
    ///
    /// # Errors
    /// A request to stop; more samples without a reward than `train.max_skipped` allows, as soon as they are so many.
    pub fn sample(&self, trainer: &Trainer, retain: bool, watch: &mut Watch<'_>, clock: &mut Clock) -> Result<Sampled> {
        watch(Event::Phase { name: "rollout", total: self.prompt_ids.len() as u64 });
        let (order, mut sampled) = (self.cheapest_first(), 0);
        let mut to_host = ToHost { loss: &trainer.objective.loss, negative: None };
        let (recorded, scores) = overlapped(&trainer.reward, |queue| -> Result<Vec<(usize, Recorded)>> {
            let mut done = Vec::new();
            for chunk in order.iter().copied() {
                trainer.stop.check()?;
                if queue.failed() > trainer.tolerated(self.prompt_ids.len()) {
                    break; // the rest would be in vain
                }
                let rollouts = self.roll_out(trainer, chunk, retain && self.is_first(chunk))?;
                clock.lap("rollout");
                self.decode(trainer, chunk, &rollouts.latents).try_for_each(|job| job.map(|job| queue.put(job)))?;
                clock.lap("decode");
                sampled += chunk.len();
                watch(Event::Progress(sampled as u64));
                done.push((chunk.start, to_host.recorded(rollouts)));
            }
            Ok(done)
        });
        clock.lap("reward");
        watch(Event::Done);
        trainer.stop.check()?; // scores that were given up are no failures
        let scores: Vec<(usize, Scored)> = order.iter().flat_map(|chunk| (*chunk).clone()).zip(scores).collect();
        self.report_rewards(trainer, &scores, watch)?;
        let recorded = in_order(recorded?);
        let noise_power = mean(recorded.iter().map(|part| part.noise_power));
        Ok(Sampled { transitions: recorded.into_iter().map(|part| part.transitions).collect(), noise_power, scores: in_order(scores) })
    }

    /// The clips of a micro-batch's latents [B, C, f, h, w], a few at a time.
    pub fn decode<'a>(&self, trainer: &'a Trainer, chunk: &Range<usize>, latents: &Tensor<5>) -> impl Iterator<Item = Result<Job<'a>>> {
        pieces(0..chunk.len(), decoded_at_once(&trainer.settings)).map(move |part| {
            let clips = trainer.decode_for_reward(latents.clone().narrow(0, part.start, part.len()))?;
            let prompts = &self.prompt_ids[chunk.start + part.start..chunk.start + part.end];
            let asked = prompts.iter().map(|&prompt| trainer.train_prompts.asked(prompt, trainer.settings.sampling.fps)).collect();
            Ok(Job { asked, clips })
        })
    }

    /// Tells of samples without a reward.
    fn report_rewards(&self, trainer: &Trainer, scores: &[(usize, Scored)], watch: &mut Watch<'_>) -> Result<()> {
        let failures: Vec<(usize, String)> = scores.iter().filter_map(|(sample, score)| Some((*sample, failure(score)?))).collect();
        for (sample, why) in failures.iter().take(SHOWN_FAILURES) {
            let prompt = &trainer.train_prompts.texts[self.prompt_ids[*sample]];
            watch(Event::Warning(&format!("iteration {}: the reward of sample {sample} (`{prompt}`) {why}; it is left out", self.index)));
        }
        if failures.len() > SHOWN_FAILURES {
            let more = failures.len() - SHOWN_FAILURES;
            watch(Event::Warning(&format!("iteration {}: {more} more samples have no reward", self.index)));
        }
        trainer.tolerate("samples", failures.len(), self.prompt_ids.len(), || format!("iteration {}", self.index))
    }

    /// Micro-batches in the order of sampling: those with the least work first. The rewards then begin early and have clips waiting from then on,
    /// so that they end early too (Johnson 1954, two machines in a row). Values do not depend on it.
    fn cheapest_first(&self) -> Vec<&Range<usize>> {
        let mut order: Vec<&Range<usize>> = self.chunks().collect();
        order.sort_by_key(|chunk| self.work_of(chunk, false).sampled);
        order
    }

    /// What each sample did better than the others of its prompt. The rewards are added as they are, or each normalised in its group first.
    pub fn advantages(&self, trainer: &Trainer, rewards: &[RewardBreakdown]) -> Vec<f64> {
        let values: Vec<f64> = match trainer.settings.scoring.combination {
            Combination::WeightedSum => rewards.iter().map(|reward| reward.value).collect(),
            Combination::GroupNormalised => self.normalised(trainer, rewards).values,
        };
        advantages(&values, &self.layout, trainer.recipe.advantage, trainer.settings.train.advantage_clip)
    }

    /// Each reward normalised within its groups.
    fn normalised(&self, trainer: &Trainer, rewards: &[RewardBreakdown]) -> Normalised {
        let present: Vec<Option<&RewardBreakdown>> = rewards.iter().map(|reward| reward.value.is_finite().then_some(reward)).collect();
        let (names, weights): (Vec<&str>, Vec<f64>) = trainer.reward.parts().unzip();
        let groups: Vec<Range<usize>> = (0..self.layout.num_prompts()).map(|prompt| self.layout.samples(prompt)).collect();
        group_normalised(&per_reward(&present, names.into_iter()), &weights, &groups)
    }

    /// How each of several rewards took part; nothing for a single one.
    pub fn reward_advantages(
        &self,
        trainer: &Trainer,
        rewards: &[RewardBreakdown],
        advantages: &[f64],
    ) -> BTreeMap<String, RewardAdvantage> {
        let names: Vec<&str> = trainer.reward.parts().map(|(name, _)| name).collect();
        if names.len() < 2 {
            return BTreeMap::new();
        }
        let normalised = self.normalised(trainer, rewards).per_reward;
        names.iter().zip(&normalised).map(|(name, own)| ((*name).to_owned(), RewardAdvantage::of(own, advantages))).collect()
    }

    /// Whether a micro-batch belongs to the first update.
    fn is_first(&self, chunk: &Range<usize>) -> bool {
        self.updates.first().is_some_and(|chunks| chunks.contains(chunk))
    }

    /// Rolls out a micro-batch, and nothing else.
    ///
    /// # Errors
    /// A picture that cannot be read any more.
    pub fn roll_out(&self, trainer: &Trainer, chunk: &Range<usize>, retain: bool) -> Result<Rollouts> {
        let [c, f, h, w] = trainer.latent_shape();
        let initial: Vec<f32> = chunk.clone().flat_map(|i| self.initial_key(trainer, i).normals(c * f * h * w)).collect();
        let initial = Tensor::from_data(TensorData::new(initial, [chunk.len(), c, f, h, w]), &trainer.device);
        let conditioning = trainer.conditioning(&trainer.train_prompts, &self.prompt_ids[chunk.clone()])?;
        let latents = conditioning.unknown(initial);
        let elements = latents.shape().num_elements() / chunk.len();
        let step_noise = |sample: usize, step: usize| self.step_key(trainer, chunk.start + sample, step).normals(elements);
        let start = Start {
            latents,
            conditioning,
            shares: Shares { plans: &self.plans[chunk.clone()], leaders: &self.leaders(chunk), suffix: self.suffix },
            retain,
            step_noise: &step_noise,
        };
        Ok(rollout(&trainer.policy, &trainer.objective.schedule, &trainer.recipe.noise_level, start))
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
        self.chunks().map(|chunk| self.work_of(chunk, retain && self.is_first(chunk))).sum()
    }

    fn work_of(&self, chunk: &Range<usize>, retain: bool) -> Work {
        self.with_shares(chunk, |shares| shares.work(self.num_steps, retain))
    }

    /// See [`Shares::trained`]; for each micro-batch, whose samples are counted from its start.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (&Range<usize>, Vec<(Vec<usize>, usize)>)> {
        self.chunks().map(|chunk| (chunk, self.with_shares(chunk, |shares| shares.trained(self.num_steps))))
    }

    fn with_shares<T>(&self, chunk: &Range<usize>, of: impl FnOnce(Shares<'_>) -> T) -> T {
        of(Shares { plans: &self.plans[chunk.clone()], leaders: &self.leaders(chunk), suffix: self.suffix })
    }

    fn initial_key(&self, trainer: &Trainer, sample: usize) -> Key {
        let rollout = match trainer.recipe.initial_noise {
            InitialNoise::Independent => self.layout.rollout(sample) as u64,
            InitialNoise::SharedInGroup => 0,
        };
        self.key(trainer, sample, rollout, Purpose::InitialNoise)
    }

    /// Each step of a rollout has its own stream: the step is folded into the rollout's coordinate.
    fn step_key(&self, trainer: &Trainer, sample: usize, step: usize) -> Key {
        let rollout = self.layout.rollout(sample) as u64 + ((step as u64) << 32);
        self.key(trainer, sample, rollout, Purpose::StepNoise)
    }

    fn key(&self, trainer: &Trainer, sample: usize, rollout: u64, purpose: Purpose) -> Key {
        Key { seed: trainer.settings.seed, iteration: self.index, prompt: self.layout.prompt(sample) as u64, rollout, purpose }
    }

    /// The micro-batches of every update, with their advantages, from what each micro-batch of the rollout recorded.
    pub fn transitions(&self, recorded: &[Vec<TransitionBatch>], advantages: &[f64]) -> Vec<Vec<TransitionBatch>> {
        let mut recorded = recorded.iter();
        let mut with_advantages = |chunk: &Range<usize>| -> Vec<TransitionBatch> {
            let Some(transitions) = recorded.next() else { return Vec::new() };
            let global = |batch: &TransitionBatch| {
                let batch = batch.with_advantages(&advantages[chunk.clone()]);
                TransitionBatch { samples: batch.samples.iter().map(|sample| chunk.start + sample).collect(), ..batch }
            };
            transitions.iter().map(global).collect()
        };
        self.updates.iter().map(|chunks| chunks.iter().flat_map(&mut with_advantages).collect()).collect()
    }
}

/// `samples` in `parts` nearly equal consecutive parts, each cut into pieces of at most `size`.
pub(crate) fn cut(samples: usize, parts: usize, size: usize) -> Vec<Vec<Range<usize>>> {
    let bound = |part: usize| part * samples / parts;
    (0..parts).map(|part| pieces(bound(part)..bound(part + 1), size).collect()).collect()
}

/// What belongs to places, in their order.
fn in_order<T>(mut parts: Vec<(usize, T)>) -> Vec<T> {
    parts.sort_by_key(|(place, _)| *place);
    parts.into_iter().map(|(_, part)| part).collect()
}

/// Consecutive pieces of at most `size`.
pub fn pieces(whole: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    whole.clone().step_by(size).map(move |start| start..(start + size).min(whole.end))
}
