//! What the config of an adapter says about the scale of each layer, as PEFT reads it.
//!
//! ```text
//! scale = alpha / rank,  or alpha / sqrt(rank) with use_rslora (Kalajdzievski 2023)
//! ```

use crate::error::{Error, Result};
use crate::original::original_name;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The scales of one adapter.
#[derive(Debug)]
pub(super) struct Scales {
    alpha: f64,
    /// `alpha_pattern`, in the order of the file: the first that matches a layer counts.
    patterns: Vec<(Pattern, f64)>,
    use_rslora: bool,
}

/// Kinds of adapters that compute something else than `scale B A x`; absent, null or false in all others.
const OTHER_KINDS: [&str; 6] = ["use_dora", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens", "kasa_config"];

/// Starts of adapters that go with another base weight than that of the model.
const OTHER_BASES: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

impl Scales {
    /// From `config`, found in the file `path`, whose keys begin with `prefix`.
    ///
    /// # Errors
    /// A key with a value that is not understood, by name.
    pub(super) fn new(path: &Path, config: &Value, prefix: &str) -> Result<Self> {
        let get = |key: &str| config.get(format!("{prefix}{key}")).filter(|value| !value.is_null());
        let bad = |key: &str, reason: &str, hint: &str| Error::invalid(path, format!("`{prefix}{key}` is {reason}"), hint);
        let alpha = get("lora_alpha").and_then(Value::as_f64);
        let alpha = alpha.ok_or_else(|| bad("lora_alpha", "missing or not a number", "PEFT writes it beside the weights"))?;
        if let Some(kind) = get("peft_type").filter(|kind| kind.as_str() != Some("LORA")) {
            return Err(bad("peft_type", &format!("`{kind}`"), "only `LORA` is supported"));
        }
        if let Some((key, value)) = OTHER_KINDS.iter().find_map(|key| Some((key, get(key).filter(|value| **value != false)?))) {
            return Err(bad(key, &format!("`{value}`"), "such adapters compute something else than LoRA and are not supported"));
        }
        let init = get("init_lora_weights").and_then(Value::as_str).unwrap_or_default().to_lowercase();
        if OTHER_BASES.iter().any(|other| init.starts_with(other)) {
            let hint = "it belongs to changed weights of the model: convert it with `path_initial_model_for_weight_conversion` of PEFT";
            return Err(bad("init_lora_weights", &format!("`{init}`"), hint));
        }
        let use_rslora = match get("use_rslora") {
            None => false,
            Some(value) => value.as_bool().ok_or_else(|| bad("use_rslora", &format!("`{value}`"), "expected true or false"))?,
        };
        let patterns = match get("alpha_pattern") {
            None => Vec::new(),
            Some(value) => {
                let table = value.as_object().ok_or_else(|| bad("alpha_pattern", &format!("`{value}`"), "expected layer = alpha"))?;
                let entry = |(key, alpha): (&String, &Value)| Some((Pattern::parse(key)?, alpha.as_f64()?));
                let hint = "the name of a layer, or the end of one at a dot, and a number are supported";
                let parsed = |(key, alpha)| {
                    entry((key, alpha)).ok_or_else(|| bad("alpha_pattern", &format!("`{key}` = `{alpha}`, which is not understood"), hint))
                };
                table.iter().map(parsed).collect::<Result<_>>()?
            }
        };
        Ok(Self { alpha, patterns, use_rslora })
    }

    /// Of an `adapter_config.json`.
    ///
    /// # Errors
    /// As [`new`](Self::new); a file that cannot be read.
    pub(super) fn of_config(path: &Path) -> Result<Self> {
        Self::new(path, &crate::config::read_json(path)?, "")
    }

    /// Of what diffusers writes into the header of a file; none if it says nothing about the transformer.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(super) fn of_metadata(path: &Path, text: &str) -> Result<Option<Self>> {
        let hint = "remove the entry from the header of the file: alpha is then the rank";
        let config: Value = serde_json::from_str(text)
            .map_err(|e| Error::invalid(path, format!("`{}` is not valid JSON ({e})", super::METADATA_KEY), hint))?;
        config.get("transformer.lora_alpha").map(|_| Self::new(path, &config, "transformer.")).transpose()
    }

    /// The alpha with which a plain adapter of `rank` has the same scale on `layer`.
    pub(super) fn alpha(&self, layer: &str, rank: usize) -> f64 {
        let own = self.patterns.iter().find(|(pattern, _)| pattern.matches(layer)).map_or(self.alpha, |(_, alpha)| *alpha);
        if self.use_rslora { own * (rank as f64).sqrt() } else { own }
    }

    /// Refuses patterns that match none of `layers`: they would be meant for something.
    ///
    /// # Errors
    /// The first of them.
    pub(super) fn check(&self, path: PathBuf, layers: &[&str]) -> Result<()> {
        match self.patterns.iter().find(|(pattern, _)| !layers.iter().any(|layer| pattern.matches(layer))) {
            Some((Pattern { name, .. }, _)) => {
                let hint = "the adapter was made for another model, or its config for another adapter";
                Err(Error::invalid(path, format!("`{name}` in `alpha_pattern` is no layer of the model"), hint))
            }
            None => Ok(()),
        }
    }
}

/// A key of `alpha_pattern`. PEFT takes it as a regular expression for the end of a name at a dot; what people and programs write is a name,
/// perhaps with `^` in front, which makes it a whole one.
#[derive(Debug)]
struct Pattern {
    name: String,
    whole: bool,
}

impl Pattern {
    /// None if it is more of a regular expression than that.
    fn parse(key: &str) -> Option<Self> {
        let name = key.strip_prefix('^').unwrap_or(key);
        let name = name.strip_suffix('$').unwrap_or(name).replace("\\.", ".");
        let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
        (plain && !name.is_empty()).then(|| Self { name, whole: key.starts_with('^') })
    }

    /// Under the names of diffusers or those of the original release.
    fn matches(&self, layer: &str) -> bool {
        let ends = |layer: &str| match layer.strip_suffix(self.name.as_str()) {
            Some(before) => before.is_empty() || (!self.whole && before.ends_with('.')),
            None => false,
        };
        ends(layer) || original_name(layer).is_some_and(|layer| ends(&layer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn scales(config: Value) -> Result<Scales> {
        Scales::new(Path::new("adapter_config.json"), &config, "")
    }

    #[test]
    fn each_layer_has_the_alpha_that_peft_gives_it() {
        let patterns = json!({ "^blocks.1.attn1.to_q": 3, "blocks\\.0\\.attn1\\.to_q": 5, "to_q": 7, "ffn.0": 9 });
        let of =
            |use_rslora: bool| scales(json!({ "lora_alpha": 8, "alpha_pattern": patterns, "use_rslora": use_rslora })).expect("scales");
        let layers = ["blocks.0.attn1.to_q", "blocks.1.attn1.to_q", "blocks.2.attn1.to_q", "blocks.2.ffn.net.0.proj", "proj_out"];
        assert_eq!(layers.map(|layer| of(false).alpha(layer, 4)), [5.0, 3.0, 7.0, 9.0, 8.0]);
        assert_eq!(layers.map(|layer| of(true).alpha(layer, 4)), [10.0, 6.0, 14.0, 18.0, 16.0]);
        let path = || PathBuf::from("adapter_config.json");
        assert!(of(false).check(path(), &layers).is_ok());
        let error = of(false).check(path(), &layers[1..]).expect_err("no such layer").to_string();
        assert!(error.contains("`blocks.0.attn1.to_q` in `alpha_pattern`"), "{error}");
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (key, value) in [
            ("alpha_pattern", json!({ "blocks.*to_q": 4 })),
            ("alpha_pattern", json!({ "to_q": "4" })),
            ("use_rslora", json!("yes")),
            ("use_dora", json!(true)),
            ("layer_replication", json!([[0, 4], [2, 5]])),
            ("peft_type", json!("LOHA")),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("lora_alpha", json!(null)),
        ] {
            let mut config = json!({ "lora_alpha": 8, "use_dora": false, "layer_replication": null, "init_lora_weights": true });
            config[key] = value;
            let error = scales(config).expect_err(key).to_string();
            assert!(error.contains(&format!("`{key}`")) && error.contains("hint:"), "{error}");
        }
    }
}
