//! The case `wan-small`, for measurements and profiles: 16 samples of 80 tokens through 6 layers of 192 features.
//!
//! ```text
//! profile_dev fwd|train|full [repetitions] [text rows]
//! ```
//!
//! `fwd` is a forward pass, `train` forward and backward of a LoRA of rank 4, `full` of all weights. Prints the fastest and the median
//! pass in milliseconds. Text rows beyond the real ones cost nothing (they are collapsed): `512` measures prompts that fill the context.

use burn::tensor::{DType, Device, Tensor, TensorData};
use std::time::Instant;
use wan::lora::{Lora, LoraConfig};
use wan::text::PromptEmbeds;
use wan::transformer::{TextContext, TransformerConfig, WanTransformer};
use wan::weights::Weights;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BATCH: usize = 16;

fn main() {
    // the main thread works too, instead of waking the others and waiting for them
    rayon::ThreadPoolBuilder::new().use_current_thread().build_global().expect("the pool is built once");
    let mut args = std::env::args().skip(1);
    let mode = args.next().unwrap_or_else(|| "fwd".into());
    let [repetitions, text_rows] = [20, 12].map(|default| args.next().and_then(|arg| arg.parse().ok()).unwrap_or(default));
    let device = Device::flex();
    let model = WanTransformer::new(config(), Weights::random(1, &device), DType::F32).expect("a valid config");
    let latents = noise([BATCH, 16, 5, 8, 8], &device);
    let text = PromptEmbeds { embeds: noise([BATCH, text_rows, 128], &device), lengths: vec![text_rows; BATCH], padded_length: 512 };
    let target_modules = ["to_q", "to_k", "to_v", "to_out.0"].map(str::to_owned).to_vec();
    let lora = LoraConfig { rank: 4, alpha: 8.0, target_modules, init: Default::default() };
    let lora = Lora::attach(&model.linears, &lora, 0, &device).expect("adapters fit");
    lora.params.set_trainable(true);
    model.params.set_trainable(mode == "full");
    let context = model.text_context(&text, false);
    let mut times: Vec<f64> = (0..repetitions).map(|_| pass(&mode, &model, &latents, &text, &context)).collect();
    times.sort_by(f64::total_cmp);
    println!("{mode}, {text_rows} text rows: fastest {:.1} ms, median {:.1} ms", times[0], times[times.len() / 2]);
}

/// Milliseconds of one pass.
fn pass(mode: &str, model: &WanTransformer, latents: &Tensor<5>, text: &PromptEmbeds, context: &TextContext) -> f64 {
    let timesteps = vec![500.0; BATCH];
    let start = Instant::now();
    if mode == "fwd" {
        let _ = model.forward(latents.clone(), &timesteps, context).into_data();
    } else {
        let context = model.text_context(text, true);
        let velocity = model.forward(latents.clone().autodiff(), &timesteps, &context);
        let _ = velocity.powi_scalar(2).mean().backward();
    }
    start.elapsed().as_secs_f64() * 1e3
}

fn noise<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let key = grpo::Key { seed: 1, iteration: 0, prompt: 0, rollout: 0, purpose: grpo::Purpose::Data };
    Tensor::from_data(TensorData::new(key.normals(shape.iter().product()), shape), device)
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
        rope_max_seq_len: 1024,
    }
}
