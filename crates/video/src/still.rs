//! Pictures from files: what a video starts with.

use std::{fs::File, io::BufReader, path::Path};

use fast_image_resize as fir;
use fir::images::{TypedImage, TypedImageRef};
use fir::pixels::U8x3;
use fir::{FilterType, ResizeAlg, ResizeOptions, Resizer};

use crate::{Frames, VideoError};

/// The longest side of a picture that is read.
const MAX_SIDE: usize = 16_384;

/// An RGB picture, in bytes.
#[derive(Clone)]
pub struct Picture {
    width: usize,
    height: usize,
    pixels: Vec<U8x3>,
}

impl Picture {
    /// Reads a PNG or JPEG file. Grey becomes colour, transparency does not count.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is neither PNG nor JPEG, or is broken.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, VideoError> {
        decode(path.as_ref())
    }

    /// As one frame [1, H, W, 3] of a size, to which it is stretched by a Lanczos filter of radius 3 on bytes, as Pillow and so diffusers do.
    ///
    /// # Panics
    ///
    /// If a size is 0 or above 16384.
    pub fn stretched(&self, height: usize, width: usize) -> Frames {
        frame(self.resized(width, height, FilterType::Lanczos3), height, width)
    }

    /// Its middle as one frame [1, S, S, 3]: the shorter side becomes S by a bicubic filter, the longer one is cut, as CLIP's images are prepared.
    ///
    /// # Panics
    ///
    /// If the side is 0 or above 4096.
    pub fn square(&self, side: usize) -> Frames {
        let long = |length: usize, short: usize| (side * length / short).clamp(1, MAX_SIDE);
        let (width, height) =
            if self.width < self.height { (side, long(self.height, self.width)) } else { (long(self.width, self.height), side) };
        let pixels = self.resized(width, height, FilterType::CatmullRom);
        let (left, top) = ((width - side) / 2, (height - side) / 2);
        let rows = pixels.chunks_exact(width).skip(top).take(side);
        frame(rows.flat_map(|row| row[left..left + side].iter().copied()).collect(), side, side)
    }

    /// From bytes of `channels` values a pixel: grey, grey and alpha, RGB, RGB and alpha.
    fn new(width: usize, height: usize, bytes: &[u8], channels: usize) -> Result<Self, String> {
        if width == 0 || height == 0 || width.max(height) > MAX_SIDE {
            return Err(format!("it has {width}x{height} pixels, expected sides of 1 to {MAX_SIDE}"));
        }
        let colour = |pixel: &[u8]| if channels < 3 { U8x3::new([pixel[0]; 3]) } else { U8x3::new([pixel[0], pixel[1], pixel[2]]) };
        let pixels: Vec<U8x3> = bytes.chunks_exact(channels.max(1)).map(colour).collect();
        if pixels.len() != width * height {
            return Err(format!("it ends after {} of {} pixels", pixels.len(), width * height));
        }
        Ok(Self { width, height, pixels })
    }

    fn resized(&self, width: usize, height: usize, filter: FilterType) -> Vec<U8x3> {
        if (width, height) == (self.width, self.height) {
            return self.pixels.clone();
        }
        assert!((1..=MAX_SIDE).contains(&width) && (1..=MAX_SIDE).contains(&height), "a picture of {width}x{height} pixels");
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter)).use_alpha(false);
        let mut pixels = vec![U8x3::new([0; 3]); width * height];
        let source = TypedImageRef::new(self.width as u32, self.height as u32, &self.pixels).expect("as many pixels as its size says");
        let mut target = TypedImage::from_pixels_slice(width as u32, height as u32, &mut pixels).expect("as many pixels as its size says");
        Resizer::new().resize_typed(&source, &mut target, &options).expect("sizes above 0");
        drop(target);
        pixels
    }
}

fn frame(pixels: Vec<U8x3>, height: usize, width: usize) -> Frames {
    let values = pixels.iter().flat_map(|pixel| pixel.0).map(|byte| f32::from(byte) / 255.0).collect();
    Frames::new(1, height, width, values).expect("as many pixels as its size says")
}

fn decode(path: &Path) -> Result<Picture, VideoError> {
    let failed = |message: String| VideoError::Picture { path: path.into(), message };
    let start = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    let picture = match start.as_slice() {
        [0x89, b'P', b'N', b'G', ..] => decode_png(path),
        [0xff, 0xd8, ..] => decode_jpeg(&start),
        _ => Err("it is neither PNG nor JPEG".to_owned()),
    };
    picture.map_err(failed)
}

fn decode_png(path: &Path) -> Result<Picture, String> {
    let mut decoder = png::Decoder::new(BufReader::new(File::open(path).map_err(|e| e.to_string())?));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(|e| e.to_string())?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    if width.max(height) > MAX_SIDE {
        return Err(format!("it has {width}x{height} pixels, expected sides of 1 to {MAX_SIDE}"));
    }
    let mut bytes = vec![0; reader.output_buffer_size().ok_or("it is too large")?];
    let info = reader.next_frame(&mut bytes).map_err(|e| e.to_string())?;
    Picture::new(width, height, &bytes[..info.buffer_size()], info.color_type.samples())
}

fn decode_jpeg(bytes: &[u8]) -> Result<Picture, String> {
    let mut decoder = jpeg_decoder::Decoder::new(bytes);
    let pixels = decoder.decode().map_err(|e| e.to_string())?;
    let info = decoder.info().ok_or("it has no header")?;
    let channels = match info.pixel_format {
        jpeg_decoder::PixelFormat::L8 => 1,
        jpeg_decoder::PixelFormat::RGB24 => 3,
        other => return Err(format!("its pixels are {other:?}, expected grey or RGB")),
    };
    Picture::new(info.width.into(), info.height.into(), &pixels, channels)
}
