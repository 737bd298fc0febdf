//! Run and comparison folders, as far as the page needs them.

use crate::comparison::Table;
use crate::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a folder holds.
#[derive(Debug, Clone)]
pub enum Subject {
    /// What `flash-grpo train` wrote.
    Run(Run),
    /// What `flash-grpo compare` wrote.
    Comparison(Comparison),
}

impl Subject {
    /// Reads a folder of either kind. A comparison that is under way is the runs that it has begun.
    ///
    /// # Errors
    /// A folder of neither kind; a file in it that cannot be read or is not what it should be.
    pub fn load(folder: &Path) -> Result<Vec<Self>> {
        if folder.join(TABLE).exists() {
            return Ok(vec![Self::Comparison(Comparison::load(folder)?)]);
        }
        let begun = runs_of_comparison(folder);
        if folder.join(RECIPE).exists() || begun.is_empty() {
            return Ok(vec![Self::Run(Run::load(folder, usize::MAX)?)]);
        }
        begun.iter().map(|run| Run::load(run, Comparison::VIDEOS).map(Self::Run)).collect()
    }
}

/// Whether nothing more is to come in `folder`: a run has written its summary, which it does last, a comparison its table.
///
/// # Errors
/// As [`Subject::load`].
pub fn is_over(folder: &Path) -> Result<bool> {
    Ok(folder.join(TABLE).exists() || (folder.join(RECIPE).exists() && Run::load(folder, 0)?.summary.is_some()))
}

/// The run folders `runs/RECIPE/SEED` of a comparison, in order of their names.
fn runs_of_comparison(folder: &Path) -> Vec<PathBuf> {
    let inside = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut runs: Vec<PathBuf> = inside(&folder.join("runs")).flat_map(|row| inside(&row).collect::<Vec<_>>()).collect();
    runs.retain(|run| run.join(RECIPE).exists());
    runs.sort();
    runs
}

/// The file by which a comparison folder is known.
const TABLE: &str = "table.json";

/// A comparison, with what is left of its runs.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// Name of its folder.
    pub name: String,
    /// `table.json`.
    pub table: Table,
    /// The runs of each row of the table, in its order.
    pub runs: Vec<Vec<Run>>,
}

impl Comparison {
    /// Videos of a run: the largest and the smallest gain.
    const VIDEOS: usize = 2;

    /// Reads the table, and the runs that are still there.
    ///
    /// # Errors
    /// As [`Subject::load`].
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join(TABLE);
        let hint = "make the comparison anew; finished runs are not made again";
        let missing = || Error::File { path: path.clone(), reason: "no such file".into(), hint };
        let table: Table = json(&path, hint)?.ok_or_else(missing)?;
        let of = |row: &crate::comparison::Row| {
            let present = row.run_folders(folder).into_iter().filter(|run| run.join(RECIPE).exists());
            present.enumerate().map(|(i, run)| Run::load(&run, if i == 0 { Self::VIDEOS } else { 0 })).collect()
        };
        let runs = table.rows.iter().map(of).collect::<Result<_>>()?;
        Ok(Self { name: folder_name(folder), table, runs })
    }
}

/// A run.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// Name of its folder.
    pub name: String,
    /// The folder.
    pub folder: PathBuf,
    /// The resolved recipe.
    pub recipe: String,
    /// Lines of metrics.jsonl.
    pub metrics: Vec<Value>,
    /// Lines of timings.jsonl.
    pub timings: Vec<Value>,
    /// Lines of eval.jsonl.
    pub evals: Vec<Value>,
    /// summary.json, once the run is over; one from before the run was extended does not count.
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
    value: Option<f64>,
}

/// The file by which a run folder is known.
const RECIPE: &str = "recipe.toml";

impl Run {
    /// Reads what is there, and of the videos `most`, of largest and smallest gain; only the recipe has to be there.
    ///
    /// # Errors
    /// A folder without `recipe.toml`; a file that cannot be read or is not what it should be.
    pub fn load(folder: &Path, most: usize) -> Result<Self> {
        let recipe = folder.join(RECIPE);
        let hint = "give a folder that `flash-grpo train` or `flash-grpo compare` wrote";
        let recipe = std::fs::read_to_string(&recipe).map_err(|e| Error::File { path: recipe.clone(), reason: e.to_string(), hint })?;
        let metrics = lines(&folder.join("metrics.jsonl"))?;
        let summary: Option<Value> = json(&folder.join("summary.json"), ANEW)?;
        let of_now = |summary: &Value| summary.get("iterations").is_none_or(|made| made.as_u64() == Some(metrics.len() as u64));
        Ok(Self {
            name: folder_name(folder),
            folder: folder.to_owned(),
            recipe,
            summary: summary.filter(of_now),
            metrics,
            timings: lines(&folder.join("timings.jsonl"))?,
            evals: lines(&folder.join("eval.jsonl"))?,
            videos: videos(folder, most)?,
        })
    }

    /// A number of its summary.
    pub fn result(&self, key: &str) -> Option<f64> {
        self.summary.as_ref()?.get(key)?.as_f64()
    }

    /// The 95 % interval of its gain in held-out reward.
    pub fn interval(&self) -> Option<[f64; 2]> {
        let bounds = self.summary.as_ref()?.get("eval_reward_interval")?;
        Some([bounds.get(0)?.as_f64()?, bounds.get(1)?.as_f64()?])
    }

    /// Changes of the videos that no reward asked for.
    pub fn alarms(&self) -> Vec<&str> {
        let alarms = self.summary.as_ref().and_then(|summary| summary.get("alarms")).and_then(Value::as_array);
        alarms.into_iter().flatten().filter_map(Value::as_str).collect()
    }
}

fn folder_name(folder: &Path) -> String {
    let name = folder.canonicalize().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    name.unwrap_or_else(|| folder.display().to_string())
}

/// A file that may be absent.
fn text(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::File { path: path.into(), reason: error.to_string(), hint: "check its permissions" }),
    }
}

/// What to do about a broken file of a run.
const ANEW: &str = "delete it, and resume the run to write it anew";

fn json<T: for<'a> Deserialize<'a>>(path: &Path, hint: &'static str) -> Result<Option<T>> {
    let Some(text) = text(path)? else { return Ok(None) };
    let broken = |e: serde_json::Error| Error::File { path: path.into(), reason: e.to_string(), hint };
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

/// A pair whose files have not been read.
#[derive(Default)]
struct Unread {
    prompt: String,
    paths: [Option<PathBuf>; 2],
    rewards: [Option<f64>; 2],
}

fn videos(folder: &Path, most: usize) -> Result<Vec<VideoPair>> {
    let before: Option<Evaluation> = json(&folder.join("evaluation-before.json"), ANEW)?;
    let after: Option<Evaluation> = json(&folder.join("evaluation-after.json"), ANEW)?;
    let mut pairs: BTreeMap<usize, Unread> = BTreeMap::new();
    for (side, evaluation) in [before, after].into_iter().enumerate() {
        for sample in evaluation.into_iter().flat_map(|evaluation| evaluation.samples) {
            // names come from our own JSON, but a file is a file: nothing outside of the folder
            let Some(name) = sample.video.as_ref().and_then(|video| Path::new(video).file_name()) else { continue };
            let path = folder.join("samples").join(name);
            if !path.is_file() {
                continue;
            }
            let pair = pairs.entry(sample.prompt).or_default();
            pair.prompt = sample.text;
            pair.rewards[side] = sample.reward.value;
            pair.paths[side] = Some(path);
        }
    }
    let gain = |pair: &Unread| pair.rewards[1].zip(pair.rewards[0]).map_or(0.0, |(after, before)| after - before);
    let mut pairs: Vec<Unread> = pairs.into_values().filter(|pair| pair.paths[0].is_some()).collect();
    pairs.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
    if pairs.len() > most {
        pairs.drain(most.div_ceil(2)..pairs.len() - most / 2);
    }
    Ok(pairs.into_iter().filter_map(read).collect())
}

/// A video that cannot be read is left out: the page is about the run all the same.
fn read(pair: Unread) -> Option<VideoPair> {
    let [before, after] = pair.paths.map(|path| std::fs::read(path?).ok());
    Some(VideoPair { prompt: pair.prompt, before: before?, after, rewards: pair.rewards })
}
