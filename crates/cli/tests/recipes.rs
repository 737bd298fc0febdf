//! Recipes as a user meets them: those that ship, the page about their keys, and what the command line makes of them.

use assert_cmd::Command;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Output;
use train::settings::Settings;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    command.current_dir(root()).args(arguments).output().expect("the program runs")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_recipe_for_one_gpu_fits_into_24_gib() {
    let plan = run(&["plan", "recipes/flash_grpo_wan_1_3b_one_gpu.toml", "--device-memory", "24GiB"]);
    let told = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(told.contains("fits into 24.0 GiB"), "{told}{}", stderr(&plan));
}

/// One entry of every kind of reward, with every key that may be left out.
const REWARDS: &str = r#"
[[reward]]
type = "http"
url = "http://127.0.0.1:8000"
name = "http"
limits = [0, 1]
cache = false
shared_folder = "/dev/shm"

[[reward]]
type = "command"
command = ["true"]
shared_folder = "/dev/shm"
version = "1"

[[reward]]
type = "chat"
url = "http://127.0.0.1:8000/v1"
model = "judge"
prompt = "{prompt}"
system = "You are a judge."
score = "yes_probability"
range = [0, 1]
seed = 1
api_key_env = "KEY"

[[reward]]
type = "flow-grpo"
url = "http://127.0.0.1:8000"
version = "1"
extra = { only_strict = true }

[[reward]]
type = "onnx"
model = "scorer.onnx"
library = "libonnxruntime.so"
size = [8, 8]

[[reward]]
type = "ocr"
recogniser = "rec.onnx"
detector = "det.onnx"
library = "libonnxruntime.so"

[[eval_reward]]
type = "brightness"
"#;

/// Every key that a recipe can have, as `section.key`.
fn keys_of_the_program() -> BTreeSet<String> {
    let default = std::fs::read_to_string(root().join("recipes/moving_shapes_cpu.toml")).expect("recipe");
    let overrides = [
        "model.embedding_cache=runs/embeddings",
        "sampling.guidance_scale_2=3",
        "sampling.vae_tiling=true",
        "method.kl_mask=1e-4",
        "rollout.compressed_suffix=2",
    ];
    let settings = Settings::parse("every key", &format!("{default}\n{REWARDS}"), &overrides.map(str::to_owned)).expect("a recipe");
    let recipe = serde_json::to_value(&settings).expect("a table");
    let mut keys = BTreeSet::new();
    for (section, value) in recipe.as_object().expect("a table") {
        let tables = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        for table in tables {
            let Some(table) = table.as_object() else {
                keys.insert(section.clone());
                continue;
            };
            let section = if section == "eval_reward" { "reward" } else { section };
            keys.extend(table.keys().map(|key| format!("{section}.{key}")));
            let connection = table.get("connection").and_then(|connection| connection.as_object());
            keys.extend(connection.into_iter().flat_map(|table| table.keys().map(|key| format!("{section}.{key}"))));
        }
    }
    keys
}

/// What stands in back quotes in the first column of a table, under the section of its heading.
fn keys_of_the_page() -> BTreeSet<String> {
    let page = std::fs::read_to_string(root().join("docs/recipe.md")).expect("docs/recipe.md");
    let mut keys = BTreeSet::new();
    let mut section = String::new();
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let name: String = heading.split(']').next().unwrap_or_default().chars().filter(|c| c.is_alphanumeric() || *c == '_').collect();
            section = if heading.starts_with('`') { format!("{name}.") } else { String::new() };
        }
        let Some(first) = line.strip_prefix("| `").map(|rest| rest.split(" |").next().unwrap_or_default()) else { continue };
        keys.extend(first.split("`, `").map(|key| format!("{section}{}", key.trim_matches('`'))));
    }
    keys
}

#[test]
fn every_key_is_explained() {
    let (program, page) = (keys_of_the_program(), keys_of_the_page());
    assert!(program.len() > 100, "{program:?}");
    let missing: Vec<_> = program.difference(&page).collect();
    let unknown: Vec<_> = page.difference(&program).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "docs/recipe.md lacks {missing:?}, and explains {unknown:?}, which do not exist");
}

#[test]
fn another_method_over_a_recipe_tells_which_choices_stay() {
    let told = stderr(&run(&["inspect", "--set", "method.name=flow-grpo"]));
    insta::assert_snapshot!("another_method", told);
    for quiet in [
        &["--set", "method.name=flash-grpo"][..],
        &["--set", "method.name=flow-grpo", "--set", "method.stochastic={type=\"all\"}", "--set", "method.initial_noise=independent"],
        &["recipes/flash_grpo_wan_1_3b.toml", "--set", "method.name=flow-grpo"],
    ] {
        let told = stderr(&run(&[&["inspect"], quiet].concat()));
        assert!(told.is_empty(), "{quiet:?}: {told}");
    }
}

/// What was to be continued must not become a run of the embedded recipe.
#[test]
fn resuming_nothing_is_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let name = folder.path().display().to_string();
    let mut told = String::new();
    for arguments in [&["train", "--resume"][..], &["train", "--output-dir", &name, "--resume", "auto"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let line = format!("$ flash-grpo {}\n{}\n", arguments.join(" "), stderr(&output));
        told.push_str(&line.replace(&name, "DIR"));
    }
    insta::assert_snapshot!("resuming_nothing", told);
    assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 0);
}
