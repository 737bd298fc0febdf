//! `flash-grpo compare`: recipes side by side, at equal compute, over several seeds.

use super::report::{PAGE, write_report};
use super::train::load as load_recipe;
use crate::device::DeviceArg;
use crate::signals;
use crate::watch::Bars;
use anyhow::{Result, bail};
use burn::tensor::Device;
use clap::Args;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use train::compare::{Budget, COST_BASE, Cell, Interval, Row, Table, cells, pilot, table};
use train::pool::help_until;
use train::run::{Begin, run};
use train::settings::Settings;
use train::stop::Stop;
use wan::weights::write_atomically;

/// Arguments of `compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The recipes; all others are compared with `flash-grpo`, or with the first if none has that name.
    #[arg(value_name = "RECIPE", required = true)]
    recipes: Vec<PathBuf>,
    /// Seeds 1 to N.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// What each run may spend: `N` or `Nforwards` (model forwards of one sample), `Nseconds` of training (as a short run of each recipe
    /// predicts them), or `Niterations`.
    #[arg(long, default_value = "16000forwards", value_parser = budget)]
    budget: Budget,
    /// Two seeds of a tiny budget, prompts and evaluation: shows in minutes that everything runs, and nothing about methods.
    #[arg(long, conflicts_with_all = ["seeds", "budget"])]
    quick: bool,
    /// Runs at a time, for machines with more cores than a run uses.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = jobs)]
    jobs: usize,
    /// Change a value of every recipe. May be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    device: DeviceArg,
    /// Where everything is written. A comparison that was broken off goes on where it was; a finished run is not made again.
    #[arg(long, value_name = "DIR", default_value = "runs/compare")]
    output_dir: PathBuf,
}

fn jobs(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|jobs| *jobs >= 1).ok_or_else(|| format!("`{text}` is not a number from 1"))
}

/// The recipe that others are compared with.
const BASE: &str = "flash-grpo";

/// What `--quick` changes: few prompts, few videos, no checkpoints on the way.
const QUICK: [&str; 6] = [
    "rollout.prompts_per_iteration=2",
    "eval.num_prompts=6",
    "eval.samples_per_prompt=1",
    "eval.videos=1",
    "train.max_skipped=0.5",
    "checkpoint.every=0",
];

/// Seeds and budget of `--quick`.
const QUICK_MATRIX: (u64, Budget) = (2, Budget::Forwards(1500));

fn budget(text: &str) -> Result<Budget, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| format!("`{text}` does not begin with a number"))?;
    match &text[digits..] {
        "" | "forwards" => Ok(Budget::Forwards(number)),
        "seconds" => Ok(Budget::Seconds(number as f64)),
        "iterations" => Ok(Budget::Iterations(number)),
        unit => Err(format!("unknown unit `{unit}`, expected `forwards`, `seconds` or `iterations`")),
    }
}

/// Runs the command.
///
/// # Errors
/// Bad input; a run that fails.
pub fn run_command(args: &CompareArgs) -> Result<()> {
    let quick = QUICK.iter().filter(|_| args.quick).map(|&change| change.to_owned());
    let overrides: Vec<String> = quick.chain(args.overrides.iter().cloned()).collect();
    let load = |path: &PathBuf| -> Result<(String, Settings)> {
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok((name, load_recipe(Some(path), &overrides)?))
    };
    let mut recipes = args.recipes.iter().map(load).collect::<Result<Vec<_>>>()?;
    recipes.sort_by_key(|(name, _)| name != BASE);
    let (seeds, budget) = if args.quick { QUICK_MATRIX } else { (args.seeds, args.budget) };
    let device = args.device.open()?;
    let stop = Stop::default();
    signals::listen(&stop)?;
    if let Budget::Seconds(_) = budget {
        let pilots: Vec<Cell> = recipes.iter().map(|(row, settings)| pilot(row, settings, &args.output_dir)).collect();
        make_all(&pilots, 1, &device, &stop)?; // one at a time: they are there to be timed
    }
    let cells = cells(&recipes, seeds, budget, &args.output_dir)?;
    make_all(&cells, args.jobs, &device, &stop)?;
    let table = table(&cells)?;
    let json = serde_json::to_string_pretty(&table)?;
    write_atomically(&args.output_dir.join("table.json"), format!("{json}\n").as_bytes())?;
    let text = markdown(&table);
    write_atomically(&args.output_dir.join("table.md"), text.as_bytes())?;
    let page = args.output_dir.join(PAGE);
    write_report(&args.output_dir, &page)?;
    println!("{text}\neverything on one page: {}", page.display());
    Ok(())
}

/// Makes all runs, `jobs` at a time, in order. After an error none is begun; those under way go on to their end.
fn make_all(cells: &[Cell], jobs: usize, device: &Device, stop: &Stop) -> Result<()> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        while let Some((i, cell)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, cells.get(i)?))) {
            let (row, seed, iterations) = (&cell.row, cell.settings.seed, cell.settings.train.iterations);
            eprintln!("run {} of {}: {row} seed {seed}, {iterations} iterations", i + 1, cells.len());
            make(cell, device, stop).inspect_err(|_| next.store(cells.len(), Ordering::Relaxed))?;
        }
        Ok(())
    };
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..jobs.min(cells.len())).map(|_| scope.spawn(work)).collect();
        let own = work();
        help_until(|| others.iter().all(|worker| worker.is_finished()));
        let join =
            |worker: ScopedJoinHandle<'_, Result<()>>| worker.join().unwrap_or_else(|_| bail!("a run panicked; its message is above"));
        std::iter::once(own).chain(others.into_iter().map(join)).collect()
    });
    results.into_iter().collect()
}

/// Makes a run, or continues it; one that is done must be of the same recipe.
fn make(cell: &Cell, device: &Device, stop: &Stop) -> Result<()> {
    if cell.is_done() {
        return check_same(cell, &cell.settings.output_dir);
    }
    let begin = Begin::Resume { from: None, allow_change: false };
    let mut bars = Bars::quiet();
    let summary = run(cell.settings.clone(), &begin, stop, device, &mut |event| bars.show(event))?;
    eprintln!("  {} seed {}: held-out reward {}", cell.row, cell.settings.seed, summary.comparison.gain(3));
    write_report(&cell.settings.output_dir, &cell.settings.output_dir.join(PAGE))
}

fn check_same(cell: &Cell, folder: &Path) -> Result<()> {
    let made = Settings::load(Some(&folder.join("recipe.toml")), &[])?;
    let changes: Vec<String> = cell
        .settings
        .changes_since(&made)
        .into_iter()
        // a finished run has no checksums beside it: other names of prompts or model may be other ones
        .filter(|change| !change.is_harmless() || change.names_input() || change.key == "train.iterations")
        .map(|change| format!("\n  {change}"))
        .collect();
    if changes.is_empty() {
        return Ok(());
    }
    bail!(
        "`{}` holds a finished run of another recipe:{}\nhint: give another `--output-dir`, or delete that folder",
        folder.display(),
        changes.concat()
    )
}

/// The table for people.
fn markdown(table: &Table) -> String {
    let titles = [
        "recipe",
        "held-out reward",
        "against the first",
        "at 25 %",
        "at 50 %",
        "area under the curve",
        "iterations",
        "forwards/iteration",
        "s/iteration",
        "budget to match",
        "gradient variability",
        "collapses",
    ];
    let mut text = format!("| {} |\n|{}\n", titles.join(" | "), "---|".repeat(titles.len()));
    let base = table.rows.iter().find(|row| row.name == COST_BASE);
    for row in &table.rows {
        let _ = writeln!(text, "| {} |", line(row, base).join(" | "));
    }
    let _ = writeln!(
        text,
        "\nMeans over {} seeds with 95 % intervals (Student's t over seeds); differences are paired by seed and prompt. \
         In brackets: relative to `{COST_BASE}`; \"budget to match\" is the share of the budget after which a recipe has the reward that \
         `{COST_BASE}` ends with.",
        table.seeds
    );
    text
}

fn line(row: &Row, base: Option<&Row>) -> [String; 12] {
    let interval = |i: &Interval| format!("{:.3} [{:.3}, {:.3}]", i.mean, i.low, i.high);
    let difference = row.difference.map_or("-".to_owned(), |d| format!("{:+.3} [{:+.3}, {:+.3}]", d.mean, d.interval[0], d.interval[1]));
    let relative = |of: fn(&Row) -> f64| base.map_or(String::new(), |base| format!(" ({:.2}x)", of(row) / of(base)));
    [
        row.name.clone(),
        interval(&row.reward),
        difference,
        row.reward_at(0.25).map_or("-".to_owned(), |reward| format!("{reward:.3}")),
        row.reward_at(0.5).map_or("-".to_owned(), |reward| format!("{reward:.3}")),
        interval(&row.area_under_curve),
        row.iterations.to_string(),
        format!("{}{}", row.forwards_per_iteration, relative(|row| row.forwards_per_iteration as f64)),
        format!("{:.2}{}", row.seconds_per_iteration, relative(|row| row.seconds_per_iteration)),
        row.share_to_match.map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share)),
        format!("{:.2}", row.gradient_variability),
        row.collapses.to_string(),
    ]
}
