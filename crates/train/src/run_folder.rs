//! The folder of one run: its lock, logs, videos and results.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::evaluate::Evaluation;
use crate::events::{Event, Watch};
use crate::fault;
use crate::iteration::IterationMetrics;
use crate::settings::Settings;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use video::Frames;
use wan::weights::{UNFINISHED, write_atomically};

/// Logs that grow by a line per iteration, and are cut back to the checkpoint when a run is resumed.
const METRICS: &str = "metrics.jsonl";
const EVALS: &str = "eval.jsonl";
const TIMINGS: &str = "timings.jsonl";
const LOGS: [&str; 3] = [METRICS, EVALS, TIMINGS];

/// The resolved recipe.
pub const RECIPE: &str = "recipe.toml";
/// What came of the run.
pub const SUMMARY: &str = "summary.json";
/// The base's evaluation.
pub const BEFORE: &str = "evaluation-before.json";
/// The policy's.
pub const AFTER: &str = "evaluation-after.json";
/// What `--resume` goes on from.
pub const CHECKPOINTS: &str = "checkpoints";
/// The videos of evaluations.
const SAMPLES: &str = "samples";
/// How the names of the base's videos end.
pub const WHEN_BEFORE: &str = "before";
/// Those of the policy's.
pub const WHEN_AFTER: &str = "after";

const LOCK: &str = ".lock";
const WRITABLE: &str = "check free space and permissions of the folder";

/// An open run folder. No other process can open it meanwhile.
#[derive(Debug)]
pub struct RunFolder {
    /// Where it is.
    pub path: PathBuf,
    _lock: File,
}

impl RunFolder {
    /// Opens the folder of a new run, which must be empty, or (`resume`) of an earlier one. Writes nothing but a lock, so that a run
    /// that stops at its checks can be started again.
    ///
    /// # Errors
    /// A folder that is in use, that cannot be written, or (for a new run) that holds anything.
    pub fn open(path: &Path, resume: bool) -> Result<Self> {
        let wrap = |e: std::io::Error| Error::run_folder(path, e, WRITABLE);
        if path.is_file() {
            return Err(Error::run_folder(path, "it is a file", "a run needs a folder of its own: give another name with `--output-dir`"));
        }
        std::fs::create_dir_all(path).map_err(wrap)?;
        let lock = File::options().create(true).append(true).open(path.join(LOCK)).map_err(wrap)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let hint = "wait for it, or give another folder with `--output-dir`";
                return Err(Error::run_folder(path, "another process is writing to it", hint));
            }
            // a file system without locks
            Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(wrap(error)),
        }
        let occupied = std::fs::read_dir(path).map_err(wrap)?.flatten().any(|entry| entry.file_name() != LOCK);
        if occupied && !resume {
            let hint = "continue that run with `--resume FOLDER`, give another folder with `--output-dir`, or delete it";
            return Err(Error::run_folder(path, "it already holds files", hint));
        }
        for folder in ["", "adapter", "adapter/transformer", "adapter/transformer_2", SAMPLES] {
            remove_unfinished(&path.join(folder)).map_err(wrap)?;
        }
        Ok(Self { path: path.into(), _lock: lock })
    }

    /// The folder of the checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join(CHECKPOINTS)
    }

    /// Whether the folder holds what `--resume` asks for.
    pub fn is_begun(&self) -> bool {
        self.path.join(RECIPE).is_file()
    }

    /// Whether its run came to an end.
    pub fn is_finished(&self) -> bool {
        self.path.join(SUMMARY).is_file()
    }

    /// Puts the resolved recipe into the folder and makes the logs those of the checkpoint that is resumed: of its own, if it keeps any, and as long
    /// as they were.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn begin(&self, settings: &Settings, resumed: Option<&Checkpoint>, watch: &mut Watch<'_>) -> Result<()> {
        let wrap = |e| self.wrap(e);
        std::fs::create_dir_all(self.path.join(SAMPLES)).map_err(wrap)?;
        let kept = resumed.map_or_else(Vec::new, |checkpoint| logs_in(&checkpoint.path));
        copy(&kept, &self.path).map_err(wrap)?;
        for path in logs_in(&self.path) {
            let length = resumed.and_then(|checkpoint| checkpoint.manifest.logs.get(path.file_name()?.to_str()?));
            if !cut(&path, length.copied().unwrap_or(0)).map_err(wrap)? {
                watch(Event::Warning(&format!("`{}` is shorter than at the checkpoint: lines of before are missing", path.display())));
            }
        }
        write_atomically(&self.path.join(RECIPE), settings.to_toml().as_bytes())?;
        kept.into_iter().try_for_each(std::fs::remove_file).map_err(wrap)
    }

    /// Copies the logs into a checkpoint that gets out of the way of another future: they are its past.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn keep_logs(&self, checkpoint: &Path) -> Result<()> {
        copy(&logs_in(&self.path), checkpoint).map_err(|e| self.wrap(e))
    }

    /// Copies what the run in `other` has beside one of its checkpoints: the logs, and the evaluation of the base with its videos.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn copy_from(&self, other: &Path, checkpoint: &Path) -> Result<()> {
        let samples = self.path.join(SAMPLES);
        std::fs::create_dir_all(&samples).map_err(|e| self.wrap(e))?;
        let is_of_base = |path: &PathBuf| path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with(WHEN_BEFORE));
        let all = std::fs::read_dir(other.join(SAMPLES)).into_iter().flatten().flatten().map(|entry| entry.path());
        let of_base: Vec<PathBuf> = all.filter(is_of_base).collect();
        let evaluation: Vec<PathBuf> = Some(other.join(BEFORE)).into_iter().filter(|path| path.is_file()).collect();
        let parts = [(logs_in(other), &self.path), (logs_in(checkpoint), &self.path), (of_base, &samples), (evaluation, &self.path)];
        parts.iter().try_for_each(|(files, to)| copy(files, to)).map_err(|e| self.wrap(e))
    }

    /// Removes results that are not those of the run any more.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn remove(&self, names: &[&str]) -> Result<()> {
        let mut present = names.iter().map(|name| self.path.join(name)).filter(|path| path.exists());
        present.try_for_each(std::fs::remove_file).map_err(|e| self.wrap(e))
    }

    /// Length of every log; what they hold is on disk when this returns.
    ///
    /// # Errors
    /// A log that cannot be synced.
    pub fn log_lengths(&self) -> Result<BTreeMap<String, u64>> {
        let mut lengths = BTreeMap::new();
        for name in LOGS {
            let path = self.path.join(name);
            if path.exists() {
                let length = File::open(&path).and_then(|file| file.sync_all().and_then(|()| file.metadata())).map(|data| data.len());
                lengths.insert(name.to_owned(), length.map_err(|e| self.wrap(e))?);
            }
        }
        Ok(lengths)
    }

    /// Appends an iteration: what was computed, and (elsewhere, since no two runs agree on it) the time it took.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn log(&self, metrics: &IterationMetrics) -> Result<()> {
        self.append(METRICS, metrics)?;
        fault::point("metrics");
        self.append(TIMINGS, &json!({ "iteration": metrics.iteration, "seconds": metrics.seconds }))
    }

    /// Appends an evaluation during training, of which `num_missing` samples had no reward.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn log_eval(&self, iterations: u64, eval_reward: f64, num_missing: usize) -> Result<()> {
        let mut line = json!({ "iteration": iterations, "eval_reward": eval_reward });
        if num_missing > 0 {
            line["num_missing"] = num_missing.into();
        }
        self.append(EVALS, &line)
    }

    fn append(&self, name: &str, line: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(line).map_err(|e| self.wrap(e))?;
        let file = File::options().create(true).append(true).open(self.path.join(name));
        file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())).map_err(|e| self.wrap(e))
    }

    /// Writes videos of a few prompts that play at `fps`, and one sheet of them; the samples get to know their files, which take the place of the
    /// frames.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn videos(&self, evaluation: &mut Evaluation, when: &str, fps: f64) -> Result<()> {
        let mut shown = Vec::new();
        for sample in &mut evaluation.samples {
            let Some(frames) = sample.frames.take() else { continue };
            let name = format!("{:02}-{}-{when}.mp4", sample.prompt, file_name(&sample.text));
            video::write(self.path.join(SAMPLES).join(&name), &frames, fps)?;
            sample.video = Some(name);
            shown.push(frames);
        }
        if !shown.is_empty() {
            let shown: Vec<&Frames> = shown.iter().collect();
            video::write_png_grid(self.path.join(SAMPLES).join(format!("{when}.png")), &shown, 1)?;
        }
        Ok(())
    }

    /// Writes a result.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(value).map_err(|e| self.wrap(e))?;
        Ok(write_atomically(&self.path.join(name), format!("{text}\n").as_bytes())?)
    }

    /// Reads a result that an earlier process wrote; `None` if there is none, or not a whole one.
    pub fn read_json<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        serde_json::from_str(&std::fs::read_to_string(self.path.join(name)).ok()?).ok()
    }

    fn wrap(&self, reason: impl ToString) -> Error {
        Error::run_folder(&self.path, reason, WRITABLE)
    }
}

/// The run folder that a path names: itself, or that of a checkpoint.
pub fn run_of(path: &Path) -> Option<PathBuf> {
    let is_run = |folder: &PathBuf| folder.join(RECIPE).is_file();
    let of_checkpoint = || path.canonicalize().ok()?.parent()?.parent().map(Path::to_path_buf);
    Some(path.to_path_buf()).filter(is_run).or_else(|| of_checkpoint().filter(is_run))
}

/// The logs that lie in a folder.
fn logs_in(folder: &Path) -> Vec<PathBuf> {
    LOGS.iter().map(|name| folder.join(name)).filter(|path| path.is_file()).collect()
}

/// Copies files into a folder, under their names.
fn copy(files: &[PathBuf], folder: &Path) -> std::io::Result<()> {
    files.iter().try_for_each(|file| std::fs::copy(file, folder.join(file.file_name().unwrap_or_default())).map(|_| ()))
}

/// Shortens a file to `length`; whether it was that long.
fn cut(path: &Path, length: u64) -> std::io::Result<bool> {
    let file = File::options().write(true).open(path)?;
    let found = file.metadata()?.len();
    file.set_len(length.min(found))?;
    file.sync_all()?;
    Ok(length <= found)
}

/// Files that a killed process was writing beside their final names.
fn remove_unfinished(folder: &Path) -> std::io::Result<()> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    let unfinished = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(UNFINISHED)) && path.is_file();
    entries.flatten().map(|entry| entry.path()).filter(unfinished).try_for_each(std::fs::remove_file)
}

/// A prompt as part of a file name.
fn file_name(prompt: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    prompt.chars().take(40).map(plain).collect()
}
