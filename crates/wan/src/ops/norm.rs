//! Layer norm with what follows it: a modulation per sample or per token, or an affine part.
//!
//! Legend: `B` batch, `L` tokens, `D` features, `S` = 1, or L when every token has its own modulation.

// The engine's macro writes code without documentation.
#![allow(missing_docs)]

use super::rows::{map_and_sum_rows, map_rows, sum, sum_2, vectorized};
use super::{dims, floats, tensor, widened};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

/// Numbers of a [`modulated_norm`].
#[derive(Debug, Clone, Copy)]
pub struct Modulation {
    /// Added to the scale: 1 for a modulation, 0 for an affine norm.
    pub offset: f64,
    pub eps: f64,
}

/// x [B, L, D], scale and shift [B, S, D] or [1, 1, D] -> [B, L, D], in f32.
///
/// ```text
/// y = n (offset + scale) + shift,   n = (x - mean) / sqrt(var + eps)
/// ```
///
/// Backward keeps x and scale.
pub fn modulated_norm(x: Tensor<3>, scale: Tensor<3>, shift: Tensor<3>, modulation: Modulation) -> Tensor<3> {
    let Modulation { offset, eps } = modulation;
    let [x, scale, shift] = [x, scale, shift].map(|t| widened(t).into_dispatch());
    Tensor::from_dispatch(<Dispatch as NormOps>::fused_norm(x, scale, shift, offset as f32, eps as f32))
}

#[backend_extension(Flex, Autodiff)]
pub trait NormOps: Backend {
    fn fused_norm(x: FloatTensor<Self>, scale: FloatTensor<Self>, shift: FloatTensor<Self>, offset: f32, eps: f32) -> FloatTensor<Self>;
}

impl NormOps for Flex {
    fn fused_norm(x: FlexTensor, scale: FlexTensor, shift: FlexTensor, offset: f32, eps: f32) -> FlexTensor {
        forward(&x.to_contiguous(), &scale.to_contiguous(), &shift.to_contiguous(), offset, eps)
    }
}

impl<C: CheckpointStrategy> NormOps for Autodiff<Flex, C> {
    fn fused_norm(x: FloatTensor<Self>, scale: FloatTensor<Self>, shift: FloatTensor<Self>, offset: f32, eps: f32) -> FloatTensor<Self> {
        let nodes = [x.node(), scale.node(), shift.node()];
        let [x, scale, shift] = [x, scale, shift].map(|t| t.into_primitive().to_contiguous());
        let y = forward(&x, &scale, &shift, offset, eps);
        match NormBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(Saved { x, scale, offset, eps }, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

/// Rows of x that share a row of the modulation.
pub fn group(x: [usize; 3], modulation: [usize; 3]) -> usize {
    let ([b, l, d], [mb, s, md]) = (x, modulation);
    assert_eq!(d, md, "features of the modulation");
    match (mb == b, s == l, mb * s) {
        (true, true, _) => 1,
        (_, _, 1) => (b * l).max(1),
        (true, _, _) if s == 1 => l,
        _ => panic!("modulation {modulation:?} for {x:?}"),
    }
}

fn forward(x: &FlexTensor, scale: &FlexTensor, shift: &FlexTensor, offset: f32, eps: f32) -> FlexTensor {
    let shape @ [b, l, d] = dims(x);
    let group = group(shape, dims(scale));
    let (x, scale, shift) = (floats(x), floats(scale), floats(shift));
    let y = map_rows(b * l, d, |rows, out| {
        vectorized(
            #[inline(always)]
            || {
                for (row, y) in rows.zip(out.chunks_exact_mut(d)) {
                    let at = row / group * d;
                    let (x, scale, shift) = (&x[row * d..][..d], &scale[at..][..d], &shift[at..][..d]);
                    let (mean, inverse) = moments(x, eps);
                    for i in 0..d {
                        y[i] = (x[i] - mean) * inverse * (offset + scale[i]) + shift[i];
                    }
                }
            },
        );
    });
    tensor(y, shape)
}

/// The mean and 1 / sqrt(var + eps) of a row.
#[inline(always)]
fn moments(x: &[f32], eps: f32) -> (f32, f32) {
    let n = x.len() as f32;
    let mean = sum(x, |x| x) / n;
    let var = sum(x, |x| (x - mean) * (x - mean)) / n;
    (mean, 1.0 / (var + eps).sqrt())
}

#[derive(Debug, Clone)]
struct Saved {
    x: FlexTensor,
    scale: FlexTensor,
    offset: f32,
    eps: f32,
}

#[derive(Debug)]
struct NormBackward;

impl Backward<Flex, 3> for NormBackward {
    type State = Saved;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [of_x, of_scale, of_shift] = ops.parents;
        let gradient = grads.consume::<Flex>(&ops.node).to_contiguous();
        let (x, scale) = (dims::<3>(&ops.state.x), dims::<3>(&ops.state.scale));
        let (dx, sums) = gradients(&ops.state, &gradient, of_scale.is_some() || of_shift.is_some());
        let half = |i: usize| sums.chunks_exact(x[2]).skip(i).step_by(2).flatten().copied().collect::<Vec<_>>();
        of_scale.inspect(|node| grads.register::<Flex>(node.id, tensor(half(0), scale)));
        of_shift.inspect(|node| grads.register::<Flex>(node.id, tensor(half(1), scale)));
        of_x.inspect(|node| grads.register::<Flex>(node.id, tensor(dx, x)));
    }
}

/// ```text
/// h = g (offset + scale)     dx = (h - mean(h) - n mean(h n)) / sqrt(var + eps)
/// dscale = sum g n           dshift = sum g
/// ```
///
/// dx [B, L, D] and, per row of the modulation, dscale and dshift [.., 2, D].
fn gradients(saved: &Saved, gradient: &FlexTensor, sums: bool) -> (Vec<f32>, Vec<f32>) {
    let shape @ [b, l, d] = dims(&saved.x);
    let group = group(shape, dims(&saved.scale));
    let (x, scale, g) = (floats(&saved.x), floats(&saved.scale), floats(gradient));
    let sum_width = if sums { 2 * d } else { 0 };
    map_and_sum_rows(b * l, d, [group, sum_width], |rows, out, sums| {
        vectorized(
            #[inline(always)]
            || {
                let first = rows.start;
                for (row, dx) in rows.zip(out.chunks_exact_mut(d)) {
                    let (x, g) = (&x[row * d..][..d], &g[row * d..][..d]);
                    let (mean, inverse) = moments(x, saved.eps);
                    if sum_width > 0 {
                        let place = if group == 1 { row - first } else { 0 };
                        add_products(&mut sums[place * sum_width..][..sum_width], x, g, (mean, inverse));
                    }
                    input_gradient(dx, x, g, &scale[row / group * d..][..d], (mean, inverse, saved.offset));
                }
            },
        );
    })
}

#[inline(always)]
fn add_products(sums: &mut [f32], x: &[f32], g: &[f32], (mean, inverse): (f32, f32)) {
    let (dscale, dshift) = sums.split_at_mut(x.len());
    for (((dscale, dshift), x), g) in dscale.iter_mut().zip(dshift).zip(x).zip(g) {
        *dscale += g * ((x - mean) * inverse);
        *dshift += g;
    }
}

#[inline(always)]
fn input_gradient(dx: &mut [f32], x: &[f32], g: &[f32], scale: &[f32], (mean, inverse, offset): (f32, f32, f32)) {
    let d = dx.len();
    for i in 0..d {
        dx[i] = g[i] * (offset + scale[i]);
    }
    let mean_h = sum(dx, |h| h) / d as f32;
    let mean_hn = sum_2(dx, x, |h, x| h * ((x - mean) * inverse)) / d as f32;
    for i in 0..d {
        dx[i] = inverse * (dx[i] - mean_h - (x[i] - mean) * inverse * mean_hn);
    }
}
