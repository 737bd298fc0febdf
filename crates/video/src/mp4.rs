//! MP4 with H.264, which browsers and imageio play.

use muxide::api::{MuxerBuilder, VideoCodec};
use rusty_h264_common::YuvPlanes;
use rusty_h264_encoder::{Encoder, EncoderConfig};

use crate::{Frames, VideoError, color::name_bt709, write::Format, yuv::Yuv};

/// An MP4 of constant high quality, one key frame, one thread: the bytes are a function of the frames.
pub(crate) struct Mp4;

/// Of 0 (best) to 51: hardly any loss beyond that of the halved chroma planes.
const QUANTIZATION: u8 = 14;

/// The smallest side that every player accepts: one macroblock.
const SMALLEST: usize = 16;

impl Format for Mp4 {
    fn encode(&self, frames: &Frames, fps: f64) -> Result<Vec<u8>, VideoError> {
        let (width, height) = (frames.width(), frames.height());
        if width.max(height) > 3840 || width.min(height) > 2160 {
            let largest = "3840x2160 or 2160x3840";
            return Err(VideoError::Unsupported { format: "MP4", smallest: 1, largest, width, height });
        }
        let (width, height) = Yuv::from_frame(frames, 0, SMALLEST).dimensions();
        let mut encoder = Encoder::new(config(width, height, fps)).map_err(|error| failed(format!("{error:?}")))?;
        let mut bytes = Vec::new();
        let mut muxer = MuxerBuilder::new(&mut bytes).video(VideoCodec::H264, width as u32, height as u32, fps).build().map_err(failed)?;
        for index in 0..frames.num_frames() {
            let yuv = Yuv::from_frame(frames, index, SMALLEST);
            let (y, u, v) = yuv.planes();
            let planes = YuvPlanes::new(width, height, y, u, v, width, width / 2).ok_or_else(|| failed("planes of another size"))?;
            let stream = encoder.encode_planes(&planes).map_err(|error| failed(format!("{error:?}")))?;
            muxer.write_video(index as f64 / fps, &name_bt709(&stream), index == 0).map_err(failed)?;
        }
        muxer.finish().map_err(failed)?;
        Ok(bytes)
    }
}

/// Constant quality in the profile that every decoder knows; each frame is coded when it comes.
fn config(width: usize, height: usize, fps: f64) -> EncoderConfig {
    let mut config = EncoderConfig::baseline(width, height);
    config.qp = QUANTIZATION;
    config.gop_size = u32::MAX;
    config.framerate = fps as f32;
    config.level_idc = level(width, height, fps);
    config
}

/// The lowest level from 4.0 on that admits the size and the rate (ITU-T H.264, table A-1): macroblocks a frame, macroblocks a second.
fn level(width: usize, height: usize, fps: f64) -> u8 {
    let size = width.div_ceil(16) * height.div_ceil(16);
    let admits = |&(_, largest, fastest): &(u8, usize, f64)| size <= largest && size as f64 * fps <= fastest;
    let levels = [(40, 8_192, 245_760.0), (51, 36_864, 983_040.0)];
    levels.iter().find(|level| admits(level)).map_or(52, |level| level.0)
}

fn failed(error: impl std::fmt::Display) -> VideoError {
    VideoError::Encode { format: "MP4", message: error.to_string() }
}
