//! The page about several runs: a table, their curves in common charts, then each by itself. Comparisons among them come first.

use crate::chart::{Axes, Series, Size, Style, figure, legend};
use crate::comparison::{self, run_head, run_row};
use crate::load::{Comparison, Run, Subject};
use crate::page::{Level, WINDOW, document, held_out, method, number, sections, series, wide};
use maud::{Markup, html};
use serde_json::Value;
use std::path::Path;

/// The whole page; `place` is the folder it is put into.
pub fn render(subjects: &[Subject], place: &Path) -> String {
    let comparisons: Vec<&Comparison> =
        subjects.iter().filter_map(|subject| if let Subject::Comparison(comparison) = subject { Some(comparison) } else { None }).collect();
    let runs: Vec<&Run> = subjects.iter().filter_map(|subject| if let Subject::Run(run) = subject { Some(run) } else { None }).collect();
    let counts = [(comparisons.len(), "comparison"), (runs.len(), "run")];
    let title = counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| plural(*count, what)).collect::<Vec<_>>().join(", ");
    let main = html! {
        @for comparison in comparisons {
            details.run open { summary { (comparison.name) } (comparison::sections(comparison, place)) }
        }
        @if !runs.is_empty() { (together(&ranked(&runs))) }
    };
    document(&title, html! {}, main)
}

fn plural(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A run, its name on the page, and how its lines look.
struct Ranked<'a> {
    run: &'a Run,
    name: String,
    style: Style,
}

/// By held-out reward, or that of the last rollouts while a run goes on.
fn ranked<'a>(runs: &[&'a Run]) -> Vec<Ranked<'a>> {
    let last = |run: &Run| rollouts(run).last().unwrap_or(f64::NEG_INFINITY);
    let key = |run: &Run| run.result("eval_reward_after").unwrap_or_else(|| last(run));
    let mut runs = runs.to_vec();
    runs.sort_by(|a, b| key(b).total_cmp(&key(a)));
    let of = |(rank, run): (usize, &'a Run)| Ranked { run, name: name(run, &runs), style: Style::ranked(rank) };
    runs.iter().copied().enumerate().map(of).collect()
}

/// The folder's name, with that of the folder above if any two are called alike (`seed-1` of two recipes).
fn name(run: &Run, all: &[&Run]) -> String {
    let alike = |one: &&Run| all.iter().filter(|other| other.name == one.name).count() > 1;
    if !all.iter().any(alike) {
        return run.name.clone();
    }
    let above = run.folder.canonicalize().ok().and_then(|path| Some(path.parent()?.file_name()?.to_string_lossy().into_owned()));
    above.map_or_else(|| run.name.clone(), |above| format!("{above}/{}", run.name))
}

fn rollouts(run: &Run) -> Series {
    series(run, 0, "", |line| number(line, "reward_mean")).smooth(WINDOW)
}

fn together(runs: &[Ranked<'_>]) -> Markup {
    html! {
        section { h2 { "Result" } (wide("result", table(runs))) p.note { "Best first. Differences are against the run's own base, paired by prompt, with a 95 % interval over prompts." } }
        section {
            h2 { "Curves" }
            (legend(&lines(runs, rollouts).into_iter().map(|line| Series { points: Vec::new(), ..line }).collect::<Vec<_>>()))
            div.charts { @for chart in charts(runs) { (chart) } }
        }
        section {
            h2 { "Each run" }
            @for Ranked { run, name, style } in runs {
                details.run { summary { (style.swatch()) " " (name) } (sections(run, Level::Part)) }
            }
        }
    }
}

fn table(runs: &[Ranked<'_>]) -> Markup {
    let row = |Ranked { run, name, style }: &Ranked<'_>| run_row(run, html! { (style.swatch()) " " (name) " (" (method(run)) ")" });
    html! { table { (run_head()) tbody { @for run in runs { (row(run)) } } } }
}

/// One line per run.
fn lines(runs: &[Ranked<'_>], of: impl Fn(&Run) -> Series) -> Vec<Series> {
    runs.iter().map(|Ranked { run, name, style }| Series { name: name.clone(), style: *style, ..of(run) }).collect()
}

fn charts(runs: &[Ranked<'_>]) -> Vec<Markup> {
    let metric = |title: &str, key: &'static str| {
        let lines = lines(runs, |run| series(run, 0, "", |line| number(line, key)).smooth(WINDOW));
        chart(&Axes::iterations(&format!("{title}, mean of {WINDOW}")), &lines)
    };
    vec![
        metric("reward of the rollouts", "reward_mean"),
        chart(&Axes { title: "held-out reward", x: "forwards of one sample", y: None }, &lines(runs, by_forwards)),
        metric("spread of the reward within groups", "reward_group_std"),
        metric("gradient norm before clipping", "grad_norm"),
        metric("share of clipped ratios", "clip_fraction"),
        metric("KL to the reference", "kl"),
        chart(&Axes::iterations("seconds per iteration"), &lines(runs, seconds)),
    ]
}

/// A chart without a legend of its own: there is one for all of them.
fn chart(axes: &Axes<'_>, lines: &[Series]) -> Markup {
    let Some(first) = lines.iter().find(|line| !line.points.is_empty()) else { return html! {} };
    let flat = lines.iter().flat_map(|line| &line.points).all(|(_, y)| *y == first.points[0].1);
    if flat {
        return figure(axes, std::slice::from_ref(first), Size::Normal);
    }
    html! { figure { figcaption { (axes.title) } (crate::chart::drawing(axes, lines, Size::Normal)) } }
}

/// Held-out reward over what was spent: from the base at 0 to the policy at the end.
fn by_forwards(run: &Run) -> Series {
    let spent: Vec<f64> = run
        .metrics
        .iter()
        .scan(0.0, |sum, line| {
            *sum += number(line, "forwards").unwrap_or(0.0);
            Some(*sum)
        })
        .collect();
    let after = |iterations: f64| (iterations as usize).checked_sub(1).map_or(Some(0.0), |last| spent.get(last).copied());
    let during = held_out(run, 0, "").points.into_iter().filter_map(|(iterations, reward)| Some((after(iterations)?, reward)));
    let start = run.result("eval_reward_before").map(|reward| (0.0, reward));
    let end = run.result("eval_reward_after").zip(spent.last()).map(|(reward, spent)| (*spent, reward));
    Series::line(0, "", start.into_iter().chain(during).chain(end).collect())
}

fn seconds(run: &Run) -> Series {
    let total = |line: &Value| line.get("seconds")?.as_object().map(|phases| phases.values().filter_map(Value::as_f64).sum());
    let point = |line: &Value| Some((number(line, "iteration")?, total(line)?));
    Series::line(0, "", run.timings.iter().filter_map(point).collect())
}
