//! The `chat` kind against a strict stand-in for an OpenAI-compatible server.

mod common;

use std::process::Command;

use common::{Server, clips, mean_byte_of, python, quick, test_file};
use reward::chat::{ChatReward, ChatScore, ChatSettings};
use reward::{Encoding, FrameSelection, Reward, Sample};

const QUESTION: &str = "How bright is \"{prompt}\"?";

fn server(key: &str) -> Server {
    let mut server = Server::start(Command::new(python()).arg(test_file("stubs/chat_server.py")).env("STUB_KEY", key));
    server.url += "/v1";
    server
}

fn settings(url: &str, score: ChatScore) -> ChatSettings {
    let frames = FrameSelection::Count(3);
    ChatSettings { encoding: Encoding::Png, frames, connection: quick(), ..ChatSettings::new(url, "judge-vl", QUESTION, score) }
}

fn values(settings: ChatSettings) -> Vec<Result<f64, String>> {
    let (reward, clips) = (ChatReward::new(settings).expect("settings"), clips(6));
    reward.prepare().expect("ready");
    let batch: Vec<Sample<'_>> = clips.iter().map(|(prompt, frames)| Sample::new(prompt, frames)).collect();
    reward.score(&batch).into_iter().map(|score| score.map(|s| s.value).map_err(|e| e.reason)).collect()
}

#[test]
fn every_way_to_score_gives_the_judges_number() {
    let server = server("");
    let expected: Vec<f64> = clips(6).iter().map(|(_, frames)| mean_byte_of(frames, &[0, 2, 4])).collect();
    for score in [ChatScore::Regex("Final Score: ([0-9.e-]+)".into()), ChatScore::Json("score".into()), ChatScore::YesProbability] {
        let values = values(ChatSettings { seed: Some(7), range: Some([0.0, 1.0]), ..settings(&server.url, score.clone()) });
        for (value, expected) in values.iter().zip(&expected) {
            assert!(value.as_ref().is_ok_and(|value| (value - expected).abs() < 1e-9), "{score:?}: {values:?}");
        }
    }
}

#[test]
fn answers_that_are_no_score_are_errors() {
    let server = server("");
    let undecided =
        ChatSettings { prompt: "undecided {prompt}".into(), ..settings(&server.url, ChatScore::Regex("Score: ([0-9.]+)".into())) };
    assert_eq!(values(undecided)[0], Err("the judge's answer has no score: `I would rather not say.`".to_owned()));
    let outside = ChatSettings { range: Some([2.0, 5.0]), ..settings(&server.url, ChatScore::Json("score".into())) };
    assert!(values(outside)[0].as_ref().is_err_and(|error| error.contains("outside `range` = [2, 5]")));
    // The stand-in would decode it; this judge only sees bytes, but it must be accepted.
    let jpeg = ChatSettings {
        encoding: Encoding::Jpeg,
        system: Some("Be strict.".into()),
        ..settings(&server.url, ChatScore::Json("score".into()))
    };
    assert!(values(jpeg).iter().all(Result::is_ok));
}

#[test]
fn keys_come_from_the_environment_and_are_shown_nowhere() {
    let key = "a-stub-key-of-this-test";
    let server = server(key);
    // Cargo's own variable stands in for one with the key: tests cannot set variables safely.
    let wrong = ChatSettings { api_key_env: Some("CARGO_PKG_NAME".into()), ..settings(&server.url, ChatScore::Json("score".into())) };
    let error = values(wrong)[0].clone().expect_err("not the key");
    assert!(error.contains("401") && error.contains("Incorrect API key") && !error.contains("Bearer"), "{error}");
    let absent = ChatSettings { api_key_env: Some("NO_SUCH_VARIABLE_7".into()), ..settings(&server.url, ChatScore::Json("score".into())) };
    let error = ChatReward::new(absent).err().expect("no key");
    assert_eq!(error.field, "api_key_env");
    assert!(error.hint.contains("keys never stand in recipes"), "{error}");
}

#[test]
fn a_model_that_the_server_lacks_is_said_before_a_run() {
    let server = server("");
    let other = ChatSettings { model: "other".into(), ..settings(&server.url, ChatScore::YesProbability) };
    let error = ChatReward::new(other).expect("settings").prepare().expect_err("no such model").to_string();
    assert_eq!(error, "reward `chat`: `model` is `other`, expected one that the server has\nhint: it has judge-vl");
}

/// A run goes on with its judge at another place; but judges at two places share no kept values, though both go by one name.
#[test]
fn identity_is_that_of_the_judge_and_kept_values_belong_to_its_address() {
    let of = |settings| {
        let reward = ChatReward::new(settings).expect("settings");
        (reward.identity().expect("known"), reward.cache_key().expect("known"))
    };
    let known = of(settings("http://127.0.0.1:1/v1", ChatScore::YesProbability));
    let elsewhere = of(settings("http://127.0.0.1:2/v1", ChatScore::YesProbability));
    assert!(known.0 == elsewhere.0 && known.1 != elsewhere.1);
    let other = ChatSettings { model: "another".into(), ..settings("http://127.0.0.1:1/v1", ChatScore::YesProbability) };
    assert_ne!(known.0, of(other).0);
}

#[test]
fn settings_are_checked() {
    let check = |change: fn(&mut ChatSettings)| {
        let mut settings = settings("http://127.0.0.1:1/v1", ChatScore::YesProbability);
        change(&mut settings);
        ChatReward::new(settings).err().map(|error| error.field)
    };
    assert_eq!(check(|s| s.prompt = "no place for it".into()), Some("prompt"));
    assert_eq!(check(|s| s.score = ChatScore::Regex("(".into())), Some("score"));
    assert_eq!(check(|s| s.encoding = Encoding::Raw), Some("encoding"));
    assert_eq!(check(|s| s.temperature = f64::NAN), Some("temperature"));
    assert_eq!(check(|s| s.range = Some([1.0, 1.0])), Some("range"));
    assert_eq!(check(|_| {}), None);
}
