//! `flash-grpo replay`: recorded transitions under a model, to find where two implementations part.

use crate::device::DeviceArg;
use crate::precision::PrecisionArg;
use anyhow::{Result, ensure};
use burn::tensor::DType;
use clap::Args;
use serde_json::{Value, json};
use std::path::PathBuf;
use train::collective::Alone;
use train::optimizer::AdamW;
use train::policy::Policy;
use train::recording::Recording;
use train::update::{UpdateMetrics, update};
use wan::transformer::WanTransformer;

/// Arguments of `replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Recorded transitions, as `train --set debug.save_rollouts=true` writes them.
    #[arg(value_name = "ROLLOUTS")]
    rollouts: PathBuf,
    /// Model folder in the diffusers layout; only its transformer is read.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Adapter to train; without one all weights are trained.
    #[arg(long, value_name = "PATH")]
    lora: Option<PathBuf>,
    /// Optimizer updates to make; 0 only evaluates.
    #[arg(long, value_name = "N", default_value_t = 1)]
    updates: usize,
    /// Samples that run through the network at once.
    #[arg(long, value_name = "N", default_value_t = 16)]
    micro_batch: usize,
    #[command(flatten)]
    precision: PrecisionArg,
    #[command(flatten)]
    device: DeviceArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// Files that cannot be read or do not fit each other.
pub fn run_command(args: &ReplayArgs) -> Result<()> {
    ensure!(args.micro_batch > 0, "--micro-batch is `0`: at least one sample has to run\nhint: 16 suits small models, 1 large ones");
    let dtype = args.precision.dtype();
    ensure!(
        dtype == DType::F32 || args.lora.is_some(),
        "--mixed-precision is `bf16` without `--lora`: all weights are trained then, and in bf16 the steps of the optimizer would be lost\nhint: give an adapter, or leave `--mixed-precision` out"
    );
    let device = args.device.open()?;
    let recording = Recording::load(&args.rollouts, args.micro_batch, &device)?;
    let transformer = WanTransformer::load(&wan::hub::resolve(&args.model)?.join("transformer"), &device, dtype)?;
    recording.check_fits(&transformer.config)?;
    let lora = match &args.lora {
        Some(path) => Some(wan::lora::load(path, &transformer.linears)?.attach(&transformer.linears, &device)?),
        None => None,
    };
    let policy = Policy::from_parts(transformer, lora);
    let mut optimizer = AdamW::new(recording.header.optimizer, policy.params());
    let updates: Vec<UpdateMetrics> = if args.updates == 0 {
        vec![recording.evaluate(&policy)]
    } else {
        (0..args.updates).map(|_| update(&policy, &mut optimizer, None, &recording.objective, &recording.batches, &Alone)).collect()
    };
    print(&updates, args.json)
}

fn print(updates: &[UpdateMetrics], as_json: bool) -> Result<()> {
    if as_json {
        let entries: Vec<Value> = updates.iter().map(|u| json!(u)).collect();
        println!("{}", serde_json::to_string_pretty(&json!({ "updates": entries }))?);
        return Ok(());
    }
    println!("update  max |ratio - 1|          loss     grad norm  clip fraction");
    for (index, u) in updates.iter().enumerate() {
        println!("{index:>6}  {:>15.3e}  {:>12.5e}  {:>12.5e}  {:>13.3}", u.ratio_deviation(), u.loss, u.grad_norm, u.clip_fraction);
    }
    Ok(())
}
