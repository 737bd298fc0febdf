//! A rehearsal of a run: loads the recipe's model, makes one iteration (rollouts, decoding, one or more updates), and compares time and peak
//! memory of each phase with the plan. The reward is the mean brightness of the video: models with random weights show nothing else.
//!
//! ```text
//! rehearse RECIPE [KEY=VALUE ..]
//! ```
//!
//! Prints one line of JSON for each phase. Peaks are read from /proc, so on Linux alone.

use burn::tensor::Device;
use reward::{Reward, RewardBreakdown, RewardError, Sample, Weighted};
use std::io::Write;
use std::time::Instant;
use train::events::Event;
use train::iteration::iteration;
use train::plan::{Machine, ModelSizes, Plan, TextLength};
use train::settings::Settings;
use train::trainer::Trainer;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (recipe, overrides) = args.split_first().expect("usage: rehearse RECIPE [KEY=VALUE ..]");
    let settings = Settings::load(Some(recipe.as_ref()), overrides).unwrap_or_else(|error| panic!("{error}"));
    let model = ModelSizes::of(&settings).expect("sizes");
    let plan = Plan::new(&settings, &model, TextLength::of(&settings), Machine::default()).expect("plan");
    let mut phases = Phases { plan, start: Instant::now() };
    let mut trainer = Trainer::new(settings, &Device::flex()).unwrap_or_else(|error| panic!("{error}"));
    trainer.reward = Weighted::new(vec![(1.0, Box::new(Brightness))]);
    phases.end("load");
    let mut running = String::new();
    let metrics = iteration(&mut trainer, 0, &mut |event| match event {
        Event::Phase { name, .. } => {
            if name == "update" {
                phases.end("decode");
            }
            name.clone_into(&mut running);
        }
        Event::Done if running == "rollout" => phases.end("rollout"),
        Event::Done if running == "update" => phases.end("update"),
        _ => {}
    });
    let metrics = metrics.unwrap_or_else(|error| panic!("{error}"));
    print(&serde_json::json!({
        "ratio_deviation": metrics.ratio_deviation,
        "grad_norm": metrics.grad_norm,
        "reward_std": metrics.reward_std,
        "updates": trainer.optimizer.updates,
    }));
}

/// What each phase took, beside what was planned.
struct Phases {
    plan: Plan,
    start: Instant,
}

impl Phases {
    fn end(&mut self, phase: &str) {
        let planned = self.plan.memory.iter().find(|planned| planned.phase == phase).map(|planned| planned.total >> 20);
        let peak = peak_mib();
        print(&serde_json::json!({
            "phase": phase,
            "seconds": self.start.elapsed().as_secs_f64(),
            "peak_mib": peak,
            "planned_mib": planned,
            "planned_to_measured": planned.map(|planned| planned as f64 / peak as f64),
        }));
        // the peak of the next phase starts here
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        self.start = Instant::now();
    }
}

fn print(line: &serde_json::Value) {
    let _ = std::io::stdout().lock().write_all(format!("{line}\n").as_bytes());
}

/// Largest resident memory since it was last reset, in MiB.
fn peak_mib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// Mean of all values of a clip.
struct Brightness;

impl Reward for Brightness {
    fn name(&self) -> &str {
        "brightness"
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Result<RewardBreakdown, RewardError>> {
        let mean = |sample: &Sample<'_>| {
            let values = sample.frames.data();
            values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len() as f64
        };
        batch.iter().map(|sample| Ok(RewardBreakdown { value: mean(sample), components: Default::default() })).collect()
    }
}
