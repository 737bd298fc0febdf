//! `flash-grpo compare`: recipes side by side, at equal compute, over several seeds.

use super::report::{PAGE, write_report};
use crate::signals;
use crate::watch::Bars;
use anyhow::{Result, bail};
use burn::tensor::Device;
use clap::Args;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use train::compare::{Budget, Cell, Interval, Row, Table, cells, table};
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
    /// What each run may spend: `N` or `Nforwards` (model forwards of one sample), or `Niterations`.
    #[arg(long, default_value = "80000forwards", value_parser = budget)]
    budget: Budget,
    /// Change a value of every recipe.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Where everything is written. A comparison that was broken off goes on where it was; a finished run is not made again.
    #[arg(long, value_name = "DIR", default_value = "runs/compare")]
    output_dir: PathBuf,
}

/// The recipe that others are compared with.
const BASE: &str = "flash-grpo";

fn budget(text: &str) -> Result<Budget, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| format!("`{text}` does not begin with a number"))?;
    match &text[digits..] {
        "" | "forwards" => Ok(Budget::Forwards(number)),
        "iterations" => Ok(Budget::Iterations(number)),
        unit => Err(format!("unknown unit `{unit}`, expected `forwards` or `iterations`")),
    }
}

/// Runs the command.
///
/// # Errors
/// Bad input; a run that fails.
pub fn run_command(args: &CompareArgs) -> Result<()> {
    let load = |path: &PathBuf| -> Result<(String, Settings)> {
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok((name, Settings::load(Some(path), &args.overrides)?))
    };
    let mut recipes = args.recipes.iter().map(load).collect::<Result<Vec<_>>>()?;
    recipes.sort_by_key(|(name, _)| name != BASE);
    let cells = cells(&recipes, args.seeds, args.budget, &args.output_dir)?;
    let stop = Stop::default();
    signals::listen(&stop)?;
    for (i, cell) in cells.iter().enumerate() {
        eprintln!(
            "run {} of {}: {} seed {}, {} iterations",
            i + 1,
            cells.len(),
            cell.row,
            cell.settings.seed,
            cell.settings.train.iterations
        );
        make(cell, &stop)?;
    }
    let table = table(&cells)?;
    let json = serde_json::to_string_pretty(&table)?;
    write_atomically(&args.output_dir.join("table.json"), format!("{json}\n").as_bytes())?;
    let text = markdown(&table);
    write_atomically(&args.output_dir.join("table.md"), text.as_bytes())?;
    let page = args.output_dir.join(PAGE);
    write_atomically(&page, report::comparison_html(&serde_json::to_value(&table)?)?.as_bytes())?;
    println!("{text}\neverything on one page: {}", page.display());
    Ok(())
}

/// Makes a run, or continues it; one that is done must be of the same recipe.
fn make(cell: &Cell, stop: &Stop) -> Result<()> {
    if cell.is_done() {
        return check_same(cell, &cell.settings.output_dir);
    }
    let begin = Begin::Resume { from: None, allow_change: false };
    let mut bars = Bars::quiet();
    let summary = run(cell.settings.clone(), &begin, stop, &Device::flex(), &mut |event| bars.show(event))?;
    let (difference, [low, high]) = (summary.comparison.eval_reward_difference, summary.comparison.eval_reward_interval);
    eprintln!("  held-out reward {difference:+.3}, 95 % interval [{low:+.3}, {high:+.3}]");
    write_report(&cell.settings.output_dir, &cell.settings.output_dir.join(PAGE))
}

fn check_same(cell: &Cell, folder: &Path) -> Result<()> {
    let made = Settings::load(Some(&folder.join("recipe.toml")), &[])?;
    let changes: Vec<String> = cell
        .settings
        .changes_since(&made)
        .into_iter()
        .filter(|change| !change.is_harmless() || change.key == "train.iterations")
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
    let mut text = String::from(
        "| recipe | held-out reward | against the first | area under the curve | iterations | forwards/iteration | s/iteration | gradient variability | collapses |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in &table.rows {
        let _ = writeln!(text, "{}", line(row));
    }
    let _ = writeln!(
        text,
        "\nMeans over {} seeds with 95 % intervals (Student's t over seeds); differences are paired by seed and prompt (bootstrap).",
        table.seeds
    );
    text
}

fn line(row: &Row) -> String {
    let interval = |i: &Interval| format!("{:.3} [{:.3}, {:.3}]", i.mean, i.low, i.high);
    let difference = row.difference.map_or_else(
        || "-".to_owned(),
        |d| {
            let [low, high] = d.interval;
            format!("{:+.3} [{low:+.3}, {high:+.3}]", d.mean)
        },
    );
    format!(
        "| {} | {} | {difference} | {} | {} | {} | {:.2} | {:.2} | {} |",
        row.name,
        interval(&row.reward),
        interval(&row.area_under_curve),
        row.iterations,
        row.forwards_per_iteration,
        row.seconds_per_iteration,
        row.gradient_variability,
        row.collapses
    )
}
