//! The gradient that reaches the weights is that of the loss that is reported, for every form of the loss.

mod common;

use burn::tensor::{DType, Device, Tensor, TensorData};
use grpo::{
    InitialNoise, Key, LossWeight, LossWeights, NoiseLevel, PolicyLoss, Purpose, RatioKind, Recipe, Schedule, SigmaGrid, StochasticSteps,
};
use train::collective::Alone;
use train::optimizer::GradientSum;
use train::optimizer::{AdamW, AdamWConfig};
use train::policy::Policy;
use train::replay::{Conditioning, TransitionBatch, pick};
use train::rollout::{Rollouts, Start, rollout};
use train::sharing::Shares;
use train::stop::Stop;
use train::update::{Objective, accumulate, update};
use wan::lora::{Lora, LoraConfig, LoraInit};
use wan::text::PromptEmbeds;
use wan::transformer::{TransformerConfig, WanTransformer};
use wan::weights::{Weights, to_floats};

const SAMPLES: usize = 4;

fn normals(seed: u64, count: usize) -> Vec<f32> {
    Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data }.normals(count)
}

fn tensor<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(normals(seed, shape.iter().product()), shape), &Device::flex())
}

fn policy() -> Policy {
    let config = serde_json::json!({
        "patch_size": [1, 2, 2], "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
        "text_dim": 8, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": true,
        "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 64,
    });
    let config: TransformerConfig = serde_json::from_value(config).expect("config");
    let transformer = WanTransformer::new(config, Weights::random(1, &Device::flex()), DType::F32).expect("transformer");
    let target_modules = ["to_q", "to_k", "to_v", "to_out.0"].map(str::to_owned).to_vec();
    let config = LoraConfig { rank: 4, alpha: 8.0, target_modules, init: LoraInit::Gaussian };
    let lora = Lora::attach(&transformer.linears, &config, 0, &Device::flex()).expect("attach");
    Policy::from_parts(transformer, Some(lora))
}

/// Moves every weight, so that ratios and divergence are not at their stationary points.
fn move_weights(policy: &Policy, by: f64) {
    for (i, slot) in policy.params().iter().enumerate() {
        let value = slot.value();
        let step = tensor::<1>(100 + i as u64, [value.dims()[0]]).mul_scalar(by);
        slot.set_value(value + step);
    }
}

fn objective(ratio: RatioKind, kl_beta: f64) -> Objective {
    let schedule = Schedule::new(SigmaGrid::Unipc, 6, 3.0).expect("schedule");
    let recipe = Recipe {
        stochastic: StochasticSteps::Random { count: 1, pool: 4 },
        loss_weight: LossWeight::Rectified,
        noise_level: NoiseLevel::Linear { eta: 1.0 },
        ..Recipe::flash_grpo()
    };
    let weights = LossWeights::new(&recipe, &schedule).expect("weights");
    let loss = PolicyLoss::new(10.0, kl_beta).expect("a range that nothing leaves, so that the loss is smooth");
    Objective { schedule, noise_level: recipe.noise_level, weights, loss: PolicyLoss { ratio, ..loss } }
}

/// Four rollouts of two prompts, all in one batch.
fn transitions(policy: &Policy, objective: &Objective, guidance_scale: f64) -> TransitionBatch {
    let rollouts = roll_out(policy, objective, guidance_scale, InitialNoise::Independent, None, false);
    common::merge(&rollouts.transitions).with_advantages(&ADVANTAGES)
}

const ADVANTAGES: [f64; SAMPLES] = [1.0, -0.5, 0.75, -1.25];

fn roll_out(
    policy: &Policy,
    objective: &Objective,
    guidance_scale: f64,
    noise: InitialNoise,
    suffix: Option<usize>,
    retain: bool,
) -> Rollouts {
    let recipe = Recipe { stochastic: StochasticSteps::Random { count: 1, pool: 4 }, ..Recipe::flash_grpo() };
    let plans: Vec<_> = (0..SAMPLES).map(|i| recipe.plan(1, 0, i as u64 / 2, i as u64 % 2, 6)).collect();
    // the second prompt is shorter: its last row is padding
    let short = Tensor::cat(vec![tensor(5, [1, 2, 8]), Tensor::zeros([1, 1, 8], &Device::flex())], 1);
    let embeds = Tensor::cat(vec![tensor(2, [1, 3, 8]), short], 0);
    let prompts = PromptEmbeds { embeds, lengths: vec![3, 2], padded_length: 16 };
    let negative = PromptEmbeds { embeds: tensor(3, [1, 3, 8]), lengths: vec![3], padded_length: 16 };
    let conditioning = Conditioning {
        prompts,
        negative: Some(negative),
        prompt_of: vec![0, 0, 1, 1],
        guidance_scale,
        guidance_scale_2: None,
        image: None,
    };
    let step_noise = |sample: usize, step: usize| normals((1000 + 10 * sample + step) as u64, 4 * 3 * 16);
    let latents = tensor(4, [SAMPLES, 4, 3, 4, 4]);
    let (latents, leaders) = match noise {
        InitialNoise::Independent => (latents, [0, 1, 2, 3]),
        InitialNoise::SharedInGroup => (pick(&latents, &[0, 0, 2, 2]), [0, 0, 2, 2]),
    };
    let shares = Shares { plans: &plans, leaders: &leaders, suffix };
    let start = Start { latents, conditioning, shares, retain, step_noise: &step_noise };
    let rollouts = rollout(policy, &objective.schedule, &objective.noise_level, start);
    let work = shares.work(objective.schedule.num_steps(), retain);
    assert_eq!(rollouts.velocities, work.sampled, "what was computed is what was planned");
    rollouts
}

/// Slope of the loss along the gradient by central differences, against the gradient's norm.
fn check(ratio: RatioKind, kl_beta: f64, guidance_scale: f64) {
    let (policy, objective) = (policy(), objective(ratio, kl_beta));
    let batch = transitions(&policy, &objective, guidance_scale);
    move_weights(&policy, 0.05);
    let (gradients, metrics) = accumulate(&policy, &objective, std::slice::from_ref(&batch));
    assert!(metrics.ratio_deviation() > 1e-4, "ratios moved: {:?}", metrics.ratio);
    assert_eq!(kl_beta > 0.0, metrics.kl > 0.0);
    let norm = gradients.norm();
    let start = policy.params().snapshot();
    let loss_at = |t: f64| {
        let moved = move_along(&start, &gradients, t / norm);
        policy.with_weights(&moved, || accumulate(&policy, &objective, std::slice::from_ref(&batch)).1.loss)
    };
    let central = |h: f64| (loss_at(h) - loss_at(-h)) / (2.0 * h);
    let h = 0.02;
    let slope = (4.0 * central(h) - central(2.0 * h)) / 3.0;
    assert!((slope / norm - 1.0).abs() < 0.01, "{ratio:?}, KL {kl_beta}, guidance {guidance_scale}: {slope:e} against {norm:e}");
}

fn move_along(start: &[Tensor<1>], gradients: &GradientSum, by: f64) -> Vec<Tensor<1>> {
    let moved = |(value, gradient): (&Tensor<1>, &Option<Tensor<1>>)| {
        gradient.as_ref().map_or_else(|| value.clone(), |gradient| value.clone() + gradient.clone().mul_scalar(by))
    };
    start.iter().zip(&gradients.sums).map(moved).collect()
}

#[test]
fn gradient_is_that_of_the_plain_loss() {
    check(RatioKind::Plain, 0.0, 1.0);
}

#[test]
fn gradient_is_that_of_the_guided_loss() {
    check(RatioKind::Plain, 0.0, 3.0);
}

#[test]
fn gradient_is_that_of_the_loss_with_divergence() {
    check(RatioKind::Plain, 2.0, 1.0);
    check(RatioKind::Plain, 2.0, 3.0);
}

#[test]
fn gradient_is_that_of_the_loss_with_normalised_ratios() {
    check(RatioKind::Normalised, 0.0, 1.0);
}

/// Gradients bit by bit.
fn bits(gradients: &GradientSum) -> Vec<Vec<u32>> {
    let bits = |sum: &Option<Tensor<1>>| to_floats(sum.clone().expect("gradient")).into_iter().map(f32::to_bits).collect();
    gradients.sums.iter().map(bits).collect()
}

/// The graph that the rollout kept gives, bit for bit, the gradients of a replay, and the rollouts are those without it.
#[test]
fn a_retained_step_is_a_replayed_one() {
    let (policy, objective) = (policy(), objective(RatioKind::Plain, 0.5));
    move_weights(&policy, 0.05);
    for noise in [InitialNoise::Independent, InitialNoise::SharedInGroup] {
        for guidance_scale in [1.0, 3.0] {
            let sampled = |retain| roll_out(&policy, &objective, guidance_scale, noise, None, retain);
            let (plain, kept) = (sampled(false), sampled(true));
            assert_eq!(to_floats(plain.latents.clone()), to_floats(kept.latents.clone()), "the same videos");
            let gradients = |rollouts: &Rollouts| {
                let batches: Vec<_> = rollouts.transitions.iter().map(|batch| batch.with_advantages(&ADVANTAGES)).collect();
                assert!(batches.iter().all(|batch| batch.retained.is_some()) || !batches.iter().any(|batch| batch.retained.is_some()));
                accumulate(&policy, &objective, &batches)
            };
            let ((expected, metrics), (found, kept_metrics)) = (gradients(&plain), gradients(&kept));
            assert!(kept.transitions[0].retained.is_some() && expected.norm() > 1e-4);
            assert_eq!(bits(&expected), bits(&found), "{noise:?}, guidance {guidance_scale}");
            assert_eq!((metrics.loss, metrics.kl, metrics.ratio), (kept_metrics.loss, kept_metrics.kl, kept_metrics.ratio));
        }
    }
}

/// Samples that share their latents give the videos they give alone, bit for bit, and the gradient up to the order of its sums.
#[test]
fn a_shared_prefix_changes_nothing() {
    let (policy, objective) = (policy(), objective(RatioKind::Plain, 0.0));
    move_weights(&policy, 0.05);
    let shared = roll_out(&policy, &objective, 3.0, InitialNoise::SharedInGroup, None, false);
    let batches: Vec<_> = shared.transitions.iter().map(|batch| batch.with_advantages(&ADVANTAGES)).collect();
    let alone: Vec<_> = batches.iter().map(|batch| TransitionBatch { owners: batch.samples.clone(), ..batch.clone() }).collect();
    assert!(batches.iter().any(|batch| batch.owners != batch.samples), "something is shared");
    let ((together, shared), (apart, separate)) = (accumulate(&policy, &objective, &batches), accumulate(&policy, &objective, &alone));
    assert_eq!((shared.log_prob, shared.loss), (separate.log_prob, separate.loss));
    for (a, b) in together.sums.iter().zip(&apart.sums) {
        let (a, b) = (a.clone().expect("gradient"), b.clone().expect("gradient"));
        let worst = f64::from(to_floats((a - b).abs().max())[0]);
        assert!(worst < 1e-5 * together.norm(), "{worst:e} of {:e}", together.norm());
    }
}

/// A suffix in as many steps as are left is UniPC's; in fewer it is cheaper, ends near by, and trains the same transitions.
#[test]
fn a_compressed_suffix_ends_near_the_full_one() {
    let (policy, objective) = (policy(), objective(RatioKind::Plain, 0.0));
    let ends = [None, Some(6), Some(2)].map(|suffix| roll_out(&policy, &objective, 1.0, InitialNoise::Independent, suffix, false));
    let [full, fine, coarse] = &ends;
    assert!(full.velocities == fine.velocities && coarse.velocities < fine.velocities);
    let distance = |a: &Rollouts, b: &Rollouts| to_floats((a.latents.clone() - b.latents.clone()).powi_scalar(2).mean().sqrt())[0];
    let (fine, coarse) = (distance(full, fine), distance(full, coarse));
    assert!(fine > 0.0 && fine < 0.2 && coarse < 0.4, "{fine}, {coarse}");
    for (a, b) in ends[0].transitions.iter().zip(&ends[2].transitions) {
        assert_eq!((&a.old_log_probs, to_floats(a.next_latents.clone())), (&b.old_log_probs, to_floats(b.next_latents.clone())));
    }
}

#[test]
fn one_batch_of_all_equals_many_of_one() {
    let (policy, objective) = (policy(), objective(RatioKind::Plain, 0.0));
    let batch = transitions(&policy, &objective, 3.0);
    let singles: Vec<_> = (0..SAMPLES).map(|i| batch.range(i, i + 1)).collect();
    let (whole, _) = accumulate(&policy, &objective, std::slice::from_ref(&batch));
    let (parts, _) = accumulate(&policy, &objective, &singles);
    let norm = whole.norm();
    assert!(norm > 1e-4, "{norm}");
    for (a, b) in whole.sums.iter().zip(&parts.sums) {
        let (a, b) = (a.as_ref().expect("gradient"), b.as_ref().expect("gradient"));
        let worst = to_floats((a.clone() - b.clone()).abs().max())[0];
        assert!(f64::from(worst) < 1e-5 * norm, "{worst:e} of {norm:e}");
    }
}

/// The step of largest weight and the others give gradients of one scale: `|dlog_prob/dv| = lambda`, weighted by 1/lambda.
#[test]
fn sensitivity_is_the_gradient_of_the_log_probability() {
    let (policy, objective) = (policy(), objective(RatioKind::Plain, 0.0));
    let batch = transitions(&policy, &objective, 1.0);
    for (i, t) in objective.transitions(&batch.steps).iter().enumerate() {
        let one = batch.range(i, i + 1);
        let velocity = one.old_velocity.clone().expect("recorded").autodiff().require_grad();
        let replayed = train::replay::evaluate(&one.latents, velocity.clone(), &one.next_latents, &[*t]);
        let log_prob = replayed.mean_square_residual.mul_scalar(t.log_prob_slope());
        let gradient = velocity.grad(&log_prob.sum().backward()).expect("gradient");
        let elements = gradient.dims().iter().product::<usize>() as f64;
        let length = f64::from(to_floats(gradient.powi_scalar(2).sum())[0]).sqrt();
        // d log_prob/dv = lambda z / D for the unit noise z of the step
        let mut residual =
            one.next_latents.clone() - train::replay::transition_mean(&one.latents, &one.old_velocity.clone().expect("v"), &[*t]);
        residual = residual.div_scalar(t.std);
        let noise = f64::from(to_floats(residual.powi_scalar(2).sum())[0]).sqrt();
        let expected = t.sensitivity() * noise / elements;
        assert!((length / expected - 1.0).abs() < 1e-4, "sample {i}: {length:e} against {expected:e}");
    }
}

/// One sample whose latents are not finite: the others give the gradient that they give alone.
#[test]
fn a_sample_without_log_probability_is_left_out() {
    let (policy, objective) = (policy(), objective(RatioKind::Plain, 0.0));
    let batch = transitions(&policy, &objective, 3.0);
    let mut poisoned = batch.clone();
    let bad = tensor::<5>(9, [1, 4, 3, 4, 4]).mul_scalar(f64::INFINITY);
    poisoned.next_latents =
        Tensor::cat(vec![batch.next_latents.clone().narrow(0, 0, 2), bad, batch.next_latents.clone().narrow(0, 3, 1)], 0);
    let (found, metrics) = accumulate(&policy, &objective, &[poisoned]);
    assert_eq!(metrics.skipped, vec![(2, batch.steps[2])]);
    assert_eq!(metrics.ratio, vec![1.0; SAMPLES - 1]);
    // the sample stays in the denominator
    let (mut expected, _) = accumulate(&policy, &objective, &[batch.select(&[0, 1, 3])]);
    expected.sums.iter_mut().flatten().for_each(|sum| *sum = sum.clone().mul_scalar(0.75));
    for (a, b) in found.sums.iter().zip(&expected.sums) {
        let (a, b) = (a.as_ref().expect("gradient"), b.as_ref().expect("gradient"));
        let worst = f64::from(to_floats((a.clone() - b.clone()).abs().max())[0]);
        assert!(worst < 1e-6 * expected.norm(), "{worst:e}");
    }
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let (policy, objective) = (policy(), objective(RatioKind::Plain, 0.0));
    let batch = transitions(&policy, &objective, 1.0);
    let mut optimizer = AdamW::new(AdamWConfig::default(), policy.params());
    let before: Vec<_> = policy.params().snapshot().into_iter().map(to_floats).collect();
    let infinite = batch.with_advantages(&[f64::INFINITY, 1.0, -1.0, 0.5]);
    let metrics = update(&policy, &mut optimizer, None, &objective, &[infinite], &Alone, &Stop::default()).expect("nobody stops it");
    assert!(metrics.is_skipped && optimizer.updates == 0);
    let after: Vec<_> = policy.params().snapshot().into_iter().map(to_floats).collect();
    assert_eq!(before, after);
    assert!(!update(&policy, &mut optimizer, None, &objective, &[batch], &Alone, &Stop::default()).expect("nobody stops it").is_skipped);
    assert_eq!(optimizer.updates, 1);
}
