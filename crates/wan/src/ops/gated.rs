//! The gated residual sum.

// The engine's macro writes code without documentation.
#![allow(missing_docs)]

use super::norm::group;
use super::rows::{map_and_sum_rows, map_rows, vectorized};
use super::{dims, floats, tensor, widened};
use crate::layers::cast;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

/// x and h [B, L, D], gate [B, S, D] with S = 1 or L -> [B, L, D].
///
/// ```text
/// y = x + gate h
/// ```
pub fn gated_sum(x: Tensor<3>, h: Tensor<3>, gate: Tensor<3>) -> Tensor<3> {
    let dtype = x.dtype();
    let [x, h, gate] = [x, h, gate].map(|t| widened(t).into_dispatch());
    cast(Tensor::from_dispatch(<Dispatch as GatedOps>::gated_sum(x, h, gate)), dtype)
}

#[backend_extension(Flex, Autodiff)]
pub trait GatedOps: Backend {
    fn gated_sum(x: FloatTensor<Self>, h: FloatTensor<Self>, gate: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl GatedOps for Flex {
    fn gated_sum(x: FlexTensor, h: FlexTensor, gate: FlexTensor) -> FlexTensor {
        let (x, h, gate) = (x.to_contiguous(), h.to_contiguous(), gate.to_contiguous());
        let shape @ [b, l, d] = dims(&x);
        let group = group(shape, dims(&gate));
        let (x, h, gate) = (floats(&x), floats(&h), floats(&gate));
        let y = map_rows(b * l, d, |rows, out| {
            vectorized(
                #[inline(always)]
                || {
                    for (row, y) in rows.zip(out.chunks_exact_mut(d)) {
                        let (x, h, gate) = (&x[row * d..][..d], &h[row * d..][..d], &gate[row / group * d..][..d]);
                        for i in 0..d {
                            y[i] = x[i] + h[i] * gate[i];
                        }
                    }
                },
            );
        });
        tensor(y, shape)
    }
}

impl<C: CheckpointStrategy> GatedOps for Autodiff<Flex, C> {
    fn gated_sum(x: FloatTensor<Self>, h: FloatTensor<Self>, gate: FloatTensor<Self>) -> FloatTensor<Self> {
        let nodes = [x.node(), h.node(), gate.node()];
        let needs_h = gate.is_tracked();
        let [x, h, gate] = [x, h, gate].map(|t| t.into_primitive().to_contiguous());
        let y = Flex::gated_sum(x, h.clone(), gate.clone());
        match GatedBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((needs_h.then_some(h), gate), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Debug)]
struct GatedBackward;

impl Backward<Flex, 3> for GatedBackward {
    /// h, if the gate has a gradient, and gate
    type State = (Option<FlexTensor>, FlexTensor);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [of_x, of_h, of_gate] = ops.parents;
        let gradient = grads.consume::<Flex>(&ops.node).to_contiguous();
        let (h, gate) = ops.state;
        if of_h.is_some() || of_gate.is_some() {
            // without the sums h is not looked at
            let (dh, dgate) = gradients(h.as_ref().unwrap_or(&gradient), &gate, &gradient, of_gate.is_some());
            of_h.inspect(|node| grads.register::<Flex>(node.id, tensor(dh, dims::<3>(&gradient))));
            of_gate.inspect(|node| grads.register::<Flex>(node.id, tensor(dgate, dims::<3>(&gate))));
        }
        of_x.inspect(|node| grads.register::<Flex>(node.id, gradient));
    }
}

/// ```text
/// dh = g gate     dgate = sum g h
/// ```
fn gradients(h: &FlexTensor, gate: &FlexTensor, gradient: &FlexTensor, sums: bool) -> (Vec<f32>, Vec<f32>) {
    let shape @ [b, l, d] = dims(h);
    let group = group(shape, dims(gate));
    let (h, gate, g) = (floats(h), floats(gate), floats(gradient));
    let sum_width = if sums { d } else { 0 };
    map_and_sum_rows(b * l, d, [group, sum_width], |rows, out, sums| {
        vectorized(
            #[inline(always)]
            || {
                let first = rows.start;
                for (row, dh) in rows.zip(out.chunks_exact_mut(d)) {
                    let (h, g, gate) = (&h[row * d..][..d], &g[row * d..][..d], &gate[row / group * d..][..d]);
                    let place = if group == 1 { row - first } else { 0 };
                    for ((sum, g), h) in sums[place * sum_width..][..sum_width].iter_mut().zip(g).zip(h) {
                        *sum += g * h;
                    }
                    for i in 0..d {
                        dh[i] = g[i] * gate[i];
                    }
                }
            },
        );
    })
}
