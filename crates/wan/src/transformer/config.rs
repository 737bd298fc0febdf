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
    /// Features of the image encoder, if cross-attention also attends to an image (Wan2.1 image-to-video).
    #[serde(default)]
    pub image_dim: Option<usize>,
    /// Inputs of the projections of the image: those of a token.
    #[serde(default)]
    pub added_kv_proj_dim: Option<usize>,
    /// Places of two images (first and last frame to video); must be absent.
    #[serde(default)]
    pub pos_embed_seq_len: Option<usize>,
    /// Longest axis the rotary table covers.
    #[serde(default = "rope_default")]
    pub rope_max_seq_len: usize,
}

/// Most latents of a patch; Wan has 4.
const MAX_PATCH: usize = 4096;

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

    /// The sizes of a released model, recognised by the name of its folder (`Wan2.1-T2V-1.3B-Diffusers`,
    /// `Wan2.1-T2V-14B-Diffusers`, `Wan2.1-I2V-14B-480P-Diffusers`, `Wan2.2-T2V-A14B-Diffusers`, `Wan2.2-I2V-A14B-Diffusers`, `Wan2.2-TI2V-5B-Diffusers`): enough to plan a run on a machine that does not have it.
    pub fn released(folder: &str) -> Option<Self> {
        match folder.to_ascii_lowercase() {
            // each of its two networks
            name if name.contains("wan2.2-t2v-a14b") => Some(Self::wan21_14b()),
            name if name.contains("wan2.1-i2v-14b") => Some(Self::wan21_i2v_14b()),
            name if name.contains("wan2.2-i2v-a14b") => Some(Self::wan22_i2v_14b()),
            name if name.contains("wan2.2-ti2v-5b") => Some(Self::wan22_ti2v_5b()),
            name if !name.contains("wan2.1-t2v") => None,
            name if name.contains("1.3b") => Some(Self::wan21_1_3b()),
            name if name.contains("14b") => Some(Self::wan21_14b()),
            _ => None,
        }
    }

    /// Whether it reads the start of the video beside the latents (image-to-video): channels that it does not write.
    pub fn starts_with_image(&self) -> bool {
        self.in_channels > self.out_channels
    }

    /// Wan2.1 text-to-video 1.3B.
    pub fn wan21_1_3b() -> Self {
        Self::wan21(12, 8960, 30)
    }

    /// Wan2.1 text-to-video 14B.
    pub fn wan21_14b() -> Self {
        Self::wan21(40, 13824, 40)
    }

    /// Wan2.1 image-to-video 14B: the same, and it attends to what an image encoder says.
    pub fn wan21_i2v_14b() -> Self {
        let text = Self::wan22_i2v_14b();
        Self { image_dim: Some(1280), added_kv_proj_dim: Some(text.dim()), ..text }
    }

    /// Each network of Wan2.2 image-to-video A14B: it reads 4 channels of a mask and 16 of the image beside the latents.
    pub fn wan22_i2v_14b() -> Self {
        Self { in_channels: 36, ..Self::wan21_14b() }
    }

    /// Wan2.2 text-and-image-to-video 5B.
    pub fn wan22_ti2v_5b() -> Self {
        Self { in_channels: 48, out_channels: 48, ..Self::wan21(24, 14336, 30) }
    }

    fn wan21(num_attention_heads: usize, ffn_dim: usize, num_layers: usize) -> Self {
        Self {
            patch_size: [1, 2, 2],
            num_attention_heads,
            attention_head_dim: 128,
            in_channels: 16,
            out_channels: 16,
            text_dim: 4096,
            freq_dim: 256,
            ffn_dim,
            num_layers,
            cross_attn_norm: true,
            qk_norm: Some("rms_norm_across_heads".into()),
            eps: 1e-6,
            image_dim: None,
            added_kv_proj_dim: None,
            pos_embed_seq_len: None,
            rope_max_seq_len: rope_default(),
        }
    }

    fn check(&self) -> std::result::Result<(), (String, &'static str)> {
        if let Some(places) = self.pos_embed_seq_len {
            return Err((format!("`pos_embed_seq_len` is `{places}`"), "models for a first and a last frame are not supported"));
        }
        if self.qk_norm.as_deref() != Some("rms_norm_across_heads") {
            return Err((format!("`qk_norm` is `{:?}`", self.qk_norm), "only `rms_norm_across_heads`, the norm of Wan, is supported"));
        }
        if !self.cross_attn_norm {
            return Err(("`cross_attn_norm` is `false`".into(), "every released Wan model has it"));
        }
        let sizes = [
            ("num_attention_heads", self.num_attention_heads),
            ("attention_head_dim", self.attention_head_dim),
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
            ("text_dim", self.text_dim),
            ("freq_dim", self.freq_dim),
            ("ffn_dim", self.ffn_dim),
            ("num_layers", self.num_layers),
            ("rope_max_seq_len", self.rope_max_seq_len),
            ("patch_size", self.patch_size[0]),
            ("patch_size", self.patch_size[1]),
            ("patch_size", self.patch_size[2]),
        ];
        crate::config::check_sizes(&sizes).map_err(|reason| (reason, "compare with the config.json of the original model"))?;
        if self.patch_size.iter().product::<usize>() > MAX_PATCH {
            return Err((format!("`patch_size` is {:?}", self.patch_size), "that of every released Wan model is [1, 2, 2]"));
        }
        self.check_image()?;
        let odd = !self.attention_head_dim.is_multiple_of(2) || !self.freq_dim.is_multiple_of(2);
        if odd || self.attention_head_dim < 6 {
            return Err(("a head or sinusoid size is odd or below 6".into(), "check the sizes"));
        }
        Ok(())
    }

    fn check_image(&self) -> std::result::Result<(), (String, &'static str)> {
        const HINT: &str = "Wan2.1 image-to-video has both, `added_kv_proj_dim` equal to heads x head_dim; all other models have neither";
        let (image, added, dim) = (self.image_dim, self.added_kv_proj_dim, self.dim());
        let Some(features) = image else {
            return added.map_or(Ok(()), |added| Err((format!("`added_kv_proj_dim` is `{added}`, but `image_dim` is absent"), HINT)));
        };
        crate::config::check_sizes(&[("image_dim", features)]).map_err(|reason| (reason, HINT))?;
        if added != Some(dim) {
            return Err((format!("`added_kv_proj_dim` is `{added:?}` for heads x head_dim = {dim}"), HINT));
        }
        Ok(())
    }

    /// The text of a config.json that diffusers loads.
    pub fn to_json(&self) -> String {
        let mut json = serde_json::json!(self);
        json["_class_name"] = "WanTransformer3DModel".into();
        format!("{json:#}\n")
    }

    /// Every linear layer that can be adapted: (name, inputs, outputs), in the order of the model.
    pub fn linear_layers(&self) -> Vec<(String, usize, usize)> {
        let (dim, patch) = (self.dim(), self.patch_size.iter().product::<usize>());
        let condition = "condition_embedder";
        let mut layers = vec![
            ("patch_embedding".to_owned(), self.in_channels * patch, dim),
            (format!("{condition}.time_embedder.linear_1"), self.freq_dim, dim),
            (format!("{condition}.time_embedder.linear_2"), dim, dim),
            (format!("{condition}.time_proj"), dim, 6 * dim),
            (format!("{condition}.text_embedder.linear_1"), self.text_dim, dim),
            (format!("{condition}.text_embedder.linear_2"), dim, dim),
        ];
        if let Some(features) = self.image_dim {
            layers.push((format!("{condition}.image_embedder.ff.net.0.proj"), features, features));
            layers.push((format!("{condition}.image_embedder.ff.net.2"), features, dim));
        }
        for block in (0..self.num_layers).map(|i| format!("blocks.{i}")) {
            for layer in ["attn1", "attn2"].iter().flat_map(|a| ["to_q", "to_k", "to_v", "to_out.0"].map(|l| format!("{block}.{a}.{l}"))) {
                layers.push((layer, dim, dim));
            }
            let image = ["add_k_proj", "add_v_proj"].iter().filter(|_| self.image_dim.is_some());
            layers.extend(image.map(|layer| (format!("{block}.attn2.{layer}"), dim, dim)));
            layers.push((format!("{block}.ffn.net.0.proj"), dim, self.ffn_dim));
            layers.push((format!("{block}.ffn.net.2"), self.ffn_dim, dim));
        }
        layers.push(("proj_out".to_owned(), dim, self.out_channels * patch));
        layers
    }

    /// Parameters of the whole transformer.
    pub fn num_parameters(&self) -> usize {
        let dim = self.dim();
        let linears: usize = self.linear_layers().iter().map(|(_, inputs, outputs)| (inputs + 1) * outputs).sum();
        // per block: modulation table, affine norm, query and key norms of both attentions; head: its table; image: two norms, key norms
        let image = self.image_dim.map_or(0, |features| 2 * features + 2 * dim + self.num_layers * dim);
        linears + self.num_layers * (6 + 2 + 4) * dim + 2 * dim + image
    }

    /// Those of them that stay f32 in a bf16 model: time embedding, modulation tables, affine norms.
    pub fn num_f32_parameters(&self) -> usize {
        let dim = self.dim();
        (self.freq_dim + 1 + dim + 1) * dim + self.num_layers * (6 + 2) * dim + 2 * dim
    }

    /// Features of a token: heads x head_dim.
    pub fn dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }
}
