//! The verifier: how well a clip shows a caption.

use video::Frames;

use crate::{
    Caption, Motion,
    observe::{FrameView, observe, ramp},
    render::NOMINAL_TRAVEL,
};

/// Area of the object as a share of min(H, W)^2: too small below, worthless at the first number. Rendered objects have 0.10 to 0.14.
const AREA_GROWS: (f32, f32) = (0.03, 0.075);

/// Likewise for objects too large.
const AREA_SHRINKS: (f32, f32) = (0.30, 0.18);

/// Overlap with the best of the ideal shapes. A pair of blobs, a ring or a bar has less than one half.
const FIT: (f32, f32) = (0.45, 0.82);

/// Mean quality of pairs of frames: the object must be there in nearly every one.
const PRESENCE: (f32, f32) = (0.35, 0.85);

/// Relative standard deviation of the area over the frames.
const AREA_VARIATION: (f32, f32) = (0.6, 0.15);

/// Root mean square distance of the centroids to uniform motion, in nominal travels. An object that jumps by one travel has 0.25.
const WANDER: (f32, f32) = (0.22, 0.08);

/// Overlap with the wanted shape less the overlap with the best other one. An ideal circle or square has 0.16, a triangle 0.3.
const SHAPE_MARGIN: (f32, f32) = (-0.15, 0.10);

/// Displacement along the motion, in nominal travels.
const PROGRESS: (f32, f32) = (0.0, 0.8);

/// Sine of the angle between the displacement and the motion.
const ASTRAY: (f32, f32) = (0.8, 0.3);

/// How well a clip shows a caption. Every number lies in [0, 1].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Score {
    /// The reward: `object * (color + shape + motion) / 3`.
    pub total: f32,
    /// How much of the object has the colour of the caption.
    pub color: f32,
    /// How clearly the object is the shape of the caption rather than another.
    pub shape: f32,
    /// How far the object moves where the caption says.
    pub motion: f32,
    /// Whether there is one compact object of plausible and constant size in every frame, on a dark uniform background, moving evenly.
    pub object: f32,
}

/// Scores a clip of any size against a caption.
///
/// Each frame is split into background and a soft mask of whatever differs from it; the mask has an area, a centroid and an overlap
/// (intersection over union) with each ideal shape of that area put at that centroid. With `ramp(x, a -> b)` going linearly from 0 at
/// `a` to 1 at `b`:
///
/// ```text
/// present_f = ramp(area share, 0.03 -> 0.075) ramp(area share, 0.30 -> 0.18)      per frame f
///             * ramp(best overlap, 0.45 -> 0.82) * background darkness and uniformity
/// object    = ramp(mean_f sqrt(present_f present_{f+1}), 0.35 -> 0.85)
///             * ramp(std/mean of the area, 0.6 -> 0.15)
///             * ramp(rms distance of the centroids to their line fit / nominal travel, 0.22 -> 0.08)
/// color     = mean over object pixels of the match with the colour, against the nearest other one
/// shape     = mean_f ramp(overlap_wanted - overlap_best_other, -0.15 -> 0.10)
/// motion    = ramp(displacement along / nominal travel, 0 -> 0.8) * ramp(sine of the angle, 0.8 -> 0.3)
/// total     = object (color + shape + motion) / 3
/// ```
///
/// Means over frames are weighted by `present`; the displacement is that of the weighted line fit. So a blob that fills the frame, a tint,
/// several blobs, flicker and teleports all lose `object`, hence everything. Values are clamped to [0, 1], NaN reads as 0. The result is a
/// deterministic function of the clip.
pub fn score(frames: &Frames, caption: &Caption) -> Score {
    let size = (frames.width() as f32, frames.height() as f32);
    let views = observe(frames);
    let weights: Vec<f32> = views.iter().map(|view| present(view, size)).collect();
    let path = Path::fit(&views, &weights, size);

    let object = object(&views, &weights, &path);
    let color = color(&views, &weights, caption);
    let shape = weighted_mean(views.iter().map(|view| shape_margin(view, caption)), &weights);
    let motion = motion(&path, caption.motion);
    let total = object * (color + shape + motion) / 3.0;
    Score { total, color, shape, motion, object }
}

/// How much one frame looks like one object of the demo world on its background.
fn present(view: &FrameView, (width, height): (f32, f32)) -> f32 {
    let share = view.area / (width.min(height) * width.min(height));
    let fit = view.overlap.into_iter().fold(0.0, f32::max);
    ramp(share, AREA_GROWS) * ramp(share, AREA_SHRINKS) * ramp(fit, FIT) * view.background
}

/// The mean over neighbouring frames of the geometric mean of their weights, so that an object in every other frame counts for nothing.
fn presence(weights: &[f32]) -> f32 {
    let pairs = weights.windows(2).map(|pair| (pair[0] * pair[1]).sqrt());
    match weights {
        [only] => *only,
        _ => pairs.sum::<f32>() / (weights.len() - 1) as f32,
    }
}

fn object(views: &[FrameView], weights: &[f32], path: &Path) -> f32 {
    let mean = weighted_mean(views.iter().map(|view| view.area), weights);
    let variance = weighted_mean(views.iter().map(|view| (view.area - mean).powi(2)), weights);
    let variation = variance.sqrt() / mean.max(f32::MIN_POSITIVE);
    ramp(presence(weights), PRESENCE) * ramp(variation, AREA_VARIATION) * ramp(path.wander, WANDER)
}

fn color(views: &[FrameView], weights: &[f32], caption: &Caption) -> f32 {
    let index = caption.color.index();
    let total: f32 = views.iter().zip(weights).map(|(view, weight)| weight * view.color_weight).sum();
    let matching: f32 = views.iter().zip(weights).map(|(view, weight)| weight * view.color[index]).sum();
    if total > 0.0 { (matching / total).min(1.0) } else { 0.0 }
}

fn shape_margin(view: &FrameView, caption: &Caption) -> f32 {
    let wanted = caption.shape.index();
    let others = view.overlap.iter().enumerate().filter(|&(index, _)| index != wanted);
    let best_other = others.map(|(_, &overlap)| overlap).fold(0.0, f32::max);
    ramp(view.overlap[wanted] - best_other, SHAPE_MARGIN)
}

fn motion(path: &Path, motion: Motion) -> f32 {
    let (direction_x, direction_y) = motion.direction();
    let (x, y) = path.displacement;
    let along = x * direction_x + y * direction_y;
    let across = x * direction_y - y * direction_x;
    let sine = across.abs() / along.hypot(across).max(f32::MIN_POSITIVE);
    ramp(along, PROGRESS) * ramp(sine, ASTRAY)
}

/// Uniform motion fitted to the centroids by weighted least squares, in nominal travels.
#[derive(Debug, Default)]
struct Path {
    /// The fitted motion (x, y) from the first to the last frame.
    displacement: (f32, f32),
    /// Root mean square distance of the centroids to the fitted ones.
    wander: f32,
}

impl Path {
    /// ```text
    /// v = sum w (t - mean t) (c - mean c) / sum w (t - mean t)^2      t = f / (F - 1) in [0, 1]
    /// wander^2 = mean |c - mean c - v (t - mean t)|^2
    /// ```
    fn fit(views: &[FrameView], weights: &[f32], (width, height): (f32, f32)) -> Self {
        let last = (views.len().max(2) - 1) as f32;
        let times = || (0..views.len()).map(|index| index as f32 / last);
        let xs = || views.iter().map(|view| view.centroid.0 / (width * NOMINAL_TRAVEL));
        let ys = || views.iter().map(|view| view.centroid.1 / (height * NOMINAL_TRAVEL));
        let (mean_t, mean_x, mean_y) = (weighted_mean(times(), weights), weighted_mean(xs(), weights), weighted_mean(ys(), weights));
        let variance = weighted_mean(times().map(|t| (t - mean_t).powi(2)), weights);
        if variance <= 0.0 {
            return Self::default();
        }
        let slope_x = weighted_mean(times().zip(xs()).map(|(t, x)| (t - mean_t) * (x - mean_x)), weights) / variance;
        let slope_y = weighted_mean(times().zip(ys()).map(|(t, y)| (t - mean_t) * (y - mean_y)), weights) / variance;
        let residuals = times()
            .zip(xs().zip(ys()))
            .map(|(t, (x, y))| (x - mean_x - slope_x * (t - mean_t)).powi(2) + (y - mean_y - slope_y * (t - mean_t)).powi(2));
        Self { displacement: (slope_x, slope_y), wander: weighted_mean(residuals, weights).sqrt() }
    }
}

/// The mean of `values` weighted by `weights`; 0 where all weights are.
fn weighted_mean(values: impl Iterator<Item = f32>, weights: &[f32]) -> f32 {
    let total: f32 = weights.iter().sum();
    let sum: f32 = values.zip(weights).map(|(value, weight)| value * weight).sum();
    if total > 0.0 { sum / total } else { 0.0 }
}
