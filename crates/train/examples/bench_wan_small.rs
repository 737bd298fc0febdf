//! The benchmark case `wan-small`, through the functions that training uses: 16 samples of 80 tokens, 6 layers of 192 features,
//! text padded to 512 rows.
//!
//! ```text
//! bench_wan_small denoise-cfg|train [--text-rows N] [--json]
//! ```
//!
//! `denoise-cfg` is one step of a 20-step rollout with guidance 4.5 (the text's keys and values, computed once per rollout, are in it by
//! their share). `train` is forward and backward of one branch with a LoRA of rank 4, and AdamW. `--text-rows` is the number of real
//! text rows; the others are padding. `scripts/bench.sh` runs it beside PyTorch.

use burn::tensor::{DType, Device, Tensor, TensorData};
use grpo::{Key, Purpose, Schedule, SigmaGrid};
use std::time::Instant;
use train::optimizer::{AdamW, AdamWConfig, GradientSum};
use train::policy::Policy;
use train::replay::Conditioning;
use train::settings::PolicySettings;
use wan::pipeline::denoise;
use wan::solver::SolverKind;
use wan::text::PromptEmbeds;
use wan::transformer::{TransformerConfig, WanTransformer};
use wan::weights::Weights;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BATCH: usize = 16;
const LATENTS: [usize; 5] = [BATCH, 16, 5, 8, 8];
const STEPS: usize = 20;
const RUNS: usize = 10;

fn main() {
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rows_at = args.iter().position(|arg| arg == "--text-rows").map(|at| at + 1);
    let text_rows = rows_at.and_then(|at| args.get(at)).and_then(|rows| rows.parse().ok()).unwrap_or(12);
    let bench = Bench::new(text_rows);
    let runs: Vec<f64> = match args.first().map(String::as_str) {
        Some("denoise-cfg") => bench.measure(2, || bench.roll_out(), STEPS),
        Some("train") => {
            let mut optimizer = AdamW::new(AdamWConfig::default(), bench.policy.params());
            bench.measure(RUNS, || bench.train(&mut optimizer), 1)
        }
        _ => panic!("usage: bench_wan_small denoise-cfg|train [--text-rows N] [--json]"),
    };
    report(runs, args.iter().any(|arg| arg == "--json"));
}

struct Bench {
    policy: Policy,
    latents: Tensor<5>,
    text: PromptEmbeds,
    negative: PromptEmbeds,
    schedule: Schedule,
}

impl Bench {
    fn new(text_rows: usize) -> Self {
        let device = Device::flex();
        let transformer = WanTransformer::new(config(), Weights::random(1, &device), DType::F32).expect("a valid config");
        let target_modules = ["to_q", "to_k", "to_v", "to_out.0"].map(str::to_owned).to_vec();
        let settings = PolicySettings::Lora { rank: 4, alpha: 8.0, target_modules, init: Default::default() };
        let text = |prompts: usize, seed| PromptEmbeds {
            embeds: noise(seed, [prompts, text_rows, 128]),
            lengths: vec![text_rows; prompts],
            padded_length: 512,
        };
        Self {
            policy: Policy::new(transformer, &settings, 0, &device).expect("adapters fit"),
            latents: noise(2, LATENTS),
            text: text(BATCH, 3),
            negative: text(1, 4),
            schedule: Schedule::new(SigmaGrid::Euler, STEPS, 3.0).expect("schedule"),
        }
    }

    fn conditioning(&self, guidance_scale: f64) -> Conditioning {
        let negative = Some(self.negative.clone());
        Conditioning {
            prompts: self.text.clone(),
            negative,
            prompt_of: (0..BATCH).collect(),
            guidance_scale,
            guidance_scale_2: None,
            image: None,
        }
    }

    fn roll_out(&self) {
        let conditioning = self.conditioning(4.5);
        let velocity = conditioning.velocity(&self.policy, self.latents.dims(), false);
        let _ = denoise(&velocity, SolverKind::Euler, &self.schedule, self.latents.clone(), &mut |_, _| {}).into_data();
    }

    fn train(&self, optimizer: &mut AdamW) {
        let velocity = self
            .conditioning(1.0)
            .velocity(&self.policy, self.latents.dims(), true)
            .velocity(self.latents.clone().autodiff(), &[500.0; BATCH]);
        let gradients = velocity.powi_scalar(2).mean().backward();
        let mut sum = GradientSum::new(self.policy.params());
        sum.add(self.policy.params(), &gradients);
        optimizer.step(self.policy.params(), &sum);
    }

    /// Seconds of one of the `parts` of `work`, after two unmeasured ones.
    fn measure(&self, runs: usize, mut work: impl FnMut(), parts: usize) -> Vec<f64> {
        (0..2).for_each(|_| work());
        (0..runs)
            .map(|_| {
                let start = Instant::now();
                work();
                start.elapsed().as_secs_f64() / parts as f64
            })
            .collect()
    }
}

#[allow(clippy::print_stdout)]
fn report(mut runs: Vec<f64>, json: bool) {
    runs.sort_by(f64::total_cmp);
    let (min, median, peak) = (runs[0], runs[runs.len() / 2], peak_rss_mib());
    if json {
        println!("{}", serde_json::json!({ "median_s": median, "min_s": min, "peak_rss_mib": peak, "runs": runs }));
    } else {
        println!("fastest {:.1} ms, median {:.1} ms, peak memory {peak:.0} MiB", 1e3 * min, 1e3 * median);
    }
}

/// Largest resident set so far, as Linux counts it; 0 elsewhere.
fn peak_rss_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

fn noise<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
    let key = Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data };
    Tensor::from_data(TensorData::new(key.normals(shape.iter().product()), shape), &Device::flex())
}

fn config() -> TransformerConfig {
    TransformerConfig {
        patch_size: [1, 2, 2],
        num_attention_heads: 6,
        attention_head_dim: 32,
        in_channels: 16,
        out_channels: 16,
        text_dim: 128,
        freq_dim: 256,
        ffn_dim: 768,
        num_layers: 6,
        cross_attn_norm: true,
        qk_norm: Some("rms_norm_across_heads".into()),
        eps: 1e-6,
        image_dim: None,
        added_kv_proj_dim: None,
        pos_embed_seq_len: None,
        rope_max_seq_len: 1024,
    }
}
