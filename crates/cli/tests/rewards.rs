//! Training with rewards that live elsewhere, each against a real counterpart: a server, a program, a judge, a pickle server.

#![allow(clippy::print_stdout, reason = "a test that is skipped says so")]

use assert_cmd::Command;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

fn python() -> String {
    std::env::var("FLASH_GRPO_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

/// A Python process that says `listening on URL`, and ends with the value.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(arguments: &[&str], folder: &Path) -> Self {
        let mut command = std::process::Command::new(python());
        let mut child = command.args(arguments).current_dir(folder).stdout(Stdio::piped()).spawn().expect("python3 is on the path");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        let url = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("`{line}` is no address")).to_owned();
        Self { child, url }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two groups of four rollouts of four steps, two iterations.
const SMALL: &str = r#"
seed = 1
[model]
path = "models/moving-shapes"
[prompts]
train = "shapes:train"
eval = "shapes:held-out"
[sampling]
height = 64
width = 64
num_frames = 5
num_inference_steps = 4
[method]
name = "flash-grpo"
stochastic = { type = "random", count = 1, pool = 2 }
initial_noise = "shared-in-group"
[rollout]
prompts_per_iteration = 2
group_size = 4
micro_batch = 4
[policy]
type = "lora"
rank = 4
alpha = 8.0
target_modules = ["to_q", "to_v"]
[optimizer]
learning_rate = 1e-3
[train]
iterations = 2
ema_decay = 0.0
[eval]
num_prompts = 2
num_inference_steps = 4
videos = 1
"#;

/// Runs the recipe with `rewards` from the repository's folder; the adapter and the lines of metrics.jsonl.
fn train(folder: &Path, name: &str, rewards: &str) -> (Vec<u8>, Vec<Value>) {
    let recipe = folder.join(format!("{name}.toml"));
    let cache = format!("[scoring]\ncache = {:?}\n", folder.join("cache").display().to_string());
    let cache = if rewards.contains("[scoring]") { "" } else { &cache };
    std::fs::write(&recipe, format!("{SMALL}{cache}{rewards}")).expect("write");
    let run = folder.join(name);
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    let output = command.current_dir(root()).arg("train").arg(&recipe).arg("--output-dir").arg(&run).output().expect("runs");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    let adapter = std::fs::read(run.join("adapter/adapter_model.safetensors")).expect("the adapter");
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    (adapter, metrics.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect())
}

/// Mean byte of all frames: what the reference server is given to compute, and the programs below compute too.
const MEAN: &str = r#"
def mean(sample):
    values = b"".join(frame.rgb for frame in sample.frames)
    return {"value": sum(values) / len(values) / 255, "components": {"frames": len(sample.frames)}}
"#;

const PROGRAM: &str = r#"
import base64, json, sys

for line in sys.stdin:
    scores = []
    for sample in json.loads(line)["samples"]:
        values = b"".join(map(base64.b64decode, sample["frames"]["data"]))
        scores.append({"id": sample["id"], "value": sum(values) / len(values) / 255})
    print(json.dumps({"scores": scores}), flush=True)
"#;

/// Servers and programs that compute the same number train the same adapter, bit for bit; what they have scored once is kept.
#[test]
fn rewards_from_elsewhere_train() {
    let folder = tempfile::tempdir().expect("temporary folder");
    std::fs::write(folder.path().join("mine.py"), MEAN).expect("write");
    std::fs::write(folder.path().join("program.py"), PROGRAM).expect("write");
    let (tool, program) = (root().join("tools/reward_server.py"), folder.path().join("program.py"));
    let stub = |name: &str| root().join("crates/reward/tests/stubs").join(name).display().to_string();
    let server = Server::start(&[&tool.display().to_string(), "--function", "mine:mean", "--port", "0"], folder.path());
    let http = format!("[[reward]]\ntype = \"http\"\nurl = {:?}\nencoding = \"raw\"\nname = \"bright\"\n", server.url);
    let (by_server, metrics) = train(folder.path(), "http", &http);
    let parts = metrics[1]["reward_components"].as_object().expect("components");
    assert_eq!(parts.keys().collect::<Vec<_>>(), ["bright", "bright.frames"]);
    assert!(metrics.iter().all(|line| line["skipped_samples"] == 0 && line["reward_group_std"].as_f64().is_some_and(|std| std > 0.0)));

    let command = format!("[[reward]]\ntype = \"command\"\ncommand = [{:?}, {:?}]\nencoding = \"raw\"\n", python(), program);
    assert_eq!(train(folder.path(), "command", &command).0, by_server);

    let pickles = Server::start(&[&stub("pickle_server.py"), "floats"], folder.path());
    let pickle = format!("[[reward]]\ntype = \"flow-grpo\"\nurl = {:?}\nencoding = \"png\"\n", pickles.url);
    let (by_pickle, metrics) = train(folder.path(), "pickle", &pickle);
    assert!(metrics.iter().all(|line| line["skipped_samples"] == 0));
    assert!(!by_pickle.is_empty());

    let judge = Server::start(&[&stub("chat_server.py")], folder.path());
    let chat = format!(
        "[[reward]]\ntype = \"chat\"\nurl = \"{}/v1\"\nmodel = \"judge-vl\"\nprompt = \"How bright is {{prompt}}?\"\nencoding = \"png\"\nframes = {{ count = 2 }}\nscore = {{ json = \"score\" }}\n\
         [[reward]]\ntype = \"temporal-flicker\"\nweight = -0.5\n[[eval_reward]]\ntype = \"shapes\"\n",
        judge.url
    );
    let (by_judge, metrics) = train(folder.path(), "chat", &chat);
    assert!(metrics.iter().all(|line| line["skipped_samples"] == 0 && line["reward_components"]["temporal-flicker"].is_number()));
    assert_ne!(by_judge, by_server);
    let kept = std::fs::read_dir(folder.path().join("cache")).expect("values are kept").count();
    assert!(kept > 0);

    drop(server);
    let quick = http.replace("name = \"bright\"", "name = \"bright\"\nconnection = { budget_s = 1.0, connect_timeout_s = 0.5 }");
    let message = refused(folder.path(), "gone", &quick);
    assert!(message.contains("reward `bright`") && message.contains("hint: "), "{message}");
}

/// A stop does not wait for a server that takes its time: what was trained is in a checkpoint long before a scheduler loses patience.
#[cfg(unix)]
#[test]
fn a_stop_is_heard_while_a_server_hangs() {
    let folder = tempfile::tempdir().expect("temporary folder");
    // from the second iteration on
    let mine = "import os, time\n\ndef score(sample):\n    if os.path.exists('run/metrics.jsonl') and os.path.getsize('run/metrics.jsonl'):\n        open('hangs', 'w').close()\n        time.sleep(600)\n    return sum(sample.frames[0].rgb) / len(sample.frames[0].rgb)\n";
    std::fs::write(folder.path().join("mine.py"), mine).expect("write");
    let tool = root().join("tools/reward_server.py").display().to_string();
    let server = Server::start(&[&tool, "--function", "mine:score", "--port", "0"], folder.path());
    let (recipe, run) = (folder.path().join("recipe.toml"), folder.path().join("run"));
    let reward = format!(
        "[[reward]]\ntype = \"http\"\nurl = {:?}\nencoding = \"raw\"\nconnection = {{ request_timeout_s = 300, budget_s = 600 }}\n",
        server.url
    );
    std::fs::write(&recipe, format!("{SMALL}{reward}")).expect("write");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    command.current_dir(root()).arg("train").arg(&recipe).arg("--output-dir").arg(&run).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().expect("runs");
    while !folder.path().join("hangs").exists() {
        assert!(child.try_wait().expect("child").is_none(), "it ended before the server hung");
        std::thread::sleep(Duration::from_millis(20));
    }
    let asked = Instant::now();
    assert!(std::process::Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status().expect("kill").success());
    assert_eq!(child.wait().expect("ends").code(), Some(143));
    assert!(asked.elapsed() < Duration::from_secs(30), "{:?}", asked.elapsed());
    assert!(run.join("checkpoints/iteration-000001/manifest.json").is_file());
}

/// Several rewards, each on its own scale, and what each had to say; `steps` says what every denoising step contributed.
#[test]
fn several_rewards_are_normalised_within_groups() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let rewards = "[[reward]]\ntype = \"shapes\"\n[[reward]]\ntype = \"jpeg-incompressibility\"\nweight = -2.0\n";
    let (raw, _) = train(folder.path(), "raw", rewards);
    let cache = format!("cache = {:?}\n", folder.path().join("cache").display().to_string());
    let (normalised, metrics) =
        train(folder.path(), "normalised", &format!("{rewards}[scoring]\ncombination = \"group-normalised\"\n{cache}"));
    assert_ne!(raw, normalised);
    for line in &metrics {
        let correlation = |name: &str| line["reward_advantages"][name]["correlation"].as_f64().expect("a correlation");
        assert!(correlation("jpeg-incompressibility") < -0.5, "its weight of -2 decides: {line}");
        assert!(correlation("shapes").abs() <= 1.0 + 1e-9);
        let steps = line["steps"].as_object().expect("steps");
        let transitions: u64 = steps.values().map(|step| step["transitions"].as_u64().expect("a count")).sum();
        assert_eq!(transitions, 8, "every sample trains its one stochastic step: {line}");
        assert!(steps.iter().all(|(step, entry)| ["0", "1"].contains(&step.as_str()) && entry["gradient"].as_f64() > Some(0.0)));
    }
}

/// A network in ONNX in place of a server. Skipped without ONNX Runtime: `scripts/fetch_ocr.sh` fetches it.
#[test]
fn a_network_in_onnx_trains() {
    let library = root().join("models/ocr/libonnxruntime.so");
    if !library.is_file() {
        return println!("skipped: run scripts/fetch_ocr.sh to have {}", library.display());
    }
    let folder = tempfile::tempdir().expect("temporary folder");
    let scorer = root().join("crates/reward/tests/fixtures/scorer.onnx");
    let onnx =
        format!("[[reward]]\ntype = \"onnx\"\nmodel = {scorer:?}\nlibrary = {library:?}\nsize = [32, 32]\nframes = {{ count = 2 }}\n");
    let (adapter, metrics) = train(folder.path(), "onnx", &onnx);
    assert!(!adapter.is_empty());
    assert!(metrics.iter().all(|line| line["skipped_samples"] == 0 && line["reward_group_std"].as_f64().is_some_and(|std| std > 0.0)));
    // prompts of the moving shapes quote nothing that could be read
    let ocr = format!("[[reward]]\ntype = \"ocr\"\nrecogniser = {:?}\nlibrary = {library:?}\n", root().join("models/ocr/recogniser.onnx"));
    let message = refused(folder.path(), "ocr", &ocr);
    assert!(message.contains("reward `ocr` cannot score the prompt") && message.contains("double quotes"), "{message}");
}

/// A library that is not there is said before anything is loaded, with where to get it.
#[test]
fn a_missing_runtime_is_said() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let scorer = root().join("crates/reward/tests/fixtures/scorer.onnx");
    let message = refused(
        folder.path(),
        "missing",
        &format!("[[reward]]\ntype = \"onnx\"\nmodel = {scorer:?}\nlibrary = \"/nowhere/libonnxruntime.so\"\nsize = [8, 8]\n"),
    );
    assert!(message.contains("ONNX Runtime cannot be opened") && message.contains("pip download"), "{message}");
}

/// `reward check` of the recipe with `rewards`: its status, what it prints, and what it complains of.
fn check(folder: &Path, name: &str, rewards: &str) -> (Option<i32>, String, String) {
    let recipe = folder.join(format!("{name}.toml"));
    std::fs::write(&recipe, format!("{}{rewards}", SMALL.replace("num_frames = 5", "num_frames = 5\nfps = 12"))).expect("write");
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    let arguments = ["reward", "check", "--json", "--prompts", "2", "--samples-per-prompt", "2"];
    let output = command.current_dir(root()).args(arguments).arg(&recipe).output().expect("runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Videos are shown to a reward at the recipe's speed, in requests of the sizes that are told; one that scores nothing is an error.
#[test]
fn a_reward_is_checked() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mine = "def fps(sample):\n    return sample.fps\n\ndef fails(sample):\n    raise RuntimeError('no model')\n";
    std::fs::write(folder.path().join("mine.py"), mine).expect("write");
    let tool = root().join("tools/reward_server.py").display().to_string();
    let of = |function: &str| {
        let server = Server::start(&[&tool, "--function", &format!("mine:{function}"), "--port", "0"], folder.path());
        check(folder.path(), function, &format!("[[reward]]\ntype = \"http\"\nurl = {:?}\n", server.url))
    };
    let (status, printed, complaint) = of("fps");
    assert_eq!(status, Some(0), "{complaint}");
    let found: Value = serde_json::from_str(&printed).expect("JSON");
    let [good, bad] = ["good", "bad"].map(|side| found[0]["ranking"][0][side].as_f64());
    assert_eq!((good, bad), (Some(12.0), Some(12.0)), "{printed}");
    let sizes: Vec<u64> = found[0]["throughput"].as_array().expect("a table").iter().filter_map(|t| t["batch_size"].as_u64()).collect();
    assert_eq!(sizes, [1, 1, 4], "four videos");
    let (status, printed, complaint) = of("fails");
    assert_eq!(status, Some(2), "{printed}");
    assert!(complaint.contains("`http` could score no video") && complaint.contains("RuntimeError: no model"), "{complaint}");
}

/// What the command says of a recipe that it refuses before anything is trained.
fn refused(folder: &Path, name: &str, rewards: &str) -> String {
    let recipe = folder.join(format!("{name}.toml"));
    std::fs::write(&recipe, format!("{SMALL}{rewards}")).expect("write");
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    let output = command.current_dir(root()).arg("train").arg(&recipe).arg("--output-dir").arg(folder.join(name)).output().expect("runs");
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stderr).into_owned()
}
