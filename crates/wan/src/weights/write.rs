//! Writing safetensors, and any file, whole or not at all.

use super::to_floats;
use crate::error::{Error, Result};
use crate::param::ParamSet;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

/// Writes f32 tensors as one safetensors file: beside, synced, renamed.
///
/// # Errors
/// The file cannot be written.
pub fn write_safetensors(
    path: &Path,
    tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    metadata: Option<HashMap<String, String>>,
) -> Result<()> {
    let bytes: BTreeMap<&str, (Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, (shape, values))| {
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            (name.as_str(), (shape.clone(), bytes))
        })
        .collect();
    let mut views = Vec::with_capacity(bytes.len());
    for (name, (shape, bytes)) in &bytes {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes)
            .map_err(|e| Error::invalid(path, format!("tensor `{name}`: {e}"), "shape and values disagree"))?;
        views.push((*name, view));
    }
    write_views(path, views, metadata)
}

/// Writes a safetensors file; equal contents give equal bytes.
///
/// # Errors
/// The file cannot be written.
pub fn write_views(path: &Path, views: Vec<(&str, TensorView<'_>)>, metadata: Option<HashMap<String, String>>) -> Result<()> {
    let mut data = safetensors::serialize(views, metadata)
        .map_err(|e| Error::invalid(path, e.to_string(), "tensors cannot be written as safetensors"))?;
    sort_metadata(&mut data);
    write_atomically(path, &data)
}

/// The library writes the entries of `__metadata__` in random order: sorts them, in place, since the length stays the same.
fn sort_metadata(file: &mut [u8]) {
    let (length, rest) = file.split_at_mut(8);
    let length = u64::from_le_bytes(std::array::from_fn(|i| length[i])) as usize;
    let Ok(mut header) = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&rest[..length]) else { return };
    let Some(serde_json::Value::Object(metadata)) = header.get_mut("__metadata__") else { return };
    metadata.sort_keys();
    if let Ok(text) = serde_json::to_vec(&header)
        && text.len() <= length
    {
        rest[..length].fill(b' ');
        rest[..text.len()].copy_from_slice(&text);
    }
}

/// Writes all weights of a set, as f32, under their own names.
///
/// # Errors
/// The file cannot be written.
pub fn write_params(path: &Path, params: &ParamSet) -> Result<()> {
    let tensors = params.iter().map(|slot| (slot.name.clone(), (slot.shape.clone(), to_floats(slot.value())))).collect();
    write_safetensors(path, &tensors, Some(HashMap::from([("format".to_owned(), "pt".to_owned())])))
}

/// How the name of a file begins while it is being written.
pub const UNFINISHED: &str = ".writing-";

/// Writes a file so that a reader sees the old or the new content, never a part: beside, fsync, rename, fsync the folder.
///
/// # Errors
/// The folder does not exist or cannot be written.
pub fn write_atomically(path: &Path, data: &[u8]) -> Result<()> {
    write_streamed(path, |file| file.write_all(data))
}

/// As [`write_atomically`], for a content that is made while it is written.
///
/// # Errors
/// As [`write_atomically`], and what `write` fails with.
pub fn write_streamed(path: &Path, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let wrap = |e| Error::write(path, e);
    let mut file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(dir).map_err(wrap)?;
    let mut buffered = std::io::BufWriter::with_capacity(1 << 20, file.as_file_mut());
    write(&mut buffered).and_then(|()| buffered.flush()).map_err(wrap)?;
    drop(buffered);
    file.as_file().sync_all().map_err(wrap)?;
    make_readable(file.path()).map_err(wrap)?;
    file.persist(path).map_err(|e| wrap(e.error))?;
    std::fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(wrap)
}

/// Temporary files are private; what is renamed into place gets the usual mode.
#[cfg(unix)]
fn make_readable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn make_readable(_path: &Path) -> std::io::Result<()> {
    Ok(())
}
