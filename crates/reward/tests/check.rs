//! `check` on rewards of which the truth is known.

#![allow(clippy::print_stderr, reason = "measurements, for `--nocapture`")]

mod common;

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use reward::check::{CheckOptions, RewardCheck, Spoil, check};
use reward::http::{HttpReward, HttpSettings};
use reward::{Batching, Reward, RewardError, Sample, Scored, ShapesReward};
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
    check(reward, &samples, &CheckOptions::default())
}

#[test]
fn the_verifier_is_fit() {
    let found = checked(&ShapesReward);
    assert_eq!((found.samples, found.errors, found.noise), (16 * 5, 0, Some(0.0)));
    assert!(found.throughput.is_empty() && found.recommended.is_none(), "it makes no requests: {found}");
    assert_eq!(found.ranking.iter().map(|r| r.against.as_str()).collect::<Vec<_>>(), ["other prompt", "still", "noise", "grey"]);
    assert!(found.ranking.iter().all(|ranking| ranking.auc == 1.0), "{found}");
    let text = found.to_string();
    assert!(text.starts_with("shapes: 80 samples, 0 errors\n  latency        "), "{text}");
    assert!(text.contains("good above     noise          auc 1.000") && text.contains("repeatable     yes"), "{text}");
    let json = serde_json::to_string(&found).expect("json");
    assert_eq!(serde_json::from_str::<RewardCheck>(&json).expect("back"), found);
}

/// Says something else every time, whatever it sees, and takes its time for each request, of one sample where nobody wishes otherwise.
struct Dice(AtomicU64);

impl Reward for Dice {
    fn name(&self) -> &str {
        "dice"
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.score_batched(batch, Batching { batch_size: 1, concurrency: 1 })
    }

    fn largest_batching(&self) -> Option<Batching> {
        Some(Batching { batch_size: 8, concurrency: 1 })
    }

    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        batch.chunks(batching.batch_size).for_each(|_| std::thread::sleep(Duration::from_millis(5)));
        let roll = || (self.0.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / (1u64 << 24) as f64;
        batch.iter().map(|_| Ok(roll().into())).collect()
    }
}

#[test]
fn noise_is_told_from_knowledge() {
    let found = checked(&Dice(AtomicU64::new(0)));
    assert!(found.noise > Some(0.1) && found.ranking.iter().all(|ranking| (0.2..0.8).contains(&ranking.auc)), "{found}");
    assert!(found.warnings.iter().any(|warning| warning.contains("scoring the same video twice")), "{found}");
    assert!(found.warnings.iter().any(|warning| warning.contains("hardly rank above")), "{found}");
    assert!(found.latency_s.is_some_and(|[median, _]| median >= 0.005));
    let tried: Vec<(usize, usize)> = found.throughput.iter().map(|t| (t.batch_size, t.concurrency)).collect();
    assert_eq!(tried, [(1, 1), (4, 1), (8, 1)], "as far as it goes");
    assert_eq!(found.recommended.map(|t| t.batch_size), Some(8), "requests take the same whatever their size: {found}");
}

/// Refuses requests of more than so many samples.
struct Refuses(usize);

impl Reward for Refuses {
    fn name(&self) -> &str {
        "refuses"
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.score_batched(batch, Batching { batch_size: 1, concurrency: 1 })
    }

    fn largest_batching(&self) -> Option<Batching> {
        Some(Batching::LARGEST)
    }

    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        let one = |sample: &Sample<'_>| match batching.batch_size <= self.0 {
            true => Ok(sample.fps.into()),
            false => Err(RewardError::new("refuses", sample.prompt, "too many")),
        };
        batch.iter().map(one).collect()
    }
}

#[test]
fn a_batching_that_fails_is_not_recommended() {
    let found = checked(&Refuses(1));
    let errors: Vec<(usize, usize)> = found.throughput.iter().map(|t| (t.batch_size, t.errors)).collect();
    assert_eq!(errors, [(1, 0), (1, 0), (4, 16)], "nothing larger is tried");
    assert_eq!(found.recommended.map(|t| t.batch_size), Some(1));
    assert!(found.to_string().contains("  4 a request,  1 at once: 16 samples could not be scored"), "{found}");
}

#[test]
fn of_a_reward_that_scores_nothing_nothing_is_said() {
    let found = checked(&Refuses(0));
    assert!(!found.scores());
    assert_eq!((found.samples, found.errors, found.noise, found.latency_s), (16, 16, None, None));
    assert!(found.throughput.is_empty() && found.ranking.is_empty());
    assert!(found.to_string().contains("nothing could be scored: reward `refuses` cannot score the prompt"), "{found}");
}

#[test]
fn bad_videos_come_with_what_belongs_to_their_prompt() {
    let good = good();
    let metadata: Vec<serde_json::Value> = good.iter().map(|(prompt, _)| serde_json::json!({ "of": prompt })).collect();
    let pairs = good.iter().zip(&metadata);
    let samples: Vec<Sample<'_>> =
        pairs.map(|((prompt, frames), metadata)| Sample { fps: 24.0, metadata: Some(metadata), ..Sample::new(prompt, frames) }).collect();
    let of_its_prompt = |sample: &Sample<'_>| sample.metadata.is_some_and(|metadata| metadata["of"] == sample.prompt);
    for spoil in Spoil::ALL {
        let clips = spoil.clips(&samples);
        assert_eq!(clips.len(), samples.len());
        assert!(clips.iter().all(|(asked, _)| asked.fps == 24.0 && of_its_prompt(asked)), "{}", spoil.name());
    }
    let borrowed = Spoil::OtherPrompt.clips(&samples);
    let same = |(i, (asked, frames)): (usize, &(Sample<'_>, Cow<'_, Frames>))| {
        std::ptr::eq(&**frames, samples[i].frames) && asked.prompt != samples[i].prompt
    };
    assert!(borrowed.iter().enumerate().all(same), "frames are not copied where they stay as they are");
}

/// Breaks for good at the first request of several samples.
struct Fragile(AtomicBool);

impl Reward for Fragile {
    fn name(&self) -> &str {
        "fragile"
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.score_batched(batch, Batching { batch_size: 1, concurrency: 1 })
    }

    fn largest_batching(&self) -> Option<Batching> {
        Some(Batching::LARGEST)
    }

    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        let broken = self.0.fetch_or(batching.batch_size > 1, Ordering::Relaxed) || batching.batch_size > 1;
        let one = |sample: &Sample<'_>| if broken { Err(RewardError::new("fragile", sample.prompt, "broken")) } else { Ok(1.0.into()) };
        batch.iter().map(one).collect()
    }
}

#[test]
fn a_server_that_large_requests_break_is_measured_before() {
    let found = checked(&Fragile(AtomicBool::new(false)));
    assert_eq!((found.errors, found.recommended.map(|t| t.batch_size)), (0, Some(1)), "{found}");
    assert!(found.latency_s.is_some() && found.ranking.len() == Spoil::ALL.len(), "{found}");
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
    assert_eq!((found.errors, found.noise), (0, Some(0.0)));
    assert!(found.latency_s.is_some_and(|[median, _]| median > 0.0) && found.recommended.is_some());
}

/// Batch sizes and requests at once are those of the requests, not of calls into a reward that cuts them as its recipe says.
#[test]
fn the_tried_batching_is_what_a_server_gets() {
    let folder = tempfile::tempdir().expect("folder");
    let function = "def score(samples):\n    print(len(samples), file=open('sizes', 'a'), flush=True)\n    return [0.5] * len(samples)\n";
    std::fs::write(folder.path().join("mine.py"), function).expect("write");
    let server = common::Server::python(&[&common::reward_server(), "--function", "mine:score", "--port", "0", "--batch"], folder.path());
    let settings = HttpSettings { connection: common::quick(), ..HttpSettings::new(&server.url) };
    let found = checked(&HttpReward::new(settings).expect("settings"));
    assert!(found.throughput.iter().any(|t| t.batch_size == 16));
    let sizes = std::fs::read_to_string(folder.path().join("sizes")).expect("sizes");
    assert!(["1", "4", "16"].iter().all(|size| sizes.lines().any(|line| line == *size)), "{sizes}");
}
