//! Reward servers of existing training code (Flow-GRPO, DDPO and their descendants): pickles over HTTP, images in, numbers out.
//!
//! ```text
//! request   {"images": [JPEG, ..], "prompts": [str, ..], "metadata": [dict, ..], ..}     one entry per frame, then what `extra` says
//! answer    {"scores": [number, ..]}                                                     floats, numpy numbers or arrays
//! ```
//!
//! The answer is read as data; see [`crate::pickle`].

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::encode::Image;
use crate::error::require;
use crate::http::{check_batching, check_url, one};
use crate::net::{Client, ConnectionSettings};
use crate::pickle::{self, Pickled};
use crate::{
    Aggregation, Batching, Encoding, FrameSelection, Reward, RewardBreakdown, RewardError, Sample, Scored, SetupError, Stop, parallel,
};

/// `type = "flow-grpo"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlowGrpoSettings {
    /// The full address that is posted to, for instance `http://127.0.0.1:18085`.
    pub url: String,
    /// Frames that are sent, each as an image of its own.
    #[serde(default)]
    pub frames: FrameSelection,
    /// What their scores become.
    #[serde(default)]
    pub aggregate: Aggregation,
    /// How they are sent: as JPEG, which all such servers open, or as PNG; those of GenEval and DeQA open nothing but JPEG.
    #[serde(default = "jpeg")]
    pub encoding: Encoding,
    /// Samples of a request.
    #[serde(default = "one")]
    pub batch_size: usize,
    /// Requests at once.
    #[serde(default = "one")]
    pub concurrency: usize,
    /// The answer's key of the scores: `scores`, or `outputs` for some servers.
    #[serde(default = "scores")]
    pub scores_key: String,
    /// The request's key of the prompts.
    #[serde(default = "prompts")]
    pub prompts_key: String,
    /// The request's key of the metadata; empty to send none.
    #[serde(default = "metadata")]
    pub metadata_key: String,
    /// Further entries of the request, the same in every one, such as `{ only_strict = true }`.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
    /// The environment variable with the API key, which is sent as `Authorization: Bearer KEY`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// Changes whenever values would: such servers cannot say it themselves. Without it, nothing is cached.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Timeouts, retries, limits.
    #[serde(default)]
    pub connection: ConnectionSettings,
}

/// The request's key of the images.
const IMAGES: &str = "images";

fn jpeg() -> Encoding {
    Encoding::Jpeg
}

fn scores() -> String {
    "scores".to_owned()
}

fn prompts() -> String {
    "prompts".to_owned()
}

fn metadata() -> String {
    "metadata".to_owned()
}

impl FlowGrpoSettings {
    /// The defaults, for this server.
    pub fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            frames: FrameSelection::default(),
            aggregate: Aggregation::default(),
            encoding: jpeg(),
            batch_size: 1,
            concurrency: 1,
            scores_key: scores(),
            prompts_key: prompts(),
            metadata_key: metadata(),
            extra: Map::new(),
            api_key_env: None,
            version: String::new(),
            connection: ConnectionSettings::default(),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), SetupError> {
        check_url(&self.url)?;
        self.frames.validate()?;
        self.aggregate.validate()?;
        require(self.encoding != Encoding::Raw, "encoding", "raw", "`jpeg` or `png`", "such servers open image files")?;
        check_batching(self.batch_size, self.concurrency)?;
        let taken = self.extra.keys().find(|key| [IMAGES, &self.prompts_key, &self.metadata_key].contains(&key.as_str()));
        let hint = "`prompts_key` and `metadata_key` rename those";
        require(taken.is_none(), "extra", taken.map_or("", |key| key), "keys that the request does not have already", hint)?;
        self.connection.validate()
    }
}

/// Scores by asking such a server.
pub struct FlowGrpoReward {
    client: Client,
    settings: FlowGrpoSettings,
}

impl FlowGrpoReward {
    /// # Errors
    /// Settings that cannot be used; an API key that is not in the environment. The server is not contacted yet.
    pub fn new(settings: FlowGrpoSettings) -> Result<Self, SetupError> {
        settings.validate()?;
        let client = Client::new(&settings.url, settings.connection).with_api_key(settings.api_key_env.as_deref())?;
        Ok(Self { client, settings })
    }

    /// The same, giving up once it is asked to.
    pub fn with_stop(self, stop: Stop) -> Self {
        Self { client: self.client.with_stop(stop), ..self }
    }

    fn score_chunk(&self, chunk: &[Sample<'_>]) -> Result<Vec<Result<RewardBreakdown, String>>, String> {
        let indices = |sample: &Sample<'_>| self.settings.frames.indices(sample.frames.num_frames(), sample.fps);
        let frames: Vec<Vec<usize>> = chunk.iter().map(indices).collect();
        let request = pickle::write(&self.request(chunk, &frames)?);
        let key = chunk.first().map_or("", |sample| sample.prompt);
        let answer = pickle::read(&self.client.post("", "application/octet-stream", request, key)?)?;
        let scores = answer.get(&self.settings.scores_key).and_then(Pickled::numbers);
        let scores =
            scores.ok_or_else(|| format!("the answer has no list of numbers as `{}`{}", self.settings.scores_key, keys(&answer)))?;
        let wanted: usize = frames.iter().map(Vec::len).sum();
        if scores.len() != wanted {
            return Err(format!("the answer has {} scores for {wanted} images", scores.len()));
        }
        let mut rest = &scores[..];
        let one = |frames: &Vec<usize>| {
            let (own, after) = rest.split_at(frames.len());
            rest = after;
            let value = self.settings.aggregate.of(own).unwrap_or(f64::NAN);
            if value.is_finite() { Ok(value.into()) } else { Err(format!("the scores of its frames are {own:?}, not finite numbers")) }
        };
        Ok(frames.iter().map(one).collect())
    }

    fn request(&self, chunk: &[Sample<'_>], frames: &[Vec<usize>]) -> Result<Pickled, String> {
        let pairs = || chunk.iter().zip(frames).flat_map(|(sample, indices)| indices.iter().map(move |&index| (sample, index)));
        let image = |(sample, index): (&Sample<'_>, usize)| {
            let bytes = Image::of(sample.frames, index).encode(self.settings.encoding);
            bytes.map(Pickled::Bytes)
        };
        let nothing = Value::Object(Map::new());
        let mut items = vec![
            (Pickled::Str(IMAGES.to_owned()), Pickled::List(pairs().map(image).collect::<Result<_, _>>()?)),
            (
                Pickled::Str(self.settings.prompts_key.clone()),
                Pickled::List(pairs().map(|(sample, _)| Pickled::Str(sample.prompt.to_owned())).collect()),
            ),
        ];
        if !self.settings.metadata_key.is_empty() {
            let metadata = pairs().map(|(sample, _)| Pickled::from_json(sample.metadata.unwrap_or(&nothing))).collect();
            items.push((Pickled::Str(self.settings.metadata_key.clone()), Pickled::List(metadata)));
        }
        items.extend(self.settings.extra.iter().map(|(key, value)| (Pickled::Str(key.clone()), Pickled::from_json(value))));
        Ok(Pickled::Dict(items))
    }
}

/// The keys of an answer, for a message.
fn keys(answer: &Pickled) -> String {
    let Pickled::Dict(items) = answer else { return ", it is no dictionary".to_owned() };
    let names: Vec<&str> =
        items.iter().take(8).filter_map(|(key, _)| if let Pickled::Str(key) = key { Some(&**key) } else { None }).collect();
    format!(", only {names:?}; `scores_key` names another")
}

impl Reward for FlowGrpoReward {
    fn name(&self) -> &str {
        "flow-grpo"
    }

    fn identity(&self) -> Option<String> {
        // How to reach the server is no part of what it says.
        let settings = FlowGrpoSettings {
            url: String::new(),
            batch_size: 1,
            concurrency: 1,
            api_key_env: None,
            connection: ConnectionSettings::default(),
            ..self.settings.clone()
        };
        let settings = serde_json::to_string(&settings).ok()?;
        (!self.settings.version.is_empty()).then(|| format!("flow-grpo {settings}"))
    }

    fn cache_key(&self) -> Option<String> {
        self.identity().map(|identity| format!("{identity} at {}", self.settings.url))
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.score_batched(batch, Batching { batch_size: self.settings.batch_size, concurrency: self.settings.concurrency })
    }

    fn largest_batching(&self) -> Option<Batching> {
        Some(Batching::LARGEST)
    }

    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        let chunks: Vec<&[Sample<'_>]> = batch.chunks(batching.batch_size.max(1)).collect();
        let scores = parallel::map(&chunks, batching.concurrency, |chunk| {
            let scores = self.score_chunk(chunk).unwrap_or_else(|reason| chunk.iter().map(|_| Err(reason.clone())).collect());
            let named =
                |(sample, score): (&Sample<'_>, Result<_, String>)| score.map_err(|e| RewardError::new(self.name(), sample.prompt, e));
            chunk.iter().zip(scores).map(named).collect::<Vec<Scored>>()
        });
        scores.into_iter().flatten().collect()
    }
}
