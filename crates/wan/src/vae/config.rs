//! The sizes of an autoencoder, as `vae/config.json` has them.

use crate::config::{check_sizes, read_text};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// `vae/config.json`. Keys are those of the reference (with its spelling); keys that do not matter here are ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VaeConfig {
    /// Channels of the encoder at full resolution.
    pub base_dim: usize,
    /// Channels of the decoder at full resolution; as the encoder if absent.
    pub decoder_base_dim: Option<usize>,
    /// Channels of the latents.
    pub z_dim: usize,
    /// Channels per resolution as multiples of the base, from full resolution down.
    pub dim_mult: Vec<usize>,
    /// Residual blocks per resolution; the decoder has one more.
    pub num_res_blocks: usize,
    /// Scales (1, 1/2, 1/4, ..) at which the encoder has attention after each residual block.
    pub attn_scales: Vec<f64>,
    /// Whether each halving of height and width also halves the time.
    pub temperal_downsample: Vec<bool>,
    /// Mean of each latent channel over the training data.
    pub latents_mean: Vec<f64>,
    /// Standard deviation of each latent channel.
    pub latents_std: Vec<f64>,
    /// Wan2.2's residual shortcuts; not supported.
    pub is_residual: bool,
    /// Channels of the video.
    pub in_channels: usize,
    /// Channels of the decoded video.
    pub out_channels: usize,
    /// Wan2.2's pixel unshuffle; not supported.
    pub patch_size: Option<usize>,
}

/// The Wan2.1 autoencoder.
impl Default for VaeConfig {
    fn default() -> Self {
        Self {
            base_dim: 96,
            decoder_base_dim: None,
            z_dim: 16,
            dim_mult: vec![1, 2, 4, 4],
            num_res_blocks: 2,
            attn_scales: vec![],
            temperal_downsample: vec![false, true, true],
            latents_mean: WAN_LATENTS_MEAN.to_vec(),
            latents_std: WAN_LATENTS_STD.to_vec(),
            is_residual: false,
            in_channels: 3,
            out_channels: 3,
            patch_size: None,
        }
    }
}

const WAN_LATENTS_MEAN: [f64; 16] = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503,
    -0.2921,
];

const WAN_LATENTS_STD: [f64; 16] =
    [2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160];

/// Most resolutions; Wan has 4.
const MAX_LEVELS: usize = 8;
/// Largest multiple of the base's channels; Wan has 4.
const MAX_MULTIPLE: usize = 64;

impl VaeConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// The file is absent, is not JSON, or describes an autoencoder that is not supported.
    pub fn read(path: &Path) -> Result<Self> {
        let text = read_text(path)?;
        let config: Self = serde_json::from_str(&text)
            .map_err(|e| Error::invalid(path, e.to_string(), "this is the `config.json` of an AutoencoderKLWan"))?;
        config.check().map_err(|(reason, hint)| Error::invalid(path, reason, hint))?;
        Ok(config)
    }

    /// The text of a `config.json` that diffusers loads.
    pub fn to_json(&self) -> String {
        let mut json = serde_json::json!(self);
        json["_class_name"] = "AutoencoderKLWan".into();
        format!("{json:#}\n")
    }

    /// What makes the configuration unusable, with a hint.
    ///
    /// # Errors
    /// `(reason, hint)` of the first thing that does not fit.
    pub fn check(&self) -> Result<(), (String, &'static str)> {
        const WAN22: &str = "the Wan2.2 autoencoder is not supported yet: use the one of Wan2.1";
        const EDITED: &str = "was the file edited? the sizes must agree with each other";
        if self.is_residual {
            return Err(("`is_residual` is true".into(), WAN22));
        }
        if let Some(size) = self.patch_size {
            return Err((format!("`patch_size` is `{size}`"), WAN22));
        }
        let sizes = [
            ("base_dim", self.base_dim),
            ("decoder_base_dim", self.decoder_dim()),
            ("z_dim", self.z_dim),
            ("num_res_blocks", self.num_res_blocks),
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
        ];
        check_sizes(&sizes).map_err(|reason| (reason, EDITED))?;
        if self.dim_mult.is_empty() || self.dim_mult.len() > MAX_LEVELS || self.dim_mult.iter().any(|m| !(1..=MAX_MULTIPLE).contains(m)) {
            return Err((
                format!("`dim_mult` is {:?}: expected 1 to {MAX_LEVELS} numbers from 1 to {MAX_MULTIPLE}", self.dim_mult),
                EDITED,
            ));
        }
        if self.temperal_downsample.len() + 1 != self.dim_mult.len() {
            let (halvings, levels) = (self.temperal_downsample.len(), self.dim_mult.len());
            return Err((format!("`temperal_downsample` has {halvings} entries for {levels} in `dim_mult`"), EDITED));
        }
        for (name, values) in [("latents_mean", &self.latents_mean), ("latents_std", &self.latents_std)] {
            if values.len() != self.z_dim {
                return Err((format!("`{name}` has {} entries for `z_dim` {}", values.len(), self.z_dim), EDITED));
            }
        }
        if let Some(std) = self.latents_std.iter().find(|std| !(**std > 0.0 && std.is_finite())) {
            return Err((format!("`latents_std` contains `{std}`"), EDITED));
        }
        Ok(())
    }

    /// Channels of the decoder at full resolution.
    pub fn decoder_dim(&self) -> usize {
        self.decoder_base_dim.unwrap_or(self.base_dim)
    }

    /// Pixels per latent in height and width.
    pub fn spatial_factor(&self) -> usize {
        1 << (self.dim_mult.len() - 1)
    }

    /// Frames per latent frame, after the first frame, which stands alone.
    pub fn temporal_factor(&self) -> usize {
        1 << self.temperal_downsample.iter().filter(|halves| **halves).count()
    }

    /// Latent frames of a clip; frames beyond `1 + k temporal_factor` are dropped.
    ///
    /// # Panics
    /// If there is no frame.
    pub fn latent_frames(&self, frames: usize) -> usize {
        assert!(frames > 0, "a clip has at least one frame");
        1 + (frames - 1) / self.temporal_factor()
    }

    /// Latent frames from the start of a clip that its first `frames` frames are decoded from.
    pub fn leading_latent_frames(&self, frames: usize) -> usize {
        1 + frames.saturating_sub(1).div_ceil(self.temporal_factor())
    }

    /// Frames of a decoded clip.
    pub fn frames(&self, latent_frames: usize) -> usize {
        1 + (latent_frames - 1) * self.temporal_factor()
    }
}
