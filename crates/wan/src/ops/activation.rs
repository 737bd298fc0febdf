//! The GELU of Wan.

// The engine's macro writes code without documentation.
#![allow(missing_docs)]

use super::rows::{map_rows, sigmoid, vectorized};
use super::{floats, widened};
use crate::layers::cast;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

/// 2 sqrt(2 / pi)
const SLOPE: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;
/// Elements of a row of work.
const WIDTH: usize = 256;

/// ```text
/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(u),   u = 2 sqrt(2/pi) (x + 0.044715 x^3)
/// ```
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    cast(Tensor::from_dispatch(<Dispatch as GeluOps>::fused_gelu(widened(x).into_dispatch())), dtype)
}

#[backend_extension(Flex, Autodiff)]
pub trait GeluOps: Backend {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl GeluOps for Flex {
    fn fused_gelu(x: FlexTensor) -> FlexTensor {
        let x = x.to_contiguous();
        map_2(&x, &x, |x, _| x * sigmoid(SLOPE * (x + CUBIC * x * x * x)))
    }
}

impl<C: CheckpointStrategy> GeluOps for Autodiff<Flex, C> {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let node = x.node();
        let x = x.into_primitive();
        let y = Flex::fused_gelu(x.clone());
        match GeluBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(x, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Debug)]
struct GeluBackward;

impl Backward<Flex, 1> for GeluBackward {
    /// x
    type State = FlexTensor;

    /// ```text
    /// dx = g (s + x s (1 - s) du),   s = sigmoid(u),   du = 2 sqrt(2/pi) (1 + 3 * 0.044715 x^2)
    /// ```
    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [of_x] = ops.parents;
        let gradient = grads.consume::<Flex>(&ops.node).to_contiguous();
        let derivative = |x: f32, g: f32| {
            let s = sigmoid(SLOPE * (x + CUBIC * x * x * x));
            g * (s + x * s * (1.0 - s) * (SLOPE * (1.0 + 3.0 * CUBIC * x * x)))
        };
        if let Some(node) = of_x {
            grads.register::<Flex>(node.id, map_2(&ops.state.to_contiguous(), &gradient, derivative));
        }
    }
}

/// f(x, y) of every pair of elements.
#[inline(always)]
fn map_2(x: &FlexTensor, y: &FlexTensor, f: impl Fn(f32, f32) -> f32 + Sync) -> FlexTensor {
    let shape = x.layout().shape().clone();
    let (x, y) = (floats(x), floats(y));
    let whole = x.len() / WIDTH;
    let apply = |x: &[f32], y: &[f32], out: &mut [f32]| {
        vectorized(
            #[inline(always)]
            || {
                for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
                    *out = f(*x, *y);
                }
            },
        );
    };
    let mut out = map_rows(whole, WIDTH, |rows, out| {
        let part = rows.start * WIDTH..rows.end * WIDTH;
        apply(&x[part.clone()], &y[part], out);
    });
    out.resize(x.len(), 0.0);
    apply(&x[whole * WIDTH..], &y[whole * WIDTH..], &mut out[whole * WIDTH..]);
    FlexTensor::from_data(burn::tensor::TensorData::new(out, shape))
}
