//! Reading and writing safetensors in the diffusers folder layout.
//!
//! [`Weights`] hands a model its tensors by name while the model builds itself and keeps book, so that everything missing,
//! mis-shaped or left over is reported at once, by name. A model that is to be trained from scratch is
//! built by the same code from a [`Weights::random`] source.

use crate::error::{Error, Result};
use crate::param::{Param, ParamSet, Slot};
use burn::tensor::{DType, Device, Tensor, TensorData};
use grpo::random::{Key, Purpose};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorView};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Memory-mapped safetensors: one file, or the shards of an index.
pub struct WeightFiles {
    /// The file or folder, for messages.
    pub path: PathBuf,
    shards: Vec<Shard>,
    by_name: HashMap<String, usize>,
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
        Self::open_file(&single)
    }

    /// Opens one safetensors file.
    ///
    /// # Errors
    /// As [`open_folder`](Self::open_folder).
    pub fn open_file(path: &Path) -> Result<Self> {
        let mut files = Self { path: path.into(), shards: Vec::new(), by_name: HashMap::new() };
        files.add_shard(path)?;
        Ok(files)
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
            self.by_name.insert(name, shard);
        }
        self.shards.push(Shard { map, metadata, data_start });
        Ok(())
    }

    /// Checks that the files hold what a model will ask for, before anything is read. `ignored` as for [`Weights::finish`].
    ///
    /// # Errors
    /// [`Error::Weights`] lists every missing, mis-shaped and unexpected tensor.
    pub fn check(&self, declared: &[Declared], ignored: &[&str]) -> Result<()> {
        let (mut missing, mut mis_shaped) = (Vec::new(), Vec::new());
        for Declared { name, shape, .. } in declared {
            match self.shape(name) {
                None => missing.push(name.clone()),
                Some(got) if got != *shape => mis_shaped.push(format!("{name}: expected {shape:?}, got {got:?}")),
                Some(_) => {}
            }
        }
        let known: HashSet<&str> = declared.iter().map(|tensor| tensor.name.as_str()).chain(ignored.iter().copied()).collect();
        let mut unexpected: Vec<String> = self.names().filter(|name| !known.contains(name)).map(str::to_owned).collect();
        unexpected.sort();
        if missing.is_empty() && mis_shaped.is_empty() && unexpected.is_empty() {
            return Ok(());
        }
        Err(Error::Weights { path: self.path.clone(), missing, mis_shaped, unexpected })
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
        let shard = &self.shards[*self.by_name.get(name)?];
        shard.metadata.info(name).map(|info| info.shape.clone())
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
        let shard = &self.shards[*self.by_name.get(name).ok_or_else(absent)?];
        let info = shard.metadata.info(name).ok_or_else(absent)?;
        let (from, to) = info.data_offsets;
        Ok((info.dtype, &shard.map[shard.data_start + from..shard.data_start + to], info.shape.clone()))
    }

    /// Tells the system that the pages of a tensor will not be needed soon; they are read again if they are.
    fn give_back(&self, name: &str) {
        #[cfg(unix)]
        if let Some(shard) = self.by_name.get(name).map(|&shard| &self.shards[shard])
            && let Some(info) = shard.metadata.info(name)
        {
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

const SUPPORTED: &str = "f32, f16 and bf16 weights are supported";

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

/// How a weight starts when a model is trained from scratch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with this standard deviation.
    Normal(f64),
    /// Uniform in +-1/sqrt(fan_in), the default of linear and convolution layers.
    FanIn,
}

/// What a model asks of a source of weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Declared {
    /// Full name.
    pub name: String,
    /// Shape as in the file.
    pub shape: Vec<usize>,
    /// How it starts when there is no file.
    pub init: Init,
    /// Whether it stays f32 in a bf16 model.
    pub keep_f32: bool,
}

impl Declared {
    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

enum Source {
    Files(WeightFiles),
    Random {
        seed: u64,
    },
    /// No weights at all.
    Layout,
}

struct Book {
    source: Source,
    slots: Vec<Arc<Slot>>,
    linears: Vec<crate::layers::LinearSite>,
    used: HashSet<String>,
    missing: Vec<String>,
    mis_shaped: Vec<String>,
    declared: Vec<Declared>,
}

/// A place in the tree of names of a weight source; a model asks it for its parameters.
#[derive(Clone)]
pub struct Weights {
    book: Rc<RefCell<Book>>,
    prefix: String,
    device: Device,
    dtype: DType,
}

impl Weights {
    /// Weights from files, put on `device` (without autodiff) as `dtype` (f32 or bf16).
    pub fn from_files(files: WeightFiles, device: &Device, dtype: DType) -> Self {
        Self::new(Source::Files(files), device, dtype)
    }

    /// Random f32 weights, each a function of (seed, name).
    pub fn random(seed: u64, device: &Device) -> Self {
        Self::new(Source::Random { seed }, device, DType::F32)
    }

    /// What a model would ask for: `build` makes it from a source that has names and shapes but no values. The model itself is good for
    /// nothing.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn declared<T>(build: impl FnOnce(Weights) -> Result<T>) -> Result<Vec<Declared>> {
        let weights = Self::new(Source::Layout, &Device::flex(), DType::BF16);
        let book = weights.book.clone();
        build(weights)?;
        Ok(std::mem::take(&mut book.borrow_mut().declared))
    }

    fn new(source: Source, device: &Device, dtype: DType) -> Self {
        let book =
            Book { source, slots: vec![], linears: vec![], used: HashSet::new(), missing: vec![], mis_shaped: vec![], declared: vec![] };
        let device = device.clone().inner();
        Self { book: Rc::new(RefCell::new(book)), prefix: String::new(), device, dtype }
    }

    /// The sub-tree `name`.
    pub fn sub(&self, name: impl std::fmt::Display) -> Self {
        let prefix = if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) };
        Self { prefix, ..self.clone() }
    }

    /// Full name of `name` in this sub-tree.
    pub fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}.{name}", self.prefix) }
    }

    /// Whether the source has `name` in this sub-tree (always true where there is no file).
    pub fn contains(&self, name: &str) -> bool {
        match &self.book.borrow().source {
            Source::Files(files) => files.contains(&self.full_name(name)),
            Source::Random { .. } | Source::Layout => true,
        }
    }

    /// The parameter `name` of this sub-tree.
    pub fn param<const D: usize>(&self, name: &str, shape: [usize; D], init: Init) -> Param<D> {
        self.param_as(name, shape, init, self.dtype)
    }

    /// As [`param`](Self::param), kept in f32 whatever the model's dtype: the reference's float32 islands.
    pub fn param_f32<const D: usize>(&self, name: &str, shape: [usize; D], init: Init) -> Param<D> {
        self.param_as(name, shape, init, DType::F32)
    }

    fn param_as<const D: usize>(&self, name: &str, shape: [usize; D], init: Init, dtype: DType) -> Param<D> {
        let name = self.full_name(name);
        let mut book = self.book.borrow_mut();
        if matches!(book.source, Source::Layout) {
            book.declared.push(Declared { name: name.clone(), shape: shape.to_vec(), init, keep_f32: dtype == DType::F32 });
        }
        let data = book.fetch(&name, &shape, init, dtype);
        let flat = Tensor::<1>::from_data(data, (&self.device, dtype));
        let slot = Slot::new(name, shape.to_vec(), flat);
        book.slots.push(slot.clone());
        Param::new(slot)
    }

    /// Registers a linear layer as a place where an adapter can be put.
    pub(crate) fn register_linear(&self, site: crate::layers::LinearSite) {
        self.book.borrow_mut().linears.push(site);
    }

    /// Name of this sub-tree.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The device weights are put on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Drops what the book holds of the weights handed out so far: they live as long as the part of the model that asked for them.
    pub fn forget(&self) {
        let mut book = self.book.borrow_mut();
        book.slots.clear();
        book.linears.clear();
    }

    /// Closes the book: all weights and all linear layers, in declaration order.
    ///
    /// # Errors
    /// [`Error::Weights`] lists every missing, mis-shaped and unexpected tensor. `ignored` names tensors of the file that
    /// the model knowingly does not read.
    pub fn finish(self, ignored: &[&str]) -> Result<(ParamSet, Vec<crate::layers::LinearSite>)> {
        let mut book = self.book.borrow_mut();
        let mut unexpected = Vec::new();
        let mut path = PathBuf::new();
        if let Source::Files(files) = &book.source {
            path = files.path.clone();
            unexpected.extend(files.names().filter(|n| !book.used.contains(*n) && !ignored.contains(n)).map(str::to_owned));
            unexpected.sort();
        }
        let (missing, mis_shaped) = (std::mem::take(&mut book.missing), std::mem::take(&mut book.mis_shaped));
        if !(missing.is_empty() && mis_shaped.is_empty() && unexpected.is_empty()) {
            return Err(Error::Weights { path, missing, mis_shaped, unexpected });
        }
        Ok((ParamSet::new(std::mem::take(&mut book.slots)), std::mem::take(&mut book.linears)))
    }
}

impl Book {
    /// The flat tensor, or zeros with an entry in the book if there is none that fits.
    fn fetch(&mut self, name: &str, shape: &[usize], init: Init, dtype: DType) -> TensorData {
        self.used.insert(name.to_owned());
        let count: usize = shape.iter().product();
        let zeros = || TensorData::zeros::<f32, _>([count]).convert_dtype(dtype);
        match &self.source {
            Source::Random { seed } => random_data(*seed, name, shape, init).convert_dtype(dtype),
            Source::Layout => TensorData::zeros::<f32, _>([1]).convert_dtype(dtype),
            Source::Files(files) => match files.shape(name) {
                None => {
                    self.missing.push(name.to_owned());
                    zeros()
                }
                Some(got) if got != shape => {
                    self.mis_shaped.push(format!("{name}: expected {shape:?}, got {got:?}"));
                    zeros()
                }
                Some(_) => files.data_as(name, dtype).map(flattened).unwrap_or_else(|e| {
                    self.mis_shaped.push(format!("{name}: {e}"));
                    zeros()
                }),
            },
        }
    }
}

/// The same elements as one row.
fn flattened(data: TensorData) -> TensorData {
    let count = data.num_elements();
    let (bytes, _, dtype) = data.into_parts();
    TensorData::from_bytes(bytes, [count], dtype)
}

fn random_data(seed: u64, name: &str, shape: &[usize], init: Init) -> TensorData {
    let count: usize = shape.iter().product();
    let key = Key { seed, iteration: 0, prompt: name_id(name), rollout: 0, purpose: Purpose::AdapterInit };
    TensorData::new(initial_values(&key, count, shape, init), [count])
}

/// `count` values of a weight of `shape`, drawn from `key`.
pub(crate) fn initial_values(key: &Key, count: usize, shape: &[usize], init: Init) -> Vec<f32> {
    match init {
        Init::Zeros => vec![0.0; count],
        Init::Ones => vec![1.0; count],
        Init::Normal(std) => key.normals(count).into_iter().map(|z| (f64::from(z) * std) as f32).collect(),
        Init::FanIn => {
            let fan_in: usize = shape.iter().skip(1).product::<usize>().max(1);
            uniform(key, count, 1.0 / (fan_in as f64).sqrt())
        }
    }
}

/// FNV-1a of a name: initial values do not depend on the order of declaration.
pub(crate) fn name_id(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// `count` uniform deviates in +-`bound`.
pub(crate) fn uniform(key: &Key, count: usize, bound: f64) -> Vec<f32> {
    use rand_chacha::rand_core::Rng as _;
    let mut rng = key.rng();
    let mut unit = || f64::from(rng.next_u32()) / f64::from(u32::MAX);
    (0..count).map(|_| (bound * (2.0 * unit() - 1.0)) as f32).collect()
}

/// The elements of a tensor as f32 on the CPU.
///
/// # Panics
/// If the device fails while its result is read.
pub fn to_floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    match tensor.inner().into_data().convert::<f32>().try_into_vec::<f32>() {
        Ok(values) => values,
        Err(error) => panic!("reading a tensor back from its device: {error:?}"),
    }
}

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
