//! Line charts as SVG. Their colours are readable on light and on dark ground.

use plotters::prelude::*;
use std::ops::Range;

/// A line with its name.
#[derive(Debug, Clone)]
pub struct Series {
    /// What it shows.
    pub name: String,
    /// (x, y), in the order of x.
    pub points: Vec<(f64, f64)>,
    /// (x, low, high): a band around the line; may be empty.
    pub band: Vec<(f64, f64, f64)>,
}

impl Series {
    /// A line without a band.
    pub fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points, band: Vec::new() }
    }
}

/// Colours that differ in hue and in brightness, also to colour-blind eyes (Okabe and Ito 2008, the brighter ones darkened).
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 148, 110),
    RGBColor(190, 110, 160),
    RGBColor(200, 140, 0),
    RGBColor(70, 160, 220),
    RGBColor(130, 130, 130),
];
const INK: RGBColor = RGBColor(128, 128, 128);
const SIZE: (u32, u32) = (560, 280);

/// The mean of `window` neighbouring points, for curves that jump.
pub fn smooth(points: &[(f64, f64)], window: usize) -> Vec<(f64, f64)> {
    let mean = |i: usize| {
        let from = (i + 1).saturating_sub(window);
        let part = &points[from..=i];
        (points[i].0, part.iter().map(|(_, y)| y).sum::<f64>() / part.len() as f64)
    };
    (0..points.len()).map(mean).collect()
}

/// A chart of all series; empty if there is nothing to draw. `y` fixes the vertical range.
pub fn lines(title: &str, series: &[Series], y: Option<Range<f64>>) -> String {
    let finite = |(x, y): &(f64, f64)| x.is_finite() && y.is_finite();
    let ends = |series: &Series| series.band.iter().flat_map(|&(x, low, high)| [(x, low), (x, high)]).collect::<Vec<_>>();
    let points: Vec<(f64, f64)> = series.iter().flat_map(|s| s.points.iter().copied().chain(ends(s))).filter(finite).collect();
    let points = || points.iter();
    let (Some(xs), Some(ys)) = (range(points().map(|(x, _)| *x)), range(points().map(|(_, y)| *y))) else {
        return String::new();
    };
    let mut svg = String::new();
    // drawing into a string cannot fail
    let _ = draw(&mut svg, title, series, xs, y.unwrap_or(ys));
    svg.replacen("<svg ", &format!("<svg role=\"img\" aria-label=\"{}\" ", escape(title)), 1).replacen(
        &format!("width=\"{}\" height=\"{}\"", SIZE.0, SIZE.1),
        "",
        1,
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

/// A number as short as it can be read.
fn number(value: f64) -> String {
    let text = match value.abs() {
        size if size != 0.0 && size < 1e-3 => return format!("{value:.1e}"),
        size if size < 10.0 => format!("{value:.3}"),
        _ => format!("{value:.1}"),
    };
    let short = text.trim_end_matches('0').trim_end_matches('.');
    if short == "-0" { "0".into() } else { short.into() }
}

/// A range that holds all values, and is not empty.
fn range(values: impl Iterator<Item = f64>) -> Option<Range<f64>> {
    let (low, high) =
        values.fold(None, |range: Option<(f64, f64)>, v| Some(range.map_or((v, v), |(low, high)| (low.min(v), high.max(v)))))?;
    let margin = if high > low { 0.04 * (high - low) } else { 0.5 * high.abs().max(1e-6) };
    Some(low - margin..high + margin)
}

fn draw(
    svg: &mut String,
    title: &str,
    series: &[Series],
    x: Range<f64>,
    y: Range<f64>,
) -> Result<(), DrawingAreaErrorKind<std::convert::Infallible>> {
    let map = |e: DrawingAreaErrorKind<_>| match e {
        DrawingAreaErrorKind::LayoutError => DrawingAreaErrorKind::LayoutError,
        _ => DrawingAreaErrorKind::SharingError,
    };
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let font = |size: i32| ("sans-serif", size).into_font().color(&INK);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, font(16))
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(60)
        .build_cartesian_2d(x, y)
        .map_err(map)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.25))
        .axis_style(INK)
        .label_style(font(14))
        .x_label_formatter(&|x| number(*x))
        .y_label_formatter(&|y| number(*y))
        .x_labels(6)
        .y_labels(6)
        .draw()
        .map_err(map)?;
    for (i, line) in series.iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        let edge = line.band.iter().map(|&(x, low, _)| (x, low)).chain(line.band.iter().rev().map(|&(x, _, high)| (x, high)));
        chart.draw_series([Polygon::new(edge.collect::<Vec<_>>(), color.mix(0.15))]).map_err(map)?;
        let points = line.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite());
        let drawn = chart.draw_series(LineSeries::new(points, color.stroke_width(2))).map_err(map)?;
        if series.len() > 1 {
            drawn.label(&line.name).legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 14, y)], color.stroke_width(2)));
        }
    }
    if series.len() > 1 {
        chart
            .configure_series_labels()
            .border_style(TRANSPARENT)
            .position(SeriesLabelPosition::UpperLeft)
            .label_font(font(14))
            .draw()
            .map_err(map)?;
    }
    root.present().map_err(map)
}
