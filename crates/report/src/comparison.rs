//! The page about a comparison: the table first, then differences, curves with their bands, and the runs.

use crate::chart::{Axes, Series, Size, Style, common_range, drawing, figure, legend};
use crate::load::{Comparison, Run};
use crate::page::{Verdict, WINDOW, document, number, plain, series, signed, video_pairs, wide};
use maud::{Markup, html};
use serde::{Deserialize, Deserializer};
use std::path::{Path, PathBuf};

/// What is read of `table.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct Table {
    seeds: u64,
    /// The others are compared with the first.
    pub rows: Vec<Row>,
}

/// A recipe over all seeds.
#[derive(Debug, Clone, Deserialize)]
pub struct Row {
    name: String,
    reward: Interval,
    area_under_curve: Interval,
    curve: Vec<(f64, Interval)>,
    difference: Option<Difference>,
    #[serde(default)]
    share_to_match: Option<f64>,
    iterations: u64,
    forwards_per_iteration: u64,
    #[serde(deserialize_with = "or_nan")]
    seconds_per_iteration: f64,
    #[serde(deserialize_with = "or_nan")]
    gradient_variability: f64,
    collapses: u64,
    #[serde(default)]
    runs: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Interval {
    #[serde(deserialize_with = "or_nan")]
    mean: f64,
    #[serde(deserialize_with = "or_nan")]
    low: f64,
    #[serde(deserialize_with = "or_nan")]
    high: f64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Difference {
    mean: f64,
    interval: [f64; 2],
}

/// A number that is not finite is written as `null`.
fn or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

impl Row {
    /// Where its runs are now: the comparison may have moved, and nothing outside of its folder is read.
    pub(crate) fn run_folders(&self, comparison: &Path) -> Vec<PathBuf> {
        let inside = |run: &PathBuf| {
            let (seed, row) = (run.file_name()?, run.parent()?.file_name()?);
            Some(comparison.join("runs").join(row).join(seed))
        };
        self.runs.iter().filter_map(inside).collect()
    }

    /// Its curve over the budget in percent.
    fn series(&self, style: Style) -> Series {
        Series {
            name: self.name.clone(),
            style,
            points: self.curve.iter().map(|(share, interval)| (100.0 * share, interval.mean)).collect(),
            band: self.curve.iter().map(|(share, interval)| (100.0 * share, interval.low, interval.high)).collect(),
        }
    }

    /// Mean reward at a share of the budget, between the evaluations.
    fn reward_at(&self, share: f64) -> f64 {
        let between = |pair: &[(f64, Interval)]| {
            let [(x0, y0), (x1, y1)] = [pair[0], pair[1]];
            (x0 <= share && share <= x1 && x0 < x1).then(|| y0.mean + (share - x0) / (x1 - x0) * (y1.mean - y0.mean))
        };
        self.curve.windows(2).find_map(between).unwrap_or(f64::NAN)
    }
}

/// The whole page; `place` is the folder it is put into.
pub fn render(comparison: &Comparison, place: &Path) -> String {
    let table = &comparison.table;
    let head = html! { p { (table.rows.len()) " recipes, " (table.seeds) " seeds each, at equal compute" } };
    document(&comparison.name, head, sections(comparison, place))
}

/// Everything about a comparison, best row first.
pub(crate) fn sections(comparison: &Comparison, place: &Path) -> Markup {
    let rows = ranked(comparison);
    html! {
        section { h2 { "Result" } (result(&comparison.table, &rows)) }
        (differences(comparison.table.seeds, &rows))
        (curves(&comparison.table, &rows))
        (each(&comparison.table, &rows))
        (runs(&rows, place))
    }
}

/// A row, how its lines look everywhere on the page, and its runs.
struct Ranked<'a> {
    row: &'a Row,
    style: Style,
    runs: &'a [Run],
    is_base: bool,
}

/// By final reward; what has none comes last.
fn ranked(comparison: &Comparison) -> Vec<Ranked<'_>> {
    let none: &[Run] = &[];
    let rows = comparison.table.rows.iter().enumerate();
    let mut rows: Vec<(usize, &Row, &[Run])> = rows.map(|(i, row)| (i, row, comparison.runs.get(i).map_or(none, Vec::as_slice))).collect();
    let key = |row: &Row| if row.reward.mean.is_finite() { row.reward.mean } else { f64::NEG_INFINITY };
    rows.sort_by(|(_, a, _), (_, b, _)| key(b).total_cmp(&key(a)));
    let of = |(rank, (i, row, runs)): (usize, (usize, _, _))| Ranked { row, style: Style::ranked(rank), runs, is_base: i == 0 };
    rows.into_iter().enumerate().map(of).collect()
}

/// The row that costs are relative to: full-trajectory training if it is there.
const COST_BASE: &str = "flow-grpo";

fn result(table: &Table, rows: &[Ranked<'_>]) -> Markup {
    let cost = table.rows.iter().find(|row| row.name == COST_BASE).or(table.rows.first());
    let (forwards, seconds) = cost.map_or((f64::NAN, f64::NAN), |cost| (cost.forwards_per_iteration as f64, cost.seconds_per_iteration));
    let against = format!("against {}", table.rows.first().map_or("", |row| &row.name));
    let titles = ["recipe", "held-out reward", &against, "at\u{a0}25\u{a0}%", "at\u{a0}50\u{a0}%", "area under the curve", "iterations"];
    let costs = ["budget to match", "forwards per iteration", "seconds per iteration", "gradient variability", "collapses"];
    let body = html! {
        table {
            thead { tr { @for title in titles.iter().chain(&costs) { th scope="col" { (title) } } } }
            tbody {
                @for Ranked { row, style, is_base, .. } in rows {
                    tr {
                        th scope="row" { (style.swatch()) " " (row.name) @if *is_base { " (baseline)" } }
                        td { (interval(row.reward)) }
                        td { (difference(row.difference)) }
                        td { (plain(row.reward_at(0.25))) }
                        td { (plain(row.reward_at(0.5))) }
                        td { (interval(row.area_under_curve)) }
                        td { (row.iterations) }
                        td { (row.share_to_match.map_or("-".into(), |share| format!("{:.0} %", 100.0 * share))) }
                        td { (row.forwards_per_iteration) (times(row.forwards_per_iteration as f64 / forwards)) }
                        td { (format!("{:.2}", row.seconds_per_iteration)) (times(row.seconds_per_iteration / seconds)) }
                        td { (plain(row.gradient_variability)) }
                        td { @if row.collapses > 0 { strong.worse { (row.collapses) } } @else { "0" } }
                    }
                }
            }
        }
    };
    html! {
        (wide("result", body))
        p.note {
            "Best first. Held-out reward and area: means over " (table.seeds) " seeds with 95 % intervals (Student's t). "
            "At 25 and 50 % of the budget: means. Budget to match: where the mean curve reaches what " (COST_BASE) " ends with. In parentheses: cost relative to " (cost.map_or("", |cost| &cost.name)) ". "
            "Gradient variability: standard deviation of the gradient norm over a run relative to its mean. "
            "A collapse is a seed that ended below the model it began with by more than 0.2 standard deviations of that model's rewards."
        }
    }
}

fn times(ratio: f64) -> String {
    if ratio.is_finite() { format!(" ({ratio:.2}x)") } else { String::new() }
}

fn interval(Interval { mean, low, high }: Interval) -> Markup {
    html! { (plain(mean)) @if mean.is_finite() { " " span.interval { (format!("[{low:.3}, {high:.3}]")) } } }
}

fn difference(difference: Option<Difference>) -> Markup {
    let Some(Difference { mean, interval }) = difference else { return html! { "-" } };
    let text = signed(mean, interval);
    match Verdict::of(interval) {
        Verdict::Undecided => html! { (text) },
        verdict => html! { strong class=(verdict.word()) { (text) } },
    }
}

/// Paired differences, with their intervals drawn on one scale.
fn differences(seeds: u64, rows: &[Ranked<'_>]) -> Markup {
    let compared: Vec<(&Ranked<'_>, Difference)> = rows.iter().filter_map(|row| Some((row, row.row.difference?))).collect();
    let Some(base) = rows.iter().find(|row| row.is_base).filter(|_| !compared.is_empty()) else { return html! {} };
    let ends = || compared.iter().flat_map(|(_, difference)| difference.interval);
    let scale = (ends().fold(0.0, f64::min), ends().fold(0.0, f64::max));
    let body = html! {
        table.differences {
            thead { tr { th scope="col" { "recipe" } th scope="col" { "difference" } th scope="col" { "95 % interval, verdict" } } }
            tbody {
                @for (Ranked { row, style, .. }, Difference { mean, interval }) in &compared {
                    tr {
                        th scope="row" { (style.swatch()) " " (row.name) }
                        td { (signed(*mean, *interval)) }
                        td.whisker { (whisker(*mean, *interval, scale)) " " (Verdict::of(*interval).badge()) }
                    }
                }
            }
        }
    };
    html! {
        section {
            h2 { "Against " (base.row.name) }
            (wide("paired differences", body))
            p.note {
                "Held-out reward less that of " (base.row.name) ", paired by seed and prompt: both are evaluated from the same noise. "
                strong.better { "Better" } " and " strong.worse { "worse" } " are said where the 95 % interval (Student's t over the seeds' mean differences; "
                "of one seed, over its prompts) does not contain 0, the dashed line. Of rows that do not differ at all, one in twenty is marked so by chance"
                @if compared.len() > 1 { ": with " (compared.len()) " rows, expect " (format!("{:.1}", compared.len() as f64 / 20.0)) }
                "."
                @if seeds == 1 { " One seed says nothing about others." }
            }
        }
    }
}

/// An interval with its mean, on a scale that all rows share. The text beside it says the same.
fn whisker(mean: f64, [low, high]: [f64; 2], (from, to): (f64, f64)) -> Markup {
    let at = |value: f64| format!("{:.1}", 4.0 + 192.0 * (value - from) / (to - from).max(f64::MIN_POSITIVE));
    html! {
        svg class=(Verdict::of([low, high]).word()) viewBox="0 0 200 16" preserveAspectRatio="none" aria-hidden="true" {
            line.zero x1=(at(0.0)) x2=(at(0.0)) y1="0" y2="16" {}
            line x1=(at(low)) x2=(at(high)) y1="8" y2="8" {}
            line x1=(at(mean)) x2=(at(mean)) y1="2" y2="14" {}
        }
    }
}

/// Rows up to which the bands can be told apart in one chart.
const BANDS: usize = 4;

fn curves(table: &Table, rows: &[Ranked<'_>]) -> Markup {
    let mut lines: Vec<Series> = rows.iter().map(|row| row.row.series(row.style)).collect();
    if lines.len() > BANDS {
        lines.iter_mut().for_each(|line| line.band.clear());
    }
    let axes = Axes { title: "", x: "% of the budget", y: None };
    html! {
        section {
            h2 { "Curves" }
            p.note {
                "Held-out reward over the budget, mean over " (table.seeds) " seeds; best at the end first."
                @if rows.len() > BANDS { " The bands are below, one recipe at a time." } @else { " Bands: 95 % intervals." }
            }
            div.overview { (drawing(&axes, &lines, Size::Wide)) (legend(&lines)) }
        }
    }
}

/// Every row by itself with its band, before that of the base.
fn each(table: &Table, rows: &[Ranked<'_>]) -> Markup {
    let Some(base) = rows.iter().find(|row| row.is_base).filter(|_| rows.len() > 2) else { return html! {} };
    let base = Series { name: format!("{} (baseline)", base.row.name), ..base.row.series(Style::BASELINE) };
    let lines: Vec<Series> = rows.iter().filter(|row| !row.is_base).map(|row| row.row.series(row.style)).collect();
    let y = common_range(lines.iter().chain([&base]));
    let chart = |line: Series| {
        let axes = Axes { title: &line.name.clone(), x: "% of the budget", y: y.clone() };
        html! { figure { figcaption { (axes.title) } (drawing(&axes, &[line, base.clone()], Size::Small)) } }
    };
    html! {
        section {
            h2 { "One by one" }
            p.note { "Each recipe in its colour, " (base.name) " in grey; bands are 95 % intervals over " (table.seeds) " seeds, all on one scale." }
            div.small-charts { @for line in lines { (chart(line)) } }
        }
    }
}

/// The runs of every row, as far as they are there.
fn runs(rows: &[Ranked<'_>], place: &Path) -> Markup {
    if rows.iter().all(|row| row.runs.is_empty()) {
        return html! {};
    }
    html! {
        section {
            h2 { "Runs" }
            @for Ranked { row, style, runs, .. } in rows {
                @if !runs.is_empty() {
                    details.run { summary { (style.swatch()) " " (row.name) ", " (interval(row.reward)) (alarm_mark(runs)) } (row_of_runs(runs, place)) }
                }
            }
        }
    }
}

fn alarm_mark(runs: &[Run]) -> Markup {
    let alarms = runs.iter().filter(|run| !run.alarms().is_empty()).count();
    if alarms == 0 {
        return html! {};
    }
    html! { " " span.verdict.worse { "look at the videos of " (alarms) @if alarms == 1 { " run" } @else { " runs" } } }
}

fn row_of_runs(runs: &[Run], place: &Path) -> Markup {
    let metric = |title: &str, key: &str, window: usize| {
        let lines = runs.iter().enumerate().map(|(i, run)| series(run, i, &run.name, |line| number(line, key)).smooth(window));
        figure(&Axes::iterations(title), &lines.collect::<Vec<_>>(), Size::Small)
    };
    html! {
        (wide("runs", run_table(runs, place)))
        div.small-charts {
            (metric(&format!("reward of the rollouts, mean of {WINDOW}"), "reward_mean", WINDOW))
            (metric("gradient norm before clipping", "grad_norm", 1))
            (metric("share of clipped ratios", "clip_fraction", 1))
        }
        @if let Some(first) = runs.first().filter(|run| !run.videos.is_empty()) {
            p.note { "Largest and smallest gain among the videos of " (first.name) ", before and after:" }
            (video_pairs(&first.videos))
        }
    }
}

/// What came out of each run.
fn run_table(runs: &[Run], place: &Path) -> Markup {
    html! { table { (run_head()) tbody { @for run in runs { (run_row(run, link(run, place))) } } } }
}

/// The titles above [`run_row`].
pub(crate) fn run_head() -> Markup {
    html! {
        thead { tr {
            @for title in ["run", "before", "after", "difference, 95 % interval", "verdict", "iterations"] { th scope="col" { (title) } }
            th.text scope="col" { "alarms" }
        } }
    }
}

/// A run as a row of a table, under a name.
pub(crate) fn run_row(run: &Run, name: Markup) -> Markup {
    let field = |key: &str| run.result(key).unwrap_or(f64::NAN);
    html! {
        tr {
            th scope="row" { (name) }
            td { (plain(field("eval_reward_before"))) }
            td { (plain(field("eval_reward_after"))) }
            @match run.interval() {
                Some(interval) => { td { (signed(field("eval_reward_difference"), interval)) } td { (Verdict::of(interval).badge()) } },
                None if run.summary.is_some() => { td { (format!("{:+.3}", field("eval_reward_difference"))) } td { "one prompt" } },
                None => { td { "-" } td { "under way" } },
            }
            td { (run.metrics.len()) }
            td.text { (run.alarms().join("; ")) }
        }
    }
}

/// To the run's own page, if that lies below this one.
fn link(run: &Run, place: &Path) -> Markup {
    let page = run.folder.join("report.html");
    let below = page.canonicalize().ok().zip(place.canonicalize().ok());
    match below.as_ref().and_then(|(page, place)| page.strip_prefix(place).ok()) {
        Some(path) => html! { a href=(address(path)) { (run.name) } },
        None => html! { (run.name) },
    }
}

/// A relative path as a link.
fn address(path: &Path) -> String {
    let mut address = String::from(".");
    for part in path {
        address.push('/');
        for byte in part.as_encoded_bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => address.push(char::from(*byte)),
                _ => address.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    address
}
