//! A program that speaks the project's protocol as lines of JSON: requests on its standard input, answers on its standard output.

mod child;
mod pool;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::require;
use crate::http::{check_batching, one};
use crate::protocol::Wire;
use crate::{Aggregation, Batching, Encoding, FrameSelection, Reward, Sample, Scored, SetupError, Stop};
use pool::Pool;

/// `type = "command"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandSettings {
    /// Program and arguments; no shell.
    pub command: Vec<String>,
    /// Frames that are sent.
    #[serde(default)]
    pub frames: FrameSelection,
    /// What `frame_values` become.
    #[serde(default)]
    pub aggregate: Aggregation,
    /// How they are sent.
    #[serde(default)]
    pub encoding: Encoding,
    /// Send frames as files in this folder rather than in the line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_folder: Option<PathBuf>,
    /// Samples of a request.
    #[serde(default = "one")]
    pub batch_size: usize,
    /// How many of it run.
    #[serde(default = "one")]
    pub processes: usize,
    /// For one answer; a program that takes longer is killed. The first request includes its start.
    #[serde(default = "timeout")]
    pub timeout_s: f64,
    /// Times that a request is given to a new process after the last one died or was killed.
    #[serde(default = "restarts")]
    pub restarts: u32,
    /// Changes whenever values would: part of the cache's key, like the contents of the files that `command` names.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
}

fn timeout() -> f64 {
    120.0
}

fn restarts() -> u32 {
    2
}

impl CommandSettings {
    /// The defaults, for this program.
    pub fn new(command: &[&str]) -> Self {
        Self {
            command: command.iter().map(|&word| word.to_owned()).collect(),
            frames: FrameSelection::default(),
            aggregate: Aggregation::default(),
            encoding: Encoding::default(),
            shared_folder: None,
            batch_size: 1,
            processes: 1,
            timeout_s: timeout(),
            restarts: restarts(),
            version: String::new(),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), SetupError> {
        let named = self.command.first().is_some_and(|program| !program.is_empty());
        require(named, "command", "[]", "a program and its arguments", "for instance `[\"python3\", \"my_reward.py\"]`")?;
        self.frames.validate()?;
        self.aggregate.validate()?;
        check_batching(self.batch_size, 1)?;
        require((1..=256).contains(&self.processes), "processes", self.processes, "1 to 256", "how many of the program run at once")?;
        let seconds = self.timeout_s;
        require(seconds > 0.0 && seconds <= 86_400.0, "timeout_s", seconds, "seconds, above 0 and at most a day", "120 is the default")?;
        require(self.restarts <= 100, "restarts", self.restarts, "0 to 100", "2 is the default")
    }
}

/// Scores by asking processes of its own.
pub struct CommandReward {
    settings: CommandSettings,
    wire: Wire,
    pool: Pool,
}

impl CommandReward {
    /// # Errors
    /// Settings that cannot be used. Nothing is started yet.
    pub fn new(settings: CommandSettings) -> Result<Self, SetupError> {
        settings.validate()?;
        let wire = Wire {
            frames: settings.frames,
            aggregate: settings.aggregate,
            encoding: settings.encoding,
            shared_folder: settings.shared_folder.clone(),
        };
        let pool = Pool::new(settings.command.clone(), settings.processes, Duration::from_secs_f64(settings.timeout_s), settings.restarts);
        Ok(Self { settings, wire, pool })
    }

    /// The same, giving up once it is asked to.
    pub fn with_stop(self, stop: Stop) -> Self {
        Self { pool: self.pool.with_stop(stop), ..self }
    }
}

impl Reward for CommandReward {
    fn name(&self) -> &str {
        "command"
    }

    fn prepare(&self) -> Result<(), SetupError> {
        let hint = "the first word of `command` is a program that reads requests line by line until its input ends; relative paths start at the current directory";
        self.pool.start().map_err(|reason| SetupError::new(self.name(), reason, hint))
    }

    fn identity(&self) -> Option<String> {
        let CommandSettings { command, frames, aggregate, encoding, version, .. } = &self.settings;
        let settings = serde_json::to_string(&(command, frames, aggregate, encoding, version)).ok()?;
        let files: Vec<String> = command.iter().filter_map(|word| contents(Path::new(word))).collect();
        Some(format!("command {settings} {}", files.join(" ")))
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.score_batched(batch, Batching { batch_size: self.settings.batch_size, concurrency: self.settings.processes })
    }

    fn largest_batching(&self) -> Option<Batching> {
        Some(Batching { concurrency: self.settings.processes, ..Batching::LARGEST })
    }

    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        self.wire.score(self.name(), batch, batching, |request, _, read| self.pool.exchange(&request, read))
    }
}

/// Hash of a file that the command names, such as a script; programs on the search path and large files count by name only.
fn contents(path: &Path) -> Option<String> {
    let small = path.metadata().is_ok_and(|data| data.is_file() && data.len() < 16 << 20);
    let bytes = small.then(|| std::fs::read(path).ok()).flatten()?;
    Some(Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}
