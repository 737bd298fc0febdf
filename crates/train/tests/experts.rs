//! Two networks that share the schedule: rollout, replay and update, with an adapter on each.

mod common;

use burn::tensor::{DType, Device, Tensor, TensorData};
use grpo::{Key, LossWeights, PolicyLoss, Purpose, Recipe, Schedule, SigmaGrid, StepPlan, StochasticSteps, Transition};
use train::collective::Alone;
use train::optimizer::{AdamW, AdamWConfig};
use train::policy::Policy;
use train::replay::{Conditioning, TransitionBatch, transition_mean};
use train::rollout::{Rollouts, Start, rollout};
use train::settings::{LoraInit, PolicySettings};
use train::sharing::Shares;
use train::stop::Stop;
use train::update::{Objective, accumulate, update};
use wan::experts::{Boundary, SecondExpert};
use wan::guidance::{GuidanceBatching, GuidedText, GuidedVelocity};
use wan::text::PromptEmbeds;
use wan::transformer::{TransformerConfig, WanTransformer};
use wan::weights::{Weights, to_floats};

const SAMPLES: usize = 4;
const STEPS: usize = 6;
const SCALES: [f64; 2] = [4.5, 3.0];
/// Timesteps of the schedule are 999, 937, 856, 749, 599, 374: the first two steps are the first network's.
const BOUNDARY: f64 = 0.875;
const SHAPE: [usize; 4] = [4, 3, 4, 4];

fn normals(seed: u64, count: usize) -> Vec<f32> {
    Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data }.normals(count)
}

fn tensor<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(normals(seed, shape.iter().product()), shape), &Device::flex())
}

fn transformer(seed: u64) -> WanTransformer {
    let config = serde_json::json!({
        "patch_size": [1, 2, 2], "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
        "text_dim": 8, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": true,
        "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 64,
    });
    let config: TransformerConfig = serde_json::from_value(config).expect("config");
    WanTransformer::new(config, Weights::random(seed, &Device::flex()), DType::F32).expect("transformer")
}

fn lora() -> PolicySettings {
    let target_modules = ["to_q", "to_k", "to_v", "to_out.0"].map(str::to_owned).to_vec();
    PolicySettings::Lora { rank: 4, alpha: 8.0, target_modules, init: LoraInit::Gaussian }
}

/// Adapters off zero, so that every weight has a gradient.
fn policy(settings: &PolicySettings) -> Policy {
    let second = SecondExpert { transformer: transformer(2), boundary: Boundary::new(BOUNDARY).expect("ratio") };
    let policy = Policy::of_experts(transformer(1), Some(second), settings, 7, &Device::flex()).expect("policy");
    for (i, slot) in policy.params().iter().enumerate() {
        let value = slot.value();
        let step = tensor::<1>(100 + i as u64, [value.dims()[0]]).mul_scalar(0.05);
        slot.set_value(value + step);
    }
    policy
}

fn objective() -> Objective {
    let schedule = Schedule::new(SigmaGrid::Unipc, STEPS, 3.0).expect("schedule");
    let recipe = Recipe { stochastic: StochasticSteps::Random { count: 1, pool: 4 }, ..Recipe::flash_grpo() };
    let weights = LossWeights::new(&recipe, &schedule).expect("weights");
    Objective { schedule, noise_level: recipe.noise_level, weights, loss: PolicyLoss::new(10.0, 0.0).expect("clip range") }
}

fn embeds() -> [PromptEmbeds; 2] {
    [2, 3].map(|seed| PromptEmbeds { embeds: tensor(seed, [1, 3, 8]), lengths: vec![3], padded_length: 16 })
}

fn step_noise(sample: usize, step: usize) -> Vec<f32> {
    normals((1000 + 10 * sample + step) as u64, SHAPE.iter().product())
}

fn start_latents() -> Tensor<5> {
    let [c, f, h, w] = SHAPE;
    tensor(4, [SAMPLES, c, f, h, w])
}

fn roll_out(policy: &Policy, objective: &Objective, steps: [usize; SAMPLES], retain: bool) -> Rollouts {
    let plans = steps.map(|step| StepPlan { stochastic: vec![step], trained: vec![step] });
    let [prompts, negative] = embeds();
    let conditioning = Conditioning {
        prompts,
        negative: Some(negative),
        prompt_of: vec![0; SAMPLES],
        guidance_scale: SCALES[0],
        guidance_scale_2: Some(SCALES[1]),
        image: None,
    };
    let shares = Shares { plans: &plans, leaders: &[0, 1, 2, 3], suffix: None };
    let start = Start { latents: start_latents(), conditioning, shares, retain, step_noise: &step_noise };
    rollout(policy, &objective.schedule, &objective.noise_level, start)
}

/// All transitions in one batch, with advantages.
fn batch(rollouts: &Rollouts) -> TransitionBatch {
    common::merge(&rollouts.transitions).with_advantages(&[1.0, -0.5, 0.75, -1.25])
}

/// Steps on both sides of the boundary.
const BOTH: [usize; SAMPLES] = [0, 2, 1, 3];

#[test]
fn a_rollout_is_a_loop_of_single_networks() {
    let (policy, objective) = (policy(&lora()), objective());
    let timesteps: Vec<f64> = (0..STEPS).map(|step| objective.schedule.timestep(step)).collect();
    let networks: Vec<usize> = timesteps.iter().map(|&timestep| policy.network(timestep)).collect();
    assert_eq!(networks, [0, 0, 1, 1, 1, 1], "{timesteps:?}");
    let found = roll_out(&policy, &objective, BOTH, false);
    let [prompt, negative] = embeds();
    for (sample, random) in BOTH.into_iter().enumerate() {
        let mut x = start_latents().narrow(0, sample, 1);
        for (step, &timestep) in timesteps.iter().enumerate() {
            let network = policy.experts().networks().nth(networks[step]).expect("network");
            let text = GuidedText::new(network, &prompt, Some(&negative), false);
            let velocity = GuidedVelocity::new(network, &text, &[0], SCALES[networks[step]], GuidanceBatching::Together);
            let v = velocity.velocity(x.clone(), &[timestep]);
            let law = if step == random {
                Transition::stochastic(&objective.schedule, &objective.noise_level, step)
            } else {
                Transition::ode(&objective.schedule, step)
            };
            x = transition_mean(&x, &v, &[law]);
            if step == random {
                let noise: Tensor<5> = Tensor::from_data(TensorData::new(step_noise(sample, step), x.dims()), &Device::flex());
                x = x + noise.mul_scalar(law.std as f32);
            }
        }
        assert_eq!(to_floats(found.latents.clone().narrow(0, sample, 1)), to_floats(x), "sample {sample}");
    }
}

#[test]
fn the_ratio_is_exactly_one_and_both_adapters_learn() {
    let (policy, objective) = (policy(&lora()), objective());
    let rollouts = roll_out(&policy, &objective, BOTH, false);
    let batch = batch(&rollouts);
    let (gradients, metrics) = accumulate(&policy, &objective, std::slice::from_ref(&batch));
    assert_eq!(metrics.ratio, [1.0; SAMPLES]);
    assert!(gradients.sums.iter().flatten().all(|gradient| to_floats(gradient.clone().abs().max())[0] > 0.0));
    assert_eq!(gradients.sums.iter().flatten().count(), policy.params().len());
    // the batch in parts, each of one network
    let parts: Vec<TransitionBatch> = (0..SAMPLES).map(|i| batch.range(i, i + 1)).collect();
    let (of_parts, _) = accumulate(&policy, &objective, &parts);
    for (whole, part) in gradients.sums.iter().zip(&of_parts.sums) {
        let [whole, part] = [whole, part].map(|gradient| to_floats(gradient.clone().expect("gradient")));
        let scale = whole.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        assert!(whole.iter().zip(&part).all(|(a, b)| (a - b).abs() <= 2e-5 * scale));
    }
    let before = policy.params().snapshot();
    let mut optimizer = AdamW::new(AdamWConfig::default(), policy.params());
    update(&policy, &mut optimizer, None, &objective, &[batch], &Alone, &Stop::default()).expect("nobody stops it");
    for ((slot, before), (network, name)) in policy.params().iter().zip(before).zip(policy.names()) {
        assert_ne!(to_floats(slot.value()), to_floats(before), "{name} of network {network}");
    }
}

/// A network that takes no step of an update stays as it is, and its optimizer counts its own updates.
/// Steps 0 and 3 are of one network each.
#[test]
fn activations_of_another_dtype_reach_both_networks() {
    let (policy, objective) = (policy(&lora()), objective());
    for step in [0, 3] {
        let batch = batch(&roll_out(&policy, &objective, [step; SAMPLES], false));
        let replay = || batch.replay(&policy, &objective.schedule, &objective.transitions(&batch.steps), false).log_probs;
        let (exact, rounded) = (replay(), policy.with_activations(DType::BF16, replay));
        assert!(
            exact.iter().zip(&rounded).all(|(exact, rounded)| exact != rounded && (exact - rounded).abs() < 0.1),
            "{exact:?} {rounded:?}"
        );
        assert_eq!(exact, replay(), "as before");
    }
}

#[test]
fn a_network_without_a_step_is_left_alone() {
    let (policy, objective) = (policy(&lora()), objective());
    let names = policy.names();
    let mut optimizer = AdamW::new(AdamWConfig::default(), policy.params());
    for (steps, trained) in [([0, 1, 0, 1], 0), ([2, 3, 3, 2], 1)] {
        let before = policy.params().snapshot();
        let made = update(
            &policy,
            &mut optimizer,
            None,
            &objective,
            &[batch(&roll_out(&policy, &objective, steps, false))],
            &Alone,
            &Stop::default(),
        )
        .expect("nobody stops it");
        assert!(made.grad_norm > 0.0);
        for ((slot, before), (network, name)) in policy.params().iter().zip(before).zip(&names) {
            assert_eq!(to_floats(slot.value()) != to_floats(before), *network == trained, "{name}");
        }
    }
    assert_eq!(optimizer.updates, 2);
    assert!(optimizer.counts.iter().all(|&count| count == 1));
}

#[test]
fn gradients_are_equal_with_and_without_activation_checkpointing() {
    for settings in [lora(), PolicySettings::Full] {
        let (mut policy, objective) = (policy(&settings), objective());
        let batch = batch(&roll_out(&policy, &objective, BOTH, false));
        let mut run = |activation_checkpointing| {
            policy.activation_checkpointing = activation_checkpointing;
            let (gradients, metrics) = accumulate(&policy, &objective, &[batch.clone(), batch.range(1, 3)]);
            (gradients.sums.into_iter().map(|sum| sum.map(to_floats)).collect::<Vec<_>>(), metrics.loss)
        };
        let (plain, recomputed) = (run(false), run(true));
        assert_eq!(plain.1, recomputed.1);
        for ((plain, recomputed), (_, name)) in plain.0.iter().zip(&recomputed.0).zip(policy.names()) {
            assert!(plain == recomputed, "gradient of `{name}` differs");
        }
    }
}

#[test]
fn kept_graphs_give_the_gradients_of_a_replay() {
    let (policy, objective) = (policy(&lora()), objective());
    let sums = |retain| {
        let rollouts = roll_out(&policy, &objective, BOTH, retain);
        let batches: Vec<_> = rollouts.transitions.iter().map(|part| part.with_advantages(&[1.0, -0.5, 0.75, -1.25])).collect();
        let (gradients, _) = accumulate(&policy, &objective, &batches);
        gradients.sums.into_iter().map(|sum| sum.map(to_floats)).collect::<Vec<_>>()
    };
    assert!(sums(true) == sums(false));
}

#[test]
fn adapters_start_differently_and_have_names_of_their_own() {
    let second = SecondExpert { transformer: transformer(2), boundary: Boundary::new(BOUNDARY).expect("ratio") };
    let fresh = Policy::of_experts(transformer(1), Some(second), &lora(), 7, &Device::flex()).expect("policy");
    let single = Policy::new(transformer(1), &lora(), 7, &Device::flex()).expect("policy");
    let half = single.params().len();
    let values = |policy: &Policy| policy.params().snapshot().into_iter().map(to_floats).collect::<Vec<_>>();
    let (fresh_values, single_values) = (values(&fresh), values(&single));
    assert_eq!(fresh_values[..half], single_values, "the first network starts as it would alone");
    assert_ne!(fresh_values[half], fresh_values[0]);
    let names: std::collections::BTreeSet<String> = fresh.names().into_iter().map(|(_, name)| name).collect();
    assert_eq!(names.len(), 2 * half);
    assert!(names.contains("transformer_2.blocks.0.attn1.to_q.lora_A.weight"));
}

#[test]
fn both_are_saved() {
    for (settings, files) in [
        (
            lora(),
            &["adapter_model.safetensors", "transformer_2/adapter_model.safetensors", "transformer_2/pytorch_lora_weights.safetensors"][..],
        ),
        (PolicySettings::Full, &["transformer/config.json", "transformer_2/diffusion_pytorch_model.safetensors"]),
    ] {
        let (policy, dir) = (policy(&settings), tempfile::tempdir().expect("folder"));
        policy.save(dir.path()).expect("saves");
        for file in files {
            assert!(dir.path().join(file).is_file(), "{file}");
        }
        if let PolicySettings::Lora { .. } = settings {
            let experts = policy.experts();
            let trained = policy.params().snapshot();
            let adapters = experts.read_adapters(dir.path(), None).expect("reads");
            let read = experts.attach(adapters, &Device::flex()).expect("attaches");
            let read: Vec<f32> = read.iter().flat_map(|lora| lora.params.snapshot()).flat_map(to_floats).collect();
            let mut trained: Vec<f32> = trained.into_iter().flat_map(to_floats).collect();
            let mut read = read;
            // the file has the layers in alphabetical order
            trained.sort_by(f32::total_cmp);
            read.sort_by(f32::total_cmp);
            assert_eq!(trained, read);
        }
    }
}
