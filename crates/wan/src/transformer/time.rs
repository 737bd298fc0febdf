//! The timestep's embedding and its projection to the blocks' modulation.

use super::TransformerConfig;
use crate::layers::{Linear, cast};
use crate::weights::Weights;
use burn::tensor::activation::silu;
use burn::tensor::{DType, Device, Tensor, TensorData};

/// Sinusoid, two-layer network, projection to six vectors.
#[derive(Debug)]
pub struct TimeEmbedding {
    dim: usize,
    linear_1: Linear,
    linear_2: Linear,
    time_proj: Linear,
}

impl TimeEmbedding {
    /// From the sub-tree `condition_embedder`; the two-layer network stays f32 in a bf16 model.
    pub fn new(w: &Weights, config: &TransformerConfig) -> Self {
        let (dim, embedder) = (config.dim(), w.sub("time_embedder"));
        Self {
            dim,
            linear_1: Linear::new_f32(&embedder.sub("linear_1"), config.freq_dim, dim),
            linear_2: Linear::new_f32(&embedder.sub("linear_2"), dim, dim),
            time_proj: Linear::new(&w.sub("time_proj"), dim, 6 * dim),
        }
    }

    /// (temb [B, S, D], modulation [B, S, 6, D]) of the timesteps' sinusoids [B, S, freq_dim].
    pub fn forward(&self, sinusoids: Tensor<3>, dtype: DType) -> (Tensor<3>, Tensor<4>) {
        let [batch, per_sample, _] = sinusoids.dims();
        let hidden = silu_f32(self.linear_1.forward(sinusoids));
        let temb = cast(self.linear_2.forward(hidden), dtype);
        let modulation = self.time_proj.forward(silu_f32(temb.clone()));
        (temb, modulation.reshape([batch, per_sample, 6, self.dim]))
    }
}

/// SiLU with one rounding, as the reference's kernels do in bf16.
fn silu_f32(x: Tensor<3>) -> Tensor<3> {
    let dtype = x.dtype();
    cast(silu(cast(x, DType::F32)), dtype)
}

/// Sinusoids [B, S, freq_dim] of B x S timesteps on the 0..1000 scale.
///
/// ```text
/// [cos(t f_i) | sin(t f_i)],   f_i = exp(-ln(10^4) i / half)
/// ```
///
/// Every operation is rounded to f32 as in the reference, as if each were exact. (Vectorised exp functions differ in the last
/// bit of f_i between machines; times t = 999 that is 3e-5 in the angle.)
pub fn sinusoids(timesteps: &[f64], batch: usize, freq_dim: usize, device: &Device) -> Tensor<3> {
    let half = freq_dim / 2;
    let log_period = 10_000.0_f64.ln() as f32;
    let frequency: Vec<f32> = (0..half).map(|i| f64::from(-log_period * i as f32 / half as f32).exp() as f32).collect();
    let mut values = Vec::with_capacity(timesteps.len() * freq_dim);
    for &t in timesteps {
        let angles = frequency.iter().map(|f| f64::from(t as f32 * f));
        values.extend(angles.clone().map(|angle| angle.cos() as f32));
        values.extend(angles.map(|angle| angle.sin() as f32));
    }
    let shape = [batch, timesteps.len() / batch, freq_dim];
    Tensor::from_data(TensorData::new(values, shape), &device.clone().inner())
}
