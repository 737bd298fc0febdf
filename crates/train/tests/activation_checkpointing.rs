//! Computing activations again instead of keeping them changes no bit of a gradient.

mod common;

use burn::tensor::{DType, Device, Tensor, TensorData};
use grpo::{Key, LossWeights, PolicyLoss, Purpose, RatioKind, Recipe, Schedule, SigmaGrid, StochasticSteps};
use train::policy::Policy;
use train::replay::{Conditioning, TransitionBatch};
use train::rollout::{Start, rollout};
use train::sharing::Shares;
use train::update::{Objective, accumulate};
use wan::lora::{Lora, LoraConfig, LoraInit};
use wan::text::PromptEmbeds;
use wan::transformer::{TransformerConfig, WanTransformer};
use wan::weights::{Weights, to_floats};

/// More than two, so that the order in which the blocks' contributions are added matters.
const LAYERS: usize = 5;
const STEPS: usize = 6;

fn normals(seed: u64, count: usize) -> Vec<f32> {
    Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data }.normals(count)
}

fn tensor<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(normals(seed, shape.iter().product()), shape), &Device::flex())
}

/// Layers to adapt; all weights are trained where there is none.
fn policy(target_modules: &[&str]) -> Policy {
    let config = serde_json::json!({
        "patch_size": [1, 2, 2], "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
        "text_dim": 8, "freq_dim": 16, "ffn_dim": 40, "num_layers": LAYERS, "cross_attn_norm": true,
        "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 64,
    });
    let config: TransformerConfig = serde_json::from_value(config).expect("config");
    let transformer = WanTransformer::new(config, Weights::random(1, &Device::flex()), DType::F32).expect("transformer");
    let target_modules: Vec<String> = target_modules.iter().map(|&name| name.to_owned()).collect();
    let lora = (!target_modules.is_empty()).then(|| {
        let config = LoraConfig { rank: 4, alpha: 8.0, target_modules, init: LoraInit::Gaussian };
        Lora::attach(&transformer.linears, &config, 0, &Device::flex()).expect("attach")
    });
    Policy::from_parts(transformer, lora)
}

fn objective(ratio: RatioKind, kl_beta: f64) -> Objective {
    let schedule = Schedule::new(SigmaGrid::Unipc, STEPS, 3.0).expect("schedule");
    let recipe = Recipe { stochastic: StochasticSteps::Random { count: 1, pool: 4 }, ..Recipe::flash_grpo() };
    let weights = LossWeights::new(&recipe, &schedule).expect("weights");
    let loss = PolicyLoss { ratio, ..PolicyLoss::new(10.0, kl_beta).expect("clip range") };
    Objective { schedule, noise_level: recipe.noise_level, weights, loss }
}

/// Samples of two prompts of different lengths, in an odd number of rollouts.
fn transitions(policy: &Policy, objective: &Objective, samples: usize, guidance_scale: f64) -> TransitionBatch {
    let recipe = Recipe { stochastic: StochasticSteps::Random { count: 1, pool: 4 }, ..Recipe::flash_grpo() };
    let plans: Vec<_> = (0..samples).map(|i| recipe.plan(1, 0, i as u64 % 2, i as u64, STEPS)).collect();
    let short = Tensor::cat(vec![tensor(5, [1, 2, 8]), Tensor::zeros([1, 1, 8], &Device::flex())], 1);
    let embeds = Tensor::cat(vec![tensor(2, [1, 3, 8]), short], 0);
    let prompts = PromptEmbeds { embeds, lengths: vec![3, 2], padded_length: 16 };
    let negative = PromptEmbeds { embeds: tensor(3, [1, 3, 8]), lengths: vec![3], padded_length: 16 };
    let prompt_of = (0..samples).map(|i| i % 2).collect();
    let conditioning = Conditioning { prompts, negative: Some(negative), prompt_of, guidance_scale, guidance_scale_2: None, image: None };
    // 12 tokens of a sample, or 48: with many samples too many for both branches of the guidance in one batch
    let side = if samples > 4 { 8 } else { 4 };
    let step_noise = |sample: usize, step: usize| normals((1000 + 10 * sample + step) as u64, 4 * 3 * side * side);
    let leaders: Vec<usize> = (0..samples).collect();
    let shares = Shares { plans: &plans, leaders: &leaders, suffix: None };
    let start = Start { latents: tensor(4, [samples, 4, 3, side, side]), conditioning, shares, retain: false, step_noise: &step_noise };
    let rollouts = rollout(policy, &objective.schedule, &objective.noise_level, start);
    common::merge(&rollouts.transitions).with_advantages(&normals(7, samples).into_iter().map(f64::from).collect::<Vec<_>>())
}

/// Gradients with and without, over two micro-batches, and how many weights have one.
fn check(target_modules: &[&str], ratio: RatioKind, kl_beta: f64, samples: usize, guidance_scale: f64) -> usize {
    let (mut policy, objective) = (policy(target_modules), objective(ratio, kl_beta));
    let batch = transitions(&policy, &objective, samples, guidance_scale);
    for (i, slot) in policy.params().iter().enumerate() {
        let value = slot.value();
        let step = tensor::<1>(100 + i as u64, [value.dims()[0]]).mul_scalar(0.05);
        slot.set_value(value + step);
    }
    // the last two samples of one owner: one velocity serves both
    let owners = (0..samples - 1).chain([samples - 2]).collect();
    let shared = TransitionBatch { owners, ..batch.clone() };
    let batches = [batch.range(0, samples - 1), batch.range(samples - 1, samples), batch, shared];
    let mut run = |activation_checkpointing| {
        policy.activation_checkpointing = activation_checkpointing;
        let (gradients, metrics) = accumulate(&policy, &objective, &batches);
        let names: Vec<String> = policy.params().iter().map(|slot| slot.name.clone()).collect();
        let values: Vec<Option<Vec<f32>>> = gradients.sums.into_iter().map(|sum| sum.map(to_floats)).collect();
        (names, values, metrics.log_prob, metrics.loss)
    };
    let (plain, recomputed) = (run(false), run(true));
    for (name, (plain, recomputed)) in plain.0.iter().zip(plain.1.iter().zip(&recomputed.1)) {
        let norm = plain.iter().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        assert!(plain == recomputed, "{target_modules:?}, {ratio:?}, {samples} samples: gradient of `{name}` (norm {norm:e}) differs");
    }
    assert_eq!((plain.2, plain.3), (recomputed.2, recomputed.3));
    plain.1.iter().flatten().filter(|gradient| gradient.iter().any(|g| *g != 0.0)).count()
}

const ATTENTION: [&str; 4] = ["to_q", "to_k", "to_v", "to_out.0"];

#[test]
fn gradients_of_adapters_are_equal() {
    for (ratio, kl_beta) in [(RatioKind::Plain, 0.0), (RatioKind::Normalised, 0.1)] {
        // 4 samples: both branches as one batch; 12: one after the other
        for (samples, guidance_scale) in [(3, 1.0), (4, 4.5), (12, 4.5)] {
            let present = check(&ATTENTION, ratio, kl_beta, samples, guidance_scale);
            assert_eq!(present, LAYERS * 8 * 2, "every A and B has a gradient");
        }
    }
}

#[test]
fn gradients_of_all_weights_are_equal() {
    for (samples, guidance_scale) in [(3, 1.0), (4, 4.5), (12, 4.5)] {
        check(&[], RatioKind::Plain, 0.0, samples, guidance_scale);
    }
}

/// Adapters in few places: what leads to no trained weight is not gone through.
#[test]
fn gradients_of_scattered_adapters_are_equal() {
    for target_modules in [
        &["blocks.2.ffn.net.0.proj"][..],
        &["condition_embedder.text_embedder.linear_1", "blocks.4.attn1.to_q"],
        &["condition_embedder.time_proj", "proj_out"],
        &["patch_embedding", "condition_embedder.time_embedder.linear_1"],
        &["attn2.to_k"],
    ] {
        for (samples, guidance_scale) in [(4, 4.5), (12, 4.5)] {
            check(target_modules, RatioKind::Plain, 0.0, samples, guidance_scale);
        }
    }
}
