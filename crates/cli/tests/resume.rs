//! A run that is killed, stopped, or finds its files damaged ends as if nothing had happened, byte for byte.
//!
//! `FLASH_GRPO_KILLS=100 cargo test --release -p flash-grpo --test resume` is the long form.
#![cfg(unix)]
#![allow(clippy::print_stderr)]

use grpo::random::{Key, Purpose, index_below};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const ITERATIONS: usize = 6;

/// What makes a run of the embedded recipe last a second or two.
const TINY: [&str; 14] = [
    "train.iterations=6",
    "checkpoint.every=1",
    "checkpoint.keep_last=3",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "rollout.micro_batch=4",
    "sampling.num_inference_steps=4",
    "method.stochastic={ type = \"random\", count = 1, pool = 2 }",
    "eval.num_prompts=2",
    "eval.samples_per_prompt=2",
    "eval.num_inference_steps=2",
    "eval.every=2",
    "eval.videos=1",
    "eval.bootstrap=100",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// `flash-grpo train` of the tiny run into `folder`, resumed where there is something to resume.
fn train(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    command.current_dir(root()).arg("train").arg("recipes/moving_shapes_cpu.toml");
    for set in TINY {
        command.args(["--set", set]);
    }
    command.arg("--output-dir").arg(folder).args(["--resume", "auto"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn finish(command: &mut Command) -> String {
    let output = command.output().expect("the program runs");
    assert!(output.status.success(), "{}", stderr(&output));
    stderr(&output)
}

/// Everything that must not depend on interruptions, by name. (Times do, and the recipe names its folder; the report shows both.)
fn result(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let newest = format!("checkpoints/iteration-{ITERATIONS:06}");
    let mut pending = vec![folder.to_path_buf()];
    while let Some(dir) = pending.pop() {
        for path in std::fs::read_dir(dir).expect("folder").map(|entry| entry.expect("entry").path()) {
            let name = path.strip_prefix(folder).expect("below").display().to_string();
            if path.is_dir() {
                pending.push(path);
            } else if !name.starts_with("checkpoints") || (name.starts_with(&newest) && !name.contains("/manifest.")) {
                files.insert(name, std::fs::read(path).expect("file"));
            }
        }
    }
    for varying in [".lock", "timings.jsonl", "summary.json", "recipe.toml", "report.html"] {
        files.remove(varying);
    }
    files
}

/// The result of the uninterrupted run, and how long it took.
fn reference() -> &'static (BTreeMap<String, Vec<u8>>, Duration) {
    static REFERENCE: OnceLock<(BTreeMap<String, Vec<u8>>, Duration)> = OnceLock::new();
    REFERENCE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("folder");
        let start = Instant::now();
        finish(&mut train(folder.path()));
        let result = result(folder.path());
        for name in ["metrics.jsonl", "eval.jsonl", "adapter/adapter_model.safetensors", "samples/after.png"] {
            assert!(result.contains_key(name), "{name} of {:?}", result.keys());
        }
        assert_eq!(String::from_utf8_lossy(&result["metrics.jsonl"]).lines().count(), ITERATIONS);
        (result, start.elapsed())
    })
}

#[track_caller]
fn assert_as_if_nothing_had_happened(folder: &Path) {
    let (expected, found) = (&reference().0, result(folder));
    assert_eq!(expected.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>());
    let different: Vec<_> = expected.iter().filter(|(name, bytes)| found[*name] != **bytes).map(|(name, _)| name).collect();
    assert!(different.is_empty(), "{different:?} differ");
}

#[test]
fn killed_at_random_moments() {
    let wanted: usize = std::env::var("FLASH_GRPO_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(10);
    let duration = reference().1.as_secs_f64();
    // moments that are random, and the same in every test run
    let mut rng = Key { seed: 1, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data }.rng();
    let mut kills = 0;
    while kills < wanted {
        let folder = tempfile::tempdir().expect("folder");
        let kills_before = kills;
        loop {
            let mut child = train(folder.path()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program runs");
            std::thread::sleep(Duration::from_secs_f64(duration * index_below(&mut rng, 10_000) as f64 / 10_000.0));
            if kills < wanted && kills < kills_before + 8 && child.try_wait().expect("child").is_none() {
                child.kill().expect("kill");
                child.wait().expect("child");
                kills += 1;
            } else {
                assert!(child.wait().expect("child").success());
                break;
            }
        }
        assert_as_if_nothing_had_happened(folder.path());
    }
}

#[test]
fn cut_off_while_writing() {
    for point in [
        "metrics:3",
        "checkpoint-files:2",
        "checkpoint-manifest:2",
        "checkpoint-replaced:1",
        "checkpoint-renamed:2",
        "checkpoint-renamed:6",
    ] {
        let folder = tempfile::tempdir().expect("folder");
        let output = train(folder.path()).env("FLASH_GRPO_ABORT_AT", point).output().expect("the program runs");
        assert!(!output.status.success(), "{point} was not passed");
        finish(&mut train(folder.path()));
        assert_as_if_nothing_had_happened(folder.path());
    }
}

/// Waits until the run has made an iteration.
fn wait_for_progress(folder: &Path, child: &mut Child) {
    let metrics = folder.join("metrics.jsonl");
    while std::fs::metadata(&metrics).map_or(0, |data| data.len()) == 0 {
        assert!(child.try_wait().expect("child").is_none(), "the run ended early");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn stopped_by_a_signal() {
    for (signal, code) in [("TERM", 143), ("INT", 130), ("USR1", 138)] {
        let folder = tempfile::tempdir().expect("folder");
        let mut child = train(folder.path()).spawn().expect("the program runs");
        wait_for_progress(folder.path(), &mut child);
        assert!(Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().expect("kill").success());
        let output = child.wait_with_output().expect("child");
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        let told = format!("hint: continue with `flash-grpo train --resume {}`", folder.path().display());
        assert!(stderr(&output).contains(&told), "{}", stderr(&output));
        // as told: the recipe is the run's own
        let mut resume = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
        resume.current_dir(root()).args(["train", "--resume"]).arg(folder.path());
        assert!(finish(&mut resume).contains("resumed after"));
        assert_as_if_nothing_had_happened(folder.path());
    }
}

/// The lock is there before the model is loaded: the signal comes during the self-checks or shortly before.
#[test]
fn stopped_before_the_first_iteration() {
    let folder = tempfile::tempdir().expect("folder");
    let child = train(folder.path()).spawn().expect("the program runs");
    while !folder.path().join(".lock").exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status().expect("kill").success());
    let output = child.wait_with_output().expect("child");
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    assert!(stderr(&output).contains("nothing was begun") || folder.path().join("recipe.toml").is_file(), "{}", stderr(&output));
    finish(&mut train(folder.path()));
    assert_as_if_nothing_had_happened(folder.path());
}

#[test]
fn damaged_checkpoints_are_named_and_passed_over() {
    let whole = tempfile::tempdir().expect("folder");
    finish(&mut train(whole.path()));
    let newest = format!("checkpoints/iteration-{ITERATIONS:06}");
    let mut names: Vec<_> =
        std::fs::read_dir(whole.path().join(&newest)).expect("checkpoint").map(|e| e.expect("entry").file_name()).collect();
    names.sort();
    assert!(names.len() >= 5, "{names:?}");
    for (i, name) in names.iter().enumerate() {
        let folder = tempfile::tempdir().expect("folder");
        copy(whole.path(), folder.path());
        let path = folder.path().join(&newest).join(name);
        let mut bytes = std::fs::read(&path).expect("file");
        let middle = bytes.len() / 2;
        if i % 2 == 0 {
            bytes.truncate(middle)
        } else {
            bytes[middle] ^= 4
        }
        std::fs::write(&path, bytes).expect("write");
        let told = finish(&mut train(folder.path()));
        assert!(told.contains("warning: checkpoint") && told.contains(&format!("`{}`", name.display())), "{name:?}: {told}");
        assert!(told.contains("resumed after 5 iterations"), "{told}");
        assert_eq!(result(folder.path()).get("metrics.jsonl"), reference().0.get("metrics.jsonl"));
        std::fs::remove_dir_all(folder.path().join("checkpoints")).expect("remove");
        copy(&whole.path().join("checkpoints"), &folder.path().join("checkpoints"));
        assert_as_if_nothing_had_happened(folder.path());
    }
}

/// What was made after the checkpoint that is resumed is another future: it is neither met again nor lost.
#[test]
fn resumed_from_an_earlier_checkpoint() {
    let folder = tempfile::tempdir().expect("folder");
    finish(&mut train(folder.path()));
    let checkpoints = folder.path().join("checkpoints");
    let mut resume = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    resume.current_dir(root()).args(["train", "--resume"]).arg(checkpoints.join("iteration-000004"));
    let told = finish(&mut resume);
    assert!(told.contains("resumed after 4 iterations") && told.contains("abandoned-iteration-000006"), "{told}");
    assert_as_if_nothing_had_happened(folder.path());
    assert!(checkpoints.join("abandoned-iteration-000005").is_dir() && checkpoints.join("abandoned-iteration-000006").is_dir());
    // and back: what took the place of the abandoned one makes room for it
    let mut resume = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    resume.current_dir(root()).args(["train", "--resume"]).arg(checkpoints.join("abandoned-iteration-000005"));
    assert!(finish(&mut resume).contains("resumed after 5 iterations"));
    assert_as_if_nothing_had_happened(folder.path());
    assert!(!checkpoints.join("abandoned-iteration-000005").is_dir() && checkpoints.join("abandoned-iteration-000005-2").is_dir());
}

/// A run goes on in another folder from a copy, and the first one stays as it is.
#[test]
fn resumed_in_another_folder() {
    let first = tempfile::tempdir().expect("folder");
    finish(train(first.path()).args(["--set", "train.iterations=4"]));
    let untouched = result(first.path());
    for source in [first.path().to_owned(), first.path().join("checkpoints/iteration-000003")] {
        let second = tempfile::tempdir().expect("folder");
        let resume = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
            command.current_dir(root()).args(["train", "--set", "train.iterations=6", "--resume"]).arg(&source);
            command.arg("--output-dir").arg(second.path());
            command
        };
        let told = finish(&mut resume());
        assert!(told.contains("resumed after"), "{told}");
        assert_as_if_nothing_had_happened(second.path());
        let again = resume().output().expect("the program runs");
        assert_eq!(again.status.code(), Some(2));
        assert!(stderr(&again).contains("it already holds files"), "{}", stderr(&again));
        assert_as_if_nothing_had_happened(second.path());
    }
    assert!(result(first.path()) == untouched, "the first folder was changed");
}

/// Nothing is begun over a run, however often the same command is given.
#[test]
fn a_run_without_checkpoints_is_not_begun_anew() {
    let folder = tempfile::tempdir().expect("folder");
    finish(&mut train(folder.path()));
    let checkpoints = folder.path().join("checkpoints");
    for checkpoint in std::fs::read_dir(&checkpoints).expect("checkpoints") {
        std::fs::remove_file(checkpoint.expect("entry").path().join("manifest.json")).expect("removed");
    }
    for _ in 0..2 {
        let refused = train(folder.path()).output().expect("the program runs");
        assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
        assert!(stderr(&refused).contains("`manifest.json`"), "{}", stderr(&refused));
    }
    std::fs::remove_dir_all(&checkpoints).expect("removed");
    let refused = train(folder.path()).output().expect("the program runs");
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("none of its checkpoints any more"), "{}", stderr(&refused));
    assert_eq!(std::fs::read_to_string(folder.path().join("metrics.jsonl")).expect("metrics").lines().count(), ITERATIONS);
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("folder");
    assert!(Command::new("cp").arg("-R").arg(from.join(".")).arg(to).status().expect("cp").success());
}

#[test]
fn one_folder_serves_one_process() {
    let folder = tempfile::tempdir().expect("folder");
    let mut first = train(folder.path()).spawn().expect("the program runs");
    wait_for_progress(folder.path(), &mut first);
    let second = train(folder.path()).output().expect("the program runs");
    assert_eq!(second.status.code(), Some(2));
    assert!(stderr(&second).contains("another process is writing to it"), "{}", stderr(&second));
    assert!(first.wait_with_output().expect("child").status.success());
    assert_as_if_nothing_had_happened(folder.path());
}

#[test]
fn changed_recipes_are_shown_and_refused() {
    let folder = tempfile::tempdir().expect("folder");
    finish(&mut train(folder.path()));
    let mut transcript = String::new();
    for (arguments, code) in [
        (vec!["--set", "optimizer.learning_rate=1e-3", "--set", "rollout.group_size=2"], 2),
        (vec!["--set", "train.iterations=7", "--set", "checkpoint.keep_last=1"], 0),
        (vec!["--set", "optimizer.learning_rate=1e-3", "--set", "train.iterations=8", "--allow-change"], 0),
    ] {
        let output = train(folder.path()).args(&arguments).output().expect("the program runs");
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        let lines = stderr(&output).replace(&folder.path().display().to_string(), "DIR");
        // measured numbers are not part of the transcript
        let kept = lines.lines().filter(|line| !line.starts_with("iteration ") && !line.starts_with("checks passed"));
        transcript += &format!("$ {}\n{}\nexit code {code}\n\n", arguments.join(" "), kept.collect::<Vec<_>>().join("\n"));
    }
    insta::assert_snapshot!(transcript);
}

/// The same names, but other prompts in the file.
#[test]
fn changed_prompts_are_named_and_refused() {
    let (folder, prompts) = (tempfile::tempdir().expect("folder"), tempfile::tempdir().expect("folder"));
    let file = prompts.path().join("prompts.txt");
    let write = |text: &str| std::fs::write(&file, text).expect("written");
    let run = |more: &[&str]| {
        let mut command = train(folder.path());
        command
            .args([
                "--set",
                &format!("prompts.train={file:?}"),
                "--set",
                "reward=[{ type = \"brightness\" }]",
                "--set",
                "train.iterations=1",
            ])
            .args(more);
        command.output().expect("the program runs")
    };
    write("a red circle\na blue square\n");
    assert!(run(&[]).status.success());
    write("a red circle\na blue triangle\n");
    let refused = run(&[]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    let message = stderr(&refused);
    assert!(
        message.contains("\n  prompts.train: other content than at the checkpoint\n") && message.contains("--allow-change"),
        "{message}"
    );
    let allowed = run(&["--allow-change"]);
    assert!(allowed.status.success() && stderr(&allowed).contains("prompts.train: other content"), "{}", stderr(&allowed));
}

/// Needs the right to mount; without it there is nothing to test with.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_the_last_checkpoint_whole() {
    let disk = tempfile::tempdir().expect("folder");
    let mount = |options: &str| {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(disk.path()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    if !mount("size=14m") {
        eprintln!("not run: this user may not mount a file system");
        return;
    }
    let folder = disk.path().join("run");
    let full = train(&folder).output().expect("the program runs");
    let enlarged = mount("remount,size=64m");
    let resumed = train(&folder).output().expect("the program runs");
    let outcome = std::panic::catch_unwind(|| {
        assert_eq!(full.status.code(), Some(2), "{}", stderr(&full));
        assert!(stderr(&full).contains("No space left on device") && stderr(&full).contains("hint: check free space"), "{}", stderr(&full));
        assert!(enlarged && resumed.status.success(), "{}", stderr(&resumed));
        assert!(stderr(&resumed).contains("resumed after"), "{}", stderr(&resumed));
        assert_as_if_nothing_had_happened(&folder);
    });
    assert!(Command::new("umount").arg(disk.path()).status().expect("umount").success());
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}
