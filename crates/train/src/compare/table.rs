//! What comes out of a comparison.

use super::{Cell, forwards_per_iteration};
use crate::error::Result;
use crate::evaluate::{Evaluation, interval_of_mean};
use crate::run_folder::{AFTER, BEFORE, SUMMARY};
use crate::stats::{mean, std_of};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

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
    /// Reward less that of the first row, see [`Difference`]; none for the first row, and of one prompt under one seed.
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
    /// Seeds that ended more than a fifth of the standard deviation of the base's rewards below the base.
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
    /// 95 %: Student's t over the seeds' mean differences, for a seed decides about all its prompts together; with one seed
    /// [`interval_of_mean`] over the prompts, which says nothing about other seeds.
    pub interval: [f64; 2],
}

/// The row that costs are relative to: full-trajectory training.
pub const COST_BASE: &str = "flow-grpo";

/// What a run may lose before it counts as collapsed, in standard deviations of the base's rewards: 0.05 in the moving-shapes world.
const COLLAPSE: f64 = 0.2;

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
        let base = rewards(&of(first))?;
        for (row, name) in rows.iter_mut().zip(&names).skip(1) {
            row.difference = difference(&base, &rewards(&of(name))?);
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
    let summaries = cells.iter().map(|cell| cell.json::<Value>(SUMMARY)).collect::<Result<Vec<_>>>()?;
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
    let spreads = cells.iter().zip(&curves).map(|(cell, curve)| spread(cell, curve)).collect::<Result<Vec<_>>>()?;
    let collapsed = |&seed: &usize| after[seed] < before[seed] - COLLAPSE * spreads[seed];
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
        collapses: (0..cells.len()).filter(collapsed).count() as u64,
        runs: cells.iter().map(|cell| cell.settings.output_dir.clone()).collect(),
    })
}

fn area(curve: &[(f64, f64)]) -> f64 {
    curve.windows(2).map(|pair| (pair[1].0 - pair[0].0) * (pair[0].1 + pair[1].1) / 2.0).sum()
}

/// What rewards of a run are measured in: the standard deviation of the base's over all evaluated samples, which hardly depends on how many
/// there are; of the curve, where the base's do not differ.
fn spread(cell: &Cell, curve: &[(f64, f64)]) -> Result<f64> {
    let base: Evaluation = cell.json(BEFORE)?;
    let of_samples = std_of(&base.samples.iter().map(|sample| sample.reward.value).collect::<Vec<_>>());
    let of_curve = std_of(&curve.iter().map(|point| point.1).collect::<Vec<_>>());
    Ok(if of_samples > 0.0 { of_samples } else { of_curve })
}

/// Rewards by (seed, prompt, sample).
type Rewards = BTreeMap<(u64, usize, usize), f64>;

fn rewards(cells: &[&Cell]) -> Result<Rewards> {
    let mut rewards = Rewards::new();
    for cell in cells {
        let evaluation: Evaluation = cell.json(AFTER)?;
        rewards.extend(evaluation.samples.iter().map(|sample| ((cell.settings.seed, sample.prompt, sample.sample), sample.reward.value)));
    }
    Ok(rewards)
}

/// Of the samples that both have: differences on the same noise, averaged by prompt, then by seed.
fn difference(base: &Rewards, other: &Rewards) -> Option<Difference> {
    let mut prompts: BTreeMap<(u64, usize), Vec<f64>> = BTreeMap::new();
    for (key, value) in other {
        if let Some(base) = base.get(key) {
            prompts.entry((key.0, key.1)).or_default().push(value - base);
        }
    }
    let mut seeds: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for ((seed, _), differences) in prompts {
        seeds.entry(seed).or_default().push(mean(differences.into_iter()));
    }
    let means: Vec<f64> = seeds.values().map(|prompts| mean(prompts.iter().copied())).collect();
    let Interval { mean, low, high } = Interval::of(&means);
    let interval = match seeds.values().next() {
        Some(prompts) if seeds.len() == 1 => interval_of_mean(prompts, 10_000, 0)?,
        _ => [low, high],
    };
    Some(Difference { mean, interval })
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
    fn differences_are_over_seeds() {
        let rewards = |by: f64| BTreeMap::from([((1, 0, 0), 0.5), ((1, 1, 0), 0.7), ((2, 0, 0), 0.4 + by), ((2, 1, 0), 0.6 + by)]);
        let Difference { mean, interval } = difference(&rewards(0.0), &rewards(0.2)).expect("two seeds");
        let half = 12.706 * 0.1; // the seeds differ by 0 and 0.2
        assert!((mean - 0.1).abs() < 1e-12 && (interval[1] - mean - half).abs() < 1e-9 && (mean - interval[0] - half).abs() < 1e-9);
        let one = |rewards: Rewards| rewards.into_iter().filter(|((seed, ..), _)| *seed == 2).collect();
        let of_one = difference(&one(rewards(0.0)), &one(rewards(0.2))).expect("two prompts");
        assert!((of_one.interval[0] - 0.2).abs() < 1e-12, "both prompts gained as much");
        let single = BTreeMap::from([((1, 0, 0), 0.5)]);
        assert_eq!(difference(&single, &single), None, "one prompt under one seed decides nothing");
        // the second sample of a prompt is missing on one side
        let more = |by: f64| BTreeMap::from([((1, 0, 0), 0.5 + by), ((1, 0, 1), 0.9 + by), ((1, 1, 0), 0.7 + by)]);
        let fewer = more(0.1).into_iter().filter(|((_, _, sample), _)| *sample == 0).collect();
        let of_pairs = difference(&more(0.0), &fewer).expect("two prompts");
        assert!((of_pairs.mean - 0.1).abs() < 1e-12, "{}", of_pairs.mean);
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
