//! The causal video autoencoder of Wan2.1 and Wan2.2 (`AutoencoderKLWan`): video in [-1, 1] to latents and back.
//!
//! Time is compressed so that the first frame stands alone: `1 + k s` frames give `1 + k` latent frames (s = 4 for
//! Wan2.1). The network is causal, so a clip can be processed at once or in chunks with equal results (`pass.rs`).
//!
//! Legend: `B` batch, `C` channels, `F` frames, `H`, `W` size in pixels, `Z` latent channels, `f`, `h`, `w` size of the
//! latents.

mod blocks;
pub mod causal_conv;
mod config;
mod decoder;
mod encoder;
mod fast_conv;
mod matrix_conv;
mod pass;
mod shortcut;
mod tiling;

pub use config::VaeConfig;
pub use pass::Observer;
pub use tiling::Tiling;

use crate::error::{Error, Result};
use crate::param::ParamSet;
use crate::weights::{WeightFiles, Weights, write_atomically, write_params};
use burn::tensor::{DType, Device, Tensor, TensorData};
use causal_conv::CausalConv3d;
use decoder::Decoder;
use encoder::Encoder;
use pass::Pass;
use shortcut::{channels_to_patches, patches_to_channels};
use std::path::Path;

/// A normal distribution of latents.
#[derive(Debug, Clone)]
pub struct Posterior {
    /// [B, Z, f, h, w]
    pub mean: Tensor<5>,
    /// Logarithm of the variance, in [-30, 20]. [B, Z, f, h, w]
    pub logvar: Tensor<5>,
}

/// The autoencoder.
#[derive(Debug)]
pub struct AutoencoderKlWan {
    /// Sizes.
    pub config: VaeConfig,
    /// All weights, by their names in the file; empty until filled from [`Weights::finish`].
    pub params: ParamSet,
    /// Tiles for large frames; none: every frame as a whole.
    pub tiling: Option<Tiling>,
    /// Limit of `B F H W base_dim` for one pass. A clip beyond it goes through in chunks of time, which needs less memory;
    /// 0: one latent frame at a time, as the reference does.
    pub max_elements_per_pass: usize,
    encoder: Encoder,
    quant_conv: CausalConv3d,
    post_quant_conv: CausalConv3d,
    decoder: Decoder,
}

/// About 256 MiB for each activation at full resolution.
const DEFAULT_MAX_ELEMENTS: usize = 1 << 26;

impl AutoencoderKlWan {
    /// The autoencoder of `config` with weights from `w`. The caller closes `w` with [`Weights::finish`] and puts the
    /// resulting set into [`params`](Self::params).
    pub fn new(config: VaeConfig, w: &Weights) -> Self {
        let z = config.z_dim;
        Self {
            encoder: Encoder::new(&w.sub("encoder"), &config),
            quant_conv: CausalConv3d::new(&w.sub("quant_conv"), 2 * z, 2 * z, [1; 3]),
            post_quant_conv: CausalConv3d::new(&w.sub("post_quant_conv"), z, z, [1; 3]),
            decoder: Decoder::new(&w.sub("decoder"), &config),
            config,
            params: ParamSet::default(),
            tiling: None,
            max_elements_per_pass: DEFAULT_MAX_ELEMENTS,
        }
    }

    /// An autoencoder to be trained from scratch, f32.
    ///
    /// # Errors
    /// A configuration that is not supported.
    pub fn random(config: VaeConfig, seed: u64, device: &Device) -> Result<Self> {
        config.check().map_err(|(reason, hint)| Error::invalid("config.json", reason, hint))?;
        Self::finish(config, Weights::random(seed, device))
    }

    /// Reads `config.json` and `diffusion_pytorch_model.safetensors` (one file or shards) of a `vae` folder.
    ///
    /// # Errors
    /// An absent or broken file, an unsupported configuration, weights that do not fit it.
    pub fn load(dir: &Path, device: &Device, dtype: DType) -> Result<Self> {
        let config = VaeConfig::read(&dir.join(CONFIG_FILE))?;
        let files = WeightFiles::open_folder(dir, WEIGHTS_STEM)?;
        files.check(&Weights::declared(|w| Self::finish(config.clone(), w))?, &[])?;
        Self::finish(config, Weights::from_files(files, device, dtype))
    }

    fn finish(config: VaeConfig, w: Weights) -> Result<Self> {
        let mut vae = Self::new(config, &w);
        (vae.params, _) = w.finish(&[])?;
        Ok(vae)
    }

    /// Writes `config.json` and `diffusion_pytorch_model.safetensors` (f32) into an existing folder.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, dir: &Path) -> Result<()> {
        write_params(&dir.join(format!("{WEIGHTS_STEM}.safetensors")), &self.params)?;
        write_atomically(&dir.join(CONFIG_FILE), self.config.to_json().as_bytes())
    }

    /// video [B, C, F, H, W] in [-1, 1] -> [B, Z, f, h, w]. Frames beyond `1 + k temporal_factor` are dropped.
    ///
    /// # Panics
    /// If height or width is no multiple of the spatial factor.
    pub fn encode(&self, video: Tensor<5>) -> Posterior {
        self.split(self.moments(video))
    }

    /// As [`encode`](Self::encode) without tiles, showing the output of every part to `observer`.
    pub fn encode_observed(&self, video: Tensor<5>, observer: Observer<'_>) -> Posterior {
        self.split(self.encode_whole(video, Some(observer)))
    }

    /// Latents [B, Z, f, h, w] as [`encode`](Self::encode) gives them -> video [B, C, F, H, W], clamped to [-1, 1].
    pub fn decode(&self, latents: Tensor<5>) -> Tensor<5> {
        self.decode_unclamped(latents).clamp(-1.0, 1.0)
    }

    /// As [`decode`](Self::decode), not clamped: for training.
    pub fn decode_unclamped(&self, latents: Tensor<5>) -> Tensor<5> {
        let [.., height, width] = latents.dims();
        if let Some(pixels) = &self.tiling {
            let tiles = pixels.in_latents(self.config.spatial_factor());
            if tiles.divides(height, width) {
                return tiles.map(&latents, pixels, |tile| self.decode_whole(tile, None));
            }
        }
        self.decode_whole(latents, None)
    }

    /// As [`decode`](Self::decode) without tiles, showing the output of every part to `observer`.
    pub fn decode_observed(&self, latents: Tensor<5>, observer: Observer<'_>) -> Tensor<5> {
        self.decode_whole(latents, Some(observer)).clamp(-1.0, 1.0)
    }

    /// Of latents [B, Z, f, h, w], those that the first `frames` frames are decoded from: time is causal, so their clip is the beginning of the
    /// whole one, bit for bit on the CPU.
    pub fn leading(&self, latents: Tensor<5>, frames: usize) -> Tensor<5> {
        let count = self.config.leading_latent_frames(frames).min(latents.dims()[2]);
        latents.narrow(2, 0, count)
    }

    /// Normalised latents [B, Z, f, h, w], as the transformer makes them -> frames [B, C, F, H, W] in [0, 1].
    pub fn decode_to_frames(&self, latents: Tensor<5>) -> Tensor<5> {
        self.decode(self.denormalise(latents)).mul_scalar(0.5).add_scalar(0.5)
    }

    /// Latents of [`encode`](Self::encode) [B, Z, f, h, w] -> latents of the transformer, `(x - mean) / std` per channel.
    pub fn normalise(&self, latents: Tensor<5>) -> Tensor<5> {
        let (mean, std) = self.statistics(&latents);
        (latents - mean) / std
    }

    /// The inverse of [`normalise`](Self::normalise).
    pub fn denormalise(&self, latents: Tensor<5>) -> Tensor<5> {
        let (mean, std) = self.statistics(&latents);
        latents * std + mean
    }

    /// Mean and standard deviation of the latent channels, [1, Z, 1, 1, 1].
    fn statistics(&self, like: &Tensor<5>) -> (Tensor<5>, Tensor<5>) {
        let tensor = |values: &[f64]| {
            let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
            let data = TensorData::new(values, [1, self.config.z_dim, 1, 1, 1]);
            Tensor::from_data(data, (&like.device().inner(), like.dtype()))
        };
        (tensor(&self.config.latents_mean), tensor(&self.config.latents_std))
    }

    /// moments [B, 2Z, f, h, w]
    fn split(&self, moments: Tensor<5>) -> Posterior {
        let z = self.config.z_dim;
        let mean = moments.clone().narrow(1, 0, z);
        Posterior { mean, logvar: moments.narrow(1, z, z).clamp(-30.0, 20.0) }
    }

    fn moments(&self, video: Tensor<5>) -> Tensor<5> {
        let [.., height, width] = video.dims();
        if let Some(pixels) = &self.tiling
            && pixels.divides(height, width)
        {
            let tiles = pixels.in_latents(self.config.spatial_factor());
            return pixels.map(&video, &tiles, |tile| self.encode_whole(tile, None));
        }
        self.encode_whole(video, None)
    }

    fn encode_whole(&self, video: Tensor<5>, observer: Option<Observer<'_>>) -> Tensor<5> {
        let [batch, _, frames, height, width] = video.dims();
        let factor = self.config.spatial_factor();
        assert!(height.is_multiple_of(factor) && width.is_multiple_of(factor), "{height}x{width} is no multiple of {factor}");
        let patch = self.config.patch();
        let video = if patch > 1 { patches_to_channels(video, patch) } else { video };
        let places = height * width / (patch * patch);
        let latent_frames = self.config.latent_frames(frames);
        let mut pass = Pass::new(observer);
        let mut parts = Vec::new();
        let chunks = self.chunks(latent_frames, batch * places * self.config.base_dim);
        for (i, (start, end)) in chunks.iter().enumerate() {
            pass.start_chunk(i, *end == latent_frames);
            let from = if *start == 0 { 0 } else { self.config.frames(*start) };
            let chunk = video.clone().narrow(2, from, self.config.frames(*end) - from);
            parts.push(self.encoder.forward(chunk, &mut pass));
        }
        self.quant_conv.forward_pointwise(join(parts))
    }

    fn decode_whole(&self, latents: Tensor<5>, observer: Option<Observer<'_>>) -> Tensor<5> {
        let [batch, _, latent_frames, height, width] = latents.dims();
        let patch = self.config.patch();
        let places = height * width * (self.config.spatial_factor() / patch).pow(2);
        let latents = self.post_quant_conv.forward_pointwise(latents);
        let mut pass = Pass::new(observer);
        let mut parts = Vec::new();
        let chunks = self.chunks(latent_frames, batch * places * self.config.decoder_dim());
        for (i, (start, end)) in chunks.iter().enumerate() {
            pass.start_chunk(i, *end == latent_frames);
            parts.push(self.decoder.forward(latents.clone().narrow(2, *start, end - start), &mut pass));
        }
        let video = join(parts);
        if patch > 1 { channels_to_patches(video, patch) } else { video }
    }

    /// Ranges of latent frames that go through the network together.
    fn chunks(&self, latent_frames: usize, elements_per_frame: usize) -> Vec<(usize, usize)> {
        let per_latent_frame = elements_per_frame * self.config.temporal_factor();
        let size = (self.max_elements_per_pass / per_latent_frame).max(1);
        (0..latent_frames).step_by(size).map(|start| (start, (start + size).min(latent_frames))).collect()
    }
}

const CONFIG_FILE: &str = "config.json";
const WEIGHTS_STEM: &str = "diffusion_pytorch_model";

fn join(mut parts: Vec<Tensor<5>>) -> Tensor<5> {
    if parts.len() == 1 { parts.swap_remove(0) } else { Tensor::cat(parts, 2) }
}

/// Parameters of an autoencoder.
///
/// # Panics
/// If the configuration is not supported.
pub fn num_parameters(config: &VaeConfig) -> usize {
    let declared = Weights::declared(|w| Ok(AutoencoderKlWan::new(config.clone(), &w)));
    declared.map_or(0, |declared| declared.iter().map(|tensor| tensor.num_elements()).sum())
}
