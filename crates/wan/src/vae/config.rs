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
    /// Wan2.2's paths around whole levels.
    pub is_residual: bool,
    /// Channels that the encoder sees: those of the video, times the pixels of a patch.
    pub in_channels: usize,
    /// Channels that the decoder makes.
    pub out_channels: usize,
    /// Wan2.2's patches: so many pixels squared become channels.
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

#[rustfmt::skip]
const WAN22_LATENTS_MEAN: [f64; 48] = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
];

#[rustfmt::skip]
const WAN22_LATENTS_STD: [f64; 48] = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
];

/// Most resolutions; Wan has 4.
const MAX_LEVELS: usize = 8;
/// Largest multiple of the base's channels; Wan has 4.
const MAX_MULTIPLE: usize = 64;
/// Largest patch; Wan2.2 has 2.
const MAX_PATCH: usize = 16;

impl VaeConfig {
    /// The autoencoder of Wan2.2 TI2V-5B.
    pub fn wan22() -> Self {
        Self {
            base_dim: 160,
            decoder_base_dim: Some(256),
            z_dim: 48,
            latents_mean: WAN22_LATENTS_MEAN.to_vec(),
            latents_std: WAN22_LATENTS_STD.to_vec(),
            is_residual: true,
            in_channels: 12,
            out_channels: 12,
            patch_size: Some(2),
            ..Self::default()
        }
    }

    /// That of a released model, by the name of its folder: Wan2.2's A14B has the autoencoder of Wan2.1.
    pub fn released(folder: &str) -> Self {
        if folder.to_ascii_lowercase().contains("ti2v-5b") { Self::wan22() } else { Self::default() }
    }

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
        const EDITED: &str = "was the file edited? the sizes must agree with each other";
        let sizes = [
            ("base_dim", self.base_dim),
            ("decoder_base_dim", self.decoder_dim()),
            ("z_dim", self.z_dim),
            ("num_res_blocks", self.num_res_blocks),
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
            ("patch_size", self.patch()),
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
        if self.patch() > MAX_PATCH {
            return Err((format!("`patch_size` is {}: expected 1 to {MAX_PATCH}", self.patch()), EDITED));
        }
        for (name, channels) in [("in_channels", self.in_channels), ("out_channels", self.out_channels)] {
            if !channels.is_multiple_of(self.patch().pow(2)) {
                return Err((
                    format!("`{name}` is {channels}, no multiple of the pixels in a patch of `patch_size` {}", self.patch()),
                    EDITED,
                ));
            }
        }
        if self.is_residual {
            self.check_shortcuts().map_err(|reason| (reason, EDITED))?;
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

    /// Channels around a level must divide those through it.
    fn check_shortcuts(&self) -> Result<(), String> {
        if !self.attn_scales.is_empty() {
            return Err(format!("`attn_scales` is {:?}: there is no attention between residual levels", self.attn_scales));
        }
        for (level, halves_time) in self.temperal_downsample.iter().map(Some).chain([None]).enumerate() {
            let places = match halves_time {
                Some(halves) => 4 * (1 + usize::from(*halves)),
                None => 1,
            };
            let (own, above) = (self.dim_mult[level], self.dim_mult[level.saturating_sub(1)]);
            let fits_down = (self.base_dim * if level == 0 { 1 } else { above } * places).is_multiple_of(self.base_dim * own);
            // upwards the same level starts from the channels of the one below
            let below = self.dim_mult[(level + 1).min(self.dim_mult.len() - 1)];
            let doubles = level > 0 && self.temperal_downsample[level - 1];
            let fits_up = level == 0 || (own * 4 * (1 + usize::from(doubles))).is_multiple_of(below);
            if !fits_down || !fits_up {
                return Err(format!("`dim_mult` is {:?}: the channels of level {level} do not fit its shortcut", self.dim_mult));
            }
        }
        Ok(())
    }

    /// Width of a patch of pixels.
    pub fn patch(&self) -> usize {
        self.patch_size.unwrap_or(1)
    }

    /// Channels of the decoder after a level of `channels` was enlarged.
    pub fn upsampled<T: std::ops::Div<Output = T> + From<u8>>(&self, channels: T) -> T {
        if self.is_residual { channels } else { channels / T::from(2) }
    }

    /// Channels of the decoder at full resolution.
    pub fn decoder_dim(&self) -> usize {
        self.decoder_base_dim.unwrap_or(self.base_dim)
    }

    /// Pixels per latent in height and width.
    pub fn spatial_factor(&self) -> usize {
        self.patch() << (self.dim_mult.len() - 1)
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
