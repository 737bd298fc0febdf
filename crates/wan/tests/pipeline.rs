//! The pipeline and its guidance against the reference (golden/README.md), and the requests and folders it refuses.

mod common;

use burn::tensor::{DType, Tensor};
use common::device::{allowed, device};
use common::{Golden, assert_close, golden_dir, relative_error};
use grpo::SigmaGrid;
use std::path::Path;
use wan::guidance::{GuidanceBatching, GuidedText, GuidedVelocity};
use wan::pipeline::{SampleRequest, SchedulerConfig, WanPipeline, denoise};
use wan::solver::SolverKind;
use wan::text::PromptEmbeds;
use wan::weights::to_floats;

/// max|a-b| / max|ref| of latents after up to 8 steps.
const LATENTS: f64 = 5e-5;
/// max|a-b| of frames in [0, 1].
const FRAMES: f32 = 5e-5;

fn load(dir: &Path) -> wan::Result<WanPipeline> {
    WanPipeline::load(dir, &device(), DType::F32)
}

fn tiny() -> WanPipeline {
    load(&golden_dir().join("wan-tiny")).unwrap_or_else(|e| panic!("{e}"))
}

/// The request of golden/pipeline.json.
fn request(golden: &Golden) -> SampleRequest {
    SampleRequest {
        prompt: "A red fox runs across a snowy field at sunrise.".into(),
        negative_prompt: "low quality, blurred details, static".into(),
        height: 32,
        width: 48,
        num_frames: 9,
        num_inference_steps: 8,
        guidance_scale: 4.5,
        initial_latents: Some(golden.tensor("latents_initial")),
        ..SampleRequest::default()
    }
}

fn sample(pipeline: &WanPipeline, request: &SampleRequest) -> wan::pipeline::Sample {
    pipeline.sample(request, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn matches_reference_pipeline_default() {
    let (golden, pipeline) = (Golden::open("pipeline"), tiny());
    let mut calls = Vec::new();
    let sample = pipeline.sample(&request(&golden), &mut |done, total| calls.push((done, total))).expect("sample");
    assert_eq!(calls, (1..=8).map(|done| (done, 8)).collect::<Vec<_>>());
    assert_close(&golden, "latents_final", sample.latents, LATENTS);
    // the reference has the channels last
    let (ours, reference) = (to_floats(sample.frames.permute([0, 2, 3, 4, 1])), golden.values("frames_np"));
    let worst = ours.iter().zip(&reference).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(f64::from(worst) <= allowed(FRAMES.into()) && ours.len() == reference.len(), "frames are off by {worst:e}");
}

#[test]
fn matches_reference_pipeline_schedules() {
    let (golden, pipeline) = (Golden::open("pipeline"), tiny());
    for (prefix, grid) in [("", SigmaGrid::Unipc037), ("legacy.", SigmaGrid::Unipc), ("euler.", SigmaGrid::Euler)] {
        let request = SampleRequest { grid: Some(grid), ..request(&golden) };
        let schedule = request.schedule(&pipeline.scheduler).expect("schedule");
        let sigmas: Vec<f32> = schedule.sigmas().iter().map(|&sigma| sigma as f32).collect();
        assert_eq!(sigmas, golden.values(&format!("{prefix}sigmas")));
        let timesteps: Vec<f32> = (0..8).map(|step| schedule.timestep(step) as f32).collect();
        assert_eq!(timesteps, golden.values(&format!("{prefix}timesteps")));
    }
}

#[test]
fn matches_reference_pipeline_variants() {
    let (golden, pipeline) = (Golden::open("pipeline"), tiny());
    let default = request(&golden);
    let no_guidance = SampleRequest { guidance_scale: 1.0, ..default.clone() };
    let euler = SampleRequest { solver: Some(SolverKind::Euler), grid: Some(SigmaGrid::Euler), ..default.clone() };
    let legacy = SampleRequest { grid: Some(SigmaGrid::Unipc), ..default };
    for (name, request) in [("nocfg", no_guidance), ("euler", euler), ("legacy", legacy)] {
        assert_close(&golden, &format!("{name}.latents_final"), sample(&pipeline, &request).latents, LATENTS);
    }
}

/// The texts of the golden request.
fn texts(pipeline: &WanPipeline, golden: &Golden) -> (PromptEmbeds, PromptEmbeds) {
    let request = request(golden);
    let encode = |text: &str| pipeline.text_encoder.encode(&[text], 512).expect("encode");
    (encode(&request.prompt), encode(&request.negative_prompt))
}

#[test]
fn matches_reference_pipeline_prompt_embeds() {
    let (golden, pipeline) = (Golden::open("pipeline"), tiny());
    let (prompt, negative) = texts(&pipeline, &golden);
    assert_close(&golden, "prompt_embeds", prompt.to_padded(), 5e-6);
    assert_close(&golden, "negative_prompt_embeds", negative.to_padded(), 5e-6);
}

#[test]
fn matches_reference_pipeline_every_step() {
    let (golden, pipeline) = (Golden::open("pipeline"), tiny());
    let (prompt, negative) = texts(&pipeline, &golden);
    let text = GuidedText::new(&pipeline.transformer, &prompt, Some(&negative), false);
    let schedule = request(&golden).schedule(&pipeline.scheduler).expect("schedule");
    let step_of = |name: &str, step: usize| golden.tensor::<6>(name).narrow(0, step, 1).squeeze_dim::<5>(0);
    for batching in [GuidanceBatching::Together, GuidanceBatching::InTurn] {
        let velocity = GuidedVelocity::new(&pipeline.transformer, &text, &[0], 4.5, batching);
        let start: Tensor<5> = golden.tensor("latents_initial");
        let mut latents = start.clone();
        denoise(&velocity, SolverKind::Unipc, &schedule, start, &mut |step, next| {
            let (conditional, unconditional) = velocity.predictions(latents.clone(), &[schedule.timestep(step)]);
            let unconditional = unconditional.expect("guidance");
            for (name, ours) in [("noise_pred_cond", &conditional), ("noise_pred_uncond", &unconditional), ("latents_after_step", next)] {
                let error = relative_error(&to_floats(ours.clone()), &to_floats(step_of(name, step)));
                assert!(error <= allowed(LATENTS), "{batching:?}, step {step}, {name}: relative error {error:e}");
            }
            latents = next.clone();
        });
    }
}

#[test]
fn guidance_in_turn_agrees_with_guidance_together() {
    // three prompts of different lengths, five samples, one negative prompt, one timestep each; gradients too
    let pipeline = tiny();
    let encode = |texts: &[&str]| pipeline.text_encoder.encode(texts, 64).expect("encode");
    let (prompts, negative) = (encode(&["a red fox", "snow", "the field at sunrise, from above"]), encode(&["static"]));
    let text = GuidedText::new(&pipeline.transformer, &prompts, Some(&negative), false);
    let (samples, timesteps) = ([2, 0, 0, 1, 2], [999.0, 750.0, 500.0, 250.0, 1.0]);
    let key = grpo::Key { seed: 1, iteration: 0, prompt: 0, rollout: 0, purpose: grpo::Purpose::Data };
    let latents = wan::pipeline::initial_noise(&key, [5, 16, 3, 4, 6], &device());
    let run = |batching| {
        let velocity = GuidedVelocity::new(&pipeline.transformer, &text, &samples, 4.5, batching);
        let leaf = latents.clone().autodiff().require_grad();
        let recorded = velocity.velocity(leaf.clone(), &timesteps);
        let plain = velocity.velocity(latents.clone(), &timesteps);
        assert!(!plain.is_autodiff());
        assert_eq!(to_floats(plain.clone()), to_floats(recorded.clone()), "replay equals rollout");
        let grads = recorded.powi_scalar(2).mean().backward();
        (to_floats(plain), to_floats(leaf.grad(&grads).expect("gradient")))
    };
    let (together, in_turn) = (run(GuidanceBatching::Together), run(GuidanceBatching::InTurn));
    let errors = [relative_error(&together.0, &in_turn.0), relative_error(&together.1, &in_turn.1)];
    assert!(errors.iter().all(|&error| error < allowed(1e-6)), "relative errors {errors:?}");

    // a sample's velocity is the same alone, with its own prompt
    let alone = GuidedText::new(&pipeline.transformer, &prompts.select(&[1]), Some(&negative), false);
    let alone = GuidedVelocity::new(&pipeline.transformer, &alone, &[0], 4.5, GuidanceBatching::Together);
    let alone = to_floats(alone.velocity(latents.clone().narrow(0, 3, 1), &[250.0]));
    let error = relative_error(&together.0[3 * alone.len()..4 * alone.len()], &alone);
    assert!(error < allowed(2e-6), "relative error {error:e}");
}

#[test]
fn samples_are_functions_of_the_seed() {
    let (golden, pipeline) = (Golden::open("pipeline"), tiny());
    let from_seed = |seed| {
        let request = SampleRequest { seed, initial_latents: None, num_inference_steps: 2, ..request(&golden) };
        to_floats(sample(&pipeline, &request).frames)
    };
    assert_eq!(from_seed(1), from_seed(1));
    assert_ne!(from_seed(1), from_seed(2));
}

#[test]
fn the_folder_says_how_to_sample() {
    let scheduler = tiny().scheduler;
    assert_eq!(scheduler, SchedulerConfig { solver: SolverKind::Unipc, grid: SigmaGrid::Unipc037, shift: 3.0 });
}

#[test]
fn requests_are_checked() {
    let (golden, pipeline) = (Golden::open("pipeline"), tiny());
    let good = request(&golden);
    let cases: [(SampleRequest, &str); 10] = [
        (SampleRequest { num_frames: 10, ..good.clone() }, "num_frames is `10`: it must be 4k + 1\nhint: try 13"),
        (SampleRequest { num_frames: 0, ..good.clone() }, "num_frames is `0`: it must be 4k + 1\nhint: try 1"),
        (
            SampleRequest { height: 40, ..good.clone() },
            "height is `40`: it must be a positive multiple of 16 (autoencoder scale x patch)\nhint: try 48",
        ),
        (
            SampleRequest { width: usize::MAX, ..good.clone() },
            "width is `18446744073709551615`: the model reaches up to 16384\nhint: choose a smaller size",
        ),
        (
            SampleRequest { num_inference_steps: 0, ..good.clone() },
            "num_inference_steps is `0`: expected 1 to 1000\nhint: 20 for training and 50 for evaluation are the published values",
        ),
        (
            SampleRequest { guidance_scale: f64::NAN, ..good.clone() },
            "guidance_scale is `NaN`: it must be a number from 1 up\nhint: 1 is no guidance; Wan is usually sampled with 5",
        ),
        (
            SampleRequest { shift: Some(0.0), ..good.clone() },
            "shift is `0`: expected a positive number\nhint: Wan uses 3 for 480p and 5 for 720p; 1 means no shift",
        ),
        (
            SampleRequest { max_sequence_length: 0, ..good.clone() },
            "max_sequence_length is `0`: a prompt has at least one token\nhint: the usual value is 512",
        ),
        (
            SampleRequest { prompt: "a\u{1b}[31m fox".into(), ..good.clone() },
            "prompt is `a\\u{1b}[31m fox`: character 2 is the control character U+001B\nhint: remove it; was the text copied from a terminal or a binary file?",
        ),
        (
            SampleRequest { num_frames: 13, ..good },
            "initial_latents is `[1, 16, 3, 4, 6]`: this video has latents of shape [1, 16, 4, 4, 6]\nhint: check height, width and num_frames against the latents",
        ),
    ];
    for (request, message) in cases {
        let error = pipeline.sample(&request, &mut |_, _| panic!("nothing is computed")).expect_err(message);
        assert_eq!(error.to_string(), message);
    }
}

/// A copy of wan-tiny that a test may damage.
fn copy_of_tiny() -> tempfile::TempDir {
    let (to, from) = (tempfile::tempdir().expect("temporary folder"), golden_dir().join("wan-tiny"));
    std::fs::copy(from.join("model_index.json"), to.path().join("model_index.json")).expect("copy");
    for part in ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"] {
        std::fs::create_dir(to.path().join(part)).expect("folder");
        for file in std::fs::read_dir(from.join(part)).expect("part") {
            let file = file.expect("entry");
            std::fs::copy(file.path(), to.path().join(part).join(file.file_name())).expect("copy");
        }
    }
    to
}

#[test]
fn folders_are_checked() {
    let missing = load(Path::new("no/such/model")).expect_err("no folder").to_string();
    assert!(missing.starts_with("cannot read `no/such/model`:") && missing.contains("hint: check the path"), "{missing}");

    let dir = copy_of_tiny();
    load(dir.path()).expect("the copy is whole");
    for file in ["tokenizer/tokenizer.json", "vae/diffusion_pytorch_model.safetensors", "scheduler/scheduler_config.json"] {
        std::fs::remove_file(dir.path().join(file)).expect("remove");
    }
    // shards: one of them is missing
    let transformer = dir.path().join("transformer");
    std::fs::remove_file(transformer.join("diffusion_pytorch_model.safetensors")).expect("remove");
    let index = "diffusion_pytorch_model.safetensors.index.json";
    std::fs::copy(golden_dir().join("wan-tiny-sharded-transformer").join(index), transformer.join(index)).expect("copy");
    let error = load(dir.path()).expect_err("incomplete").to_string();
    for name in [
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
        "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
        "transformer/diffusion_pytorch_model-00003-of-00003.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ] {
        assert!(error.contains(name), "{name} in: {error}");
    }
    assert!(!error.contains("text_encoder/"), "{error}");
}

#[test]
fn other_models_are_refused() {
    let dir = copy_of_tiny();
    let path = dir.path().join("model_index.json");
    let original: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).expect("read")).expect("JSON");
    for (key, value, message) in [
        ("_class_name", serde_json::json!("WanVideoToVideoPipeline"), "`_class_name` is `WanVideoToVideoPipeline`"),
        ("transformer_2", serde_json::json!(["diffusers", "WanTransformer3DModel"]), "`transformer_2` is set, but not `boundary_ratio`"),
        ("boundary_ratio", serde_json::json!(0.875), "`boundary_ratio` is `0.875`, but `transformer_2` is not set"),
    ] {
        let mut index = original.clone();
        index[key] = value;
        std::fs::write(&path, index.to_string()).expect("write");
        let error = load(dir.path()).expect_err(key).to_string();
        assert!(error.contains(message) && error.contains("model_index.json") && error.contains("hint:"), "{error}");
    }
}
