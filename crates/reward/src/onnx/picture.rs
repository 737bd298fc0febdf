//! Frames as networks want them: cut, resized, normalised, channels first.
//!
//! Shape legend: H height, W width.

use fast_image_resize as fir;
use fir::images::{TypedImage, TypedImageRef};
use fir::pixels::F32x3;
use fir::{FilterType, ResizeAlg, ResizeOptions, Resizer};
use serde::{Deserialize, Serialize};
use video::Frames;

/// An RGB picture [H, W, 3] in [0, 1].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Picture {
    pixels: Vec<F32x3>,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// A rectangle of pixels: columns `left .. right`, rows `top .. bottom`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rectangle {
    pub(crate) left: usize,
    pub(crate) top: usize,
    pub(crate) right: usize,
    pub(crate) bottom: usize,
}

/// How pixels between pixels are found. When a picture shrinks the filter widens, as in Pillow, so that nothing is skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resampling {
    /// A triangle of radius 1.
    Bilinear,
    /// The cubic with a = -1/2 of radius 2: what CLIP's preprocessing uses.
    #[default]
    Bicubic,
}

/// How a picture gets the size that a network takes; the names are those of OpenCLIP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResizeMode {
    /// All of it, each side by its own factor: what is wide becomes narrow.
    #[default]
    Squash,
    /// The middle of it, in its proportions, as CLIP's own preprocessing does: what is beside is not seen.
    Shortest,
}

/// `(value - mean) / std` for each channel, and their order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Normalisation {
    pub(crate) mean: [f32; 3],
    pub(crate) std: [f32; 3],
    /// Blue first, as OpenCV reads images. `mean` and `std` are in the order that the network sees.
    pub(crate) bgr: bool,
}

impl Picture {
    /// Frame `index` of a clip.
    pub(crate) fn of(frames: &Frames, index: usize) -> Self {
        let (width, height) = (frames.width(), frames.height());
        let values = &frames.data()[index * height * width * 3..][..height * width * 3];
        Self { pixels: values.chunks_exact(3).map(|rgb| F32x3::new([rgb[0], rgb[1], rgb[2]])).collect(), width, height }
    }

    /// The part inside `area`, which is inside the picture.
    pub(crate) fn crop(&self, area: Rectangle) -> Self {
        let rows = self.pixels.chunks_exact(self.width).take(area.bottom).skip(area.top);
        let pixels: Vec<F32x3> = rows.flat_map(|row| row[area.left..area.right].iter().copied()).collect();
        Self { pixels, width: area.right - area.left, height: area.bottom - area.top }
    }

    /// The same picture in another size.
    ///
    /// # Errors
    /// A size of zero.
    pub(crate) fn resize(&self, width: usize, height: usize, resampling: Resampling) -> Result<Self, String> {
        if (width, height) == (self.width, self.height) {
            return Ok(self.clone());
        }
        if width == 0 || height == 0 || self.pixels.is_empty() {
            return Err(format!("a picture of {} x {} cannot become one of {height} x {width}", self.height, self.width));
        }
        let filter = match resampling {
            Resampling::Bilinear => FilterType::Bilinear,
            Resampling::Bicubic => FilterType::CatmullRom,
        };
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter)).use_alpha(false);
        let source = TypedImageRef::new(self.width as u32, self.height as u32, &self.pixels).map_err(|e| e.to_string())?;
        let mut pixels = vec![F32x3::new([0.0; 3]); width * height];
        let mut target = TypedImage::<F32x3>::from_pixels_slice(width as u32, height as u32, &mut pixels).map_err(|e| e.to_string())?;
        Resizer::new().resize_typed(&source, &mut target, &options).map_err(|e| e.to_string())?;
        drop(target);
        Ok(Self { pixels, width, height })
    }

    /// The same picture in another size, which `mode` fills:
    ///
    /// ```text
    /// squash      to width x height
    /// shortest    k = max(width/W, height/H); to floor(k W) x floor(k H), of which floor(half) of what is over goes at the left and at the top
    /// ```
    ///
    /// # Errors
    /// A size of zero.
    pub(crate) fn fill(&self, width: usize, height: usize, mode: ResizeMode, resampling: Resampling) -> Result<Self, String> {
        let wide = match mode {
            ResizeMode::Squash => return self.resize(width, height, resampling),
            ResizeMode::Shortest => width * self.height <= height * self.width,
        };
        let (w, h) = if wide { (self.width * height / self.height, height) } else { (width, self.height * width / self.width) };
        let (left, top) = ((w - width) / 2, (h - height) / 2);
        Ok(self.resize(w, h, resampling)?.crop(Rectangle { left, top, right: left + width, bottom: top + height }))
    }

    /// [3, H, W], appended to `values`.
    pub(crate) fn write(&self, normalisation: &Normalisation, values: &mut Vec<f32>) {
        for channel in 0..3 {
            let source = if normalisation.bgr { 2 - channel } else { channel };
            let (mean, std) = (normalisation.mean[channel], normalisation.std[channel]);
            values.extend(self.pixels.iter().map(|pixel| (pixel.0[source].clamp(0.0, 1.0) - mean) / std));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> Picture {
        let values = (0..2 * 3 * 4 * 3).map(|i| i as f32 / 72.0).collect();
        Picture::of(&Frames::new(2, 3, 4, values).expect("frames"), 1)
    }

    #[test]
    fn crops_and_orders_channels() {
        let crop = picture().crop(Rectangle { left: 1, top: 1, right: 3, bottom: 2 });
        let mut values = Vec::new();
        crop.write(&Normalisation { mean: [0.5; 3], std: [0.5; 3], bgr: true }, &mut values);
        let at = |column: f32, channel: f32| ((36.0 + (4.0 + column) * 3.0 + channel) / 72.0 - 0.5) / 0.5;
        let expected = [at(1.0, 2.0), at(2.0, 2.0), at(1.0, 1.0), at(2.0, 1.0), at(1.0, 0.0), at(2.0, 0.0)];
        assert!(values.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{values:?}");
    }

    /// A ramp stays a ramp: between the outer pixels' centres, resizing is exact for straight lines.
    #[test]
    fn resizing_keeps_straight_lines() {
        let ramp: Vec<f32> = (0..8).flat_map(|x| [x as f32 / 8.0; 3]).collect();
        let ramp = Picture::of(&Frames::new(1, 1, 8, ramp).expect("frames"), 0);
        let wide = ramp.resize(32, 1, Resampling::Bilinear).expect("resized");
        for x in 4..28 {
            let expected = ((x as f32 + 0.5) / 4.0 - 0.5) / 8.0;
            assert!((wide.pixels[x].0[0] - expected).abs() < 1e-6, "{x}");
        }
        assert!(ramp.resize(0, 1, Resampling::Bilinear).is_err());
    }

    /// A picture of H rows and W columns whose values are the numbers of its columns, or of its rows.
    fn ramp(height: usize, width: usize, down: bool) -> Picture {
        let pixels = (0..height * width).flat_map(|i| [if down { i / width } else { i % width } as f32; 3]);
        Picture::of(&Frames::new(1, height, width, pixels.collect()).expect("frames"), 0)
    }

    fn red(picture: &Picture) -> Vec<f32> {
        picture.pixels.iter().map(|pixel| pixel.0[0]).collect()
    }

    /// By hand: 8x4 becomes 4x2, of which columns 1 and 2 are the middle. Halved, a triangle weighs four columns as (1, 3, 3, 1)/8, so
    /// column 1 is (1 + 3*2 + 3*3 + 4)/8 = 2.5 and column 2 is 4.5.
    #[test]
    fn a_wide_picture_keeps_its_proportions_and_loses_its_sides() {
        let fill = |picture: &Picture, width, height, mode| picture.fill(width, height, mode, Resampling::Bilinear).expect("filled");
        let close = |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
        let wide = fill(&ramp(4, 8, false), 2, 2, ResizeMode::Shortest);
        assert!(close(&red(&wide), &[2.5, 4.5, 2.5, 4.5]), "{wide:?}");
        let high = fill(&ramp(8, 4, true), 2, 2, ResizeMode::Shortest);
        assert!(close(&red(&high), &[2.5, 2.5, 4.5, 4.5]), "{high:?}");
        // of three columns too many, one goes at the left
        assert_eq!(red(&fill(&ramp(1, 5, false), 2, 1, ResizeMode::Shortest)), [1.0, 2.0]);
        let squashed = fill(&ramp(4, 8, false), 2, 2, ResizeMode::Squash);
        assert!(squashed.pixels[0].0[0] < 2.0 && squashed.pixels[1].0[0] > 5.0, "all columns count: {squashed:?}");
        // Wan's frames for CLIP: 480x832 becomes 224x388
        let frame = fill(&ramp(480, 832, false), 224, 224, ResizeMode::Shortest);
        assert_eq!((frame.width, frame.height), (224, 224));
        let expected = (82.0 + 0.5) * 832.0 / 388.0 - 0.5;
        assert!((frame.pixels[0].0[0] - expected).abs() < 0.1, "{} {expected}", frame.pixels[0].0[0]);
    }
}
