//! `flash-grpo inspect`: the resolved recipe, its step table, and what is trained. Needs no weights.

use super::train::RecipeArgs;
use anyhow::Result;
use clap::Args;
use serde_json::json;
use train::plan::Networks;
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

/// What the optimizer updates.
struct Trained {
    description: String,
    layers: Option<usize>,
    parameters: Option<usize>,
}

/// Runs the command.
///
/// # Errors
/// A recipe that cannot be read or used; a video that its model cannot make.
pub fn run_command(args: &InspectArgs) -> Result<()> {
    let settings = args.recipe.load()?;
    let networks = Networks::of(&settings)?;
    if let Some(networks) = &networks {
        settings.check_networks(networks.boundary)?;
        settings.check_size(&networks.transformer, &networks.vae)?;
    }
    let boundary = networks.as_ref().and_then(|networks| networks.boundary);
    let (steps, trained) = (settings.step_table()?, trained(&settings, networks.as_ref()));
    if args.json {
        let mut report = json!({
            "recipe": settings,
            "steps": steps,
            "trained": { "description": trained.description, "layers": trained.layers, "parameters": trained.parameters },
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
    println!("\ntrained: {}", trained.description);
    Ok(())
}

/// The network that takes a step.
fn network(boundary: Boundary, row: &StepRow) -> &'static str {
    ["transformer", SECOND][boundary.network(row.timestep)]
}

fn trained(settings: &Settings, networks: Option<&Networks>) -> Trained {
    let Some(Networks { transformer: config, boundary, .. }) = networks else {
        let description = format!("unknown sizes, `{}` is not there", settings.model.path.join("transformer/config.json").display());
        return Trained { description, layers: None, parameters: None };
    };
    let (networks, of) = if boundary.is_some() { (2, "both transformers") } else { (1, "the transformer") };
    match &settings.policy {
        PolicySettings::Full => {
            let parameters = networks * config.num_parameters();
            Trained { description: format!("all {parameters} parameters of {of}"), layers: None, parameters: Some(parameters) }
        }
        PolicySettings::Lora { rank, target_modules, .. } => {
            let linears = config.linear_layers();
            let hit = |name: &str| target_modules.iter().any(|t| name == t || name.ends_with(&format!(".{t}")));
            let hits: Vec<_> = linears.iter().filter(|(name, ..)| hit(name)).collect();
            let parameters = networks * hits.iter().map(|(_, inputs, outputs)| rank * (inputs + outputs)).sum::<usize>();
            let layers = networks * hits.len();
            let description = format!("LoRA of rank {rank} on {layers} linear layers, {parameters} parameters");
            Trained { description, layers: Some(layers), parameters: Some(parameters) }
        }
    }
}
