//! Reading safetensors: mapped, one file or many.

use super::Declared;
use crate::error::{Error, Misfits, Result, SUPPORTED_DTYPES as SUPPORTED};
use burn::tensor::{DType, TensorData};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorInfo};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Memory-mapped safetensors: one file, or the shards of an index.
pub struct WeightFiles {
    /// The file or folder, for messages.
    pub path: PathBuf,
    shards: Vec<Shard>,
    by_name: HashMap<String, Place>,
}

/// Where a tensor is.
struct Place {
    shard: usize,
    /// Its name there.
    stored: String,
}

struct Shard {
    map: Mmap,
    metadata: Metadata,
    data_start: usize,
}

impl WeightFiles {
    /// Opens `DIR/STEM.safetensors`, or the shards listed by `DIR/STEM.safetensors.index.json`.
    ///
    /// # Errors
    /// A missing, truncated or malformed file, by name.
    pub fn open_folder(dir: &Path, stem: &str) -> Result<Self> {
        let single = dir.join(format!("{stem}.safetensors"));
        let index = dir.join(format!("{stem}.safetensors.index.json"));
        if !single.exists() && index.exists() {
            return Self::open_shards(dir, &index);
        }
        match pickled(dir).filter(|_| !single.exists()) {
            Some(name) => Err(Error::invalid(dir, format!("it holds `{name}`, and no `{stem}.safetensors`"), PICKLED)),
            None => Self::open_file(&single),
        }
    }

    /// Opens one safetensors file.
    ///
    /// # Errors
    /// As [`open_folder`](Self::open_folder).
    pub fn open_file(path: &Path) -> Result<Self> {
        if is_pickled(path) {
            return Err(Error::invalid(path, "it is not a safetensors file", PICKLED));
        }
        let mut files = Self { path: path.into(), shards: Vec::new(), by_name: HashMap::new() };
        files.add_shard(path)?;
        Ok(files)
    }

    /// The same tensors under other names.
    ///
    /// # Errors
    /// Two tensors that get one name.
    pub fn renamed(self, name_of: impl Fn(&str) -> String) -> Result<Self> {
        let mut by_name: HashMap<String, Place> = HashMap::new();
        for (old, place) in self.by_name {
            let name = name_of(&old);
            if let Some(Place { stored, .. }) = by_name.get(&name) {
                let reason = format!("tensors `{stored}` and `{}` are both `{name}`", place.stored);
                return Err(Error::invalid(&self.path, reason, "the file mixes two spellings of the names; use an original one"));
            }
            by_name.insert(name, place);
        }
        Ok(Self { by_name, ..self })
    }

    fn open_shards(dir: &Path, index: &Path) -> Result<Self> {
        let text = crate::config::read_text(index)?;
        let names = shard_names(&text).map_err(|reason| {
            Error::invalid(index, reason, "an index has a `weight_map` of tensor name to file name in the same folder")
        })?;
        let mut files = Self { path: dir.into(), shards: Vec::new(), by_name: HashMap::new() };
        for name in names {
            files.add_shard(&dir.join(name))?;
        }
        Ok(files)
    }

    fn add_shard(&mut self, path: &Path) -> Result<()> {
        let file = std::fs::File::open(path).map_err(|e| Error::read(path, e))?;
        // SAFETY: the map is read-only; a file truncated by another process while mapped is outside our contract,
        // as for every reader of memory-mapped weights.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::read(path, e))?;
        let hint = "the download or copy is incomplete, or this is not a safetensors file: fetch it again";
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|e| Error::invalid(path, format!("not a valid safetensors file ({e}; {} bytes)", map.len()), hint))?;
        let data_start = header + 8;
        let expected = data_start + metadata.data_len();
        if map.len() != expected {
            let reason = format!("the header promises {expected} bytes, the file has {}", map.len());
            return Err(Error::invalid(path, reason, hint));
        }
        let shard = self.shards.len();
        for name in metadata.offset_keys() {
            self.by_name.insert(name.clone(), Place { shard, stored: name });
        }
        self.shards.push(Shard { map, metadata, data_start });
        Ok(())
    }

    /// Checks that the files hold what a model will ask for, before anything is read. `ignored` as for [`super::Weights::finish`].
    ///
    /// # Errors
    /// [`Error::Weights`] lists all [`Misfits`].
    pub fn check(&self, declared: &[Declared], ignored: &[&str]) -> Result<()> {
        let mut misfits = Misfits::default();
        for Declared { name, shape, .. } in declared {
            self.fits(name, shape, &mut misfits);
        }
        let known: HashSet<&str> = declared.iter().map(|tensor| tensor.name.as_str()).chain(ignored.iter().copied()).collect();
        misfits.unexpected = self.names().filter(|name| !known.contains(name)).map(str::to_owned).collect();
        misfits.unexpected.sort();
        misfits.into_result(&self.path)
    }

    /// Whether there is a tensor of that name and shape, in a dtype that is read; if not, `misfits` has it.
    pub(super) fn fits(&self, name: &str, shape: &[usize], misfits: &mut Misfits) -> bool {
        match self.place(name) {
            None => misfits.missing.push(name.to_owned()),
            Some((_, info)) if info.shape != shape => {
                misfits.mis_shaped.push(format!("{name}: expected {shape:?}, got {:?}", info.shape));
            }
            Some((_, info)) if dtype_of(info.dtype).is_none() => misfits.unsupported.push(format!("{name}: {}", info.dtype)),
            Some(_) => return true,
        }
        false
    }

    /// Names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Whether there is a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// The free-form header metadata of the first file.
    pub fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.shards.first().and_then(|shard| shard.metadata.metadata().as_ref())
    }

    /// Shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.place(name).map(|(_, info)| info.shape.clone())
    }

    /// The file of a tensor, and what its header says about it.
    fn place(&self, name: &str) -> Option<(&Shard, &TensorInfo)> {
        let Place { shard, stored } = self.by_name.get(name)?;
        let shard = &self.shards[*shard];
        Some((shard, shard.metadata.info(stored)?))
    }

    /// The tensor's elements as they are on disk.
    ///
    /// # Errors
    /// An absent tensor, or a dtype other than f32, f64, f16, bf16, i32, i64.
    pub fn data(&self, name: &str) -> Result<TensorData> {
        let (dtype, bytes, shape) = self.mapped(name)?;
        let dtype = dtype_of(dtype).ok_or_else(|| Error::invalid(&self.path, format!("tensor `{name}` has dtype {dtype:?}"), SUPPORTED))?;
        Ok(TensorData::from_bytes_vec(bytes.to_vec(), shape, dtype))
    }

    /// The tensor's elements as `dtype`, straight from the map: no copy in the dtype of the file is made, and the pages that were
    /// read are given back, so that loading a model takes the memory of its tensors and not that of its files besides.
    ///
    /// # Errors
    /// As [`data`](Self::data).
    pub fn data_as(&self, name: &str, dtype: DType) -> Result<TensorData> {
        let data = match self.mapped(name)? {
            (Dtype::BF16, bytes, shape) if dtype == DType::F32 => TensorData::new(widened(bytes, bf16_to_f32), shape),
            (Dtype::F16, bytes, shape) if dtype == DType::F32 => {
                TensorData::new(widened(bytes, |bytes| half::f16::from_le_bytes(bytes).to_f32()), shape)
            }
            _ => self.data(name)?.convert_dtype(dtype),
        };
        self.give_back(name);
        Ok(data)
    }

    /// Elements `from..to` of a tensor as f32, without reading the others.
    ///
    /// # Errors
    /// As [`data`](Self::data); a range beyond the tensor.
    pub fn floats_of(&self, name: &str, range: std::ops::Range<usize>) -> Result<Vec<f32>> {
        let (dtype, bytes, shape) = self.mapped(name)?;
        let size = bytes.len() / shape.iter().product::<usize>().max(1);
        let part = bytes.get(range.start * size..range.end * size).ok_or_else(|| {
            Error::invalid(&self.path, format!("tensor `{name}` has no elements {range:?}"), "the file has other contents than expected")
        })?;
        let unsupported = || Error::invalid(&self.path, format!("tensor `{name}` has dtype {dtype:?}"), SUPPORTED);
        let data = TensorData::from_bytes_vec(part.to_vec(), [range.len()], dtype_of(dtype).ok_or_else(unsupported)?);
        data.convert::<f32>().try_into_vec::<f32>().map_err(|_| unsupported())
    }

    /// Dtype, bytes and shape of a tensor.
    fn mapped(&self, name: &str) -> Result<(Dtype, &[u8], Vec<usize>)> {
        let absent = || Error::invalid(&self.path, format!("no tensor `{name}`"), "the file has other contents than expected");
        let (shard, info) = self.place(name).ok_or_else(absent)?;
        let (from, to) = info.data_offsets;
        Ok((info.dtype, &shard.map[shard.data_start + from..shard.data_start + to], info.shape.clone()))
    }

    /// Tells the system that the pages of a tensor will not be needed soon; they are read again if they are.
    fn give_back(&self, name: &str) {
        #[cfg(unix)]
        if let Some((shard, info)) = self.place(name) {
            let (from, to) = info.data_offsets;
            // SAFETY: the map is a read-only view of a file: a page that was given back has the same content when it is read again.
            let advised =
                unsafe { shard.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, shard.data_start + from, to - from) };
            // advice only: loading works as well without
            let _ = advised;
        }
    }

    /// The tensor's elements as f32.
    ///
    /// # Errors
    /// As [`data`](Self::data).
    pub fn floats(&self, name: &str) -> Result<Vec<f32>> {
        let data = self.data(name)?;
        data.convert::<f32>().try_into_vec::<f32>().map_err(|e| Error::invalid(&self.path, format!("tensor `{name}`: {e:?}"), SUPPORTED))
    }
}

/// Loading a pickle runs what is in it.
const PICKLED: &str = "pickled weights can execute code and are never read: get the model as safetensors, or convert it in a safe place";

fn is_pickled(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["pth", "pt", "bin", "ckpt"].iter().any(|known| extension == *known))
}

/// A file with pickled weights in `dir`.
fn pickled(dir: &Path) -> Option<String> {
    let names = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).filter(|path| is_pickled(path));
    names.filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())).min()
}

/// Two-byte elements as f32, on all threads.
fn widened(bytes: &[u8], widen: impl Fn([u8; 2]) -> f32 + Sync) -> Vec<f32> {
    bytes.par_chunks_exact(2).with_min_len(1 << 16).map(|bytes| widen([bytes[0], bytes[1]])).collect()
}

/// A bf16 is the upper half of an f32.
fn bf16_to_f32(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

fn dtype_of(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        _ => return None,
    })
}

/// File names of a shard index; refuses anything that could leave the folder.
fn shard_names(text: &str) -> std::result::Result<Vec<String>, String> {
    let index: serde_json::Value = serde_json::from_str(text).map_err(|e| format!("not valid JSON ({e})"))?;
    let map = index.get("weight_map").and_then(|map| map.as_object()).ok_or("no object `weight_map`")?;
    let mut names = Vec::new();
    for (tensor, file) in map {
        let file = file.as_str().ok_or_else(|| format!("`weight_map.{tensor}` is not a string"))?;
        let plain = Path::new(file).file_name().is_some_and(|name| name == file);
        if !plain || !file.ends_with(".safetensors") {
            return Err(format!("`weight_map.{tensor}` is `{file}`, not a plain file name"));
        }
        if !names.iter().any(|name| name == file) {
            names.push(file.to_owned());
        }
    }
    Ok(names)
}
