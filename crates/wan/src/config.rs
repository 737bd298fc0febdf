//! Reading the JSON files of a model folder.

use crate::error::{Error, Result};
use serde::de::DeserializeOwned;
use std::path::Path;

/// Largest JSON file read; real configs have a few kB, tokenizers some MB.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// Largest size in a config; the largest of a released model is UMT5's vocabulary of 256,384.
const MAX_SIZE: usize = 1 << 20;

/// Most layers in a config; Wan2.1 14B has 40.
const MAX_LAYERS: usize = 1024;

/// Whether sizes are at least 1 and of a magnitude that a model can have: what is read from a file decides how much is allocated.
///
/// # Errors
/// The first (key, value) that is not.
pub fn check_sizes(sizes: &[(&str, usize)]) -> std::result::Result<(), String> {
    let limit = |key: &str| if key.starts_with("num_") { MAX_LAYERS } else { MAX_SIZE };
    match sizes.iter().find(|(key, size)| *size == 0 || *size > limit(key)) {
        Some((key, size)) => Err(format!("`{key}` is {size}, expected 1 to {}", limit(key))),
        None => Ok(()),
    }
}

/// Reads a file as text, refusing anything of absurd size.
///
/// # Errors
/// Unreadable or oversized file.
pub fn read_text(path: &Path) -> Result<String> {
    let size = std::fs::metadata(path).map_err(|e| Error::read(path, e))?.len();
    if size > MAX_JSON_BYTES {
        return Err(Error::invalid(path, format!("{size} bytes is too large for a config"), "this is not the file it should be"));
    }
    std::fs::read_to_string(path).map_err(|e| Error::read(path, e))
}

/// Reads a JSON file into a type.
///
/// # Errors
/// Unreadable file, invalid JSON, a missing field or one of the wrong type, with its place.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_str(&read_text(path)?)
        .map_err(|e| Error::invalid(path, e.to_string(), "compare with the config.json of the original model"))
}
