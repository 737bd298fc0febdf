//! The `command` kind against Python processes.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{clips, mean_byte, python};
use reward::command::{CommandReward, CommandSettings};
use reward::{Reward, Sample, Scored, Stop};

/// What a user writes, in full.
const MEAN: &str = r#"
import base64, json, sys

for line in sys.stdin:
    scores = []
    for sample in json.loads(line)["samples"]:
        values = b"".join(map(base64.b64decode, sample["frames"]["data"]))
        scores.append({"id": sample["id"], "value": sum(values) / len(values) / 255})
    print(json.dumps({"scores": scores}), flush=True)
"#;

/// The same with something else before each answer.
fn with(before: &str) -> String {
    let lines: String = before.lines().map(|line| format!("    {line}\n")).collect();
    MEAN.replace("import base64", "import base64, os, signal, time").replace("    scores = []\n", &format!("{lines}    scores = []\n"))
}

fn reward(folder: &Path, script: &str, change: impl FnOnce(&mut CommandSettings)) -> CommandReward {
    let path = folder.join("reward.py");
    std::fs::write(&path, script).expect("write");
    let mut settings = CommandSettings::new(&[&python(), &path.display().to_string()]);
    settings.timeout_s = 20.0;
    change(&mut settings);
    CommandReward::new(settings).expect("settings")
}

fn score(reward: &CommandReward, count: usize) -> Vec<Scored> {
    let clips = clips(count);
    let batch: Vec<Sample<'_>> = clips.iter().map(|(prompt, frames)| Sample::new(prompt, frames)).collect();
    reward.score(&batch)
}

fn assert_means(scores: &[Scored]) {
    for ((_, frames), score) in clips(scores.len()).iter().zip(scores) {
        let value = score.as_ref().expect("a score").value;
        assert!((value - mean_byte(frames)).abs() < 1e-12);
    }
}

#[test]
fn several_processes_share_the_work() {
    let folder = tempfile::tempdir().expect("folder");
    let reward = reward(folder.path(), MEAN, |settings| (settings.processes, settings.batch_size) = (3, 2));
    reward.prepare().expect("it starts");
    assert_means(&score(&reward, 11));
    assert_means(&score(&reward, 3));
}

#[test]
fn a_process_that_dies_is_started_again_and_no_sample_is_lost() {
    let folder = tempfile::tempdir().expect("folder");
    // Every third request kills the process, counted in a file across its lives.
    let dies = with("open('count', 'a').write('x')\nif os.path.getsize('count') % 3 == 0: os.kill(os.getpid(), signal.SIGKILL)");
    let dies = dies.replace("'count'", &format!("{:?}", folder.path().join("count").display().to_string()));
    assert_means(&score(&reward(folder.path(), &dies, |_| {}), 9));
}

#[test]
fn a_process_that_always_dies_is_given_up_with_its_last_words() {
    let folder = tempfile::tempdir().expect("folder");
    let reward = reward(folder.path(), "import sys\nsys.stdin.readline()\nraise SystemExit('the model is not there')\n", |_| {});
    let scores = score(&reward, 8);
    let error = scores[0].as_ref().expect_err("it died").to_string();
    assert!(error.contains("the process ended before it answered (exit status: 1); it last said: the model is not there"), "{error}");
    let last = scores[7].as_ref().expect_err("it died").to_string();
    assert!(last.contains("not asked: 3 calls in a row have failed"), "the breaker: {last}");
}

#[test]
fn a_program_that_ends_at_once_is_said_before_a_run() {
    let reward = CommandReward::new(CommandSettings::new(&["sh", "-c", "echo no such script >&2; exit 2"])).expect("settings");
    let error = reward.prepare().expect_err("it ended").to_string();
    assert!(error.contains("the process ended at once, before it was asked (exit status: 2); it last said: no such script"), "{error}");
}

#[test]
fn a_process_that_hangs_is_killed_with_what_it_started() {
    let folder = tempfile::tempdir().expect("folder");
    let pids = folder.path().join("pids");
    let hangs = with(&format!(
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nopen({:?}, 'a').write(f'{{os.getpid()}} {{child.pid}} ')\ntime.sleep(600)",
        pids.display().to_string()
    ));
    let reward = reward(folder.path(), &hangs, |settings| (settings.timeout_s, settings.restarts) = (4.0, 0));
    let start = Instant::now();
    let error = score(&reward, 1).remove(0).expect_err("it hangs").to_string();
    assert!(error.contains("no answer within 4.0 s; the process is killed"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    let pids: Vec<String> = std::fs::read_to_string(pids).expect("pids").split_whitespace().map(str::to_owned).collect();
    assert_eq!(pids.len(), 2, "the process and what it started");
    std::thread::sleep(Duration::from_millis(200));
    let alive = |pid: &String| std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    assert!(!pids.iter().any(alive), "{pids:?}");
}

#[test]
fn chatter_on_standard_output_is_no_answer() {
    let folder = tempfile::tempdir().expect("folder");
    let chatty = with("print('loading the model ... 100 %', flush=True)");
    assert_means(&score(&reward(folder.path(), &chatty, |_| {}), 3));
}

#[test]
fn a_process_that_answers_twice_is_replaced_before_its_answers_are_mixed_up() {
    let folder = tempfile::tempdir().expect("folder");
    let twice = MEAN.replace(
        "    print(json.dumps({\"scores\": scores}), flush=True)",
        "    print((json.dumps({\"scores\": scores}) + \"\\n\") * 2, flush=True)",
    );
    assert!(twice.contains("* 2"));
    assert_means(&score(&reward(folder.path(), &twice, |_| {}), 6));
}

#[test]
fn endless_output_is_bounded() {
    let folder = tempfile::tempdir().expect("folder");
    let endless = with("while True: sys.stdout.write('{' + 'x' * 65536)");
    let error = score(&reward(folder.path(), &endless, |settings| settings.restarts = 0), 1).remove(0).expect_err("too much").to_string();
    assert!(error.contains("an answer is longer than 16 MiB"), "{error}");
}

#[test]
fn a_program_that_is_not_there_is_said_before_a_run() {
    let reward = CommandReward::new(CommandSettings::new(&["no-such-program"])).expect("settings");
    let error = reward.prepare().expect_err("nothing to start").to_string();
    assert!(error.starts_with("reward `command`: cannot start `no-such-program`: "), "{error}");
    assert!(error.contains("\nhint: "), "{error}");
}

#[test]
fn identity_changes_with_the_script() {
    let folder = tempfile::tempdir().expect("folder");
    let first = reward(folder.path(), MEAN, |_| {}).identity();
    assert_eq!(first, reward(folder.path(), MEAN, |_| {}).identity());
    assert_ne!(first, reward(folder.path(), &with("pass"), |_| {}).identity());
}

#[test]
fn a_request_to_stop_ends_the_wait() {
    let folder = tempfile::tempdir().expect("folder");
    let flag = Arc::new(AtomicUsize::new(0));
    let reward = reward(folder.path(), &with("time.sleep(600)"), |settings| settings.timeout_s = 60.0).with_stop(Stop::new(flag.clone()));
    let start = Instant::now();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        flag.store(15, Ordering::Relaxed);
    });
    let error = score(&reward, 3).remove(0).expect_err("stopped").to_string();
    assert!(error.contains("given up: the run was asked to stop"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}
