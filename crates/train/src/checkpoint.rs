//! What decides the future of a run, in one folder per checkpoint: written beside, synced, renamed.

use crate::error::{Error, Result};
use crate::trainer::Trainer;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use wan::weights::{to_floats, write_atomically, write_safetensors};

const HINT: &str = "check free space and permissions of the folder";

/// Writes `DIR/iteration-000040/` with weights, optimizer and average, and removes all but the newest `keep_last`.
///
/// # Errors
/// The folder cannot be written; nothing half-written is left under the final name.
pub fn save(trainer: &Trainer, iterations: u64, dir: &Path) -> Result<()> {
    let wrap = |e: std::io::Error| Error::run_folder(dir, e, HINT);
    let (beside, target) = (dir.join(".writing"), dir.join(format!("iteration-{iterations:06}")));
    if beside.exists() {
        std::fs::remove_dir_all(&beside).map_err(wrap)?;
    }
    std::fs::create_dir_all(&beside).map_err(wrap)?;
    trainer.policy.save(&beside)?;
    write_safetensors(&beside.join("training_state.safetensors"), &state(trainer), None)?;
    let manifest = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "iterations": iterations,
        "updates": trainer.optimizer.updates,
        "ema_updates": trainer.ema.as_ref().map_or(0, |ema| ema.updates),
        "recipe": trainer.settings.to_toml(),
    });
    write_atomically(&beside.join("manifest.json"), format!("{manifest:#}\n").as_bytes())?;
    if target.exists() {
        std::fs::remove_dir_all(&target).map_err(wrap)?;
    }
    std::fs::rename(&beside, &target).map_err(wrap)?;
    std::fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(wrap)?;
    prune(dir, trainer.settings.checkpoint.keep_last).map_err(wrap)
}

fn state(trainer: &Trainer) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut tensors = BTreeMap::new();
    for (i, slot) in trainer.policy.params().iter().enumerate() {
        let mut add = |kind: &str, value| tensors.insert(format!("{kind}.{}", slot.name), (slot.shape.clone(), to_floats(value)));
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

fn prune(dir: &Path, keep_last: usize) -> std::io::Result<()> {
    let named = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("iteration-"));
    let mut all: Vec<PathBuf> = std::fs::read_dir(dir)?.filter_map(|entry| entry.ok().map(|e| e.path())).filter(named).collect();
    all.sort();
    let surplus = all.len().saturating_sub(keep_last.max(1));
    all.iter().take(surplus).try_for_each(std::fs::remove_dir_all)
}
