//! Named weights. A model is a tree of plain structs that hold [`Param`]s; the [`ParamSet`] beside it lists the
//! same weights flat, by name, for everything that does not care about structure: loading, saving, the optimizer,
//! moving averages, checkpoints.
//!
//! **Gradients are recorded if and only if the input is an autodiff tensor.** A layer asks its weights for a
//! tensor that suits its input ([`Param::suit`]): a plain input gets plain weights and costs no graph; an autodiff input
//! gets the trainable leaves. So rollout and replay are one function called with two kinds of latents, and no
//! second copy of the model has to be kept in step.

use burn::tensor::Tensor;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// One weight, stored flat. Cloning shares the storage.
#[derive(Debug)]
pub struct Slot {
    /// Name as in the diffusers file, for instance `blocks.0.attn1.to_q.weight`.
    pub name: String,
    /// Shape as in the file.
    pub shape: Vec<usize>,
    tensor: RwLock<Tensor<1>>,
}

impl Slot {
    /// A weight of the given name and shape; `tensor` has the product of `shape` elements.
    pub fn new(name: String, shape: Vec<usize>, tensor: Tensor<1>) -> Arc<Self> {
        Arc::new(Self { name, shape, tensor: RwLock::new(tensor) })
    }

    fn read(&self) -> RwLockReadGuard<'_, Tensor<1>> {
        self.tensor.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The leaf: an autodiff tensor if trainable.
    pub fn leaf(&self) -> Tensor<1> {
        self.read().clone()
    }

    /// The values, without any graph.
    pub fn value(&self) -> Tensor<1> {
        self.leaf().inner()
    }

    /// Whether the optimizer updates this weight.
    pub fn is_trainable(&self) -> bool {
        self.read().is_require_grad()
    }

    /// Makes the weight a leaf of the graph, or a constant.
    pub fn set_trainable(&self, trainable: bool) {
        let value = self.value();
        self.store(if trainable { value.autodiff().require_grad() } else { value });
    }

    /// Replaces the values; a trainable weight stays trainable.
    pub fn set_value(&self, value: Tensor<1>) {
        let value = value.inner();
        self.store(if self.is_trainable() { value.autodiff().require_grad() } else { value });
    }

    fn store(&self, tensor: Tensor<1>) {
        *self.tensor.write().unwrap_or_else(PoisonError::into_inner) = tensor;
    }
}

/// A weight as a layer sees it: with its rank.
#[derive(Debug, Clone)]
pub struct Param<const D: usize> {
    slot: Arc<Slot>,
    shape: [usize; D],
}

impl<const D: usize> Param<D> {
    /// The layer's view of a slot.
    ///
    /// # Panics
    /// If the slot has another rank.
    pub fn new(slot: Arc<Slot>) -> Self {
        assert_eq!(slot.shape.len(), D, "rank of `{}`", slot.name);
        let shape = std::array::from_fn(|i| slot.shape[i]);
        Self { slot, shape }
    }

    /// The weight for a computation with `input`: the trainable leaf if `input` records gradients, else plain values.
    pub fn suit<const R: usize>(&self, input: &Tensor<R>) -> Tensor<D> {
        let tensor = if input.is_autodiff() { self.slot.leaf() } else { self.slot.value() };
        tensor.reshape(self.shape)
    }

    /// The same weight seen as a matrix [first axis, all others].
    pub fn flatten_rows(self) -> Param<2> {
        let rows = self.shape[0];
        let columns = self.shape[1..].iter().product();
        Param { slot: self.slot, shape: [rows, columns] }
    }

    /// Plain values.
    pub fn value(&self) -> Tensor<D> {
        self.slot.value().reshape(self.shape)
    }

    /// Shape as in the file.
    pub fn shape(&self) -> [usize; D] {
        self.shape
    }
}

impl Param<2> {
    /// A slot of any rank seen as a matrix [first axis, all others].
    ///
    /// # Panics
    /// If the slot is a scalar.
    pub fn matrix(slot: Arc<Slot>) -> Self {
        let (rows, others) = slot.shape.split_first().unwrap_or_else(|| panic!("`{}` is a scalar", slot.name));
        let shape = [*rows, others.iter().product()];
        Self { slot, shape }
    }
}

/// All weights of a model (or of an adapter), flat and in declaration order.
#[derive(Debug, Clone, Default)]
pub struct ParamSet {
    slots: Vec<Arc<Slot>>,
}

impl ParamSet {
    /// A set of the given weights.
    pub fn new(slots: Vec<Arc<Slot>>) -> Self {
        Self { slots }
    }

    /// Adds a weight.
    pub fn push(&mut self, slot: Arc<Slot>) {
        self.slots.push(slot);
    }

    /// Every weight.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Slot>> {
        self.slots.iter()
    }

    /// The weights the optimizer updates.
    pub fn trainable(&self) -> impl Iterator<Item = &Arc<Slot>> {
        self.slots.iter().filter(|slot| slot.is_trainable())
    }

    /// The weight of that name.
    pub fn get(&self, name: &str) -> Option<&Arc<Slot>> {
        self.slots.iter().find(|slot| slot.name == name)
    }

    /// Makes every weight trainable, or none.
    pub fn set_trainable(&self, trainable: bool) {
        self.slots.iter().for_each(|slot| slot.set_trainable(trainable));
    }

    /// Number of elements of all weights.
    pub fn num_elements(&self) -> usize {
        self.slots.iter().map(|slot| slot.shape.iter().product::<usize>()).sum()
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is no weight.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The current values, in order; a cheap handle each.
    pub fn snapshot(&self) -> Vec<Tensor<1>> {
        self.slots.iter().map(|slot| slot.value()).collect()
    }

    /// Runs `work` with other values, then puts the present tensors themselves back: a graph that was recorded with them
    /// before still finds its leaves after.
    ///
    /// # Panics
    /// If the number of tensors differs.
    pub fn with_values<R>(&self, values: &[Tensor<1>], work: impl FnOnce() -> R) -> R {
        let leaves: Vec<Tensor<1>> = self.slots.iter().map(|slot| slot.leaf()).collect();
        self.restore(values);
        let result = work();
        for (slot, leaf) in self.slots.iter().zip(leaves) {
            slot.store(leaf);
        }
        result
    }

    /// Puts back what [`snapshot`](Self::snapshot) took.
    ///
    /// # Panics
    /// If the number of tensors differs.
    pub fn restore(&self, values: &[Tensor<1>]) {
        assert_eq!(values.len(), self.slots.len(), "snapshot of another set");
        for (slot, value) in self.slots.iter().zip(values) {
            slot.set_value(value.clone());
        }
    }
}
