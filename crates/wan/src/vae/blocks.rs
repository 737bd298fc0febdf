//! The parts encoder and decoder are made of: norm, residual block, attention, resampling.
//!
//! Legend: `B` batch, `C` channels, `O` output channels, `F` frames, `H` height, `W` width.

use super::causal_conv::{CausalConv3d, FrameConv, Geometry, norm_channels};
use super::pass::Pass;
use crate::param::Param;
use crate::weights::{Init, Weights};
use burn::tensor::Tensor;
use burn::tensor::module::attention;

/// Norm over the channels.
///
/// ```text
/// x / max(||x||, 1e-12) * sqrt(C) * gamma
/// ```
#[derive(Debug)]
pub struct ChannelNorm {
    gamma: Gamma,
}

/// The weight of a norm, which files have in two shapes.
#[derive(Debug)]
enum Gamma {
    /// [C, 1, 1, 1]
    Video(Param<4>),
    /// [C, 1, 1]
    Image(Param<3>),
}

impl ChannelNorm {
    /// A norm of videos; the file has gamma as [C, 1, 1, 1].
    pub fn new(w: &Weights, channels: usize) -> Self {
        Self { gamma: Gamma::Video(w.param("gamma", [channels, 1, 1, 1], Init::Ones)) }
    }

    /// A norm of images; the file has gamma as [C, 1, 1].
    pub fn new_for_images(w: &Weights, channels: usize) -> Self {
        Self { gamma: Gamma::Image(w.param("gamma", [channels, 1, 1], Init::Ones)) }
    }

    /// `sqrt(C) gamma`, for a computation with `x`. `[C]`
    pub fn gain(&self, x: &Tensor<5>) -> Tensor<1> {
        let channels = x.dims()[1];
        let gamma = match &self.gamma {
            Gamma::Video(gamma) => gamma.suit(x).reshape([channels]),
            Gamma::Image(gamma) => gamma.suit(x).reshape([channels]),
        };
        gamma.mul_scalar((channels as f64).sqrt())
    }

    /// x [B, C, F, H, W] -> same
    pub fn forward(&self, x: Tensor<5>) -> Tensor<5> {
        let gain = self.gain(&x);
        norm_channels(x, gain)
    }
}

/// `x + conv(silu(norm(conv(silu(norm(x))))))`, with a 1x1x1 convolution of `x` where the channels change.
#[derive(Debug)]
pub struct ResidualBlock {
    norm1: ChannelNorm,
    conv1: CausalConv3d,
    norm2: ChannelNorm,
    conv2: CausalConv3d,
    shortcut: Option<CausalConv3d>,
}

impl ResidualBlock {
    /// A block from `inputs` to `outputs` channels.
    pub fn new(w: &Weights, inputs: usize, outputs: usize) -> Self {
        let differs = inputs != outputs;
        Self {
            norm1: ChannelNorm::new(&w.sub("norm1"), inputs),
            conv1: CausalConv3d::new(&w.sub("conv1"), inputs, outputs, [3; 3]),
            norm2: ChannelNorm::new(&w.sub("norm2"), outputs),
            conv2: CausalConv3d::new(&w.sub("conv2"), outputs, outputs, [3; 3]),
            shortcut: differs.then(|| CausalConv3d::new(&w.sub("conv_shortcut"), inputs, outputs, [1; 3])),
        }
    }

    /// x [B, C, F, H, W] -> [B, O, F, H, W]
    pub fn forward(&self, x: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        let shortcut = match &self.shortcut {
            Some(shortcut) => shortcut.forward_pointwise(x.clone()),
            None => x.clone(),
        };
        let h = self.conv1.forward_activated(x, &self.norm1, None, pass);
        self.conv2.forward_activated(h, &self.norm2, Some(shortcut), pass)
    }
}

/// Single-head attention among the positions of each frame.
#[derive(Debug)]
pub struct FrameAttention {
    norm: ChannelNorm,
    to_qkv: FrameConv,
    proj: FrameConv,
}

impl FrameAttention {
    /// Attention over `channels`.
    pub fn new(w: &Weights, channels: usize) -> Self {
        Self {
            norm: ChannelNorm::new_for_images(&w.sub("norm"), channels),
            to_qkv: FrameConv::new(&w.sub("to_qkv"), channels, 3 * channels, 1, Geometry::POINTWISE),
            proj: FrameConv::new(&w.sub("proj"), channels, channels, 1, Geometry::POINTWISE),
        }
    }

    /// x [B, C, F, H, W] -> same
    pub fn forward(&self, x: Tensor<5>) -> Tensor<5> {
        let [batch, channels, frames, height, width] = x.dims();
        let qkv = self.to_qkv.forward(self.norm.forward(x.clone()));
        // [B, 3C, F, H, W] -> [B F, 1, H W, 3C]
        let qkv = qkv.reshape([batch, 3 * channels, frames, height * width]).permute([0, 2, 3, 1]);
        let qkv = qkv.reshape([batch * frames, 1, height * width, 3 * channels]);
        let part = |i: usize| qkv.clone().narrow(3, i * channels, channels);
        let y = attention(part(0), part(1), part(2), None, None, Default::default());
        let y = y.reshape([batch, frames, height * width, channels]).permute([0, 3, 1, 2]);
        x + self.proj.forward(y.reshape([batch, channels, frames, height, width]))
    }
}

/// The blocks at the lowest resolution: residual, attention, residual.
#[derive(Debug)]
pub struct MidBlock {
    before: ResidualBlock,
    attention: FrameAttention,
    after: ResidualBlock,
}

impl MidBlock {
    /// Blocks over `channels`.
    pub fn new(w: &Weights, channels: usize) -> Self {
        Self {
            before: ResidualBlock::new(&w.sub("resnets.0"), channels, channels),
            attention: FrameAttention::new(&w.sub("attentions.0"), channels),
            after: ResidualBlock::new(&w.sub("resnets.1"), channels, channels),
        }
    }

    /// x [B, C, F, H, W] -> same
    pub fn forward(&self, x: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        let x = self.before.forward(x, pass);
        self.after.forward(self.attention.forward(x), pass)
    }
}

/// Halves height and width and, if asked for, the frame rate.
#[derive(Debug)]
pub struct Downsample {
    space: FrameConv,
    time: Option<CausalConv3d>,
}

impl Downsample {
    /// A layer over `channels`.
    pub fn new(w: &Weights, channels: usize, halves_time: bool) -> Self {
        Self {
            space: FrameConv::new(&w.sub("resample.1"), channels, channels, 3, Geometry::HALVE_FRAME),
            time: halves_time.then(|| CausalConv3d::new(&w.sub("time_conv"), channels, channels, [3, 1, 1])),
        }
    }

    /// x [B, C, F, H, W] -> [B, C, F', H/2, W/2]. The first frame of the clip is kept; after it two frames give one.
    pub fn forward(&self, x: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        let x = self.space.forward(x);
        let Some(time) = &self.time else { return x };
        // Frame t is made of 2t-2, 2t-1, 2t: the only context is one frame, the last of the previous chunk.
        let (x, _) = pass.extend(x, 1);
        if !pass.is_first_chunk() {
            return time.forward_halving(x);
        }
        let first = x.clone().narrow(2, 0, 1);
        if x.dims()[2] == 1 { first } else { Tensor::cat(vec![first, time.forward_halving(x)], 2) }
    }
}

/// Doubles height and width, changes the channels and, if asked for, doubles the frame rate.
#[derive(Debug)]
pub struct Upsample {
    space: FrameConv,
    time: Option<CausalConv3d>,
}

impl Upsample {
    /// A layer from `channels` to `outputs`.
    pub fn new(w: &Weights, channels: usize, outputs: usize, doubles_time: bool) -> Self {
        Self {
            space: FrameConv::new(&w.sub("resample.1"), channels, outputs, 3, Geometry::DOUBLE_FRAME),
            time: doubles_time.then(|| CausalConv3d::new(&w.sub("time_conv"), channels, 2 * channels, [3, 1, 1])),
        }
    }

    /// x [B, C, F, H, W] -> [B, O, F', 2H, 2W]. The first frame of the clip stays one; every other gives two.
    pub fn forward(&self, x: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        self.space.forward(self.double_rate(x, pass))
    }

    fn double_rate(&self, x: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        let Some(time) = &self.time else { return x };
        if !pass.is_first_chunk() {
            return interleave_halves(time.forward(x, pass));
        }
        // The reference does not show the first frame to this layer: the second one has no context.
        let first = x.clone().narrow(2, 0, 1);
        let rest = x.dims()[2] - 1;
        if rest == 0 {
            pass.skip();
            return first;
        }
        let rest = interleave_halves(time.forward(x.narrow(2, 1, rest), pass));
        Tensor::cat(vec![first, rest], 2)
    }
}

/// x [B, 2C, F, H, W] -> [B, C, 2F, H, W]: the first C channels are the even frames, the others the odd ones.
fn interleave_halves(x: Tensor<5>) -> Tensor<5> {
    let [batch, doubled, frames, height, width] = x.dims();
    let channels = doubled / 2;
    let x = x.reshape([batch, 2, channels, frames, height * width]).permute([0, 2, 3, 1, 4]);
    x.reshape([batch, channels, 2 * frames, height, width])
}
