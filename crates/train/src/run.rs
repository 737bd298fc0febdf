//! A whole run: checks, evaluation before, iterations, evaluation after, and the run folder with the evidence.
//!
//! **A run that is stopped at any moment and resumed ends as if it had never been stopped**: same weights, same metrics, same videos,
//! byte for byte (on the same device, with the same number of threads).

use crate::checkpoint::{self, Checkpoint, Position};
use crate::checks::{CheckReport, self_check};
use crate::error::{Error, Result};
use crate::evaluate::{Comparison, Evaluation, compare, conditions, evaluate};
use crate::events::{Event, Watch};
use crate::inputs;
use crate::iteration::iteration;
use crate::run_folder::{AFTER, BEFORE, CHECKPOINTS, RECIPE, RunFolder, SUMMARY, WHEN_AFTER, WHEN_BEFORE, run_of};
use crate::settings::Settings;
use crate::stop::Stop;
use crate::trainer::Trainer;
use crate::watchdog::Watchdog;
use burn::tensor::{DType, Device};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

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
    /// Seconds by phase; of a resumed run, since it was resumed.
    pub seconds: BTreeMap<String, f64>,
    /// The adapter's folder (or `transformer/` of a full-parameter run), in the run folder.
    pub adapter: &'static str,
}

/// Where what was trained lies in the run folder.
const ADAPTER: &str = "adapter";

/// How a run begins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Begin {
    /// Anew, in an empty folder.
    #[default]
    New,
    /// From a checkpoint of the run folder; anew if it has none.
    Resume {
        /// This one, or the newest whole one of this run folder; else of the run's own. One of another run is copied into the folder, which has to
        /// be empty.
        from: Option<PathBuf>,
        /// Whether the recipe may differ from the checkpoint's in ways that change the result.
        allow_change: bool,
    },
}

impl Begin {
    /// Whether the checkpoint is one of another run than that in `folder`.
    fn is_elsewhere(&self, folder: &Path) -> bool {
        let Self::Resume { from: Some(from), .. } = self else { return false };
        let own = folder.canonicalize();
        !run_of(from).is_some_and(|run| run.canonicalize().is_ok_and(|run| own.is_ok_and(|own| own == run)))
    }
}

/// Trains as `settings` say and fills the run folder.
///
/// # Errors
/// Anything wrong with recipe, model, prompts or folder, before the first iteration; [`Error::Interrupted`] when `stop` asked.
pub fn run(settings: Settings, begin: &Begin, stop: &Stop, device: &Device, watch: &mut Watch<'_>) -> Result<Summary> {
    settings.check_files()?;
    let is_elsewhere = begin.is_elsewhere(&settings.output_dir);
    let folder = RunFolder::open(&settings.output_dir, *begin != Begin::New && !is_elsewhere)?;
    let resumed = checkpoint_of(begin, &folder, &settings, watch)?;
    let mut seconds = Seconds::default();
    let mut trainer = seconds.time("load", || Trainer::with_stop(settings, stop.clone(), device))?;
    watch(Event::Note(&describe(&trainer)));
    if let Some(checkpoint) = &resumed {
        check_inputs(begin, checkpoint, &trainer, watch)?;
    }
    let checks = match &resumed {
        Some(checkpoint) => checkpoint.manifest.checks.clone(),
        None => seconds.time("checks", || self_check(&trainer, watch)).map_err(|error| interrupted(error, &folder, 0))?,
    };
    watch(Event::Note(&describe_checks(&checks)));
    let resumed = match resumed {
        Some(checkpoint) if is_elsewhere => Some(copy_of(&checkpoint, &folder)?),
        Some(checkpoint) => Some(go_on_from(checkpoint, &folder, &trainer.settings, watch)?),
        None => None,
    };
    folder.begin(&trainer.settings, resumed.as_ref(), watch)?;
    let first = resumed.as_ref().map_or(0, |checkpoint| checkpoint.manifest.iterations);
    let before = seconds.time("evaluation", || evaluation_before(&trainer, &folder, resumed.is_some(), watch));
    let before = before.map_err(|error| interrupted(error, &folder, first))?;
    if let Some(checkpoint) = &resumed {
        checkpoint.restore(&mut trainer)?;
        note_device(&checkpoint.manifest.device, &trainer, watch);
        watch(Event::Note(&format!("resumed after {first} iterations from `{}`", checkpoint.path.display())));
    }
    let evaluated = resumed.as_ref().and_then(|checkpoint| Some((first, checkpoint.manifest.eval_reward?)));
    let mut progress = Progress { folder: &folder, base: &before, checks: &checks, saved: first, evaluated };
    seconds.time("training", || progress.train(&mut trainer, first, watch))?;
    let after = seconds.time("evaluation", || evaluation_after(&trainer, &folder, watch))?;
    trainer.policy.save(&folder.path.join(ADAPTER))?;
    let eval = &trainer.settings.eval;
    let summary = Summary {
        version: env!("CARGO_PKG_VERSION"),
        method: trainer.settings.method.name.clone(),
        seed: trainer.settings.seed,
        iterations: first.max(trainer.settings.train.iterations as u64),
        updates: trainer.optimizer.updates,
        comparison: compare(&before, &after, eval.bootstrap, eval.seed),
        checks,
        seconds: seconds.0,
        adapter: ADAPTER,
    };
    folder.write_json(SUMMARY, &summary)?;
    Ok(summary)
}

/// The checkpoint to continue from, if there is one and the recipe fits it.
fn checkpoint_of(begin: &Begin, folder: &RunFolder, settings: &Settings, watch: &mut Watch<'_>) -> Result<Option<Checkpoint>> {
    let Begin::Resume { from, allow_change } = begin else { return Ok(None) };
    let checkpoint = match from {
        Some(path) if !path.join(RECIPE).is_file() => Some(Checkpoint::open(path)?),
        Some(run) if begin.is_elsewhere(&folder.path) => Some(checkpoint::newest_of_other(&run.join(CHECKPOINTS))?),
        _ => checkpoint::newest(&folder.checkpoints(), watch)?,
    };
    let Some(checkpoint) = checkpoint else {
        if folder.is_finished() || checkpoint::has_set_aside(&folder.checkpoints()) {
            return Err(Error::run_folder(&folder.path, "its run has none of its checkpoints any more", NO_CHECKPOINT));
        }
        watch(Event::Note("no checkpoint to resume from: the run starts anew"));
        return Ok(None);
    };
    let recipe = Settings::parse("the checkpoint's recipe", &checkpoint.manifest.recipe, &[])?;
    let changes = settings.changes_since(&recipe);
    for change in &changes {
        watch(Event::Note(&format!("changed since the checkpoint: {change}")));
    }
    if !allow_change && changes.iter().any(|change| !change.is_harmless()) {
        let changes = changes.iter().filter(|change| !change.is_harmless()).map(|change| format!("\n  {change}")).collect();
        return Err(Error::ChangedRecipe { path: checkpoint.path, changes });
    }
    Ok(Some(checkpoint))
}

const NO_CHECKPOINT: &str = "a run is not begun over what it made: give another folder with `--output-dir`, or delete this one";

/// Whether prompts, pictures and model are those that the checkpoint was made with.
fn check_inputs(begin: &Begin, checkpoint: &Checkpoint, trainer: &Trainer, watch: &mut Watch<'_>) -> Result<()> {
    let changed = inputs::changed(&checkpoint.manifest.inputs, &trainer.inputs);
    let lines = changed.iter().map(|key| format!("{key}: other content than at the checkpoint"));
    match begin {
        Begin::Resume { allow_change: false, .. } if !changed.is_empty() => {
            let changes = lines.map(|line| format!("\n  {line}")).collect();
            Err(Error::ChangedRecipe { path: checkpoint.path.clone(), changes })
        }
        _ => {
            lines.for_each(|line| watch(Event::Note(&line)));
            Ok(())
        }
    }
}

/// What lies in the folder from beyond the checkpoint is out of the way: later checkpoints, and the result of a run that is now longer.
fn go_on_from(checkpoint: Checkpoint, folder: &RunFolder, settings: &Settings, watch: &mut Watch<'_>) -> Result<Checkpoint> {
    let checkpoint = checkpoint::make_newest(checkpoint, &folder.checkpoints(), |other| folder.keep_logs(other), watch)?;
    if checkpoint.manifest.iterations < settings.train.iterations as u64 {
        folder.remove(&[SUMMARY, AFTER])?;
    }
    Ok(checkpoint)
}

/// The checkpoint of another run as one of this folder, with what that run had made until then.
fn copy_of(checkpoint: &Checkpoint, folder: &RunFolder) -> Result<Checkpoint> {
    if let Some(other) = checkpoint.path.canonicalize().ok().as_deref().and_then(Path::parent).and_then(Path::parent) {
        folder.copy_from(other, &checkpoint.path)?;
    }
    checkpoint::copy(checkpoint, &folder.checkpoints())
}

/// Another device rounds differently: the run goes on, but not to the same last bit.
fn note_device(before: &str, trainer: &Trainer, watch: &mut Watch<'_>) {
    let now = wan::device::name_of(&trainer.device);
    if before != now {
        watch(Event::Warning(&format!(
            "the checkpoint was made on `{before}`, the run goes on on `{now}`: it will not be equal to the last bit to a run that stayed on one device"
        )));
    }
}

/// The base on the held-out prompts: measured once per run, and again if a resumed one measures otherwise.
fn evaluation_before(trainer: &Trainer, folder: &RunFolder, resumed: bool, watch: &mut Watch<'_>) -> Result<Evaluation> {
    let known: Option<Evaluation> = if resumed { folder.read_json(BEFORE) } else { None };
    match known {
        Some(known) if known.conditions == conditions(trainer) => return Ok(known),
        Some(_) => watch(Event::Note("the evaluation is another one than before: the base is evaluated again")),
        None => {}
    }
    let mut before = evaluate(trainer, "evaluation before", watch)?;
    folder.videos(&mut before, WHEN_BEFORE, trainer.settings.sampling.fps)?;
    folder.write_json(BEFORE, &before)?;
    Ok(before)
}

/// The averaged weights on the held-out prompts; they stay in the policy.
fn evaluation_after(trainer: &Trainer, folder: &RunFolder, watch: &mut Watch<'_>) -> Result<Evaluation> {
    let exported = trainer.exported_weights();
    trainer.policy.params().restore(&exported);
    let iterations = trainer.settings.train.iterations as u64;
    let mut after = evaluate(trainer, "evaluation after", watch).map_err(|error| interrupted(error, folder, iterations))?;
    folder.videos(&mut after, WHEN_AFTER, trainer.settings.sampling.fps)?;
    folder.write_json(AFTER, &after)?;
    Ok(after)
}

fn interrupted(error: Error, folder: &RunFolder, iterations: u64) -> Error {
    match error {
        Error::Stopped { signal } if folder.is_begun() => {
            Error::Interrupted { signal, iterations, hint: format!("continue with `flash-grpo train --resume {}`", folder.path.display()) }
        }
        Error::Stopped { signal } => {
            Error::Interrupted { signal, iterations, hint: "nothing was begun: give the same command again".into() }
        }
        other => other,
    }
}

/// The iterations of a run, and what is saved between them.
struct Progress<'a> {
    folder: &'a RunFolder,
    base: &'a Evaluation,
    checks: &'a CheckReport,
    /// Iterations in the newest checkpoint; 0 if there is none.
    saved: u64,
    /// The newest evaluation: after how many iterations, and its mean reward.
    evaluated: Option<(u64, f64)>,
}

impl Progress<'_> {
    fn train(&mut self, trainer: &mut Trainer, first: u64, watch: &mut Watch<'_>) -> Result<()> {
        let iterations = trainer.settings.train.iterations as u64;
        let mut done = first;
        let mut watchdog = Watchdog::default();
        let mut result = self.evaluate_if_due(trainer, done, watch);
        while result.is_ok() && done < iterations {
            result = trainer.stop.check().and_then(|()| iteration(trainer, done, watch)).and_then(|metrics| {
                self.folder.log(&metrics)?;
                watch(Event::Iteration(&metrics));
                for warning in watchdog.look(&metrics, trainer.settings.train.clip_range) {
                    watch(Event::Warning(&warning));
                }
                done += 1;
                // first, for an evaluation may take hours and can fail
                self.save_if_due(trainer, done)?;
                self.evaluate_if_due(trainer, done, watch)
            });
        }
        match result {
            // the disk: what was computed may not be in the logs
            Err(Error::RunFolder { .. } | Error::Wan(_) | Error::Recording { .. }) | Ok(()) => {}
            // an iteration or an evaluation that failed has changed nothing
            Err(_) => {
                if let Err(error) = self.save(trainer, done) {
                    watch(Event::Warning(&format!("no checkpoint of these {done} iterations could be written: {error}")));
                }
            }
        }
        result.map_err(|error| interrupted(error, self.folder, done))
    }

    /// The evaluation that is due after `done` iterations, unless the checkpoint has it.
    fn evaluate_if_due(&mut self, trainer: &Trainer, done: u64, watch: &mut Watch<'_>) -> Result<()> {
        let (every, last) = (trainer.settings.eval.every as u64, trainer.settings.train.iterations as u64);
        let due = every > 0 && done > 0 && done < last && done.is_multiple_of(every);
        if !due || self.evaluated.is_some_and(|(at, _)| at == done) {
            return Ok(());
        }
        let evaluated = trainer.policy.with_weights(&trainer.exported_weights(), || evaluate(trainer, "evaluation", watch))?;
        let reward = evaluated.reward_beside(self.base);
        self.folder.log_eval(done, reward, evaluated.num_missing)?;
        self.evaluated = Some((done, reward));
        // a checkpoint of before does not know
        if self.saved == done { self.write(trainer, done) } else { Ok(()) }
    }

    fn save_if_due(&mut self, trainer: &Trainer, done: u64) -> Result<()> {
        let (every, last) = (trainer.settings.checkpoint.every as u64, trainer.settings.train.iterations as u64);
        let due = every > 0 && done.is_multiple_of(every);
        if due || done == last { self.save(trainer, done) } else { Ok(()) }
    }

    fn save(&mut self, trainer: &Trainer, iterations: u64) -> Result<()> {
        if iterations == self.saved { Ok(()) } else { self.write(trainer, iterations) }
    }

    fn write(&mut self, trainer: &Trainer, iterations: u64) -> Result<()> {
        let eval_reward = self.evaluated.filter(|(at, _)| *at == iterations).map(|(_, reward)| reward);
        let logs = self.folder.log_lengths()?;
        let position = Position { iterations, eval_reward, logs, checks: self.checks.clone() };
        checkpoint::save(trainer, &position, &self.folder.checkpoints())?;
        self.saved = iterations;
        Ok(())
    }
}

fn describe(trainer: &Trainer) -> String {
    let params = trainer.policy.params();
    let kind = trainer
        .policy
        .lora
        .as_ref()
        .map_or("all weights".to_owned(), |lora| format!("LoRA of rank {} on {} layers", lora.config.rank, params.len() / 2));
    let precision = if trainer.policy.transformer.dtype() == DType::BF16 { ", frozen weights and activations in bf16" } else { "" };
    let networks = if trainer.policy.second.is_some() { steps_by_network(trainer) } else { String::new() };
    format!("{}: {kind}, {} parameters trained{precision}{networks}", trainer.settings.method.name, params.num_elements())
}

/// Which of the steps that may be trained go through which network: a network without any stays as it is.
fn steps_by_network(trainer: &Trainer) -> String {
    let schedule = &trainer.objective.schedule;
    let pool = trainer.recipe.stochastic.pool(schedule.num_steps());
    let of = |network: usize| {
        let steps = pool.iter().filter(|&&step| trainer.policy.network(schedule.timestep(step)) == network);
        let steps: Vec<String> = steps.map(ToString::to_string).collect();
        if steps.is_empty() { "none: it stays as it is".to_owned() } else { steps.join(", ") }
    };
    format!("; steps of `transformer`: {}; of `transformer_2`: {}", of(0), of(1))
}

fn describe_checks(checks: &CheckReport) -> String {
    let rounding = checks.bf16_log_prob_deviation.map(|deviation| format!(" ({deviation:.1e} from activations in f32)"));
    format!(
        "checks passed: ratio deviation {:e}, log-prob noise floor {:.1e}{}, noise power {:.3}",
        checks.ratio_deviation,
        checks.log_prob_noise_floor,
        rounding.unwrap_or_default(),
        checks.noise_power
    )
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
