//! `flash-grpo eval`: the pinned evaluation of a model, or of an adapter against its base.

use super::train::RecipeArgs;
use crate::device::DeviceArg;
use crate::watch::Bars;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use train::evaluate::{Evaluation, compare, evaluate};
use train::trainer::Trainer;

/// Arguments of `eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Adapter to compare with the base on the same noise.
    #[arg(long, value_name = "PATH")]
    lora: Option<PathBuf>,
    /// Adapter of the second transformer, in a model with two [default: the folder `transformer_2` in that of `--lora`, if there is one].
    #[arg(long, value_name = "PATH", requires = "lora")]
    lora_2: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// Bad input.
pub fn run_command(args: &EvalArgs) -> Result<()> {
    let settings = args.recipe.load()?;
    let device = args.device.open()?;
    let trainer = Trainer::new(settings, &device)?;
    // the fresh adapter changes nothing, but an adapter given is to be the only one
    let experts = trainer.policy.experts();
    experts.detach();
    let adapters = args.lora.as_ref().map(|path| experts.read_adapters(path, args.lora_2.as_deref())).transpose()?;
    let mut bars = Bars::default();
    let before = evaluate(&trainer, "base", &mut |event| bars.show(event))?;
    let Some(adapters) = adapters else {
        return print_one(&before, args.json);
    };
    experts.attach(adapters, &device)?;
    let after = evaluate(&trainer, "adapter", &mut |event| bars.show(event))?;
    let eval = &trainer.settings.eval;
    let comparison = compare(&before, &after, eval.bootstrap, eval.seed);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&comparison)?);
        return Ok(());
    }
    let (b, a) = (comparison.eval_reward_before, comparison.eval_reward_after);
    println!("base {b:.4}   adapter {a:.4}   difference {}", comparison.gain(4));
    for (name, [before, after]) in &comparison.components {
        println!("  {name:<16} {before:.3} -> {after:.3}");
    }
    for alarm in &comparison.alarms {
        println!("look at the videos: {alarm}");
    }
    Ok(())
}

fn print_one(evaluated: &Evaluation, json: bool) -> Result<()> {
    let comparison = compare(evaluated, evaluated, 1, 0);
    let components: serde_json::Map<String, serde_json::Value> =
        comparison.components.iter().map(|(name, [value, _])| (name.clone(), (*value).into())).collect();
    if json {
        let report = serde_json::json!({
            "eval_reward": comparison.eval_reward_before,
            "components": components,
            "guards": evaluated.guards,
            "num_prompts": comparison.num_prompts,
            "num_samples": comparison.num_samples,
        });
        println!("{report:#}");
        return Ok(());
    }
    println!("reward {:.4} over {} samples of {} prompts", comparison.eval_reward_before, comparison.num_samples, comparison.num_prompts);
    for (name, [value, _]) in &comparison.components {
        println!("  {name:<16} {value:.3}");
    }
    Ok(())
}
