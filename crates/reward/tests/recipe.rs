//! `[[reward]]` as it stands in recipes.

use reward::http::HttpSettings;
use reward::{Aggregation, BuildOptions, FrameSelection, Reward, RewardEntry, RewardSpec, Sample, build};
use serde::{Deserialize, Serialize};
use video::Frames;

#[derive(Debug, PartialEq, Deserialize, Serialize)]
struct Recipe {
    reward: Vec<RewardEntry>,
}

fn parse(text: &str) -> Result<Vec<RewardEntry>, String> {
    toml::from_str(text).map(|recipe: Recipe| recipe.reward).map_err(|error| error.message().to_owned())
}

const ALL: &str = r#"
[[reward]]
type = "shapes"
weight = 1.0

[[reward]]
type = "jpeg-compressibility"
frames = "first"
weight = 0.5

[[reward]]
type = "brightness"
frames = { every = 2 }
aggregate = { top_mean = 0.3 }
weight = -0.25
name = "light"
limits = [0.0, 1.0]

[[reward]]
type = "temporal-flicker"
weight = -1

[[reward]]
type = "http"
url = "http://127.0.0.1:8000"
frames = { fps = 2 }
encoding = "png"
batch_size = 4
connection = { request_timeout_s = 30, breaker_failures = 2 }
cache = false

[[reward]]
type = "command"
command = ["python3", "mine.py"]
processes = 2
"#;

#[test]
fn every_key_arrives_and_is_written_back() {
    let entries = parse(ALL).expect("a recipe");
    assert_eq!(entries[2].name.as_deref(), Some("light"));
    assert_eq!((entries[2].weight, entries[2].limits), (-0.25, Some([0.0, 1.0])));
    let RewardSpec::Brightness(settings) = &entries[2].spec else { panic!("{:?}", entries[2]) };
    assert_eq!((settings.frames, settings.aggregate), (FrameSelection::Every(2), Aggregation::TopMean(0.3)));
    let RewardSpec::Http(http) = &entries[4].spec else { panic!("{:?}", entries[4]) };
    assert_eq!((http.connection.request_timeout_s, http.connection.breaker_failures, http.frames), (30.0, 2, FrameSelection::Fps(2.0)));
    assert!(!entries[4].cache && entries[5].cache);
    entries.iter().for_each(|entry| entry.validate().expect("valid"));
    let written = toml::to_string(&Recipe { reward: parse(ALL).expect("a recipe") }).expect("written");
    assert_eq!(parse(&written).expect("read back"), entries, "{written}");
}

#[test]
fn what_is_wrong_is_said() {
    let parse_one = |text: &str| parse(&format!("[[reward]]\n{text}")).err();
    for (text, reason) in [
        ("weight = 1", "missing field `type`"),
        ("type = \"shape\"", "unknown variant `shape`"),
        ("type = \"shapes\"\nurl = \"x\"", "unknown field `url`"),
        ("type = \"shapes\"\nwieght = 2", "unknown field `wieght`"),
        ("type = \"http\"", "missing field `url`"),
        ("type = \"http\"\nurl = \"http://a\"\nconnection = { retries = 3 }", "unknown field `retries`"),
        ("type = \"brightness\"\nframes = \"some\"", "unknown variant `some`"),
    ] {
        let error = parse_one(text).unwrap_or_default();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn values_are_checked_before_anything_is_contacted() {
    for (text, message) in [
        ("type = \"shapes\"\nweight = 0", "reward `shapes`: `weight` is `0`, expected a number other than 0"),
        ("type = \"shapes\"\nname = \"a b\"", "reward `a b`: `name` is `a b`, expected letters, digits, `-` and `_`"),
        ("type = \"shapes\"\nlimits = [1, 0]", "reward `shapes`: `limits` is `[1, 0]`, expected [low, high] with low < high"),
        ("type = \"http\"\nurl = \"127.0.0.1:8000\"", "reward `http`: `url` is `127.0.0.1:8000`, expected the address of a server"),
        (
            "type = \"http\"\nurl = \"http://me:secret@host\"",
            "reward `http`: `url` is `(hidden)`, expected an address without user and password",
        ),
        ("type = \"http\"\nurl = \"http://h\"\nbatch_size = 0", "reward `http`: `batch_size` is `0`, expected 1 to 4096"),
        (
            "type = \"http\"\nurl = \"http://h\"\nconnection = { budget_s = -1 }",
            "reward `http`: `connection.budget_s` is `-1`, expected seconds, above 0 and at most a day",
        ),
        ("type = \"brightness\"\nframes = { every = 0 }", "reward `brightness`: `frames` is `{ every = 0 }`, expected at least 1"),
        (
            "type = \"contrast\"\naggregate = { top_mean = 0 }",
            "reward `contrast`: `aggregate` is `{ top_mean = 0 }`, expected a share above 0, at most 1",
        ),
        ("type = \"command\"\ncommand = []", "reward `command`: `command` is `[]`, expected a program and its arguments"),
    ] {
        let entry = parse(&format!("[[reward]]\n{text}")).expect("readable").remove(0);
        let error = entry.validate().expect_err(text).to_string();
        let (first, hint) = error.split_once("\nhint: ").expect("a hint");
        assert_eq!(first, message);
        assert!(!hint.is_empty());
    }
}

#[test]
fn several_rewards_are_one_with_named_parts() {
    let text = "[[reward]]\ntype = \"brightness\"\nweight = 2\n[[reward]]\ntype = \"brightness\"\nframes = \"first\"\nname = \"first\"\nweight = -1";
    let rewards = build(&parse(text).expect("recipe"), &BuildOptions::default()).expect("rewards");
    assert_eq!(rewards.parts().collect::<Vec<_>>(), [("brightness", 2.0), ("first", -1.0)]);
    let frames = Frames::new(2, 1, 1, vec![0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).expect("frames");
    let score = rewards.score(&[Sample::new("x", &frames)]).remove(0).expect("score");
    assert!((score.value - 1.0).abs() < 1e-12);
    assert!((score.components["brightness"] - 0.5).abs() < 1e-12 && score.components["first"] == 0.0);
}

#[test]
fn settings_can_be_made_in_code() {
    let entry = RewardEntry::new(RewardSpec::Http(HttpSettings::new("http://127.0.0.1:8000")));
    assert_eq!(entry, parse("[[reward]]\ntype = \"http\"\nurl = \"http://127.0.0.1:8000\"").expect("recipe").remove(0));
}
