//! Methods side by side at equal compute: the matrix of recipes and seeds, and the table that comes out of it.

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::plan::spread;
use crate::run_folder::SUMMARY;
use crate::settings::Settings;
use crate::stats::mean;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::Path;

mod table;

pub use table::{COST_BASE, Difference, Interval, Row, Table, table};

/// What every run may spend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// Model forwards of one sample; see [`crate::sharing::Work::forwards`].
    Forwards(u64),
    /// Seconds of training, as a [`pilot`] of each recipe predicts them.
    Seconds(f64),
    /// Iterations, however much they cost.
    Iterations(u64),
}

/// Iterations of a pilot; the first is not counted.
const PILOT_ITERATIONS: usize = 3;

/// A short run that tells how long an iteration takes on this machine: made once, and kept with the comparison, so that a budget of seconds
/// means the same iterations when the comparison goes on another day.
pub fn pilot(row: &str, settings: &Settings, folder: &Path) -> Cell {
    let mut settings = settings.clone();
    settings.output_dir = folder.join("pilots").join(row);
    settings.train.iterations = PILOT_ITERATIONS;
    settings.eval.num_prompts = 1;
    settings.eval.samples_per_prompt = 1;
    Cell { row: row.to_owned(), settings }
}

/// One run of the matrix.
#[derive(Debug, Clone)]
pub struct Cell {
    /// Name of the recipe.
    pub row: String,
    /// The run's settings: seed, folder, iterations and evaluations are those of the comparison.
    pub settings: Settings,
}

/// Evaluations during a run, the last one included: at 25, 50, 75 and 100 % of the budget.
const EVALUATIONS: u64 = 4;

/// The matrix: for every seed every recipe, so that a comparison that is broken off has whole seeds.
///
/// # Errors
/// A budget that does not last for one iteration; two recipes of one name; a budget of seconds without the recipe's [`pilot`].
pub fn cells(recipes: &[(String, Settings)], seeds: u64, budget: Budget, folder: &Path) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for (i, (row, _)) in recipes.iter().enumerate() {
        if recipes[..i].iter().any(|(earlier, _)| earlier == row) {
            return Err(Error::Compare {
                reason: format!("two recipes are called `{row}`"),
                hint: "the name of a recipe is that of its file",
            });
        }
    }
    for seed in 1..=seeds {
        for (row, settings) in recipes {
            let iterations = match budget {
                Budget::Iterations(iterations) => iterations,
                Budget::Forwards(forwards) => iterations_within(settings, forwards)?,
                Budget::Seconds(seconds) => (seconds / pilot(row, settings, folder).seconds_per_iteration()?).floor() as u64,
            };
            if iterations == 0 {
                let reason = format!("an iteration of `{row}` costs more than the whole budget, {}", cost(budget, settings)?);
                return Err(Error::Compare { reason, hint: "raise `--budget`" });
            }
            let mut settings = settings.clone();
            settings.seed = seed;
            settings.output_dir = folder.join("runs").join(row).join(format!("seed-{seed}"));
            settings.train.iterations = iterations as usize;
            settings.eval.every = iterations.div_ceil(EVALUATIONS) as usize;
            cells.push(Cell { row: row.clone(), settings });
        }
    }
    Ok(cells)
}

/// Iterations over which the cost is averaged, at most.
const SAMPLED_ITERATIONS: u64 = 200;

/// Model forwards of one sample that an iteration of the run takes on average; see [`crate::sharing::Work::forwards`].
///
/// # Errors
/// None for settings that were loaded.
pub fn forwards_per_iteration(settings: &Settings) -> Result<u64> {
    let sampled = spread(settings.train.iterations as u64, SAMPLED_ITERATIONS);
    let costs = sampled.map(|index| Ok(forwards(settings, index)? as f64)).collect::<Result<Vec<f64>>>()?;
    Ok(mean(costs.into_iter()).round() as u64)
}

fn forwards(settings: &Settings, index: u64) -> Result<u64> {
    let work = Batch::plan(settings, settings.rollout.prompts_per_iteration, index)?.work(settings.rollout.retain_step);
    Ok(work.forwards(settings.sampling.widest_guidance()))
}

/// Iterations from the first on that so many forwards pay for. A sliding window costs more in some places than in others.
fn iterations_within(settings: &Settings, budget: u64) -> Result<u64> {
    let (mut iterations, mut left) = (0, budget);
    while let Some(rest) = left.checked_sub(forwards(settings, iterations)?) {
        (iterations, left) = (iterations + 1, rest);
    }
    Ok(iterations)
}

/// What an iteration costs, in words.
fn cost(budget: Budget, settings: &Settings) -> Result<String> {
    Ok(match budget {
        Budget::Seconds(seconds) => format!("{seconds} s"),
        _ => format!("{} forwards", forwards_per_iteration(settings)?),
    })
}

impl Cell {
    /// Whether the run is over.
    pub fn is_done(&self) -> bool {
        self.settings.output_dir.join(SUMMARY).exists()
    }

    fn json<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let path = self.settings.output_dir.join(name);
        let broken =
            |reason: String| Error::Compare { reason: format!("`{}`: {reason}", path.display()), hint: "delete the folder of that run" };
        let text = std::fs::read_to_string(&path).map_err(|e| broken(e.to_string()))?;
        serde_json::from_str(&text).map_err(|e| broken(e.to_string()))
    }

    /// Mean seconds of training per iteration; the first, which warms up, is not counted if there are others.
    ///
    /// # Errors
    /// A run that has made no iteration.
    pub fn seconds_per_iteration(&self) -> Result<f64> {
        let total =
            |line: &Value| line.get("seconds").and_then(Value::as_object).map_or(0.0, |s| s.values().filter_map(Value::as_f64).sum());
        let seconds: Vec<f64> = self.lines("timings.jsonl").iter().map(total).collect();
        let warm = seconds.get(1..).filter(|warm| !warm.is_empty()).unwrap_or(&seconds);
        if warm.is_empty() {
            let reason = format!("`{}` has no finished iteration", self.settings.output_dir.display());
            return Err(Error::Compare { reason, hint: "delete the folder of that run" });
        }
        Ok(mean(warm.iter().copied()))
    }

    fn lines(&self, name: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.settings.output_dir.join(name)).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_spent_by_forwards() {
        let flash = Settings::load(None, &["rollout.shared_prefix=false".into()]).expect("settings");
        let all = ["method.name=flow-grpo", "method.stochastic={type=\"all\"}", "rollout.shared_prefix=false"].map(str::to_owned);
        let full = Settings::load(None, &all).expect("settings");
        // 64 samples of 10 steps; 1 or 9 of them are trained, and backpropagating counts two
        assert_eq!(forwards_per_iteration(&flash).expect("cost"), 64 * 13);
        let shared = Settings::load(None, &[]).expect("settings");
        let cost = forwards_per_iteration(&shared).expect("cost");
        assert!(cost.abs_diff(64 * 13 - 56 * 6) <= 12, "a prefix of 0 to 4 steps, the step and its update, in 7 of 8 rollouts: {cost}");
        assert_eq!(forwards_per_iteration(&full).expect("cost"), 64 * 37);
        let recipes = [("flash".to_owned(), flash), ("full".to_owned(), full)];
        let cells = cells(&recipes, 2, Budget::Forwards(64 * 37 * 10), Path::new("out")).expect("cells");
        let iterations: Vec<usize> = cells.iter().map(|cell| cell.settings.train.iterations).collect();
        assert_eq!(iterations, [28, 10, 28, 10]);
        assert_eq!(cells[2].settings.seed, 2);
        // of a window's first step a group samples and replays one velocity; at its next place, of the step before it too it samples one
        let window = ["method.name=mixgrpo", "method.stochastic={ type = \"sliding\", size = 4, stride = 1, every = 25 }"];
        let window = Settings::load(None, &window.map(str::to_owned)).expect("settings");
        let first = 64 * 22 - 56 * 4;
        assert_eq!(iterations_within(&window, 14 * first - 1).expect("iterations"), 13);
        assert_eq!(iterations_within(&window, 25 * first + first - 56).expect("iterations"), 26);
        assert!(super::cells(&recipes, 1, Budget::Forwards(1000), Path::new("out")).is_err());
    }
}
