//! A reward server that speaks the project's own protocol: `tools/reward_server.py`, or anything that answers
//!
//! ```text
//! POST /v1/score   scores of samples, see `protocol`
//! GET  /v1/info    {"protocol": 1, "name", "version", "max_batch"?, "max_bytes"?}
//! GET  /health     200 when it can score
//! ```

use std::path::PathBuf;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::error::require;
use crate::net::{Client, ConnectionSettings};
use crate::protocol::{Info, PROTOCOL, Wire, beginning};
use crate::{Aggregation, Batching, Encoding, FrameSelection, Reward, Sample, Scored, SetupError, Stop};

/// `type = "http"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpSettings {
    /// The server, without a path: `http://127.0.0.1:8000`.
    pub url: String,
    /// Frames that are sent.
    #[serde(default)]
    pub frames: FrameSelection,
    /// What `frame_values` become.
    #[serde(default)]
    pub aggregate: Aggregation,
    /// How they are sent.
    #[serde(default)]
    pub encoding: Encoding,
    /// Send frames as files in this folder, for a server that sees it too (`/dev/shm`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_folder: Option<PathBuf>,
    /// Samples of a request.
    #[serde(default = "one")]
    pub batch_size: usize,
    /// Requests at once.
    #[serde(default = "one")]
    pub concurrency: usize,
    /// The environment variable with the API key, which is sent as `Authorization: Bearer KEY`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// Timeouts, retries, limits.
    #[serde(default)]
    pub connection: ConnectionSettings,
}

pub(crate) fn one() -> usize {
    1
}

impl HttpSettings {
    /// The defaults, for this server.
    pub fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            frames: FrameSelection::default(),
            aggregate: Aggregation::default(),
            encoding: Encoding::default(),
            shared_folder: None,
            batch_size: 1,
            concurrency: 1,
            api_key_env: None,
            connection: ConnectionSettings::default(),
        }
    }

    fn batching(&self) -> Batching {
        Batching { batch_size: self.batch_size, concurrency: self.concurrency }
    }

    pub(crate) fn validate(&self) -> Result<(), SetupError> {
        check_url(&self.url)?;
        self.frames.validate()?;
        self.aggregate.validate()?;
        check_batching(self.batch_size, self.concurrency)?;
        self.connection.validate()
    }
}

pub(crate) fn check_url(url: &str) -> Result<(), SetupError> {
    let server = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let fits = server.is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['/', ':'])) && url.parse::<ureq::http::Uri>().is_ok();
    require(fits, "url", url, "the address of a server", "for instance `http://127.0.0.1:8000`")?;
    let hint = "name an environment variable with `api_key_env` instead: recipes are copied into run folders";
    require(!url.contains('@'), "url", "(hidden)", "an address without user and password", hint)
}

pub(crate) fn check_batching(batch_size: usize, concurrency: usize) -> Result<(), SetupError> {
    let most = Batching::LARGEST;
    let fits = (1..=most.batch_size).contains(&batch_size);
    require(fits, "batch_size", batch_size, &format!("1 to {}", most.batch_size), "samples of one request")?;
    let fits = (1..=most.concurrency).contains(&concurrency);
    let hint = "requests at once; each holds its frames in memory";
    require(fits, "concurrency", concurrency, &format!("1 to {}", most.concurrency), hint)
}

/// Scores by asking a server.
pub struct HttpReward {
    client: Client,
    wire: Wire,
    settings: HttpSettings,
    info: OnceLock<Info>,
}

impl HttpReward {
    /// # Errors
    /// Settings that cannot be used; an API key that is not in the environment. The server is not contacted yet.
    pub fn new(settings: HttpSettings) -> Result<Self, SetupError> {
        settings.validate()?;
        let wire = Wire {
            frames: settings.frames,
            aggregate: settings.aggregate,
            encoding: settings.encoding,
            shared_folder: settings.shared_folder.clone(),
        };
        let client = Client::new(&settings.url, settings.connection).with_api_key(settings.api_key_env.as_deref())?;
        Ok(Self { client, wire, settings, info: OnceLock::new() })
    }

    /// The same, giving up once it is asked to.
    pub fn with_stop(self, stop: Stop) -> Self {
        Self { client: self.client.with_stop(stop), ..self }
    }

    /// A request that is longer than the server takes would be refused while it is being sent.
    fn check_length(&self, bytes: usize) -> Result<(), String> {
        match self.info.get().and_then(|info| info.max_bytes) {
            Some(most) if bytes > most => Err(format!(
                "the request has {bytes} bytes, and the server takes at most {most}: lower `batch_size`, choose fewer `frames`, or set `encoding` to `jpeg` or `png`"
            )),
            _ => Ok(()),
        }
    }

    /// What the server says of itself; asked once.
    ///
    /// # Errors
    /// A server that does not answer, or speaks another protocol.
    pub fn info(&self) -> Result<&Info, SetupError> {
        if let Some(info) = self.info.get() {
            return Ok(info);
        }
        let url = &self.settings.url;
        let failed = |message: String| {
            let hint = "start it first, for instance with `python tools/reward_server.py --function my_reward:score`";
            SetupError::new(self.name(), message, hint)
        };
        let bytes = self.client.get("/v1/info").map_err(|reason| failed(format!("no `/v1/info` from `{url}`: {reason}")))?;
        let info: Info = serde_json::from_slice(&bytes).map_err(|error| {
            failed(format!("`/v1/info` of `{url}` is not what the protocol says: {error}; it begins with `{}`", beginning(&bytes)))
        })?;
        if info.protocol != PROTOCOL {
            return Err(failed(format!("`{url}` speaks protocol {}, expected {PROTOCOL}", info.protocol)));
        }
        Ok(self.info.get_or_init(|| info))
    }
}

impl Reward for HttpReward {
    fn name(&self) -> &str {
        "http"
    }

    fn prepare(&self) -> Result<(), SetupError> {
        let info = self.info()?;
        let (batch, most) = (self.settings.batch_size, info.max_batch.unwrap_or(usize::MAX));
        let hint = "the server takes no more samples at once";
        require(batch <= most, "batch_size", batch, &format!("at most {most}"), hint).map_err(|e| e.of(self.name()))?;
        let unhealthy = |reason| SetupError::new(self.name(), format!("`{}` is not ready: {reason}", self.settings.url), "look at its log");
        self.client.get("/health").map(drop).map_err(unhealthy)
    }

    fn identity(&self) -> Option<String> {
        let info = self.info().ok()?;
        let Self { settings, .. } = self;
        let frames = serde_json::to_string(&(settings.frames, settings.aggregate, settings.encoding)).ok()?;
        Some(format!("http {} {} {frames}", info.name, info.version))
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.score_batched(batch, self.settings.batching())
    }

    fn largest_batching(&self) -> Option<Batching> {
        let most = self.info.get().and_then(|info| info.max_batch).unwrap_or(Batching::LARGEST.batch_size);
        Some(Batching { batch_size: most, ..Batching::LARGEST })
    }

    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        self.wire.score(self.name(), batch, batching, |request, key, read| {
            self.check_length(request.len())?;
            self.client.post("/v1/score", "application/json", request, key).and_then(|answer| read(&answer))
        })
    }
}
