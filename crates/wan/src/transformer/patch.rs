//! Latents to tokens and back.

use super::TransformerConfig;
use burn::tensor::Tensor;

/// How latents of one shape are cut into patches; tokens are frame-major, then row, then column.
#[derive(Debug, Clone, Copy)]
pub struct PatchGrid {
    patch: [usize; 3],
    out_channels: usize,
    /// Patches along frames, rows, columns.
    pub size: [usize; 3],
}

impl PatchGrid {
    /// The grid for latents [B, C, F, H, W]; sizes are floor-cropped to whole patches, as the strided convolution does.
    pub fn new(config: &TransformerConfig, [_, _, f, h, w]: [usize; 5]) -> Self {
        let [pt, ph, pw] = config.patch_size;
        Self { patch: [pt, ph, pw], out_channels: config.out_channels, size: [f / pt, h / ph, w / pw] }
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.size.iter().product()
    }

    /// [B, C, F, H, W] -> [B, L, C pt ph pw], channels first as in the convolution's weight.
    pub fn patchify(&self, latents: Tensor<5>) -> Tensor<3> {
        let [batch, c, f, h, w] = latents.dims();
        let ([pt, ph, pw], [gf, gh, gw]) = (self.patch, self.size);
        let mut x = latents;
        if [f, h, w] != [gf * pt, gh * ph, gw * pw] {
            x = x.narrow(2, 0, gf * pt).narrow(3, 0, gh * ph).narrow(4, 0, gw * pw);
        }
        x.reshape([batch, c, gf, pt, gh, ph, gw, pw]).permute([0, 2, 4, 6, 1, 3, 5, 7]).reshape([
            batch,
            self.num_tokens(),
            c * pt * ph * pw,
        ])
    }

    /// [B, L, pt ph pw C] -> [B, C, F, H, W]; here the channels come last.
    pub fn unpatchify(&self, tokens: Tensor<3>) -> Tensor<5> {
        let batch = tokens.dims()[0];
        let ([pt, ph, pw], [gf, gh, gw]) = (self.patch, self.size);
        tokens.reshape([batch, gf, gh, gw, pt, ph, pw, self.out_channels]).permute([0, 7, 1, 4, 2, 5, 3, 6]).reshape([
            batch,
            self.out_channels,
            gf * pt,
            gh * ph,
            gw * pw,
        ])
    }
}
