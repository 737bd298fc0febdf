//! Writing safetensors, and any file, whole or not at all.

use super::to_floats;
use crate::error::{Error, Result};
use crate::param::ParamSet;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

/// Writes f32 tensors as one safetensors file: beside, synced, renamed.
///
/// # Errors
/// The file cannot be written; a shape that does not fit its values.
pub fn write_safetensors(
    path: &Path,
    tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    metadata: Option<HashMap<String, String>>,
) -> Result<()> {
    let borrowed = tensors.iter().map(|(name, (shape, values))| (name.clone(), (shape.clone(), values))).collect();
    write_each(path, &borrowed, metadata, |values| Cow::Borrowed(values.as_slice()))
}

/// The same for tensors whose values are fetched one after the other while the file is written: the memory of one of them is needed.
///
/// # Errors
/// As [`write_safetensors`].
pub fn write_each<T>(
    path: &Path,
    tensors: &BTreeMap<String, (Vec<usize>, T)>,
    metadata: Option<HashMap<String, String>>,
    values: impl Fn(&T) -> Cow<'_, [f32]>,
) -> Result<()> {
    let header = header("F32", 4, tensors.iter().map(|(name, (shape, _))| (name.as_str(), shape.as_slice())), metadata);
    write_streamed(path, |file| {
        file.write_all(&header)?;
        tensors.iter().try_for_each(|(name, (shape, source))| {
            let values = values(source);
            if values.len() != shape.iter().product::<usize>() {
                return Err(std::io::Error::other(format!("tensor `{name}` has {} values for shape {shape:?}", values.len())));
            }
            values.chunks(VALUES_AT_ONCE).try_for_each(|part| {
                let bytes: Vec<u8> = part.iter().flat_map(|value| value.to_le_bytes()).collect();
                file.write_all(&bytes)
            })
        })
    })
}

/// Values that are turned into bytes together.
const VALUES_AT_ONCE: usize = 1 << 16;

/// The header of a safetensors file: its length, then names, shapes and places of tensors of `size` bytes an element, padded to 8 bytes.
pub fn header<'a>(
    dtype: &str,
    size: usize,
    tensors: impl Iterator<Item = (&'a str, &'a [usize])>,
    metadata: Option<HashMap<String, String>>,
) -> Vec<u8> {
    let mut entries = Map::new();
    if let Some(metadata) = metadata {
        let sorted: BTreeMap<String, String> = metadata.into_iter().collect();
        entries.insert("__metadata__".into(), json!(sorted));
    }
    let mut from = 0;
    for (name, shape) in tensors {
        let to = from + size * shape.iter().product::<usize>();
        entries.insert(name.to_owned(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [from, to] }));
        from = to;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    [(text.len() as u64).to_le_bytes().as_slice(), &text].concat()
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
    let tensors = params.iter().map(|slot| (slot.name.clone(), (slot.shape.clone(), slot))).collect();
    write_each(path, &tensors, Some(pt_metadata()), |slot| to_floats(slot.value()).into())
}

/// What PyTorch's readers expect in the header.
pub fn pt_metadata() -> HashMap<String, String> {
    HashMap::from([("format".to_owned(), "pt".to_owned())])
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

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::Dtype;

    #[test]
    fn a_streamed_file_is_what_the_library_writes() {
        let folder = tempfile::tempdir().expect("folder");
        let path = |name: &str| folder.path().join(name);
        let values: Vec<f32> = (0..70_000).map(|i| i as f32 / 7.0).collect();
        let tensors = BTreeMap::from([
            ("b.weight \"q\"".to_owned(), (vec![2, 35_000], values)),
            ("b.alpha".to_owned(), (vec![], vec![-0.5])),
            ("a".to_owned(), (vec![0, 3], vec![])),
        ]);
        for metadata in [None, Some(HashMap::from([("format".into(), "pt".into()), ("a".into(), "{\"x\": 1}".into())]))] {
            write_safetensors(&path("ours"), &tensors, metadata.clone()).expect("written");
            let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
            let bytes: Vec<_> = tensors.iter().map(|(name, (shape, values))| (name, shape, bytes(values))).collect();
            let view = |shape: &[usize], bytes| TensorView::new(Dtype::F32, shape.to_vec(), bytes).expect("fits");
            let views = bytes.iter().map(|(name, shape, bytes)| (name.as_str(), view(shape, bytes))).collect();
            write_views(&path("theirs"), views, metadata).expect("written");
            assert!(std::fs::read(path("ours")).expect("ours") == std::fs::read(path("theirs")).expect("theirs"));
        }
        let short = BTreeMap::from([("x".to_owned(), (vec![3], vec![1.0, 2.0]))]);
        let error = write_safetensors(&path("short"), &short, None).expect_err("refused").to_string();
        assert!(error.contains("tensor `x` has 2 values for shape [3]") && !path("short").exists(), "{error}");
    }
}
