//! docs/rewards.md: its Python runs, its recipes are valid, its messages obey the schema. (Its Rust is a documentation test.)

mod common;
mod schema;

use std::path::Path;

use common::{Server, python, reward_server, root};
use reward::http::HttpSettings;
use reward::{BuildOptions, Reward, RewardEntry, RewardSpec, Sample};
use video::Frames;

/// The code blocks whose first line is "```LANGUAGE NAME", or "```LANGUAGE" for an empty name.
fn blocks(language: &str, name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join("docs/rewards.md")).expect("the document");
    let wanted = format!("{language} {name}");
    let mut blocks = Vec::new();
    let mut parts = text.split("```").skip(1).step_by(2);
    for block in &mut parts {
        let (head, body) = block.split_once('\n').expect("a block");
        if head == wanted.trim() {
            blocks.push(body.to_owned());
        }
    }
    assert!(!blocks.is_empty(), "no block `{wanted}`");
    blocks
}

#[derive(serde::Deserialize)]
struct Recipe {
    reward: Vec<RewardEntry>,
}

fn recipes() -> Vec<RewardEntry> {
    let parse = |text: &String| toml::from_str::<Recipe>(text).unwrap_or_else(|error| panic!("{error}\n{text}")).reward;
    blocks("toml", "").iter().flat_map(parse).collect()
}

fn write(folder: &Path, name: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, blocks("python", name).remove(0)).expect("write");
    path.display().to_string()
}

/// Redness 0.5: one red pixel, one yellow.
fn redness(reward: &dyn Reward) -> f64 {
    let frames = Frames::new(1, 1, 2, vec![1.0, 0.0, 0.0, 1.0, 1.0, 0.0]).expect("frames");
    reward.score(&[Sample::new("a red square", &frames)]).remove(0).expect("a score").value
}

#[test]
fn every_recipe_is_valid() {
    let recipes = recipes();
    recipes.iter().for_each(|entry| entry.validate().expect("valid"));
    for kind in ["shapes", "http", "command", "chat", "flow-grpo", "onnx", "ocr"] {
        assert!(recipes.iter().any(|entry| entry.spec.kind() == kind), "no example of `{kind}`");
    }
}

#[test]
fn the_function_is_served() {
    let folder = tempfile::tempdir().expect("folder");
    write(folder.path(), "my_reward.py");
    let server = Server::python(&[&reward_server(), "--function", "my_reward:score", "--port", "0"], folder.path());
    let mut entry = recipes().into_iter().find(|entry| entry.spec.kind() == "http").expect("the first recipe");
    let RewardSpec::Http(HttpSettings { url, .. }) = &mut entry.spec else { panic!("{entry:?}") };
    *url = server.url.clone();
    let reward = entry.build(&BuildOptions { cache: Some(folder.path().to_owned()), ..BuildOptions::default() }).expect("settings");
    reward.prepare().expect("it is there");
    assert_eq!(redness(&reward), 0.5);
    drop(server);
    assert_eq!(redness(&reward), 0.5, "kept");
}

#[test]
fn the_program_is_run() {
    let folder = tempfile::tempdir().expect("folder");
    let path = write(folder.path(), "my_command.py");
    let mut entry = recipes().into_iter().find(|entry| entry.spec.kind() == "command").expect("the second recipe");
    let RewardSpec::Command(settings) = &mut entry.spec else { panic!("{entry:?}") };
    assert_eq!(settings.command, ["python3", "my_command.py"]);
    settings.command = vec![python(), path];
    assert_eq!(redness(&entry.build(&BuildOptions::default()).expect("settings")), 0.5);
}

#[test]
fn messages_obey_the_schema() {
    for name in ["request", "answer", "info"] {
        for message in blocks("json", name) {
            let message = serde_json::from_str(&message).expect("json");
            schema::check(name, &message).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}
