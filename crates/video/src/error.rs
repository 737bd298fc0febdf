//! What can go wrong with a clip.

use std::{io, path::PathBuf};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VideoError {
    /// One of the sizes is zero, or their product overflows.
    #[error("frames of size [{num_frames}, {height}, {width}, 3] cannot exist")]
    Size {
        /// F.
        num_frames: usize,
        /// H.
        height: usize,
        /// W.
        width: usize,
    },
    /// The buffer does not hold F * H * W * 3 values.
    #[error("frames of size [{num_frames}, {height}, {width}, 3] need {expected} values, got {got}")]
    Length {
        /// F.
        num_frames: usize,
        /// H.
        height: usize,
        /// W.
        width: usize,
        /// F * H * W * 3.
        expected: usize,
        /// The length of the buffer.
        got: usize,
    },
    /// The file name does not say which format to write.
    #[error("cannot tell the video format of `{}`\nhint: name the file `.mp4` or `.gif`", path.display())]
    Extension {
        /// The file asked for.
        path: PathBuf,
    },
    /// The frame rate is no rate.
    #[error("`fps` must be above 0 and at most 1000, got {fps}")]
    FrameRate {
        /// The rate asked for.
        fps: f64,
    },
    /// The format cannot hold frames of this size.
    #[error("{format} holds frames of {smallest} to {largest} pixels, got {width}x{height}")]
    Unsupported {
        /// The format.
        format: &'static str,
        /// The smallest side it can hold.
        smallest: usize,
        /// The largest sides it can hold, in words.
        largest: &'static str,
        /// W.
        width: usize,
        /// H.
        height: usize,
    },
    /// The encoder refused.
    #[error("cannot encode {format}: {message}")]
    Encode {
        /// The format.
        format: &'static str,
        /// What the encoder says.
        message: String,
    },
    /// The file is no picture that can be read.
    #[error("cannot read the picture `{}`: {message}\nhint: a PNG or JPEG file", path.display())]
    Picture {
        /// The file asked for.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The file cannot be written.
    #[error("cannot write `{}`", path.display())]
    Write {
        /// The file asked for.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}
