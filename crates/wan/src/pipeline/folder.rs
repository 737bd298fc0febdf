//! Is this a model folder, of the right kind, with everything in it?

use crate::clip::{IMAGE_ENCODER, IMAGE_PROCESSOR};
use crate::config::read_json;
use crate::error::{Error, Result};
use crate::experts::{Boundary, SECOND};
use crate::transformer::TransformerConfig;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What matters of `model_index.json`, beside the second network ([`Boundary`]).
///
/// `expand_timesteps` gives every token a timestep of its own. Where there is no image to start from they are all that of the step, which is
/// what one timestep for each sample says.
#[derive(Debug, Deserialize)]
struct ModelIndex {
    #[serde(rename = "_class_name")]
    class_name: String,
}

/// Refuses a folder that cannot be loaded.
///
/// # Errors
/// No folder, another pipeline's `model_index.json`, missing files (all of them).
pub(super) fn check(dir: &Path) -> Result<()> {
    if !dir.is_dir() {
        let source = std::io::Error::from(if dir.exists() { std::io::ErrorKind::NotADirectory } else { std::io::ErrorKind::NotFound });
        return Err(Error::read(dir, source));
    }
    let index = dir.join(MODEL_INDEX);
    let mut has_second = false;
    if index.exists() {
        check_index(&read_json(&index)?).map_err(|(reason, hint)| Error::invalid(&index, reason, hint))?;
        has_second = Boundary::of_folder(dir)?.is_some();
    }
    let missing = missing_files(dir, has_second);
    if missing.is_empty() {
        return Ok(());
    }
    let reason = format!("the model folder is incomplete; missing: {}", missing.join(", "));
    Err(Error::invalid(dir, reason, "fetch the whole folder of a text-to-video model in the diffusers layout"))
}

const MODEL_INDEX: &str = "model_index.json";

fn check_index(index: &ModelIndex) -> std::result::Result<(), (String, &'static str)> {
    if !["WanPipeline", "WanImageToVideoPipeline"].contains(&index.class_name.as_str()) {
        let hint = "only `WanPipeline` and `WanImageToVideoPipeline`, Wan from text or from an image, are supported";
        return Err((format!("`_class_name` is `{}`", index.class_name), hint));
    }
    Ok(())
}

/// The files that [`load`](super::WanPipeline::load) needs and that do not exist, relative to the folder.
fn missing_files(dir: &Path, has_second: bool) -> Vec<String> {
    const PLAIN: [&str; 6] = [
        MODEL_INDEX,
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
        "text_encoder/config.json",
        "transformer/config.json",
        "vae/config.json",
    ];
    // a config that cannot be read is reported when it is
    let has_encoder = TransformerConfig::load(&dir.join("transformer/config.json")).is_ok_and(|config| config.image_dim.is_some());
    let encoder = |file: String| has_encoder.then_some(file);
    let second = |file: &str| has_second.then(|| format!("{SECOND}/{file}"));
    let plain = PLAIN.map(str::to_owned).into_iter().chain(second("config.json"));
    let plain =
        plain.chain(encoder(format!("{IMAGE_ENCODER}/config.json"))).chain(encoder(format!("{IMAGE_PROCESSOR}/preprocessor_config.json")));
    let mut missing: Vec<String> = plain.filter(|file| !dir.join(file).exists()).collect();
    let stems = ["text_encoder/model", "transformer/diffusion_pytorch_model", "vae/diffusion_pytorch_model"].map(str::to_owned);
    for stem in stems.into_iter().chain(second("diffusion_pytorch_model")).chain(encoder(format!("{IMAGE_ENCODER}/model"))) {
        missing.extend(missing_weights(dir, &stem));
    }
    missing
}

/// Of one part: the single file, or the shards its index lists.
fn missing_weights(dir: &Path, stem: &str) -> Vec<String> {
    #[derive(Deserialize)]
    struct ShardIndex {
        weight_map: BTreeMap<String, String>,
    }
    let (single, index) = (format!("{stem}.safetensors"), format!("{stem}.safetensors.index.json"));
    if dir.join(&single).exists() {
        return vec![];
    }
    if !dir.join(&index).exists() {
        return vec![single];
    }
    // a broken index is reported when the weights are opened
    let Ok(ShardIndex { weight_map }) = read_json(&dir.join(index)) else { return vec![] };
    let part = Path::new(stem).parent().unwrap_or(Path::new(""));
    let shards: BTreeSet<String> = weight_map.into_values().map(|shard| part.join(shard).display().to_string()).collect();
    shards.into_iter().filter(|shard| !dir.join(shard).exists()).collect()
}
