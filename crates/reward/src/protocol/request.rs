//! What is asked.

use std::io::Write;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::{PROTOCOL, Wire};
use crate::cache::hash_floats;
use crate::encode::Image;
use crate::{Encoding, Sample};

/// Samples to score.
#[derive(Serialize)]
pub struct Request<'a> {
    protocol: u32,
    samples: Vec<RequestSample<'a>>,
    /// Shared frames; the files go when the request does.
    #[serde(skip)]
    _files: Vec<NamedTempFile>,
}

#[derive(Serialize)]
struct RequestSample<'a> {
    id: String,
    prompt: &'a str,
    fps: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<&'a serde_json::Value>,
    frames: RequestFrames,
}

#[derive(Serialize)]
struct RequestFrames {
    encoding: Encoding,
    height: usize,
    width: usize,
    /// Numbers of the frames within the clip.
    indices: Vec<usize>,
    /// One text of base64 per frame.
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Vec<String>>,
    /// A file with all frames, bytes [F, H, W, 3].
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
}

impl<'a> Request<'a> {
    /// The request about these samples; `offset` is the place of the first in its batch.
    ///
    /// # Errors
    /// Frames that the encoding cannot hold; a shared folder that cannot be written.
    pub(crate) fn new(wire: &Wire, samples: &[Sample<'a>], offset: usize) -> Result<Self, String> {
        let mut files = Vec::new();
        let one = |(place, sample): (usize, &Sample<'a>)| -> Result<RequestSample<'a>, String> {
            let id = sample_id(sample, offset + place);
            let frames = request_frames(wire, sample, &mut files)?;
            Ok(RequestSample { id, prompt: sample.prompt, fps: sample.fps, metadata: sample.metadata, frames })
        };
        let samples = samples.iter().enumerate().map(one).collect::<Result<_, _>>()?;
        Ok(Self { protocol: PROTOCOL, samples, _files: files })
    }

    /// What the request is known by where randomness needs a key: its first id.
    pub(crate) fn key(&self) -> &str {
        self.samples.first().map_or("", |sample| &sample.id)
    }

    /// Ids and numbers of frames, in order.
    pub(crate) fn expected(&self) -> Vec<(&str, usize)> {
        self.samples.iter().map(|sample| (sample.id.as_str(), sample.frames.indices.len())).collect()
    }

    /// # Errors
    /// None for finite numbers.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, String> {
        serde_json::to_vec(self).map_err(|error| error.to_string())
    }
}

/// `sha256(prompt, frames)`, 16 digits of it, and the place in the batch: the same sample has the same id in every run, and no two samples
/// of a batch share one.
pub fn sample_id(sample: &Sample<'_>, place: usize) -> String {
    let mut hash = Sha256::new();
    hash.update(sample.prompt.as_bytes());
    hash.update([0]);
    hash_floats(&mut hash, sample.frames.data());
    let digest = hash.finalize();
    let digits: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{digits}-{place}")
}

fn request_frames(wire: &Wire, sample: &Sample<'_>, files: &mut Vec<NamedTempFile>) -> Result<RequestFrames, String> {
    let clip = sample.frames;
    let indices = wire.frames.indices(clip.num_frames(), sample.fps);
    let images = indices.iter().map(|&index| Image::of(clip, index));
    let (encoding, data, path) = match &wire.shared_folder {
        Some(folder) => (Encoding::Raw, None, Some(share(folder, images, files)?)),
        None => {
            let text = |image: Image| image.encode(wire.encoding).map(|bytes| STANDARD.encode(bytes));
            (wire.encoding, Some(images.map(text).collect::<Result<_, _>>()?), None)
        }
    };
    Ok(RequestFrames { encoding, height: clip.height(), width: clip.width(), indices, data, path })
}

/// Writes the images to a file that both sides can read; its path.
fn share(folder: &Path, images: impl Iterator<Item = Image>, files: &mut Vec<NamedTempFile>) -> Result<String, String> {
    let error = |e: std::io::Error| format!("cannot write frames to `shared_folder` = `{}`: {e}", folder.display());
    let mut file = tempfile::Builder::new().prefix("flash-grpo-frames-").suffix(".rgb").tempfile_in(folder).map_err(error)?;
    for image in images {
        file.write_all(&image.rgb).map_err(error)?;
    }
    let path = file.path().to_str().map(str::to_owned).ok_or_else(|| "the path of `shared_folder` is not UTF-8".to_owned())?;
    files.push(file);
    Ok(path)
}
