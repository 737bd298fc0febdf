//! What a recipe says about a reward, and how that becomes one.

use std::path::PathBuf;

use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::builtin::{ClipMeasure, ClipReward, FrameMeasure, FrameReward, FrameSettings};
use crate::chat::{ChatReward, ChatSettings};
use crate::command::{CommandReward, CommandSettings};
use crate::error::require;
use crate::flow_grpo::{FlowGrpoReward, FlowGrpoSettings};
use crate::http::{HttpReward, HttpSettings};
use crate::ocr::{OcrReward, OcrSettings};
use crate::onnx::{OnnxReward, OnnxSettings};
use crate::{Cached, FrameSelection, Guarded, Reward, SetupError, ShapesReward, Stop, Weighted};

/// One `[[reward]]`: what every kind has, and the settings of its own kind beside them.
///
/// ```toml
/// [[reward]]
/// type = "http"
/// url = "http://127.0.0.1:8000"
/// weight = 0.5
/// name = "hps"
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct RewardEntry {
    /// The kind and its settings.
    pub spec: RewardSpec,
    /// Its share of the sum; negative penalises.
    pub weight: f64,
    /// Its name in metrics; without one, the kind's.
    pub name: Option<String>,
    /// Values outside are errors.
    pub limits: Option<[f64; 2]>,
    /// Whether its values are kept on disk, where the caller has a folder for them; what is measured here without a network never is.
    pub cache: bool,
}

/// What a recipe does not say.
#[derive(Clone, Debug, Default)]
pub struct BuildOptions {
    /// Where values are kept; without it, nowhere.
    pub cache: Option<PathBuf>,
    /// Ends waiting.
    pub stop: Stop,
}

/// A kind of reward with its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum RewardSpec {
    /// [`ShapesReward`]
    Shapes {},
    /// [`FrameMeasure::JpegCompressibility`]
    JpegCompressibility(FrameSettings),
    /// [`FrameMeasure::JpegIncompressibility`]
    JpegIncompressibility(FrameSettings),
    /// [`FrameMeasure::Brightness`]
    Brightness(FrameSettings),
    /// [`FrameMeasure::Contrast`]
    Contrast(FrameSettings),
    /// [`FrameMeasure::EdgeEnergy`]
    EdgeEnergy(FrameSettings),
    /// [`ClipMeasure::MotionSmoothness`]
    MotionSmoothness {},
    /// [`ClipMeasure::DynamicDegree`]
    DynamicDegree {},
    /// [`ClipMeasure::TemporalFlicker`]
    TemporalFlicker {},
    /// [`HttpReward`]
    Http(HttpSettings),
    /// [`CommandReward`]
    Command(CommandSettings),
    /// [`ChatReward`]
    Chat(ChatSettings),
    /// [`FlowGrpoReward`]
    FlowGrpo(FlowGrpoSettings),
    /// [`OnnxReward`]
    Onnx(OnnxSettings),
    /// [`OcrReward`]
    Ocr(OcrSettings),
}

impl RewardEntry {
    /// Weight 1, and nothing else set.
    pub fn new(spec: RewardSpec) -> Self {
        Self { spec, weight: 1.0, name: None, limits: None, cache: true }
    }

    /// Checks every value; opens and contacts nothing.
    ///
    /// # Errors
    /// The first value that cannot be used.
    pub fn validate(&self) -> Result<(), SetupError> {
        self.validate_common().and_then(|()| self.spec.validate()).map_err(|error| error.of(&self.shown_name()))
    }

    fn validate_common(&self) -> Result<(), SetupError> {
        let weight = self.weight;
        require(weight.is_finite() && weight != 0.0, "weight", weight, "a number other than 0", "delete a reward that should not count")?;
        let name = self.name.as_deref().unwrap_or("x");
        let fits = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "-_".contains(c));
        require(fits, "name", name, "letters, digits, `-` and `_`", "it becomes the name of a metric")?;
        let Some([low, high]) = self.limits else { return Ok(()) };
        require(low < high, "limits", format!("[{low}, {high}]"), "[low, high] with low < high", "leave it out to allow every finite value")
    }

    /// The reward, under its name and held to the contract.
    ///
    /// # Errors
    /// A value that cannot be used. Servers are not contacted: see [`Reward::prepare`].
    pub fn build(&self, options: &BuildOptions) -> Result<Box<dyn Reward>, SetupError> {
        self.validate()?;
        let reward = self.spec.build(&options.stop).map_err(|error| error.of(&self.shown_name()))?;
        // The guard is outside: it also holds what was kept to the limits of today.
        let reward = match &options.cache {
            Some(folder) if self.cache => Box::new(Cached::new(reward, folder)),
            _ => reward,
        };
        Ok(Box::new(Guarded::new(reward, Some(self.shown_name()), self.limits)))
    }

    fn shown_name(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.spec.kind())
    }
}

/// All rewards of a recipe as one.
///
/// # Errors
/// The first entry that cannot be used.
pub fn build(entries: &[RewardEntry], options: &BuildOptions) -> Result<Weighted, SetupError> {
    let one = |entry: &RewardEntry| Ok((entry.weight, entry.build(options)?));
    Ok(Weighted::new(entries.iter().map(one).collect::<Result<_, _>>()?))
}

/// How many frames from the start of a clip decide its rewards: of a clip that is cut after them, or later, the values are the same. What comes
/// after them is not decoded.
pub fn leading_frames(entries: &[RewardEntry], num_frames: usize, fps: f64) -> usize {
    let of = |entry: &RewardEntry| entry.spec.frames().map_or(num_frames, |frames| frames.leading(num_frames, fps));
    entries.iter().map(of).max().unwrap_or(num_frames)
}

/// How many samples the rewards like to get together: those that their requests hold at a time. What is sampled is handed over in such pieces,
/// which begins scoring early and leaves little to wait for at the end.
pub fn samples_at_once(entries: &[RewardEntry]) -> usize {
    entries.iter().map(|entry| entry.spec.samples_at_once()).max().unwrap_or(1)
}

impl RewardSpec {
    /// Frames that it looks at; `None` where it needs the clip.
    fn frames(&self) -> Option<FrameSelection> {
        match self {
            Self::Shapes {} | Self::MotionSmoothness {} | Self::DynamicDegree {} | Self::TemporalFlicker {} => None,
            Self::JpegCompressibility(s)
            | Self::JpegIncompressibility(s)
            | Self::Brightness(s)
            | Self::Contrast(s)
            | Self::EdgeEnergy(s) => Some(s.frames),
            Self::Http(settings) => Some(settings.frames),
            Self::Command(settings) => Some(settings.frames),
            Self::Chat(settings) => Some(settings.frames),
            Self::FlowGrpo(settings) => Some(settings.frames),
            Self::Onnx(settings) => Some(settings.frames),
            Self::Ocr(settings) => Some(settings.frames),
        }
    }

    fn samples_at_once(&self) -> usize {
        match self {
            Self::Http(settings) => settings.batch_size * settings.concurrency,
            Self::Command(settings) => settings.batch_size * settings.processes,
            Self::Chat(settings) => settings.concurrency,
            Self::FlowGrpo(settings) => settings.batch_size * settings.concurrency,
            Self::Onnx(settings) => settings.batch_size,
            _ => 1,
        }
    }

    /// What stands behind `type` in a recipe.
    pub fn kind(&self) -> String {
        let value = serde_json::to_value(self).ok();
        value.as_ref().and_then(|value| value["type"].as_str()).unwrap_or("reward").to_owned()
    }

    fn validate(&self) -> Result<(), SetupError> {
        match self {
            Self::Shapes {} | Self::MotionSmoothness {} | Self::DynamicDegree {} | Self::TemporalFlicker {} => Ok(()),
            Self::JpegCompressibility(s)
            | Self::JpegIncompressibility(s)
            | Self::Brightness(s)
            | Self::Contrast(s)
            | Self::EdgeEnergy(s) => s.validate(),
            Self::Http(settings) => settings.validate(),
            Self::Command(settings) => settings.validate(),
            Self::Chat(settings) => settings.validate(),
            Self::FlowGrpo(settings) => settings.validate(),
            Self::Onnx(settings) => settings.validate(),
            Self::Ocr(settings) => settings.validate(),
        }
    }

    fn build(&self, stop: &Stop) -> Result<Box<dyn Reward>, SetupError> {
        let frame = |measure, &settings: &FrameSettings| Box::new(FrameReward { measure, settings });
        Ok(match self {
            Self::Shapes {} => Box::new(ShapesReward),
            Self::JpegCompressibility(s) => frame(FrameMeasure::JpegCompressibility, s),
            Self::JpegIncompressibility(s) => frame(FrameMeasure::JpegIncompressibility, s),
            Self::Brightness(s) => frame(FrameMeasure::Brightness, s),
            Self::Contrast(s) => frame(FrameMeasure::Contrast, s),
            Self::EdgeEnergy(s) => frame(FrameMeasure::EdgeEnergy, s),
            Self::MotionSmoothness {} => Box::new(ClipReward(ClipMeasure::MotionSmoothness)),
            Self::DynamicDegree {} => Box::new(ClipReward(ClipMeasure::DynamicDegree)),
            Self::TemporalFlicker {} => Box::new(ClipReward(ClipMeasure::TemporalFlicker)),
            Self::Http(settings) => Box::new(HttpReward::new(settings.clone())?.with_stop(stop.clone())),
            Self::Command(settings) => Box::new(CommandReward::new(settings.clone())?.with_stop(stop.clone())),
            Self::Chat(settings) => Box::new(ChatReward::new(settings.clone())?.with_stop(stop.clone())),
            Self::FlowGrpo(settings) => Box::new(FlowGrpoReward::new(settings.clone())?.with_stop(stop.clone())),
            Self::Onnx(settings) => Box::new(OnnxReward::new(settings.clone())?),
            Self::Ocr(settings) => Box::new(OcrReward::new(settings.clone())?),
        })
    }
}

/// Keys that every kind has.
const COMMON: [&str; 4] = ["weight", "name", "limits", "cache"];

#[derive(Deserialize, Serialize)]
struct Common {
    #[serde(default = "one")]
    weight: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    limits: Option<[f64; 2]>,
    #[serde(default = "on", skip_serializing_if = "is_on")]
    cache: bool,
}

fn one() -> f64 {
    1.0
}

fn on() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_on(on: &bool) -> bool {
    *on
}

// By hand, because serde cannot refuse unknown keys in structures that are flattened into each other.
impl<'de> Deserialize<'de> for RewardEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (common, own): (Map<String, Value>, Map<String, Value>) =
            Map::deserialize(deserializer)?.into_iter().partition(|(key, _)| COMMON.contains(&key.as_str()));
        let spec = RewardSpec::deserialize(Value::Object(own)).map_err(D::Error::custom)?;
        let Common { weight, name, limits, cache } = Common::deserialize(Value::Object(common)).map_err(D::Error::custom)?;
        Ok(Self { spec, weight, name, limits, cache })
    }
}

impl Serialize for RewardEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { spec, weight, name, limits, cache } = self.clone();
        let common = serde_json::to_value(Common { weight, name, limits, cache }).map_err(S::Error::custom)?;
        let mut table = serde_json::to_value(spec).map_err(S::Error::custom)?;
        if let (Value::Object(table), Value::Object(common)) = (&mut table, common) {
            // Plain values before tables, as TOML wants them.
            let (tables, plain): (Map<_, _>, Map<_, _>) = std::mem::take(table).into_iter().partition(|(_, value)| value.is_object());
            *table = plain.into_iter().chain(common).chain(tables).collect();
        }
        table.serialize(serializer)
    }
}
