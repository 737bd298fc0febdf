//! A run folder, as far as the page needs it.

use crate::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// A run.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// Name of its folder.
    pub name: String,
    /// The resolved recipe.
    pub recipe: String,
    /// Lines of metrics.jsonl.
    pub metrics: Vec<Value>,
    /// Lines of timings.jsonl.
    pub timings: Vec<Value>,
    /// Lines of eval.jsonl.
    pub evals: Vec<Value>,
    /// summary.json, once the run is over.
    pub summary: Option<Value>,
    /// Videos, largest gain first.
    pub videos: Vec<VideoPair>,
}

/// The same prompt and noise before and after.
#[derive(Debug, Clone, Default)]
pub struct VideoPair {
    /// The prompt.
    pub prompt: String,
    /// MP4 before.
    pub before: Vec<u8>,
    /// MP4 after; absent while the run goes on.
    pub after: Option<Vec<u8>>,
    /// Rewards of these very samples.
    pub rewards: [Option<f64>; 2],
}

impl VideoPair {
    /// Reward after less reward before.
    pub fn gain(&self) -> Option<f64> {
        Some(self.rewards[1]? - self.rewards[0]?)
    }
}

/// What is read of `evaluation-before.json` and `evaluation-after.json`.
#[derive(Debug, Deserialize)]
struct Evaluation {
    samples: Vec<EvaluatedSample>,
}

#[derive(Debug, Deserialize)]
struct EvaluatedSample {
    prompt: usize,
    text: String,
    reward: Reward,
    video: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Reward {
    value: f64,
}

impl Run {
    /// Reads what is there; only the recipe has to be.
    ///
    /// # Errors
    /// A folder without `recipe.toml`; a file that cannot be read or is not what it should be.
    pub fn load(folder: &Path) -> Result<Self> {
        let recipe = folder.join("recipe.toml");
        let hint = "give the folder that `flash-grpo train` wrote";
        let recipe = std::fs::read_to_string(&recipe).map_err(|e| Error::File { path: recipe.clone(), reason: e.to_string(), hint })?;
        let name = folder.canonicalize().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        Ok(Self {
            name: name.unwrap_or_else(|| folder.display().to_string()),
            recipe,
            metrics: lines(&folder.join("metrics.jsonl"))?,
            timings: lines(&folder.join("timings.jsonl"))?,
            evals: lines(&folder.join("eval.jsonl"))?,
            summary: json(&folder.join("summary.json"))?,
            videos: videos(folder)?,
        })
    }
}

/// A file that may be absent.
fn text(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::File { path: path.into(), reason: error.to_string(), hint: "check its permissions" }),
    }
}

fn json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>> {
    let Some(text) = text(path)? else { return Ok(None) };
    let broken = |e: serde_json::Error| Error::File {
        path: path.into(),
        reason: e.to_string(),
        hint: "delete it, and resume the run to write it anew",
    };
    serde_json::from_str(&text).map(Some).map_err(broken)
}

/// The whole lines; a run may be writing the last one.
fn lines(path: &Path) -> Result<Vec<Value>> {
    let text = text(path)?.unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |(i, line): (usize, &str)| {
        let broken = |e: serde_json::Error| Error::File {
            path: path.into(),
            reason: format!("line {}: {e}", i + 1),
            hint: "resume the run, which cuts the file back to the last checkpoint",
        };
        serde_json::from_str(line).map_err(broken)
    };
    whole.lines().enumerate().map(parse).collect()
}

fn videos(folder: &Path) -> Result<Vec<VideoPair>> {
    let before: Option<Evaluation> = json(&folder.join("evaluation-before.json"))?;
    let after: Option<Evaluation> = json(&folder.join("evaluation-after.json"))?;
    let mut pairs: BTreeMap<usize, VideoPair> = BTreeMap::new();
    for (side, evaluation) in [before, after].into_iter().enumerate() {
        for sample in evaluation.into_iter().flat_map(|evaluation| evaluation.samples) {
            let Some(video) = &sample.video else { continue };
            // names come from our own JSON, but a file is a file: nothing outside of the folder
            let Some(name) = Path::new(video).file_name() else { continue };
            let Ok(bytes) = std::fs::read(folder.join("samples").join(name)) else { continue };
            let pair = pairs.entry(sample.prompt).or_default();
            pair.prompt = sample.text;
            pair.rewards[side] = Some(sample.reward.value);
            if side == 0 { pair.before = bytes } else { pair.after = Some(bytes) }
        }
    }
    let mut pairs: Vec<VideoPair> = pairs.into_values().filter(|pair| !pair.before.is_empty()).collect();
    pairs.sort_by(|a, b| b.gain().unwrap_or(0.0).total_cmp(&a.gain().unwrap_or(0.0)));
    Ok(pairs)
}
