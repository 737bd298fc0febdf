//! Clips, and processes that end with the test.

#![allow(dead_code, reason = "every test takes what it needs")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use base64::Engine;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use reward::net::ConnectionSettings;
use shapes::{RenderOptions, all_captions, render};
use video::Frames;

/// A clip of each of the first `count` captions, by turns; different even for the same caption.
pub fn clips(count: usize) -> Vec<(String, Frames)> {
    let captions = all_captions();
    let options = RenderOptions { num_frames: 5, height: 16, width: 24 };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    captions.iter().cycle().take(count).map(|caption| (caption.to_string(), render(caption, &mut rng, &options))).collect()
}

/// Mean byte of a clip, in [0, 1]: what the Python counterparts compute too.
pub fn mean_byte(frames: &Frames) -> f64 {
    mean_byte_of(frames, &(0..frames.num_frames()).collect::<Vec<_>>())
}

pub fn mean_byte_of(frames: &Frames, indices: &[usize]) -> f64 {
    let byte = |&value: &f32| f64::from((value.clamp(0.0, 1.0) * 255.0).round());
    let values: Vec<f64> = indices.iter().flat_map(|&i| frames.frame(i).iter().map(byte)).collect();
    values.iter().sum::<f64>() / values.len() as f64 / 255.0
}

/// A server that ends with the value.
pub struct Server {
    child: Child,
    /// Where it listens.
    pub url: String,
}

impl Server {
    /// Starts `python3 ARGUMENTS` in `folder` and reads its address from the line `listening on URL`.
    pub fn python(arguments: &[&str], folder: &Path) -> Self {
        Self::start(Command::new(python()).args(arguments).current_dir(folder))
    }

    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("python3 is on the path");
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

/// The interpreter: `FLASH_GRPO_PYTHON`, or the one on the path.
pub fn python() -> String {
    std::env::var("FLASH_GRPO_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

/// `tools/reward_server.py`, absolute.
pub fn reward_server() -> String {
    root().join("tools/reward_server.py").display().to_string()
}

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A file of `tests/`, absolute.
pub fn test_file(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name).display().to_string()
}

/// Faster than by default, with room for a busy machine.
pub fn quick() -> ConnectionSettings {
    ConnectionSettings {
        connect_timeout_s: 2.0,
        request_timeout_s: 10.0,
        budget_s: 30.0,
        first_delay_s: 0.005,
        max_delay_s: 0.1,
        ..ConnectionSettings::default()
    }
}

/// Pickles that numpy wrote, with their scores; from `fixtures/make_pickles.py`.
pub fn pickles() -> BTreeMap<String, (Vec<u8>, Vec<f64>)> {
    #[derive(serde::Deserialize)]
    struct Fixture {
        pickle: String,
        scores: Vec<f64>,
    }
    let file = std::fs::read(test_file("fixtures/pickles.json")).expect("fixtures");
    let fixtures: BTreeMap<String, Fixture> = serde_json::from_slice(&file).expect("json");
    let decode = |text: &str| base64::engine::general_purpose::STANDARD.decode(text).expect("base64");
    fixtures.into_iter().map(|(name, fixture)| (name, (decode(&fixture.pickle), fixture.scores))).collect()
}
