//! The page about a comparison: the table first, then the curves with their bands.

use crate::chart::{Series, lines};
use crate::page::{document, figures};
use maud::{Markup, html};
use serde::Deserialize;

/// What is read of `table.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct Table {
    seeds: u64,
    rows: Vec<Row>,
}

#[derive(Debug, Clone, Deserialize)]
struct Row {
    name: String,
    reward: Interval,
    area_under_curve: Interval,
    curve: Vec<(f64, Interval)>,
    difference: Option<Difference>,
    iterations: u64,
    forwards_per_iteration: u64,
    seconds_per_iteration: f64,
    gradient_variability: f64,
    collapses: u64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Interval {
    mean: f64,
    low: f64,
    high: f64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Difference {
    mean: f64,
    interval: [f64; 2],
}

/// The whole page.
pub fn render(table: &Table) -> String {
    let head = html! {
        p { (table.rows.len()) " recipes, " (table.seeds) " seeds each, at equal compute" }
    };
    let main = html! {
        section { h2 { "Result" } div.wide { (rows(table)) }
            p { "Means over seeds with 95 % intervals (Student's t). The difference is paired by seed and prompt, with a bootstrap interval; what does not contain 0 is in bold." } }
        section { h2 { "Curves" } (figures(vec![curves(table)])) }
    };
    document("Comparison", head, main)
}

fn rows(table: &Table) -> Markup {
    let cost = table.rows.first().map_or(1.0, |first| first.forwards_per_iteration as f64);
    html! {
        table {
            thead { tr {
                @for title in ["recipe", "held-out reward", "against the first", "area under the curve", "iterations", "forwards per iteration", "seconds per iteration", "gradient variability", "collapses"] {
                    th scope="col" { (title) }
                }
            } }
            tbody {
                @for row in &table.rows {
                    tr {
                        th scope="row" { (row.name) }
                        td { (interval(row.reward)) }
                        td { (difference(row.difference)) }
                        td { (interval(row.area_under_curve)) }
                        td { (row.iterations) }
                        td { (row.forwards_per_iteration) (format!(" ({:.2}x)", row.forwards_per_iteration as f64 / cost)) }
                        td { (format!("{:.2}", row.seconds_per_iteration)) }
                        td { (format!("{:.2}", row.gradient_variability)) }
                        td { (row.collapses) }
                    }
                }
            }
        }
    }
}

fn interval(interval: Interval) -> String {
    format!("{:.3} [{:.3}, {:.3}]", interval.mean, interval.low, interval.high)
}

fn difference(difference: Option<Difference>) -> Markup {
    let Some(Difference { mean, interval: [low, high] }) = difference else { return html! { "-" } };
    let text = format!("{mean:+.3} [{low:+.3}, {high:+.3}]");
    if low > 0.0 || high < 0.0 {
        html! { strong { (text) } }
    } else {
        html! { (text) }
    }
}

fn curves(table: &Table) -> String {
    let series = |row: &Row| Series {
        name: row.name.clone(),
        points: row.curve.iter().map(|(share, interval)| (*share, interval.mean)).collect(),
        band: row.curve.iter().map(|(share, interval)| (*share, interval.low, interval.high)).collect(),
    };
    lines("held-out reward over the share of the budget", &table.rows.iter().map(series).collect::<Vec<_>>(), None)
}
