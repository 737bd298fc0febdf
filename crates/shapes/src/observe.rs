//! What the verifier sees of a clip before it reads the caption.
//!
//! Shape legend: F frames, H height, W width; `mask` is [H, W].

use std::ops::Range;

use video::Frames;

use crate::{BACKGROUND, Color, Shape};

/// Distance to the background below which a pixel is background, and above which it is object. Noise of standard deviation 0.05 stays
/// below; the palest of the six colours lies at 0.68.
const MASK: (f32, f32) = (0.25, 0.5);

/// Distance to a reference colour beyond which a pixel no longer counts as that colour, and below which it fully does.
const COLOR_REACH: (f32, f32) = (0.85, 0.35);

/// Distance of the background to [`BACKGROUND`] at which a frame is worthless, and below which it is perfect.
const BACKGROUND_SHIFT: (f32, f32) = (0.30, 0.10);

/// Mean distance of background pixels to the background, likewise. Noise of standard deviation 0.05 has 0.08.
const BACKGROUND_TEXTURE: (f32, f32) = (0.30, 0.12);

/// One frame, as far as the verifier is concerned.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FrameView {
    /// The object's area in pixels: the sum of the mask.
    pub area: f32,
    /// The object's centroid (x, y) in pixels; meaningless where `area` is 0.
    pub centroid: (f32, f32),
    /// Intersection over union of the mask with each ideal shape, by [`Shape::index`].
    pub overlap: [f32; Shape::ALL.len()],
    /// How much of the object has each colour, by [`Color::index`]: a sum over pixels.
    pub color: [f32; Color::ALL.len()],
    /// The weight of the pixels summed up in `color`.
    pub color_weight: f32,
    /// How dark and uniform the background is, in [0, 1].
    pub background: f32,
}

/// `(x - zero) / (one - zero)` clamped to [0, 1]: 0 at `zero`, 1 at `one`, which may lie on either side. 0 for NaN.
pub(crate) fn ramp(x: f32, (zero, one): (f32, f32)) -> f32 {
    let share = (x - zero) / (one - zero);
    // Not `clamp`, which would keep a NaN.
    if share > 0.0 { share.min(1.0) } else { 0.0 }
}

/// Looks at every frame.
///
/// ```text
/// background  b    = median of the frame, per channel
/// mask        m(p) = ramp(|p - b|, 0.25 -> 0.5)
/// area        A    = sum m
/// centroid    c    = sum m(p) (x, y) / A
/// overlap_k        = I / (2 A - I)     I = sum min(m, coverage of shape k, of area A, at c)
/// ```
pub(crate) fn observe(frames: &Frames) -> Vec<FrameView> {
    let mut mask = vec![0.0; frames.height() * frames.width()];
    frames.iter().map(|frame| observe_frame(frame, frames.width(), &mut mask)).collect()
}

fn observe_frame(frame: &[f32], width: usize, mask: &mut [f32]) -> FrameView {
    let background = median(frame);
    let mut view = FrameView::default();
    let (mut sum_x, mut sum_y, mut texture) = (0.0, 0.0, 0.0);
    for (row, (pixels, mask)) in frame.chunks_exact(width * 3).zip(mask.chunks_exact_mut(width)).enumerate() {
        for (column, (pixel, mask)) in pixels.chunks_exact(3).zip(mask).enumerate() {
            let pixel = [pixel[0], pixel[1], pixel[2]].map(unit);
            let distance = distance(pixel, background);
            *mask = ramp(distance, MASK);
            texture += (1.0 - *mask) * distance;
            if *mask > 0.0 {
                view.area += *mask;
                sum_x += *mask * (column as f32 + 0.5);
                sum_y += *mask * (row as f32 + 0.5);
                view.add_color(pixel, *mask);
            }
        }
    }
    let background_area = (mask.len() as f32 - view.area).max(1.0);
    view.background = ramp(distance(background, BACKGROUND), BACKGROUND_SHIFT) * ramp(texture / background_area, BACKGROUND_TEXTURE);
    if view.area > 0.0 {
        view.centroid = (sum_x / view.area, sum_y / view.area);
        view.overlap = Shape::ALL.map(|shape| view.overlap_with(shape, mask, width));
    }
    view
}

impl FrameView {
    /// Adds one pixel to the colour sums.
    ///
    /// ```text
    /// match_k = d_o^3 / (d_o^3 + d_k^3) * ramp(d_k, 0.85 -> 0.35)
    /// ```
    ///
    /// with `d_k` the distance to reference colour k and `d_o` that to the nearest other one: 1 at the reference, about a half midway to
    /// another, 0 there; the cube forgives the outline's pixels, mixed with the background. Grey and white are far from all.
    fn add_color(&mut self, pixel: [f32; 3], mask: f32) {
        let weight = ramp(mask, (0.5, 1.0));
        if weight == 0.0 {
            return;
        }
        let distances = Color::ALL.map(|color| distance(pixel, color.rgb()));
        for (index, sum) in self.color.iter_mut().enumerate() {
            let own = distances[index];
            let others = distances.iter().enumerate().filter(|&(other, _)| other != index);
            let other = others.map(|(_, &distance)| distance).fold(f32::INFINITY, f32::min);
            let (other, cubed) = (other.powi(3), own.powi(3));
            let share = other / (other + cubed).max(f32::MIN_POSITIVE);
            *sum += weight * share * ramp(own, COLOR_REACH);
        }
        self.color_weight += weight;
    }

    /// Intersection over union with the ideal `shape` of the same area at the same centroid, which may reach out of the frame.
    fn overlap_with(&self, shape: Shape, mask: &[f32], width: usize) -> f32 {
        let radius = (self.area / std::f32::consts::PI).sqrt();
        let extent = shape.extent(radius);
        let (x, y) = self.centroid;
        let mut intersection = 0.0;
        for row in pixels(y - extent.up, y + extent.down, mask.len() / width) {
            for column in pixels(x - extent.side, x + extent.side, width) {
                let coverage = shape.coverage(column as f32 + 0.5 - x, row as f32 + 0.5 - y, radius);
                intersection += coverage.min(mask[row * width + column]);
            }
        }
        intersection / (2.0 * self.area - intersection).max(f32::MIN_POSITIVE)
    }
}

/// The pixels that the interval from `low` to `high` touches, one more on either side, within [0, size).
fn pixels(low: f32, high: f32, size: usize) -> Range<usize> {
    // A float-to-integer `as` saturates, so negative values become 0.
    (low - 1.0) as usize..((high + 2.0) as usize).min(size)
}

/// The median of each channel, to 1/255. As long as the object covers less than half of the frame, this is the background.
fn median(frame: &[f32]) -> [f32; 3] {
    let mut histograms = [[0u32; 256]; 3];
    for pixel in frame.chunks_exact(3) {
        for (histogram, &value) in histograms.iter_mut().zip(pixel) {
            histogram[(unit(value) * 255.0 + 0.5) as usize] += 1;
        }
    }
    let half = (frame.len() / 3).div_ceil(2) as u32;
    histograms.map(|histogram| {
        let mut seen = 0;
        let bin = histogram.iter().position(|&count| {
            seen += count;
            seen >= half
        });
        bin.unwrap_or(0) as f32 / 255.0
    })
}

/// The value clamped to [0, 1]; 0 for NaN.
fn unit(value: f32) -> f32 {
    ramp(value, (0.0, 1.0))
}

fn distance(a: [f32; 3], b: [f32; 3]) -> f32 {
    let [r, g, b] = [a[0] - b[0], a[1] - b[1], a[2] - b[2]];
    (r * r + g * g + b * b).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ramp_goes_both_ways_and_swallows_nan() {
        assert_eq!(ramp(0.5, (0.0, 2.0)), 0.25);
        assert_eq!(ramp(0.5, (2.0, 0.0)), 0.75);
        assert_eq!(ramp(3.0, (2.0, 0.0)), 0.0);
        assert_eq!(ramp(f32::NAN, (0.0, 1.0)), 0.0);
    }

    #[test]
    fn median_is_the_background_while_it_fills_more_than_half() {
        let mut frame = vec![0.2; 10 * 3];
        frame[..4 * 3].fill(0.9);
        frame[0] = f32::NAN;
        assert_eq!(median(&frame), [0.2; 3]);
    }
}
