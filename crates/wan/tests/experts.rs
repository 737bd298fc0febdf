//! Two networks that share the schedule: against a loop of single ones bit for bit, and against the reference.

mod common;
#[path = "common/experts.rs"]
mod folders;

use burn::tensor::{DType, Tensor};
use common::device::{device, on_cpu};
use common::{Golden, golden_dir, relative_error};
use folders::two_experts;
use wan::experts::Experts;
use wan::guidance::{GuidanceBatching, GuidanceScales, GuidedText, GuidedVelocity};
use wan::lora;
use wan::pipeline::{SampleRequest, WanPipeline, denoise, initial_noise};
use wan::solver::{Solver, SolverKind};
use wan::text::PromptEmbeds;
use wan::weights::to_floats;

/// max|a-b| / max|ref| of latents after up to 8 steps.
const LATENTS: f64 = 5e-5;
const SCALES: [f64; 2] = [4.5, 3.0];

fn pipeline() -> WanPipeline {
    let dir = two_experts(&golden_dir().join("wan-tiny"), 0.875);
    WanPipeline::load(dir.path(), &device(), DType::F32).unwrap_or_else(|e| panic!("{e}"))
}

/// The request of golden/pipeline.json, with a scale for each network.
fn request() -> SampleRequest {
    SampleRequest {
        prompt: "A red fox runs across a snowy field at sunrise.".into(),
        negative_prompt: "low quality, blurred details, static".into(),
        height: 32,
        width: 48,
        num_frames: 9,
        num_inference_steps: 8,
        guidance_scale: SCALES[0],
        guidance_scale_2: Some(SCALES[1]),
        initial_latents: Some(Golden::open("pipeline").tensor("latents_initial")),
        ..SampleRequest::default()
    }
}

/// Prompt and negative prompt.
fn texts(pipeline: &WanPipeline) -> [PromptEmbeds; 2] {
    let request = request();
    [request.prompt, request.negative_prompt].map(|text| pipeline.text_encoder.encode(&[&text], 512).expect("encode"))
}

fn latents(pipeline: &WanPipeline, request: &SampleRequest) -> Tensor<5> {
    pipeline.sample(request, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).latents
}

#[test]
fn sampling_is_a_loop_of_single_networks() {
    let pipeline = pipeline();
    let networks: Vec<_> = pipeline.experts().networks().collect();
    let schedule = request().schedule(&pipeline.scheduler).expect("schedule");
    let [prompt, negative] = texts(&pipeline);
    let mut solver = Solver::new(SolverKind::Unipc, schedule.clone());
    let (mut x, mut taken) = (request().initial_latents.expect("given"), Vec::new());
    for step in 0..schedule.num_steps() {
        let network = usize::from(schedule.timestep(step) < 875.0);
        let text = GuidedText::new(networks[network], &prompt, Some(&negative), false);
        let velocity = GuidedVelocity::new(networks[network], &text, &[0], SCALES[network], GuidanceBatching::Together);
        x = solver.step(step, velocity.velocity(x.clone(), &[schedule.timestep(step)]), x);
        taken.push(network);
    }
    assert!(taken.is_sorted() && taken[0] == 0 && taken[7] == 1, "{taken:?}");
    assert_eq!(to_floats(latents(&pipeline, &request())), to_floats(x));
    // each of the four numbers counts
    for other in [
        SampleRequest { guidance_scale_2: None, ..request() },
        SampleRequest { guidance_scale_2: Some(1.0), ..request() },
        SampleRequest { guidance_scale: 1.0, ..request() },
    ] {
        assert_ne!(to_floats(latents(&pipeline, &request())), to_floats(latents(&pipeline, &other)));
    }
}

#[test]
fn matches_reference_two_networks() {
    let (golden, pipeline) = (Golden::open("wan22"), pipeline());
    let [prompt, negative] = texts(&pipeline);
    let text = GuidedText::new(pipeline.experts(), &prompt, Some(&negative), false);
    let check = |name: &str, scale_2: Option<f64>| {
        let guidance = GuidanceScales::new(SCALES[0], scale_2);
        let velocity = GuidedVelocity::new(pipeline.experts(), &text, &[0], guidance, GuidanceBatching::Together);
        let schedule = request().schedule(&pipeline.scheduler).expect("schedule");
        denoise(&velocity, SolverKind::Unipc, &schedule, request().initial_latents.expect("given"), &mut |step, next| {
            let reference: Tensor<6> = golden.tensor(&format!("{name}.latents_after_step"));
            let reference = to_floats(reference.narrow(0, step, 1));
            let error = relative_error(&to_floats(next.clone()), &reference);
            assert!(error <= common::device::allowed(LATENTS), "{name}, step {step}: relative error {error:e}");
        });
    };
    check("experts", Some(SCALES[1]));
    check("same_scale", None);
    let second = pipeline.second.as_ref().expect("two networks");
    let adapter = lora::load(&golden_dir().join("lora/diffusers_with_metadata"), &second.transformer.linears).expect("adapter");
    adapter.attach(&second.transformer.linears, &device()).expect("attach");
    let adapted = latents(&pipeline, &request());
    let reference: Tensor<6> = golden.tensor("lora_2.latents_after_step");
    let error = relative_error(&to_floats(adapted), &to_floats(reference.narrow(0, 7, 1)));
    assert!(error <= common::device::allowed(LATENTS), "relative error {error:e}");
}

/// `expand_timesteps` gives each token a timestep; without an image they are all that of the step.
#[test]
fn matches_reference_expanded_timesteps() {
    let golden = Golden::open("wan22");
    let pipeline = WanPipeline::load(&golden_dir().join("wan-tiny"), &device(), DType::F32).expect("loads");
    let [prompt, negative] = texts(&pipeline);
    let text = GuidedText::new(&pipeline.transformer, &prompt, Some(&negative), false);
    let velocity = GuidedVelocity::new(&pipeline.transformer, &text, &[0], SCALES[0], GuidanceBatching::Together);
    let reference: Tensor<6> = golden.tensor("expanded.latents_after_step");
    let schedule = request().schedule(&pipeline.scheduler).expect("schedule");
    let start = request().initial_latents.expect("given");
    // one timestep for each sample, and one for each of the 18 tokens
    for tokens in [1, 18] {
        let mut solver = Solver::new(SolverKind::Unipc, schedule.clone());
        let mut x = start.clone();
        for step in 0..schedule.num_steps() {
            x = solver.step(step, velocity.velocity(x.clone(), &vec![schedule.timestep(step); tokens]), x);
        }
        let error = relative_error(&to_floats(x), &to_floats(reference.clone().narrow(0, 7, 1)));
        assert!(error <= common::device::allowed(LATENTS), "{tokens}: relative error {error:e}");
    }
}

/// In a batch of both, every sample has the velocity that it has alone, and gradients are those of the parts.
#[test]
fn samples_of_both_networks_go_together() {
    let pipeline = pipeline();
    let [prompt, negative] = texts(&pipeline);
    let text = GuidedText::new(pipeline.experts(), &prompt, Some(&negative), false);
    let timesteps = [999.0, 500.0, 875.0, 1.0, 874.0];
    let key = grpo::Key { seed: 1, iteration: 0, prompt: 0, rollout: 0, purpose: grpo::Purpose::Data };
    let x = initial_noise(&key, [5, 16, 3, 4, 6], &device());
    for (batching, scales) in [
        (GuidanceBatching::Together, SCALES),
        (GuidanceBatching::InTurn, SCALES),
        (GuidanceBatching::Together, [4.5, 1.0]),
        (GuidanceBatching::InTurn, [1.0, 3.0]),
    ] {
        let of = |samples: &[usize], experts: Experts<'_>, text: &GuidedText, scales: [f64; 2]| {
            let guidance = GuidanceScales::new(scales[0], Some(scales[1]));
            let velocity = GuidedVelocity::new(experts, text, &vec![0; samples.len()], guidance, batching);
            let own = Tensor::cat(samples.iter().map(|&i| x.clone().narrow(0, i, 1)).collect(), 0);
            let times: Vec<f64> = samples.iter().map(|&i| timesteps[i]).collect();
            let leaf = own.clone().autodiff().require_grad();
            let recorded = velocity.velocity(leaf.clone(), &times);
            let gradients = recorded.clone().powi_scalar(2).sum().backward();
            assert_eq!(to_floats(velocity.velocity(own.clone(), &times)), to_floats(recorded), "recorded or not");
            let (traced, _) = velocity.velocity_traced(own.clone(), &times);
            assert_eq!(to_floats(velocity.velocity(own, &times)), to_floats(traced), "traced or not");
            (to_floats(velocity.velocity(leaf.clone().inner(), &times)), to_floats(leaf.grad(&gradients).expect("gradient")))
        };
        let together = of(&[0, 1, 2, 3, 4], pipeline.experts(), &text, scales);
        for (sample, network) in [0, 1, 0, 1, 1].into_iter().enumerate() {
            let alone: Experts<'_> = pipeline.experts().networks().nth(network).expect("network").into();
            let own_text = GuidedText::new(alone, &prompt, Some(&negative), false);
            let single = of(&[sample], alone, &own_text, [scales[network]; 2]);
            let size = single.0.len();
            for (all, one) in [(&together.0, &single.0), (&together.1, &single.1)] {
                let part = &all[sample * size..(sample + 1) * size];
                assert!(!on_cpu() || part == one, "sample {sample}, {batching:?}, {scales:?}");
                assert!(relative_error(part, one) <= common::device::allowed(2e-6));
            }
        }
    }
}

#[test]
fn a_scale_for_a_network_that_is_not_there_is_refused() {
    let single = WanPipeline::load(&golden_dir().join("wan-tiny"), &device(), DType::F32).expect("loads");
    let error = single.sample(&request(), &mut |_, _| {}).expect_err("refused").to_string();
    assert_eq!(error, "guidance_scale_2 is `3`: the model has one transformer\nhint: leave it out; `guidance_scale` is that of every step");
    let error = pipeline().sample(&SampleRequest { guidance_scale_2: Some(0.0), ..request() }, &mut |_, _| {}).expect_err("refused");
    assert!(error.to_string().starts_with("guidance_scale_2 is `0`: it must be a number from 1 up"), "{error}");
}

#[test]
fn both_networks_are_checked() {
    let dir = two_experts(&golden_dir().join("wan-tiny"), 0.875);
    let second = dir.path().join("transformer_2");
    let load = || WanPipeline::load(dir.path(), &device(), DType::F32).expect_err("refused").to_string();
    let config = std::fs::read_to_string(second.join("config.json")).expect("config");
    std::fs::write(second.join("config.json"), config.replace("\"in_channels\": 16", "\"in_channels\": 8")).expect("write");
    assert!(load().contains("transformer in_channels is 8, but vae z_dim is 16"), "{}", load());
    std::fs::write(second.join("config.json"), config.replace("\"rope_max_seq_len\": 1024", "\"rope_max_seq_len\": 64")).expect("write");
    assert!(load().contains("transformer/ and ([1, 2, 2], 64) in transformer_2/"), "{}", load());
    std::fs::remove_file(second.join("config.json")).expect("remove");
    std::fs::remove_file(second.join("diffusion_pytorch_model.safetensors")).expect("remove");
    for name in ["transformer_2/config.json", "transformer_2/diffusion_pytorch_model.safetensors"] {
        assert!(load().contains(name), "{}", load());
    }
}

#[test]
fn adapters_of_both_networks_are_found() {
    let (pipeline, dir) = (pipeline(), tempfile::tempdir().expect("folder"));
    let base = to_floats(latents(&pipeline, &request()));
    let experts = pipeline.experts();
    let one = golden_dir().join("lora/peft");
    for (own, name) in [(dir.path().to_path_buf(), "first"), (dir.path().join("transformer_2"), "second")] {
        std::fs::create_dir_all(&own).expect("folder");
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            std::fs::copy(one.join(file), own.join(file)).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
    let adapted = |path: &std::path::Path, second: Option<&std::path::Path>| {
        experts.detach();
        let adapters = experts.read_adapters(path, second).expect("read");
        let count = experts.attach(adapters, &device()).expect("attach").len();
        (count, to_floats(latents(&pipeline, &request())))
    };
    let first = adapted(&one, None);
    let both = adapted(dir.path(), None);
    assert_eq!((first.0, both.0), (1, 2));
    assert!(base != first.1 && first.1 != both.1);
    assert_eq!(both, adapted(&one, Some(&one)));

    let single = WanPipeline::load(&golden_dir().join("wan-tiny"), &device(), DType::F32).expect("loads");
    let error = single.experts().read_adapters(&one, Some(&one)).expect_err("refused").to_string();
    assert!(error.contains("the adapter is for a second transformer, and the model has one"), "{error}");
}
