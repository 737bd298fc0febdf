//! Self-checks at the start of every run. Each catches a bug that has cost users of other implementations days: training
//! that runs, and learns nothing.

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::events::{Event, Watch};
use crate::replay::TransitionBatch;
use crate::scoring::{failure, score};
use crate::settings::MixedPrecision;
use crate::stats::mean;
use crate::trainer::Trainer;
use crate::update::accumulate;
use burn::tensor::{DType, Tensor};
use reward::Scored;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;
use wan::weights::to_floats;

/// What the checks measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CheckReport {
    /// Trained tensors; each of them receives a gradient.
    pub trained_tensors: usize,
    /// Trained parameters.
    pub trained_parameters: usize,
    /// max |ratio - 1| before the first update.
    pub ratio_deviation: f64,
    /// Largest change of a log-prob when only the batch around the sample changes.
    pub log_prob_noise_floor: f64,
    /// |change| of the first sample's log-prob when the activations of the transformer are f32 over the same weights; in bf16 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bf16_log_prob_deviation: Option<f64>,
    /// Power of the stochastic step's noise relative to std^2.
    pub noise_power: f64,
}

/// Samples that are checked, at the least, and prompts: with several a wrong reward can be told from one video, or one prompt, that it cannot
/// judge.
const ENOUGH: usize = 4;
const ENOUGH_PROMPTS: usize = 2;

/// Makes a few of the first iteration's samples and what an update would do with them, without the update. What fails then fails before hours
/// are spent on a whole iteration.
///
/// # Errors
/// [`Error::Check`] naming the check, what was measured, and what to do.
pub fn self_check(trainer: &Trainer, watch: &mut Watch<'_>) -> Result<CheckReport> {
    let batch = Batch::plan(&trainer.settings, trainer.train_prompts.len(), 0)?;
    let chunks = micro_batches(&batch, trainer);
    watch(Event::Phase { name: "self-check", total: chunks.len() as u64 });
    let (mut update, mut scores, mut powers) = (Vec::new(), Vec::new(), Vec::new());
    for chunk in &chunks {
        trainer.stop.check()?;
        let rollouts = batch.roll_out(trainer, chunk, false)?;
        for job in batch.decode(trainer, chunk, &rollouts.latents) {
            let job = job?;
            scores.extend(score(&trainer.reward, &job.asked, &job.clips));
        }
        powers.push(rollouts.noise_power);
        // any advantage but 0 will do
        update.extend(rollouts.transitions.iter().map(|batch| batch.with_advantages(&vec![1.0; chunk.len()])));
        watch(Event::Progress(powers.len() as u64));
    }
    watch(Event::Done);
    trainer.stop.check()?; // scores that were given up are no failures
    let noise_power = mean(powers.into_iter());
    check_noise(noise_power)?;
    check_rewards(&scores, trainer, watch)?;
    let (gradients, metrics) = accumulate(&trainer.policy, &trainer.objective, &update);
    let ratio_deviation = metrics.ratio_deviation();
    check_ratio(ratio_deviation, trainer)?;
    check_gradients(trainer, &gradients.sums, &update)?;
    let log_prob_noise_floor = noise_floor(trainer, &update);
    check_clip_range(trainer.settings.train.clip_range, log_prob_noise_floor)?;
    let params = trainer.policy.params();
    Ok(CheckReport {
        trained_tensors: params.len(),
        trained_parameters: params.num_elements(),
        ratio_deviation,
        log_prob_noise_floor,
        bf16_log_prob_deviation: bf16_deviation(trainer, &update),
        noise_power,
    })
}

/// Micro-batches with [`ENOUGH`] samples, of different prompts where there are any, and of further networks the first that trains each.
fn micro_batches(batch: &Batch, trainer: &Trainer) -> Vec<Range<usize>> {
    let network = |step: &usize| trainer.policy.network(trainer.objective.schedule.timestep(*step));
    let networks = |chunk: &Range<usize>| -> BTreeSet<usize> {
        batch.plans[chunk.clone()].iter().flat_map(|plan| plan.trained.iter().map(network)).collect()
    };
    let all: Vec<&Range<usize>> = batch.updates.iter().flatten().collect();
    let chosen = first_of_different(&all.iter().map(|chunk| &batch.prompt_ids[(*chunk).clone()]).collect::<Vec<_>>());
    let (mut chunks, mut reached) = (Vec::new(), BTreeSet::new());
    for (i, chunk) in all.into_iter().enumerate() {
        let networks = networks(chunk);
        if chosen.contains(&i) || !networks.is_subset(&reached) {
            reached.extend(networks);
            chunks.push(chunk.clone());
        }
    }
    chunks
}

/// The first of `chunks`, which are the prompts of samples, that bring [`ENOUGH`] samples of [`ENOUGH_PROMPTS`] prompts: those with new prompts
/// before others.
fn first_of_different(chunks: &[&[usize]]) -> BTreeSet<usize> {
    let (mut chosen, mut samples, mut prompts) = (BTreeSet::new(), 0, BTreeSet::<usize>::new());
    for only_new in [true, false] {
        for (i, chunk) in chunks.iter().enumerate() {
            let is_new = chunk.iter().any(|prompt| !prompts.contains(prompt));
            let enough = samples >= ENOUGH && (prompts.len() >= ENOUGH_PROMPTS || !only_new);
            if !enough && (is_new || !only_new) && chosen.insert(i) {
                samples += chunk.len();
                prompts.extend(chunk.iter());
            }
        }
    }
    chosen
}

/// The residual of the stochastic step, divided by std^2, is a mean of squares of standard normals.
fn check_noise(noise_power: f64) -> Result<()> {
    if (0.5..2.0).contains(&noise_power) {
        return Ok(());
    }
    let found = format!("the noise of the stochastic step has {noise_power:.3} times its power");
    failed("stochastic step", found, "a deterministic step has no probability to learn from: check `method.noise_level`")
}

/// A reward that scores nothing ends the run here; one that cannot judge some videos may go on as `train.max_skipped` says.
fn check_rewards(scores: &[Scored], trainer: &Trainer, watch: &mut Watch<'_>) -> Result<()> {
    let failures: Vec<String> = scores.iter().filter_map(failure).collect();
    let Some(first) = failures.first() else { return Ok(()) };
    let found = format!("{} of {} samples have no reward; the reward of one {first}", failures.len(), scores.len());
    if failures.len() == scores.len() || trainer.settings.train.max_skipped == 0.0 {
        return failed(
            "rewards",
            found,
            "`flash-grpo reward check RECIPE` tries rewards alone; servers must answer, and scores be finite numbers",
        );
    }
    watch(Event::Warning(&format!("self-check: {found}")));
    Ok(())
}

/// Of the rewards of the first iteration: standard deviation within each of its groups of `size`.
///
/// # Errors
/// [`Error::Check`] if all are 0.
pub fn check_spread(of_groups: &[f64], size: usize) -> Result<()> {
    if of_groups.iter().any(|spread| *spread > 1e-9) {
        return Ok(());
    }
    let found = format!("all {size} rollouts of every prompt have the same reward");
    failed("rewards", found, "without spread within a group there is nothing to learn: check that the reward looks at the video")
}

/// On the CPU rollout and replay agree to the last bit. A GPU's matrix products may round otherwise in batches of other sizes; that must not
/// clip a sample.
fn check_ratio(deviation: f64, trainer: &Trainer) -> Result<()> {
    let allowed = if wan::device::is_cpu(&trainer.device) { 0.0 } else { trainer.settings.train.clip_range };
    if deviation <= allowed {
        return Ok(());
    }
    let found = format!("the ratio before the first update differs from 1 by {deviation:e}");
    if allowed > 0.0 && trainer.settings.train.mixed_precision == MixedPrecision::Bf16 {
        return failed("ratio", found, LESS_NOISE);
    }
    failed("ratio", found, "rollout and replay must compute the same: this is a bug, please report it with the recipe")
}

/// Every trained tensor gets a gradient, and every layer one that is not zero. (`lora_A` starts with a zero gradient, as
/// `lora_B` is zero.) Of two networks, those are looked at that take a step of the update.
fn check_gradients(trainer: &Trainer, gradients: &[Option<Tensor<1>>], update: &[TransitionBatch]) -> Result<()> {
    let steps = update.iter().flat_map(|batch| &batch.steps);
    let networks: BTreeSet<usize> = steps.map(|&step| trainer.policy.network(trainer.objective.schedule.timestep(step))).collect();
    let reached = |gradient: &Option<Tensor<1>>| gradient.as_ref().is_some_and(|g| to_floats(g.clone().abs().max())[0] > 0.0);
    let idle: Vec<String> = trainer
        .policy
        .names()
        .into_iter()
        .zip(gradients)
        .filter(|((network, _), _)| networks.contains(network))
        .filter(|((_, name), gradient)| gradient.is_none() || !(name.ends_with("lora_A.weight") || reached(gradient)))
        .map(|((_, name), _)| name)
        .collect();
    if idle.is_empty() {
        return Ok(());
    }
    let found = format!("no gradient reaches {} of {} trained tensors, among them `{}`", idle.len(), gradients.len(), idle[0]);
    failed("gradients", found, "name only layers that take part in the velocity in `policy.target_modules`")
}

/// The same transitions in batches of one: what a change of batch alone does to a log-prob.
fn noise_floor(trainer: &Trainer, batches: &[TransitionBatch]) -> f64 {
    let Some(batch) = batches.first() else { return 0.0 };
    let single = |i: usize| (log_prob_alone(trainer, batch, i) - batch.old_log_probs[i]).abs();
    (0..batch.len().min(4)).map(single).fold(0.0, f64::max)
}

/// What the rounding of the activations alone does to a log-prob: a model in f32 would not fit beside the one in bf16.
fn bf16_deviation(trainer: &Trainer, batches: &[TransitionBatch]) -> Option<f64> {
    let batch = batches.first().filter(|_| trainer.policy.transformer.dtype() == DType::BF16)?;
    let exact = trainer.policy.with_activations(DType::F32, || log_prob_alone(trainer, batch, 0));
    Some((exact - batch.old_log_probs[0]).abs())
}

fn log_prob_alone(trainer: &Trainer, batch: &TransitionBatch, i: usize) -> f64 {
    let (objective, part) = (&trainer.objective, batch.range(i, i + 1));
    let transitions = objective.transitions(&part.steps);
    part.replay(&trainer.policy, &objective.schedule, &transitions, false).log_probs[0]
}

const LESS_NOISE: &str =
    "rounding alone would clip samples: raise `train.clip_range` above the floor, or compute with `train.mixed_precision = \"no\"`";

fn check_clip_range(clip_range: f64, floor: f64) -> Result<()> {
    if clip_range > floor {
        return Ok(());
    }
    let found = format!("`train.clip_range` is {clip_range:e}, log-probs are only known to {floor:e}");
    failed("clip range", found, LESS_NOISE)
}

fn failed<T>(check: &'static str, found: String, hint: &'static str) -> Result<T> {
    Err(Error::Check { check, found, hint })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_several_prompts_are_checked() {
        let chosen = |chunks: &[&[usize]]| first_of_different(chunks).into_iter().collect::<Vec<_>>();
        assert_eq!(chosen(&[&[0], &[0], &[1], &[1], &[2], &[2], &[3], &[4]]), [0, 2, 4, 6], "one of each of four prompts");
        assert_eq!(chosen(&[&[0; 8], &[0; 8], &[1; 8], &[2; 8]]), [0, 2], "one group of samples is of one prompt");
        assert_eq!(chosen(&[&[0, 0, 1, 1], &[2, 2, 3, 3]]), [0]);
        assert_eq!(chosen(&[&[0], &[0], &[0], &[0], &[0]]), [0, 1, 2, 3], "there is no other prompt");
        assert_eq!(chosen(&[&[0], &[1], &[0], &[1], &[0]]), [0, 1, 2, 3]);
    }
}
