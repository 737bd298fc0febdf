//! `check` on rewards of which the truth is known.

#![allow(clippy::print_stderr, reason = "measurements, for `--nocapture`")]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use reward::check::{Bad, CheckOptions, RewardCheck, check, spoil};
use reward::http::{HttpReward, HttpSettings};
use reward::{Reward, Sample, Scored, ShapesReward};
use shapes::{RenderOptions, all_captions, render};
use video::Frames;

/// Two true clips of each of eight captions.
fn good() -> Vec<(String, Frames)> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let captions: Vec<_> = all_captions().into_iter().step_by(9).collect();
    let one = |i: usize| (captions[i / 2].to_string(), render(&captions[i / 2], &mut rng, &RenderOptions::default()));
    (0..16).map(one).collect()
}

fn checked(reward: &dyn Reward) -> RewardCheck {
    let good = good();
    let samples: Vec<Sample<'_>> = good.iter().map(|(prompt, frames)| Sample::new(prompt, frames)).collect();
    let spoiled = spoil(&samples);
    let bad: Vec<Bad<'_>> = spoiled.iter().map(|spoiled| spoiled.bad()).collect();
    check(reward, &samples, &bad, &CheckOptions::default())
}

#[test]
fn the_verifier_is_fit() {
    let found = checked(&ShapesReward);
    assert_eq!((found.samples, found.errors, found.noise), (16 * 5, 0, 0.0));
    assert_eq!(found.ranking.iter().map(|r| r.against.as_str()).collect::<Vec<_>>(), ["other prompt", "still", "noise", "grey"]);
    assert!(found.ranking.iter().all(|ranking| ranking.auc == 1.0), "{found}");
    let text = found.to_string();
    assert!(text.starts_with("shapes: 80 samples, 0 errors\n  latency        "), "{text}");
    assert!(text.contains("good above     noise          auc 1.000") && text.contains("repeatable     yes"), "{text}");
    let json = serde_json::to_string(&found).expect("json");
    assert_eq!(serde_json::from_str::<RewardCheck>(&json).expect("back"), found);
}

/// Says something else every time, whatever it sees, and takes its time for each call.
struct Dice(AtomicU64);

impl Reward for Dice {
    fn name(&self) -> &str {
        "dice"
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        std::thread::sleep(Duration::from_millis(20));
        let roll = || (self.0.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / (1u64 << 24) as f64;
        batch.iter().map(|_| Ok(roll().into())).collect()
    }
}

#[test]
fn noise_is_told_from_knowledge() {
    let found = checked(&Dice(AtomicU64::new(0)));
    assert!(found.noise > 0.1 && found.ranking.iter().all(|ranking| (0.2..0.8).contains(&ranking.auc)), "{found}");
    assert!(found.warnings.iter().any(|warning| warning.contains("scoring the same video twice")), "{found}");
    assert!(found.warnings.iter().any(|warning| warning.contains("hardly rank above")), "{found}");
    assert!(found.latency_s[0] >= 0.02);
    let of = |batch_size, concurrency| {
        let found = found.throughput.iter().find(|t| (t.batch_size, t.concurrency) == (batch_size, concurrency));
        found.expect("measured").samples_per_s
    };
    assert!(of(16, 1) > of(1, 1), "calls take the same whatever their size: {found}");
    assert!(found.recommended.is_some());
}

#[test]
fn a_constant_reward_teaches_nothing() {
    struct Constant;
    impl Reward for Constant {
        fn name(&self) -> &str {
            "constant"
        }
        fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
            batch.iter().map(|_| Ok(1.0.into())).collect()
        }
    }
    let found = checked(&Constant);
    assert_eq!(found.group_spread, Some(0.0));
    assert!(found.warnings[0].contains("nothing to learn"), "{found}");
    assert!(found.ranking.iter().all(|ranking| ranking.auc == 0.5));
}

#[test]
fn a_server_can_be_checked() {
    let folder = tempfile::tempdir().expect("folder");
    std::fs::write(folder.path().join("mine.py"), "def score(sample):\n    return len(set(sample.frames[-1].rgb))\n").expect("write");
    let server = common::Server::python(&[&common::reward_server(), "--function", "mine:score", "--port", "0", "--threads"], folder.path());
    let settings = HttpSettings { connection: common::quick(), ..HttpSettings::new(&server.url) };
    let found = checked(&HttpReward::new(settings).expect("settings"));
    eprintln!("{found}");
    assert_eq!((found.errors, found.noise), (0, 0.0));
    assert!(found.latency_s[0] > 0.0 && found.recommended.is_some());
}
