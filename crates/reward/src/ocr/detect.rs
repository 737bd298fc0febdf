//! Finding lines of text: a map of probabilities in, upright boxes out (differentiable binarisation, Liao et al., 1911.08947).

use crate::onnx::picture::{Normalisation, Picture, Rectangle, Resampling};
use crate::onnx::{Array, Session};

/// A picture's shorter side is enlarged to at least this, its longer side reduced to at most that; the network wants multiples of 32.
const MIN_SIDE: f64 = 320.0;
const MAX_SIDE: f64 = 960.0;
const MULTIPLE: f64 = 32.0;

/// The statistics of ImageNet, which the network takes in this order although it sees blue first.
const NORMALISATION: Normalisation = Normalisation { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225], bgr: true };

/// A pixel is text above this; a region is, if its mean is above that.
const PIXEL_THRESHOLD: f32 = 0.3;
const REGION_THRESHOLD: f64 = 0.5;

/// Regions are shrunken text: they grow by `area * RATIO / perimeter` on each side.
const UNCLIP_RATIO: f64 = 1.6;

/// Regions with a shorter side, in pixels of the map, are dust.
const MIN_REGION: usize = 3;

/// The lines of text in a picture, in reading order. Text that is not level gets the upright box around it.
pub(super) fn lines(detector: &Session, picture: &Picture) -> Result<Vec<Rectangle>, String> {
    let [width, height] = map_size(picture.width, picture.height);
    let mut values = Vec::with_capacity(3 * width * height);
    picture.resize(width, height, Resampling::Bilinear)?.write(&NORMALISATION, &mut values);
    let map = detector.run(Array { values, shape: vec![1, 3, height, width] })?;
    if map.values.len() != width * height {
        return Err(format!("the detector's output has the shape {:?} for a picture of {height} x {width}", map.shape));
    }
    let scale = [picture.width as f64 / width as f64, picture.height as f64 / height as f64];
    let grown = regions(&map.values, width).into_iter().map(|region| grow(region, scale, picture)).collect();
    Ok(reading_order(grown))
}

fn map_size(width: usize, height: usize) -> [usize; 2] {
    let (width, height) = (width.max(1) as f64, height.max(1) as f64);
    let scale = (MIN_SIDE / width.min(height)).max(1.0);
    let scale = scale.min(MAX_SIDE / width.max(height));
    [width, height].map(|side| ((side * scale / MULTIPLE).round().max(1.0) * MULTIPLE) as usize)
}

/// Boxes of the connected regions (eight neighbours) that are text.
fn regions(map: &[f32], width: usize) -> Vec<Rectangle> {
    let mut seen = vec![false; map.len()];
    let mut found = Vec::new();
    for start in 0..map.len() {
        if map[start] <= PIXEL_THRESHOLD || seen[start] {
            continue;
        }
        let area = flood(map, width, start, &mut seen);
        let big = area.right - area.left >= MIN_REGION && area.bottom - area.top >= MIN_REGION;
        if big && mean(map, width, area) > REGION_THRESHOLD {
            found.push(area);
        }
    }
    found
}

/// The box of the region that holds pixel `start`.
fn flood(map: &[f32], width: usize, start: usize, seen: &mut [bool]) -> Rectangle {
    let height = map.len() / width;
    let mut area = Rectangle { left: width, top: height, right: 0, bottom: 0 };
    let mut open = vec![start];
    seen[start] = true;
    while let Some(pixel) = open.pop() {
        let (x, y) = (pixel % width, pixel / width);
        area = Rectangle { left: area.left.min(x), top: area.top.min(y), right: area.right.max(x + 1), bottom: area.bottom.max(y + 1) };
        for row in y.saturating_sub(1)..(y + 2).min(height) {
            for column in x.saturating_sub(1)..(x + 2).min(width) {
                let next = row * width + column;
                if map[next] > PIXEL_THRESHOLD && !std::mem::replace(&mut seen[next], true) {
                    open.push(next);
                }
            }
        }
    }
    area
}

fn mean(map: &[f32], width: usize, area: Rectangle) -> f64 {
    let rows = map.chunks_exact(width).take(area.bottom).skip(area.top);
    let values: Vec<f64> = rows.flat_map(|row| &row[area.left..area.right]).map(|&p| f64::from(p)).collect();
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The box of the whole text, in pixels of the picture.
fn grow(area: Rectangle, scale: [f64; 2], picture: &Picture) -> Rectangle {
    let (width, height) = ((area.right - area.left) as f64, (area.bottom - area.top) as f64);
    let more = width * height * UNCLIP_RATIO / (2.0 * (width + height));
    let low = |edge: usize, scale: f64| ((edge as f64 - more) * scale).floor().max(0.0) as usize;
    let high = |edge: usize, scale: f64, size: usize| (((edge as f64 + more) * scale).ceil() as usize).min(size);
    Rectangle {
        left: low(area.left, scale[0]),
        top: low(area.top, scale[1]),
        right: high(area.right, scale[0], picture.width),
        bottom: high(area.bottom, scale[1], picture.height),
    }
}

/// From top to bottom; boxes of which one's middle is level with the other are one line, from left to right.
fn reading_order(mut areas: Vec<Rectangle>) -> Vec<Rectangle> {
    areas.sort_by_key(|area| (area.top + area.bottom, area.left));
    let level = |a: &Rectangle, b: &Rectangle| (a.top..a.bottom).contains(&((b.top + b.bottom) / 2));
    for line in areas.chunk_by_mut(level) {
        line.sort_by_key(|area| area.left);
    }
    areas
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(left: usize, top: usize, right: usize, bottom: usize) -> Rectangle {
        Rectangle { left, top, right, bottom }
    }

    #[test]
    fn regions_are_found_whole_and_dust_is_not() {
        let (width, height) = (20, 12);
        let mut map = vec![0.0; width * height];
        let mut fill = |a: Rectangle, p: f32| (a.top..a.bottom).for_each(|y| (a.left..a.right).for_each(|x| map[y * width + x] = p));
        fill(area(2, 1, 9, 5), 0.9);
        fill(area(9, 5, 10, 6), 0.9); // touches it at a corner
        fill(area(15, 1, 17, 3), 0.9); // dust
        fill(area(14, 8, 19, 12), 0.4); // unsure
        assert_eq!(regions(&map, width), [area(2, 1, 10, 6)]);
    }

    #[test]
    fn sizes_are_multiples_within_bounds() {
        assert_eq!(map_size(64, 32), [640, 320]);
        assert_eq!(map_size(832, 480), [832, 480]);
        assert_eq!(map_size(1920, 1080), [960, 544]);
        assert_eq!(map_size(1, 4000), [32, 960]);
    }

    #[test]
    fn lines_are_read_from_the_top_and_words_from_the_left() {
        let ordered = reading_order(vec![area(50, 2, 80, 12), area(0, 30, 20, 40), area(0, 0, 40, 10)]);
        assert_eq!(ordered, [area(0, 0, 40, 10), area(50, 2, 80, 12), area(0, 30, 20, 40)]);
    }

    #[test]
    fn boxes_grow_and_stay_inside() {
        let picture = Picture::of(&video::Frames::new(1, 20, 40, vec![0.0; 2400]).expect("frames"), 0);
        assert_eq!(grow(area(10, 10, 30, 14), [0.5, 0.5], &picture), area(3, 3, 17, 9));
        assert_eq!(grow(area(0, 0, 80, 40), [0.5, 0.5], &picture), area(0, 0, 40, 20));
    }
}
