//! `flash-grpo train`: aligns a model as a recipe says.

use super::report::{PAGE, write_report};
use crate::device::DeviceArg;
use crate::signals;
use crate::watch::Bars;
use anyhow::{Result, bail};
use clap::Args;
use grpo::Recipe;
use serde_json::Value;
use std::path::{Path, PathBuf};
use train::run::{Begin, Summary, run};
use train::run_folder::{RECIPE, run_of};
use train::settings::Settings;
use train::stop::Stop;

/// Arguments of `train`.
#[derive(Debug, Args)]
pub struct TrainArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Where the run is written [default: the recipe's].
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Seed of the run [default: the recipe's].
    #[arg(long)]
    seed: Option<u64>,
    /// Continue a run from its newest whole checkpoint, or from the given run folder or checkpoint. `auto` is the run in the output folder;
    /// with RECIPE it is begun there if there is none. Without RECIPE the run's own is used. With another `--output-dir`, the run goes on there
    /// from a copy.
    #[arg(long, value_name = "auto|PATH", num_args = 0..=1, default_missing_value = "auto")]
    resume: Option<PathBuf>,
    /// Resume with a recipe that changes the result.
    #[arg(long, requires = "resume")]
    allow_change: bool,
    #[command(flatten)]
    device: DeviceArg,
}

/// A recipe and what is changed of it.
#[derive(Debug, Args)]
pub struct RecipeArgs {
    /// The recipe, a TOML file [default: the embedded moving-shapes run].
    #[arg(value_name = "RECIPE")]
    recipe: Option<PathBuf>,
    /// Change a value of the recipe, for instance `--set train.iterations=100`. May be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

impl RecipeArgs {
    /// The resolved settings.
    ///
    /// # Errors
    /// A recipe that cannot be read or used.
    pub fn load(&self) -> Result<Settings> {
        load(self.recipe.as_deref(), &self.overrides)
    }

    /// As [`load`](Self::load), with the recipe at `path` in place of the embedded one.
    fn load_or(&self, path: &Path) -> Result<Settings> {
        load(self.recipe.as_deref().or(Some(path)), &self.overrides)
    }
}

/// The resolved settings of a recipe, after a note about what its name might hide.
///
/// # Errors
/// As [`Settings::load`].
pub fn load(recipe: Option<&Path>, overrides: &[String]) -> Result<Settings> {
    let settings = Settings::load(recipe, overrides)?;
    if let Some(note) = choices_that_stay(recipe, overrides, &settings) {
        eprintln!("{note}");
    }
    Ok(settings)
}

/// `--set method.name=X` changes the base alone: the choices that the recipe makes for its own method stay, and the run is called X without
/// being X.
fn choices_that_stay(recipe: Option<&Path>, overrides: &[String], settings: &Settings) -> Option<String> {
    let name = &settings.method.name;
    let key = |change: &String| change.split_once('=').map(|(key, _)| key.trim().to_owned());
    let set: Vec<String> = overrides.iter().filter_map(key).collect();
    let renamed = set.iter().any(|key| key == "method.name");
    if !renamed || Settings::load(recipe, &[]).is_ok_and(|own| own.method.name == *name) {
        return None;
    }
    let published = serde_json::to_value(Recipe::named(name)?).ok()?;
    let resolved = serde_json::to_value(settings.recipe()).ok()?;
    let is_set = |choice: &str| set.iter().filter_map(|key| key.strip_prefix("method.")).any(|key| key.split('.').next() == Some(choice));
    let stays = |choice: &&String| resolved.get(choice) != published.get(choice) && !is_set(choice);
    let choices: Vec<&String> = resolved.as_object()?.keys().filter(stays).collect();
    if choices.is_empty() {
        return None;
    }
    let value = |of: &Value, choice: &String| of.get(choice).map_or_else(|| "none".into(), in_line);
    let kept: Vec<String> = choices.iter().map(|choice| format!("{choice} = {}", value(&resolved, choice))).collect();
    let named = choices.iter().filter(|&&choice| published.get(choice).is_some());
    let changes: Vec<String> = named.map(|choice| format!("--set 'method.{choice}={}'", value(&published, choice))).collect();
    Some(format!(
        "note: `method.name` is now `{name}`, but where the recipe chooses otherwise that stays: {}\nhint: for `{name}` as it is published, delete them in the recipe, or {}",
        kept.join(", "),
        changes.join(" ")
    ))
}

/// A value as a recipe would have it in one line.
fn in_line(value: &Value) -> String {
    match value {
        Value::Object(table) => {
            let entries: Vec<String> = table.iter().map(|(key, value)| format!("{key}={}", in_line(value))).collect();
            format!("{{{}}}", entries.join(", "))
        }
        value => value.to_string(),
    }
}

/// Runs the command.
///
/// # Errors
/// Bad input, before any training starts; a folder that cannot be written.
pub fn run_command(args: &TrainArgs) -> Result<()> {
    let (mut settings, begin) = beginning(args)?;
    settings.seed = args.seed.unwrap_or(settings.seed);
    let (dir, base) = (settings.output_dir.clone(), settings.model.path.clone());
    let device = args.device.open()?;
    let stop = Stop::default();
    signals::listen(&stop)?;
    let mut bars = Bars::default();
    let summary = run(settings, &begin, &stop, &device, &mut |event| bars.show(event))?;
    write_report(&dir, &dir.join(PAGE))?;
    print(&summary, &dir, &base);
    Ok(())
}

/// The recipe, and where the run starts.
fn beginning(args: &TrainArgs) -> Result<(Settings, Begin)> {
    let output_dir = |settings: Settings| {
        let output_dir = args.output_dir.clone().unwrap_or_else(|| settings.output_dir.clone());
        Settings { output_dir, ..settings }
    };
    let Some(resume) = &args.resume else {
        return Ok((output_dir(args.recipe.load()?), Begin::New));
    };
    let (folder, from) =
        if resume.as_os_str() == "auto" { (folder_of_auto(args)?, None) } else { (located(resume)?, Some(resume.clone())) };
    let settings = args.recipe.load_or(&folder.join(RECIPE))?;
    let settings = Settings { output_dir: args.output_dir.clone().unwrap_or(folder), ..settings };
    Ok((settings, Begin::Resume { from, allow_change: args.allow_change }))
}

/// The folder of the run that `--resume auto` is about. Only a recipe that is named is begun anew: the embedded one would be another run than
/// the one that was to go on.
fn folder_of_auto(args: &TrainArgs) -> Result<PathBuf> {
    match (&args.output_dir, &args.recipe.recipe) {
        (Some(folder), Some(_)) => Ok(folder.clone()),
        (None, Some(recipe)) => Ok(Settings::load(Some(recipe), &args.recipe.overrides)?.output_dir),
        (Some(folder), None) if folder.join(RECIPE).is_file() => Ok(folder.clone()),
        (Some(folder), None) => bail!(
            "`--resume`: no run was begun in `{}`\nhint: give its recipe, `flash-grpo train RECIPE --output-dir {0} --resume auto`, which also begins it",
            folder.display()
        ),
        (None, None) => bail!(
            "`--resume` does not say which run\nhint: give its folder, `flash-grpo train --resume runs/mine`, or its recipe, `flash-grpo train RECIPE --resume auto`"
        ),
    }
}

/// The run folder that a path names, itself or by a checkpoint.
fn located(path: &Path) -> Result<PathBuf> {
    match run_of(path) {
        Some(run) => Ok(run),
        None => bail!(
            "`--resume` is `{}`, which is neither a run folder nor a checkpoint in one\nhint: give the folder with `recipe.toml`, or one of its `checkpoints/iteration-NNNNNN`",
            path.display()
        ),
    }
}

fn print(summary: &Summary, dir: &std::path::Path, base: &std::path::Path) {
    let c = &summary.comparison;
    println!();
    println!("held-out reward  {:.3} -> {:.3}   difference {}", c.eval_reward_before, c.eval_reward_after, c.gain(3));
    for (name, [before, after]) in &c.components {
        println!("  {name:<16} {before:.3} -> {after:.3}");
    }
    for alarm in &c.alarms {
        println!("look at the videos: {alarm}");
    }
    let training = summary.seconds.get("training").copied().unwrap_or_default();
    println!("{} iterations, {} updates, {training:.0} s of training", summary.iterations, summary.updates);
    println!("videos before and after: {}", dir.join("samples").display());
    println!("everything on one page: {}", dir.join(PAGE).display());
    let (base, trained) = (base.display(), dir.join(summary.adapter));
    let second = trained.join(wan::experts::SECOND);
    println!("\nload it in Python:\n");
    if trained.join("transformer").is_dir() {
        println!("  from diffusers import WanPipeline, WanTransformer3DModel");
        println!("  transformer = WanTransformer3DModel.from_pretrained(\"{}\")", trained.join("transformer").display());
        if second.is_dir() {
            println!("  second = WanTransformer3DModel.from_pretrained(\"{}\")", second.display());
            println!("  pipe = WanPipeline.from_pretrained(\"{base}\", transformer=transformer, transformer_2=second)");
            return;
        }
        println!("  pipe = WanPipeline.from_pretrained(\"{base}\", transformer=transformer)");
    } else {
        println!("  from diffusers import WanPipeline");
        println!("  pipe = WanPipeline.from_pretrained(\"{base}\")");
        println!("  pipe.load_lora_weights(\"{}\")", trained.display());
        if second.is_dir() {
            println!("  pipe.load_lora_weights(\"{}\", load_into_transformer_2=True)", second.display());
        }
    }
}
