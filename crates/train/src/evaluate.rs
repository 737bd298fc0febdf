//! The pinned evaluation: held-out prompts, deterministic solver, fixed noise per prompt, base and policy on the same noise.

use crate::batch::{SHOWN_FAILURES, decoded_at_once, pieces};
use crate::compare::Interval;
use crate::error::Result;
use crate::events::{Event, Watch};
use crate::guards::{self, ClipGuards};
use crate::inputs::hex;
use crate::scoring::{Asked, failure, score};
use crate::settings::EvalSettings;
use crate::stats::mean;
use crate::trainer::Trainer;
use burn::tensor::{Tensor, TensorData};
use grpo::random::index_below;
use grpo::{Key, Purpose};
use reward::RewardBreakdown;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use video::Frames;
use wan::pipeline::denoise;

/// One evaluated sample.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Evaluated {
    /// Id among the evaluation's prompts.
    pub prompt: usize,
    /// Which of the prompt's samples.
    pub sample: usize,
    /// The prompt itself.
    pub text: String,
    /// Its reward.
    pub reward: RewardBreakdown,
    /// The clip, for the first sample of a few prompts only.
    #[serde(skip)]
    pub frames: Option<Frames>,
    /// Name of the clip's file in `samples/`, if it was written.
    #[serde(default)]
    pub video: Option<String>,
}

/// All evaluated samples.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Evaluation {
    /// In the order of (sample, prompt); those without a reward are left out.
    pub samples: Vec<Evaluated>,
    /// How many were left out.
    #[serde(default)]
    pub num_missing: usize,
    /// What it depends on besides the policy, see [`conditions`].
    #[serde(default)]
    pub conditions: String,
    /// What the reward does not see, see [`guards`].
    pub guards: BTreeMap<String, f64>,
}

impl Evaluation {
    /// Mean reward.
    pub fn reward(&self) -> f64 {
        mean(self.samples.iter().map(|sample| sample.reward.value))
    }

    /// Mean reward, to be compared with `base`'s: where samples are missing on either side, the base's mean and the mean difference of the
    /// samples that both have. Without the hardest prompts alone, a mean would rise.
    pub fn reward_beside(&self, base: &Self) -> f64 {
        if self.num_missing + base.num_missing == 0 {
            return self.reward();
        }
        let (before, after) = in_both(&base.samples, &self.samples);
        base.reward() + mean(before.iter().zip(&after).map(|(before, after)| after.reward.value - before.reward.value))
    }
}

/// Samples and scores every held-out prompt with the policy's present weights.
///
/// The noise is a function of (`eval.seed`, prompt, sample), so that two calls differ by their weights alone.
///
/// # Errors
/// More samples that cannot be scored than `train.max_skipped` allows; a request to stop.
pub fn evaluate(trainer: &Trainer, name: &str, watch: &mut Watch<'_>) -> Result<Evaluation> {
    let settings = &trainer.settings;
    let samples: Vec<(usize, usize)> = (0..settings.eval.samples_per_prompt)
        .flat_map(|sample| (0..trainer.eval_prompts.len()).map(move |prompt| (prompt, sample)))
        .collect();
    watch(Event::Phase { name, total: samples.len() as u64 });
    let mut evaluation = Evaluation { conditions: conditions(trainer), ..Evaluation::default() };
    let mut seen = Vec::with_capacity(samples.len());
    for chunk in samples.chunks(settings.rollout.micro_batch) {
        trainer.stop.check()?;
        let latents = sample_latents(trainer, chunk)?;
        for part in pieces(0..chunk.len(), decoded_at_once(settings)) {
            let clips = trainer.decode(latents.clone().narrow(0, part.start, part.len()))?;
            let part = &chunk[part];
            let asked: Vec<Asked<'_>> = part.iter().map(|&(prompt, _)| trainer.eval_prompts.asked(prompt, settings.sampling.fps)).collect();
            let scores = score(trainer.evaluation_reward(), &asked, &clips);
            trainer.stop.check()?; // scores that were given up are no failures
            for ((&(prompt, sample), score), clip) in part.iter().zip(scores).zip(clips) {
                let shown = sample == 0 && is_shown(prompt, trainer.eval_prompts.len(), settings.eval.videos);
                seen.push((prompt, ClipGuards::of(&clip)));
                let text = trainer.eval_prompts.texts[prompt].clone();
                if let Some(why) = failure(&score) {
                    evaluation.num_missing += 1;
                    if evaluation.num_missing <= SHOWN_FAILURES {
                        watch(Event::Warning(&format!("{name}: the reward of prompt {prompt} (`{text}`) {why}; it is left out")));
                    }
                }
                let Some(reward) = score.ok().filter(|reward| reward.value.is_finite()) else { continue };
                evaluation.samples.push(Evaluated { prompt, sample, text, reward, frames: shown.then_some(clip), video: None });
            }
            trainer.tolerate("samples", evaluation.num_missing, samples.len(), || format!("the {name}"))?;
        }
        watch(Event::Progress(seen.len() as u64));
    }
    watch(Event::Done);
    evaluation.guards = guards::summarise(&seen);
    Ok(evaluation)
}

/// Checksum of everything that decides what an evaluation measures besides the policy: two evaluations with other conditions cannot be compared.
pub fn conditions(trainer: &Trainer) -> String {
    let (settings, reward) = (&trainer.settings, trainer.evaluation_reward());
    let EvalSettings { seed, num_prompts, samples_per_prompt, num_inference_steps, solver, .. } = &settings.eval;
    // a reward that does not know what its values depend on is at least the same one by name
    let rewards: Vec<(&str, f64, Option<String>)> =
        reward.parts().zip(reward.rewards()).map(|((name, weight), (_, reward))| (name, weight, reward.identity())).collect();
    let inputs: Vec<Option<&String>> = ["model.path", "prompts.eval"].map(|key| trainer.inputs.get(key)).into();
    let all = serde_json::json!({
        "eval": [seed, num_prompts, samples_per_prompt, num_inference_steps],
        "solver": solver,
        "sampling": settings.sampling,
        "negative": settings.prompts.negative,
        "precision": settings.train.mixed_precision,
        "rewards": rewards,
        "inputs": inputs,
    });
    hex(Sha256::digest(all.to_string()))
}

/// Videos of the first `prompts` held-out prompts, `per_prompt` each, with the ids of their prompts; the same noise as an evaluation's.
///
/// # Errors
/// None for a trainer that was built.
pub fn sample_clips(trainer: &Trainer, prompts: usize, per_prompt: usize, mut progress: impl FnMut(u64)) -> Result<Vec<(usize, Frames)>> {
    let prompts = prompts.min(trainer.eval_prompts.len());
    let pairs: Vec<(usize, usize)> = (0..per_prompt).flat_map(|sample| (0..prompts).map(move |prompt| (prompt, sample))).collect();
    let mut clips = Vec::with_capacity(pairs.len());
    for chunk in pairs.chunks(trainer.settings.rollout.micro_batch) {
        let latents = sample_latents(trainer, chunk)?;
        for part in pieces(0..chunk.len(), decoded_at_once(&trainer.settings)) {
            let prompts = chunk[part.clone()].iter().map(|&(prompt, _)| prompt);
            clips.extend(prompts.zip(trainer.decode(latents.clone().narrow(0, part.start, part.len()))?));
        }
        progress(clips.len() as u64);
    }
    Ok(clips)
}

/// Whether `prompt` is one of `videos` that lie evenly among `prompts`.
fn is_shown(prompt: usize, prompts: usize, videos: usize) -> bool {
    (0..videos).any(|i| i * prompts / videos == prompt)
}

/// Latents of (prompt, sample) pairs.
fn sample_latents(trainer: &Trainer, chunk: &[(usize, usize)]) -> Result<Tensor<5>> {
    let [c, f, h, w] = trainer.latent_shape();
    let key = |&(prompt, sample): &(usize, usize)| Key {
        seed: trainer.settings.eval.seed,
        iteration: 0,
        prompt: prompt as u64,
        rollout: sample as u64,
        purpose: Purpose::EvalNoise,
    };
    let noise: Vec<f32> = chunk.iter().flat_map(|pair| key(pair).normals(c * f * h * w)).collect();
    let noise: Tensor<5> = Tensor::from_data(TensorData::new(noise, [chunk.len(), c, f, h, w]), &trainer.device);
    let ids: Vec<usize> = chunk.iter().map(|&(prompt, _)| prompt).collect();
    let conditioning = trainer.conditioning(&trainer.eval_prompts, &ids)?;
    let velocity = conditioning.velocity(&trainer.policy, noise.dims(), false);
    Ok(denoise(&velocity, trainer.settings.eval.solver, &trainer.eval_schedule, noise, &mut |_, _| {}))
}

/// The paired comparison of two evaluations.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// Mean reward of the base.
    pub eval_reward_before: f64,
    /// Mean reward of the policy.
    pub eval_reward_after: f64,
    /// Mean of the paired differences.
    pub eval_reward_difference: f64,
    /// 95 % interval of the mean difference, see [`interval_of_mean`]; none of one prompt.
    pub eval_reward_interval: Option<[f64; 2]>,
    /// Means of the parts, before and after.
    pub components: BTreeMap<String, [f64; 2]>,
    /// What the reward does not see, before and after.
    pub guards: BTreeMap<String, [f64; 2]>,
    /// A sentence for each of them that changed suspiciously.
    pub alarms: Vec<String>,
    /// Prompts compared.
    pub num_prompts: usize,
    /// Samples compared.
    pub num_samples: usize,
    /// Samples that were left out because they had no reward before or after.
    pub num_missing: usize,
}

impl Comparison {
    /// The difference with its interval, as text: `+0.261, 95 % interval [+0.221, +0.301]`.
    pub fn gain(&self, digits: usize) -> String {
        let difference = self.eval_reward_difference;
        match self.eval_reward_interval {
            Some([low, high]) => format!("{difference:+.digits$}, 95 % interval [{low:+.digits$}, {high:+.digits$}]"),
            None => format!("{difference:+.digits$}, of one prompt, which has no interval"),
        }
    }
}

/// Compares sample by sample those that both have; the interval is one over *prompts* (samples of a prompt are not independent).
pub fn compare(before: &Evaluation, after: &Evaluation, resamplings: usize, seed: u64) -> Comparison {
    let guards = before.guards.iter().filter_map(|(name, b)| Some((name.clone(), [*b, *after.guards.get(name)?]))).collect();
    let all = before.samples.len() + before.num_missing;
    let (before, after) = in_both(&before.samples, &after.samples);
    let mut by_prompt: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for (b, a) in before.iter().zip(&after) {
        by_prompt.entry(b.prompt).or_default().push(a.reward.value - b.reward.value);
    }
    let differences: Vec<f64> = by_prompt.values().map(|d| mean(d.iter().copied())).collect();
    let of = |samples: &[&Evaluated]| mean(samples.iter().map(|s| s.reward.value));
    let mut components = BTreeMap::new();
    for name in before.iter().flat_map(|s| s.reward.components.keys()) {
        let part = |samples: &[&Evaluated]| mean(samples.iter().filter_map(|s| s.reward.components.get(name).copied()));
        components.entry(name.clone()).or_insert_with(|| [part(&before), part(&after)]);
    }
    Comparison {
        eval_reward_before: of(&before),
        eval_reward_after: of(&after),
        eval_reward_difference: of(&after) - of(&before),
        eval_reward_interval: interval_of_mean(&differences, resamplings, seed),
        components,
        alarms: guards::alarms(&guards),
        guards,
        num_prompts: differences.len(),
        num_samples: before.len(),
        num_missing: all - before.len(),
    }
}

/// The samples that have a reward in both evaluations, in the same order.
fn in_both<'a>(before: &'a [Evaluated], after: &'a [Evaluated]) -> (Vec<&'a Evaluated>, Vec<&'a Evaluated>) {
    let key = |evaluated: &Evaluated| (evaluated.prompt, evaluated.sample);
    let later: BTreeMap<_, &Evaluated> = after.iter().map(|evaluated| (key(evaluated), evaluated)).collect();
    before.iter().filter_map(|evaluated| Some((evaluated, *later.get(&key(evaluated))?))).unzip()
}

/// Below so many values a percentile bootstrap is too narrow: its variance is that of the sample, (n - 1) / n of the estimate, and it makes no
/// allowance for the spread being estimated (together 37 % at 5 values, 10 % at 18, 6 % at 29).
const MANY: usize = 30;

/// 95 % interval of the mean of `values`: Student's t of fewer than 30, the percentile bootstrap of more; none of a single one, which says nothing
/// of its spread.
pub fn interval_of_mean(values: &[f64], resamplings: usize, seed: u64) -> Option<[f64; 2]> {
    match values.len() {
        0 | 1 => None,
        2..MANY => {
            let Interval { low, high, .. } = Interval::of(values);
            Some([low, high])
        }
        _ => Some(bootstrap(values, resamplings, seed)),
    }
}

/// 95 % percentile interval of the mean of `values` (Efron 1979).
fn bootstrap(values: &[f64], resamplings: usize, seed: u64) -> [f64; 2] {
    let mut rng = Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Bootstrap }.rng();
    let mut means: Vec<f64> =
        (0..resamplings).map(|_| mean((0..values.len()).map(|_| values[index_below(&mut rng, values.len())]))).collect();
    means.sort_by(f64::total_cmp);
    let quantile = |q: f64| means.get(((means.len() as f64 - 1.0) * q).round() as usize).copied().unwrap_or(f64::NAN);
    [quantile(0.025), quantile(0.975)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_sample_does_not_move_the_mean() {
        let sample = |prompt, value| Evaluated {
            prompt,
            sample: 0,
            text: String::new(),
            reward: RewardBreakdown { value, components: BTreeMap::new() },
            frames: None,
            video: None,
        };
        let evaluation = |values: &[f64], num_missing| Evaluation {
            samples: values.iter().enumerate().map(|(prompt, value)| sample(prompt, *value)).collect(),
            num_missing,
            ..Evaluation::default()
        };
        let base = evaluation(&[0.2, 0.4, 0.9], 0);
        assert!((evaluation(&[0.3, 0.5, 1.0], 0).reward_beside(&base) - 0.6).abs() < 1e-12);
        assert!((evaluation(&[0.3, 0.5], 1).reward_beside(&base) - 0.6).abs() < 1e-12, "the easiest prompt is missing");
    }

    #[test]
    fn shown_prompts_lie_evenly() {
        let shown = |prompts, videos| (0..prompts).filter(|&p| is_shown(p, prompts, videos)).collect::<Vec<_>>();
        assert_eq!(shown(18, 4), [0, 4, 9, 13]);
        assert_eq!(shown(2, 2), [0, 1]);
        assert!(shown(3, 0).is_empty());
        assert_eq!(shown(2, 5), [0, 1]);
    }

    #[test]
    fn the_interval_of_a_mean_is_that_of_a_normal() {
        let values: Vec<f64> =
            Key { seed: 3, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data }.normals(400).into_iter().map(f64::from).collect();
        let (centre, half) = (mean(values.iter().copied()), 1.96 * crate::stats::std_of(&values) / 20.0);
        let [low, high] = bootstrap(&values, 10_000, 1);
        assert!((low - (centre - half)).abs() < 0.01 && (high - (centre + half)).abs() < 0.01, "{low} {high}");
        assert_eq!(bootstrap(&values, 1000, 1), bootstrap(&values, 1000, 1));
    }

    /// Of 2,000 samples of normals with mean 0, the share whose interval contains it.
    #[test]
    fn intervals_of_few_prompts_contain_the_mean_as_often_as_they_say() {
        let covered = |n: usize, interval: fn(&[f64]) -> [f64; 2]| {
            let sample = |prompt| Key { seed: 1, iteration: 0, prompt, rollout: n as u64, purpose: Purpose::Data }.normals(n);
            let contains = |prompt: &u64| {
                let values: Vec<f64> = sample(*prompt).into_iter().map(f64::from).collect();
                let [low, high] = interval(&values);
                low <= 0.0 && 0.0 <= high
            };
            (0..2000).filter(contains).count() as f64 / 2000.0
        };
        let ours = |values: &[f64]| interval_of_mean(values, 400, 1).expect("more than one");
        let resampled = |values: &[f64]| bootstrap(values, 400, 1);
        for n in [2, 5, 18, 29] {
            assert!((covered(n, ours) - 0.95).abs() < 0.015, "{n}: {}", covered(n, ours));
        }
        assert!(covered(5, resampled) < 0.88);
        assert!((covered(40, ours) - 0.94).abs() < 0.015);
        assert_eq!(interval_of_mean(&[0.3], 400, 1), None);
    }
}
