//! Video to moments of the latents.
//!
//! Legend: `B` batch, `C` channels, `F` frames, `H` height, `W` width, `Z` latent channels.

use super::blocks::{ChannelNorm, Downsample, FrameAttention, MidBlock, ResidualBlock};
use super::causal_conv::CausalConv3d;
use super::config::VaeConfig;
use super::pass::Pass;
use super::shortcut::{AverageDown, Factors};
use crate::weights::Weights;
use burn::tensor::Tensor;

/// The encoder.
#[derive(Debug)]
pub struct Encoder {
    conv_in: CausalConv3d,
    stages: Vec<Stage>,
    mid_block: MidBlock,
    norm_out: ChannelNorm,
    conv_out: CausalConv3d,
}

/// An entry of the reference's flat list `down_blocks`.
#[derive(Debug)]
enum Stage {
    Residual(ResidualBlock),
    Attention(FrameAttention),
    Downsample(Downsample),
    /// All of a resolution, in Wan2.2.
    Level(Level),
}

/// Residual blocks at one resolution and the step to the next, with a path around them.
#[derive(Debug)]
struct Level {
    resnets: Vec<ResidualBlock>,
    downsample: Option<Downsample>,
    shortcut: AverageDown,
}

impl Level {
    fn forward(&self, mut x: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        let around = self.shortcut.forward(x.clone());
        for resnet in &self.resnets {
            x = resnet.forward(x, pass);
        }
        if let Some(downsample) = &self.downsample {
            x = downsample.forward(x, pass);
        }
        x + around
    }
}

impl Encoder {
    /// The encoder of `config`.
    pub fn new(w: &Weights, config: &VaeConfig) -> Self {
        let (stages, channels) = if config.is_residual { build_levels(w, config) } else { build_stages(w, config) };
        Self {
            conv_in: CausalConv3d::new(&w.sub("conv_in"), config.in_channels, config.base_dim, [3; 3]),
            stages,
            mid_block: MidBlock::new(&w.sub("mid_block"), channels),
            norm_out: ChannelNorm::new(&w.sub("norm_out"), channels),
            conv_out: CausalConv3d::new(&w.sub("conv_out"), channels, 2 * config.z_dim, [3; 3]),
        }
    }

    /// x [B, C, F, H, W] -> [B, 2Z, F', H', W'], the next chunk of a clip
    pub fn forward(&self, x: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        let mut x = self.conv_in.forward(x, pass);
        pass.observe(format_args!("encoder.conv_in"), &x);
        for (i, stage) in self.stages.iter().enumerate() {
            x = match stage {
                Stage::Residual(block) => block.forward(x, pass),
                Stage::Attention(block) => block.forward(x),
                Stage::Downsample(block) => block.forward(x, pass),
                Stage::Level(level) => level.forward(x, pass),
            };
            pass.observe(format_args!("encoder.down_blocks.{i}"), &x);
        }
        let x = self.mid_block.forward(x, pass);
        pass.observe(format_args!("encoder.mid_block"), &x);
        let x = self.conv_out.forward_activated(x, &self.norm_out, None, pass);
        pass.observe(format_args!("encoder.conv_out"), &x);
        x
    }
}

/// The list of stages, and the channels after the last one.
fn build_stages(w: &Weights, config: &VaeConfig) -> (Vec<Stage>, usize) {
    let mut stages = Vec::new();
    let mut channels = config.base_dim;
    let next = |stages: &Vec<Stage>| w.sub("down_blocks").sub(stages.len());
    for (level, mult) in config.dim_mult.iter().enumerate() {
        let outputs = config.base_dim * mult;
        let scale = 0.5_f64.powi(level as i32);
        for _ in 0..config.num_res_blocks {
            stages.push(Stage::Residual(ResidualBlock::new(&next(&stages), channels, outputs)));
            if config.attn_scales.contains(&scale) {
                stages.push(Stage::Attention(FrameAttention::new(&next(&stages), outputs)));
            }
            channels = outputs;
        }
        if let Some(halves_time) = config.temperal_downsample.get(level) {
            stages.push(Stage::Downsample(Downsample::new(&next(&stages), outputs, *halves_time)));
        }
    }
    (stages, channels)
}

/// The same for Wan2.2, where a stage is a resolution.
fn build_levels(w: &Weights, config: &VaeConfig) -> (Vec<Stage>, usize) {
    let mut stages = Vec::new();
    let mut channels = config.base_dim;
    for (level, mult) in config.dim_mult.iter().enumerate() {
        let w = w.sub("down_blocks").sub(level);
        let outputs = config.base_dim * mult;
        let halves_time = config.temperal_downsample.get(level);
        let mut resnets = Vec::new();
        for i in 0..config.num_res_blocks {
            resnets.push(ResidualBlock::new(&w.sub("resnets").sub(i), channels, outputs));
            channels = outputs;
        }
        let downsample = halves_time.map(|halves| Downsample::new(&w.sub("downsampler"), outputs, *halves));
        let factors = Factors { time: 1 + usize::from(halves_time == Some(&true)), space: 1 + usize::from(downsample.is_some()) };
        stages.push(Stage::Level(Level { resnets, downsample, shortcut: AverageDown { factors, outputs } }));
    }
    (stages, channels)
}
