//! `--mixed-precision`, what a command without a recipe holds the transformer in.

use burn::tensor::DType;
use clap::{Args, ValueEnum};
use train::settings::MixedPrecision;

/// The numbers of the transformer.
#[derive(Debug, Clone, Copy, Args)]
pub struct PrecisionArg {
    /// What the transformer's frozen weights and activations are held in; as `train.mixed_precision` of a recipe.
    #[arg(long, value_name = "PRECISION", default_value = "no")]
    mixed_precision: Precision,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Precision {
    /// f32
    No,
    /// bf16, with f32 where rounding would do harm
    Bf16,
}

impl PrecisionArg {
    /// The dtype of the frozen weights.
    pub fn dtype(self) -> DType {
        let precision = match self.mixed_precision {
            Precision::No => MixedPrecision::No,
            Precision::Bf16 => MixedPrecision::Bf16,
        };
        precision.dtype()
    }
}
