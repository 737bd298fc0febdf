//! What Wan2.2 adds to its autoencoder: paths around whole levels, without weights, and frames whose patches become channels.
//!
//! Legend: `B` batch, `C` channels, `O` output channels, `F` frames, `H` height, `W` width.

use burn::tensor::Tensor;
use burn::tensor::ops::PadMode;

/// How much a level changes time, and height and width.
#[derive(Debug, Clone, Copy)]
pub struct Factors {
    /// 1 or 2
    pub time: usize,
    /// 1 or 2
    pub space: usize,
}

impl Factors {
    /// Places of a block.
    pub fn places(self) -> usize {
        self.time * self.space * self.space
    }
}

/// The way down: blocks of places become channels, and neighbouring channels their mean.
#[derive(Debug, Clone, Copy)]
pub struct AverageDown {
    /// Sizes of a block.
    pub factors: Factors,
    /// O, which divides `C places`.
    pub outputs: usize,
}

impl AverageDown {
    /// x [B, C, F, H, W] -> [B, O, F', H/space, W/space]. A number of frames that does not fit gets zeros before: the first frame of a clip
    /// stands alone, and is half of its block.
    pub fn forward(self, x: Tensor<5>) -> Tensor<5> {
        let Factors { time, space } = self.factors;
        let missing = x.dims()[2].next_multiple_of(time) - x.dims()[2];
        let x = if missing > 0 { x.pad([(missing, 0), (0, 0), (0, 0)], PadMode::Constant(0.0)) } else { x };
        let [batch, channels, frames, height, width] = x.dims();
        let (frames, height, width) = (frames / time, height / space, width / space);
        let blocks = x.reshape([batch * channels, frames, time, height, space, width, space]).permute([0, 2, 4, 6, 1, 3, 5]);
        let together = channels * self.factors.places() / self.outputs;
        let mean = blocks.reshape([batch * self.outputs, together, frames * height * width]).mean_dim(1);
        mean.reshape([batch, self.outputs, frames, height, width])
    }
}

/// The way up, the inverse in shape: channels are repeated, and become the places of a block.
#[derive(Debug, Clone, Copy)]
pub struct RepeatUp {
    /// Sizes of a block.
    pub factors: Factors,
    /// O, of which `O places` is a multiple of C.
    pub outputs: usize,
}

impl RepeatUp {
    /// x [B, C, F, H, W] -> [B, O, F', space H, space W]. Of the first frame of a clip only its last copy is kept.
    pub fn forward(self, x: Tensor<5>, is_first_chunk: bool) -> Tensor<5> {
        let Factors { time, space } = self.factors;
        let [batch, channels, frames, height, width] = x.dims();
        let copies = self.outputs * self.factors.places() / channels;
        let places = frames * height * width;
        let x = x.reshape([batch * channels, 1, places]).expand([batch * channels, copies, places]);
        let x = x.reshape([batch * self.outputs, time, space, space, frames, height, width]).permute([0, 4, 1, 5, 2, 6, 3]);
        let x = x.reshape([batch, self.outputs, frames * time, height * space, width * space]);
        if is_first_chunk { x.narrow(2, time - 1, frames * time - (time - 1)) } else { x }
    }
}

/// Patches of `size x size` pixels to channels: x [B, C, F, H, W] -> [B, C size^2, F, H/size, W/size]. Of a patch, columns come before rows.
pub fn patches_to_channels(x: Tensor<5>, size: usize) -> Tensor<5> {
    let [batch, channels, frames, height, width] = x.dims();
    let (height, width) = (height / size, width / size);
    let x = x.reshape([batch * channels, frames, height, size, width, size]).permute([0, 5, 3, 1, 2, 4]);
    x.reshape([batch, channels * size * size, frames, height, width])
}

/// The inverse of [`patches_to_channels`].
pub fn channels_to_patches(x: Tensor<5>, size: usize) -> Tensor<5> {
    let [batch, channels, frames, height, width] = x.dims();
    let channels = channels / (size * size);
    let x = x.reshape([batch * channels, size, size, frames, height, width]).permute([0, 3, 4, 2, 5, 1]);
    x.reshape([batch, channels, frames, height * size, width * size])
}
