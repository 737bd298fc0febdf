//! The embedding of an image that cross-attention attends to beside the text (Wan2.1 image-to-video).

use crate::layers::{AffineNorm, Linear, gelu_exact};
use crate::weights::Weights;
use burn::tensor::Tensor;

/// Of its norms: PyTorch's default.
const EPS: f64 = 1e-5;

/// ```text
/// LN_affine(W_2 gelu(W_1 LN_affine(x)))
/// ```
///
/// with the exact GELU, and norms in f32 whatever the model's dtype.
#[derive(Debug)]
pub(super) struct ImageEmbedder {
    norm_in: AffineNorm,
    linear_1: Linear,
    linear_2: Linear,
    norm_out: AffineNorm,
}

impl ImageEmbedder {
    /// From the sub-tree `condition_embedder.image_embedder`: `features` of the image encoder to `dim` of a token.
    pub(super) fn new(w: &Weights, features: usize, dim: usize) -> Self {
        Self {
            norm_in: AffineNorm::new(&w.sub("norm1"), features, EPS),
            linear_1: Linear::new(&w.sub("ff.net.0.proj"), features, features),
            linear_2: Linear::new(&w.sub("ff.net.2"), features, dim),
            norm_out: AffineNorm::new(&w.sub("norm2"), dim, EPS),
        }
    }

    /// [B, I, features] -> [B, I, D]
    pub(super) fn forward(&self, image: Tensor<3>) -> Tensor<3> {
        let hidden = gelu_exact(self.linear_1.forward(self.norm_in.forward(image)));
        self.norm_out.forward(self.linear_2.forward(hidden))
    }
}
