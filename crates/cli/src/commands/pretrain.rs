//! `flash-grpo pretrain`: trains the small model of a demo world from scratch.

use crate::device::DeviceArg;
use crate::progress;
use anyhow::Result;
use clap::Args;
use indicatif::ProgressBar;
use std::path::PathBuf;
use train::pretrain::{PretrainSettings, pretrain};

/// Arguments of `pretrain`.
#[derive(Debug, Args)]
pub struct PretrainArgs {
    /// The recipe: recipes/pretrain_moving_shapes.toml, recipes/pretrain_signs.toml, or one like them.
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    #[command(flatten)]
    device: DeviceArg,
}

/// Runs the command.
///
/// # Errors
/// A recipe that cannot be read; a folder that cannot be written.
pub fn run_command(args: &PretrainArgs) -> Result<()> {
    let settings = PretrainSettings::load(&args.recipe)?;
    let device = args.device.open()?;
    let mut bar: Option<(&'static str, ProgressBar)> = None;
    pretrain(&settings, &device, &mut |p| {
        if bar.as_ref().is_none_or(|(stage, _)| *stage != p.stage) {
            bar = Some((p.stage, progress::bar(p.stage, p.steps)));
        }
        if let Some((_, bar)) = &bar {
            bar.set_position(p.step as u64);
            if bar.is_hidden() && (p.step % 100 == 0 || p.step == p.steps) {
                eprintln!("{} {}/{}  loss {:.4}", p.stage, p.step, p.steps, p.loss);
            }
        }
    })?;
    println!("wrote {}", settings.output.display());
    Ok(())
}
