//! The norm of queries and keys, and their rotation.

// The engine's macro writes code without documentation.
#![allow(missing_docs)]

use super::rows::{map_and_sum_rows, map_rows, sum, sum_2, vectorized};
use super::{absent, dims, floats, tensor, widened};
use crate::layers::cast;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

/// x [B, L, D], weight `[D]`, angles: cos and sin [1, L, 1, d] with every value twice, constants -> [B, L, D].
///
/// ```text
/// n = x / sqrt(mean(x^2) + eps) weight                                  over all heads together
/// (n_2i, n_2i+1) -> (n_2i cos - n_2i+1 sin,  n_2i sin + n_2i+1 cos)     within each head of d features
/// ```
///
/// Without angles only the norm. Backward keeps x.
pub fn rms_norm_rotate(x: Tensor<3>, weight: Tensor<1>, angles: Option<(Tensor<4>, Tensor<4>)>, eps: f64) -> Tensor<3> {
    let (dtype, numbers) = (x.dtype(), RotaryNorm { rotated: angles.is_some(), eps: eps as f32 });
    let (cos, sin) = angles.unwrap_or_else(|| (absent(&x), absent(&x)));
    let (x, weight) = (widened(x).into_dispatch(), widened(weight).into_dispatch());
    let y = <Dispatch as RotaryNormOps>::rotary_norm(x, weight, cos.into_dispatch(), sin.into_dispatch(), numbers);
    cast(Tensor::from_dispatch(y), dtype)
}

/// What the operation is told beside the tensors.
#[derive(Debug, Clone, Copy)]
pub struct RotaryNorm {
    /// Whether there are angles; else they are any tensors.
    pub rotated: bool,
    pub eps: f32,
}

#[backend_extension(Flex, Autodiff)]
pub trait RotaryNormOps: Backend {
    fn rotary_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        numbers: RotaryNorm,
    ) -> FloatTensor<Self>;
}

impl RotaryNormOps for Flex {
    fn rotary_norm(x: FlexTensor, weight: FlexTensor, cos: FlexTensor, sin: FlexTensor, numbers: RotaryNorm) -> FlexTensor {
        forward(&Saved::new([x, weight, cos, sin], numbers))
    }
}

impl<C: CheckpointStrategy> RotaryNormOps for Autodiff<Flex, C> {
    fn rotary_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        numbers: RotaryNorm,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node()];
        let saved = Saved::new([x, weight, cos, sin].map(|t| t.into_primitive()), numbers);
        let y = forward(&saved);
        match RotaryNormBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(saved, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Debug, Clone)]
struct Saved {
    x: FlexTensor,
    weight: FlexTensor,
    angles: Option<(FlexTensor, FlexTensor)>,
    eps: f32,
}

impl Saved {
    fn new(inputs: [FlexTensor; 4], RotaryNorm { rotated, eps }: RotaryNorm) -> Self {
        let [x, weight, cos, sin] = inputs.map(|t| t.to_contiguous());
        Self { x, weight, angles: rotated.then_some((cos, sin)), eps }
    }

    fn turn(&self) -> Option<Turn<'_>> {
        let (cos, sin) = self.angles.as_ref()?;
        let [_, tokens, _, d] = dims(cos);
        assert_eq!(tokens, dims::<3>(&self.x)[1], "tokens of the angles");
        Some(Turn { cos: floats(cos), sin: floats(sin), d, tokens })
    }
}

/// The angles of all tokens.
#[derive(Clone, Copy)]
struct Turn<'a> {
    /// [L, d]
    cos: &'a [f32],
    sin: &'a [f32],
    d: usize,
    tokens: usize,
}

impl Turn<'_> {
    /// Turns the row of a token by its angles times `direction`, 1 or -1.
    #[inline(always)]
    fn apply(&self, row: usize, values: &mut [f32], direction: f32) {
        let at = row % self.tokens * self.d;
        let (cos, sin) = (&self.cos[at..][..self.d], &self.sin[at..][..self.d]);
        for head in values.chunks_exact_mut(self.d) {
            let pairs = head.chunks_exact_mut(2).zip(cos.chunks_exact(2).zip(sin.chunks_exact(2)));
            for (pair, (cos, sin)) in pairs {
                let (a, b, sin) = (pair[0], pair[1], direction * sin[0]);
                pair[0] = a * cos[0] - b * sin;
                pair[1] = a * sin + b * cos[0];
            }
        }
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum(x, |x| x * x) / x.len() as f32 + eps).sqrt()
}

fn forward(saved: &Saved) -> FlexTensor {
    let shape @ [b, l, d] = dims(&saved.x);
    let (x, weight, turn) = (floats(&saved.x), floats(&saved.weight), saved.turn());
    let y = map_rows(b * l, d, |rows, out| {
        vectorized(
            #[inline(always)]
            || {
                for (row, y) in rows.zip(out.chunks_exact_mut(d)) {
                    let x = &x[row * d..][..d];
                    let inverse = inverse_rms(x, saved.eps);
                    for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                        *y = x * inverse * weight;
                    }
                    if let Some(turn) = turn {
                        turn.apply(row, y, 1.0);
                    }
                }
            },
        );
    });
    tensor(y, shape)
}

#[derive(Debug)]
struct RotaryNormBackward;

impl Backward<Flex, 2> for RotaryNormBackward {
    type State = Saved;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [of_x, of_weight] = ops.parents;
        let gradient = grads.consume::<Flex>(&ops.node).to_contiguous();
        let shape @ [_, _, d] = dims(&ops.state.x);
        let (dx, dweight) = gradients(&ops.state, floats(&gradient), of_weight.is_some());
        of_weight.inspect(|node| grads.register::<Flex>(node.id, tensor(dweight, [d])));
        of_x.inspect(|node| grads.register::<Flex>(node.id, tensor(dx, shape)));
    }
}

/// ```text
/// h = turn back(g)     dweight = sum h n     dx = r (h weight - n mean(h weight n)),   n = x r,   r = 1 / sqrt(mean(x^2) + eps)
/// ```
fn gradients(saved: &Saved, g: &[f32], sums: bool) -> (Vec<f32>, Vec<f32>) {
    let [b, l, d] = dims(&saved.x);
    let (x, weight, turn) = (floats(&saved.x), floats(&saved.weight), saved.turn());
    let sum_width = if sums { d } else { 0 };
    // one group: `map_and_sum_rows` takes a group of 1 as "each row its own"
    map_and_sum_rows(b * l, d, [(b * l).max(2), sum_width], |rows, out, sums| {
        vectorized(
            #[inline(always)]
            || {
                for (row, dx) in rows.zip(out.chunks_exact_mut(d)) {
                    dx.copy_from_slice(&g[row * d..][..d]);
                    if let Some(turn) = turn {
                        turn.apply(row, dx, -1.0);
                    }
                    norm_gradient(dx, sums, &x[row * d..][..d], weight, saved.eps);
                }
            },
        );
    })
}

/// From h to dx, in place; adds h n to the sums, if there are any.
#[inline(always)]
fn norm_gradient(h: &mut [f32], sums: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let inverse = inverse_rms(x, eps);
    for ((sum, h), x) in sums.iter_mut().zip(&*h).zip(x) {
        *sum += h * (x * inverse);
    }
    for (h, weight) in h.iter_mut().zip(weight) {
        *h *= weight;
    }
    let mean = sum_2(h, x, |h, x| h * (x * inverse)) / h.len() as f32;
    for (h, x) in h.iter_mut().zip(x) {
        *h = inverse * (*h - x * inverse * mean);
    }
}
