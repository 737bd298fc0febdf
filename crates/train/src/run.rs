//! A whole run: checks, evaluation before, iterations, evaluation after, and the run folder with the evidence.

use crate::checkpoint;
use crate::checks::{CheckReport, self_check};
use crate::error::{Error, Result};
use crate::evaluate::{Comparison, Evaluated, compare, evaluate};
use crate::events::{Event, Watch};
use crate::iteration::{IterationMetrics, iteration};
use crate::settings::Settings;
use crate::trainer::Trainer;
use burn::tensor::Device;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;
use wan::weights::write_atomically;

/// `summary.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Version of the program.
    pub version: &'static str,
    /// Method of the recipe.
    pub method: String,
    /// Seed of the run.
    pub seed: u64,
    /// Iterations made.
    pub iterations: u64,
    /// Optimizer updates made.
    pub updates: u64,
    /// Base against policy on held-out prompts.
    #[serde(flatten)]
    pub comparison: Comparison,
    /// What the self-checks measured.
    pub checks: CheckReport,
    /// Seconds by phase.
    pub seconds: BTreeMap<String, f64>,
    /// The adapter's folder (or `transformer/` of a full-parameter run), in the run folder.
    pub adapter: &'static str,
}

/// Frames per second of written videos.
const FPS: f64 = 8.0;

/// Trains as `settings` say and fills the run folder.
///
/// # Errors
/// Anything wrong with recipe, model, prompts or folder, before the first iteration; a sample that cannot be scored.
pub fn run(settings: Settings, device: &Device, watch: &mut Watch<'_>) -> Result<Summary> {
    settings.check_files()?;
    let folder = RunFolder::claim(&settings.output_dir)?;
    let mut seconds = Seconds::default();
    let mut trainer = seconds.time("load", || Trainer::new(settings, device))?;
    watch(Event::Note(&describe(&trainer)));
    let checks = seconds.time("checks", || self_check(&trainer, watch))?;
    watch(Event::Note(&describe_checks(&checks)));
    folder.begin(&trainer.settings)?;
    let before = seconds.time("evaluation", || evaluate(&trainer, "evaluation before", watch))?;
    folder.videos(&before, "before", &trainer)?;
    let iterations = trainer.settings.train.iterations as u64;
    for index in 0..iterations {
        let metrics = seconds.time("training", || iteration(&mut trainer, index, watch))?;
        folder.log(&metrics)?;
        watch(Event::Iteration(&metrics));
        folder.save_progress(&trainer, index, watch)?;
    }
    let exported = trainer.exported_weights();
    trainer.policy.params().restore(&exported);
    let after = seconds.time("evaluation", || evaluate(&trainer, "evaluation after", watch))?;
    folder.videos(&after, "after", &trainer)?;
    trainer.policy.save(&folder.path.join(ADAPTER))?;
    let eval = &trainer.settings.eval;
    let summary = Summary {
        version: env!("CARGO_PKG_VERSION"),
        method: trainer.settings.method.name.clone(),
        seed: trainer.settings.seed,
        iterations,
        updates: trainer.optimizer.updates,
        comparison: compare(&before, &after, eval.bootstrap, eval.seed),
        checks,
        seconds: seconds.0,
        adapter: ADAPTER,
    };
    folder.json("summary.json", &summary)?;
    Ok(summary)
}

/// Where what was trained lies in the run folder.
const ADAPTER: &str = "adapter";

fn describe(trainer: &Trainer) -> String {
    let params = trainer.policy.params();
    let kind = trainer
        .policy
        .lora
        .as_ref()
        .map_or("all weights".to_owned(), |lora| format!("LoRA of rank {} on {} layers", lora.config.rank, params.len() / 2));
    format!("{}: {kind}, {} parameters trained", trainer.settings.method.name, params.num_elements())
}

fn describe_checks(checks: &CheckReport) -> String {
    format!(
        "checks passed: ratio deviation {:e}, log-prob noise floor {:.1e}, noise power {:.3}, reward spread within groups {:.3}",
        checks.ratio_deviation, checks.log_prob_noise_floor, checks.noise_power, checks.reward_group_std
    )
}

/// The folder of one run.
#[derive(Debug)]
struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// Makes sure that the folder is empty and can be written to; leaves nothing in it, so that a run that stops at its checks can
    /// be started again.
    fn claim(path: &Path) -> Result<Self> {
        let path = path.to_path_buf();
        let occupied = std::fs::read_dir(&path).map(|mut entries| entries.next().is_some()).unwrap_or(false);
        if occupied {
            return Err(Error::run_folder(&path, "it already holds files", "give another folder with `--output-dir`, or delete it"));
        }
        let probe = path.join(".probe");
        let written = std::fs::create_dir_all(&path).and_then(|()| std::fs::write(&probe, "")).and_then(|()| std::fs::remove_file(&probe));
        written.map_err(|e| Error::run_folder(&path, e, WRITABLE))?;
        Ok(Self { path })
    }

    /// Puts the resolved recipe into the folder.
    fn begin(&self, settings: &Settings) -> Result<()> {
        let samples = self.path.join("samples");
        std::fs::create_dir_all(&samples).map_err(|e| Error::run_folder(&self.path, e, WRITABLE))?;
        Ok(write_atomically(&self.path.join("recipe.toml"), settings.to_toml().as_bytes())?)
    }

    /// Appends a line to metrics.jsonl.
    fn log(&self, metrics: &IterationMetrics) -> Result<()> {
        let line = serde_json::to_string(metrics).map_err(|e| Error::run_folder(&self.path, e, WRITABLE))?;
        let file = File::options().create(true).append(true).open(self.path.join("metrics.jsonl"));
        file.and_then(|mut file| writeln!(file, "{line}")).map_err(|e| Error::run_folder(&self.path, e, WRITABLE))
    }

    /// The checkpoint and the evaluation that are due after iteration `index`.
    fn save_progress(&self, trainer: &Trainer, index: u64, watch: &mut Watch<'_>) -> Result<()> {
        let (done, settings) = (index + 1, &trainer.settings);
        let last = done == settings.train.iterations as u64;
        let due = |every: usize| every > 0 && done.is_multiple_of(every as u64);
        if due(settings.checkpoint.every) || last {
            checkpoint::save(trainer, done, &self.path.join("checkpoints"))?;
        }
        if due(settings.eval.every) && !last {
            let evaluated = trainer.policy.with_weights(&trainer.exported_weights(), || evaluate(trainer, "evaluation", watch))?;
            let mean = crate::iteration::mean(evaluated.iter().map(|e| e.reward.value));
            self.append_eval(done, mean)?;
        }
        Ok(())
    }

    fn append_eval(&self, iteration: u64, mean: f64) -> Result<()> {
        let line = serde_json::json!({ "iteration": iteration, "eval_reward": mean });
        let file = File::options().create(true).append(true).open(self.path.join("eval.jsonl"));
        file.and_then(|mut file| writeln!(file, "{line}")).map_err(|e| Error::run_folder(&self.path, e, WRITABLE))
    }

    /// Videos of the first prompts, and one sheet of them.
    fn videos(&self, evaluated: &[Evaluated], when: &str, trainer: &Trainer) -> Result<()> {
        let mut shown = Vec::new();
        for sample in evaluated {
            let Some(frames) = &sample.frames else { continue };
            let name = file_name(&trainer.eval_prompts.texts[sample.prompt]);
            video::write(self.path.join(format!("samples/{:02}-{name}-{when}.mp4", sample.prompt)), frames, FPS)?;
            shown.push(frames);
        }
        if !shown.is_empty() {
            video::write_png_grid(self.path.join(format!("samples/{when}.png")), &shown, 1)?;
        }
        Ok(())
    }

    fn json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(value).map_err(|e| Error::run_folder(&self.path, e, WRITABLE))?;
        Ok(write_atomically(&self.path.join(name), format!("{text}\n").as_bytes())?)
    }
}

const WRITABLE: &str = "check free space and permissions of the folder";

/// A prompt as part of a file name.
fn file_name(prompt: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    prompt.chars().take(40).map(plain).collect()
}

/// Adds up time by phase.
#[derive(Debug, Default)]
struct Seconds(BTreeMap<String, f64>);

impl Seconds {
    fn time<T>(&mut self, phase: &str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        *self.0.entry(phase.to_owned()).or_insert(0.0) += start.elapsed().as_secs_f64();
        result
    }
}
