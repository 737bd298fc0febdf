//! The `flow-grpo` kind against a Python server that speaks real pickle.

#![allow(clippy::print_stderr, reason = "measurements, and what was skipped")]

mod common;

use std::process::Command;
use std::time::{Duration, Instant};

use common::{Server, clips, mean_byte, python, quick, test_file};
use reward::flow_grpo::{FlowGrpoReward, FlowGrpoSettings};
use reward::{Aggregation, BuildOptions, Encoding, FrameSelection, Reward, RewardEntry, RewardSpec, Sample, Scored};
use serde_json::{Value, json};

fn score(kind: &str, change: impl FnOnce(&mut FlowGrpoSettings)) -> Vec<Scored> {
    let server = Server::start(Command::new(python()).args([&test_file("stubs/pickle_server.py"), kind]));
    let mut settings =
        FlowGrpoSettings { encoding: Encoding::Png, batch_size: 2, connection: quick(), ..FlowGrpoSettings::new(&server.url) };
    change(&mut settings);
    let (reward, clips, metadata) =
        (FlowGrpoReward::new(settings).expect("settings"), clips(5), json!({"text": "é", "n": 3, "x": [1.5, null, true]}));
    let batch: Vec<Sample<'_>> =
        clips.iter().map(|(prompt, frames)| Sample { metadata: Some(&metadata), ..Sample::new(prompt, frames) }).collect();
    reward.score(&batch)
}

fn assert_means(scores: &[Scored], tolerance: f64) {
    for ((_, frames), score) in clips(scores.len()).iter().zip(scores) {
        let value = score.as_ref().expect("a score").value;
        assert!((value - mean_byte(frames)).abs() < tolerance, "{value}");
    }
}

fn has_numpy() -> bool {
    let found = Command::new(python()).args(["-c", "import numpy"]).output().is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("skipped: `{}` has no numpy; the fixtures cover its pickles", python());
    }
    found
}

#[test]
fn floats_come_back_by_frame_and_are_aggregated() {
    assert_means(&score("floats", |_| {}), 1e-12);
    let first = score("floats", |settings| settings.frames = FrameSelection::First);
    let best = score("floats", |settings| settings.aggregate = Aggregation::Max);
    assert!(first.iter().zip(&best).all(|(first, best)| first.as_ref().expect("score").value <= best.as_ref().expect("score").value));
}

#[test]
fn numpy_scores_come_back() {
    if !has_numpy() {
        return;
    }
    assert_means(&score("float32", |_| {}), 1e-6);
    assert_means(&score("zero-dim", |_| {}), 1e-12);
    assert_means(&score("array", |settings| settings.scores_key = "outputs".into()), 1e-12);
    let error = score("array", |_| {}).remove(0).expect_err("another key").to_string();
    assert!(error.contains("no list of numbers as `scores`, only [\"outputs\"]; `scores_key` names another"), "{error}");
}

#[test]
fn a_number_that_is_none_costs_its_sample_only() {
    let scores = score("nan", |_| {});
    assert!(scores[0].as_ref().is_err_and(|error| error.reason.contains("not finite numbers")), "{scores:?}");
    assert!(scores[1].is_ok() && scores[3].is_ok());
}

#[test]
fn too_few_scores_are_an_error() {
    let error = score("short", |_| {}).remove(0).expect_err("short").to_string();
    assert!(error.contains("the answer has 9 scores for 10 images"), "{error}");
}

#[test]
fn the_server_of_geneval_gets_what_it_wants() {
    let server = Server::start(Command::new(python()).args([&test_file("stubs/pickle_server.py"), "geneval"]).env("STUB_KEY", "reward"));
    let settings = FlowGrpoSettings {
        metadata_key: "meta_datas".into(),
        extra: [("only_strict".to_owned(), json!(true))].into_iter().collect(),
        api_key_env: Some("CARGO_PKG_NAME".into()),
        batch_size: 2,
        connection: quick(),
        ..FlowGrpoSettings::new(&server.url)
    };
    let of = |change: &dyn Fn(&mut FlowGrpoSettings)| {
        let mut settings = settings.clone();
        change(&mut settings);
        FlowGrpoReward::new(settings).expect("settings")
    };
    let (reward, clips) = (of(&|_| {}), clips(3));
    let metadata: Vec<Value> = clips.iter().map(|(prompt, _)| json!({"tag": "single_object", "include": [], "prompt": prompt})).collect();
    let pairs = clips.iter().zip(&metadata);
    let batch: Vec<Sample<'_>> =
        pairs.map(|((prompt, frames), metadata)| Sample { metadata: Some(metadata), ..Sample::new(prompt, frames) }).collect();
    assert!(reward.score(&batch).iter().all(Result::is_ok), "{:?}", reward.score(&batch));
    for (change, reason) in [
        (&(|s: &mut FlowGrpoSettings| s.extra.clear()) as &dyn Fn(&mut FlowGrpoSettings), "KeyError: 'only_strict'"),
        (&|s| s.metadata_key = "metadata".into(), "KeyError: 'meta_datas'"),
        (&|s| s.encoding = Encoding::Png, "OSError: not a JPEG"),
        (&|s| s.api_key_env = None, "401 Unauthorized"),
    ] {
        let start = Instant::now();
        let error = of(change).score(&batch[..1]).remove(0).expect_err(reason).to_string();
        assert!(error.contains(reason), "{reason}: {error}");
        assert!(start.elapsed() < Duration::from_secs(10), "a traceback is not asked for again until the budget is over");
    }
    let without = Sample::new(batch[0].prompt, batch[0].frames);
    let error = reward.score(&[without]).remove(0).expect_err("nothing to look for").to_string();
    assert!(error.contains("gave up after 5 attempts") && error.ends_with("KeyError: 'tag'"), "{error}");
}

#[test]
fn settings_are_checked() {
    let refused = |change: fn(&mut FlowGrpoSettings)| {
        let mut settings = FlowGrpoSettings::new("http://127.0.0.1:1");
        change(&mut settings);
        FlowGrpoReward::new(settings).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let twice = refused(|s| s.extra = [("images".to_owned(), json!(1))].into_iter().collect());
    assert!(twice.contains("`extra` is `images`, expected keys that the request does not have already"), "{twice}");
    assert!(refused(|s| s.api_key_env = Some("NO_SUCH_VARIABLE_7".into())).contains("`api_key_env` is `NO_SUCH_VARIABLE_7`"));
}

/// A run goes on with its server at another place, but not with another version of it; and servers at two places share no kept values.
#[test]
fn identity_is_that_of_the_server_and_kept_values_belong_to_its_address() {
    let of = |url: &str, version: &str| {
        let settings = FlowGrpoSettings { version: version.into(), ..FlowGrpoSettings::new(url) };
        let reward = FlowGrpoReward::new(settings).expect("settings");
        (reward.identity(), reward.cache_key())
    };
    let (known, elsewhere, newer) = (of("http://127.0.0.1:1", "1"), of("http://127.0.0.1:2", "1"), of("http://127.0.0.1:1", "2"));
    assert!(known.0.is_some() && known.0 == elsewhere.0 && known.0 != newer.0);
    assert!(known.1.is_some() && known.1 != elsewhere.1 && known.1 != newer.1);
    assert_eq!(of("http://127.0.0.1:1", ""), (None, None));
}

/// What one server said is never taken for what another says, though both are of the same version.
#[test]
fn servers_at_two_places_share_no_kept_values() {
    let (folder, clips) = (tempfile::tempdir().expect("folder"), clips(1));
    let value = |kind: &str| {
        let server = Server::start(Command::new(python()).args([&test_file("stubs/pickle_server.py"), kind]));
        let settings =
            FlowGrpoSettings { version: "1".into(), encoding: Encoding::Png, connection: quick(), ..FlowGrpoSettings::new(&server.url) };
        let options = BuildOptions { cache: Some(folder.path().to_owned()), ..BuildOptions::default() };
        let reward = RewardEntry::new(RewardSpec::FlowGrpo(settings)).build(&options).expect("settings");
        let score = || reward.score(&[Sample::new(&clips[0].0, &clips[0].1)]).remove(0);
        let scored = score();
        drop(server);
        assert!(scored.is_err() || scored == score(), "kept");
        scored
    };
    assert!(value("floats").is_ok());
    assert!(value("nan").is_err(), "the second server has no number for it");
}

#[test]
fn a_hostile_answer_executes_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("evil");
    let mut command = Command::new(python());
    let server = Server::start(command.args([&test_file("stubs/pickle_server.py"), "evil"]).env("EVIL_FILE", &file));
    let settings = FlowGrpoSettings { encoding: Encoding::Png, connection: quick(), ..FlowGrpoSettings::new(&server.url) };
    let clips = clips(1);
    let error =
        FlowGrpoReward::new(settings).expect("settings").score(&[Sample::new(&clips[0].0, &clips[0].1)]).remove(0).expect_err("refused");
    assert!(error.reason.starts_with("the pickle is refused: it names `posix.system`, which is not data"), "{error}");
    assert!(!file.exists());
}
