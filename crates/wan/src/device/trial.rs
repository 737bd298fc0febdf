//! A small forward and backward pass on a device, compared with the same on the CPU.

use super::{Backend, OpenDevice, cpu, guarded};
use crate::error::Result;
use crate::text::PromptEmbeds;
use crate::transformer::{TransformerConfig, WanTransformer};
use crate::weights::{Weights, to_floats};
use burn::tensor::{DType, Device, Tensor, TensorData};
use grpo::random::{Key, Purpose};
use std::time::{Duration, Instant};

/// How a device did.
#[derive(Debug, Clone, Copy)]
pub struct Trial {
    /// Largest difference of the velocity from that of the CPU, relative to its largest value.
    pub velocity: f64,
    /// The same for the gradients of all weights together.
    pub gradients: f64,
    /// What is allowed of either.
    pub tolerance: f64,
    /// The first pass: on a GPU mostly the compilation of its programs.
    pub first: Duration,
    /// The second pass.
    pub second: Duration,
}

impl Trial {
    /// Whether the device can be trusted.
    pub fn passed(&self) -> bool {
        self.velocity <= self.tolerance && self.gradients <= self.tolerance
    }
}

/// What a device may differ by: sums in another order in f32; on NVIDIA and AMD the matrix units also round factors to 10 bits (TF32 and
/// alike), which is 5e-4 for each product.
pub fn tolerance(backend: Backend) -> f64 {
    match backend {
        Backend::Cuda | Backend::Rocm => 1e-2,
        Backend::Cpu | Backend::Metal | Backend::Vulkan | Backend::Wgpu => 1e-4,
    }
}

/// Lets a tiny network with random weights go forward and backward on a device, twice, and compares with the CPU.
///
/// # Errors
/// The reason why the device did not get through.
pub fn try_device(open: &OpenDevice) -> Result<Trial, String> {
    let (expected, _) = pass(&cpu().device).map_err(|error| error.to_string())?;
    let run = || -> Result<_> { Ok((pass(&open.device)?, pass(&open.device)?)) };
    let ((got, first), (_, second)) = guarded(run)?.map_err(|error| error.to_string())?;
    let tolerance = match open.choice {
        super::DeviceChoice::Of(backend, _) => tolerance(backend),
        super::DeviceChoice::Auto => tolerance(Backend::Cpu),
    };
    let [velocity, gradients] = [0, 1].map(|i| deviation(&got[i], &expected[i]));
    Ok(Trial { velocity, gradients, tolerance, first, second })
}

/// The velocity of a batch of two, and the gradients of all weights; how long it took to have them on the CPU.
fn pass(device: &Device) -> Result<([Vec<f32>; 2], Duration)> {
    let model = WanTransformer::new(config(), Weights::random(1, device), DType::F32)?;
    model.params.set_trainable(true);
    let start = Instant::now();
    let embeds = normals(1, [2, TEXT_ROWS, model.config.text_dim], device);
    let text = PromptEmbeds { embeds, lengths: vec![TEXT_ROWS; 2], padded_length: 2 * TEXT_ROWS };
    let latents: Tensor<5> = normals(2, [2, model.config.in_channels, 2, 4, 6], device);
    let velocity = model.forward(latents.clone().autodiff(), &[900.0, 300.0], &model.text_context(&text, true));
    let gradients = (velocity.clone() * latents.autodiff()).sum().backward();
    let of_all = model.params.iter().filter_map(|slot| slot.leaf().grad(&gradients)).flat_map(to_floats).collect();
    Ok(([to_floats(velocity.inner()), of_all], start.elapsed()))
}

const TEXT_ROWS: usize = 5;

fn config() -> TransformerConfig {
    TransformerConfig {
        patch_size: [1, 2, 2],
        num_attention_heads: 2,
        attention_head_dim: 24,
        in_channels: 16,
        out_channels: 16,
        text_dim: 32,
        freq_dim: 64,
        ffn_dim: 96,
        num_layers: 2,
        cross_attn_norm: true,
        qk_norm: None,
        eps: 1e-6,
        image_dim: None,
        added_kv_proj_dim: None,
        pos_embed_seq_len: None,
        rope_max_seq_len: 1024,
    }
}

/// Standard normal deviates, drawn on the CPU.
fn normals<const D: usize>(index: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    let key = Key { seed: 0, iteration: 0, prompt: index, rollout: 0, purpose: Purpose::Data };
    Tensor::from_data(TensorData::new(key.normals(shape.iter().product()), shape), device)
}

/// max |a - b| / max |b|; infinite where something is not a number or missing.
fn deviation(a: &[f32], b: &[f32]) -> f64 {
    let largest = b.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let pairs = a.iter().zip(b);
    if a.len() != b.len() || a.iter().any(|v| !v.is_finite()) {
        return f64::INFINITY;
    }
    f64::from(pairs.fold(0.0_f32, |m, (a, b)| m.max((a - b).abs())) / largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_agrees_with_itself() {
        let trial = try_device(&cpu()).expect("the CPU computes");
        assert_eq!((trial.velocity, trial.gradients), (0.0, 0.0));
        assert!(trial.passed());
    }

    #[test]
    fn what_is_missing_or_no_number_is_no_agreement() {
        assert_eq!(deviation(&[1.0, 2.0], &[1.0, 4.0]), 0.5);
        assert_eq!(deviation(&[1.0], &[1.0, 4.0]), f64::INFINITY);
        assert_eq!(deviation(&[f32::NAN, 4.0], &[1.0, 4.0]), f64::INFINITY);
    }
}
