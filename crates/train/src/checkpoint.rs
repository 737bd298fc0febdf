//! Everything that decides the future of a run, in one folder per checkpoint.
//!
//! **A checkpoint folder that exists is complete**: it is written under another name, every file and the folder synced, and then
//! renamed. The manifest holds a checksum of every other file, and a file beside it that of the manifest, so that later damage is found too.

use crate::checks::CheckReport;
use crate::error::{Error, Result};
use crate::events::{Event, Watch};
use crate::fault;
use crate::inputs::{Inputs, hex};
use crate::trainer::Trainer;
use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Error as IoError;
use std::path::{Path, PathBuf};
use wan::weights::{WeightFiles, to_floats, write_atomically, write_safetensors};

const MANIFEST: &str = "manifest.json";
/// Checksum of the manifest.
const MANIFEST_SUM: &str = "manifest.sha256";
const STATE: &str = "training_state.safetensors";
/// The name of a checkpoint while it is written.
const WRITING: &str = ".writing";
/// How the names begin of those that are not met again.
const DAMAGED_NAME: &str = "damaged";
const ABANDONED_NAME: &str = "abandoned";
/// Version of the layout.
const FORMAT: u32 = 1;
const WRITABLE: &str = "check free space and permissions of the folder";
const DAMAGED: &str = "delete the folder, or restore it from a copy; `--resume auto` uses the newest checkpoint that is whole";

/// `manifest.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the layout.
    pub format: u32,
    /// Version of the program.
    pub version: String,
    /// Iterations made: the next one has this index.
    pub iterations: u64,
    /// Optimizer updates made.
    pub updates: u64,
    /// How many of them had a gradient of each trained weight; empty if all had one of every weight.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counts: Vec<u64>,
    /// Averages taken.
    pub ema_updates: u64,
    /// Held-out reward after these iterations, if it was measured.
    pub eval_reward: Option<f64>,
    /// Length in bytes of each log of the run folder at this point.
    pub logs: BTreeMap<String, u64>,
    /// What the self-checks measured at the start of the run.
    pub checks: CheckReport,
    /// What computed, as `--device` names it. Manifests of before there was a choice have none.
    #[serde(default = "cpu")]
    pub device: String,
    /// The resolved recipe, TOML.
    pub recipe: String,
    /// Checksums of prompts, pictures and model. Manifests of before they were summed have none.
    #[serde(default)]
    pub inputs: Inputs,
    /// Every other file of the folder.
    pub files: BTreeMap<String, FileRecord>,
}

fn cpu() -> String {
    wan::device::Backend::Cpu.name().to_owned()
}

/// A file as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its length.
    pub bytes: u64,
    /// SHA-256, hexadecimal.
    pub sha256: String,
}

/// What a run knows at a checkpoint beside its trainer.
#[derive(Debug, Clone)]
pub struct Position {
    /// Iterations made.
    pub iterations: u64,
    /// Held-out reward at this point, if it was measured.
    pub eval_reward: Option<f64>,
    /// Length of each log.
    pub logs: BTreeMap<String, u64>,
    /// What the self-checks measured.
    pub checks: CheckReport,
}

/// A whole checkpoint on disk.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// What it says of itself.
    pub manifest: Manifest,
}

/// Writes `DIR/iteration-000040/` and removes what `keep_last` and `keep_best` do not keep.
///
/// # Errors
/// The folder cannot be written; nothing half-written is left under the final name.
pub fn save(trainer: &Trainer, position: &Position, dir: &Path) -> Result<()> {
    let wrap = |e: IoError| Error::run_folder(dir, e, WRITABLE);
    let (beside, target) = (dir.join(WRITING), dir.join(folder_name(position.iterations)));
    remove(&beside).map_err(wrap)?;
    std::fs::create_dir_all(&beside).map_err(wrap)?;
    trainer.policy.save(&beside)?;
    write_safetensors(&beside.join(STATE), &state(trainer), None)?;
    fault::point("checkpoint-files");
    let files = file_records(&beside).map_err(wrap)?;
    let manifest = Manifest {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").into(),
        iterations: position.iterations,
        updates: trainer.optimizer.updates,
        counts: if trainer.optimizer.counts.iter().all(|count| *count == trainer.optimizer.updates) {
            Vec::new()
        } else {
            trainer.optimizer.counts.clone()
        },
        ema_updates: trainer.ema.as_ref().map_or(0, |ema| ema.updates),
        eval_reward: position.eval_reward,
        logs: position.logs.clone(),
        checks: position.checks.clone(),
        device: wan::device::name_of(&trainer.device),
        recipe: trainer.settings.to_toml(),
        inputs: trainer.inputs.clone(),
        files,
    };
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| Error::run_folder(dir, e, WRITABLE))?;
    let text = format!("{text}\n");
    write_atomically(&beside.join(MANIFEST), text.as_bytes())?;
    write_atomically(&beside.join(MANIFEST_SUM), format!("{}\n", hex(Sha256::digest(&text))).as_bytes())?;
    sync(&beside).map_err(wrap)?;
    fault::point("checkpoint-manifest");
    replace(&beside, &target).map_err(wrap)?;
    sync(dir).map_err(wrap)?;
    fault::point("checkpoint-renamed");
    prune(dir, &trainer.settings.checkpoint).map_err(wrap)
}

/// The newest whole checkpoint of `dir`; newer ones, which are damaged, are reported, and renamed so that they are not met again. Nothing is
/// renamed where none is whole: that may be the disk's fault.
///
/// # Errors
/// The folder cannot be read, or holds checkpoints of which none is whole.
pub fn newest(dir: &Path, watch: &mut Watch<'_>) -> Result<Option<Checkpoint>> {
    restore_replaced(dir).map_err(|e| Error::run_folder(dir, e, WRITABLE))?;
    let Newest { whole, damaged } = look(dir)?;
    if whole.is_none() {
        return damaged.into_iter().next().map_or(Ok(None), |(_, error)| Err(error));
    }
    for (path, error) in damaged {
        watch(Event::Warning(&format!("{error}")));
        set_aside(&path, DAMAGED_NAME)?;
    }
    Ok(whole)
}

/// The newest whole checkpoint of another run's `dir`, where nothing is changed.
///
/// # Errors
/// The folder cannot be read, or has no whole checkpoint.
pub fn newest_of_other(dir: &Path) -> Result<Checkpoint> {
    let Newest { whole, damaged } = look(dir)?;
    let missing = || Error::run_folder(dir, "it holds no checkpoint", "name a run that has one, or start anew without `--resume`");
    whole.ok_or_else(|| damaged.into_iter().next().map_or_else(missing, |(_, error)| error))
}

struct Newest {
    whole: Option<Checkpoint>,
    /// Those that are newer, with what is wrong with them.
    damaged: Vec<(PathBuf, Error)>,
}

fn look(dir: &Path) -> Result<Newest> {
    let mut damaged = Vec::new();
    for path in folders(dir).map_err(|e| Error::run_folder(dir, e, WRITABLE))?.into_iter().rev() {
        match Checkpoint::open(&path) {
            Ok(checkpoint) => return Ok(Newest { whole: Some(checkpoint), damaged }),
            Err(error) => damaged.push((path, error)),
        }
    }
    Ok(Newest { whole: None, damaged })
}

/// Whether `dir` holds checkpoints that were set aside.
pub fn has_set_aside(dir: &Path) -> bool {
    let aside = |name: &str| [DAMAGED_NAME, ABANDONED_NAME].iter().any(|why| name.starts_with(why));
    std::fs::read_dir(dir).into_iter().flatten().flatten().any(|entry| aside(&entry.file_name().to_string_lossy()))
}

/// Makes a checkpoint of `dir` its newest: others of as many iterations or more are of another future, and get out of the way once `keep` has put
/// what belongs to them into their folders.
///
/// # Errors
/// The folder cannot be written.
pub fn make_newest(checkpoint: Checkpoint, dir: &Path, keep: impl Fn(&Path) -> Result<()>, watch: &mut Watch<'_>) -> Result<Checkpoint> {
    let (own, present) = (folder_name(checkpoint.manifest.iterations), checkpoint.path.file_name());
    let is_other = |path: &PathBuf| path.file_name().is_some_and(|name| *name.to_string_lossy() >= *own && Some(name) != present);
    for path in folders(dir).map_err(|e| Error::run_folder(dir, e, WRITABLE))?.into_iter().filter(is_other) {
        keep(&path)?;
        let aside = set_aside(&path, ABANDONED_NAME)?;
        watch(Event::Note(&format!("`{}` is not before what is resumed, and is now `{}`", path.display(), aside.display())));
    }
    let path = dir.join(own);
    if path.file_name() != present {
        std::fs::rename(&checkpoint.path, &path).map_err(|e| Error::run_folder(dir, e, WRITABLE))?;
    }
    Ok(Checkpoint { path, ..checkpoint })
}

/// Copies a checkpoint of another run into `dir`.
///
/// # Errors
/// The folder cannot be written; a file that was changed meanwhile.
pub fn copy(checkpoint: &Checkpoint, dir: &Path) -> Result<Checkpoint> {
    let wrap = |e: IoError| Error::run_folder(dir, e, WRITABLE);
    let (beside, target) = (dir.join(WRITING), dir.join(folder_name(checkpoint.manifest.iterations)));
    remove(&beside).map_err(wrap)?;
    for name in checkpoint.manifest.files.keys().map(String::as_str).chain([MANIFEST, MANIFEST_SUM]) {
        let to = beside.join(name);
        std::fs::create_dir_all(to.parent().unwrap_or(&beside)).map_err(wrap)?;
        std::fs::copy(checkpoint.path.join(name), &to).and_then(|_| File::open(&to)?.sync_all()).map_err(wrap)?;
    }
    Checkpoint::open(&beside)?;
    replace(&beside, &target).map_err(wrap)?;
    sync(dir).map_err(wrap)?;
    Ok(Checkpoint { path: target, ..checkpoint.clone() })
}

/// Gives a checkpoint a name under which it is not met again.
fn set_aside(path: &Path, why: &str) -> Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let numbered =
        |number: usize| path.with_file_name(if number == 1 { format!("{why}-{name}") } else { format!("{why}-{name}-{number}") });
    let aside = (1..).map(numbered).find(|aside| !aside.exists()).unwrap_or_default();
    std::fs::rename(path, &aside).map_err(|e| Error::run_folder(path, e, WRITABLE))?;
    Ok(aside)
}

impl Checkpoint {
    /// Reads the manifest and compares every file with its checksum.
    ///
    /// # Errors
    /// A file that is missing or was changed.
    pub fn open(path: &Path) -> Result<Self> {
        let damaged = |reason: String| Error::Checkpoint { path: path.into(), reason, hint: DAMAGED };
        let text = std::fs::read_to_string(path.join(MANIFEST)).map_err(|e| damaged(format!("`{MANIFEST}`: {e}")))?;
        let sum = std::fs::read_to_string(path.join(MANIFEST_SUM)).map_err(|e| damaged(format!("`{MANIFEST_SUM}`: {e}")))?;
        if sum.trim_end() != hex(Sha256::digest(&text)) {
            return Err(damaged(format!("`{MANIFEST}` does not have the checksum that `{MANIFEST_SUM}` holds")));
        }
        let manifest: Manifest = serde_json::from_str(&text).map_err(|e| damaged(format!("`{MANIFEST}`: {e}")))?;
        if manifest.format != FORMAT {
            return Err(damaged(format!("`{MANIFEST}`: layout {} is not layout {FORMAT} of this version", manifest.format)));
        }
        for (name, expected) in &manifest.files {
            let found = record(&path.join(name)).map_err(|e| damaged(format!("`{name}`: {e}")))?;
            if found != *expected {
                let what = if found.bytes == expected.bytes { "content" } else { "length" };
                return Err(damaged(format!("`{name}`: its {what} is not what was written")));
            }
        }
        Ok(Self { path: path.into(), manifest })
    }

    /// Puts weights, optimizer and average into a trainer of the same recipe.
    ///
    /// # Errors
    /// A tensor that is missing, or does not fit the trainer's.
    pub fn restore(&self, trainer: &mut Trainer) -> Result<()> {
        let file = self.path.join(STATE);
        let files = WeightFiles::open_file(&file)?;
        let slots: Vec<_> = trainer.policy.params().iter().cloned().collect();
        for (i, (slot, (_, own_name))) in slots.iter().zip(trainer.policy.names()).enumerate() {
            let read = |kind: &str| -> Result<Tensor<1>> {
                let name = format!("{kind}.{own_name}");
                if files.shape(&name).as_ref() != Some(&slot.shape) {
                    let reason = format!("`{STATE}`: `{name}` has shape {:?}, the recipe needs {:?}", files.shape(&name), slot.shape);
                    return Err(Error::Checkpoint { path: self.path.clone(), reason, hint: "resume with the recipe of the run" });
                }
                let values = files.floats(&name)?;
                let count = values.len();
                Ok(Tensor::from_data(TensorData::new(values, [count]), &trainer.device))
            };
            slot.set_value(read("weight")?);
            trainer.optimizer.moments[i] = [read("first_moment")?, read("second_moment")?];
            if let Some(ema) = &mut trainer.ema {
                ema.values[i] = read("ema")?;
            }
        }
        trainer.optimizer.updates = self.manifest.updates;
        trainer.optimizer.counts = match &self.manifest.counts {
            counts if counts.is_empty() => vec![self.manifest.updates; slots.len()],
            counts if counts.len() == slots.len() => counts.clone(),
            counts => {
                let reason = format!("`{MANIFEST}`: `counts` has {} entries, the recipe trains {} weights", counts.len(), slots.len());
                return Err(Error::Checkpoint { path: self.path.clone(), reason, hint: "resume with the recipe of the run" });
            }
        };
        if let Some(ema) = &mut trainer.ema {
            ema.updates = self.manifest.ema_updates;
        }
        Ok(())
    }
}

fn folder_name(iterations: u64) -> String {
    format!("iteration-{iterations:06}")
}

fn state(trainer: &Trainer) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut tensors = BTreeMap::new();
    for (i, (slot, (_, name))) in trainer.policy.params().iter().zip(trainer.policy.names()).enumerate() {
        let mut add = |kind: &str, value| tensors.insert(format!("{kind}.{name}"), (slot.shape.clone(), to_floats(value)));
        let [m, v] = trainer.optimizer.moments[i].clone();
        add("weight", slot.value());
        add("first_moment", m);
        add("second_moment", v);
        if let Some(ema) = &trainer.ema {
            add("ema", ema.values[i].clone());
        }
    }
    tensors
}

/// Every file below `dir`, by its path within it.
fn file_records(dir: &Path) -> std::io::Result<BTreeMap<String, FileRecord>> {
    let mut records = BTreeMap::new();
    let mut pending = vec![dir.to_path_buf()];
    while let Some(folder) = pending.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                pending.push(path);
            } else if let Ok(name) = path.strip_prefix(dir) {
                records.insert(name.to_string_lossy().replace('\\', "/"), record(&path)?);
            }
        }
    }
    Ok(records)
}

fn record(path: &Path) -> std::io::Result<FileRecord> {
    let mut hasher = Sha256::new();
    let bytes = std::io::copy(&mut File::open(path)?, &mut hasher)?;
    Ok(FileRecord { bytes, sha256: hex(hasher.finalize()) })
}

/// The checkpoints of `dir`, oldest first.
fn folders(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let named = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("iteration-"));
    let mut all: Vec<PathBuf> = std::fs::read_dir(dir)?.filter_map(|entry| entry.ok().map(|e| e.path())).filter(named).collect();
    all.sort();
    Ok(all)
}

/// Removes all but the newest `keep_last` and the `keep_best` of highest held-out reward.
fn prune(dir: &Path, settings: &crate::settings::CheckpointSettings) -> std::io::Result<()> {
    let all = folders(dir)?;
    let surplus = &all[..all.len().saturating_sub(settings.keep_last.max(1))];
    let mut rated: Vec<(f64, &PathBuf)> = all.iter().filter_map(|path| Some((eval_reward(path)?, path))).collect();
    rated.sort_by(|a, b| b.0.total_cmp(&a.0));
    let best: Vec<&PathBuf> = rated.into_iter().take(settings.keep_best).map(|(_, path)| path).collect();
    surplus.iter().filter(|path| !best.contains(path)).try_for_each(std::fs::remove_dir_all)
}

fn eval_reward(path: &Path) -> Option<f64> {
    let manifest: Manifest = serde_json::from_str(&std::fs::read_to_string(path.join(MANIFEST)).ok()?).ok()?;
    manifest.eval_reward
}

/// How the name of a checkpoint begins while another takes its place.
const REPLACED: &str = ".replaced-";

/// Renames `new` to `target`. At no moment is neither the old nor the new one whole on disk.
fn replace(new: &Path, target: &Path) -> std::io::Result<()> {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let old = target.with_file_name(format!("{REPLACED}{name}"));
    remove(&old)?;
    if target.exists() {
        std::fs::rename(target, &old)?;
        fault::point("checkpoint-replaced");
    }
    std::fs::rename(new, target)?;
    remove(&old)
}

/// Ends what a killed process left of [`replace`].
fn restore_replaced(dir: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir).into_iter().flatten() {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_prefix(REPLACED)) else { continue };
        let target = dir.join(name);
        if target.exists() { remove(&path)? } else { std::fs::rename(&path, target)? }
    }
    Ok(())
}

fn remove(path: &Path) -> std::io::Result<()> {
    if path.exists() { std::fs::remove_dir_all(path) } else { Ok(()) }
}

fn sync(dir: &Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}
