//! Time and peak memory of one training step (replay, loss, backward) of a LoRA on a transformer of Wan's shape with random weights.
//!
//! ```text
//! measure_update [--size 1.3b|14b] [--layers N] [--tokens L] [--guidance S] [--activation-checkpointing]
//! ```
//!
//! Prints one line of JSON. docs/scaling.md has the results.

use burn::tensor::{DType, Device, Tensor, TensorData};
use grpo::{Key, LossWeights, PolicyLoss, Purpose, Recipe, Schedule, SigmaGrid};
use std::time::Instant;
use train::optimizer::GradientSum;
use train::policy::Policy;
use train::replay::{Conditioning, TransitionBatch};
use train::settings::PolicySettings;
use train::update::{Objective, UpdateMetrics};
use wan::text::PromptEmbeds;
use wan::transformer::{TransformerConfig, WanTransformer};
use wan::weights::Weights;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Real text rows; the other 505 are padding.
const TEXT: usize = 7;

fn main() {
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).cloned();
    let number = |name: &str, default: usize| value(name).map_or(default, |text| text.parse().expect("a number"));
    let mut config = match value("--size").as_deref() {
        Some("14b") => TransformerConfig::wan21_14b(),
        _ => TransformerConfig::wan21_1_3b(),
    };
    config.num_layers = number("--layers", 1);
    let guidance = value("--guidance").map_or(1.0, |text| text.parse().expect("a number"));
    let mut policy = policy(config);
    policy.activation_checkpointing = args.iter().any(|arg| arg == "--activation-checkpointing");
    let (objective, mut batch) = (objective(), batch(number("--tokens", 1024), guidance));
    // on policy, so that the ratio is 1 and nothing is clipped
    let forward = Instant::now();
    batch.old_log_probs = batch.replay(&policy, &objective.schedule, &objective.transitions(&batch.steps), false).log_probs;
    let forward = forward.elapsed().as_secs_f64();
    let before = status("VmHWM");
    let (start, mut sums, mut metrics) = (Instant::now(), GradientSum::new(policy.params()), UpdateMetrics::default());
    objective.backward(&policy, &batch, 1, &mut sums, &mut metrics);
    let seconds = start.elapsed().as_secs_f64();
    let report = serde_json::json!({
        "dim": policy.transformer.config.dim(),
        "layers": policy.transformer.config.num_layers,
        "tokens": policy.transformer.num_tokens(batch.latents.dims()),
        "guidance": guidance,
        "activation_checkpointing": policy.activation_checkpointing,
        "forward_seconds": forward,
        "step_seconds": seconds,
        "gradient_norm": sums.norm(),
        "peak_after_forward_mib": before / 1024,
        "peak_mib": status("VmHWM") / 1024,
    });
    let mut out = std::io::stdout().lock();
    let _ = std::io::Write::write_all(&mut out, format!("{report}\n").as_bytes());
}

fn policy(config: TransformerConfig) -> Policy {
    let device = Device::flex();
    let transformer = WanTransformer::new(config, Weights::random(1, &device), DType::F32).expect("a valid config");
    let target_modules = ["to_q", "to_k", "to_v", "to_out.0"].map(str::to_owned).to_vec();
    let settings = PolicySettings::Lora { rank: 16, alpha: 32.0, target_modules, init: Default::default() };
    let policy = Policy::new(transformer, &settings, 0, &device).expect("adapters fit");
    // a new adapter has B = 0 and no gradient of A
    for slot in policy.params().iter() {
        let value = slot.value();
        let count = value.dims()[0];
        slot.set_value(value + normals::<1>(9, [count]).mul_scalar(0.01));
    }
    policy
}

fn objective() -> Objective {
    let schedule = Schedule::new(SigmaGrid::Unipc, 20, 3.0).expect("schedule");
    let recipe = Recipe::flash_grpo();
    let weights = LossWeights::new(&recipe, &schedule).expect("weights");
    let loss = PolicyLoss::new(1e-3, 0.0).expect("clip range");
    Objective { schedule, noise_level: recipe.noise_level, weights, loss }
}

fn batch(tokens: usize, guidance_scale: f64) -> TransitionBatch {
    let (rows, columns) = (32, tokens / 32);
    let shape = [1, 16, 1, 2 * rows, 2 * columns];
    let embeds = |seed| PromptEmbeds { embeds: normals(seed, [1, TEXT, 4096]), lengths: vec![TEXT], padded_length: 512 };
    let conditioning = Conditioning {
        prompts: embeds(1),
        negative: Some(embeds(2)),
        prompt_of: vec![0],
        guidance_scale,
        guidance_scale_2: None,
        image: None,
    };
    TransitionBatch {
        retained: None,
        owners: vec![0],
        latents: normals(3, shape),
        next_latents: normals(4, shape),
        old_velocity: None,
        samples: vec![0],
        steps: vec![3],
        old_log_probs: vec![-1.0],
        advantages: vec![-1.0],
        conditioning,
    }
}

fn normals<const R: usize>(seed: u64, shape: [usize; R]) -> Tensor<R> {
    let key = Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data };
    Tensor::from_data(TensorData::new(key.normals(shape.iter().product()), shape), &Device::flex())
}

/// An entry of /proc/self/status in KiB; 0 on other systems.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
