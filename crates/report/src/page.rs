//! The page.

use crate::chart::{Series, lines, smooth};
use crate::load::{Run, VideoPair};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::Value;

/// Iterations over which noisy curves are averaged.
const WINDOW: usize = 10;

/// The whole page.
pub fn render(run: &Run) -> String {
    let main = html! {
        (alarms(run))
        (videos(&run.videos))
        section { h2 { "Curves" } (figures(charts(run))) }
        (numbers(run))
        section { h2 { "Recipe" } details { summary { "the resolved recipe, complete" } pre { (run.recipe) } } }
    };
    document(&run.name, outcome(run), main)
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

/// Charts beside each other, as many as fit.
pub(crate) fn figures(charts: Vec<String>) -> Markup {
    html! { div.charts { @for chart in charts { figure { (PreEscaped(chart)) } } } }
}

fn number(value: &Value, key: &str) -> Option<f64> {
    value.get(key).and_then(Value::as_f64)
}

/// The result in one line.
fn outcome(run: &Run) -> Markup {
    let iterations = run.metrics.len();
    let Some(summary) = &run.summary else {
        return html! { p.outcome { "under way: " (iterations) " iterations" } };
    };
    let field = |key: &str| number(summary, key).unwrap_or(f64::NAN);
    let interval = summary.get("eval_reward_interval").and_then(Value::as_array);
    let bound = |i: usize| interval.and_then(|bounds| bounds.get(i)?.as_f64()).unwrap_or(f64::NAN);
    let verdict = if bound(0) > 0.0 {
        "better"
    } else if bound(1) < 0.0 {
        "worse"
    } else {
        "undecided"
    };
    html! {
        p.outcome {
            span class=(format!("verdict {verdict}")) { (verdict) }
            " held-out reward " (format!("{:.3}", field("eval_reward_before"))) " to " strong { (format!("{:.3}", field("eval_reward_after"))) }
            ": " (format!("{:+.3}", field("eval_reward_difference")))
            ", 95 % interval " (format!("[{:+.3}, {:+.3}]", bound(0), bound(1)))
        }
        p {
            (summary.get("method").and_then(Value::as_str).unwrap_or("?")) ", seed " (summary.get("seed").map(ToString::to_string).unwrap_or_default())
            ", " (iterations) " iterations, " (format!("{:.0}", summary.get("num_samples").and_then(Value::as_f64).unwrap_or(0.0)))
            " samples of " (format!("{:.0}", summary.get("num_prompts").and_then(Value::as_f64).unwrap_or(0.0))) " held-out prompts"
        }
    }
}

/// Changes of the videos that no reward asked for.
fn alarms(run: &Run) -> Markup {
    let alarms = run.summary.as_ref().and_then(|summary| summary.get("alarms")).and_then(Value::as_array);
    let texts: Vec<&str> = alarms.into_iter().flatten().filter_map(Value::as_str).collect();
    if texts.is_empty() {
        return html! {};
    }
    html! {
        section.alarm role="alert" {
            h2 { "Look at the videos" }
            p { "The videos changed in ways that the reward does not ask for. That can be reward hacking." }
            ul { @for text in texts { li { (text) } } }
        }
    }
}

fn videos(pairs: &[VideoPair]) -> Markup {
    if pairs.is_empty() {
        return html! {};
    }
    html! {
        section {
            h2 { "Before and after" }
            p { "Held-out prompts, the same noise on both sides; largest gain first, smallest or negative last." }
            div.pairs { @for pair in pairs { (video_pair(pair)) } }
        }
    }
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

/// One value per iteration.
fn series(run: &Run, name: &str, of: impl Fn(&Value) -> Option<f64>) -> Series {
    let point = |line: &Value| Some((number(line, "iteration")?, of(line)?));
    Series::line(name, run.metrics.iter().filter_map(point).collect())
}

fn charts(run: &Run) -> Vec<String> {
    let metric = |key: &'static str| series(run, key, move |line| number(line, key));
    let smoothed = |series: Series| Series { points: smooth(&series.points, WINDOW), ..series };
    let mut reward = vec![smoothed(Series { name: format!("rollouts, mean of {WINDOW}"), ..metric("reward_mean") })];
    if !run.evals.is_empty() {
        let point = |line: &Value| Some((number(line, "iteration")?, number(line, "eval_reward")?));
        reward.push(Series::line("held-out", run.evals.iter().filter_map(point).collect()));
    }
    let all = [
        lines("reward", &reward, None),
        lines(&format!("parts of the reward, mean of {WINDOW}"), &parts(run), None),
        lines("spread of the reward within groups", &[metric("reward_group_std")], None),
        lines("gradient norm before clipping", &[metric("grad_norm")], None),
        lines("share of clipped ratios", &[metric("clip_fraction")], Some(-0.02..1.02)),
        lines("ratio deviation before the first update", &[metric("ratio_deviation")], None),
        lines("KL to the reference", &non_zero(metric("kl")), None),
        lines("seconds per iteration", &times(run), None),
    ];
    all.into_iter().filter(|svg| !svg.is_empty()).collect()
}

fn non_zero(series: Series) -> Vec<Series> {
    if series.points.iter().any(|(_, y)| *y != 0.0) { vec![series] } else { Vec::new() }
}

fn parts(run: &Run) -> Vec<Series> {
    let first = run.metrics.first().and_then(|line| line.get("reward_components")).and_then(Value::as_object);
    let names: Vec<&String> = first.into_iter().flat_map(|parts| parts.keys()).filter(|name| name.contains('.')).collect();
    let of = |name: &String| {
        let series = series(run, name, |line| line.get("reward_components")?.get(name)?.as_f64());
        Series { points: smooth(&series.points, WINDOW), ..series }
    };
    names.into_iter().map(of).collect()
}

fn times(run: &Run) -> Vec<Series> {
    let of = |phase: &str| {
        let point = |line: &Value| Some((number(line, "iteration")?, line.get("seconds")?.get(phase)?.as_f64()?));
        Series::line(phase, run.timings.iter().filter_map(point).collect())
    };
    ["rollout", "reward", "update"].map(of).into_iter().filter(|series| !series.points.is_empty()).collect()
}

/// Tables of what changed and what was checked.
fn numbers(run: &Run) -> Markup {
    let Some(summary) = &run.summary else { return html! {} };
    let pairs = |key: &str| -> Vec<(String, f64, f64)> {
        let table = summary.get(key).and_then(Value::as_object);
        let row = |(name, pair): (&String, &Value)| Some((name.clone(), pair.get(0)?.as_f64()?, pair.get(1)?.as_f64()?));
        table.into_iter().flatten().filter_map(row).collect()
    };
    let plain = |key: &str| -> Vec<(String, String)> {
        let table = summary.get(key).and_then(Value::as_object);
        table.into_iter().flatten().map(|(name, value)| (name.clone(), short(value))).collect()
    };
    html! {
        section {
            h2 { "Numbers" }
            div.tables {
                @for (title, key) in [("parts of the held-out reward", "components"), ("what the reward does not see", "guards")] {
                    (before_and_after(title, &pairs(key)))
                }
                @for (title, key) in [("self-checks", "checks"), ("seconds", "seconds")] {
                    table {
                        caption { (title) }
                        tbody { @for (name, value) in plain(key) { tr { th scope="row" { (name) } td { (value) } } } }
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
