//! Where a video starts: what the networks of image-to-video know beside the text.
//!
//! Legend: `P` images, `S` side of the images that an encoder sees, `I` its tokens, `s` frames of a latent frame, `Z` channels of the latents, `f`, `h`, `w` size of the latents, `H`, `W` size of the video.

use crate::clip::ClipVision;
use crate::vae::{AutoencoderKlWan, VaeConfig};
use burn::tensor::{Int, Tensor};

/// Pictures that videos start with, as their readers want them.
#[derive(Debug, Clone)]
pub struct StartImage {
    /// Of the size of the video, [P, 3, H, W] in [0, 1].
    pub frame: Tensor<4>,
    /// Their middle, for an image encoder, where the model has one: [P, 3, S, S] in [0, 1].
    pub square: Option<Tensor<4>>,
}

/// The first frames of videos, as networks with more channels than latents read them beside the noisy latents.
#[derive(Debug, Clone)]
pub struct ImageCondition {
    /// ```text
    /// s channels     1 in the first latent frame, which is known, and 0 in the others
    /// Z channels     normalised latents of the image followed by grey frames
    /// ```
    ///
    /// [P, s + Z, f, h, w]
    pub channels: Tensor<5>,
    /// What an image encoder says, which networks of Wan2.1 attend to beside the text: [P, I, D].
    pub features: Option<Tensor<3>>,
}

impl ImageCondition {
    /// Of images which start videos of `num_frames` frames. As diffusers' `WanImageToVideoPipeline`.
    ///
    /// # Panics
    /// If there is an encoder, and no square for it.
    pub fn new(vae: &AutoencoderKlWan, encoder: Option<&ClipVision>, images: StartImage, num_frames: usize) -> Self {
        let features = encoder.map(|encoder| encoder.forward(images.square.expect("an image for the encoder")));
        let frame = images.frame;
        let [batch, channels, height, width] = frame.dims();
        let image = (frame.mul_scalar(2.0) - 1.0).reshape([batch, channels, 1, height, width]);
        let grey = Tensor::zeros([batch, channels, num_frames - 1, height, width], (&image.device(), image.dtype()));
        let video = if num_frames > 1 { Tensor::cat(vec![image, grey], 2) } else { image };
        let latents = vae.normalise(vae.encode(video).mean);
        let [_, _, frames, height, width] = latents.dims();
        let options = (&latents.device(), latents.dtype());
        let mask = |frames, known: bool| {
            let shape = [batch, vae.config.temporal_factor(), frames, height, width];
            if known { Tensor::<5>::ones(shape, options) } else { Tensor::zeros(shape, options) }
        };
        let known = mask(1, true);
        let mask = if frames > 1 { Tensor::cat(vec![known, mask(frames - 1, false)], 2) } else { known };
        Self { channels: Tensor::cat(vec![mask, latents], 1), features }
    }

    /// Channels that a network reads beside those of its latents.
    pub fn num_channels(vae: &VaeConfig) -> usize {
        vae.temporal_factor() + vae.z_dim
    }

    /// The images of the given indices, in that order; an index may repeat.
    ///
    /// # Panics
    /// If there is no index.
    pub fn select(&self, indices: &[usize]) -> Self {
        assert!(!indices.is_empty(), "an empty selection is not a batch");
        let rows: Vec<i32> = indices.iter().map(|&i| i as i32).collect();
        let rows = Tensor::<1, Int>::from_ints(rows.as_slice(), &self.channels.device());
        let features = self.features.clone().map(|features| features.select(0, rows.clone()));
        Self { channels: self.channels.clone().select(0, rows), features }
    }

    /// All of these, in order.
    ///
    /// # Panics
    /// If there is none.
    pub fn cat(parts: Vec<Self>) -> Self {
        let (channels, features): (Vec<_>, Vec<_>) = parts.into_iter().map(|part| (part.channels, part.features)).unzip();
        let features: Vec<_> = features.into_iter().flatten().collect();
        Self { channels: Tensor::cat(channels, 0), features: (!features.is_empty()).then(|| Tensor::cat(features, 0)) }
    }

    /// What a network reads: latents [B, Z, f, h, w] of samples whose images these are -> [B, Z + s + Z, f, h, w].
    pub fn beside(&self, latents: Tensor<5>) -> Tensor<5> {
        let channels = if latents.is_autodiff() { self.channels.clone().autodiff() } else { self.channels.clone() };
        Tensor::cat(vec![latents, channels], 1)
    }
}
