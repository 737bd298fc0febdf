//! `text_encoder/config.json`.

use crate::config::{check_sizes, read_text};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Sizes of a UMT5 encoder; keys as in `transformers`, those that do not matter to an encoder are ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Umt5Config {
    /// Rows of the embedding; may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Features of a token.
    pub d_model: usize,
    /// Features of an attention head.
    pub d_kv: usize,
    /// Hidden features of the feed-forward layer.
    pub d_ff: usize,
    /// Layers.
    pub num_layers: usize,
    /// Attention heads; `num_heads * d_kv` need not be `d_model`.
    pub num_heads: usize,
    /// Buckets of relative positions.
    #[serde(default = "default_num_buckets")]
    pub relative_attention_num_buckets: usize,
    /// Distance from which on all positions share a bucket.
    #[serde(default = "default_max_distance")]
    pub relative_attention_max_distance: usize,
    /// Epsilon of the norms.
    #[serde(default = "default_epsilon")]
    pub layer_norm_epsilon: f64,
    /// Only `gated-gelu` is known.
    #[serde(default = "default_feed_forward")]
    pub feed_forward_proj: String,
}

fn default_num_buckets() -> usize {
    32
}

fn default_max_distance() -> usize {
    128
}

fn default_epsilon() -> f64 {
    1e-6
}

fn default_feed_forward() -> String {
    "gated-gelu".into()
}

impl Umt5Config {
    /// Reads `DIR/config.json`.
    ///
    /// # Errors
    /// A missing file, a missing or ill-typed key, or a value this encoder does not support.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = read_text(&path)?;
        let hint = "this must be the config.json of a UMT5 encoder (`text_encoder/`)";
        let config: Self = serde_json::from_str(&text).map_err(|e| Error::invalid(&path, e.to_string(), hint))?;
        config.check().map_err(|reason| Error::invalid(&path, reason, hint))?;
        Ok(config)
    }

    /// The sizes of UMT5-XXL, the text encoder of every released Wan.
    pub fn xxl() -> Self {
        Self {
            vocab_size: 256_384,
            d_model: 4096,
            d_kv: 64,
            d_ff: 10_240,
            num_layers: 24,
            num_heads: 64,
            relative_attention_num_buckets: default_num_buckets(),
            relative_attention_max_distance: default_max_distance(),
            layer_norm_epsilon: default_epsilon(),
            feed_forward_proj: default_feed_forward(),
        }
    }

    /// Parameters of the whole encoder.
    pub fn num_parameters(&self) -> usize {
        self.vocab_size * self.d_model + self.num_layers * self.num_layer_parameters() + self.d_model
    }

    /// Parameters of one layer: four projections, the position bias, three feed-forward matrices, two norms.
    pub fn num_layer_parameters(&self) -> usize {
        let inner = self.num_heads * self.d_kv;
        4 * self.d_model * inner + self.relative_attention_num_buckets * self.num_heads + 3 * self.d_model * self.d_ff + 2 * self.d_model
    }

    /// The text of a `config.json` that `transformers` loads as a `UMT5EncoderModel`.
    pub fn to_json(&self) -> String {
        let mut json = serde_json::json!({
            "architectures": ["UMT5EncoderModel"],
            "model_type": "umt5",
            "is_encoder_decoder": true,
            "num_decoder_layers": self.num_layers,
            "dropout_rate": 0.1,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        });
        if let (Some(json), Ok(serde_json::Value::Object(own))) = (json.as_object_mut(), serde_json::to_value(self)) {
            json.extend(own);
        }
        format!("{json:#}\n")
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.feed_forward_proj != "gated-gelu" {
            return Err(format!("feed_forward_proj is `{}`, only `gated-gelu` is supported", self.feed_forward_proj));
        }
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("d_model", self.d_model),
            ("d_kv", self.d_kv),
            ("d_ff", self.d_ff),
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
        ];
        check_sizes(&sizes)?;
        let (buckets, distance) = (self.relative_attention_num_buckets, self.relative_attention_max_distance);
        check_sizes(&[("relative_attention_num_buckets", buckets), ("relative_attention_max_distance", distance)])?;
        if buckets < 4 || !buckets.is_multiple_of(4) {
            return Err(format!("relative_attention_num_buckets is {buckets}, not a positive multiple of 4"));
        }
        if distance <= buckets / 4 {
            return Err(format!("relative_attention_max_distance is {distance}, expected more than {}", buckets / 4));
        }
        if !(self.layer_norm_epsilon.is_finite() && self.layer_norm_epsilon > 0.0) {
            return Err(format!("layer_norm_epsilon is {}, expected a positive number", self.layer_norm_epsilon));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(json: &str) -> Result<Umt5Config> {
        let dir = tempfile::tempdir().expect("temporary folder");
        std::fs::write(dir.path().join("config.json"), json).expect("writable");
        Umt5Config::load(dir.path())
    }

    const GOOD: &str = r#"{"vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "something_else": null}"#;

    #[test]
    fn unknown_keys_are_ignored_and_writing_reads_back() {
        let config = load(GOOD).expect("valid");
        assert_eq!(load(&config.to_json()).expect("own text"), config);
    }

    #[test]
    fn messages_name_file_key_and_value() {
        let relu = load(&GOOD.replace("gated-gelu", "relu")).expect_err("relu is refused").to_string();
        assert!(relu.contains("config.json") && relu.contains("feed_forward_proj is `relu`"), "{relu}");
        let missing = load(&GOOD.replace("d_kv", "dkv")).expect_err("d_kv is needed").to_string();
        assert!(missing.contains("d_kv"), "{missing}");
        let zero = load(&GOOD.replace("\"num_layers\": 2", "\"num_layers\": 0")).expect_err("no layers").to_string();
        assert!(zero.contains("`num_layers` is 0"), "{zero}");
    }
}
