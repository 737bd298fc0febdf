//! A clip in memory.
//!
//! Shape legend: F frames, H height, W width.

use std::fmt;

use crate::VideoError;

/// Values of one RGB pixel.
const CHANNELS: usize = 3;

/// A clip of RGB frames.
///
/// The buffer has the layout [F, H, W, 3], row-major, with values meant to lie in [0, 1]. The constructor checks the sizes, not the
/// values: a decoder overshoots a little, and every consumer (writers, verifiers) clamps what it reads.
#[derive(Clone, PartialEq)]
pub struct Frames {
    num_frames: usize,
    height: usize,
    width: usize,
    data: Vec<f32>,
}

impl Frames {
    /// Wraps a buffer of layout [F, H, W, 3].
    ///
    /// # Errors
    ///
    /// When a size is zero, or the buffer does not have exactly F * H * W * 3 values.
    pub fn new(num_frames: usize, height: usize, width: usize, data: Vec<f32>) -> Result<Self, VideoError> {
        let expected = [num_frames, height, width].iter().try_fold(CHANNELS, |n, &size| n.checked_mul(size));
        match expected {
            None | Some(0) => Err(VideoError::Size { num_frames, height, width }),
            Some(expected) if expected != data.len() => Err(VideoError::Length { num_frames, height, width, expected, got: data.len() }),
            Some(_) => Ok(Self { num_frames, height, width, data }),
        }
    }

    /// F, the number of frames.
    pub fn num_frames(&self) -> usize {
        self.num_frames
    }

    /// H, in pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// W, in pixels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The whole buffer, [F, H, W, 3].
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// Gives the buffer back, [F, H, W, 3].
    pub fn into_data(self) -> Vec<f32> {
        self.data
    }

    /// Frame `index`, [H, W, 3].
    ///
    /// # Panics
    ///
    /// When `index` is not below [`num_frames`](Self::num_frames).
    pub fn frame(&self, index: usize) -> &[f32] {
        let len = self.height * self.width * CHANNELS;
        &self.data[index * len..(index + 1) * len]
    }

    /// The RGB pixel of frame `index` at row `y`, column `x`.
    ///
    /// # Panics
    ///
    /// When `index`, `y` or `x` lies outside the clip.
    pub fn pixel(&self, index: usize, y: usize, x: usize) -> [f32; CHANNELS] {
        assert!(y < self.height && x < self.width, "pixel ({y}, {x}) lies outside {}x{}", self.height, self.width);
        let at = (y * self.width + x) * CHANNELS;
        let frame = self.frame(index);
        [frame[at], frame[at + 1], frame[at + 2]]
    }

    /// The frames one after the other, each [H, W, 3].
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.data.chunks_exact(self.height * self.width * CHANNELS)
    }
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frames[{}, {}, {}, {CHANNELS}]", self.num_frames, self.height, self.width)
    }
}

/// The value clamped to [0, 1]; 0 for NaN.
pub(crate) fn unit(value: f32) -> f32 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// The value as a byte: clamped to [0, 1], rounded; 0 for NaN.
pub(crate) fn to_byte(value: f32) -> u8 {
    (unit(value) * 255.0).round() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_frame_row_column_channel() {
        let data: Vec<f32> = (0..2 * 3 * 4 * 3).map(|i| i as f32).collect();
        let frames = Frames::new(2, 3, 4, data).expect("sizes agree");
        assert_eq!(frames.pixel(1, 2, 3), [69.0, 70.0, 71.0]);
        assert_eq!(frames.frame(1)[0], 36.0);
        assert_eq!(frames.iter().len(), 2);
        assert_eq!(format!("{frames:?}"), "Frames[2, 3, 4, 3]");
    }

    #[test]
    fn sizes_are_checked() {
        let short = Frames::new(1, 2, 2, vec![0.0; 11]).expect_err("one value short");
        assert_eq!(short.to_string(), "frames of size [1, 2, 2, 3] need 12 values, got 11");
        assert!(matches!(Frames::new(0, 2, 2, vec![]), Err(VideoError::Size { .. })));
        assert!(matches!(Frames::new(usize::MAX, 2, 2, vec![]), Err(VideoError::Size { .. })));
    }
}
