//! `flash-grpo inspect`: the resolved recipe, its step table, and what is trained. Needs no weights.

use super::train::RecipeArgs;
use anyhow::Result;
use clap::Args;
use serde_json::json;
use train::settings::{PolicySettings, Settings};
use wan::transformer::TransformerConfig;

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
/// A recipe that cannot be read or used.
pub fn run_command(args: &InspectArgs) -> Result<()> {
    let settings = args.recipe.load()?;
    let (steps, trained) = (settings.step_table()?, trained(&settings));
    if args.json {
        let report = json!({
            "recipe": settings,
            "steps": steps,
            "trained": { "description": trained.description, "layers": trained.layers, "parameters": trained.parameters },
        });
        println!("{report:#}");
        return Ok(());
    }
    print!("{}", settings.to_toml());
    println!("\nstep   sigma  sigma'  timestep  noise level    std  sensitivity  excess variance  loss weight");
    for row in &steps {
        let sensitivity = row.sensitivity.map_or("-".into(), |value| format!("{value:.4}"));
        println!(
            "{:>4}  {:.4}  {:.4}  {:>8.1}  {:>11.4}  {:.4}  {sensitivity:>11}  {:>15.6}  {:>11.4}",
            row.step, row.sigma, row.sigma_next, row.timestep, row.noise_level, row.std, row.excess_variance, row.loss_weight
        );
    }
    println!("\ntrained: {}", trained.description);
    Ok(())
}

/// Counted from the model's config.json, or from the known sizes of a released model that is not there.
fn trained(settings: &Settings) -> Trained {
    let path = settings.model_folder().unwrap_or_else(|_| settings.model.path.clone()).join("transformer/config.json");
    let folder = settings.model.path.file_name().unwrap_or_default().to_string_lossy();
    let Some(config) = TransformerConfig::load(&path).ok().or_else(|| TransformerConfig::released(&folder)) else {
        let description = format!("unknown sizes, `{}` is not there", path.display());
        return Trained { description, layers: None, parameters: None };
    };
    match &settings.policy {
        PolicySettings::Full => {
            let parameters = config.num_parameters();
            Trained { description: format!("all {parameters} parameters of the transformer"), layers: None, parameters: Some(parameters) }
        }
        PolicySettings::Lora { rank, target_modules, .. } => {
            let linears = config.linear_layers();
            let hit = |name: &str| target_modules.iter().any(|t| name == t || name.ends_with(&format!(".{t}")));
            let hits: Vec<_> = linears.iter().filter(|(name, ..)| hit(name)).collect();
            let parameters = hits.iter().map(|(_, inputs, outputs)| rank * (inputs + outputs)).sum();
            let description = format!("LoRA of rank {rank} on {} linear layers, {parameters} parameters", hits.len());
            Trained { description, layers: Some(hits.len()), parameters: Some(parameters) }
        }
    }
}
