//! Every kernel of an iteration of training, in f32 and bf16, generated for the first CUDA device: text encoder, rollout, decoder, gradients, update.
//!
//! What comes out of them does not matter here, so that a driver which only accepts kernels will do: `scripts/cuda_check.sh` runs this where there
//! is no GPU. Run it in the root of the project.
#![allow(clippy::print_stdout)]

use burn::tensor::{DType, Device, Tensor};
use grpo::{Key, LossWeights, PolicyLoss, Purpose, Recipe, Schedule, SigmaGrid, StepPlan, StochasticSteps};
use std::error::Error;
use std::path::Path;
use train::collective::Alone;
use train::optimizer::{AdamW, AdamWConfig, Ema};
use train::policy::Policy;
use train::replay::{Conditioning, TransitionBatch};
use train::rollout::{Start, rollout};
use train::sharing::Shares;
use train::stop::Stop;
use train::update::{Objective, update};
use wan::lora::{Lora, LoraConfig, LoraInit};
use wan::pipeline::{WanPipeline, initial_noise};
use wan::transformer::attention::{attention, is_fused};
use wan::weights::to_floats;

const STEPS: usize = 4;
const SAMPLES: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::cuda(0);
    [DType::F32, DType::BF16].into_iter().try_for_each(|dtype| iteration(&device, dtype))?;
    fused_attention(&device)
}

/// Attention at the sizes of the released models, which the small one of [`iteration`] is too short for.
fn fused_attention(device: &Device) -> Result<(), Box<dyn Error>> {
    let normal = |rows: usize| -> Tensor<4> { Tensor::zeros([1, 12, rows, 128], (device, DType::BF16)) };
    let output = attention(normal(300), normal(300), normal(300), None);
    println!("attention with heads of 128, fused {}: {:?}", is_fused(&normal(300), None), output.dims());
    Ok(device.sync().map_err(|error| format!("{error:?}"))?)
}

fn iteration(device: &Device, dtype: DType) -> Result<(), Box<dyn Error>> {
    println!("frozen weights in {}", dtype.name());
    let pipeline = WanPipeline::load(Path::new("golden/wan-tiny"), device, dtype)?;
    let encode = |texts: &[&str]| pipeline.text_encoder.encode(texts, 64);
    let (prompts, negative) = (encode(&["a red fox", "snow on a field"])?, encode(&["static"])?);
    println!("text encoder: done");

    let target_modules = ["to_q", "to_k", "to_v", "to_out.0"].map(str::to_owned).to_vec();
    let config = LoraConfig { rank: 4, alpha: 8.0, target_modules, init: LoraInit::Gaussian };
    let lora = Lora::attach(&pipeline.transformer.linears, &config, 0, device)?;
    let mut policy = Policy::from_parts(pipeline.transformer, Some(lora));

    let recipe = Recipe { stochastic: StochasticSteps::Random { count: 1, pool: STEPS - 1 }, ..Recipe::flash_grpo() };
    let schedule = Schedule::new(SigmaGrid::Unipc, STEPS, 3.0)?;
    let plans: Vec<StepPlan> = (0..SAMPLES).map(|i| recipe.plan(0, 0, i as u64 / 2, i as u64 % 2, STEPS)).collect();
    let leaders: Vec<usize> = (0..SAMPLES).collect();
    let shape = [SAMPLES, 16, 3, 4, 6];
    let elements = shape[1..].iter().product();
    let key = |purpose| Key { seed: 0, iteration: 0, prompt: 0, rollout: 0, purpose };
    let step_noise = |_: usize, _: usize| key(Purpose::StepNoise).normals(elements);
    let start = Start {
        latents: initial_noise(&key(Purpose::InitialNoise), shape, device),
        conditioning: Conditioning {
            prompts,
            negative: Some(negative),
            prompt_of: vec![0, 0, 1, 1],
            guidance_scale: 4.5,
            guidance_scale_2: None,
            image: None,
        },
        shares: Shares { plans: &plans, leaders: &leaders, suffix: None },
        retain: false,
        step_noise: &step_noise,
    };
    let rollouts = rollout(&policy, &schedule, &recipe.noise_level, start);
    println!("rollout: {} velocities", rollouts.velocities);
    let values = to_floats(pipeline.vae.decode_to_frames(rollouts.latents));
    println!("decoder: {} values", values.len());

    let weights = LossWeights::new(&recipe, &schedule)?;
    let objective = Objective { schedule, noise_level: recipe.noise_level, weights, loss: PolicyLoss::new(1e-3, 0.1)? };
    let with_advantages = |batch: &TransitionBatch| batch.with_advantages(&[1.0, -1.0, 0.5, -0.5]);
    let batches: Vec<TransitionBatch> = rollouts.transitions.iter().map(with_advantages).collect();
    let mut optimizer = AdamW::new(AdamWConfig::default(), policy.params());
    let mut ema = Ema::new(0.9, policy.params());
    for activation_checkpointing in [false, true] {
        policy.activation_checkpointing = activation_checkpointing;
        let metrics =
            update(&policy, &mut optimizer, Some(&mut ema), &objective, &batches, &Alone, &Stop::default()).expect("nobody stops it");
        println!("update, activation checkpointing {activation_checkpointing}: {} transitions", metrics.log_prob.len());
    }
    Ok(device.sync().map_err(|error| format!("{error:?}"))?)
}
