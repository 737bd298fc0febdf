//! A small forward and backward pass on a device, compared with the same on the CPU.

use super::{Backend, OpenDevice, cpu, guarded};
use crate::error::{Error, Result};
use crate::lora::{Lora, LoraConfig, LoraInit};
use crate::param::ParamSet;
use crate::text::PromptEmbeds;
use crate::transformer::attention::is_fused;
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
    /// An adapter on frozen weights in half precision, if the device has it.
    pub half: Option<Half>,
}

/// A pass with frozen weights and activations of bf16, or of f16 where there is no bf16; an adapter in f32 is what is trained.
#[derive(Debug, Clone, Copy)]
pub struct Half {
    /// Which.
    pub dtype: DType,
    /// As [`Trial::velocity`]: against f32 on the CPU.
    pub velocity: f64,
    /// As [`Trial::gradients`], of the adapter.
    pub gradients: f64,
    /// Whether attention is a fused kernel's.
    pub fused: bool,
}

/// What rounding to bf16 may do to the velocity and to the gradients of the trial.
pub const HALF_TOLERANCE: f64 = 5e-2;

impl Trial {
    /// Whether the device can be trusted.
    pub fn passed(&self) -> bool {
        let half = self.half.is_none_or(|half| half.velocity <= HALF_TOLERANCE && half.gradients <= HALF_TOLERANCE);
        self.velocity <= self.tolerance && self.gradients <= self.tolerance && half
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

/// Lets a tiny network with random weights go forward and backward on a device, twice in f32 and once in half precision, and compares with the CPU.
///
/// # Errors
/// The reason why the device did not get through.
pub fn try_device(open: &OpenDevice) -> Result<Trial, String> {
    let expected = |trained| pass(&cpu().device, DType::F32, trained).map_err(|error| error.to_string());
    let [(expected, _), (expected_of_adapter, _)] = [expected(Trained::All)?, expected(Trained::Adapter)?];
    let dtype = [DType::BF16, DType::F16].into_iter().find(|dtype| open.device.supports_dtype(*dtype));
    let run = || -> Result<_> {
        let [first, second] = [pass(&open.device, DType::F32, Trained::All)?, pass(&open.device, DType::F32, Trained::All)?];
        let half = dtype.map(|dtype| Ok::<_, Error>((dtype, pass(&open.device, dtype, Trained::Adapter)?.0)));
        Ok((first, second, half.transpose()?))
    };
    let ((got, first), (_, second), half) = guarded(run)?.map_err(|error| error.to_string())?;
    let tolerance = match open.choice {
        super::DeviceChoice::Of(backend, _) => tolerance(backend),
        super::DeviceChoice::Auto => tolerance(Backend::Cpu),
    };
    let deviations = |got: &[Vec<f32>; 2], expected: &[Vec<f32>; 2]| [0, 1].map(|i| deviation(&got[i], &expected[i]));
    let half = half.map(|(dtype, got)| {
        let [velocity, gradients] = deviations(&got, &expected_of_adapter);
        let [heads, d] = [config().num_attention_heads, config().attention_head_dim];
        let fused = is_fused(&Tensor::zeros([2, heads, TOKENS, d], (&open.device, dtype)), None);
        Half { dtype, velocity, gradients, fused }
    });
    let [velocity, gradients] = deviations(&got, &expected);
    Ok(Trial { velocity, gradients, tolerance, first, second, half })
}

/// What has gradients.
#[derive(Debug, Clone, Copy)]
enum Trained {
    All,
    Adapter,
}

/// The velocity of a batch of two, and the gradients of what is trained; how long it took to have them on the CPU.
fn pass(device: &Device, dtype: DType, trained: Trained) -> Result<([Vec<f32>; 2], Duration)> {
    let model = WanTransformer::new(config(), Weights::random_as(1, device, dtype), dtype)?;
    let params = match trained {
        Trained::All => model.params.clone(),
        Trained::Adapter => adapter(&model, device)?,
    };
    params.set_trainable(true);
    let start = Instant::now();
    let embeds = normals(1, [2, TEXT_ROWS, model.config.text_dim], device);
    let text = PromptEmbeds { embeds, lengths: vec![TEXT_ROWS; 2], padded_length: 2 * TEXT_ROWS };
    let latents: Tensor<5> = normals(2, [2, model.config.in_channels, 2, 16, 18], device);
    let velocity = model.forward(latents.clone().autodiff(), &[900.0, 300.0], &model.text_context(&text, true));
    let gradients = (velocity.clone() * latents.autodiff()).sum().backward();
    let of_all = params.iter().filter_map(|slot| slot.leaf().grad(&gradients)).flat_map(to_floats).collect();
    Ok(([to_floats(velocity.inner()), of_all], start.elapsed()))
}

/// An adapter on every layer, with a B that is not zero.
fn adapter(model: &WanTransformer, device: &Device) -> Result<ParamSet> {
    let target_modules = model.linears.iter().map(|site| site.name.clone()).collect();
    let config = LoraConfig { rank: 4, alpha: 4.0, target_modules, init: LoraInit::Kaiming };
    let params = Lora::attach(&model.linears, &config, 1, device)?.params;
    for (index, slot) in params.iter().enumerate().skip(1).step_by(2) {
        slot.set_value(normals::<1>(index as u64, [slot.shape.iter().product()], device).mul_scalar(0.02));
    }
    Ok(params)
}

const TEXT_ROWS: usize = 5;
/// More than a fused kernel takes at once.
const TOKENS: usize = 2 * 8 * 9;

fn config() -> TransformerConfig {
    TransformerConfig {
        patch_size: [1, 2, 2],
        num_attention_heads: 2,
        attention_head_dim: 128, // as all of Wan: kernels are chosen by it
        in_channels: 16,
        out_channels: 16,
        text_dim: 32,
        freq_dim: 64,
        ffn_dim: 128,
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
        let half = trial.half.expect("bf16");
        assert!(half.dtype == DType::BF16 && half.velocity > 0.0 && !half.fused, "{half:?}");
        assert!(trial.passed(), "{trial:?}");
        assert!(!Trial { half: Some(Half { gradients: f64::INFINITY, ..half }), ..trial }.passed());
    }

    #[test]
    fn what_is_missing_or_no_number_is_no_agreement() {
        assert_eq!(deviation(&[1.0, 2.0], &[1.0, 4.0]), 0.5);
        assert_eq!(deviation(&[1.0], &[1.0, 4.0]), f64::INFINITY);
        assert_eq!(deviation(&[f32::NAN, 4.0], &[1.0, 4.0]), f64::INFINITY);
    }
}
