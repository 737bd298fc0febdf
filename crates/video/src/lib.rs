//! Clips in memory and on disk.
//!
//! [`Frames`] is the clip every other crate passes around: RGB in [0, 1], one plain buffer. [`write()`] saves it as MP4 or GIF without any
//! system library, [`write_png_grid`] saves several as one still, [`Picture`] reads one. All files appear whole or not at all.

mod atomic;
mod color;
mod error;
mod frames;
mod gif;
mod grid;
mod mp4;
mod still;
mod write;
mod yuv;

pub use error::VideoError;
pub use frames::Frames;
pub use grid::write_png_grid;
pub use still::Picture;
pub use write::{MAX_FPS, write};
