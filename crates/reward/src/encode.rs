//! Frames as bytes.
//!
//! Shape legend: H height, W width.

use serde::{Deserialize, Serialize};
use video::Frames;

/// How frames travel to whoever scores them. Values are clamped to [0, 1] and rounded to bytes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Encoding {
    /// Bytes [H, W, 3]: nothing to decode, the largest.
    #[default]
    Raw,
    /// Lossless, about half of it.
    Png,
    /// Quality 95, 4:2:0: smallest, and its blocks are scored with the frame.
    Jpeg,
}

/// A byte image [H, W, 3].
pub(crate) struct Image {
    pub width: usize,
    pub height: usize,
    pub rgb: Vec<u8>,
}

impl Image {
    /// Frame `index` of a clip.
    pub fn of(frames: &Frames, index: usize) -> Self {
        // `as` takes NaN to 0.
        let byte = |&value: &f32| (value.clamp(0.0, 1.0) * 255.0).round() as u8;
        Self { width: frames.width(), height: frames.height(), rgb: frames.frame(index).iter().map(byte).collect() }
    }

    /// # Errors
    /// Sizes that the format cannot have.
    pub fn encode(&self, encoding: Encoding) -> Result<Vec<u8>, String> {
        match encoding {
            Encoding::Raw => Ok(self.rgb.clone()),
            Encoding::Png => self.png(),
            Encoding::Jpeg => self.jpeg(95),
        }
    }

    /// # Errors
    /// A side beyond what the format holds.
    pub fn png(&self) -> Result<Vec<u8>, String> {
        let size = |side: usize| u32::try_from(side).map_err(|_| format!("a side of {side} pixels does not fit into a PNG file"));
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, size(self.width)?, size(self.height)?);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.set_compression(png::Compression::Fast);
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&self.rgb));
        written.map_err(|error| error.to_string())?;
        Ok(bytes)
    }

    /// # Errors
    /// A side beyond what the format holds.
    pub fn jpeg(&self, quality: u8) -> Result<Vec<u8>, String> {
        let size = |side: usize| u16::try_from(side).map_err(|_| format!("a side of {side} pixels does not fit into a JPEG file"));
        let mut bytes = Vec::new();
        let mut encoder = jpeg_encoder::Encoder::new(&mut bytes, quality);
        // What Pillow does at every quality: published rewards are in its bytes.
        encoder.set_sampling_factor(jpeg_encoder::SamplingFactor::F_2_2);
        let (width, height) = (size(self.width)?, size(self.height)?);
        encoder.encode(&self.rgb, width, height, jpeg_encoder::ColorType::Rgb).map_err(|error| error.to_string())?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_clamped_and_rounded() {
        let frames = Frames::new(1, 1, 2, vec![-0.5, 0.0, 0.5, 1.0, 7.0, f32::NAN]).expect("frames");
        assert_eq!(Image::of(&frames, 0).rgb, [0, 0, 128, 255, 255, 0]);
    }

    #[test]
    fn files_begin_as_they_should() {
        let image = Image { width: 16, height: 8, rgb: vec![100; 16 * 8 * 3] };
        assert!(image.encode(Encoding::Png).expect("png").starts_with(b"\x89PNG\r\n\x1a\n"));
        let jpeg = image.encode(Encoding::Jpeg).expect("jpeg");
        assert!(jpeg.starts_with(&[0xff, 0xd8]) && jpeg.ends_with(&[0xff, 0xd9]));
        let wide = Image { width: 70_000, height: 1, rgb: vec![0; 210_000] };
        assert!(wide.jpeg(95).is_err_and(|error| error.contains("70000")));
    }
}
