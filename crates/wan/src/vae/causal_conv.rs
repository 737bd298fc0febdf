//! Convolutions that do not look ahead in time.
//!
//! Legend: `B` batch, `C` channels, `O` output channels, `F` frames, `H` height, `W` width.

use super::blocks::ChannelNorm;
use super::fast_conv::{FusedConv, fused_conv3d, supports};
use super::matrix_conv;
use super::pass::Pass;
use crate::layers::cast;
use crate::param::Param;
use crate::weights::{Init, Weights};
use burn::tensor::module::conv3d as burn_conv3d;
use burn::tensor::ops::{ConvOptions, PadMode};
use burn::tensor::{DType, Tensor, activation::silu};

/// Stride and zero padding of a convolution, in the order time, height, width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Step between outputs.
    pub stride: [usize; 3],
    /// Zeros (before, after) each axis.
    pub padding: [(usize, usize); 3],
    /// Every value is repeated this many times in height and width before the convolution.
    pub enlarge: usize,
}

impl Geometry {
    /// Stride 1 and no padding.
    pub const POINTWISE: Self = Self { stride: [1; 3], padding: [(0, 0); 3], enlarge: 1 };

    /// A 3x3 convolution of each frame at twice its size.
    pub const DOUBLE_FRAME: Self = Self { stride: [1; 3], padding: [(0, 0), (1, 1), (1, 1)], enlarge: 2 };

    /// A 3x3 convolution of each frame that halves its size; the reference pads only right and below.
    pub const HALVE_FRAME: Self = Self { stride: [1, 2, 2], padding: [(0, 0), (0, 1), (0, 1)], enlarge: 1 };
}

/// What can be computed with a convolution in one go.
#[derive(Debug, Clone, Default)]
pub struct Fusion {
    /// The input is `silu(gain x / ||x||)`, with the length over the channels. `[C]`
    pub gain: Option<Tensor<1>>,
    /// Added to the output. [B, O, F', H', W']
    pub residual: Option<Tensor<5>>,
}

/// The one convolution of the autoencoder: our own where it is faster, else that of the tensor engine.
///
/// x [B, C, F, H, W], weight [O, C, kt, kh, kw], bias `[O]` -> [B, O, F', H', W']
pub fn conv3d(x: Tensor<5>, weight: Tensor<5>, bias: Tensor<1>, geometry: Geometry, fusion: Fusion) -> Tensor<5> {
    let Geometry { stride, padding, enlarge } = geometry;
    let Fusion { gain, residual } = fusion;
    let conv = FusedConv { stride, padding, enlarge, normed: gain.is_some(), residual: residual.is_some() };
    if supports(&x, &weight, &conv) {
        return fused_conv3d(x, weight, bias, gain, residual, conv);
    }
    conv3d_of_engine(x, weight, bias, geometry, Fusion { gain, residual })
}

/// As [`conv3d`], by the operations of the tensor engine.
pub fn conv3d_of_engine(x: Tensor<5>, weight: Tensor<5>, bias: Tensor<1>, geometry: Geometry, fusion: Fusion) -> Tensor<5> {
    let Geometry { stride, padding, enlarge } = geometry;
    let x = match fusion.gain {
        Some(gain) => silu(norm_channels(x, gain)),
        None => x,
    };
    let x = enlarge_frames(x, enlarge);
    let symmetric = padding.iter().all(|(before, after)| before == after);
    let options = |padding| ConvOptions::new(stride, padding, [1; 3], 1);
    let y = if matrix_conv::is_wanted(&x, stride) {
        matrix_conv::conv3d_by_products(x, weight, bias, padding)
    } else if symmetric {
        burn_conv3d(x, weight, Some(bias), options(padding.map(|(before, _)| before)))
    } else {
        burn_conv3d(x.pad(padding, PadMode::Constant(0.0)), weight, Some(bias), options([0; 3]))
    };
    match fusion.residual {
        Some(residual) => y + residual,
        None => y,
    }
}

/// x [B, C, F, H, W] -> [B, C, F, factor H, factor W], each value repeated.
fn enlarge_frames(x: Tensor<5>, factor: usize) -> Tensor<5> {
    let [batch, channels, frames, height, width] = x.dims();
    if factor == 1 {
        return x;
    }
    let x = x.reshape([batch * channels * frames, height, 1, width, 1]);
    let x = x.expand([batch * channels * frames, height, factor, width, factor]);
    x.reshape([batch, channels, frames, factor * height, factor * width])
}

/// `gain x / max(||x||, 1e-12)`, with the length over the channels, in f32.
///
/// x [B, C, F, H, W], gain `[C]` -> same as `x`
pub fn norm_channels(x: Tensor<5>, gain: Tensor<1>) -> Tensor<5> {
    let (dtype, channels) = (x.dtype(), x.dims()[1]);
    let x = cast(x, DType::F32);
    let length = x.clone().powi_scalar(2).sum_dim(1).sqrt().clamp_min(1e-12);
    cast(x / length, dtype) * gain.reshape([1, channels, 1, 1, 1])
}

/// A convolution whose output frame `t` depends on input frames up to `t` only.
#[derive(Debug)]
pub struct CausalConv3d {
    weight: Param<5>,
    bias: Param<1>,
}

impl CausalConv3d {
    /// A convolution of `kernel` [kt, kh, kw], whose padding keeps the size of its input.
    pub fn new(w: &Weights, inputs: usize, outputs: usize, kernel: [usize; 3]) -> Self {
        let [kt, kh, kw] = kernel;
        let weight = w.param("weight", [outputs, inputs, kt, kh, kw], Init::FanIn);
        Self { weight, bias: w.param("bias", [outputs], Init::Zeros) }
    }

    /// x [B, C, F, H, W] -> [B, O, F, H, W]. Frames before the clip are zero; those before the chunk come from `pass`.
    pub fn forward(&self, x: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        self.forward_causal(x, Fusion::default(), pass)
    }

    /// `conv(silu(norm(x))) + residual`: x [B, C, F, H, W], residual [B, O, F, H, W] -> [B, O, F, H, W]
    pub fn forward_activated(&self, x: Tensor<5>, norm: &ChannelNorm, residual: Option<Tensor<5>>, pass: &mut Pass<'_>) -> Tensor<5> {
        let gain = Some(norm.gain(&x));
        self.forward_causal(x, Fusion { gain, residual }, pass)
    }

    fn forward_causal(&self, x: Tensor<5>, fusion: Fusion, pass: &mut Pass<'_>) -> Tensor<5> {
        let [_, _, kt, kh, kw] = self.weight.shape();
        let context = kt - 1;
        let (x, known) = if context > 0 { pass.extend(x, context) } else { (x, 0) };
        let padding = [(context - known, 0), (kh / 2, kh / 2), (kw / 2, kw / 2)];
        self.apply(x, Geometry { stride: [1; 3], padding, enlarge: 1 }, fusion)
    }

    /// x [B, C, 1 + 2n, H, W] -> [B, O, n, H, W]: every second frame, without padding.
    pub fn forward_halving(&self, x: Tensor<5>) -> Tensor<5> {
        self.apply(x, Geometry { stride: [2, 1, 1], padding: [(0, 0); 3], enlarge: 1 }, Fusion::default())
    }

    /// x [B, C, F, H, W] -> [B, O, F, H, W] for a 1x1x1 kernel.
    pub fn forward_pointwise(&self, x: Tensor<5>) -> Tensor<5> {
        self.apply(x, Geometry::POINTWISE, Fusion::default())
    }

    fn apply(&self, x: Tensor<5>, geometry: Geometry, fusion: Fusion) -> Tensor<5> {
        let (weight, bias) = (self.weight.suit(&x), self.bias.suit(&x));
        conv3d(x, weight, bias, geometry, fusion)
    }
}

/// A convolution of each frame by itself.
#[derive(Debug)]
pub struct FrameConv {
    weight: Param<4>,
    bias: Param<1>,
    geometry: Geometry,
}

impl FrameConv {
    /// A convolution of `size` x `size`.
    pub fn new(w: &Weights, inputs: usize, outputs: usize, size: usize, geometry: Geometry) -> Self {
        let weight = w.param("weight", [outputs, inputs, size, size], Init::FanIn);
        Self { weight, bias: w.param("bias", [outputs], Init::Zeros), geometry }
    }

    /// x [B, C, F, H, W] -> [B, O, F, H', W']
    pub fn forward(&self, x: Tensor<5>) -> Tensor<5> {
        let (weight, bias) = (self.weight.suit(&x), self.bias.suit(&x));
        conv3d(x, weight.unsqueeze_dim(2), bias, self.geometry, Fusion::default())
    }
}
