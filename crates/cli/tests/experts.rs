//! A model with two networks through the whole program: training, resuming, recording and replaying, sampling, evaluating.

#[path = "../../wan/tests/common/experts.rs"]
mod folders;

use assert_cmd::Command;
use folders::two_experts;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;
use wan::weights::WeightFiles;

/// Of the timesteps 999, 899, 749, 499 the first is the first network's.
const BOUNDARY: f64 = 0.9;

const TINY: [&str; 15] = [
    "train.iterations=3",
    "train.ema_every=1",
    "checkpoint.every=1",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "rollout.micro_batch=4",
    "sampling.num_inference_steps=4",
    "sampling.guidance_scale=3",
    "sampling.guidance_scale_2=2",
    "method.stochastic={ type = \"random\", count = 1, pool = 2 }",
    "eval.num_prompts=2",
    "eval.num_inference_steps=4",
    "eval.videos=1",
    "debug.save_rollouts=true",
    "reward=[{ type = \"brightness\" }]",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn model() -> tempfile::TempDir {
    two_experts(&root().join("models/moving-shapes"), BOUNDARY)
}

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    command.current_dir(root()).args(arguments);
    command
}

/// `--set` of the tiny run on a model.
fn tiny(model: &Path) -> Vec<String> {
    let path = format!("model.path={:?}", model.display().to_string());
    TINY.map(str::to_owned).into_iter().chain([path]).flat_map(|change| ["--set".to_owned(), change]).collect()
}

fn train(model: &Path, run: &Path) -> Command {
    let mut command = program(&["train", "recipes/moving_shapes_cpu.toml"]);
    command.args(tiny(model)).arg("--output-dir").arg(run).args(["--resume", "auto"]);
    command
}

#[track_caller]
fn finish(command: &mut Command) -> Output {
    let output = command.output().expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Adapters, logs and recorded rollouts of a run.
fn result(run: &Path) -> BTreeMap<&'static str, Vec<u8>> {
    let files = [
        "metrics.jsonl",
        "rollouts-000000.safetensors",
        "rollouts-000002.safetensors",
        "adapter/adapter_model.safetensors",
        "adapter/pytorch_lora_weights.safetensors",
        "adapter/transformer_2/adapter_config.json",
        "adapter/transformer_2/adapter_model.safetensors",
        "adapter/transformer_2/pytorch_lora_weights.safetensors",
        "adapter/transformer_2/comfyui.safetensors",
        "samples/after.png",
        "checkpoints/iteration-000003/training_state.safetensors",
        "checkpoints/iteration-000003/transformer_2/adapter_model.safetensors",
    ];
    files.map(|file| (file, std::fs::read(run.join(file)).unwrap_or_else(|e| panic!("{file}: {e}")))).into()
}

/// Largest magnitude of the weights that start at zero.
fn moved(adapter: &Path) -> f32 {
    let files = WeightFiles::open_file(&adapter.join("adapter_model.safetensors")).expect("adapter");
    let values = files.names().filter(|name| name.ends_with("lora_B.weight")).flat_map(|name| files.floats(name).expect("values"));
    values.fold(0.0, |most, value| most.max(value.abs()))
}

#[test]
fn a_run_trains_both_networks_and_resumes_exactly() {
    let (model, runs) = (model(), tempfile::tempdir().expect("folder"));
    let (whole, broken) = (runs.path().join("whole"), runs.path().join("broken"));
    let told = finish(&mut train(model.path(), &whole));
    let stderr = String::from_utf8_lossy(&told.stderr);
    assert!(stderr.contains("; steps of `transformer`: 0; of `transformer_2`: 1"), "{stderr}");
    let stdout = String::from_utf8_lossy(&told.stdout);
    let line = format!("pipe.load_lora_weights(\"{}\", load_into_transformer_2=True)", whole.join("adapter/transformer_2").display());
    assert!(stdout.contains(&line), "{stdout}");
    for adapter in ["adapter", "adapter/transformer_2"] {
        assert!(moved(&whole.join(adapter)) > 0.0, "{adapter} has not learned");
    }
    assert_ne!(result(&whole)["adapter/adapter_model.safetensors"], result(&whole)["adapter/transformer_2/adapter_model.safetensors"]);

    let cut = train(model.path(), &broken).env("FLASH_GRPO_ABORT_AT", "checkpoint-renamed:2").output().expect("runs");
    assert!(!cut.status.success());
    finish(&mut train(model.path(), &broken));
    let (whole_files, broken_files) = (result(&whole), result(&broken));
    let different: Vec<_> = whole_files.iter().filter(|(name, bytes)| broken_files[*name] != **bytes).map(|(name, _)| name).collect();
    assert!(different.is_empty(), "{different:?} differ");

    // the first iteration's transitions under the base: adapters that change nothing, as at its start
    let recorded = whole.join("rollouts-000000.safetensors");
    let replay = |more: &[&str]| -> serde_json::Value {
        let mut command = program(&["replay", "--updates", "0", "--json", "--model"]);
        let output = finish(command.arg(model.path()).arg(&recorded).args(more));
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let deviation = |replayed: &serde_json::Value| {
        let ratios = replayed["updates"][0]["ratio"].as_array().expect("ratios").iter().filter_map(serde_json::Value::as_f64);
        ratios.map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max)
    };
    assert!(deviation(&replay(&[])) < 1e-6, "{}", deviation(&replay(&[])));
    let adapter = whole.join("adapter").display().to_string();
    let trained = replay(&["--lora", &adapter]);
    assert!(deviation(&trained) > 1e-6);

    // sampling and evaluation take both adapters from one folder
    let latents = |name: &str, more: &[&str]| {
        let (video, latents) = (runs.path().join(format!("{name}.gif")), runs.path().join(format!("{name}.safetensors")));
        let mut command = program(&["sample", "--prompt", "a red circle moves right", "--num-inference-steps", "4"]);
        command.args(["--height", "32", "--width", "32", "--num-frames", "5", "--guidance-scale", "3"]);
        finish(command.arg("--model").arg(model.path()).arg("--output").arg(video).arg("--save-latents").arg(&latents).args(more));
        WeightFiles::open_file(&latents).expect("latents").floats("latents").expect("values")
    };
    let base = latents("base", &[]);
    assert_ne!(base, latents("scale", &["--guidance-scale-2", "2"]));
    let both = latents("both", &["--lora", &adapter]);
    let second = whole.join("adapter/transformer_2").display().to_string();
    assert_ne!(base, both);
    assert_eq!(both, latents("named", &["--lora", &adapter, "--lora-2", &second]));
    let mut command = program(&["eval", "recipes/moving_shapes_cpu.toml", "--json", "--lora", &adapter]);
    let evaluated: serde_json::Value = serde_json::from_slice(&finish(command.args(tiny(model.path()))).stdout).expect("JSON");
    assert_ne!(evaluated["eval_reward_difference"].as_f64(), Some(0.0));
}

#[test]
fn a_second_scale_needs_a_second_network() {
    let runs = tempfile::tempdir().expect("folder");
    for command in ["train", "inspect", "plan"] {
        let mut program = program(&[command, "recipes/moving_shapes_cpu.toml", "--set", "sampling.guidance_scale_2=2"]);
        if command == "train" {
            program.arg("--output-dir").arg(runs.path().join("run"));
        }
        let output = program.output().expect("runs");
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command}: {message}");
        assert_eq!(
            message,
            "error: models/moving-shapes: `sampling.guidance_scale_2` is `2`, but the model has one transformer\n\
             hint: leave it out: `sampling.guidance_scale` is that of every step\n",
            "{command}"
        );
    }
}
