//! `flash-grpo random-model`: a model folder of a released size with random weights.

use crate::progress;
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use wan::experts::Boundary;
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
    /// Parts whose weights are written; the text encoder takes 11.4 GB. Where the model has two transformers, `transformer` is both.
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
    /// Wan2.2 text-to-video A14B: two networks of the size of 14B
    #[value(name = "t2v-a14b")]
    Experts,
    /// Wan2.2 image-to-video A14B: the same, which start with an image
    #[value(name = "i2v-a14b")]
    ImageExperts,
    /// Wan2.2 text-and-image-to-video 5B
    #[value(name = "ti2v-5b")]
    TextAndImage,
}

impl Size {
    fn transformer(self) -> TransformerConfig {
        match self {
            Self::Small => TransformerConfig::wan21_1_3b(),
            Self::Large | Self::Experts => TransformerConfig::wan21_14b(),
            Self::ImageExperts => TransformerConfig::wan22_i2v_14b(),
            Self::TextAndImage => TransformerConfig::wan22_ti2v_5b(),
        }
    }

    fn vae(self) -> VaeConfig {
        if matches!(self, Self::TextAndImage) { VaeConfig::wan22() } else { VaeConfig::default() }
    }

    fn boundary(self) -> Option<Boundary> {
        match self {
            Self::Experts => Some(Boundary::T2V_A14B),
            Self::ImageExperts => Some(Boundary::I2V_A14B),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
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
    let boundary = args.size.boundary();
    let parts = |name: &PartName| match name {
        PartName::Transformer if boundary.is_some() => vec![Part::Transformer, Part::Transformer2],
        PartName::Transformer => vec![Part::Transformer],
        PartName::Vae => vec![Part::Vae],
        PartName::TextEncoder => vec![Part::TextEncoder],
    };
    let model = RandomModel {
        transformer: args.size.transformer(),
        boundary,
        vae: args.size.vae(),
        text_encoder: Umt5Config::xxl(),
        words: shapes::all_captions()
            .iter()
            .flat_map(|caption| caption.to_string().split(' ').map(str::to_owned).collect::<Vec<_>>())
            .collect(),
        parts: args.parts.iter().flat_map(parts).collect(),
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
