//! Rotary position embedding over frames, rows and columns.

use super::TransformerConfig;
use super::patch::PatchGrid;
use crate::layers::cast;
use burn::tensor::{DType, Device, Tensor, TensorData};

const THETA: f64 = 10_000.0;

/// Rotates interleaved pairs of features by an angle that depends on the token's place.
///
/// ```text
/// (x_2i, x_2i+1) -> (x_2i cos a - x_2i+1 sin a,  x_2i sin a + x_2i+1 cos a),   a = position * theta^(-2i / d_axis)
/// ```
///
/// The head's features are split between the axes as d_h = d_w = 2 (d / 6), d_t = d - d_h - d_w, each with its own
/// frequencies. Angles are computed in f64 and kept as f32.
#[derive(Debug, Clone)]
pub struct Rope {
    /// [1, L, 1, d], every value twice
    cos: Tensor<4>,
    sin: Tensor<4>,
    /// [d, d]: x P = (-x_1, x_0, -x_3, x_2, ...)
    pair_swap: Tensor<2>,
}

impl Rope {
    /// The table for a grid of patches.
    pub fn new(config: &TransformerConfig, grid: &PatchGrid, device: &Device) -> Self {
        let d = config.attention_head_dim;
        let (cos, sin) = tables(d, grid.size);
        let tokens = grid.num_tokens();
        let device = device.clone().inner();
        let table = |values: Vec<f32>| Tensor::<4>::from_data(TensorData::new(values, [1, tokens, 1, d]), &device);
        let mut swap = vec![0.0_f32; d * d];
        for i in (0..d).step_by(2) {
            swap[(i + 1) * d + i] = -1.0;
            swap[i * d + i + 1] = 1.0;
        }
        Self { cos: table(cos), sin: table(sin), pair_swap: Tensor::from_data(TensorData::new(swap, [d, d]), &device) }
    }

    /// x [B, L, heads, d] -> same.
    pub fn rotate(&self, x: Tensor<4>) -> Tensor<4> {
        let dtype = x.dtype();
        let x = cast(x, DType::F32);
        let [b, l, h, d] = x.dims();
        // the swap as a product with a 0/+-1 matrix: exact, and no strided copies
        let swapped = x.clone().reshape([b * l * h, d]).matmul(self.pair_swap.clone()).reshape([b, l, h, d]);
        cast(x * self.cos.clone() + swapped * self.sin.clone(), dtype)
    }

    /// cos and sin [1, L, 1, d].
    pub fn tables(&self) -> (Tensor<4>, Tensor<4>) {
        (self.cos.clone(), self.sin.clone())
    }
}

fn tables(d: usize, [frames, rows, columns]: [usize; 3]) -> (Vec<f32>, Vec<f32>) {
    let d_hw = 2 * (d / 6);
    let axes = [d - 2 * d_hw, d_hw, d_hw];
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for token in 0..frames * rows * columns {
        let place = [token / (rows * columns), token / columns % rows, token % columns];
        for (position, dim) in place.into_iter().zip(axes) {
            for i in 0..dim / 2 {
                let angle = position as f64 * THETA.powf(-2.0 * i as f64 / dim as f64);
                cos.extend([angle.cos() as f32; 2]);
                sin.extend([angle.sin() as f32; 2]);
            }
        }
    }
    (cos, sin)
}
