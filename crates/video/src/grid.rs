//! Still pictures of clips, for looking at results.

use std::path::Path;

use crate::{Frames, VideoError, atomic::write_file, frames::to_byte};

/// Pixels between frames.
const GAP: usize = 2;

/// Pixels between clips: more, so that a row with several clips reads as several.
const CLIP_GAP: usize = 8;

/// The byte between frames: mid grey, unlike most contents.
const GAP_VALUE: u8 = 96;

/// The longest side of a sheet: what a screen still shows and an editor still opens.
const MAX_SIDE: usize = 4096;

/// Frames of a clip on a sheet where not all of them fit.
const FEW: usize = 8;

/// Writes a contact sheet as PNG: each clip is a strip of its frames from left to right, and `columns` strips stand side by side.
///
/// A sheet has at most 4096 pixels a side: where all frames would take more, each clip shows 8 that lie evenly in it, its first and last among
/// them, and where these take more, they are shrunk. Clips may differ in size; each cell is as large as the largest needs. The file appears
/// whole or not at all.
///
/// # Errors
///
/// When there is no clip or no column, so many clips that they do not fit at any size, or the file cannot be written.
pub fn write_png_grid(path: impl AsRef<Path>, clips: &[&Frames], columns: usize) -> Result<(), VideoError> {
    let layout = Layout::new(clips, columns.min(clips.len()))?;
    write_file(path.as_ref(), &Sheet::draw(clips, &layout).encode()?)
}

/// Where everything lies on a sheet.
struct Layout {
    columns: usize,
    /// Most frames of a clip.
    frames: usize,
    /// Pixels that are averaged to one, along each side.
    shrink: usize,
    /// Size of a strip with the gap before it.
    cell: [usize; 2],
    /// Size of the sheet.
    size: [usize; 2],
}

impl Layout {
    /// The largest that fits.
    fn new(clips: &[&Frames], columns: usize) -> Result<Self, VideoError> {
        let most = clips.iter().map(|clip| clip.num_frames()).max().unwrap_or(0);
        let all = Self::of(clips, columns, most, 1);
        if all.fits() {
            return Ok(all);
        }
        let largest = clips.iter().map(|clip| clip.width().max(clip.height())).max().unwrap_or(0);
        let smaller = (1..=largest).map(|shrink| Self::of(clips, columns, FEW, shrink)).find(Self::fits);
        let [height, width] = all.size;
        smaller.ok_or(VideoError::Unsupported { format: "PNG", smallest: 1, largest: "4096", width, height })
    }

    fn of(clips: &[&Frames], columns: usize, frames: usize, shrink: usize) -> Self {
        let strip = |clip: &&Frames| clip.num_frames().min(frames) * (clip.width().div_ceil(shrink) + GAP) - GAP;
        let width = CLIP_GAP + clips.iter().map(strip).max().unwrap_or(0);
        let height = CLIP_GAP + clips.iter().map(|clip| clip.height().div_ceil(shrink)).max().unwrap_or(0);
        let rows = if columns == 0 { 0 } else { clips.len().div_ceil(columns) };
        Self { columns, frames, shrink, cell: [height, width], size: [rows * height + CLIP_GAP, columns * width + CLIP_GAP] }
    }

    fn fits(&self) -> bool {
        let [height, width] = self.size;
        self.columns > 0 && height.max(width) <= MAX_SIDE
    }

    /// The frames of a clip of `all` that are shown.
    fn shown(&self, all: usize) -> impl Iterator<Item = usize> {
        let count = all.min(self.frames);
        (0..count).map(move |i| i * (all - 1) / (count - 1).max(1))
    }
}

/// A picture, [height, width, 3].
struct Sheet {
    width: usize,
    height: usize,
    bytes: Vec<u8>,
}

impl Sheet {
    fn draw(clips: &[&Frames], layout: &Layout) -> Self {
        let ([height, width], [cell_height, cell_width]) = (layout.size, layout.cell);
        let mut sheet = Self { width, height, bytes: vec![GAP_VALUE; height * width * 3] };
        for (index, clip) in clips.iter().enumerate() {
            let left = CLIP_GAP + index % layout.columns * cell_width;
            let top = CLIP_GAP + index / layout.columns * cell_height;
            for (at, frame) in layout.shown(clip.num_frames()).enumerate() {
                sheet.paste(clip, frame, layout.shrink, top, left + at * (clip.width().div_ceil(layout.shrink) + GAP));
            }
        }
        sheet
    }

    /// Each pixel is the mean of a square of `shrink` by `shrink`, less at the edges.
    fn paste(&mut self, clip: &Frames, frame: usize, shrink: usize, top: usize, left: usize) {
        let square = |at: usize, end: usize| at * shrink..((at + 1) * shrink).min(end);
        for y in 0..clip.height().div_ceil(shrink) {
            for x in 0..clip.width().div_ceil(shrink) {
                let (rows, columns) = (square(y, clip.height()), square(x, clip.width()));
                let count = (rows.len() * columns.len()) as f32;
                let mut sum = [0.0; 3];
                for (row, column) in rows.flat_map(|row| columns.clone().map(move |column| (row, column))) {
                    let pixel = clip.pixel(frame, row, column);
                    sum.iter_mut().zip(pixel).for_each(|(sum, value)| *sum += value);
                }
                let start = ((top + y) * self.width + left + x) * 3;
                for (byte, value) in self.bytes[start..].iter_mut().zip(sum) {
                    *byte = to_byte(value / count);
                }
            }
        }
    }

    fn encode(&self) -> Result<Vec<u8>, VideoError> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().map_err(failed)?;
        writer.write_image_data(&self.bytes).map_err(failed)?;
        writer.finish().map_err(failed)?;
        Ok(bytes)
    }
}

fn failed(error: impl std::fmt::Display) -> VideoError {
    VideoError::Encode { format: "PNG", message: error.to_string() }
}
