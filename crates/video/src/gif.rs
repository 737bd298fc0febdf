//! GIF, for documents that do not play videos.

use gif::{Encoder, Frame, Repeat};

use crate::{Frames, VideoError, frames::to_byte, write::Format};

/// A GIF that loops for ever, with one palette per frame.
pub(crate) struct Gif;

/// Of 1 (best palette) to 30 (fastest).
const SPEED: i32 = 10;

impl Format for Gif {
    fn encode(&self, frames: &Frames, fps: f64) -> Result<Vec<u8>, VideoError> {
        let (Ok(width), Ok(height)) = (u16::try_from(frames.width()), u16::try_from(frames.height())) else {
            let (width, height) = (frames.width(), frames.height());
            return Err(VideoError::Unsupported { format: "GIF", smallest: 1, largest: "65535", width, height });
        };
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, width, height, &[]).map_err(failed)?;
        encoder.set_repeat(Repeat::Infinite).map_err(failed)?;
        for (index, frame) in frames.iter().enumerate() {
            let rgb: Vec<u8> = frame.iter().map(|&value| to_byte(value)).collect();
            let mut frame = Frame::from_rgb_speed(width, height, &rgb, SPEED);
            frame.delay = delay(index, fps);
            encoder.write_frame(&frame).map_err(failed)?;
        }
        drop(encoder);
        Ok(bytes)
    }
}

/// How long frame `index` stays, in hundredths of a second. The rounding of one frame is made up for by the next, so the clip as a whole
/// keeps its speed. Viewers take less than 2 for a mistake and show such frames for 10.
fn delay(index: usize, fps: f64) -> u16 {
    let time = |index: usize| (index as f64 * 100.0 / fps).round();
    // A float-to-integer `as` saturates.
    ((time(index + 1) - time(index)) as u16).max(2)
}

fn failed(error: impl std::fmt::Display) -> VideoError {
    VideoError::Encode { format: "GIF", message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_add_up() {
        let total: u32 = (0..16).map(|index| u32::from(delay(index, 16.0))).sum();
        assert_eq!(total, 100);
        assert_eq!(delay(0, 1000.0), 2);
        assert_eq!(delay(0, 1e-6), u16::MAX);
    }
}
