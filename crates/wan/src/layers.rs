//! Linear layers (with an optional adapter) and norms, as PyTorch defines them.
//!
//! Legend: `B` batch, `L` tokens, `D` features.

use crate::ops::{self, LowRank, Modulation};
use crate::param::Param;
use crate::weights::{Init, Weights};
use burn::tensor::{DType, Tensor};
use std::sync::{Arc, PoisonError, RwLock};

/// A low-rank adapter of one linear layer.
///
/// ```text
/// y = W x + scale B A x,   scale = alpha / rank
/// ```
///
/// A [rank, in], B [out, rank], always f32 (Hu et al. 2021, the layout of PEFT).
#[derive(Debug, Clone)]
pub struct Adapter {
    /// [rank, in]
    pub a: Param<2>,
    /// [out, rank]
    pub b: Param<2>,
    /// alpha / rank
    pub scale: f64,
}

type AdapterCell = Arc<RwLock<Option<Adapter>>>;

/// A linear layer by name, where an [`Adapter`] can be put.
#[derive(Debug, Clone)]
pub struct LinearSite {
    /// Name of the layer, for instance `blocks.0.attn1.to_q`.
    pub name: String,
    /// Input features.
    pub in_features: usize,
    /// Output features.
    pub out_features: usize,
    /// What the inputs are of a layer that is stored as a convolution: [c, kt, kh, kw]; of all others `[in]`.
    pub kernel: Vec<usize>,
    cell: AdapterCell,
}

impl LinearSite {
    /// Shapes of A and B as files have them: [rank, in] and [out, rank], of a convolution [rank, c, kt, kh, kw] and [out, rank, 1, 1, 1].
    pub fn adapter_shapes(&self, rank: usize) -> [Vec<usize>; 2] {
        let ones = std::iter::repeat_n(1, self.kernel.len() - 1);
        [[&[rank], self.kernel.as_slice()].concat(), [self.out_features, rank].into_iter().chain(ones).collect()]
    }

    /// Puts an adapter on the layer, or takes it off.
    pub fn set_adapter(&self, adapter: Option<Adapter>) {
        *self.cell.write().unwrap_or_else(PoisonError::into_inner) = adapter;
    }
}

/// `y = W x + b`, with W [out, in] as in the file, in the dtype of x.
#[derive(Debug)]
pub struct Linear {
    weight: Param<2>,
    bias: Option<Param<1>>,
    adapter: AdapterCell,
}

impl Linear {
    /// A layer with bias.
    pub fn new(w: &Weights, in_features: usize, out_features: usize) -> Self {
        let bias = w.param("bias", [out_features], Init::Zeros);
        Self::build(w, w.param("weight", [out_features, in_features], Init::FanIn), Some(bias))
    }

    /// A layer with bias whose weights stay f32 in a bf16 model.
    pub fn new_f32(w: &Weights, in_features: usize, out_features: usize) -> Self {
        let bias = w.param_f32("bias", [out_features], Init::Zeros);
        Self::build(w, w.param_f32("weight", [out_features, in_features], Init::FanIn), Some(bias))
    }

    /// A layer without bias; `init` because T5 has its own scales.
    pub fn new_without_bias(w: &Weights, in_features: usize, out_features: usize, init: Init) -> Self {
        Self::build(w, w.param("weight", [out_features, in_features], init), None)
    }

    /// A layer whose weight is stored as that of a convolution [out, c, kt, kh, kw] with stride = kernel.
    pub fn from_conv(w: &Weights, [out, c, kt, kh, kw]: [usize; 5]) -> Self {
        let bias = w.param("bias", [out], Init::Zeros);
        let weight = w.param("weight", [out, c, kt, kh, kw], Init::FanIn).flatten_rows();
        Self::of_kernel(w, weight, Some(bias), vec![c, kt, kh, kw])
    }

    /// The same without bias, of a convolution of images [out, c, kh, kw].
    pub fn from_image_conv(w: &Weights, [out, c, kh, kw]: [usize; 4]) -> Self {
        let weight = w.param("weight", [out, c, kh, kw], Init::FanIn).flatten_rows();
        Self::of_kernel(w, weight, None, vec![c, kh, kw])
    }

    fn build(w: &Weights, weight: Param<2>, bias: Option<Param<1>>) -> Self {
        let inputs = weight.shape()[1];
        Self::of_kernel(w, weight, bias, vec![inputs])
    }

    fn of_kernel(w: &Weights, weight: Param<2>, bias: Option<Param<1>>, kernel: Vec<usize>) -> Self {
        let adapter = AdapterCell::default();
        let [out_features, in_features] = weight.shape();
        w.register_linear(LinearSite { name: w.prefix().to_owned(), in_features, out_features, kernel, cell: adapter.clone() });
        Self { weight, bias, adapter }
    }

    /// x [.., in] -> [.., out], in the dtype of x
    pub fn forward<const R: usize>(&self, x: Tensor<R>) -> Tensor<R> {
        let mut dims = x.dims();
        let in_features = dims[R - 1];
        let rows = dims[..R - 1].iter().product();
        let flat = x.reshape([rows, in_features]);
        let weight = self.weight.suit(&flat);
        let bias = self.bias.as_ref().map(|bias| bias.suit(&flat));
        let adapter = self.adapter.read().unwrap_or_else(PoisonError::into_inner);
        let adapter = adapter.as_ref().map(|adapter| LowRank { a: adapter.a.suit(&flat), b: adapter.b.suit(&flat), scale: adapter.scale });
        let y = if ops::supports(&flat) { ops::linear(flat, weight, bias, adapter) } else { adapted_linear(flat, weight, bias, adapter) };
        dims[R - 1] = y.dims()[1];
        y.reshape(dims)
    }
}

/// y = W x + b + scale B A x, from the engine's operations; the adapter in its own dtype.
fn adapted_linear(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>, adapter: Option<LowRank>) -> Tensor<2> {
    let dtype = x.dtype();
    let mut y = x.clone().matmul(cast(weight, dtype).transpose());
    if let Some(bias) = bias {
        y = y + cast(bias, dtype).unsqueeze::<2>();
    }
    if let Some(LowRank { a, b, scale }) = adapter {
        let low = cast(x, a.dtype()).matmul(a.transpose()).matmul(b.transpose()).mul_scalar(scale);
        y = y + cast(low, dtype);
    }
    y
}

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.
#[derive(Debug)]
pub struct RmsNorm {
    weight: Param<1>,
    eps: f64,
}

impl RmsNorm {
    /// A norm over `dim` features.
    pub fn new(w: &Weights, dim: usize, eps: f64) -> Self {
        Self { weight: w.param("weight", [dim], Init::Ones), eps }
    }

    /// The norm of x [B, L, D], then the rotation by `angles` as [`ops::rms_norm_rotate`] has it; only where [`ops::supports`] x.
    pub fn forward_and_rotate(&self, x: Tensor<3>, angles: Option<(Tensor<4>, Tensor<4>)>) -> Tensor<3> {
        let weight = self.weight.suit(&x);
        ops::rms_norm_rotate(x, weight, angles, self.eps)
    }

    /// x [.., D] -> same, in the dtype of `x`.
    pub fn forward<const R: usize>(&self, x: Tensor<R>) -> Tensor<R> {
        let dtype = x.dtype();
        let weight = self.weight.suit(&x);
        let wide = cast(x, DType::F32);
        let inv = wide.clone().powi_scalar(2).mean_dim(R - 1).add_scalar(self.eps).sqrt().recip();
        cast(wide * inv * cast(weight, DType::F32).unsqueeze(), dtype)
    }
}

/// Layer norm over the last dimension, without affine part, computed in f32.
///
/// ```text
/// (x - mean) / sqrt(var + eps)
/// ```
pub fn layer_norm<const R: usize>(x: Tensor<R>, eps: f64) -> Tensor<R> {
    let x = cast(x, DType::F32);
    let centred = x.clone() - x.mean_dim(R - 1);
    let var = centred.clone().powi_scalar(2).mean_dim(R - 1);
    centred * var.add_scalar(eps).sqrt().recip()
}

/// Layer norm of x [B, L, D] with scale and shift [B, S, D] or [1, 1, D], in f32.
///
/// ```text
/// LN(x) (offset + scale) + shift
/// ```
pub fn modulated_norm(x: Tensor<3>, scale: Tensor<3>, shift: Tensor<3>, modulation: Modulation) -> Tensor<3> {
    if ops::supports(&x) && ops::supports(&scale) {
        return ops::modulated_norm(x, scale, shift, modulation);
    }
    let scale = if modulation.offset == 0.0 { scale } else { scale.add_scalar(modulation.offset) };
    layer_norm(x, modulation.eps) * scale + shift
}

/// A layer norm with weight and bias, as PyTorch has it; in f32 whatever the dtype.
#[derive(Debug)]
pub struct AffineNorm {
    weight: Param<1>,
    bias: Param<1>,
    eps: f64,
}

impl AffineNorm {
    /// A norm over `dim` features.
    pub fn new(w: &Weights, dim: usize, eps: f64) -> Self {
        Self { weight: w.param_f32("weight", [dim], Init::Ones), bias: w.param_f32("bias", [dim], Init::Zeros), eps }
    }

    /// [B, L, D] -> same
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let (dtype, weight, bias) = (x.dtype(), self.weight.suit(&x).unsqueeze(), self.bias.suit(&x).unsqueeze());
        cast(modulated_norm(x, weight, bias, Modulation { offset: 0.0, eps: self.eps }), dtype)
    }
}

/// Changes the dtype if it differs.
pub fn cast<const R: usize>(x: Tensor<R>, dtype: DType) -> Tensor<R> {
    if x.dtype() == dtype {
        return x;
    }
    match dtype {
        DType::BF16 => x.cast(burn::tensor::FloatDType::BF16),
        DType::F16 => x.cast(burn::tensor::FloatDType::F16),
        DType::F64 => x.cast(burn::tensor::FloatDType::F64),
        _ => x.cast(burn::tensor::FloatDType::F32),
    }
}

/// `x Phi(x) = 0.5 x (1 + erf(x / sqrt 2))`, the exact GELU of the parts that look at images; computed in f32.
///
/// Composed, because the engine's own has the derivative of the tanh approximation on all devices but the CPU (9e-4 off).
pub fn gelu_exact<const R: usize>(x: Tensor<R>) -> Tensor<R> {
    let dtype = x.dtype();
    let x = cast(x, DType::F32);
    let phi = x.clone().mul_scalar(std::f64::consts::FRAC_1_SQRT_2).erf().add_scalar(1.0).mul_scalar(0.5);
    cast(x * phi, dtype)
}
