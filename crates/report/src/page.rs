//! The page about one run, and what all pages have in common.

use crate::chart::{Axes, Series, Size, Style, figure};
use crate::load::{Run, VideoPair};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Iterations over which noisy curves are averaged.
pub(crate) const WINDOW: usize = 10;

/// The whole page.
pub fn render(run: &Run) -> String {
    document(&run.name, outcome(run), sections(run, Level::Page))
}

/// How deep a run's sections lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// The page is theirs.
    Page,
    /// They belong to one of several runs.
    Part,
}

impl Level {
    /// A heading of that level.
    pub(crate) fn title(self, text: &str) -> Markup {
        match self {
            Level::Page => html! { h2 { (text) } },
            Level::Part => html! { h3 { (text) } },
        }
    }
}

/// Everything about a run but its result.
pub(crate) fn sections(run: &Run, level: Level) -> Markup {
    html! {
        (alarms(run, level))
        (videos(&run.videos, level))
        section { (level.title("Curves")) div.charts { @for chart in charts(run) { (chart) } } }
        (numbers(run, level))
        section {
            (level.title("Recipe"))
            details { summary { "the resolved recipe, complete" } pre tabindex="0" { (run.recipe) } }
        }
    }
}

/// A page of ours: nothing of it comes from elsewhere.
pub(crate) fn document(title: &str, head: Markup, main: Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:";
                title { (title) " - flash-grpo" }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body { header { h1 { (title) } (head) } main { (main) } }
        }
    };
    page.into_string()
}

/// A table that may be wider than the window: a region to scroll, also with the keyboard.
pub(crate) fn wide(label: &str, table: Markup) -> Markup {
    html! { div.wide role="region" aria-label=(label) tabindex="0" { (table) } }
}

/// What an interval says about a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Better,
    Worse,
    Undecided,
}

impl Verdict {
    pub(crate) fn of([low, high]: [f64; 2]) -> Self {
        if low > 0.0 {
            Self::Better
        } else if high < 0.0 {
            Self::Worse
        } else {
            Self::Undecided
        }
    }

    /// Its word, also its class.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Undecided => "undecided",
        }
    }

    pub(crate) fn badge(self) -> Markup {
        html! { span class=(format!("verdict {}", self.word())) { (self.word()) } }
    }
}

/// `0.702`, or a dash for what is no number.
pub(crate) fn plain(value: f64) -> String {
    if value.is_finite() { format!("{value:.3}") } else { "-".into() }
}

/// `+0.158 [+0.117, +0.198]`; on a phone on two lines.
pub(crate) fn signed(mean: f64, [low, high]: [f64; 2]) -> Markup {
    html! { (format!("{mean:+.3}")) " " span.interval { (format!("[{low:+.3}, {high:+.3}]")) } }
}

pub(crate) fn number(value: &Value, key: &str) -> Option<f64> {
    value.get(key).and_then(Value::as_f64)
}

/// The result in one line.
fn outcome(run: &Run) -> Markup {
    let iterations = run.metrics.len();
    let Some(summary) = &run.summary else {
        return html! { p.outcome { "under way: " (iterations) " iterations" } };
    };
    let field = |key: &str| run.result(key).unwrap_or(f64::NAN);
    // one prompt has no spread that an interval could come from
    let verdict = run.interval().map_or(Verdict::Undecided, Verdict::of);
    html! {
        p.outcome {
            (verdict.badge())
            " held-out reward " (plain(field("eval_reward_before"))) " to " strong { (plain(field("eval_reward_after"))) }
            ": " (format!("{:+.3}", field("eval_reward_difference")))
            @match run.interval() {
                Some([low, high]) => { ", 95 % interval " span.interval { (format!("[{low:+.3}, {high:+.3}]")) } },
                None => ", of one prompt, which has no interval",
            }
        }
        p {
            (method(run)) ", seed " (summary.get("seed").map(ToString::to_string).unwrap_or_default())
            ", " (iterations) " iterations, " (format!("{:.0}", field("num_samples")))
            " samples of " (format!("{:.0}", field("num_prompts"))) " held-out prompts"
        }
    }
}

/// The name of its method.
pub(crate) fn method(run: &Run) -> &str {
    run.summary.as_ref().and_then(|summary| summary.get("method")).and_then(Value::as_str).unwrap_or("?")
}

fn alarms(run: &Run, level: Level) -> Markup {
    let texts = run.alarms();
    if texts.is_empty() {
        return html! {};
    }
    html! {
        section.alarm role="alert" {
            (level.title("Look at the videos"))
            p { "The videos changed in ways that the reward does not ask for. That can be reward hacking." }
            ul { @for text in texts { li { (text) } } }
        }
    }
}

fn videos(pairs: &[VideoPair], level: Level) -> Markup {
    if pairs.is_empty() {
        return html! {};
    }
    html! {
        section {
            (level.title("Before and after"))
            p { "Held-out prompts, the same noise on both sides; largest gain first, smallest or negative last." }
            (video_pairs(pairs))
        }
    }
}

/// Pairs beside each other, as many as fit.
pub(crate) fn video_pairs(pairs: &[VideoPair]) -> Markup {
    html! { div.pairs { @for pair in pairs { (video_pair(pair)) } } }
}

fn video_pair(pair: &VideoPair) -> Markup {
    let reward = |side: usize| pair.rewards[side].map(|reward| format!("{reward:.2}")).unwrap_or_default();
    html! {
        figure.pair {
            figcaption { (pair.prompt) @if let Some(gain) = pair.gain() { " " span.gain { (format!("{gain:+.2}")) } } }
            div {
                (video(&pair.before, &format!("before: {}", pair.prompt))) span { "before " (reward(0)) }
            }
            @if let Some(after) = &pair.after {
                div { (video(after, &format!("after: {}", pair.prompt))) span { "after " (reward(1)) } }
            }
        }
    }
}

fn video(bytes: &[u8], label: &str) -> Markup {
    let source = format!("data:video/mp4;base64,{}", STANDARD.encode(bytes));
    html! { video src=(source) aria-label=(label) controls loop muted autoplay playsinline {} }
}

/// One value per iteration, as the `i`-th line of its chart.
pub(crate) fn series(run: &Run, i: usize, name: &str, of: impl Fn(&Value) -> Option<f64>) -> Series {
    let point = |line: &Value| Some((number(line, "iteration")?, of(line)?));
    Series::line(i, name, run.metrics.iter().filter_map(point).collect())
}

/// Held-out rewards during training.
pub(crate) fn held_out(run: &Run, i: usize, name: &str) -> Series {
    let point = |line: &Value| Some((number(line, "iteration")?, number(line, "eval_reward")?));
    Series::line(i, name, run.evals.iter().filter_map(point).collect())
}

fn charts(run: &Run) -> Vec<Markup> {
    let metric = |key: &'static str| series(run, 0, key, move |line| number(line, key));
    let mut reward = vec![Series { name: format!("rollouts, mean of {WINDOW}"), ..metric("reward_mean") }.smooth(WINDOW)];
    if !run.evals.is_empty() {
        reward.push(Series { style: Style::ranked(1), ..held_out(run, 1, "held-out") });
    }
    let parts_title = format!("parts of the reward, mean of {WINDOW}");
    let all = [
        ("reward", reward),
        (&*parts_title, parts(run)),
        ("which reward decides: correlation with the advantages", deciding(run)),
        ("spread of the reward within groups", vec![metric("reward_group_std")]),
        ("gradient norm before clipping", vec![metric("grad_norm")]),
        ("share of clipped ratios", vec![metric("clip_fraction")]),
        ("ratio deviation before the first update", vec![metric("ratio_deviation")]),
        ("KL to the reference", non_zero(metric("kl"))),
        ("seconds per iteration", times(run)),
    ];
    let over_iterations = |(title, series): &(&str, Vec<Series>)| figure(&Axes::iterations(title), series, Size::Normal);
    let (reward, others) = all.split_at(1);
    let several = each_reward(run).into_iter().map(|series| {
        let title = format!("{}, before its weight, mean of {WINDOW}", series.name);
        figure(&Axes::iterations(&title), &[series], Size::Normal)
    });
    reward.iter().map(over_iterations).chain(several).chain(others.iter().map(over_iterations)).chain(by_step(run)).collect()
}

/// What each denoising step contributed, over the whole run.
fn by_step(run: &Run) -> Vec<Markup> {
    let of = |title: &str, key: &str| {
        let axes = Axes { title, x: "denoising step", y: None };
        figure(&axes, &[Series::line(0, title, step_means(&run.metrics, key))], Size::Normal)
    };
    vec![of("weight of the loss by denoising step", "weight"), of("gradient at the velocity by denoising step", "gradient")]
}

/// (step, mean over its transitions of the entry `key`), in the order of the steps.
fn step_means(lines: &[Value], key: &str) -> Vec<(f64, f64)> {
    let mut sums: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
    for (step, entry) in lines.iter().filter_map(|line| line.get("steps")?.as_object()).flatten() {
        let (Ok(step), Some(value), Some(count)) = (step.parse(), number(entry, key), number(entry, "transitions")) else { continue };
        let (sum, weight) = sums.entry(step).or_default();
        *sum += count * value;
        *weight += count;
    }
    sums.into_iter().map(|(step, (sum, weight))| (step as f64, sum / weight)).collect()
}

fn non_zero(series: Series) -> Vec<Series> {
    if series.points.iter().any(|(_, y)| *y != 0.0) { vec![series] } else { Vec::new() }
}

/// Each of several rewards, for a chart of its own: their scales differ.
fn each_reward(run: &Run) -> Vec<Series> {
    let names: Vec<&str> = component_names(run).into_iter().filter(|name| !name.contains('.')).collect();
    let names = if names.len() > 1 { names } else { Vec::new() };
    names.into_iter().map(|name| component(run, 0, name)).collect()
}

/// What rewards say of themselves, as `REWARD.PART`.
fn parts(run: &Run) -> Vec<Series> {
    let names = component_names(run).into_iter().filter(|name| name.contains('.'));
    names.enumerate().map(|(i, name)| component(run, i, name)).collect()
}

/// Those of every iteration: one may be missing where no sample has it.
fn component_names(run: &Run) -> BTreeSet<&str> {
    let parts = run.metrics.iter().filter_map(|line| line.get("reward_components")?.as_object());
    parts.flat_map(|parts| parts.keys().map(String::as_str)).collect()
}

fn component(run: &Run, i: usize, name: &str) -> Series {
    series(run, i, name, |line| line.get("reward_components")?.get(name)?.as_f64()).smooth(WINDOW)
}

/// Nothing for a single reward.
fn deciding(run: &Run) -> Vec<Series> {
    let first = run.metrics.first().and_then(|line| line.get("reward_advantages")).and_then(Value::as_object);
    let of = |(i, name): (usize, &String)| {
        series(run, i, name, |line| number(line.get("reward_advantages")?.get(name)?, "correlation")).smooth(WINDOW)
    };
    first.into_iter().flat_map(|rewards| rewards.keys()).enumerate().map(of).collect()
}

fn times(run: &Run) -> Vec<Series> {
    let of = |(i, phase): (usize, &&str)| {
        let point = |line: &Value| Some((number(line, "iteration")?, line.get("seconds")?.get(phase)?.as_f64()?));
        Series::line(i, *phase, run.timings.iter().filter_map(point).collect())
    };
    ["rollout", "reward", "update"].iter().enumerate().map(of).filter(|series| !series.points.is_empty()).collect()
}

/// Tables of what changed and what was checked.
fn numbers(run: &Run, level: Level) -> Markup {
    let Some(summary) = &run.summary else { return html! {} };
    let pairs = |key: &str| -> Vec<(String, f64, f64)> {
        let table = summary.get(key).and_then(Value::as_object);
        let row = |(name, pair): (&String, &Value)| Some((name.clone(), pair.get(0)?.as_f64()?, pair.get(1)?.as_f64()?));
        table.into_iter().flatten().filter_map(row).collect()
    };
    let entries = |key: &str| -> Vec<(String, String)> {
        let table = summary.get(key).and_then(Value::as_object);
        table.into_iter().flatten().map(|(name, value)| (name.clone(), short(value))).collect()
    };
    html! {
        section {
            (level.title("Numbers"))
            div.tables {
                @for (title, key) in [("parts of the held-out reward", "components"), ("what the reward does not see", "guards")] {
                    (before_and_after(title, &pairs(key)))
                }
                @for (title, key) in [("self-checks", "checks"), ("seconds", "seconds")] {
                    table {
                        caption { (title) }
                        tbody { @for (name, value) in entries(key) { tr { th scope="row" { (name) } td { (value) } } } }
                    }
                }
            }
        }
    }
}

fn before_and_after(title: &str, rows: &[(String, f64, f64)]) -> Markup {
    if rows.is_empty() {
        return html! {};
    }
    html! {
        table {
            caption { (title) }
            thead { tr { th {} th scope="col" { "before" } th scope="col" { "after" } th scope="col" { "change" } } }
            tbody {
                @for (name, before, after) in rows {
                    tr { th scope="row" { (name) } td { (format!("{before:.3}")) } td { (format!("{after:.3}")) } td { (format!("{:+.3}", after - before)) } }
                }
            }
        }
    }
}

fn short(value: &Value) -> String {
    match value.as_f64() {
        Some(number) if value.is_f64() && number != 0.0 && number.abs() < 1e-3 => format!("{number:.2e}"),
        Some(number) if value.is_f64() => format!("{number:.3}"),
        _ => value.to_string(),
    }
}
