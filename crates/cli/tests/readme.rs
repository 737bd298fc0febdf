//! Every command of the README, run in its order in a folder that holds what a clone holds.

use assert_cmd::Command;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The commands in the README's fenced blocks, continuation lines joined.
fn commands() -> Vec<String> {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("README.md");
    let fenced = readme.split("```").skip(1).step_by(2).filter(|block| block.starts_with("sh\n") || block.starts_with("text\n"));
    let joined: String = fenced.map(|block| block.split_once('\n').map_or("", |(_, rest)| rest).replace("\\\n", " ")).collect();
    joined.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// What makes a training run quick enough for a test.
const SHORT: &str =
    " --set train.iterations=1 --set rollout.prompts_per_iteration=2 --set eval.samples_per_prompt=1 --set eval.num_prompts=4";

/// `command`, as a shell runs it, with our program first on the path.
fn shell(command: &str, folder: &Path) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_flash-grpo"));
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Command::new("sh");
    shell.env("PATH", format!("{}:{path}", program.parent().expect("folder of the program").display()));
    shell.current_dir(folder).args(["-c", command]);
    shell
}

#[cfg(unix)]
#[test]
fn commands_of_the_readme_work() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for part in ["models", "recipes"] {
        std::os::unix::fs::symlink(root().join(part).canonicalize().expect(part), folder.path().join(part)).expect("link");
    }
    let mut ran = Vec::new();
    for command in commands() {
        let Some(command) = command.strip_prefix("cargo run --release -- ").or_else(|| command.strip_prefix("flash-grpo ")) else {
            assert!(command.is_empty() || command.starts_with("cargo "), "not a command: `{command}`");
            continue;
        };
        let name = command.split(' ').next().unwrap_or_default().to_owned();
        // hours; its parts are tested in crates/train/tests/pretrain.rs
        if name == "pretrain" {
            assert!(root().join(command.split(' ').nth(1).unwrap_or_default()).exists(), "{command}");
            continue;
        }
        // needs the hub; tests/download.rs has one on the loopback address
        if name == "download" {
            continue;
        }
        let short = match name.as_str() {
            "train" => SHORT.to_owned(),
            "compare" => format!("{SHORT} --seeds 1 --budget 1iterations").replace("--set train.iterations=1", ""),
            _ => String::new(),
        };
        let output = shell(&format!("flash-grpo {command}{short}"), folder.path()).output().expect("a shell");
        assert!(output.status.success(), "{command}\n{}", String::from_utf8_lossy(&output.stderr));
        ran.push(name);
    }
    for name in ["train", "sample", "eval", "inspect", "plan", "replay", "compare", "report", "reward"] {
        assert!(ran.iter().any(|ran| ran == name), "the README shows no `{name}`: {ran:?}");
    }
    let run = folder.path().join("runs/moving-shapes");
    for file in ["recipe.toml", "metrics.jsonl", "summary.json", "samples/before.png", "samples/after.png"] {
        assert!(run.join(file).is_file(), "{file}");
    }
    for file in ["adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors", "comfyui.safetensors"] {
        assert!(run.join("adapter").join(file).is_file(), "{file}");
    }
}
