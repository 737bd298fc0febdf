//! What a single frame looks like.

use video::Frames;

use super::{luminance, mean};
use crate::encode::Image;

/// A number for each frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameMeasure {
    /// `- kilobytes / 500`, as Flow-GRPO has it; at most 0. See [`JpegIncompressibility`](Self::JpegIncompressibility).
    JpegCompressibility,
    /// Size of the frame as JPEG of quality 95 with 4:2:0 chroma, in kilobytes (1000 bytes); above 0.
    JpegIncompressibility,
    /// `mean_p Y`, in [0, 1].
    Brightness,
    /// `sqrt(mean_p (Y - mean_p Y)^2)`, in [0, 0.5].
    Contrast,
    /// `mean |Y(x+1, y) - Y(x, y)| + mean |Y(x, y+1) - Y(x, y)|`, in [0, 2].
    EdgeEnergy,
}

impl FrameMeasure {
    /// Its name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::JpegCompressibility => "jpeg-compressibility",
            Self::JpegIncompressibility => "jpeg-incompressibility",
            Self::Brightness => "brightness",
            Self::Contrast => "contrast",
            Self::EdgeEnergy => "edge-energy",
        }
    }

    /// Its value for frame `index`.
    ///
    /// # Errors
    /// A frame too large for a JPEG file.
    pub fn of(self, frames: &Frames, index: usize) -> Result<f64, String> {
        let kilobytes = || Image::of(frames, index).jpeg(95).map(|bytes| bytes.len() as f64 / 1000.0);
        Ok(match self {
            Self::JpegCompressibility => -kilobytes()? / 500.0,
            Self::JpegIncompressibility => kilobytes()?,
            Self::Brightness => mean(luminance(frames, index).into_iter()),
            Self::Contrast => deviation(&luminance(frames, index)),
            Self::EdgeEnergy => edges(&luminance(frames, index), frames.width()),
        })
    }
}

fn deviation(values: &[f64]) -> f64 {
    let centre = mean(values.iter().copied());
    mean(values.iter().map(|value| (value - centre).powi(2))).sqrt()
}

fn edges(luminance: &[f64], width: usize) -> f64 {
    let across = luminance.chunks_exact(width).flat_map(|row| row.windows(2).map(|pair| (pair[1] - pair[0]).abs()));
    let down = luminance.iter().zip(luminance.iter().skip(width)).map(|(above, below)| (below - above).abs());
    mean(across) + mean(down)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 8x8: white on the right half.
    fn half() -> Frames {
        Frames::new(1, 8, 8, (0..64).flat_map(|i| [if i % 8 >= 4 { 1.0 } else { 0.0 }; 3]).collect()).expect("frames")
    }

    #[test]
    fn measures_what_it_says() {
        let of = |measure: FrameMeasure| measure.of(&half(), 0).expect("value");
        assert!((of(FrameMeasure::Brightness) - 0.5).abs() < 1e-9);
        assert!((of(FrameMeasure::Contrast) - 0.5).abs() < 1e-9);
        assert!((of(FrameMeasure::EdgeEnergy) - 1.0 / 7.0).abs() < 1e-9);
        assert_eq!(of(FrameMeasure::JpegCompressibility), -of(FrameMeasure::JpegIncompressibility) / 500.0);
    }

    #[test]
    fn noise_is_less_compressible_than_a_plain_frame() {
        let noise = (0u64..64 * 64 * 3).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / (1u64 << 24) as f32).collect();
        let noise = Frames::new(1, 64, 64, noise).expect("frames");
        let plain = Frames::new(1, 64, 64, vec![0.5; 64 * 64 * 3]).expect("frames");
        let of = |frames| FrameMeasure::JpegIncompressibility.of(frames, 0).expect("value");
        assert!(of(&noise) > 5.0 * of(&plain), "{} {}", of(&noise), of(&plain));
    }
}
