//! `flash-grpo inspect`: the resolved recipe, its step table, and what is trained. Needs no weights.

use super::train::RecipeArgs;
use anyhow::Result;
use clap::Args;
use serde_json::json;
use train::plan::{Networks, Trained};
use train::settings::{PolicySettings, Settings, StepRow};
use wan::experts::{Boundary, SECOND};

/// Arguments of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// A recipe that cannot be read or used; a video that its model cannot make; an entry of `target_modules` that matches no layer.
pub fn run_command(args: &InspectArgs) -> Result<()> {
    let settings = args.recipe.load()?;
    let networks = Networks::of(&settings)?;
    if let Some(networks) = &networks {
        settings.check_networks(networks.boundary)?;
        settings.check_size(&networks.transformer, &networks.vae)?;
    }
    let boundary = networks.as_ref().and_then(|networks| networks.boundary);
    let steps = settings.step_table()?;
    let trained = networks.as_ref().map(|networks| Trained::of(&settings, &networks.transformer, networks.count())).transpose()?;
    let description = description(&settings, boundary.is_some(), trained);
    if args.json {
        let mut report = json!({
            "recipe": settings,
            "steps": steps,
            "trained": {
                "description": description,
                "layers": trained.filter(|trained| !trained.full).map(|trained| trained.layers),
                "parameters": trained.map(|trained| trained.parameters),
            },
        });
        if let Some(boundary) = boundary {
            report["boundary_ratio"] = json!(boundary);
            report["networks"] = steps.iter().map(|row| network(boundary, row)).collect();
        }
        println!("{report:#}");
        return Ok(());
    }
    print!("{}", settings.to_toml());
    let title = if boundary.is_some() { "  network" } else { "" };
    println!("\nstep   sigma  sigma'  timestep  noise level    std  sensitivity  excess variance  loss weight{title}");
    for row in &steps {
        let sensitivity = row.sensitivity.map_or("-".into(), |value| format!("{value:.4}"));
        let network = boundary.map(|boundary| format!("  {}", network(boundary, row))).unwrap_or_default();
        println!(
            "{:>4}  {:.4}  {:.4}  {:>8.1}  {:>11.4}  {:.4}  {sensitivity:>11}  {:>15.6}  {:>11.4}{network}",
            row.step, row.sigma, row.sigma_next, row.timestep, row.noise_level, row.std, row.excess_variance, row.loss_weight
        );
    }
    println!("\ntrained: {description}");
    Ok(())
}

/// The network that takes a step.
fn network(boundary: Boundary, row: &StepRow) -> &'static str {
    ["transformer", SECOND][boundary.network(row.timestep)]
}

/// What the optimizer updates, in words.
fn description(settings: &Settings, two: bool, trained: Option<Trained>) -> String {
    let Some(Trained { layers, parameters, .. }) = trained else {
        return format!("unknown sizes, `{}` is not there", settings.model.path.join("transformer/config.json").display());
    };
    match &settings.policy {
        PolicySettings::Full => format!("all {parameters} parameters of {}", if two { "both transformers" } else { "the transformer" }),
        PolicySettings::Lora { rank, .. } => format!("LoRA of rank {rank} on {layers} linear layers, {parameters} parameters"),
    }
}
