//! The GELU of Wan.

// The engine's macro writes code without documentation.
#![allow(missing_docs)]

#[cfg(any(feature = "gpu", test))]
use super::as_dtype;
use super::rows::{map_rows, sigmoid, vectorized};
use super::{floats, widened};
use crate::device::is_cpu;
use crate::layers::cast;
#[cfg(feature = "gpu")]
use burn::backend::Cube;
#[cfg(any(feature = "gpu", test))]
use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
#[cfg(any(feature = "gpu", test))]
use burn::tensor::DType;
use burn::tensor::Tensor;

/// 2 sqrt(2 / pi)
const SLOPE: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;
/// Elements of a row of work.
const WIDTH: usize = 256;

/// The GELU of Wan and UMT5, on any device; computed in f32. Backward keeps x as it is, and nothing that is as wide in f32.
///
/// ```text
/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(u),   u = 2 sqrt(2/pi) (x + 0.044715 x^3)
/// dx = g (s + x s (1 - s) du),   s = sigmoid(u),   du = 2 sqrt(2/pi) (1 + 3 * 0.044715 x^2)
/// ```
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    let x = if is_cpu(&x.device()) { widened(x) } else { x };
    cast(Tensor::from_dispatch(<Dispatch as GeluOps>::fused_gelu(x.into_dispatch())), dtype)
}

#[backend_extension(Flex, Cube: cfg(feature = "gpu"), Autodiff)]
pub trait GeluOps: Backend {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The derivative, times the gradient of the output.
pub trait GeluGradient: Backend {
    fn gelu_gradient(x: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl GeluOps for Flex {
    fn fused_gelu(x: FlexTensor) -> FlexTensor {
        let x = x.to_contiguous();
        map_2(&x, &x, |x, _| x * sigmoid(SLOPE * (x + CUBIC * x * x * x)))
    }
}

impl GeluGradient for Flex {
    fn gelu_gradient(x: FlexTensor, gradient: FlexTensor) -> FlexTensor {
        let derivative = |x: f32, g: f32| {
            let s = sigmoid(SLOPE * (x + CUBIC * x * x * x));
            g * (s + x * s * (1.0 - s) * (SLOPE * (1.0 + 3.0 * CUBIC * x * x)))
        };
        map_2(&x.to_contiguous(), &gradient.to_contiguous(), derivative)
    }
}

#[cfg(feature = "gpu")]
impl GeluOps for Cube {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        composed::<Self>(x)
    }
}

#[cfg(feature = "gpu")]
impl GeluGradient for Cube {
    fn gelu_gradient(x: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        composed_gradient::<Self>(x, gradient)
    }
}

impl<B: GeluOps + GeluGradient, C: CheckpointStrategy> GeluOps for Autodiff<B, C> {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let node = x.node();
        let x = x.into_primitive();
        let y = B::fused_gelu(x.clone());
        match GeluBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(x, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Debug)]
struct GeluBackward;

impl<B: GeluGradient> Backward<B, 1> for GeluBackward {
    /// x
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [of_x] = ops.parents;
        let gradient = grads.consume::<B>(&ops.node);
        if let Some(node) = of_x {
            grads.register::<B>(node.id, B::gelu_gradient(ops.state, gradient));
        }
    }
}

/// From the engine's operations.
#[cfg(any(feature = "gpu", test))]
fn composed<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype();
    let x = as_dtype::<B>(x, DType::F32);
    as_dtype::<B>(B::float_mul(x.clone(), composed_sigmoid::<B>(x)), dtype)
}

#[cfg(any(feature = "gpu", test))]
fn composed_gradient<B: Backend>(x: FloatTensor<B>, gradient: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype();
    let (x, gradient) = (as_dtype::<B>(x, DType::F32), as_dtype::<B>(gradient, DType::F32));
    let s = composed_sigmoid::<B>(x.clone());
    // s (1 - s) = s - s^2
    let slope = B::float_sub(s.clone(), B::float_mul(s.clone(), s.clone()));
    let square = B::float_mul(x.clone(), x.clone());
    let du = B::float_add_scalar(B::float_mul_scalar(square, (3.0 * SLOPE * CUBIC).into()), SLOPE.into());
    let derivative = B::float_add(s, B::float_mul(x, B::float_mul(slope, du)));
    as_dtype::<B>(B::float_mul(gradient, derivative), dtype)
}

/// sigmoid(u) of x in f32.
#[cfg(any(feature = "gpu", test))]
fn composed_sigmoid<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let square = B::float_mul(x.clone(), x.clone());
    let u = B::float_mul(x, B::float_add_scalar(B::float_mul_scalar(square, (SLOPE * CUBIC).into()), SLOPE.into()));
    B::sigmoid(u)
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

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};
    use grpo::random::{Key, Purpose};

    #[test]
    fn the_composed_form_is_the_same_function_with_the_same_derivative() {
        let normals = |prompt| Key { seed: 1, iteration: 0, prompt, rollout: 0, purpose: Purpose::Data }.normals(3000);
        let values = |index, scale| normals(index).into_iter().map(|value| scale * value).collect::<Vec<f32>>();
        let tensor = |values| Tensor::<1>::from_data(TensorData::new(values, [3000]), &Device::flex());
        let flex = |x: Tensor<1>| x.try_into_primitive::<Flex>().unwrap_or_else(|_| unreachable!("made on the CPU"));
        let (x, g) = (flex(tensor(values(1, 3.0))), flex(tensor(values(2, 1.0))));
        let pairs = [
            (composed::<Flex>(x.clone()), Flex::fused_gelu(x.clone())),
            (composed_gradient::<Flex>(x.clone(), g.clone()), Flex::gelu_gradient(x, g)),
        ];
        for (ours, expected) in pairs.map(|(a, b)| (floats(&a).to_vec(), floats(&b).to_vec())) {
            let worst = ours.iter().zip(&expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(worst < 4e-6, "{worst:e}");
        }
    }
}
