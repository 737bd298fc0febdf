//! How much of a slow reward is hidden behind the sampling of the next rollouts.
//!
//! ```text
//! cargo run --release --workspace --example measure_overlap -- [MICRO_BATCH]
//! ```
//!
//! A reward that sleeps as long, in all, as the rollouts of an iteration take to sample and decode. One after the other, both phases would add up;
//! what is left to wait for is the reward of the last micro-batch.

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

const ITERATIONS: u64 = 5;
const ROUNDS: u64 = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let micro_batch: usize = std::env::args().nth(1).map_or(Ok(8), |text| text.parse())?;
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/moving-shapes");
    let settings =
        Settings::load(None, &[format!("model.path={:?}", model.display().to_string()), format!("rollout.micro_batch={micro_batch}")])?;
    let samples = settings.rollout.prompts_per_iteration * settings.rollout.group_size;
    let mut trainer = Trainer::new(settings, &Device::flex())?;
    // seconds of an iteration, and of its rollouts
    let mut seconds = |nap: Duration, from: u64| -> Result<[f64; 2], train::Error> {
        trainer.reward = Weighted::new(vec![(1.0, Box::new(Sleepy(nap)))]);
        iteration(&mut trainer, from, &mut |_| {})?; // warms up
        let (start, mut rollouts) = (Instant::now(), 0.0);
        for index in 1..=ITERATIONS {
            let phases = iteration(&mut trainer, from + index, &mut |_| {})?.seconds;
            rollouts += ["rollout", "decode"].iter().filter_map(|phase| phases.get(phase)).sum::<f64>();
        }
        Ok([start.elapsed().as_secs_f64(), rollouts].map(|seconds| seconds / ITERATIONS as f64))
    };
    for round in 0..ROUNDS {
        let [alone, rollouts] = seconds(Duration::ZERO, 200 * round)?;
        let [together, _] = seconds(Duration::from_secs_f64(rollouts / samples as f64), 200 * round + 100)?;
        println!(
            "an iteration without waiting {alone:.3} s, of that rollouts {rollouts:.3} s; with a reward that takes as long as those {together:.3} s"
        );
        println!("ratio to the longer of the two: {:.3}; one after the other: {:.3}", together / alone, (alone + rollouts) / alone);
    }
    Ok(())
}
