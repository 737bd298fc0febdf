//! `flash-grpo train`: aligns a model as a recipe says.

use crate::watch::Bars;
use anyhow::Result;
use burn::tensor::Device;
use clap::Args;
use std::path::PathBuf;
use train::run::{Summary, run};
use train::settings::Settings;

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
}

/// A recipe and what is changed of it.
#[derive(Debug, Args)]
pub struct RecipeArgs {
    /// The recipe, a TOML file [default: the embedded moving-shapes run].
    #[arg(value_name = "RECIPE")]
    recipe: Option<PathBuf>,
    /// Change a value of the recipe, for instance `--set train.iterations=100`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

impl RecipeArgs {
    /// The resolved settings.
    ///
    /// # Errors
    /// A recipe that cannot be read or used.
    pub fn load(&self) -> Result<Settings> {
        Ok(Settings::load(self.recipe.as_deref(), &self.overrides)?)
    }
}

/// Runs the command.
///
/// # Errors
/// Bad input, before any training starts; a folder that cannot be written.
pub fn run_command(args: &TrainArgs) -> Result<()> {
    let mut settings = args.recipe.load()?;
    if let Some(dir) = &args.output_dir {
        settings.output_dir.clone_from(dir);
    }
    settings.seed = args.seed.unwrap_or(settings.seed);
    let (dir, base) = (settings.output_dir.clone(), settings.model.path.clone());
    let mut bars = Bars::default();
    let summary = run(settings, &Device::flex(), &mut |event| bars.show(event))?;
    print(&summary, &dir, &base);
    Ok(())
}

fn print(summary: &Summary, dir: &std::path::Path, base: &std::path::Path) {
    let c = &summary.comparison;
    let [low, high] = c.eval_reward_interval;
    println!();
    println!(
        "held-out reward  {:.3} -> {:.3}   difference {:+.3}, 95 % interval [{low:+.3}, {high:+.3}]",
        c.eval_reward_before, c.eval_reward_after, c.eval_reward_difference
    );
    for (name, [before, after]) in &c.components {
        println!("  {name:<16} {before:.3} -> {after:.3}");
    }
    let training = summary.seconds.get("training").copied().unwrap_or_default();
    println!("{} iterations, {} updates, {training:.0} s of training", summary.iterations, summary.updates);
    println!("videos before and after: {}", dir.join("samples").display());
    let (base, trained) = (base.display(), dir.join(summary.adapter));
    println!("\nload it in Python:\n");
    if trained.join("transformer").is_dir() {
        println!("  from diffusers import WanPipeline, WanTransformer3DModel");
        println!("  transformer = WanTransformer3DModel.from_pretrained(\"{}\")", trained.join("transformer").display());
        println!("  pipe = WanPipeline.from_pretrained(\"{base}\", transformer=transformer)");
    } else {
        println!("  from diffusers import WanPipeline");
        println!("  pipe = WanPipeline.from_pretrained(\"{base}\")");
        println!("  pipe.load_lora_weights(\"{}\")", trained.display());
    }
}
