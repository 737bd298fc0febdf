//! Rewards that are not numbers: the sample is left out and counted, and too many of them end the run with its state kept.

use burn::tensor::Device;
use reward::{Reward, RewardBreakdown, RewardError, Sample, ShapesReward, Weighted};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use train::Error;
use train::checks::self_check;
use train::evaluate::{compare, evaluate};
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

/// An evaluation goes on without what cannot be scored, and compares what both sides have.
#[test]
fn evaluations_leave_them_out_too() {
    let evaluated = |every: usize| {
        let mut trainer = trainer(every);
        trainer.settings.eval.num_inference_steps = 2;
        trainer.settings.train.max_skipped = 0.25;
        evaluate(&trainer, "evaluation", &mut |_| {})
    };
    let (whole, holed) = (evaluated(usize::MAX).expect("whole"), evaluated(5).expect("with holes"));
    let all = whole.samples.len();
    assert_eq!((whole.num_missing, holed.num_missing, holed.samples.len()), (0, all / 5, all - all / 5));
    let comparison = compare(&whole, &holed, 100, 0);
    assert_eq!((comparison.num_samples, comparison.num_missing), (holed.samples.len(), all / 5));
    assert_eq!(comparison.eval_reward_difference, 0.0, "the same weights on the same noise");
    match evaluated(2) {
        Err(error @ Error::NotFinite { .. }) => assert!(error.to_string().contains("samples of the evaluation are not finite"), "{error}"),
        other => panic!("{other:?}"),
    }
}

/// The checks at the start take some of them, and say when there is no reward at all.
#[test]
fn checks_tell_a_reward_that_never_scores() {
    let mut warnings = Vec::new();
    let mut watch = |event: Event<'_>| {
        if let Event::Warning(text) = event {
            warnings.push(text.to_owned());
        }
    };
    self_check(&trainer(3), &mut watch).expect("some are scored");
    assert!(warnings.len() == 1 && warnings[0].contains("samples have no reward; the reward of one is NaN"), "{warnings:?}");
    let error = self_check(&trainer(1), &mut |_| {}).expect_err("none is scored").to_string();
    assert!(error.starts_with("self-check `rewards` failed: 8 of 8 samples have no reward"), "{error}");
    let mut strict = trainer(3);
    strict.settings.train.max_skipped = 0.0;
    assert!(self_check(&strict, &mut |_| {}).is_err());
}

/// Means of parts are over the samples that have them.
#[test]
fn parts_of_rewards_are_not_diluted() {
    let mut whole = trainer(usize::MAX);
    whole.reward = Weighted::new(vec![(1.0, Box::new(Constant))]);
    let error = iteration(&mut whole, 0, &mut |_| {}).expect_err("no spread").to_string();
    assert!(error.contains("all 4 rollouts of every prompt have the same reward"), "{error}");
    let metrics = iteration(&mut whole, 1, &mut |_| {}).expect("only the first is checked");
    assert_eq!(metrics.skipped_samples, 1);
    assert_eq!((metrics.reward_mean, metrics.reward_components["constant"]), (10.0, 10.0));
}

/// 10 for all but one sample of an iteration.
struct Constant;

impl Reward for Constant {
    fn name(&self) -> &str {
        "constant"
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Result<RewardBreakdown, RewardError>> {
        static SCORED: AtomicUsize = AtomicUsize::new(0);
        let score = |sample: &Sample<'_>| match SCORED.fetch_add(1, Ordering::Relaxed) % 16 {
            0 => Err(RewardError::new("constant", sample.prompt, "no score")),
            _ => Ok(RewardBreakdown::from(10.0)),
        };
        batch.iter().map(score).collect()
    }
}

#[test]
fn too_many_end_the_run() {
    let mut trainer = trainer(2);
    let before = weights(&trainer);
    match iteration(&mut trainer, 0, &mut |_| {}) {
        // sampling ends as soon as they are too many; by then some more may have been made
        Err(error @ Error::NotFinite { skipped, all: 16, .. }) => {
            assert!((2..=8).contains(&skipped), "{skipped}");
            assert!(error.to_string().starts_with(&format!("{skipped} of 16 samples of iteration 0 are not finite")), "{error}");
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
    let poisoned = train::prompts::of_iteration(trainer.settings.seed, 0, 4, trainer.train_prompts.len())[1];
    let row = &mut trainer.train_prompts.rows[poisoned];
    *row = row.clone().mul_scalar(f64::INFINITY);
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
