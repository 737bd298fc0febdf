//! What a user who got something wrong is told: one message, exit code 2, and nothing has been trained.

use assert_cmd::Command;
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The transcript of calls that must all be refused.
struct Transcript {
    folder: tempfile::TempDir,
    text: String,
}

impl Transcript {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("temporary folder"), text: String::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        std::fs::write(self.path(name), content).expect("write");
        self.path(name)
    }

    /// Calls `flash-grpo` in the root of the repository; `DIR` in an argument stands for the temporary folder.
    #[track_caller]
    fn refuse(&mut self, arguments: &[&str]) {
        let folder = self.folder.path().display().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
        command.current_dir(root()).args(arguments.iter().map(|argument| argument.replace("DIR", &folder)));
        let output = command.output().expect("the program runs");
        let message = String::from_utf8(output.stderr).expect("UTF-8").replace(&folder, "DIR");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}\n{message}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(!message.contains("panicked"), "{message}");
        assert!(!self.path("run/metrics.jsonl").exists(), "{arguments:?} trained");
        let _ = writeln!(self.text, "$ flash-grpo {}\n{message}", arguments.join(" "));
    }
}

/// `train` with the built-in recipe and one value changed.
fn train(set: &str) -> [&str; 5] {
    ["train", "--output-dir", "DIR/run", "--set", set]
}

#[test]
fn recipes() {
    let mut t = Transcript::new();
    for set in [
        "sampling.num_frame=9",
        "trian.iterations=9",
        "train.iterations=many",
        "train.iterations",
        "sampling.num_frames=10",
        "sampling.height=60",
        "rollout.group_size=1",
        "method.stochastic={ type = \"random\", count = 1, pool = 10 }",
        "method.name=\"flash-grop\"",
        "policy.target_modules=[\"to_z\"]",
        "prompts.negative=\"dark\\u0007\"",
    ] {
        t.refuse(&train(set));
    }
    t.refuse(&["train", "DIR/nowhere.toml"]);
    t.write("half.toml", "[model]\npath = \"models/moving-shapes\n");
    t.refuse(&["train", "DIR/half.toml"]);
    t.refuse(&["pretrain", "recipes/moving_shapes_cpu.toml"]);
    insta::assert_snapshot!(t.text);
}

#[test]
fn prompts() {
    let mut t = Transcript::new();
    t.write("empty.txt", "# nothing but a comment\n\n");
    t.write("control.txt", "a red circle moves right\na blue\u{8} square moves up\n");
    t.write("foreign.txt", "a red circle moves right\na zebra gallops\n");
    for file in ["empty.txt", "control.txt", "foreign.txt", "missing.txt"] {
        t.refuse(&train(&format!("prompts.train=\"DIR/{file}\"")));
    }
    insta::assert_snapshot!(t.text);
}

/// A copy of the embedded model in the temporary folder.
fn copy_model(t: &Transcript, name: &str) -> PathBuf {
    let (from, to) = (root().join("models/moving-shapes"), t.path(name));
    for part in ["", "transformer", "vae", "text_encoder", "tokenizer", "scheduler"] {
        std::fs::create_dir_all(to.join(part)).expect("folder");
        for entry in std::fs::read_dir(from.join(part)).expect("model folder").flatten() {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), to.join(part).join(entry.file_name())).expect("copy");
            }
        }
    }
    to
}

const WEIGHTS: &str = "transformer/diffusion_pytorch_model.safetensors";

#[test]
fn models() {
    let mut t = Transcript::new();
    t.refuse(&train("model.path=\"DIR/nowhere\""));
    std::fs::remove_file(copy_model(&t, "no-vae").join("vae/config.json")).expect("remove");
    t.refuse(&train("model.path=\"DIR/no-vae\""));
    std::fs::remove_file(copy_model(&t, "no-weights").join(WEIGHTS)).expect("remove");
    t.refuse(&train("model.path=\"DIR/no-weights\""));

    let weights = std::fs::read(root().join("models/moving-shapes").join(WEIGHTS)).expect("weights");
    let header_len = u64::from_le_bytes(weights[..8].try_into().expect("8 bytes")) as usize;
    std::fs::write(copy_model(&t, "truncated").join(WEIGHTS), &weights[..weights.len() / 2]).expect("write");
    t.refuse(&train("model.path=\"DIR/truncated\""));
    std::fs::write(copy_model(&t, "tiny").join(WEIGHTS), &weights[..5]).expect("write");
    t.refuse(&train("model.path=\"DIR/tiny\""));

    let mut lying = weights.clone();
    lying[..8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    std::fs::write(copy_model(&t, "lying").join(WEIGHTS), &lying).expect("write");
    t.refuse(&train("model.path=\"DIR/lying\""));

    // offsets beyond the end of the file, in a header of the same length
    let header = String::from_utf8(weights[8..8 + header_len].to_vec()).expect("UTF-8");
    let at = header.find("\"data_offsets\":[").expect("offsets") + "\"data_offsets\":[".len();
    let comma = at + header[at..].find(',').expect("comma");
    let end = comma + header[comma..].find(']').expect("bracket");
    let beyond = format!("{}{}{}", &header[..=comma], "9".repeat(end - comma - 1), &header[end..]);
    let bytes = [&weights[..8], beyond.as_bytes(), &weights[8 + header_len..]].concat();
    std::fs::write(copy_model(&t, "beyond").join(WEIGHTS), bytes).expect("write");
    t.refuse(&train("model.path=\"DIR/beyond\""));

    let narrow = copy_model(&t, "narrow").join("transformer/config.json");
    let config = std::fs::read_to_string(&narrow).expect("config");
    assert!(config.contains("\"ffn_dim\": 512"), "{config}");
    std::fs::write(&narrow, config.replace("\"ffn_dim\": 512", "\"ffn_dim\": 256")).expect("write");
    t.refuse(&train("model.path=\"DIR/narrow\""));
    insta::assert_snapshot!(t.text);
}

#[test]
fn adapters() {
    let mut t = Transcript::new();
    let eval = |path: &'static str| ["eval", "recipes/moving_shapes_cpu.toml", "--lora", path];
    t.refuse(&eval("DIR/nowhere"));
    t.write("noise.safetensors", [7_u8; 64]);
    t.refuse(&eval("DIR/noise.safetensors"));
    // an adapter of another model
    t.refuse(&eval("golden/lora/peft"));
    t.write("rollouts.safetensors", [0_u8; 3]);
    t.refuse(&["replay", "DIR/rollouts.safetensors", "--model", "models/moving-shapes"]);
    t.refuse(&["replay", "models/moving-shapes/vae/diffusion_pytorch_model.safetensors", "--model", "models/moving-shapes"]);
    // all weights would be trained
    t.refuse(&["replay", "DIR/rollouts.safetensors", "--model", "models/moving-shapes", "--mixed-precision", "bf16"]);
    insta::assert_snapshot!(t.text);
}

#[test]
fn output_folders() {
    let mut t = Transcript::new();
    std::fs::create_dir(t.path("other")).expect("folder");
    t.write("other/summary.json", "{}");
    t.refuse(&["train", "--output-dir", "DIR/other"]);
    t.write("file", "");
    t.refuse(&["train", "--output-dir", "DIR/file/run"]);
    #[cfg(target_os = "linux")]
    t.refuse(&["train", "--output-dir", "/proc/run"]);
    insta::assert_snapshot!(t.text);
}
