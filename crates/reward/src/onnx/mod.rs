//! Any scorer of images that was exported to ONNX.

mod session;

pub(crate) mod picture;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::require;
use crate::{Aggregation, Batching, FrameSelection, Reward, RewardBreakdown, RewardError, Sample, Scored, SetupError};
use picture::{Normalisation, Picture};
use video::Frames;

pub use picture::{Resampling, ResizeMode};
pub(crate) use session::{Array, Session};

/// `type = "onnx"`: a network that takes images [N, 3, H, W] and gives numbers `[N]` or [N, K].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnnxSettings {
    /// The network's file.
    pub model: PathBuf,
    /// The library of ONNX Runtime; without it `ORT_DYLIB_PATH`, then the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library: Option<PathBuf>,
    /// W and H of the images that the network sees.
    pub size: [usize; 2],
    /// How frames of other proportions get there.
    #[serde(default)]
    pub resize_mode: ResizeMode,
    /// How they are resized.
    #[serde(default)]
    pub resampling: Resampling,
    /// What is taken from each channel in [0, 1], red first (blue first with `bgr`); CLIP's where it does not say.
    #[serde(default = "clip_mean")]
    pub mean: [f32; 3],
    /// What it is divided by.
    #[serde(default = "clip_std")]
    pub std: [f32; 3],
    /// Whether the network wants blue first.
    #[serde(default)]
    pub bgr: bool,
    /// Which of the K numbers is the score.
    #[serde(default)]
    pub output: usize,
    /// Frames that are scored.
    #[serde(default)]
    pub frames: FrameSelection,
    /// What their scores become.
    #[serde(default)]
    pub aggregate: Aggregation,
    /// Images computed at once; a network that was exported for a fixed number of images gets that number.
    #[serde(default = "eight")]
    pub batch_size: usize,
    /// Threads that compute.
    #[serde(default = "one")]
    pub threads: usize,
}

/// The statistics of CLIP's training images.
fn clip_mean() -> [f32; 3] {
    [0.481_454_66, 0.457_827_5, 0.408_210_73]
}

fn clip_std() -> [f32; 3] {
    [0.268_629_55, 0.261_302_6, 0.275_777_1]
}

fn eight() -> usize {
    8
}

fn one() -> usize {
    1
}

impl OnnxSettings {
    /// The defaults, for this network.
    pub fn new(model: impl Into<PathBuf>, size: [usize; 2]) -> Self {
        Self {
            model: model.into(),
            library: None,
            size,
            resize_mode: ResizeMode::default(),
            resampling: Resampling::default(),
            mean: clip_mean(),
            std: clip_std(),
            bgr: false,
            output: 0,
            frames: FrameSelection::default(),
            aggregate: Aggregation::default(),
            batch_size: eight(),
            threads: one(),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), SetupError> {
        let [width, height] = self.size;
        let fits = (1..=4096).contains(&width) && (1..=4096).contains(&height);
        require(fits, "size", format!("[{width}, {height}]"), "[width, height] from 1 to 4096", "what the network was trained with")?;
        let std = format!("{:?}", self.std);
        require(self.std.iter().all(|s| *s > 0.0 && s.is_finite()), "std", std, "numbers above 0", "[1.0, 1.0, 1.0] divides by nothing")?;
        require(
            self.mean.iter().all(|m| m.is_finite()),
            "mean",
            format!("{:?}", self.mean),
            "numbers",
            "[0.0, 0.0, 0.0] takes nothing away",
        )?;
        self.frames.validate()?;
        self.aggregate.validate()?;
        require(self.batch_size > 0, "batch_size", self.batch_size, "at least 1", "8 is the default")?;
        check_threads(self.threads)
    }
}

pub(crate) fn check_threads(threads: usize) -> Result<(), SetupError> {
    require((1..=1024).contains(&threads), "threads", threads, "1 to 1024", "1 leaves the other cores to the rollouts beside it")
}

/// Scores with such a network.
pub struct OnnxReward {
    settings: OnnxSettings,
    session: Session,
    /// Images of every run, where the network takes no other number.
    fixed_rows: Option<usize>,
    identity: String,
}

impl OnnxReward {
    /// # Errors
    /// Settings that cannot be used; a runtime or a file that cannot be opened.
    pub fn new(settings: OnnxSettings) -> Result<Self, SetupError> {
        settings.validate()?;
        let session = Session::open(&settings.model, "model", settings.library.as_deref(), settings.threads)?;
        let identity = identity("onnx", &settings, &[&settings.model])?;
        Ok(Self { settings, fixed_rows: session.fixed_rows(), session, identity })
    }

    /// Scores of pictures, in order. Where the network takes a fixed number, black ones fill it up.
    fn scores(&self, pictures: &[Picture]) -> Result<Vec<f64>, String> {
        let [width, height] = self.settings.size;
        let normalisation = Normalisation { mean: self.settings.mean, std: self.settings.std, bgr: self.settings.bgr };
        let mut values = Vec::with_capacity(pictures.len() * 3 * width * height);
        for picture in pictures {
            picture.fill(width, height, self.settings.resize_mode, self.settings.resampling)?.write(&normalisation, &mut values);
        }
        let rows = self.fixed_rows.unwrap_or(pictures.len());
        values.resize(rows * 3 * width * height, 0.0);
        let output = self.session.run(Array { values, shape: vec![rows, 3, height, width] })?;
        let mut scores = column(&output, rows, self.settings.output)?;
        scores.truncate(pictures.len());
        Ok(scores)
    }
}

/// Number `output` of each row of `[N]` or [N, K] (and [N, K, 1, ..]).
fn column(output: &Array, rows: usize, index: usize) -> Result<Vec<f64>, String> {
    let width = output.values.len() / rows.max(1);
    let fits = output.shape.first() == Some(&rows) && width * rows == output.values.len();
    if !fits {
        return Err(format!("the network's output has the shape {:?} for {rows} images, expected one row for each", output.shape));
    }
    if index >= width {
        return Err(format!("`output` is `{index}`, and the network gives {width} numbers for an image"));
    }
    Ok(output.values.chunks_exact(width).map(|row| f64::from(row[index])).collect())
}

impl Reward for OnnxReward {
    fn name(&self) -> &str {
        "onnx"
    }

    /// Scores a grey picture: whether `size` and `output` fit the network is known before the first rollout.
    fn prepare(&self) -> Result<(), SetupError> {
        let [width, height] = self.settings.size;
        let failed = |reason: String| {
            let message = format!("`{}` cannot score a picture of {width}x{height}: {reason}", self.settings.model.display());
            SetupError::new(self.name(), message, "`size` ([width, height]) and `output` say what the network takes and gives")
        };
        let grey = Frames::new(1, height, width, vec![0.5; 3 * width * height]).map_err(|error| failed(error.to_string()))?;
        self.scores(&[Picture::of(&grey, 0)]).map(drop).map_err(failed)
    }

    fn identity(&self) -> Option<String> {
        Some(self.identity.clone())
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.score_batched(batch, Batching { batch_size: self.settings.batch_size, concurrency: 1 })
    }

    fn largest_batching(&self) -> Option<Batching> {
        Some(Batching { batch_size: self.fixed_rows.unwrap_or(Batching::LARGEST.batch_size), concurrency: 1 })
    }

    /// `batch_size` counts images here.
    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        let images = self.fixed_rows.unwrap_or(batching.batch_size);
        let frames: Vec<Vec<Picture>> = batch.iter().map(|sample| selected(sample, self.settings.frames)).collect();
        let counts: Vec<usize> = frames.iter().map(Vec::len).collect();
        let flat: Vec<Picture> = frames.into_iter().flatten().collect();
        let scores: Result<Vec<Vec<f64>>, String> = flat.chunks(images.max(1)).map(|pictures| self.scores(pictures)).collect();
        let mut scores = scores.map(|batches| batches.concat().into_iter());
        let mut one = |(sample, &count): (&Sample<'_>, &usize)| {
            let own: Vec<f64> = match &mut scores {
                Ok(scores) => scores.take(count).collect(),
                Err(reason) => return Err(RewardError::new(self.name(), sample.prompt, reason)),
            };
            Ok(RewardBreakdown::from(self.settings.aggregate.of(&own).unwrap_or(f64::NAN)))
        };
        batch.iter().zip(&counts).map(&mut one).collect()
    }
}

/// The frames of a sample that a reward looks at.
pub(crate) fn selected(sample: &Sample<'_>, frames: FrameSelection) -> Vec<Picture> {
    let indices = frames.indices(sample.frames.num_frames(), sample.fps);
    indices.into_iter().map(|index| Picture::of(sample.frames, index)).collect()
}

/// What values depend on: kind, settings, and the contents of the networks' files.
pub(crate) fn identity(kind: &str, settings: &impl Serialize, files: &[&Path]) -> Result<String, SetupError> {
    let mut hash = Sha256::new();
    for file in files {
        let mut reader =
            std::fs::File::open(file).map_err(|e| SetupError::new("", format!("`{}` cannot be read: {e}", file.display()), ""))?;
        std::io::copy(&mut reader, &mut hash).map_err(|e| SetupError::new("", format!("`{}` cannot be read: {e}", file.display()), ""))?;
    }
    let settings = serde_json::to_string(settings).map_err(|e| SetupError::new("", e, ""))?;
    let digest: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{kind} {settings} {digest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_number_asked_for() {
        let output = |shape: &[usize]| Array { values: (0..6).map(|i| i as f32).collect(), shape: shape.to_vec() };
        assert_eq!(column(&output(&[3, 2]), 3, 1), Ok(vec![1.0, 3.0, 5.0]));
        assert_eq!(column(&output(&[6]), 6, 0), Ok(vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
        assert!(column(&output(&[3, 2]), 3, 2).is_err_and(|e| e.contains("gives 2 numbers")));
        assert!(column(&output(&[6]), 4, 0).is_err_and(|e| e.contains("[6] for 4 images")));
    }

    #[test]
    fn refuses_what_cannot_be_meant() {
        let settings = |change: fn(&mut OnnxSettings)| {
            let mut settings = OnnxSettings::new("scorer.onnx", [224, 224]);
            change(&mut settings);
            settings.validate().map_err(|e| e.field)
        };
        assert_eq!(settings(|_| {}), Ok(()));
        assert_eq!(settings(|s| s.size = [0, 224]), Err("size"));
        assert_eq!(settings(|s| s.std = [0.0; 3]), Err("std"));
        assert_eq!(settings(|s| s.mean = [f32::NAN; 3]), Err("mean"));
        assert_eq!(settings(|s| s.batch_size = 0), Err("batch_size"));
        assert_eq!(settings(|s| s.threads = 0), Err("threads"));
    }
}
