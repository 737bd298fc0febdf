//! Plans against counted and measured figures of the reference implementation.

use burn::tensor::DType;
use std::path::{Path, PathBuf};
use train::plan::{ForwardFlops, Machine, ModelSizes, Plan, TextLength, Trained, decode_flops};
use train::settings::Settings;
use wan::transformer::attention::scores_at_once;
use wan::transformer::{TransformerConfig, WanTransformer};
use wan::vae::VaeConfig;
use wan::weights::Weights;

fn recipe(name: &str, overrides: &[&str]) -> Settings {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes").join(name);
    let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
    Settings::load(Some(&path), &overrides).unwrap_or_else(|error| panic!("{error}"))
}

fn plan(settings: &Settings, machine: Machine) -> Plan {
    let longest = settings.sampling.max_sequence_length as u64;
    let text = TextLength { prompts: 0, tokens: 0, longest, counted: false };
    Plan::new(settings, &ModelSizes::of(settings).expect("known sizes"), text, machine).expect("plan")
}

fn near(what: &str, got: f64, expected: f64, tolerance: f64) {
    assert!((got / expected - 1.0).abs() <= tolerance, "{what}: {got:.4e}, expected {expected:.4e}");
}

/// Operations of a forward pass in TFLOP, text 512, counted in the reference implementation (docs/scaling.md): tokens, total, self scores,
/// self projections, feed-forward, cross.
#[test]
fn forward_passes_have_the_counted_operations() {
    let (small, large) = (TransformerConfig::wan21_1_3b(), TransformerConfig::wan21_14b());
    for (config, tokens, counted) in [
        (&small, 32_760, [283.0, 198.0, 18.6, 54.1, 12.5]),
        (&large, 32_760, [1678.0, 879.0, 275.0, 371.0, 153.0]),
        (&small, 75_600, [1250.0, 1053.0, 43.0, 125.0, 29.0]),
        (&large, 75_600, [6523.0, 4682.0, 634.0, 856.0, 351.0]),
        (&small, 14_040, [73.0, 36.0, 8.0, 23.0, 5.0]),
        (&small, 1_950, [5.9, 0.7, 1.1, 3.2, 0.9]),
    ] {
        let f = ForwardFlops::new(config, tokens, 512);
        let ours = [f.total(), f.self_scores, f.self_projections, f.feed_forward, f.cross].map(|flops| flops / 1e12);
        for (ours, counted) in ours.into_iter().zip::<[f64; 5]>(counted) {
            // the table has two or three digits
            let unit = if counted >= 5.0 && counted == counted.trunc() { 1.0 } else { 0.1 };
            assert!((ours - counted).abs() <= unit / 2.0 * 1.01, "{tokens} tokens: {ours} against {counted}");
        }
    }
}

/// 81 frames of 480x832, and a single one, counted in the reference implementation.
#[test]
fn decoding_has_the_counted_operations() {
    let config = VaeConfig::default();
    near("81 frames", decode_flops(&config, None, [21, 60, 104]), 275e12, 0.01);
    near("one frame", decode_flops(&config, None, [1, 60, 104]), 4.4e12, 0.02);
}

/// Tiles overlap, so that there is more to do, and less in memory at once; small frames are not divided.
#[test]
fn decoding_in_tiles_takes_less_memory_and_more_operations() {
    let of = |more: &[&str], tiled: bool| {
        let tiling = format!("sampling.vae_tiling={tiled}");
        plan(&recipe("flash_grpo_wan_1_3b.toml", &[more, &[&tiling]].concat()), Machine::default())
    };
    let [whole, tiled] = [false, true].map(|tiled| of(&[], tiled));
    let [before, after] = [&whole, &tiled].map(|plan| bytes(plan, "decode", "activations"));
    assert!(after * 3 < before, "{after} and {before}");
    // 3 x 5 tiles, of which those at the ends are smaller
    let pixels: usize = [256, 256, 96].iter().flat_map(|h| [256, 256, 256, 256, 64].map(|w| h * w)).sum();
    near("tiles", tiled.flops.decode / whole.flops.decode, pixels as f64 / (480.0 * 832.0), 0.02);
    let [whole, tiled] = [false, true].map(|tiled| of(&["sampling.height=256", "sampling.width=256"], tiled));
    assert_eq!((whole.memory, whole.flops), (tiled.memory, tiled.flops));
}

#[test]
fn the_published_run_has_the_known_cost() {
    let settings = recipe("flash_grpo_wan_1_3b.toml", &["train.activation_checkpointing=true"]);
    let plan = plan(&settings, Machine::default());
    assert_eq!((plan.work.tokens, plan.work.latents), (32_760, [16, 21, 60, 104]));
    let forward = plan.flops.forward.total();
    near("20 steps with guidance", 20.0 * 2.0 * forward, 11.3e15, 0.005);
    // 283 forward, 283 again, linear layers once more and attention 2.5 times
    near("a training step", plan.flops.update, 1.15e15, 0.01);
    assert_eq!(plan.work.samples, 384);
    assert_eq!(plan.work.replayed, 384.0);
    // a micro-batch of 1 shares nothing
    assert_eq!(plan.work.velocities, 384.0 * 20.0);
}

fn bytes(plan: &Plan, phase: &str, part: &str) -> u64 {
    let phase = plan.memory.iter().find(|memory| memory.phase == phase).expect("phase");
    phase.parts.iter().find(|(name, _)| *name == part).map_or(0, |(_, bytes)| *bytes)
}

/// The branches of a large clip go through the network one after the other, those of a small one together.
#[test]
fn guidance_doubles_the_activations_of_small_clips_alone() {
    let of = |size: [&str; 3], guidance: &str| {
        let settings = recipe("flash_grpo_wan_1_3b.toml", &[size[0], size[1], size[2], &format!("sampling.guidance_scale={guidance}")]);
        bytes(&plan(&settings, Machine::default()), "update", "activations of one block")
    };
    let (large, small) = (
        ["sampling.height=480", "sampling.width=832", "sampling.num_frames=81"],
        ["sampling.height=64", "sampling.width=64", "sampling.num_frames=9"],
    );
    assert_eq!(of(large, "4.5"), of(large, "1.0"));
    assert_eq!(of(small, "4.5"), 2 * of(small, "1.0"));
}

/// In bf16 the frozen weights take half, but for the 0.2 % that stay f32; the trained ones what they took.
#[test]
fn weights_in_bf16_take_half() {
    let of = |precision: &str, part: &str| {
        let settings = recipe("flash_grpo_wan_1_3b.toml", &[&format!("train.mixed_precision={precision}")]);
        bytes(&plan(&settings, Machine::default()), "update", part)
    };
    let config = TransformerConfig::wan21_1_3b();
    let declared = Weights::declared(|w| WanTransformer::new(config.clone(), w, DType::BF16)).expect("declared");
    let counted: usize = declared.iter().map(|tensor| tensor.num_elements() * if tensor.keep_f32 { 4 } else { 2 }).sum();
    assert_eq!(of("bf16", "transformer"), counted as u64);
    assert_eq!(of("no", "transformer"), 4 * config.num_parameters() as u64);
    for part in ["trained weights and their state", "autoencoder"] {
        assert_eq!(of("bf16", part), of("no", part), "{part}");
    }
    assert_eq!(2 * of("bf16", "inputs of the blocks"), of("no", "inputs of the blocks"));
}

/// Backward of attention recomputes the scores of a chunk of queries, and three tensors of their size are alive. A chunk is bounded, so that they are the
/// peak in short clips: in 2 latent frames of 14B, not in 21, where the feed-forward is wider.
#[test]
fn scores_of_attention_count_where_they_are_the_peak() {
    let of = |changes: &[&str]| plan(&recipe("flash_grpo_wan_14b.toml", changes), Machine::default());
    let (long, short) = (of(&[]), of(&["sampling.num_frames=5"]));
    let tokens = 2 * 30 * 52;
    let scores = scores_at_once([1, 40, tokens, tokens]) as u64;
    assert_eq!(scores, 13 * (tokens as u64).pow(2));
    assert_eq!(bytes(&short, "update", "scores of attention"), 3 * 4 * scores);
    assert_eq!(bytes(&long, "update", "scores of attention"), 0);
    // the graph up to attention, not that of the feed-forward
    assert_eq!(bytes(&short, "update", "activations of one block"), 4 * tokens as u64 * 8 * 5120);
    let wide = of(&["sampling.num_frames=5", "train.mixed_precision=no"]);
    let rollout = 4 * tokens as u64 * 6 * 5120 + 2 * 4 * scores + 4 * 5120 * 13_824;
    assert_eq!(bytes(&wide, "rollout", "activations"), rollout, "in f32 there is no fused kernel");
}

/// All graphs of the first update are there from the rollouts to its end, not those of one micro-batch.
#[test]
fn retained_graphs_are_counted_together() {
    let of = |changes: &[&str]| {
        let small =
            ["train.activation_checkpointing=false", "sampling.num_frames=1", "rollout.group_size=4", "rollout.prompts_per_iteration=4"];
        plan(&recipe("flash_grpo_wan_1_3b.toml", &[&small[..], changes].concat()), Machine::default())
    };
    let (plain, kept) = (of(&[]), of(&["rollout.retain_step=true"]));
    const KEPT: &str = "graphs kept for the first update";
    for phase in ["rollout", "decode", "update"] {
        assert_eq!(bytes(&plain, phase, KEPT), 0);
        // 16 samples in two updates; a micro-batch is one of them
        let graphs = bytes(&kept, phase, KEPT) as f64 / bytes(&plain, "update", "activations") as f64;
        assert!((8.0..8.5).contains(&graphs), "{phase}: {graphs}");
    }
    let advice = Machine { memory: Some(kept.peak() - 1), ..Machine::default() };
    let settings = ["train.activation_checkpointing=false", "sampling.num_frames=1", "rollout.retain_step=true"];
    let advice = plan(&recipe("flash_grpo_wan_1_3b.toml", &settings), advice).advice;
    assert!(advice[0].starts_with("`rollout.retain_step = false`: peak ") && advice[0].ends_with("which fits"), "{advice:?}");
}

fn host_bytes(plan: &Plan, phase: &str, part: &str) -> u64 {
    let host = plan.host.iter().find(|memory| memory.phase == phase).expect("phase");
    assert_eq!(host.total, host.parts.iter().map(|(_, bytes)| bytes).sum::<u64>());
    host.parts.iter().find(|(name, _)| *name == part).map_or(0, |(_, bytes)| *bytes)
}

/// x and x' of every trained transition; v as well where the loss measures how far it has moved.
#[test]
fn recorded_transitions_are_in_host_memory() {
    let of = |changes: &[&str]| {
        let plan = plan(&recipe("flash_grpo_wan_1_3b.toml", changes), Machine::default());
        ["recorded transitions", "clips that wait for rewards"].map(|part| host_bytes(&plan, "an iteration", part))
    };
    let latents = 4 * 16 * 21 * 60 * 104;
    assert_eq!(of(&[]), [384 * 2 * latents, 1 << 30]);
    assert_eq!(of(&["method.kl_mask=1e-4"])[0], 384 * 3 * latents);
    let every = ["method.stochastic={ type = \"all\" }", "method.sharing=per-iteration"];
    assert_eq!(of(&every)[0], 384 * 19 * 2 * latents);
    let few =
        of(&["rollout.prompts_per_iteration=1", "rollout.group_size=2", "sampling.num_frames=5", "reward=[{ type = \"brightness\" }]"]);
    assert_eq!(few[1], 2 * 5 * 480 * 832 * 3 * 4);
}

/// Each micro-batch has its own copy of its prompts, once for all steps that train the same samples.
#[test]
fn prompts_of_recorded_transitions_are_in_host_memory() {
    let of = |recipe_name: &str, changes: &[&str]| {
        let plan = plan(&recipe(recipe_name, changes), Machine::default());
        host_bytes(&plan, "an iteration", "prompts of recorded transitions")
    };
    let prompt = 4 * 512 * 4096;
    let t2v = "flash_grpo_wan_1_3b.toml";
    let every_step = "method.stochastic={ type = \"all\" }";
    assert_eq!(of(t2v, &[]), 384 * prompt);
    assert_eq!(of(t2v, &[every_step, "method.sharing=per-iteration"]), 384 * prompt);
    // 48 prompts in micro-batches of 8, in micro-batches across two of them, and by steps that train other samples of a micro-batch
    assert_eq!(of(t2v, &["rollout.micro_batch=8"]), 48 * prompt);
    assert_eq!(of(t2v, &["rollout.micro_batch=12"]), 2 * 16 * 2 * prompt);
    let each_its_own = of(t2v, &["rollout.micro_batch=8", "method.sharing=per-rollout"]);
    assert!((4 * 48 * prompt..8 * 48 * prompt).contains(&each_its_own), "{each_its_own}");
    // and what CLIP says of a picture: 257 tokens of 1280 features
    assert_eq!(
        of("flash_grpo_wan_i2v_14b.toml", &["rollout.prompts_per_iteration=1", "rollout.group_size=2"]),
        2 * (prompt + 4 * 257 * 1280)
    );
}

/// The clips that are shown wait for the end of an evaluation as they are, a video for a prompt at most.
#[test]
fn shown_clips_are_in_host_memory() {
    let of = |changes: &[&str]| {
        let plan = plan(&recipe("flash_grpo_wan_1_3b.toml", changes), Machine::default());
        ["clips that become videos", "clips that are scored"].map(|part| host_bytes(&plan, "an evaluation", part))
    };
    let clip = 81 * 480 * 832 * 3 * 4;
    assert_eq!(of(&[]), [8 * clip, clip]);
    assert_eq!(of(&["rollout.micro_batch=8", "eval.num_prompts=3"]), [3 * clip, 2 * clip]);
    assert_eq!(of(&["eval.videos=0"])[0], 0);
}

/// An update is of the velocities that differ, whatever the micro-batch; sampling and evaluation are of all.
#[test]
fn an_update_takes_the_memory_of_the_velocities_that_differ() {
    let of = |changes: &[&str]| plan(&recipe("flash_grpo_wan_1_3b.toml", changes), Machine::default());
    let shared = |micro_batch: &str| of(&["method.initial_noise=shared-in-group", micro_batch]);
    let (one, eight) = (of(&[]), shared("rollout.micro_batch=8"));
    for part in ["inputs of the blocks", "activations of one block", "text keys and values"] {
        assert_eq!(bytes(&eight, "update", part), bytes(&one, "update", part), "{part}");
    }
    assert_eq!(eight.work.replayed, 48.0);
    assert!(bytes(&eight, "rollout", "activations") > 6 * bytes(&one, "rollout", "activations"));
    // rollouts that begin apart, two prompts in a micro-batch, and steps that are drawn for each rollout
    let inputs = |plan: &Plan| bytes(plan, "update", "inputs of the blocks") / bytes(&one, "update", "inputs of the blocks");
    assert_eq!(inputs(&of(&["rollout.micro_batch=8"])), 8);
    assert_eq!(inputs(&shared("rollout.micro_batch=16")), 2);
    let each_its_own = inputs(&of(&["rollout.micro_batch=8", "method.sharing=per-rollout"]));
    assert!((3..8).contains(&each_its_own), "{each_its_own}");
}

/// The prompts of an evaluation all differ, those of a group are one.
#[test]
fn an_evaluation_holds_a_text_for_every_sample() {
    let text = |changes: &[&str]| {
        bytes(&plan(&recipe("flash_grpo_wan_1_3b.toml", changes), Machine::default()), "rollout", "text keys and values")
    };
    let row = 2 * 2 * 513 * 1536 * 30;
    // prompts, the negative one, and the rows of both branches
    assert_eq!(text(&[]), (1 + 1 + 2) * row);
    assert_eq!(text(&["rollout.micro_batch=8"]), (8 + 1 + 16) * row);
}

/// In micro-batches of a whole group the common prefix is computed once.
#[test]
fn a_shared_prefix_saves_velocities() {
    let count = |overrides: &[&str]| plan(&recipe("moving_shapes_cpu.toml", overrides), Machine::default()).work.velocities;
    let (shared, plain) = (count(&["model.path=Wan2.1-T2V-1.3B"]), count(&["model.path=Wan2.1-T2V-1.3B", "rollout.shared_prefix=false"]));
    assert_eq!(plain, 64.0 * 10.0);
    // 8 groups, each spared 7 of its 8 samples for the 1 to 5 steps up to its stochastic one
    assert!((640.0 - 8.0 * 7.0 * 5.0..=640.0 - 8.0 * 7.0).contains(&shared), "{shared}");
}

/// A micro-batch of 1 shares nothing: the plan says what a larger one would save, if it fits.
#[test]
fn a_prefix_that_nobody_shares_is_told() {
    const SHARED: &str = "method.initial_noise=shared-in-group";
    let of = |changes: &[&str], gib: Option<u64>| {
        let settings = recipe("flash_grpo_wan_1_3b.toml", &[&["rollout.micro_batch=1"], changes].concat());
        plan(&settings, Machine { memory: gib.map(|gib| gib << 30), ..Machine::default() })
    };
    let (plain, shared) = (of(&[SHARED], None), of(&[SHARED, "rollout.micro_batch=8"], None));
    let saved = 100.0 * (1.0 - shared.iteration_flops() / plain.iteration_flops());
    assert!((30.0..40.0).contains(&saved), "{saved}");
    let hint = |size: usize, plan: &Plan| {
        plan.advice.first().is_some_and(|hint| hint.starts_with(&format!("`rollout.micro_batch = {size}` shares")))
    };
    assert!(hint(8, &plain) && plain.advice[0].contains(&format!("{saved:.0} % fewer operations")), "{:?}", plain.advice);
    let peak = |plan: &Plan| plan.peak() >> 30;
    assert!(hint(8, &of(&[SHARED], Some(peak(&shared) + 1))));
    assert!(hint(4, &of(&[SHARED], Some(peak(&shared)))));
    assert!(of(&[SHARED], Some(peak(&plain) + 1)).advice.is_empty());
    for changes in [&[][..], &[SHARED, "rollout.shared_prefix=false"], &[SHARED, "rollout.micro_batch=8"]] {
        assert!(of(changes, None).advice.is_empty(), "{changes:?}");
    }
}

/// The window of a sliding one is at the start for 25 iterations, where it shares least.
#[test]
fn a_sliding_window_is_counted_in_all_its_places() {
    let count = |iterations: &str| {
        let changes = [iterations, "rollout.micro_batch=8", "method.name=mixgrpo", "sampling.num_inference_steps=10"];
        let window = "method.stochastic={ type = \"sliding\", size = 4, stride = 1, every = 25 }";
        plan(&recipe("wan_1_3b/tempflow.toml", &[&changes[..], &[window]].concat()), Machine::default()).work.velocities
    };
    // each place of the window lets a group share one more step: 7 of 8 velocities of 48 groups
    let at = |place: f64| 384.0 * 10.0 - 48.0 * 7.0 * (place + 1.0);
    assert_eq!(count("train.iterations=25"), at(0.0));
    // 6 places, 25 iterations each; 16 of the 150 are counted
    near("a whole cycle", count("train.iterations=150"), at(2.5), 0.01);
}

/// A list of 18 captions makes no more videos, whatever the recipe asks for.
#[test]
fn an_evaluation_has_no_more_prompts_than_its_list() {
    let videos = |changes: &[&str]| {
        plan(&recipe("moving_shapes_cpu.toml", &[&["model.path=Wan2.1-T2V-1.3B"], changes].concat()), Machine::default()).work.eval_videos
    };
    assert_eq!(videos(&["eval.num_prompts=500", "eval.samples_per_prompt=8"]), 144);
    assert_eq!(videos(&["eval.num_prompts=4", "eval.samples_per_prompt=8"]), 32);
    assert_eq!(videos(&["eval.num_prompts=500", "eval.samples_per_prompt=8", "prompts.eval=not/there.txt"]), 4000);
}

/// Every entry names a layer: a wrong one among right ones would train less than it says.
#[test]
fn target_modules_that_name_no_layer_are_refused() {
    let of = |modules: &str| {
        let settings = recipe("flash_grpo_wan_1_3b.toml", &[&format!("policy.target_modules={modules}")]);
        let model = ModelSizes::of(&settings).expect("known sizes");
        Trained::of(&settings, &model.transformer, 1)
    };
    let right = of(r#"["to_q", "attn2.to_k", "blocks.0.ffn.net.2"]"#).expect("names of layers");
    assert_eq!((right.layers, right.feed_forward), (60 + 30 + 1, true));
    for (modules, entry, hint) in [
        (r#"["to_q", "to_k", "to_v", "to_out"]"#, "`to_out`", "did you mean `to_out.0`?"),
        (r#"["o_q"]"#, "`o_q`", "`ffn.net.0.proj`, `ffn.net.2`, `patch_embedding`"),
    ] {
        let error = of(modules).expect_err(modules).to_string();
        assert!(error.contains(entry) && error.contains("matches no linear layer") && error.contains(hint), "{error}");
    }
}

#[test]
fn devices_share_samples_and_money_is_counted() {
    let settings = recipe("flash_grpo_wan_1_3b.toml", &[]);
    let on = |devices| {
        let machine = Machine { devices, flops: Some(400e12), price_per_hour: Some(2.0), ..Machine::default() };
        plan(&settings, machine).seconds.expect("speed is known")
    };
    let (one, many) = (on(1), on(96));
    near("96 devices", one.iteration / many.iteration, 96.0, 1e-9);
    assert!(many.device_hours >= one.device_hours * 0.999);
    near("price", one.price.expect("known"), 2.0 * one.device_hours, 1e-12);
}

#[test]
fn advice_leads_to_a_run_that_fits() {
    let machine = |gib: u64| Machine { memory: Some(gib << 30), ..Machine::default() };
    let settings = recipe("flash_grpo_wan_1_3b.toml", &["train.activation_checkpointing=false", "rollout.micro_batch=2"]);
    let tight = plan(&settings, machine(80));
    assert_eq!(tight.fits, Some(false));
    assert!(tight.advice[0].starts_with("`train.activation_checkpointing = true`: peak "), "{:?}", tight.advice);
    let follows = recipe("flash_grpo_wan_1_3b.toml", &["train.activation_checkpointing=true", "rollout.micro_batch=1"]);
    let roomy = plan(&follows, machine(80));
    assert_eq!((roomy.fits, roomy.advice.len()), (Some(true), 0));
    let large = recipe("flash_grpo_wan_1_3b.toml", &["train.mixed_precision=no", "model.path=Wan2.1-T2V-14B-Diffusers"]);
    let advice = plan(&large, machine(24)).advice;
    assert!(advice[0].starts_with("`train.mixed_precision = \"bf16\"`: peak "), "{advice:?}");
    assert!(advice[1].starts_with("not even one frame of this size fits: the transformer alone takes 26.7 GiB"), "{advice:?}");
    let shorter = plan(&follows, machine(14)).advice;
    assert!(shorter.last().is_some_and(|advice| advice.contains("`sampling.num_frames = ")), "{shorter:?}");
}

#[test]
fn unknown_models_are_refused() {
    let settings = recipe("moving_shapes_cpu.toml", &["model.path=nowhere/at-all"]);
    let error = ModelSizes::of(&settings).expect_err("unknown").to_string();
    assert!(error.contains("nowhere/at-all") && error.contains("hint: "), "{error}");
}

/// A multiple of 16 is enough for an autoencoder of 8 pixels a latent, not for one of 16.
#[test]
fn sizes_that_the_model_cannot_make_are_refused() {
    let refused = |recipe_name: &str, change: &str| {
        let settings = recipe(recipe_name, &[change]);
        let model = ModelSizes::of(&settings).expect("known sizes");
        let text = TextLength { prompts: 0, tokens: 0, longest: 512, counted: false };
        Plan::new(&settings, &model, text, Machine::default()).expect_err(change).to_string()
    };
    let (wan21, wan22) = ("flash_grpo_wan_1_3b.toml", "flash_grpo_wan2_2_ti2v_5b.toml");
    for (name, change, expected) in [
        (wan22, "sampling.height=720", ["`sampling.height` is `720`: it must be a positive multiple of 32", "the nearest are 704 and 736"]),
        (wan22, "sampling.width=1296", ["`sampling.width` is `1296`", "the nearest are 1280 and 1312"]),
        (wan21, "sampling.width=16400", ["`sampling.width` is `16400`: the model reaches up to 16384", "the nearest is 16384"]),
        (wan21, "sampling.num_frames=4097", ["`sampling.num_frames` is `4097`: the model reaches up to 4093", "the nearest is 4093"]),
    ] {
        let error = refused(name, change);
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        assert!(error.starts_with("Wan") && error.contains("\nhint: "), "{error}");
    }
    plan(&recipe(wan21, &["sampling.height=720"]), Machine::default());
}

/// What the embedded model's folder says, counted with its tokenizer.
#[test]
fn text_is_counted_where_it_can_be() {
    let model: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/moving-shapes");
    let settings = recipe("moving_shapes_cpu.toml", &[&format!("model.path={:?}", model.display().to_string())]);
    let text = TextLength::of(&settings);
    assert!(text.counted && text.longest < 32 && text.prompts > 18, "{text:?}");
}
