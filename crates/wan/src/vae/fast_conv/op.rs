//! The convolution as an operation of the tensor engine, with its gradient.
//!
//! Legend: `B` batch, `C` input channels, `O` output channels, `F` frames, `H` height, `W` width; primes: of the output.

// The engine's macro writes code without documentation.
#![allow(missing_docs)]

use super::shape::ConvShape;
use super::sweep::{Input, convolve, input_gradient};
use super::weight_gradient::weight_gradient;
use crate::ops::{dims, floats, tensor};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::{DType, Tensor};

/// What a fused convolution computes, apart from the tensors.
#[derive(Debug, Clone, Copy)]
pub struct FusedConv {
    /// Step between outputs, in the order time, height, width.
    pub stride: [usize; 3],
    /// Zeros (before, after) each axis.
    pub padding: [(usize, usize); 3],
    /// Every value is repeated this many times in height and width before the convolution.
    pub enlarge: usize,
    /// Whether the input is normed over the channels and activated by SiLU.
    pub normed: bool,
    /// Whether a residual is added to the output.
    pub residual: bool,
}

impl FusedConv {
    fn shape(&self, x: [usize; 5], weight: [usize; 5]) -> ConvShape {
        let [batch, inputs, frames, height, width] = x;
        let [outputs, _, kt, kh, kw] = weight;
        let (size, kernel) = ([frames, height, width], [kt, kh, kw]);
        let Self { stride, padding, enlarge, .. } = *self;
        ConvShape { batch, inputs, outputs, size, enlarge, kernel, stride, padding }
    }
}

/// Whether [`fused_conv3d`] can be used: the CPU engine, f32, a padding smaller than the kernel.
pub fn supports(x: &Tensor<5>, weight: &Tensor<5>, conv: &FusedConv) -> bool {
    let on_cpu = crate::device::is_cpu(&x.device());
    let single = x.dtype() == DType::F32 && weight.dtype() == DType::F32;
    on_cpu && single && conv.shape(x.dims(), weight.dims()).is_supported()
}

/// `conv(a) + residual`, where `a` is `x` or `silu(gain x / ||x||)`.
///
/// x [B, C, F, H, W], weight [O, C, kt, kh, kw], bias `[O]`, gain `[C]`, residual [B, O, F', H', W'] -> [B, O, F', H', W']
///
/// # Panics
/// If [`supports`] is false.
pub fn fused_conv3d(
    x: Tensor<5>,
    weight: Tensor<5>,
    bias: Tensor<1>,
    gain: Option<Tensor<1>>,
    residual: Option<Tensor<5>>,
    conv: FusedConv,
) -> Tensor<5> {
    assert_eq!((gain.is_some(), residual.is_some()), (conv.normed, conv.residual), "inputs that are announced");
    let device = x.device().inner();
    let gain = gain.unwrap_or_else(|| Tensor::zeros([1], &device));
    let residual = residual.unwrap_or_else(|| Tensor::zeros([1; 5], &device));
    let (x, weight, bias) = (x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
    let (gain, residual) = (gain.into_dispatch(), residual.into_dispatch());
    Tensor::from_dispatch(<Dispatch as FusedConvOps>::fused_conv3d(x, weight, bias, gain, residual, conv))
}

/// The operation; an absent gain or residual is any tensor.
#[backend_extension(Flex, Autodiff)]
pub trait FusedConvOps: Backend {
    fn fused_conv3d(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        conv: FusedConv,
    ) -> FloatTensor<Self>;
}

impl FusedConvOps for Flex {
    fn fused_conv3d(
        x: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        gain: FlexTensor,
        residual: FlexTensor,
        conv: FusedConv,
    ) -> FlexTensor {
        let shape = conv.shape(dims(&x), dims(&weight));
        let (x, weight, bias) = (x.to_contiguous(), weight.to_contiguous(), bias.to_contiguous());
        let (gain, residual) = (gain.to_contiguous(), residual.to_contiguous());
        let input = Input { values: floats(&x), gain: conv.normed.then(|| floats(&gain)) };
        let residual = conv.residual.then(|| floats(&residual));
        let out = convolve(&shape, input, floats(&weight), floats(&bias), residual);
        let [frames, height, width] = shape.output_size();
        tensor(out, [shape.batch, shape.outputs, frames, height, width])
    }
}

impl<C: CheckpointStrategy> FusedConvOps for Autodiff<Flex, C> {
    fn fused_conv3d(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        conv: FusedConv,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), bias.node(), gain.node(), residual.node()];
        let [x, weight, bias, gain, residual] = [x, weight, bias, gain, residual].map(|t| t.into_primitive());
        let (kept_x, kept_weight, kept_gain) = (x.clone(), weight.clone(), gain.clone());
        let out = Flex::fused_conv3d(x, weight, bias, gain, residual, conv);
        match FusedConvBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((kept_x, kept_weight, kept_gain, conv), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

#[derive(Debug)]
struct FusedConvBackward;

impl Backward<Flex, 5> for FusedConvBackward {
    /// x, weight, gain
    type State = (FlexTensor, FlexTensor, FlexTensor, FusedConv);

    fn backward(self, ops: Ops<Self::State, 5>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [of_x, of_weight, of_bias, of_gain, of_residual] = ops.parents;
        let gradient = grads.consume::<Flex>(&ops.node);
        let (x, weight, gain, conv) = ops.state;
        let (x_dims, weight_dims) = (dims(&x), dims(&weight));
        let shape = conv.shape(x_dims, weight_dims);
        if let Some(node) = of_residual.filter(|_| conv.residual) {
            grads.register::<Flex>(node.id, gradient.clone());
        }
        let (x, weight, gain) = (x.to_contiguous(), weight.to_contiguous(), gain.to_contiguous());
        let gradient = gradient.to_contiguous();
        let input = Input { values: floats(&x), gain: conv.normed.then(|| floats(&gain)) };
        if of_weight.is_some() || of_bias.is_some() {
            let (weight, bias) = weight_gradient(&shape, input, floats(&gradient));
            of_weight.inspect(|node| grads.register::<Flex>(node.id, tensor(weight, weight_dims)));
            of_bias.inspect(|node| grads.register::<Flex>(node.id, tensor(bias, [shape.outputs])));
        }
        let of_gain = of_gain.filter(|_| conv.normed);
        if of_x.is_some() || of_gain.is_some() {
            let (x, gain) = input_gradient(&shape, input, floats(&weight), floats(&gradient));
            of_x.inspect(|node| grads.register::<Flex>(node.id, tensor(x, x_dims)));
            of_gain.inspect(|node| grads.register::<Flex>(node.id, tensor(gain, [shape.inputs])));
        }
    }
}
