//! Reading and writing safetensors in the diffusers folder layout.
//!
//! [`Weights`] hands a model its tensors by name while the model builds itself and keeps book, so that everything missing,
//! mis-shaped or left over is reported at once, by name. A model that is to be trained from scratch is
//! built by the same code from a [`Weights::random`] source.

mod files;
mod write;

pub use files::WeightFiles;
pub(crate) use write::header;
pub use write::{UNFINISHED, pt_metadata, write_atomically, write_each, write_params, write_safetensors, write_streamed, write_views};

use crate::error::{Misfits, Result};
use crate::param::{Param, ParamSet, Slot};
use burn::tensor::{DType, Device, Tensor, TensorData};
use grpo::random::{Key, Purpose};
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

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
    misfits: Misfits,
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
        Self::random_as(seed, device, DType::F32)
    }

    /// The same, frozen weights rounded to `dtype` as if they had been read.
    pub fn random_as(seed: u64, device: &Device, dtype: DType) -> Self {
        Self::new(Source::Random { seed }, device, dtype)
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
        let book = Book { source, slots: vec![], linears: vec![], used: HashSet::new(), misfits: Misfits::default(), declared: vec![] };
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
    /// [`Error::Weights`](crate::Error::Weights) lists all [`Misfits`]. `ignored` names tensors of the file that the model knowingly does
    /// not read.
    pub fn finish(self, ignored: &[&str]) -> Result<(ParamSet, Vec<crate::layers::LinearSite>)> {
        let mut book = self.book.borrow_mut();
        let mut misfits = std::mem::take(&mut book.misfits);
        if let Source::Files(files) = &book.source {
            misfits.unexpected = files.names().filter(|n| !book.used.contains(*n) && !ignored.contains(n)).map(str::to_owned).collect();
            misfits.unexpected.sort();
            misfits.into_result(&files.path)?;
        }
        Ok((ParamSet::new(std::mem::take(&mut book.slots)), std::mem::take(&mut book.linears)))
    }
}

impl Book {
    /// The flat tensor; if there is none that fits, one element and an entry in the book, so that what a config says allocates nothing.
    fn fetch(&mut self, name: &str, shape: &[usize], init: Init, dtype: DType) -> TensorData {
        self.used.insert(name.to_owned());
        let nothing = || TensorData::zeros::<f32, _>([1]).convert_dtype(dtype);
        match &self.source {
            Source::Random { seed } => random_data(*seed, name, shape, init).convert_dtype(dtype),
            Source::Layout => nothing(),
            Source::Files(files) if !files.fits(name, shape, &mut self.misfits) => nothing(),
            Source::Files(files) => files.data_as(name, dtype).map(flattened).unwrap_or_else(|e| {
                self.misfits.unsupported.push(format!("{name}: {e}"));
                nothing()
            }),
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
