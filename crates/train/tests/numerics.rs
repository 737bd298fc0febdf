//! Rewards that are not numbers: the sample is left out and counted, and too many of them end the run with its state kept.

use burn::tensor::Device;
use reward::{Reward, RewardBreakdown, RewardError, Sample, ShapesReward, Weighted};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use train::Error;
use train::events::Event;
use train::iteration::iteration;
use train::settings::Settings;
use train::trainer::Trainer;
use wan::weights::to_floats;

/// The shapes verifier, with NaN for every n-th sample.
struct Flawed {
    every: usize,
    scored: AtomicUsize,
}

impl Reward for Flawed {
    fn name(&self) -> &str {
        "flawed"
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Result<RewardBreakdown, RewardError>> {
        let flaw = |result: Result<RewardBreakdown, RewardError>| {
            let count = self.scored.fetch_add(1, Ordering::Relaxed) + 1;
            result.map(|score| if count.is_multiple_of(self.every) { RewardBreakdown { value: f64::NAN, ..score } } else { score })
        };
        ShapesReward.score(batch).into_iter().map(flaw).collect()
    }
}

/// A trainer of the embedded model on 4 groups of 4, with NaN for every n-th sample.
fn trainer(every: usize) -> Trainer {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/moving-shapes");
    let overrides = [
        format!("model.path={:?}", model.display().to_string()),
        "rollout.prompts_per_iteration=4".into(),
        "rollout.group_size=4".into(),
        "sampling.num_inference_steps=4".into(),
        "method.stochastic={ type = \"random\", count = 1, pool = 2 }".into(),
    ];
    let settings = Settings::load(None, &overrides).expect("settings");
    let mut trainer = Trainer::new(settings, &Device::flex()).expect("trainer");
    trainer.reward = Weighted::new(vec![(1.0, Box::new(Flawed { every, scored: AtomicUsize::new(0) }))]);
    trainer
}

fn weights(trainer: &Trainer) -> Vec<f32> {
    trainer.policy.params().snapshot().into_iter().flat_map(to_floats).collect()
}

#[test]
fn a_few_are_left_out() {
    let mut trainer = trainer(13);
    let mut warnings = Vec::new();
    let mut watch = |event: Event<'_>| {
        if let Event::Warning(text) = event {
            warnings.push(text.to_owned());
        }
    };
    let skipped: Vec<usize> = (0..3).map(|index| iteration(&mut trainer, index, &mut watch).expect("survives").skipped_samples).collect();
    assert_eq!(skipped, [1, 1, 1], "samples 13, 26 and 39 of 48");
    assert_eq!(warnings.len(), 3);
    assert!(warnings[0].starts_with("iteration 0: the reward of sample 12 (`a "), "{}", warnings[0]);
    assert_eq!(trainer.optimizer.updates, 6);
    assert!(weights(&trainer).iter().all(|w| w.is_finite()));
}

#[test]
fn too_many_end_the_run() {
    let mut trainer = trainer(2);
    let before = weights(&trainer);
    match iteration(&mut trainer, 0, &mut |_| {}) {
        Err(error @ Error::NotFinite { skipped: 8, all: 16, .. }) => {
            assert!(error.to_string().starts_with("8 of 16 samples of iteration 0 are not finite"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(weights(&trainer), before);
    assert_eq!(trainer.optimizer.updates, 0);
}

/// What the rollouts of a prompt have in common, computed once or for each of them: the same videos, bit for bit, and the same gradient
/// up to the order of its sums.
#[test]
fn a_shared_prefix_changes_nothing() {
    let run = |shared: bool, retain: bool| {
        let mut trainer = trainer(usize::MAX);
        trainer.settings.rollout.shared_prefix = shared;
        trainer.settings.rollout.retain_step = retain;
        let metrics = iteration(&mut trainer, 0, &mut |_| {}).expect("iteration");
        (metrics, weights(&trainer))
    };
    let ((all, _), (fewer, weights)) = (run(false, false), run(true, false));
    assert_eq!((fewer.ratio_deviation, fewer.noise_power), (0.0, all.noise_power));
    assert_eq!((all.reward_mean, all.reward_std), (fewer.reward_mean, fewer.reward_std));
    assert!((all.grad_norm / fewer.grad_norm - 1.0).abs() < 1e-4, "{} and {}", all.grad_norm, fewer.grad_norm);
    // 16 samples of 4 steps, 3 for the replay of one; 12 of them follow their group's first for 1 or 2 steps and in the update
    assert_eq!(all.forwards, 16 * (4 + 3));
    assert!((16 * 7 - 36 - 24..=16 * 7 - 36 - 12).contains(&fewer.forwards), "{}", fewer.forwards);
    // the first of two updates needs no forward for its two prompts
    let (retained, same) = run(true, true);
    assert_eq!((retained.forwards, same), (fewer.forwards - 2, weights));
}

/// A prompt whose embedding is not finite: its rollouts have no log-probability, the others train on.
#[test]
fn rollouts_without_log_probability_are_left_out() {
    let mut trainer = trainer(usize::MAX);
    trainer.settings.train.max_skipped = 0.5;
    let clean = trainer.train_prompts.embeds.embeds.clone();
    let poisoned = train::prompts::of_iteration(trainer.settings.seed, 0, 4, trainer.train_prompts.len())[1];
    let [prompts, length, features] = clean.dims();
    let bad = clean.clone().narrow(0, poisoned, 1).mul_scalar(f64::INFINITY);
    let parts = [clean.clone().narrow(0, 0, poisoned), bad, clean.clone().narrow(0, poisoned + 1, prompts - poisoned - 1)];
    let parts = parts.into_iter().filter(|part| part.dims()[0] > 0).collect();
    trainer.train_prompts.embeds.embeds = burn::tensor::Tensor::cat(parts, 0).reshape([prompts, length, features]);
    let before = weights(&trainer);
    let metrics = iteration(&mut trainer, 0, &mut |_| {}).expect("survives");
    assert_eq!((metrics.skipped_samples, metrics.skipped_updates), (4, 0));
    let after = weights(&trainer);
    assert!(after != before && after.iter().all(|w| w.is_finite()));
}

/// A loss whose gradient is not finite: the updates are left out, and what is trained stays as it was.
#[test]
fn updates_without_gradient_are_left_out() {
    let mut trainer = trainer(usize::MAX);
    trainer.settings.train.max_skipped = 1.0;
    let kl_beta = std::mem::replace(&mut trainer.objective.loss.kl_beta, f64::INFINITY);
    let before = weights(&trainer);
    let metrics = iteration(&mut trainer, 0, &mut |_| {}).expect("survives");
    assert_eq!((metrics.skipped_samples, metrics.skipped_updates), (0, 2));
    assert_eq!((weights(&trainer), trainer.optimizer.updates), (before.clone(), 0));
    trainer.objective.loss.kl_beta = kl_beta;
    let metrics = iteration(&mut trainer, 1, &mut |_| {}).expect("goes on");
    assert_eq!(metrics.skipped_updates, 0);
    assert!(weights(&trainer) != before);
}
