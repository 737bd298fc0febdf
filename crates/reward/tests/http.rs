//! The `http` kind against the reference server, a process of its own.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Server, clips, mean_byte, mean_byte_of, quick, reward_server};
use reward::http::{HttpReward, HttpSettings};
use reward::{Aggregation, Encoding, FrameSelection, Reward, Sample};

const MEAN: &str = r#"
def mean(sample):
    values = b"".join(frame.rgb for frame in sample.frames)
    return {"value": sum(values) / len(values) / 255, "components": {"frames": len(sample.frames), "fps": sample.fps}}

def per_frame(sample):
    return [sum(frame.rgb) / len(frame.rgb) / 255 for frame in sample.frames]

def moody(sample):
    if "red" in sample.prompt:
        raise ValueError("no red, please")
    return float("nan") if "blue" in sample.prompt else 0.5

def batch(samples):
    return [len(samples)] * len(samples)

def leaves(sample):
    raise SystemExit("no model")
"#;

fn server(folder: &Path, function: &str, more: &[&str]) -> Server {
    std::fs::write(folder.join("mine.py"), MEAN).expect("write");
    let (script, function) = (reward_server(), format!("mine:{function}"));
    let arguments = [&[script.as_str(), "--function", &function, "--port", "0"], more].concat();
    Server::python(&arguments, folder)
}

fn values(reward: &HttpReward, clips: &[(String, video::Frames)]) -> Vec<f64> {
    let batch: Vec<Sample<'_>> = clips.iter().map(|(prompt, frames)| Sample::new(prompt, frames)).collect();
    reward.score(&batch).into_iter().map(|score| score.expect("a score").value).collect()
}

fn close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12)
}

#[test]
fn every_lossless_way_of_sending_frames_gives_the_same_scores() {
    let folder = tempfile::tempdir().expect("folder");
    let server = server(folder.path(), "mean", &[]);
    let clips = clips(7);
    let expected: Vec<f64> = clips.iter().map(|(_, frames)| mean_byte(frames)).collect();
    for (encoding, shared, batch_size, concurrency) in
        [(Encoding::Raw, false, 3, 1), (Encoding::Raw, false, 1, 4), (Encoding::Png, false, 2, 2), (Encoding::Raw, true, 4, 2)]
    {
        let shared_folder = shared.then(|| folder.path().to_owned());
        let settings =
            HttpSettings { encoding, shared_folder, batch_size, concurrency, connection: quick(), ..HttpSettings::new(&server.url) };
        let reward = HttpReward::new(settings).expect("settings");
        reward.prepare().expect("the server is there");
        assert!(close(&values(&reward, &clips), &expected), "{encoding:?} {shared}");
    }
    let left = std::fs::read_dir(folder.path()).expect("folder").filter_map(Result::ok);
    assert!(left.into_iter().all(|file| !file.file_name().to_string_lossy().ends_with(".rgb")), "shared frames are cleaned up");
}

#[test]
fn frames_are_selected_here_and_their_values_aggregated_here() {
    let folder = tempfile::tempdir().expect("folder");
    let server = server(folder.path(), "per_frame", &[]);
    let clips = clips(2);
    let settings = HttpSettings {
        frames: FrameSelection::Every(2),
        aggregate: Aggregation::Last,
        connection: quick(),
        ..HttpSettings::new(&server.url)
    };
    let reward = HttpReward::new(settings).expect("settings");
    let expected: Vec<f64> = clips.iter().map(|(_, frames)| mean_byte_of(frames, &[4])).collect();
    assert!(close(&values(&reward, &clips), &expected));
}

#[test]
fn a_sample_that_fails_is_an_error_of_its_own() {
    let folder = tempfile::tempdir().expect("folder");
    let server = server(folder.path(), "moody", &[]);
    let (_, frames) = clips(1).remove(0);
    let reward = HttpReward::new(HttpSettings { batch_size: 3, connection: quick(), ..HttpSettings::new(&server.url) }).expect("settings");
    let batch = ["a red circle moves up", "a blue circle moves up", "a green circle moves up"].map(|prompt| Sample::new(prompt, &frames));
    let scores: Vec<Result<f64, String>> =
        reward.score(&batch).into_iter().map(|s| s.map(|s| s.value).map_err(|e| e.to_string())).collect();
    let red = "reward `http` cannot score the prompt `a red circle moves up`: the server says: ValueError: no red, please";
    assert_eq!(scores[0], Err(red.to_owned()));
    assert!(scores[1].as_ref().is_err_and(|error| error.contains("not a finite number")), "{scores:?}");
    assert_eq!(scores[2], Ok(0.5));
}

/// `sys.exit` in a package is its way to complain: the server stays, and says so.
#[test]
fn a_function_that_wants_to_leave_is_an_error_of_its_sample() {
    let folder = tempfile::tempdir().expect("folder");
    let (prompt, frames) = clips(1).remove(0);
    for more in [&[][..], &["--batch"]] {
        let server = server(folder.path(), "leaves", more);
        let reward = HttpReward::new(HttpSettings { connection: quick(), ..HttpSettings::new(&server.url) }).expect("settings");
        let error = reward.score(&[Sample::new(&prompt, &frames)]).remove(0).expect_err("no score");
        assert_eq!(error.reason, "the server says: SystemExit: no model");
        reward.prepare().expect("it is still there");
    }
}

#[test]
fn requests_have_the_size_that_is_set_and_the_server_may_limit_it() {
    let folder = tempfile::tempdir().expect("folder");
    let server = server(folder.path(), "batch", &["--batch", "--max-batch", "4"]);
    let with =
        |batch_size| HttpReward::new(HttpSettings { batch_size, connection: quick(), ..HttpSettings::new(&server.url) }).expect("settings");
    assert!(close(&values(&with(4), &clips(6)), &[4.0, 4.0, 4.0, 4.0, 2.0, 2.0]));
    let error = with(5).prepare().expect_err("too many");
    assert_eq!(error.to_string(), "reward `http`: `batch_size` is `5`, expected at most 4\nhint: the server takes no more samples at once");
}

#[test]
fn identity_changes_with_the_function_and_the_settings() {
    let folder = tempfile::tempdir().expect("folder");
    let one = server(folder.path(), "mean", &["--version", "1"]);
    let two = server(folder.path(), "mean", &["--version", "2"]);
    let of = |url: &str, frames| {
        let settings = HttpSettings { frames, connection: quick(), ..HttpSettings::new(url) };
        HttpReward::new(settings).expect("settings").identity().expect("identity")
    };
    assert_eq!(of(&one.url, FrameSelection::All), of(&one.url, FrameSelection::All));
    assert_ne!(of(&one.url, FrameSelection::All), of(&two.url, FrameSelection::All));
    assert_ne!(of(&one.url, FrameSelection::All), of(&one.url, FrameSelection::First));
}

#[test]
fn a_server_that_is_not_there_is_said_before_a_run() {
    let settings = HttpSettings { connection: quick(), ..HttpSettings::new("http://127.0.0.1:1") };
    let reward = HttpReward::new(settings).expect("settings");
    let error = reward.prepare().expect_err("nobody listens").to_string();
    assert!(error.starts_with("reward `http`: no `/v1/info` from `http://127.0.0.1:1`: "), "{error}");
    assert!(error.contains("\nhint: start it first"), "{error}");
    assert_eq!(reward.identity(), None);
}

/// A server that says `info` of itself and gives every sample 0.5, if it is asked with `authorization`; how many requests it scored.
fn stub(info: &'static str, authorization: Option<&'static str>) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let scored = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&scored);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.expect("a connection"));
            let (mut head, mut length, mut line) = (String::new(), 0, String::new());
            while stream.read_line(&mut line).is_ok_and(|read| read > 2) {
                length = line.to_ascii_lowercase().strip_prefix("content-length:").map_or(length, |n| n.trim().parse().expect("a number"));
                head += &std::mem::take(&mut line);
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).expect("the body");
            let known = authorization.is_none_or(|key| head.to_ascii_lowercase().contains(&format!("authorization: {key}\r\n")));
            let (status, answer) = match (known, body.is_empty()) {
                (false, _) => ("401 Unauthorized", "who are you?".to_owned()),
                (true, true) => ("200 OK", info.to_owned()),
                (true, false) => {
                    count.fetch_add(1, Ordering::Relaxed);
                    let request: serde_json::Value = serde_json::from_slice(&body).expect("json");
                    ("200 OK", serde_json::json!({"scores": [{"id": request["samples"][0]["id"], "value": 0.5}]}).to_string())
                }
            };
            let length = answer.len();
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{answer}");
            let _ = stream.get_mut().write_all(answer.as_bytes());
        }
    });
    (url, scored)
}

#[test]
fn a_key_comes_from_the_environment() {
    // Cargo's own variable stands in for one with the key: tests cannot set variables safely.
    let (url, _) = stub(r#"{"protocol": 1, "name": "stub", "version": "1"}"#, Some("bearer reward"));
    let with = |variable: Option<&str>| {
        let api_key_env = variable.map(str::to_owned);
        HttpReward::new(HttpSettings { api_key_env, connection: quick(), ..HttpSettings::new(&url) })
    };
    let reward = with(Some("CARGO_PKG_NAME")).expect("settings");
    reward.prepare().expect("the key is known");
    assert!(close(&values(&reward, &clips(2)), &[0.5, 0.5]));
    assert!(!reward.identity().expect("identity").contains("CARGO_PKG_NAME"));
    let error = with(None).expect("settings").prepare().expect_err("no key").to_string();
    assert!(error.contains("401 Unauthorized`: who are you?"), "{error}");
    let error = with(Some("NO_SUCH_VARIABLE_7")).map(drop).expect_err("not set");
    assert_eq!(error.field, "api_key_env");
    assert!(error.message.contains("`api_key_env` is `NO_SUCH_VARIABLE_7`"), "{error}");
}

#[test]
fn a_request_that_is_too_long_is_not_sent() {
    let (url, scored) = stub(r#"{"protocol": 1, "name": "stub", "version": "1", "max_bytes": 4096}"#, None);
    let reward = HttpReward::new(HttpSettings { connection: quick(), ..HttpSettings::new(&url) }).expect("settings");
    reward.prepare().expect("ready");
    let (prompt, frames) = clips(1).remove(0);
    let error = reward.score(&[Sample::new(&prompt, &frames)]).remove(0).expect_err("five frames are more than that").to_string();
    assert!(error.contains("the server takes at most 4096: lower `batch_size`"), "{error}");
    assert_eq!(scored.load(Ordering::Relaxed), 0);
    let first = HttpSettings { frames: FrameSelection::First, connection: quick(), ..HttpSettings::new(&url) };
    let reward = HttpReward::new(first).expect("settings");
    reward.prepare().expect("ready");
    assert!(close(&values(&reward, &clips(1)), &[0.5]));
}

/// Without the packages of the site, whatever is installed.
fn adapter(name: &str, folder: &Path) -> std::process::Output {
    let mut command = std::process::Command::new(common::python());
    command.args(["-S", &reward_server(), "--adapter", name, "--port", "0"]).env("PYTHONPATH", folder).env_remove("VIDEOALIGN_CHECKPOINT");
    command.output().expect("python3")
}

#[test]
fn adapters_say_what_they_need() {
    let folder = tempfile::tempdir().expect("folder");
    for (name, hint) in [
        ("hpsv3", "hint: pip install hpsv3"),
        ("pickscore", "hint: pip install transformers torch pillow"),
        ("clip", "hint: pip install transformers torch pillow"),
        ("videoalign", "set VIDEOALIGN_CHECKPOINT to the folder"),
    ] {
        let output = adapter(name, folder.path());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(hint) && !said.contains("Traceback"), "{name}: {said}");
    }
}

#[test]
fn the_adapter_of_hpsv3_scores_each_frame() {
    let folder = tempfile::tempdir().expect("folder");
    // A stand-in for the package: the size of each image file, if it is one.
    let package = "class HPSv3RewardInferencer:\n    def __init__(self, device):\n        assert device == 'cpu'\n    def reward(self, prompts, image_paths):\n        assert len(prompts) == len(image_paths)\n        return [[int(open(p, 'rb').read(8) == b'\\x89PNG\\r\\n\\x1a\\n') + i, 0] for i, p in enumerate(image_paths)]\n";
    std::fs::write(folder.path().join("hpsv3.py"), package).expect("write");
    let mut command = std::process::Command::new(common::python());
    command.args(["-S", &reward_server(), "--adapter", "hpsv3", "--device", "cpu", "--port", "0"]).env("PYTHONPATH", folder.path());
    let server = Server::start(&mut command);
    let settings = HttpSettings { aggregate: Aggregation::TopMean(0.4), connection: quick(), ..HttpSettings::new(&server.url) };
    // Frames have 1 to 5; the best two of five have 4.5 on average.
    assert!(close(&values(&HttpReward::new(settings).expect("settings"), &clips(1)), &[4.5]));
}
