//! What the reward does not see: simple properties of the evaluated videos that a policy which games its reward tends to change.

use std::collections::BTreeMap;
use video::Frames;

/// Frames are averaged over squares of this side before seeds are compared.
const CELL: usize = 4;

/// A property that more than doubles or halves is worth a look.
const SUSPICIOUS: f64 = 2.0;

/// The properties of one clip, with Y the luminance (BT.709) in [0, 1].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClipGuards {
    /// mean Y
    pub brightness: f64,
    /// mean over frames of the standard deviation of Y over pixels
    pub contrast: f64,
    /// mean of |dY/dx| + |dY/dy| between neighbouring pixels
    pub edge_energy: f64,
    /// mean of |Y_{f+1} - Y_f|
    pub motion: f64,
    /// The middle frame's Y, averaged over squares of 4x4 pixels.
    thumbnail: Vec<f64>,
}

impl ClipGuards {
    /// Measures a clip.
    pub fn of(clip: &Frames) -> Self {
        let (height, width) = (clip.height(), clip.width());
        let frames: Vec<Vec<f64>> = clip.iter().map(luminance).collect();
        let mean = |values: &mut dyn Iterator<Item = f64>| crate::stats::mean(values);
        let pairs = || frames.windows(2).flat_map(|pair| pair[0].iter().zip(&pair[1]).map(|(a, b)| (a - b).abs()));
        let edges = |frame: &Vec<f64>| {
            let across = (0..height).flat_map(|y| (1..width).map(move |x| (y * width + x, y * width + x - 1)));
            let down = (1..height).flat_map(|y| (0..width).map(move |x| (y * width + x, (y - 1) * width + x)));
            let difference = |(a, b): (usize, usize)| (frame[a] - frame[b]).abs();
            mean(&mut across.map(difference)) + mean(&mut down.map(difference))
        };
        Self {
            brightness: mean(&mut frames.iter().flatten().copied()),
            contrast: mean(&mut frames.iter().map(|frame| crate::stats::std_of(frame))),
            edge_energy: mean(&mut frames.iter().map(edges)),
            motion: mean(&mut pairs()),
            thumbnail: thumbnail(&frames[frames.len() / 2], width),
        }
    }
}

fn luminance(frame: &[f32]) -> Vec<f64> {
    frame.chunks_exact(3).map(|p| 0.2126 * f64::from(p[0]) + 0.7152 * f64::from(p[1]) + 0.0722 * f64::from(p[2])).collect()
}

fn thumbnail(frame: &[f64], width: usize) -> Vec<f64> {
    let (columns, rows) = (width.div_ceil(CELL), (frame.len() / width).div_ceil(CELL));
    let mut cells = vec![(0.0, 0.0); columns * rows];
    for (i, value) in frame.iter().enumerate() {
        let cell = &mut cells[i / width / CELL * columns + i % width / CELL];
        *cell = (cell.0 + value, cell.1 + 1.0);
    }
    cells.into_iter().map(|(sum, count)| sum / count).collect()
}

/// Means over clips; `diversity` is the standard deviation between the samples of a prompt (of a thumbnail of the middle frame), averaged
/// over its pixels and over prompts, and absent with one sample per prompt.
pub fn summarise(clips: &[(usize, ClipGuards)]) -> BTreeMap<String, f64> {
    let mean = |of: fn(&ClipGuards) -> f64| crate::stats::mean(clips.iter().map(|(_, clip)| of(clip)));
    let mut guards = BTreeMap::from([
        ("brightness".to_owned(), mean(|c| c.brightness)),
        ("contrast".to_owned(), mean(|c| c.contrast)),
        ("edge_energy".to_owned(), mean(|c| c.edge_energy)),
        ("motion".to_owned(), mean(|c| c.motion)),
    ]);
    let mut by_prompt: BTreeMap<usize, Vec<&[f64]>> = BTreeMap::new();
    for (prompt, clip) in clips {
        by_prompt.entry(*prompt).or_default().push(&clip.thumbnail);
    }
    let spreads: Vec<f64> = by_prompt.values().filter(|samples| samples.len() > 1).map(|samples| spread(samples)).collect();
    if !spreads.is_empty() {
        guards.insert("diversity".to_owned(), crate::stats::mean(spreads.into_iter()));
    }
    guards
}

fn spread(thumbnails: &[&[f64]]) -> f64 {
    let pixel = |i: usize| crate::stats::std_of(&thumbnails.iter().map(|thumbnail| thumbnail[i]).collect::<Vec<_>>());
    crate::stats::mean((0..thumbnails[0].len()).map(pixel))
}

/// A sentence for every property that more than doubled or halved.
pub fn alarms(guards: &BTreeMap<String, [f64; 2]>) -> Vec<String> {
    let suspicious = |[before, after]: &[f64; 2]| *before > 1e-6 && !(1.0 / SUSPICIOUS..=SUSPICIOUS).contains(&(after / before));
    let sentence = |(name, [before, after]): (&String, &[f64; 2])| format!("{name} went from {before:.4} to {after:.4}");
    guards.iter().filter(|(_, pair)| suspicious(pair)).map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two frames of 8x8: black, and white on the right half.
    fn clip(white: f32) -> Frames {
        let pixel = |i: usize| if i >= 64 && i % 8 >= 4 { white } else { 0.0 };
        let values = (0..128).flat_map(|i| [pixel(i); 3]).collect();
        Frames::new(2, 8, 8, values).expect("frames")
    }

    #[test]
    fn measures_what_it_says() {
        let guards = ClipGuards::of(&clip(1.0));
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(guards.brightness, 0.25) && close(guards.contrast, 0.25) && close(guards.motion, 0.5), "{guards:?}");
        assert!(close(guards.edge_energy, 0.5 / 7.0), "{guards:?}");
        assert_eq!(guards.thumbnail, [0.0, 1.0, 0.0, 1.0].map(|v: f64| v * ClipGuards::of(&clip(1.0)).thumbnail[1]));
    }

    #[test]
    fn seeds_that_look_alike_raise_an_alarm() {
        let of = |values: [f32; 2]| summarise(&[(0, ClipGuards::of(&clip(values[0]))), (0, ClipGuards::of(&clip(values[1])))]);
        let (before, after) = (of([0.2, 1.0]), of([0.6, 0.65]));
        let pairs = before.iter().map(|(name, b)| (name.clone(), [*b, after[name]])).collect();
        let alarms = alarms(&pairs);
        assert_eq!(alarms.len(), 1, "{alarms:?}");
        assert!(alarms[0].starts_with("diversity went from 0.2000 to 0.0125"), "{alarms:?}");
        assert!(!summarise(&[(0, ClipGuards::of(&clip(1.0)))]).contains_key("diversity"));
    }
}
