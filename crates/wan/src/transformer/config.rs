//! `transformer/config.json`.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Sizes of a [`WanTransformer`](super::WanTransformer); field names as in diffusers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TransformerConfig {
    /// Patch size in frames, rows, columns.
    pub patch_size: [usize; 3],
    /// Heads.
    pub num_attention_heads: usize,
    /// Features per head.
    pub attention_head_dim: usize,
    /// Latent channels read.
    pub in_channels: usize,
    /// Latent channels written.
    pub out_channels: usize,
    /// Features of the text encoder.
    pub text_dim: usize,
    /// Features of the timestep sinusoid.
    pub freq_dim: usize,
    /// Hidden features of the feed-forward.
    pub ffn_dim: usize,
    /// Blocks.
    pub num_layers: usize,
    /// Whether cross-attention has its affine layer norm.
    #[serde(default = "yes")]
    pub cross_attn_norm: bool,
    /// Kind of query and key norm; only `rms_norm_across_heads` exists.
    #[serde(default)]
    pub qk_norm: Option<String>,
    /// eps of every norm.
    pub eps: f64,
    /// Features of the image encoder (image-to-video); must be absent.
    #[serde(default)]
    pub image_dim: Option<usize>,
    /// Features of the extra key and value projections (image-to-video); must be absent.
    #[serde(default)]
    pub added_kv_proj_dim: Option<usize>,
    /// Longest axis the rotary table covers.
    #[serde(default = "rope_default")]
    pub rope_max_seq_len: usize,
}

fn yes() -> bool {
    true
}

fn rope_default() -> usize {
    1024
}

impl TransformerConfig {
    /// Reads and checks a config.json.
    ///
    /// # Errors
    /// Unreadable file, missing field, or a variant of the model that is not supported.
    pub fn load(path: &Path) -> Result<Self> {
        let config: Self = crate::config::read_json(path)?;
        config.check().map_err(|(reason, hint)| Error::invalid(path, reason, hint))?;
        Ok(config)
    }

    fn check(&self) -> std::result::Result<(), (String, &'static str)> {
        if self.image_dim.is_some() || self.added_kv_proj_dim.is_some() {
            return Err(("`image_dim`/`added_kv_proj_dim` is set".into(), "image-to-video models are not supported; use a text-to-video model"));
        }
        if self.qk_norm.as_deref() != Some("rms_norm_across_heads") {
            return Err((format!("`qk_norm` is `{:?}`", self.qk_norm), "only `rms_norm_across_heads`, the norm of Wan, is supported"));
        }
        if !self.cross_attn_norm {
            return Err(("`cross_attn_norm` is `false`".into(), "every released Wan model has it"));
        }
        let sizes = [self.num_attention_heads, self.in_channels, self.out_channels, self.text_dim, self.ffn_dim];
        let odd = self.attention_head_dim % 2 != 0 || self.freq_dim % 2 != 0;
        if sizes.contains(&0) || self.patch_size.contains(&0) || odd || self.attention_head_dim < 6 {
            return Err(("a size is zero, or a head or sinusoid size is odd or below 6".into(), "check the sizes"));
        }
        Ok(())
    }

    /// The text of a config.json that diffusers loads.
    pub fn to_json(&self) -> String {
        let mut json = serde_json::json!(self);
        json["_class_name"] = "WanTransformer3DModel".into();
        format!("{json:#}\n")
    }

    /// Features of a token: heads x head_dim.
    pub fn dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }
}
