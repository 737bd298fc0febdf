//! MP4 with H.264, which browsers and imageio play.

use muxide::api::{MuxerBuilder, VideoCodec};
use openh264::{
    OpenH264API, Timestamp,
    encoder::{BitRate, Encoder, EncoderConfig, FrameRate, FrameType, QpRange, RateControlMode, VuiConfig},
    formats::YUVSource,
};

use crate::{Frames, VideoError, write::Format, yuv::Yuv};

/// An MP4 of constant high quality, one key frame, one thread: the bytes are a function of the frames.
pub(crate) struct Mp4;

/// Of 0 (best) to 51: hardly any loss beyond that of the halved chroma planes.
const QUANTIZATION: u8 = 14;

/// The smallest side the encoder accepts.
const SMALLEST: usize = 16;

impl Format for Mp4 {
    fn encode(&self, frames: &Frames, fps: f64) -> Result<Vec<u8>, VideoError> {
        let (width, height) = (frames.width(), frames.height());
        if width.max(height) > 3840 || width.min(height) > 2160 {
            let largest = "3840x2160 or 2160x3840";
            return Err(VideoError::Unsupported { format: "MP4", smallest: 1, largest, width, height });
        }
        let mut encoder = Encoder::with_api_config(OpenH264API::from_source(), config(fps)).map_err(failed)?;
        let mut bytes = Vec::new();
        let (width, height) = Yuv::from_frame(frames, 0, SMALLEST).dimensions();
        let mut muxer = MuxerBuilder::new(&mut bytes).video(VideoCodec::H264, width as u32, height as u32, fps).build().map_err(failed)?;
        for index in 0..frames.num_frames() {
            let seconds = index as f64 / fps;
            let time = Timestamp::from_millis((1000.0 * seconds).round() as u64);
            let yuv = Yuv::from_frame(frames, index, SMALLEST);
            let stream = encoder.encode_at(&yuv, time).map_err(failed)?;
            let is_key = stream.frame_type() == FrameType::IDR;
            muxer.write_video(seconds, &stream.to_vec(), is_key).map_err(failed)?;
        }
        muxer.finish().map_err(failed)?;
        Ok(bytes)
    }
}

/// Constant quality: this mode takes the quantization from its range alone. `Off` would ignore the range, and `Bitrate`, which also works,
/// makes the C library complain on standard error that frames may not be skipped.
fn config(fps: f64) -> EncoderConfig {
    EncoderConfig::new()
        .rate_control_mode(RateControlMode::Bufferbased)
        .bitrate(BitRate::from_bps(200_000_000))
        .qp(QpRange::new(QUANTIZATION, QUANTIZATION))
        .skip_frames(false)
        .max_frame_rate(FrameRate::from_hz(fps as f32))
        .scene_change_detect(false)
        .adaptive_quantization(false)
        .background_detection(false)
        .num_threads(1)
        .vui(VuiConfig::bt709())
}

fn failed(error: impl std::fmt::Display) -> VideoError {
    VideoError::Encode { format: "MP4", message: error.to_string() }
}
