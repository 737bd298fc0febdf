//! Methods side by side at equal compute: the matrix of recipes and seeds, and the table that comes out of it.

use crate::error::{Error, Result};
use crate::evaluate::{Evaluation, bootstrap};
use crate::iteration::{Batch, mean, std_of};
use crate::settings::Settings;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

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
                Budget::Forwards(forwards) => forwards / forwards_per_iteration(settings)?,
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

/// Iterations over which the cost is averaged.
const SAMPLED_ITERATIONS: u64 = 200;

/// Model forwards of one sample that an iteration takes on average; see [`crate::sharing::Work::forwards`].
///
/// # Errors
/// None for settings that were loaded.
pub fn forwards_per_iteration(settings: &Settings) -> Result<u64> {
    let prompts = settings.rollout.prompts_per_iteration;
    let cost = |index: u64| -> Result<f64> {
        let work = Batch::plan(settings, prompts, index)?.work(settings.rollout.retain_step);
        Ok(work.forwards(settings.sampling.guidance_scale) as f64)
    };
    let costs = (0..SAMPLED_ITERATIONS).map(cost).collect::<Result<Vec<f64>>>()?;
    Ok(mean(costs.into_iter()).round() as u64)
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
        self.settings.output_dir.join("summary.json").exists()
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

/// The comparison.
#[derive(Debug, Clone, Serialize)]
pub struct Table {
    /// Seeds of every row.
    pub seeds: u64,
    /// One row per recipe, in the order given; the others are compared with the first.
    pub rows: Vec<Row>,
}

/// A recipe over all seeds.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Name of the recipe.
    pub name: String,
    /// Held-out reward at the end.
    pub reward: Interval,
    /// Mean over the budget of the held-out reward, by the trapezoid rule.
    pub area_under_curve: Interval,
    /// Share of the budget -> held-out reward over seeds, from the base at 0 on.
    pub curve: Vec<(f64, Interval)>,
    /// Reward less that of the first row, see [`Difference`].
    pub difference: Option<Difference>,
    /// Share of the budget after which the mean curve reaches what [`COST_BASE`] has at the end; none if it does not.
    pub share_to_match: Option<f64>,
    /// Iterations that the budget lasted for.
    pub iterations: u64,
    /// Forwards of one sample per iteration.
    pub forwards_per_iteration: u64,
    /// Seconds of training per iteration.
    pub seconds_per_iteration: f64,
    /// Standard deviation of the gradient norm over a run relative to its mean, averaged over seeds.
    pub gradient_variability: f64,
    /// Seeds that ended more than 0.05 below the base.
    pub collapses: u64,
    /// Folders of the runs.
    pub runs: Vec<PathBuf>,
}

impl Row {
    /// Mean reward after a share of the budget, by straight lines between the evaluations.
    pub fn reward_at(&self, share: f64) -> Option<f64> {
        self.curve.windows(2).find(|pair| (pair[0].0..=pair[1].0).contains(&share)).map(|pair| {
            let [(x0, y0), (x1, y1)] = [pair[0], pair[1]];
            y0.mean + (y1.mean - y0.mean) * (share - x0) / (x1 - x0).max(f64::MIN_POSITIVE)
        })
    }
}

/// Mean over seeds with the 95 % interval of Student's t.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// Lower end; the mean itself with one seed.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// A difference of two rows, paired by seed and prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Difference {
    /// Mean over seeds and prompts.
    pub mean: f64,
    /// 95 %: Student's t over the seeds' mean differences, for a seed decides about all its prompts together; with one seed a percentile
    /// bootstrap over the prompts, which says nothing about other seeds.
    pub interval: [f64; 2],
}

/// The row that costs are relative to: full-trajectory training.
pub const COST_BASE: &str = "flow-grpo";

/// Reward that a run may lose before it counts as collapsed.
const COLLAPSE: f64 = 0.05;

/// The table of finished cells.
///
/// # Errors
/// A run folder that cannot be read.
pub fn table(cells: &[Cell]) -> Result<Table> {
    let mut names: Vec<&String> = Vec::new();
    for cell in cells {
        if !names.contains(&&cell.row) {
            names.push(&cell.row);
        }
    }
    let of = |name: &String| cells.iter().filter(move |cell| cell.row == *name).collect::<Vec<_>>();
    let mut rows = names.iter().map(|name| row(name, &of(name))).collect::<Result<Vec<_>>>()?;
    if let Some(first) = names.first() {
        let base = prompt_rewards(&of(first))?;
        for (row, name) in rows.iter_mut().zip(&names).skip(1) {
            row.difference = Some(difference(&base, &prompt_rewards(&of(name))?));
        }
    }
    if let Some(target) = rows.iter().find(|row| row.name == COST_BASE).map(|row| row.reward.mean) {
        for row in &mut rows {
            row.share_to_match = share_to_reach(&row.curve, target);
        }
    }
    Ok(Table { seeds: cells.iter().map(|cell| cell.settings.seed).max().unwrap_or(0), rows })
}

fn row(name: &str, cells: &[&Cell]) -> Result<Row> {
    let summaries = cells.iter().map(|cell| cell.json::<Value>("summary.json")).collect::<Result<Vec<_>>>()?;
    let number = |value: &Value, key: &str| value.get(key).and_then(Value::as_f64).unwrap_or(f64::NAN);
    let (before, after): (Vec<f64>, Vec<f64>) =
        summaries.iter().map(|s| (number(s, "eval_reward_before"), number(s, "eval_reward_after"))).unzip();
    let iterations = cells[0].settings.train.iterations as u64;
    let mut curves: Vec<Vec<(f64, f64)>> = Vec::new();
    for (i, cell) in cells.iter().enumerate() {
        let share = |line: &Value| (number(line, "iteration") / iterations as f64, number(line, "eval_reward"));
        let during = cell.lines("eval.jsonl").iter().map(share).collect::<Vec<_>>();
        curves.push([vec![(0.0, before[i])], during, vec![(1.0, after[i])]].concat());
    }
    let areas: Vec<f64> = curves.iter().map(|curve| area(curve)).collect();
    let points = curves.iter().map(Vec::len).min().unwrap_or(0);
    let point = |i: usize| (curves[0][i].0, Interval::of(&curves.iter().map(|curve| curve[i].1).collect::<Vec<_>>()));
    let variability = |cell: &&Cell| {
        let norms: Vec<f64> = cell.lines("metrics.jsonl").iter().map(|line| number(line, "grad_norm")).collect();
        std_of(&norms) / mean(norms.iter().copied()).max(f64::MIN_POSITIVE)
    };
    Ok(Row {
        name: name.to_owned(),
        reward: Interval::of(&after),
        area_under_curve: Interval::of(&areas),
        curve: (0..points).map(point).collect(),
        difference: None,
        iterations,
        forwards_per_iteration: forwards_per_iteration(&cells[0].settings)?,
        seconds_per_iteration: mean(cells.iter().map(|cell| cell.seconds_per_iteration().unwrap_or(f64::NAN))),
        share_to_match: None,
        gradient_variability: mean(cells.iter().map(variability)),
        collapses: before.iter().zip(&after).filter(|(b, a)| **a < **b - COLLAPSE).count() as u64,
        runs: cells.iter().map(|cell| cell.settings.output_dir.clone()).collect(),
    })
}

fn area(curve: &[(f64, f64)]) -> f64 {
    curve.windows(2).map(|pair| (pair[1].0 - pair[0].0) * (pair[0].1 + pair[1].1) / 2.0).sum()
}

/// Mean reward of every (seed, prompt).
fn prompt_rewards(cells: &[&Cell]) -> Result<BTreeMap<(u64, usize), f64>> {
    let mut rewards: BTreeMap<(u64, usize), Vec<f64>> = BTreeMap::new();
    for cell in cells {
        let evaluation: Evaluation = cell.json("evaluation-after.json")?;
        for sample in evaluation.samples {
            rewards.entry((cell.settings.seed, sample.prompt)).or_default().push(sample.reward.value);
        }
    }
    Ok(rewards.into_iter().map(|(key, values)| (key, mean(values.into_iter()))).collect())
}

fn difference(base: &BTreeMap<(u64, usize), f64>, other: &BTreeMap<(u64, usize), f64>) -> Difference {
    let mut seeds: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for ((seed, prompt), value) in other {
        if let Some(base) = base.get(&(*seed, *prompt)) {
            seeds.entry(*seed).or_default().push(value - base);
        }
    }
    let means: Vec<f64> = seeds.values().map(|pairs| mean(pairs.iter().copied())).collect();
    let over_seeds = Interval::of(&means);
    match seeds.values().next() {
        Some(pairs) if seeds.len() == 1 => Difference { mean: over_seeds.mean, interval: bootstrap(pairs, 10_000, 0) },
        _ => Difference { mean: over_seeds.mean, interval: [over_seeds.low, over_seeds.high] },
    }
}

/// Where a curve first reaches `target`, by straight lines between its points.
fn share_to_reach(curve: &[(f64, Interval)], target: f64) -> Option<f64> {
    curve.windows(2).find(|pair| pair[1].1.mean >= target).map(|pair| {
        let [(x0, y0), (x1, y1)] = [pair[0], pair[1]];
        if y0.mean >= target { x0 } else { x0 + (x1 - x0) * (target - y0.mean) / (y1.mean - y0.mean) }
    })
}

impl Interval {
    /// Of one value per seed.
    pub fn of(values: &[f64]) -> Self {
        let n = values.len();
        let center = mean(values.iter().copied());
        if n < 2 {
            return Self { mean: center, low: center, high: center };
        }
        let unbiased = std_of(values) * (n as f64 / (n as f64 - 1.0)).sqrt();
        let half = student(n - 1) * unbiased / (n as f64).sqrt();
        Self { mean: center, low: center - half, high: center + half }
    }
}

/// The 97.5 % quantile of Student's t.
fn student(degrees: usize) -> f64 {
    const TABLE: [f64; 10] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];
    // Cornish and Fisher's expansion around the normal quantile, good to 1e-3 from 11 degrees on
    let (z, v) = (1.959_964_f64, degrees as f64);
    let [z3, z5, z7] = [3, 5, 7].map(|power| z.powi(power));
    let terms = [
        (z3 + z) / (4.0 * v),
        (5.0 * z5 + 16.0 * z3 + 3.0 * z) / (96.0 * v * v),
        (3.0 * z7 + 19.0 * z5 + 17.0 * z3 - 15.0 * z) / (384.0 * v * v * v),
    ];
    TABLE.get(degrees - 1).copied().unwrap_or(z + terms.iter().sum::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_students() {
        let interval = Interval::of(&[1.0, 2.0, 3.0]);
        assert!((interval.mean - 2.0).abs() < 1e-12 && (interval.high - 2.0 - 4.303 / 3.0_f64.sqrt()).abs() < 1e-9, "{interval:?}");
        assert_eq!(Interval::of(&[0.5]), Interval { mean: 0.5, low: 0.5, high: 0.5 });
        assert!((student(30) - 2.042).abs() < 2e-3 && (student(11) - 2.201).abs() < 2e-3);
    }

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
        assert!(super::cells(&recipes, 1, Budget::Forwards(1000), Path::new("out")).is_err());
    }

    #[test]
    fn differences_are_over_seeds() {
        let rewards = |by: f64| BTreeMap::from([((1, 0), 0.5), ((1, 1), 0.7), ((2, 0), 0.4 + by), ((2, 1), 0.6 + by)]);
        let Difference { mean, interval } = difference(&rewards(0.0), &rewards(0.2));
        let half = 12.706 * 0.1; // the seeds differ by 0 and 0.2
        assert!((mean - 0.1).abs() < 1e-12 && (interval[1] - mean - half).abs() < 1e-9 && (mean - interval[0] - half).abs() < 1e-9);
        let one = |rewards: BTreeMap<(u64, usize), f64>| rewards.into_iter().filter(|((seed, _), _)| *seed == 2).collect();
        assert!((difference(&one(rewards(0.0)), &one(rewards(0.2))).interval[0] - 0.2).abs() < 1e-12, "both prompts gained as much");
    }

    #[test]
    fn a_curve_reaches_its_target_between_points() {
        let curve = [(0.0, 0.5), (0.5, 0.7), (1.0, 0.6)].map(|(share, mean)| (share, Interval { mean, low: mean, high: mean }));
        assert!((share_to_reach(&curve, 0.6).expect("reached") - 0.25).abs() < 1e-12);
        assert_eq!((share_to_reach(&curve, 0.5), share_to_reach(&curve, 0.8)), (Some(0.0), None));
    }

    #[test]
    fn the_area_is_the_mean_over_the_budget() {
        assert!((area(&[(0.0, 0.0), (0.5, 1.0), (1.0, 1.0)]) - 0.75).abs() < 1e-12);
    }
}
