//! Still pictures of clips, for looking at results.

use std::path::Path;

use crate::{Frames, VideoError, atomic::write_file, frames::to_byte};

/// Pixels between frames.
const GAP: usize = 2;

/// Pixels between clips: more, so that a row with several clips reads as several.
const CLIP_GAP: usize = 8;

/// The byte between frames: mid grey, unlike most contents.
const GAP_VALUE: u8 = 96;

/// The longest side of a picture; viewers refuse more.
const MAX_SIDE: usize = 65_535;

/// Writes a contact sheet as PNG: each clip is a strip of its frames from left to right, and `columns` strips stand side by side.
///
/// Clips may differ in size; each cell is as large as the largest needs. The file appears whole or not at all.
///
/// # Errors
///
/// When there is no clip or no column, the picture would be too large, or the file cannot be written.
pub fn write_png_grid(path: impl AsRef<Path>, clips: &[&Frames], columns: usize) -> Result<(), VideoError> {
    let sheet = Sheet::draw(clips, columns.min(clips.len()))?;
    write_file(path.as_ref(), &sheet.encode()?)
}

/// A picture, [height, width, 3].
struct Sheet {
    width: usize,
    height: usize,
    bytes: Vec<u8>,
}

impl Sheet {
    fn draw(clips: &[&Frames], columns: usize) -> Result<Self, VideoError> {
        let strip_width = |clip: &&Frames| clip.num_frames() * (clip.width() + GAP) - GAP;
        let cell_width = CLIP_GAP + clips.iter().map(strip_width).max().unwrap_or(0);
        let cell_height = CLIP_GAP + clips.iter().map(|clip| clip.height()).max().unwrap_or(0);
        let rows = if columns == 0 { 0 } else { clips.len().div_ceil(columns) };
        let (width, height) = (columns * cell_width + CLIP_GAP, rows * cell_height + CLIP_GAP);
        if rows == 0 || width.max(height) > MAX_SIDE {
            return Err(VideoError::Unsupported { format: "PNG", smallest: 1, largest: "65535", width, height });
        }
        let mut sheet = Self { width, height, bytes: vec![GAP_VALUE; height * width * 3] };
        for (index, clip) in clips.iter().enumerate() {
            let left = CLIP_GAP + index % columns * cell_width;
            let top = CLIP_GAP + index / columns * cell_height;
            for (at, frame) in clip.iter().enumerate() {
                sheet.paste(frame, clip.width(), top, left + at * (clip.width() + GAP));
            }
        }
        Ok(sheet)
    }

    fn paste(&mut self, frame: &[f32], width: usize, top: usize, left: usize) {
        for (row, pixels) in frame.chunks_exact(width * 3).enumerate() {
            let start = ((top + row) * self.width + left) * 3;
            for (byte, &value) in self.bytes[start..].iter_mut().zip(pixels) {
                *byte = to_byte(value);
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
