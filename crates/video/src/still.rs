//! Pictures from files: what a video starts with.

use std::{fs::File, io::BufReader, path::Path};

use fast_image_resize as fir;
use fir::images::{TypedImage, TypedImageRef};
use fir::pixels::U8x3;
use fir::{FilterType, ResizeAlg, ResizeOptions, Resizer};

use crate::{Frames, VideoError};

/// The longest side of a picture that is read.
const MAX_SIDE: usize = 16_384;

/// Reads a PNG or JPEG file as one frame [1, H, W, 3] of the given size.
///
/// Of another size, it is stretched by a Lanczos filter of radius 3 on bytes, as Pillow and so diffusers do. Grey becomes colour, transparency does not
/// count.
///
/// # Errors
///
/// When the file cannot be read, is neither PNG nor JPEG, or is broken; when a size is zero.
pub fn read_picture(path: impl AsRef<Path>, height: usize, width: usize) -> Result<Frames, VideoError> {
    let path = path.as_ref();
    let picture = decode(path)?;
    let pixels = picture.resize(width, height).map_err(|message| VideoError::Picture { path: path.into(), message })?;
    let values = pixels.iter().flat_map(|pixel| pixel.0).map(|byte| f32::from(byte) / 255.0).collect();
    Frames::new(1, height, width, values)
}

/// Whether a file is a picture that [`read_picture`] reads; decodes it.
///
/// # Errors
///
/// As [`read_picture`].
pub fn check_picture(path: impl AsRef<Path>) -> Result<(), VideoError> {
    decode(path.as_ref()).map(drop)
}

/// An RGB picture.
struct Picture {
    width: usize,
    height: usize,
    pixels: Vec<U8x3>,
}

impl Picture {
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

    fn resize(self, width: usize, height: usize) -> Result<Vec<U8x3>, String> {
        if (width, height) == (self.width, self.height) {
            return Ok(self.pixels);
        }
        if width == 0 || height == 0 || width.max(height) > MAX_SIDE {
            return Err(format!("it cannot have {width}x{height} pixels"));
        }
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Lanczos3)).use_alpha(false);
        let source = TypedImageRef::new(self.width as u32, self.height as u32, &self.pixels).map_err(|e| e.to_string())?;
        let mut pixels = vec![U8x3::new([0; 3]); width * height];
        let mut target = TypedImage::<U8x3>::from_pixels_slice(width as u32, height as u32, &mut pixels).map_err(|e| e.to_string())?;
        Resizer::new().resize_typed(&source, &mut target, &options).map_err(|e| e.to_string())?;
        drop(target);
        Ok(pixels)
    }
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
