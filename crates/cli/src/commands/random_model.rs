//! `flash-grpo random-model`: a model folder of a released size with random weights.

use crate::progress;
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use wan::random_model::{DEFAULT_SHARD_BYTES, Part, RandomModel};
use wan::transformer::TransformerConfig;
use wan::umt5::Umt5Config;
use wan::vae::VaeConfig;

/// Arguments of `random-model`.
#[derive(Debug, Args)]
pub struct RandomModelArgs {
    /// The folder to write; it must not exist, or be empty.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Which model's sizes.
    #[arg(long, value_enum, default_value_t = Size::Small)]
    size: Size,
    /// Parts whose weights are written; the text encoder takes 11.4 GB.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART,..", default_values_t = [PartName::Transformer, PartName::Vae, PartName::TextEncoder])]
    parts: Vec<PartName>,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Largest file in bytes, unless a single tensor is larger.
    #[arg(long, value_name = "BYTES", default_value_t = DEFAULT_SHARD_BYTES)]
    shard_bytes: u64,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Size {
    /// Wan2.1 text-to-video 1.3B
    #[value(name = "1.3b")]
    Small,
    /// Wan2.1 text-to-video 14B
    #[value(name = "14b")]
    Large,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PartName {
    Transformer,
    Vae,
    #[value(name = "text_encoder")]
    TextEncoder,
}

/// Runs the command.
///
/// # Errors
/// A folder that is not empty or cannot be written.
pub fn run_command(args: &RandomModelArgs) -> Result<()> {
    let part = |name: &PartName| match name {
        PartName::Transformer => Part::Transformer,
        PartName::Vae => Part::Vae,
        PartName::TextEncoder => Part::TextEncoder,
    };
    let transformer = match args.size {
        Size::Small => TransformerConfig::wan21_1_3b(),
        Size::Large => TransformerConfig::wan21_14b(),
    };
    let model = RandomModel {
        transformer,
        vae: VaeConfig::default(),
        text_encoder: Umt5Config::xxl(),
        words: shapes::all_captions()
            .iter()
            .flat_map(|caption| caption.to_string().split(' ').map(str::to_owned).collect::<Vec<_>>())
            .collect(),
        parts: args.parts.iter().map(part).collect(),
        seed: args.seed,
        shard_bytes: args.shard_bytes,
    };
    let total = model.bytes()?;
    let bar = progress::bar("writing", total as usize);
    model.write(&args.dir, &mut |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    println!("wrote {} ({:.1} GB of random weights)", args.dir.display(), total as f64 / 1e9);
    Ok(())
}
