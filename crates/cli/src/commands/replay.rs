//! `flash-grpo replay`: recorded transitions under a model, to find where two implementations part.

use crate::device::DeviceArg;
use crate::precision::PrecisionArg;
use anyhow::{Result, ensure};
use burn::tensor::{DType, Device};
use clap::Args;
use serde_json::{Value, json};
use std::path::PathBuf;
use train::collective::Alone;
use train::optimizer::AdamW;
use train::policy::Policy;
use train::recording::Recording;
use train::stop::Stop;
use train::update::{UpdateMetrics, update};
use wan::experts::{Experts, SecondExpert};
use wan::transformer::WanTransformer;

/// Arguments of `replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Recorded transitions, as `train --set debug.save_rollouts=true` writes them.
    #[arg(value_name = "ROLLOUTS")]
    rollouts: PathBuf,
    /// Model folder in the diffusers layout; only its transformer, or both of them, is read.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Adapter to train; without one all weights are trained.
    #[arg(long, value_name = "PATH")]
    lora: Option<PathBuf>,
    /// Adapter of the second transformer, in a model with two [default: the folder `transformer_2` in that of `--lora`, if there is one].
    #[arg(long, value_name = "PATH", requires = "lora")]
    lora_2: Option<PathBuf>,
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
    let folder = wan::hub::resolve(&args.model)?;
    let transformer = WanTransformer::load(&folder.join("transformer"), &device, dtype)?;
    let second = SecondExpert::load(&folder, &device, dtype)?;
    recording.check_fits(&transformer.config)?;
    let policy = policy(args, transformer, second, &device)?;
    let mut optimizer = AdamW::new(recording.header.optimizer, policy.params());
    let updates: Vec<UpdateMetrics> = if args.updates == 0 {
        vec![recording.evaluate(&policy)]
    } else {
        let (objective, batches) = (&recording.objective, &recording.batches);
        (0..args.updates)
            .map(|_| update(&policy, &mut optimizer, None, objective, batches, &Alone, &Stop::default()))
            .collect::<Result<_, _>>()?
    };
    print(&updates, args.json)
}

/// The networks with their adapters, if any were given: then each network must have one.
fn policy(args: &ReplayArgs, transformer: WanTransformer, second: Option<SecondExpert>, device: &Device) -> Result<Policy> {
    let Some(path) = &args.lora else {
        return Ok(Policy::from_experts((transformer, None), second.map(|second| (second, None))));
    };
    let experts = Experts { first: &transformer, second: second.as_ref() };
    let mut adapters = experts.attach(experts.read_adapters(path, args.lora_2.as_deref())?, device)?.into_iter();
    let lora = adapters.next();
    let second_lora = adapters.next();
    ensure!(
        second.is_none() || second_lora.is_some(),
        "`{}` has no folder `transformer_2`, and the model has two transformers\nhint: give the adapter of the second with `--lora-2`",
        path.display()
    );
    Ok(Policy::from_experts((transformer, lora), second.map(|second| (second, second_lora))))
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
