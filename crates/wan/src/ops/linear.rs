//! A linear layer with bias and an optional low-rank adapter.

// The engine's macro writes code without documentation.
#![allow(missing_docs)]

use super::matmul::{Lhs, PANEL, Packed, Rhs, Start, TASK_ROWS, multiply, multiply_new, multiply_parallel};
use super::rows::{add_to, map_and_sum_rows, vectorized};
use super::{absent, dims, floats, tensor, widened};
use crate::layers::cast;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::{Tensor, bf16};
use rayon::prelude::*;

/// The trainable part of an adapted layer: `scale B A`.
#[derive(Debug)]
pub struct LowRank {
    /// [rank, in]
    pub a: Tensor<2>,
    /// [out, rank]
    pub b: Tensor<2>,
    pub scale: f64,
}

/// x [rows, in], weight [out, in], bias `[out]` -> [rows, out].
///
/// ```text
/// y = x W^T + bias + scale (x A^T) B^T
/// ```
///
/// Backward keeps x and x A^T. A frozen weight costs no gradient, and x is not kept where nothing but x is trained through it. The
/// result has the dtype of x.
pub fn linear(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>, adapter: Option<LowRank>) -> Tensor<2> {
    let parts = Parts { biased: bias.is_some(), adapter_scale: adapter.as_ref().map(|adapter| adapter.scale as f32) };
    let dtype = x.dtype();
    let bias = widened(bias.unwrap_or_else(|| absent(&x))).into_dispatch();
    let (a, b) = adapter.map_or_else(|| (absent(&x), absent(&x)), |adapter| (adapter.a, adapter.b));
    // a frozen weight in bf16 is not widened as a whole: the graph would hold it in both
    let weight = if weight.is_tracked() { widened(weight) } else { weight };
    let (x, weight, a, b) = (widened(x).into_dispatch(), weight.into_dispatch(), widened(a).into_dispatch(), widened(b).into_dispatch());
    cast(Tensor::from_dispatch(<Dispatch as LinearOps>::adapted_linear(x, weight, bias, a, b, parts)), dtype)
}

/// What the operation is told beside the tensors; an absent one is any tensor.
#[derive(Debug, Clone, Copy)]
pub struct Parts {
    pub biased: bool,
    /// The scale of the adapter, if there is one.
    pub adapter_scale: Option<f32>,
}

#[backend_extension(Flex, Autodiff)]
pub trait LinearOps: Backend {
    fn adapted_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        parts: Parts,
    ) -> FloatTensor<Self>;
}

impl LinearOps for Flex {
    fn adapted_linear(x: FlexTensor, weight: FlexTensor, bias: FlexTensor, a: FlexTensor, b: FlexTensor, parts: Parts) -> FlexTensor {
        Layer::new([x, weight, bias, a, b], parts).forward().0
    }
}

impl<C: CheckpointStrategy> LinearOps for Autodiff<Flex, C> {
    fn adapted_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        parts: Parts,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), bias.node(), a.node(), b.node()];
        let needs_x = weight.is_tracked() || a.is_tracked();
        let layer = Layer::new([x, weight, bias, a, b].map(|t| t.into_primitive()), parts);
        let (y, low) = layer.forward();
        match LinearBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((if needs_x { layer } else { Layer { x: None, ..layer } }, low), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

/// The inputs of the operation.
#[derive(Debug, Clone)]
struct Layer {
    /// [rows, in]; none where backward does without.
    x: Option<FlexTensor>,
    rows: usize,
    /// [out, in], f32 or bf16
    weight: FlexTensor,
    /// `[out]`
    bias: Option<FlexTensor>,
    /// A [rank, in] and B [out, rank]
    low_rank: Option<(FlexTensor, FlexTensor)>,
    scale: f32,
}

#[derive(Debug)]
struct LinearBackward;

impl Backward<Flex, 5> for LinearBackward {
    /// The layer and x A^T [rows, rank].
    type State = (Layer, Vec<f32>);

    fn backward(self, ops: Ops<Self::State, 5>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [of_x, of_weight, of_bias, of_a, of_b] = ops.parents;
        let gradient = grads.consume::<Flex>(&ops.node).to_contiguous();
        let (layer, low) = ops.state;
        let g = floats(&gradient);
        let [out, inputs] = dims(&layer.weight);
        if let Some(node) = of_weight {
            grads.register::<Flex>(node.id, tensor(layer.weight_gradient(g), [out, inputs]));
        }
        if let Some(node) = of_bias {
            grads.register::<Flex>(node.id, tensor(column_sums(g, out), [out]));
        }
        if let Some(node) = of_b {
            grads.register::<Flex>(node.id, tensor(layer.b_gradient(g, &low), [out, low.len() / layer.rows]));
        }
        if of_x.is_some() || of_a.is_some() {
            let (dx, low_gradient) = layer.input_gradient(g);
            if let Some(node) = of_a {
                let (da, rank) = layer.a_gradient(&low_gradient);
                grads.register::<Flex>(node.id, tensor(da, [rank, inputs]));
            }
            of_x.inspect(|node| grads.register::<Flex>(node.id, tensor(dx, [layer.rows, inputs])));
        }
    }
}

impl Layer {
    fn new(inputs: [FlexTensor; 5], parts: Parts) -> Self {
        let [x, weight, bias, a, b] = inputs.map(|t| t.to_contiguous());
        let (bias, low_rank) = (parts.biased.then_some(bias), parts.adapter_scale.map(|_| (a, b)));
        Self { rows: dims::<2>(&x)[0], x: Some(x), weight, bias, low_rank, scale: parts.adapter_scale.unwrap_or(0.0) }
    }

    fn x(&self) -> &[f32] {
        floats(self.x.as_ref().expect("kept where a gradient needs it"))
    }

    fn packed_weight(&self, size: [usize; 2], strides: [usize; 2]) -> Packed {
        match self.weight.as_slice::<bf16>() {
            Some(weight) => Packed::new(weight, size, strides),
            None => Packed::new(floats(&self.weight), size, strides),
        }
    }

    /// y [rows, out] and x A^T [rows, rank].
    fn forward(&self) -> (FlexTensor, Vec<f32>) {
        let (rows, [out, inputs]) = (self.rows, dims(&self.weight));
        let weight = self.packed_weight([inputs, out], [1, inputs]);
        let start = self.bias.as_ref().map_or(Start::Zero, |bias| Start::Row(floats(bias)));
        let low_rank = self.low_rank.as_ref().map(|(a, b)| {
            let rank = dims::<2>(a)[0];
            let a = Packed::new(floats(a), [inputs, rank], [1, inputs]);
            let b = Packed::new(&scaled(floats(b), self.scale), [rank, out], [1, rank]);
            Bypass { down: a, up: b, rank }
        });
        let (y, low) = multiply_with_bypass([rows, out, inputs], self.x(), &weight, start, low_rank.as_ref());
        (tensor(y, [rows, out]), low)
    }

    /// ```text
    /// dx = g W + h A,   h = scale g B
    /// ```
    ///
    /// dx [rows, in] and h [rows, rank].
    fn input_gradient(&self, g: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (rows, [out, inputs]) = (self.rows, dims(&self.weight));
        let weight = self.packed_weight([out, inputs], [inputs, 1]);
        let low_rank = self.low_rank.as_ref().map(|(a, b)| {
            let rank = dims::<2>(a)[0];
            let a = Packed::new(floats(a), [rank, inputs], [inputs, 1]);
            let b = Packed::new(&scaled(floats(b), self.scale), [out, rank], [rank, 1]);
            Bypass { down: b, up: a, rank }
        });
        multiply_with_bypass([rows, inputs, out], g, &weight, Start::Zero, low_rank.as_ref())
    }

    /// dW = g^T x
    fn weight_gradient(&self, g: &[f32]) -> Vec<f32> {
        outer_product(g, self.x(), self.rows)
    }

    /// dA [rank, in] = h^T x, and the rank
    fn a_gradient(&self, low_gradient: &[f32]) -> (Vec<f32>, usize) {
        (outer_product(low_gradient, self.x(), self.rows), low_gradient.len() / self.rows)
    }

    /// dB [out, rank] = scale g^T (x A^T)
    fn b_gradient(&self, g: &[f32], low: &[f32]) -> Vec<f32> {
        let rows = self.rows;
        let (out, rank) = (g.len() / rows, low.len() / rows);
        let transposed = outer_product(low, g, rows);
        (0..out * rank).map(|i| self.scale * transposed[i % rank * out + i / rank]).collect()
    }
}

fn scaled(x: &[f32], scale: f32) -> Vec<f32> {
    x.iter().map(|x| scale * x).collect()
}

/// The product of left [rows, m] and right [rows, n] over the rows: [m, n].
fn outer_product(left: &[f32], right: &[f32], rows: usize) -> Vec<f32> {
    let (m, n) = (left.len() / rows, right.len() / rows);
    let packed;
    let rhs = if n % PANEL == 0 {
        Rhs::rows(right, n, n)
    } else {
        packed = Packed::new(right, [rows, n], [n, 1]);
        packed.rhs()
    };
    multiply_parallel([m, n, rows], Lhs::transposed(left, m), rhs, Start::Zero)
}

/// Sums of the columns of g [rows, width].
fn column_sums(g: &[f32], width: usize) -> Vec<f32> {
    let rows = g.len() / width;
    let sum = |block: std::ops::Range<usize>, _: &mut [f32], sums: &mut [f32]| {
        vectorized(|| g[block.start * width..block.end * width].chunks_exact(width).for_each(|g| add_to(sums, g)));
    };
    map_and_sum_rows(rows, 0, [rows.max(2), width], sum).1
}

/// A second way from input to output through `rank` features.
struct Bypass {
    /// [depth, rank]
    down: Packed,
    /// [rank, columns]
    up: Packed,
    rank: usize,
}

/// `x weight + start + (x down) up` and `x down`, where x is [rows, depth].
fn multiply_with_bypass(
    [rows, columns, depth]: [usize; 3],
    x: &[f32],
    weight: &Packed,
    start: Start,
    bypass: Option<&Bypass>,
) -> (Vec<f32>, Vec<f32>) {
    let Some(Bypass { down, up, rank }) = bypass else {
        return (multiply_parallel([rows, columns, depth], Lhs::rows(x, depth), weight.rhs(), start), Vec::new());
    };
    let (mut y, mut low) = (Vec::with_capacity(rows * columns), Vec::with_capacity(rows * rank));
    let y_tasks = y.spare_capacity_mut()[..rows * columns].par_chunks_mut(TASK_ROWS * columns);
    let low_tasks = low.spare_capacity_mut()[..rows * rank].par_chunks_mut(TASK_ROWS * rank);
    y_tasks.zip(low_tasks).enumerate().for_each(|(i, (y, low))| {
        let rows = y.len() / columns;
        let x = Lhs::rows(&x[i * TASK_ROWS * depth..], depth);
        let low = multiply_new([rows, *rank, depth], x, down.rhs(), Start::Zero, low);
        let y = multiply_new([rows, columns, depth], x, weight.rhs(), start, y);
        multiply([rows, columns, *rank], Lhs::rows(low, *rank), up.rhs(), Start::Existing, y, columns);
    });
    // SAFETY: the chunks cover both, and each has been initialised.
    unsafe {
        y.set_len(rows * columns);
        low.set_len(rows * rank);
    }
    (y, low)
}
