//! How much of a slow reward is hidden behind the sampling of the next rollouts.
//!
//! ```text
//! cargo run --release --workspace --example measure_overlap -- [MICRO_BATCH]
//! ```
//!
//! A reward that sleeps as long, in all, as the rollouts of an iteration take to sample and decode. One after the other, both phases would add up;
//! what is left to wait for is a reward of the last clips, and as much as the first took to arrive.

#![allow(clippy::print_stdout)]

use burn::tensor::Device;
use reward::{Reward, Sample, Scored, ShapesReward, Weighted};
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};
use train::iteration::iteration;
use train::settings::Settings;
use train::trainer::Trainer;

/// The shapes verifier after a nap for each sample.
struct Sleepy(Duration);

impl Reward for Sleepy {
    fn name(&self) -> &str {
        "sleepy"
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        std::thread::sleep(self.0 * batch.len() as u32);
        ShapesReward.score(batch)
    }
}

const ITERATIONS: u64 = 10;
const ROUNDS: u64 = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let micro_batch: usize = std::env::args().nth(1).map_or(Ok(8), |text| text.parse())?;
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/moving-shapes");
    let settings =
        Settings::load(None, &[format!("model.path={:?}", model.display().to_string()), format!("rollout.micro_batch={micro_batch}")])?;
    let samples = settings.rollout.prompts_per_iteration * settings.rollout.group_size;
    let mut trainer = Trainer::new(settings, &Device::flex())?;
    // seconds of an iteration, and of its rollouts
    let seconds = |trainer: &mut Trainer, index: u64, nap: Duration| -> Result<[f64; 2], train::Error> {
        trainer.reward = Weighted::new(vec![(1.0, Box::new(Sleepy(nap)))]);
        let start = Instant::now();
        let phases = iteration(trainer, index, &mut |_| {})?.seconds;
        let rollouts = ["rollout", "decode"].iter().filter_map(|phase| phases.get(phase)).sum();
        Ok([start.elapsed().as_secs_f64(), rollouts])
    };
    seconds(&mut trainer, 0, Duration::ZERO)?; // warms up
    for round in 0..ROUNDS {
        let [mut alone, mut rollouts, mut together] = [0.0; 3];
        for index in 1..=ITERATIONS {
            // the same iteration twice, one right after the other
            let state = trainer.state();
            let [all, own] = seconds(&mut trainer, round * ITERATIONS + index, Duration::ZERO)?;
            trainer.restore(state);
            let [with_reward, _] = seconds(&mut trainer, round * ITERATIONS + index, Duration::from_secs_f64(own / samples as f64))?;
            (alone, rollouts, together) = (alone + all, rollouts + own, together + with_reward);
        }
        let [alone, rollouts, together] = [alone, rollouts, together].map(|seconds| seconds / ITERATIONS as f64);
        println!(
            "an iteration without waiting {alone:.3} s, of that rollouts {rollouts:.3} s; with a reward that takes as long as those {together:.3} s"
        );
        println!("ratio to the longer of the two: {:.3}; one after the other: {:.3}", together / alone, (alone + rollouts) / alone);
    }
    Ok(())
}
