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
        // the swap as a product with a 0/+-1 matrix: no strided copies, and exact (where matrix units round factors to TF32, for values that were bf16)
        let swapped = x.clone().reshape([b * l * h, d]).matmul(self.pair_swap.clone()).reshape([b, l, h, d]);
        cast(x * self.cos.clone() + swapped * self.sin.clone(), dtype)
    }

    /// cos and sin [1, L, 1, d].
    pub fn tables(&self) -> (Tensor<4>, Tensor<4>) {
        (self.cos.clone(), self.sin.clone())
    }
}

/// Every token's features are those of its frame, of its row and of its column: a short table for each.
fn tables(d: usize, [frames, rows, columns]: [usize; 3]) -> (Vec<f32>, Vec<f32>) {
    let d_hw = 2 * (d / 6);
    let [of_frames, of_rows, of_columns] = [(frames, d - 2 * d_hw), (rows, d_hw), (columns, d_hw)].map(|(length, dim)| axis(length, dim));
    let count = frames * rows * columns * d;
    let (mut cos, mut sin) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for frame in &of_frames {
        for row in &of_rows {
            for column in &of_columns {
                for part in [frame, row, column] {
                    cos.extend_from_slice(&part.0);
                    sin.extend_from_slice(&part.1);
                }
            }
        }
    }
    (cos, sin)
}

/// For each position, the cos and sin of `dim` features, every value twice.
fn axis(length: usize, dim: usize) -> Vec<(Vec<f32>, Vec<f32>)> {
    let place = |position: usize| {
        let angles = (0..dim / 2).map(|i| position as f64 * THETA.powf(-2.0 * i as f64 / dim as f64));
        let angles: Vec<f64> = angles.flat_map(|angle| [angle; 2]).collect();
        (angles.iter().map(|angle| angle.cos() as f32).collect(), angles.iter().map(|angle| angle.sin() as f32).collect())
    };
    (0..length).map(place).collect()
}
