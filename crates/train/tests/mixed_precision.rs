//! Training with frozen weights and activations in bf16: the same promises as in f32, and how far the numbers are from it.

use burn::tensor::{DType, Device, Tensor};
use grpo::{Key, PolicyLoss, Purpose};
use std::path::{Path, PathBuf};
use train::batch::Batch;
use train::checks::self_check;
use train::iteration::{Clock, iteration};
use train::run::{Begin, run};
use train::settings::Settings;
use train::stop::Stop;
use train::trainer::Trainer;
use train::update::accumulate;
use wan::weights::to_floats;

/// Two groups of four on the embedded model, and an evaluation of two videos.
fn settings(changes: &[&str]) -> Settings {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/moving-shapes");
    let tiny = [
        &format!("model.path={:?}", model.display().to_string()),
        "rollout.prompts_per_iteration=2",
        "rollout.group_size=4",
        "rollout.micro_batch=4",
        "sampling.num_inference_steps=4",
        "method.stochastic={ type = \"random\", count = 1, pool = 2 }",
        "eval.num_prompts=2",
        "eval.samples_per_prompt=1",
        "eval.num_inference_steps=2",
        "eval.videos=0",
        "eval.bootstrap=100",
    ];
    let overrides: Vec<String> = tiny.into_iter().chain(changes.iter().copied()).map(str::to_owned).collect();
    Settings::load(None, &overrides).unwrap_or_else(|error| panic!("{error}"))
}

fn trainer(changes: &[&str]) -> Trainer {
    Trainer::new(settings(changes), &Device::flex()).expect("trainer")
}

const BF16: &str = "train.mixed_precision=bf16";

fn weights(trainer: &Trainer) -> Vec<f32> {
    trainer.policy.params().snapshot().into_iter().flat_map(to_floats).collect()
}

#[test]
fn frozen_weights_are_bf16_and_trained_ones_f32() {
    let trainer = trainer(&[BF16]);
    let frozen = &trainer.policy.transformer.params;
    let narrow = frozen.iter().filter(|slot| slot.value().dtype() == DType::BF16).count();
    let wide: Vec<&str> = frozen.iter().filter(|slot| slot.value().dtype() == DType::F32).map(|slot| slot.name.as_str()).collect();
    assert_eq!(narrow + wide.len(), frozen.len());
    let island = |name: &&str| name.contains("scale_shift_table") || name.contains("time_embedder") || name.contains(".norm2.");
    assert!(wide.iter().all(island) && narrow > wide.len(), "{wide:?}");
    assert!(trainer.policy.params().iter().all(|slot| slot.value().dtype() == DType::F32));
    assert!(trainer.vae.params.iter().all(|slot| slot.value().dtype() == DType::F32));
}

/// Rollout and replay agree to the last bit, in batches of four and of one.
#[test]
fn the_ratio_before_the_first_update_is_one() {
    let mut trainer = trainer(&[BF16, "sampling.guidance_scale=3.0"]);
    let checks = self_check(&trainer, &mut |_| {}).expect("checks pass");
    assert_eq!((checks.ratio_deviation, checks.log_prob_noise_floor), (0.0, 0.0));
    let rounding = checks.bf16_log_prob_deviation.expect("measured in bf16");
    assert!(rounding > 0.0 && rounding < 2e-3, "{rounding:e}");
    let before = weights(&trainer);
    for index in 0..3 {
        let metrics = iteration(&mut trainer, index, &mut |_| {}).expect("iteration");
        assert_eq!((metrics.ratio_deviation, metrics.skipped_samples, metrics.skipped_updates), (0.0, 0, 0));
        assert!(metrics.grad_norm > 0.0 && metrics.loss.is_finite());
    }
    assert!(weights(&trainer) != before);
    let plain = self_check(&self::trainer(&[]), &mut |_| {}).expect("checks pass");
    assert_eq!(plain.bf16_log_prob_deviation, None);
}

/// Largest allowed `||g_bf16 - g_f32|| / ||g_f32||` of the gradient of all adapters together; measured 0.036.
const GRADIENT: f64 = 0.05;
/// Largest allowed |change| of a log-prob; measured 2e-4.
const LOG_PROB: f64 = 1e-3;

/// The gradient of one and the same recorded iteration in both.
#[test]
fn gradients_of_adapters_are_near_those_in_f32() {
    let [mut exact, mut rounded] = [&[][..], &[BF16]].map(trainer);
    // B starts at 0, and then A has no gradient
    for (i, slot) in exact.policy.params().iter().enumerate() {
        let key = Key { seed: 100 + i as u64, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data };
        let value = slot.value();
        let step = Tensor::<1>::from_floats(key.normals(value.dims()[0]).as_slice(), &Device::flex()).mul_scalar(0.02);
        slot.set_value(value + step);
    }
    rounded.policy.params().restore(&exact.policy.params().snapshot());
    let batch = Batch::plan(&exact.settings, exact.train_prompts.len(), 0).expect("plan");
    let sampled = batch.sample(&exact, false, &mut |_| {}, &mut Clock::start()).expect("rollouts");
    let advantages: Vec<f64> = (0..batch.prompt_ids.len()).map(|i| if i % 2 == 0 { 1.0 } else { -0.5 }).collect();
    let updates = batch.transitions(&sampled.transitions, &advantages);
    let run = |trainer: &mut Trainer, activation_checkpointing: bool| {
        trainer.policy.activation_checkpointing = activation_checkpointing;
        let mut objective = trainer.objective.clone();
        objective.loss = PolicyLoss::new(10.0, 0.0).expect("a range that nothing leaves");
        let (gradients, metrics) = accumulate(&trainer.policy, &objective, &updates.concat());
        let values: Vec<f32> = gradients.sums.into_iter().flat_map(|sum| to_floats(sum.expect("a gradient"))).collect();
        (values, metrics.log_prob)
    };
    let ((exact, exact_log_probs), (rounded_gradient, log_probs)) = (run(&mut exact, false), run(&mut rounded, false));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut exact.iter().zip(&rounded_gradient).map(|(a, b)| f64::from(a - b)));
    let relative = difference / norm(&mut exact.iter().map(|v| f64::from(*v)));
    assert!(relative > 1e-5 && relative < GRADIENT, "{relative}");
    let worst = exact_log_probs.iter().zip(&log_probs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst < LOG_PROB, "{worst:e}");
    // computing activations again changes no bit of it, as in f32
    assert!(run(&mut rounded, true) == (rounded_gradient, log_probs));
}

/// What a run leaves behind.
fn results(folder: &Path) -> Vec<Vec<u8>> {
    ["adapter/adapter_model.safetensors", "metrics.jsonl"].map(|name| std::fs::read(folder.join(name)).expect(name)).to_vec()
}

#[test]
fn a_resumed_run_ends_as_if_it_had_not_been_stopped() {
    let folder = tempfile::tempdir().expect("folder");
    let train = |name: &str, iterations: usize, begin: &Begin| -> PathBuf {
        let path = folder.path().join(name);
        let changes = [BF16, &format!("train.iterations={iterations}"), "checkpoint.every=1"];
        let settings = Settings { output_dir: path.clone(), ..settings(&changes) };
        run(settings, begin, &Stop::default(), &Device::flex(), &mut |_| {}).expect("a run");
        path
    };
    let whole = train("whole", 4, &Begin::New);
    let resume = Begin::Resume { from: None, allow_change: false };
    train("parts", 2, &Begin::New);
    let parts = train("parts", 4, &resume);
    assert!(results(&whole) == results(&parts));
}
