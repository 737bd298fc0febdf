//! A reward that cannot judge every video: what it misses is left out and counted, and nothing that was trained is lost.
#![cfg(unix)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Brightness, but for prompts whose metadata says after how many of their videos it refuses.
const PROGRAM: &str = r#"
import base64, collections, json, sys

seen = collections.Counter()
for line in sys.stdin:
    scores = []
    for sample in json.loads(line)["samples"]:
        seen[sample["prompt"]] += 1
        limit = (sample.get("metadata") or {}).get("refuse_after")
        if limit is not None and seen[sample["prompt"]] > limit:
            scores.append({"id": sample["id"], "error": "the judge is tired of it"})
            continue
        values = b"".join(map(base64.b64decode, sample["frames"]["data"]))
        scores.append({"id": sample["id"], "value": sum(values) / len(values) / 255})
    print(json.dumps({"scores": scores}), flush=True)
"#;

/// Trains three short iterations into `FOLDER/run` with an evaluation after each; of four held-out prompts one is refused after `limit` videos.
fn train(folder: &Path, limit: usize, more: &[&str]) -> Output {
    std::fs::write(folder.join("program.py"), PROGRAM).expect("written");
    let refused = format!("{{\"prompt\": \"a red circle\", \"metadata\": {{\"refuse_after\": {limit}}}}}\n");
    let others = "{\"prompt\": \"a blue square\"}\n{\"prompt\": \"a green circle\"}\n{\"prompt\": \"a red square\"}\n";
    std::fs::write(folder.join("eval.jsonl"), refused + others).expect("written");
    let python = std::env::var("FLASH_GRPO_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    command.current_dir(root()).arg("train").arg("recipes/moving_shapes_cpu.toml").arg("--output-dir").arg(folder.join("run"));
    let program = folder.join("program.py");
    for set in [
        &format!("prompts.eval={:?}", folder.join("eval.jsonl").display().to_string()),
        &format!("reward=[{{ type = \"command\", command = [{python:?}, {:?}], encoding = \"raw\" }}]", program.display().to_string()),
        "train.iterations=3",
        "checkpoint.every=10",
        "rollout.prompts_per_iteration=2",
        "rollout.group_size=4",
        "rollout.micro_batch=4",
        "sampling.num_frames=5",
        "sampling.num_inference_steps=4",
        "method.stochastic={ type = \"random\", count = 1, pool = 2 }",
        "eval.num_prompts=4",
        "eval.samples_per_prompt=1",
        "eval.num_inference_steps=2",
        "eval.every=1",
        "eval.videos=1",
    ] {
        command.args(["--set", set]);
    }
    command.args(more).output().expect("the program runs")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn evaluations_go_on_without_it() {
    let folder = tempfile::tempdir().expect("folder");
    let output = train(folder.path(), 0, &["--set", "train.max_skipped=0.25"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let told = stderr(&output);
    let warning = "evaluation before: the reward of prompt 0 (`a red circle`) is missing: ";
    assert!(told.contains(warning) && told.contains("the judge is tired of it; it is left out"), "{told}");
    let text = std::fs::read_to_string(folder.path().join("run/summary.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!([&summary["num_prompts"], &summary["num_samples"], &summary["num_missing"]], [3, 3, 1]);
}

/// The evaluation after the second iteration fails, long before a checkpoint is due.
#[test]
fn an_evaluation_that_fails_loses_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    let strict = ["--set", "train.max_skipped=0", "--resume", "auto"];
    let output = train(folder.path(), 2, &strict);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("1 of 4 samples of the evaluation are not finite or have no reward"), "{}", stderr(&output));
    assert!(folder.path().join("run/checkpoints/iteration-000002").is_dir(), "{}", stderr(&output));
    let resumed = train(folder.path(), 2, &strict);
    assert!(resumed.status.success() && stderr(&resumed).contains("resumed after 2 iterations"), "{}", stderr(&resumed));
    let evals = std::fs::read_to_string(folder.path().join("run/eval.jsonl")).expect("evaluations");
    assert_eq!(evals.lines().count(), 2, "{evals}");
}
