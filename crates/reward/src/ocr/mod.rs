//! Is the text that the prompt asks for legible? A text recogniser reads frames; near misses earn something.
//!
//! ```text
//! target = what stands in the prompt's first pair of double quotes
//! frame  = 1 - min(d, n) / n      d = edit distance of the text read to the target, n = length of the target
//! ```
//!
//! Both texts are compared in lower case, without blanks. With `detector`, lines of text are found in the frame first; without one the whole
//! frame is read as one line. The networks are those of PaddleOCR, exported to ONNX.

mod detect;
mod read;
mod target;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::onnx::picture::Picture;
use crate::onnx::{Session, check_threads, identity, selected};
use crate::{Aggregation, FrameSelection, Reward, RewardBreakdown, RewardError, Sample, Scored, SetupError};

/// `type = "ocr"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OcrSettings {
    /// A network that reads a line of text (PP-OCR's `rec`), with its alphabet in the metadata `character`.
    pub recogniser: PathBuf,
    /// A network that finds lines of text (PP-OCR's `det`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detector: Option<PathBuf>,
    /// The library of ONNX Runtime; without it `ORT_DYLIB_PATH`, then the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library: Option<PathBuf>,
    /// Frames that are read.
    #[serde(default)]
    pub frames: FrameSelection,
    /// What their scores become.
    #[serde(default)]
    pub aggregate: Aggregation,
    /// Whether text around the target is free, as in Flow-GRPO's reward: a frame that contains the target then scores 1.
    #[serde(default)]
    pub allow_surrounding: bool,
    /// Threads that compute.
    #[serde(default = "one")]
    pub threads: usize,
}

fn one() -> usize {
    1
}

impl OcrSettings {
    /// The defaults, for this recogniser.
    pub fn new(recogniser: impl Into<PathBuf>) -> Self {
        Self {
            recogniser: recogniser.into(),
            detector: None,
            library: None,
            frames: FrameSelection::default(),
            aggregate: Aggregation::default(),
            allow_surrounding: false,
            threads: one(),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), SetupError> {
        self.frames.validate()?;
        self.aggregate.validate()?;
        check_threads(self.threads)
    }
}

/// Scores by reading.
pub struct OcrReward {
    settings: OcrSettings,
    recogniser: read::Recogniser,
    detector: Option<Session>,
    identity: String,
}

/// What was read in a frame.
#[derive(Debug, Clone, PartialEq)]
struct Reading {
    text: String,
    /// Mean probability of its characters; 0 without any.
    confidence: f64,
}

impl OcrReward {
    /// # Errors
    /// Settings that cannot be used; a runtime or a file that cannot be opened; a recogniser without an alphabet.
    pub fn new(settings: OcrSettings) -> Result<Self, SetupError> {
        settings.validate()?;
        let open = |path: &Path, field| Session::open(path, field, settings.library.as_deref(), settings.threads);
        let session = open(&settings.recogniser, "recogniser")?;
        let recogniser = read::Recogniser::new(session).ok_or_else(|| {
            let expected = "a text recogniser with its alphabet in the metadata `character`";
            SetupError::field("recogniser", settings.recogniser.display(), expected, "for instance PP-OCR's rec network, exported to ONNX")
        })?;
        let detector = settings.detector.as_ref().map(|path| open(path, "detector")).transpose()?;
        let files: Vec<&Path> =
            [Some(&settings.recogniser), settings.detector.as_ref()].into_iter().flatten().map(PathBuf::as_path).collect();
        let identity = identity("ocr", &settings, &files)?;
        Ok(Self { settings, recogniser, detector, identity })
    }

    fn score_one(&self, sample: &Sample<'_>) -> Result<RewardBreakdown, String> {
        let target = target::quoted(sample.prompt).ok_or(target::MISSING)?;
        let frames = selected(sample, self.settings.frames);
        let readings = self.read(&frames)?;
        let scores: Vec<f64> =
            readings.iter().map(|reading| target::similarity(&reading.text, target, self.settings.allow_surrounding)).collect();
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / readings.len().max(1) as f64;
        let exact = mean(&mut scores.iter().map(|&score| f64::from(u8::from(score >= 1.0))));
        let confidence = mean(&mut readings.iter().map(|reading| reading.confidence));
        let components = [("exact".to_owned(), exact), ("confidence".to_owned(), confidence)].into();
        Ok(RewardBreakdown { value: self.settings.aggregate.of(&scores).unwrap_or(f64::NAN), components })
    }

    fn read(&self, frames: &[Picture]) -> Result<Vec<Reading>, String> {
        let Some(detector) = &self.detector else { return self.recogniser.read(frames) };
        let read = |frame: &Picture| {
            let lines: Vec<Picture> = detect::lines(detector, frame)?.into_iter().map(|area| frame.crop(area)).collect();
            let mut readings = Vec::with_capacity(lines.len());
            for line in &lines {
                readings.extend(self.recogniser.read(std::slice::from_ref(line))?);
            }
            let confidence = readings.iter().map(|reading| reading.confidence).sum::<f64>() / readings.len().max(1) as f64;
            Ok(Reading { text: readings.into_iter().map(|reading| reading.text).collect::<Vec<_>>().join(" "), confidence })
        };
        frames.iter().map(read).collect()
    }
}

impl Reward for OcrReward {
    fn name(&self) -> &str {
        "ocr"
    }

    fn check_prompt(&self, prompt: &str) -> Result<(), RewardError> {
        target::quoted(prompt).map(drop).ok_or_else(|| RewardError::new(self.name(), prompt, target::MISSING))
    }

    fn identity(&self) -> Option<String> {
        Some(self.identity.clone())
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        let one = |sample: &Sample<'_>| self.score_one(sample).map_err(|reason| RewardError::new(self.name(), sample.prompt, reason));
        batch.iter().map(one).collect()
    }
}
