//! Writing a clip in the format its file name asks for.

use std::path::Path;

use crate::{Frames, VideoError, atomic::write_file, gif::Gif, mp4::Mp4};

/// Writes a clip as `.mp4` (H.264, plays in browsers) or `.gif` (loops), by the extension of `path`.
///
/// Values outside [0, 1] are clamped. The file appears whole or not at all; the folder must exist. MP4 needs even sides of at least 16:
/// others are extended by repeating the last row or column. A single frame gets no duration. Frames, never the file, are what should be
/// scored: both formats lose a little colour.
///
/// # Errors
///
/// When the extension is another one, the rate is not in (0, 1000], the format cannot hold the size, or the file cannot be written.
pub fn write(path: impl AsRef<Path>, frames: &Frames, fps: f64) -> Result<(), VideoError> {
    let path = path.as_ref();
    let format = format_of(path)?;
    if !(fps > 0.0 && fps <= MAX_FPS) {
        return Err(VideoError::FrameRate { fps });
    }
    write_file(path, &format.encode(frames, fps)?)
}

/// The fastest that a file plays.
pub const MAX_FPS: f64 = 1000.0;

/// A file format for clips.
pub(crate) trait Format {
    /// The bytes of the file; `fps` lies in (0, 1000].
    fn encode(&self, frames: &Frames, fps: f64) -> Result<Vec<u8>, VideoError>;
}

fn format_of(path: &Path) -> Result<&'static dyn Format, VideoError> {
    let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
    match extension.to_str() {
        Some("mp4") => Ok(&Mp4),
        Some("gif") => Ok(&Gif),
        _ => Err(VideoError::Extension { path: path.to_owned() }),
    }
}
