//! A vision-language model as a judge, behind the OpenAI-compatible chat completions API of vLLM, SGLang and others.

mod answer;
mod request;

pub use answer::ChatScore;

use serde::{Deserialize, Serialize};

use crate::error::require;
use crate::http::{check_batching, check_url};
use crate::net::{Client, ConnectionSettings};
use crate::{Batching, Encoding, FrameSelection, Reward, RewardBreakdown, RewardError, Sample, Scored, SetupError, Stop, parallel};

/// Stands for the prompt in templates.
const PLACEHOLDER: &str = "{prompt}";

/// `type = "chat"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatSettings {
    /// The API's base, for instance `http://127.0.0.1:8000/v1`.
    pub url: String,
    /// The model's name there.
    pub model: String,
    /// The question; `{prompt}` is what was asked of the video.
    pub prompt: String,
    /// The system message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// How the answer becomes a number.
    pub score: ChatScore,
    /// Numbers outside are errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<[f64; 2]>,
    /// Frames that are shown, in one message.
    #[serde(default = "four")]
    pub frames: FrameSelection,
    /// `jpeg` or `png`.
    #[serde(default = "jpeg")]
    pub encoding: Encoding,
    /// 0 gives the most likely answer.
    #[serde(default)]
    pub temperature: f64,
    /// Length of the answer at most. With `yes_probability` it is one token.
    #[serde(default = "max_tokens")]
    pub max_tokens: u32,
    /// Seed of the sampling, for servers that take one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Questions at once.
    #[serde(default = "concurrency")]
    pub concurrency: usize,
    /// The environment variable with the API key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// Timeouts, retries, limits.
    #[serde(default)]
    pub connection: ConnectionSettings,
}

fn four() -> FrameSelection {
    FrameSelection::Count(4)
}

fn jpeg() -> Encoding {
    Encoding::Jpeg
}

fn max_tokens() -> u32 {
    512
}

fn concurrency() -> usize {
    4
}

impl ChatSettings {
    /// The defaults, for this judge.
    pub fn new(url: &str, model: &str, prompt: &str, score: ChatScore) -> Self {
        Self {
            url: url.to_owned(),
            model: model.to_owned(),
            prompt: prompt.to_owned(),
            system: None,
            score,
            range: None,
            frames: four(),
            encoding: jpeg(),
            temperature: 0.0,
            max_tokens: max_tokens(),
            seed: None,
            concurrency: concurrency(),
            api_key_env: None,
            connection: ConnectionSettings::default(),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), SetupError> {
        check_url(&self.url)?;
        require(!self.model.is_empty(), "model", "", "the model's name at the server", "`GET /v1/models` lists them")?;
        let hint = "for instance `Does the video show \"{prompt}\"? Answer Yes or No.`";
        require(self.prompt.contains(PLACEHOLDER), "prompt", &self.prompt, "a question with `{prompt}` in it", hint)?;
        self.score.validate()?;
        if let Some([low, high]) = self.range {
            require(low < high, "range", format!("[{low}, {high}]"), "[low, high] with low < high", "for instance [1, 5]")?;
        }
        self.frames.validate()?;
        require(self.encoding != Encoding::Raw, "encoding", "raw", "`jpeg` or `png`", "the API takes image files")?;
        let fits = (0.0..=2.0).contains(&self.temperature);
        require(fits, "temperature", self.temperature, "0 to 2", "0 makes the judge as repeatable as the server allows")?;
        require(self.max_tokens > 0, "max_tokens", 0, "at least 1", "512 is the default")?;
        check_batching(1, self.concurrency)?;
        self.connection.validate()
    }
}

/// Scores by asking a judge.
pub struct ChatReward {
    client: Client,
    settings: ChatSettings,
    reader: answer::Reader,
}

impl ChatReward {
    /// # Errors
    /// Settings that cannot be used; an API key that is not in the environment. The server is not contacted yet.
    pub fn new(settings: ChatSettings) -> Result<Self, SetupError> {
        settings.validate()?;
        let client = Client::new(&settings.url, settings.connection).with_api_key(settings.api_key_env.as_deref())?;
        let reader = settings.score.reader()?;
        Ok(Self { client, settings, reader })
    }

    /// The same, giving up once it is asked to.
    pub fn with_stop(self, stop: Stop) -> Self {
        Self { client: self.client.with_stop(stop), ..self }
    }

    fn score_one(&self, sample: &Sample<'_>) -> Result<RewardBreakdown, String> {
        let request = request::body(&self.settings, sample)?;
        let answer = self.client.post("/chat/completions", "application/json", request.to_string().into_bytes(), sample.prompt)?;
        let score = self.reader.read(&answer)?;
        match self.settings.range {
            Some([low, high]) if !(low..=high).contains(&score.value) => {
                Err(format!("the judge says `{}`, outside `range` = [{low}, {high}]", score.value))
            }
            _ => Ok(score),
        }
    }
}

impl Reward for ChatReward {
    fn name(&self) -> &str {
        "chat"
    }

    fn prepare(&self) -> Result<(), SetupError> {
        let hint = "start the server first; `url` ends in `/v1` for most";
        let models = self
            .client
            .get("/models")
            .map_err(|reason| SetupError::new(self.name(), format!("no `/models` from `{}`: {reason}", self.settings.url), hint))?;
        // Servers list what they like; a name that is missing is an error only where there is a list to be missing from.
        let listed = answer::model_ids(&models);
        let fits = listed.is_empty() || listed.contains(&self.settings.model);
        require(fits, "model", &self.settings.model, "one that the server has", format!("it has {}", listed.join(", ")))
            .map_err(|e| e.of(self.name()))
    }

    fn identity(&self) -> Option<String> {
        // How to reach the judge is no part of what it says.
        let settings = ChatSettings {
            url: String::new(),
            concurrency: 1,
            api_key_env: None,
            connection: ConnectionSettings::default(),
            ..self.settings.clone()
        };
        serde_json::to_string(&settings).ok().map(|settings| format!("chat {settings}"))
    }

    fn cache_key(&self) -> Option<String> {
        self.identity().map(|identity| format!("{identity} at {}", self.settings.url))
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.score_batched(batch, Batching { batch_size: 1, concurrency: self.settings.concurrency })
    }

    fn largest_batching(&self) -> Option<Batching> {
        Some(Batching { batch_size: 1, ..Batching::LARGEST })
    }

    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        let one = |sample: &Sample<'_>| self.score_one(sample).map_err(|reason| RewardError::new(self.name(), sample.prompt, reason));
        parallel::map(batch, batching.concurrency, one)
    }
}
