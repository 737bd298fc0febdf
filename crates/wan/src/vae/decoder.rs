//! Latents to video.
//!
//! Legend: `B` batch, `C` channels, `F` frames, `H` height, `W` width, `Z` latent channels.

use super::blocks::{ChannelNorm, MidBlock, ResidualBlock, Upsample};
use super::causal_conv::CausalConv3d;
use super::config::VaeConfig;
use super::pass::Pass;
use super::shortcut::{Factors, RepeatUp};
use crate::weights::Weights;
use burn::tensor::Tensor;

/// The decoder.
#[derive(Debug)]
pub struct Decoder {
    conv_in: CausalConv3d,
    mid_block: MidBlock,
    up_blocks: Vec<UpBlock>,
    norm_out: ChannelNorm,
    conv_out: CausalConv3d,
}

/// Residual blocks at one resolution, and the step to the next.
#[derive(Debug)]
struct UpBlock {
    resnets: Vec<ResidualBlock>,
    upsample: Option<Upsample>,
    /// Around all of it, in Wan2.2.
    shortcut: Option<RepeatUp>,
}

impl Decoder {
    /// The decoder of `config`.
    pub fn new(w: &Weights, config: &VaeConfig) -> Self {
        let base = config.decoder_dim();
        let lowest = base * config.dim_mult[config.dim_mult.len() - 1];
        let outputs = base * config.dim_mult[0];
        Self {
            conv_in: CausalConv3d::new(&w.sub("conv_in"), config.z_dim, lowest, [3; 3]),
            mid_block: MidBlock::new(&w.sub("mid_block"), lowest),
            up_blocks: build_up_blocks(&w.sub("up_blocks"), config),
            norm_out: ChannelNorm::new(&w.sub("norm_out"), outputs),
            conv_out: CausalConv3d::new(&w.sub("conv_out"), outputs, config.out_channels, [3; 3]),
        }
    }

    /// z [B, Z, F, H, W] -> [B, C, F', H', W'], the next chunk of a clip
    pub fn forward(&self, z: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        let x = self.conv_in.forward(z, pass);
        pass.observe(format_args!("decoder.conv_in"), &x);
        let mut x = self.mid_block.forward(x, pass);
        pass.observe(format_args!("decoder.mid_block"), &x);
        for (i, block) in self.up_blocks.iter().enumerate() {
            x = block.forward(x, pass);
            pass.observe(format_args!("decoder.up_blocks.{i}"), &x);
        }
        self.conv_out.forward_activated(x, &self.norm_out, None, pass)
    }
}

impl UpBlock {
    fn forward(&self, mut x: Tensor<5>, pass: &mut Pass<'_>) -> Tensor<5> {
        let around = self.shortcut.map(|shortcut| shortcut.forward(x.clone(), pass.is_first_chunk()));
        for resnet in &self.resnets {
            x = resnet.forward(x, pass);
        }
        if let Some(upsample) = &self.upsample {
            x = upsample.forward(x, pass);
        }
        match around {
            Some(around) => x + around,
            None => x,
        }
    }
}

fn build_up_blocks(w: &Weights, config: &VaeConfig) -> Vec<UpBlock> {
    let levels = config.dim_mult.len();
    let mut channels = config.decoder_dim() * config.dim_mult[levels - 1];
    let mut blocks = Vec::with_capacity(levels);
    for (i, level) in (0..levels).rev().enumerate() {
        let w = w.sub(i);
        let outputs = config.decoder_dim() * config.dim_mult[level];
        let mut resnets = Vec::new();
        for j in 0..=config.num_res_blocks {
            resnets.push(ResidualBlock::new(&w.sub("resnets").sub(j), channels, outputs));
            channels = outputs;
        }
        // Upwards, the time is doubled where the encoder halved it on its way down.
        let doubles_time = level > 0 && config.temperal_downsample[level - 1];
        let name = if config.is_residual { "upsampler" } else { "upsamplers.0" };
        let upsample = (level > 0).then(|| {
            channels = config.upsampled(outputs);
            Upsample::new(&w.sub(name), outputs, channels, doubles_time)
        });
        let factors = Factors { time: 1 + usize::from(doubles_time), space: 2 };
        let shortcut = (config.is_residual && level > 0).then_some(RepeatUp { factors, outputs });
        blocks.push(UpBlock { resnets, upsample, shortcut });
    }
    blocks
}
