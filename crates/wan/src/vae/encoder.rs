//! Video to moments of the latents.
//!
//! Legend: `B` batch, `C` channels, `F` frames, `H` height, `W` width, `Z` latent channels.

use super::blocks::{ChannelNorm, Downsample, FrameAttention, MidBlock, ResidualBlock};
use super::causal_conv::CausalConv3d;
use super::config::VaeConfig;
use super::pass::Pass;
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
}

impl Encoder {
    /// The encoder of `config`.
    pub fn new(w: &Weights, config: &VaeConfig) -> Self {
        let (stages, channels) = build_stages(w, config);
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
