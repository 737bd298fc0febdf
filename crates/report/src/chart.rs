//! Line charts: lines and bands as SVG, title and legend as HTML, so that text keeps its size on a phone.

use maud::{Markup, PreEscaped, html};
use plotters::prelude::*;
use std::ops::Range;

/// A line with its name.
#[derive(Debug, Clone)]
pub struct Series {
    /// What it shows.
    pub name: String,
    /// How it looks.
    pub style: Style,
    /// (x, y), in the order of x.
    pub points: Vec<(f64, f64)>,
    /// (x, low, high): a band around the line; may be empty.
    pub band: Vec<(f64, f64, f64)>,
}

/// Colour and dashes of a line, as places in their lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    color: usize,
    dash: usize,
}

impl Style {
    /// For what others are measured against.
    pub const BASELINE: Self = Self { color: GREY, dash: 0 };

    /// The `i`-th of a few lines in one chart: told apart by colour.
    pub const fn solid(i: usize) -> Self {
        Self { color: i % GREY, dash: 0 }
    }

    /// The `i`-th of many: told apart by colour and dashes together, 24 of them, and neighbours by both.
    pub const fn ranked(i: usize) -> Self {
        // 6 colours and 4 dashes repeat after 12
        Self { color: i % GREY, dash: (i + i / 12) % DASHES.len() }
    }

    fn rgb(self) -> RGBColor {
        COLORS[self.color]
    }

    /// A piece of such a line.
    pub fn swatch(self) -> Markup {
        let RGBColor(r, g, b) = self.rgb();
        let dashes = DASHES[self.dash].map(|(line, gap)| format!("{line} {gap}"));
        html! {
            svg.swatch viewBox="0 0 36 8" aria-hidden="true" {
                line x1="0" y1="4" x2="36" y2="4" stroke=(format!("#{r:02X}{g:02X}{b:02X}")) stroke-width="3" stroke-dasharray=[dashes] {}
            }
        }
    }
}

impl Series {
    /// A line without a band, the `i`-th of its chart.
    pub fn line(i: usize, name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), style: Style::solid(i), points, band: Vec::new() }
    }

    /// Where it ends.
    pub fn last(&self) -> Option<f64> {
        self.points.last().map(|(_, y)| *y)
    }

    /// The mean of `window` neighbouring points, for curves that jump.
    #[must_use]
    pub fn smooth(self, window: usize) -> Self {
        let mean = |i: usize| {
            let part = &self.points[(i + 1).saturating_sub(window)..=i];
            (self.points[i].0, part.iter().map(|(_, y)| y).sum::<f64>() / part.len() as f64)
        };
        Self { points: (0..self.points.len()).map(mean).collect(), ..self }
    }

    /// Everything it draws, ends of the band included.
    fn extent(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let ends = self.band.iter().flat_map(|&(x, low, high)| [(x, low), (x, high)]);
        self.points.iter().copied().chain(ends).filter(|(x, y)| x.is_finite() && y.is_finite())
    }
}

/// Colours that differ in hue and in brightness, also to colour-blind eyes (Okabe and Ito 2008, the brighter ones darkened), with a contrast of
/// at least 3 to the page, light or dark.
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 148, 110),
    RGBColor(190, 110, 160),
    RGBColor(184, 126, 0),
    RGBColor(60, 150, 215),
    RGBColor(130, 130, 130),
];
/// The place of grey, which no recipe or run gets.
const GREY: usize = COLORS.len() - 1;
/// Pixels drawn and left out; `None` is a solid line.
const DASHES: [Option<(u32, u32)>; 4] = [None, Some((9, 4)), Some((3, 3)), Some((18, 5))];
const INK: RGBColor = RGBColor(128, 128, 128);

/// How large a chart is drawn. Its text is meant to be shown at about the size it is drawn at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// One of many.
    Small,
    /// One of some.
    Normal,
    /// Alone on its line, where the window is wide.
    Wide,
}

impl Size {
    fn pixels(self) -> (u32, u32) {
        match self {
            Size::Small => (320, 210),
            Size::Normal => (400, 260),
            Size::Wide => (1120, 430),
        }
    }
}

/// What a chart says besides its lines.
#[derive(Debug, Clone)]
pub struct Axes<'a> {
    /// Above the chart.
    pub title: &'a str,
    /// Below it.
    pub x: &'a str,
    /// The vertical range; that of the lines if absent.
    pub y: Option<Range<f64>>,
}

impl<'a> Axes<'a> {
    /// Over iterations, with the range of the lines.
    pub fn iterations(title: &'a str) -> Self {
        Self { title, x: "iteration", y: None }
    }
}

/// A chart with title and, for more than one line, legend. Lines that never change become a sentence; without any, there is nothing.
pub fn figure(axes: &Axes<'_>, series: &[Series], size: Size) -> Markup {
    if series.iter().all(|series| series.extent().next().is_none()) {
        return html! {};
    }
    if let Some(value) = constant(series) {
        return html! { figure.constant { figcaption { (axes.title) } p { (number(value, 0.0)) " throughout" } } };
    }
    html! {
        figure {
            figcaption { (axes.title) }
            (drawing(axes, series, size))
            @if series.len() > 1 { (legend(series)) }
        }
    }
}

/// Names, swatches and last values, in the order given.
pub fn legend(series: &[Series]) -> Markup {
    html! {
        ul.legend {
            @for line in series {
                li { (line.style.swatch()) " " (line.name) @if let Some(last) = line.last() { " " span.last { (number(last, 0.0)) } } }
            }
        }
    }
}

/// The SVG of a chart; a wide one has a narrow twin for small windows.
pub fn drawing(axes: &Axes<'_>, series: &[Series], size: Size) -> Markup {
    html! {
        @if size == Size::Wide {
            div.wide-only { (PreEscaped(svg(axes, series, Size::Wide))) }
            div.narrow-only { (PreEscaped(svg(axes, series, Size::Normal))) }
        } @else {
            (PreEscaped(svg(axes, series, size)))
        }
    }
}

/// The one value of all points, where more than one is drawn.
fn constant(series: &[Series]) -> Option<f64> {
    let mut values = series.iter().flat_map(Series::extent).map(|(_, y)| y);
    let first = values.next()?;
    let mut rest = values.peekable();
    (rest.peek().is_some() && rest.all(|y| y == first)).then_some(first)
}

fn svg(axes: &Axes<'_>, series: &[Series], size: Size) -> String {
    let points = || series.iter().flat_map(Series::extent);
    let (Some(xs), Some(ys)) = (range(points().map(|(x, _)| x)), range(points().map(|(_, y)| y))) else {
        return String::new();
    };
    let (mut svg, pixels) = (String::new(), size.pixels());
    // drawing into a string cannot fail
    let _ = draw(&mut svg, axes, series, xs, axes.y.clone().unwrap_or(ys), pixels);
    let label = escape(&description(axes.title, series));
    svg.replacen("<svg ", &format!("<svg role=\"img\" aria-label=\"{label}\" "), 1).replacen(
        &format!("width=\"{}\" height=\"{}\"", pixels.0, pixels.1),
        "",
        1,
    )
}

/// The chart in words.
fn description(title: &str, series: &[Series]) -> String {
    let line = |series: &Series| {
        let (first, last) = (series.points.first()?.1, series.last()?);
        Some(format!("{} from {} to {}", series.name, number(first, 0.0), number(last, 0.0)))
    };
    format!("{title}: {}", series.iter().filter_map(line).collect::<Vec<_>>().join("; "))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

/// A number as short as it can be read, but exact enough to tell values apart that differ by `step`.
pub(crate) fn number(value: f64, step: f64) -> String {
    if !value.is_finite() {
        return "-".into();
    }
    let size = value.abs().max(step);
    if size != 0.0 && size < 1e-3 {
        let text = format!("{value:.1e}");
        return if value == 0.0 { "0".into() } else { text.replace(".0e", "e") };
    }
    let decimals = match size {
        _ if step > 0.0 => (0.99 - step.log10()).floor().max(0.0) as usize,
        size if size < 0.01 => 5,
        size if size < 1000.0 => 3,
        _ => 0,
    };
    let text = format!("{value:.decimals$}");
    let short = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if short == "-0" { "0".into() } else { short.into() }
}

/// The vertical range that charts need which are to be compared.
pub fn common_range<'a>(series: impl Iterator<Item = &'a Series>) -> Option<Range<f64>> {
    range(series.flat_map(Series::extent).map(|(_, y)| y))
}

/// A range that holds all values, and is not empty.
fn range(values: impl Iterator<Item = f64>) -> Option<Range<f64>> {
    let (low, high) =
        values.fold(None, |range: Option<(f64, f64)>, v| Some(range.map_or((v, v), |(low, high)| (low.min(v), high.max(v)))))?;
    let margin = if high > low { 0.04 * (high - low) } else { 0.5 * high.abs().max(1e-6) };
    Some(low - margin..high + margin)
}

/// Lines between the labels of an axis.
const TICKS: usize = 6;

fn draw(
    svg: &mut String,
    axes: &Axes<'_>,
    series: &[Series],
    x: Range<f64>,
    y: Range<f64>,
    pixels: (u32, u32),
) -> Result<(), DrawingAreaErrorKind<std::convert::Infallible>> {
    let map = |e: DrawingAreaErrorKind<_>| match e {
        DrawingAreaErrorKind::LayoutError => DrawingAreaErrorKind::LayoutError,
        _ => DrawingAreaErrorKind::SharingError,
    };
    let root = SVGBackend::with_string(svg, pixels).into_drawing_area();
    // the backend writes 0.8 of it: what other programs call 14
    let font = ("sans-serif", 17).into_font().color(&INK);
    let step = |range: &Range<f64>| (range.end - range.start) / (2 * TICKS) as f64;
    let (x_step, y_step) = (step(&x), step(&y));
    let mut chart = ChartBuilder::on(&root)
        .margin(6)
        .margin_right(14)
        .x_label_area_size(42)
        .y_label_area_size(58)
        .build_cartesian_2d(x, y)
        .map_err(map)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.25))
        .axis_style(INK)
        .label_style(font.clone())
        .axis_desc_style(font)
        .x_label_formatter(&|x| number(*x, x_step))
        .y_label_formatter(&|y| number(*y, y_step))
        .x_labels(TICKS)
        .y_labels(TICKS)
        .x_desc(axes.x)
        .draw()
        .map_err(map)?;
    for line in series {
        let edge = line.band.iter().map(|&(x, low, _)| (x, low)).chain(line.band.iter().rev().map(|&(x, _, high)| (x, high)));
        let edge: Vec<(f64, f64)> = edge.filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
        chart.draw_series([Polygon::new(edge, line.style.rgb().mix(0.15))]).map_err(map)?;
    }
    // the first line on top: it is the one that matters most
    for line in series.iter().rev() {
        let points: Vec<(f64, f64)> = line.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
        let stroke = line.style.rgb().stroke_width(2);
        match DASHES[line.style.dash] {
            None => chart.draw_series(LineSeries::new(points, stroke)).map_err(map)?,
            Some((length, gap)) => chart.draw_series(DashedLineSeries::new(points, length, gap, stroke)).map_err(map)?,
        };
    }
    root.present().map_err(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_tell_ticks_apart() {
        assert_eq!(["0.0025", "0.003"], [number(0.0025, 2e-4), number(0.003, 2e-4)].map(|text| text));
        assert_eq!([number(0.0, 0.0), number(0.5, 0.05), number(40.0, 3.0), number(f64::NAN, 0.1)], ["0", "0.5", "40", "-"]);
        assert_eq!([number(2e-7, 0.0), number(0.7016, 0.0), number(-0.000_01, 0.1)], ["2e-7", "0.702", "0"]);
    }

    #[test]
    fn what_never_changes_is_a_sentence() {
        let flat = figure(&Axes::iterations("clipped"), &[Series::line(0, "a", vec![(0.0, 0.0), (1.0, 0.0)])], Size::Normal);
        assert!(flat.into_string().contains("0 throughout"));
        assert_eq!(figure(&Axes::iterations("nothing"), &[], Size::Normal).into_string(), "");
        let broken = [Series::line(0, "a", vec![(0.0, f64::NAN)])];
        assert_eq!(figure(&Axes::iterations("nothing"), &broken, Size::Normal).into_string(), "");
    }

    #[test]
    fn many_lines_look_different() {
        let looks: std::collections::HashSet<String> = (0..24).map(|i| Style::ranked(i).swatch().into_string()).collect();
        assert_eq!(looks.len(), 24);
    }

    #[test]
    fn names_are_escaped() {
        let series = ["<b>", "\"x"].map(|name| Series::line(0, name, vec![(0.0, 1.0), (1.0, 2.0)]));
        let page = figure(&Axes::iterations("<title>"), &series, Size::Wide).into_string();
        assert!(!page.contains("<b>") && !page.contains("<title>") && !page.contains("\"x"), "{page}");
    }
}
