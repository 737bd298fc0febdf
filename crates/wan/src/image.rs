//! Where a video starts: what the networks of image-to-video know beside the text.
//!
//! Legend: `P` images, `B` samples, `S` side of the images that an encoder sees, `I` its tokens, `s` frames of a latent frame, `Z` channels of the latents, `f`, `h`, `w` size of the latents, `H`, `W` size of the video.

use crate::clip::ClipVision;
use crate::config::read_json;
use crate::error::Result;
use crate::transformer::TransformerConfig;
use crate::vae::{AutoencoderKlWan, VaeConfig};
use burn::tensor::{Device, Int, Tensor};
use serde::Deserialize;
use std::path::Path;

/// How the pictures that videos start with reach the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageInput {
    /// Not at all: videos are made of text alone.
    None,
    /// As further channels beside the latents, always (Wan2.1 I2V-14B, Wan2.2 I2V-A14B).
    Channels,
    /// As the first latent frame itself, whose tokens have timestep 0; without a picture, videos are made of text (Wan2.2 TI2V-5B).
    FirstFrame,
}

impl ImageInput {
    /// Of a network, in a model that gives every token a timestep of its own (`expand_timesteps`) or not.
    pub fn new(transformer: &TransformerConfig, expand_timesteps: bool) -> Self {
        match (transformer.starts_with_image(), expand_timesteps && transformer.patch_size[0] == 1) {
            (true, _) => Self::Channels,
            (false, true) => Self::FirstFrame,
            (false, false) => Self::None,
        }
    }

    /// Of the model in a folder.
    ///
    /// # Errors
    /// Configs that cannot be read.
    pub fn of_folder(dir: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Index {
            #[serde(default)]
            expand_timesteps: Option<bool>,
        }
        let index: Index = read_json(&dir.join("model_index.json"))?;
        let transformer = TransformerConfig::load(&dir.join("transformer/config.json"))?;
        Ok(Self::new(&transformer, index.expand_timesteps.unwrap_or(false)))
    }
}

/// Pictures that videos start with, as their readers want them.
#[derive(Debug, Clone)]
pub struct StartImage {
    /// Of the size of the video, [P, 3, H, W] in [0, 1].
    pub frame: Tensor<4>,
    /// Their middle, for an image encoder, where the model has one: [P, 3, S, S] in [0, 1].
    pub square: Option<Tensor<4>>,
}

/// The first frames of videos, as networks know them.
#[derive(Debug, Clone)]
pub struct ImageCondition {
    /// What is beside, or in front of, the noisy latents.
    pub known: Known,
    /// What an image encoder says, which networks of Wan2.1 attend to beside the text: [P, I, D].
    pub features: Option<Tensor<3>>,
}

/// See [`ImageInput`].
#[derive(Debug, Clone)]
pub enum Known {
    /// ```text
    /// s channels     1 in the first latent frame, which is known, and 0 in the others
    /// Z channels     normalised latents of the image followed by grey frames
    /// ```
    ///
    /// [P, s + Z, f, h, w]
    Channels(Tensor<5>),
    /// Normalised latents of the image: [P, Z, 1, h, w].
    FirstFrame(Tensor<5>),
}

impl ImageCondition {
    /// Of images which start videos of `num_frames` frames. As diffusers' `WanImageToVideoPipeline`.
    ///
    /// # Panics
    /// If there is an encoder, and no square for it; if the network has no use for images.
    pub fn new(input: ImageInput, vae: &AutoencoderKlWan, encoder: Option<&ClipVision>, images: StartImage, num_frames: usize) -> Self {
        let features = encoder.map(|encoder| encoder.forward(images.square.expect("an image for the encoder")));
        let [batch, channels, height, width] = images.frame.dims();
        let image = (images.frame.mul_scalar(2.0) - 1.0).reshape([batch, channels, 1, height, width]);
        let known = match input {
            ImageInput::Channels => Known::Channels(channels_of(vae, image, num_frames)),
            ImageInput::FirstFrame => Known::FirstFrame(vae.normalise(vae.encode(image).mean)),
            ImageInput::None => unreachable!("an image for a network that reads none"),
        };
        Self { known, features }
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
        let rows = Tensor::<1, Int>::from_ints(rows.as_slice(), &self.known.tensor().device());
        let features = self.features.clone().map(|features| features.select(0, rows.clone()));
        Self { known: self.known.clone().map(|known| known.select(0, rows)), features }
    }

    /// The same on another device.
    pub fn to_device(&self, device: &Device) -> Self {
        let features = self.features.clone().map(|features| features.to_device(device));
        Self { known: self.known.clone().map(|known| known.to_device(device)), features }
    }

    /// All of these, in order.
    ///
    /// # Panics
    /// If there is none, or they are of different models.
    pub fn cat(parts: Vec<Self>) -> Self {
        let first = parts.first().expect("at least one image").known.clone();
        let (known, features): (Vec<_>, Vec<_>) = parts.into_iter().map(|part| (part.known, part.features)).unzip();
        let features: Vec<_> = features.into_iter().flatten().collect();
        let all = Tensor::cat(known.iter().map(|known| known.tensor().clone()).collect(), 0);
        Self { known: first.map(|_| all), features: (!features.is_empty()).then(|| Tensor::cat(features, 0)) }
    }

    /// The part of the latents [B, Z, f, h, w] that is not known, and so is denoised: all of it, or all but the first latent frame. Noise, steps and
    /// their probabilities are of that part alone.
    pub fn unknown(&self, latents: Tensor<5>) -> Tensor<5> {
        match &self.known {
            Known::Channels(_) => latents,
            Known::FirstFrame(_) => rest(latents),
        }
    }

    /// The latents [B, Z, f, h, w] of samples whose images these are, of their denoised part.
    pub fn whole(&self, latents: Tensor<5>) -> Tensor<5> {
        match &self.known {
            Known::Channels(_) => latents,
            Known::FirstFrame(first) => Tensor::cat(vec![like(first, &latents), latents], 2),
        }
    }

    /// What a network reads: the denoised part with what is known beside or in front of it.
    pub fn input(&self, latents: Tensor<5>) -> Tensor<5> {
        match &self.known {
            Known::Channels(channels) => Tensor::cat(vec![latents.clone(), like(channels, &latents)], 1),
            Known::FirstFrame(_) => self.whole(latents),
        }
    }

    /// A timestep for each token where what is known has another one than the rest, 0: of samples of `tokens` tokens in `frames` latent frames, the
    /// first included. `timesteps` are one for each sample.
    pub fn timesteps(&self, timesteps: &[f64], tokens: usize, frames: usize) -> Vec<f64> {
        let Known::FirstFrame(_) = &self.known else { return timesteps.to_vec() };
        let known = tokens / frames;
        let of_sample = |&t: &f64| std::iter::repeat_n(0.0, known).chain(std::iter::repeat_n(t, tokens - known));
        timesteps.iter().flat_map(of_sample).collect()
    }
}

impl Known {
    fn tensor(&self) -> &Tensor<5> {
        match self {
            Self::Channels(known) | Self::FirstFrame(known) => known,
        }
    }

    fn map(self, f: impl FnOnce(Tensor<5>) -> Tensor<5>) -> Self {
        match self {
            Self::Channels(known) => Self::Channels(f(known)),
            Self::FirstFrame(known) => Self::FirstFrame(f(known)),
        }
    }
}

/// See [`Known::Channels`].
fn channels_of(vae: &AutoencoderKlWan, image: Tensor<5>, num_frames: usize) -> Tensor<5> {
    let [batch, channels, _, height, width] = image.dims();
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
    Tensor::cat(vec![mask, latents], 1)
}

/// All latent frames but the first.
fn rest(latents: Tensor<5>) -> Tensor<5> {
    let frames = latents.dims()[2];
    latents.narrow(2, 1, frames - 1)
}

/// A constant beside latents that may have a graph.
fn like(known: &Tensor<5>, latents: &Tensor<5>) -> Tensor<5> {
    if latents.is_autodiff() { known.clone().autodiff() } else { known.clone() }
}
