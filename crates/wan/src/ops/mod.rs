//! The transformer's operations on the CPU, each with its own gradient; [`gelu_tanh`] on all devices.
//!
//! The engine composes these from elementwise steps, each of which reads and writes a full-size tensor on one thread. Here
//! an operation is one pass over rows, in parallel, and backward keeps its inputs and recomputes what is cheap.
//!
//! The same code computes plain and autodiff tensors, and a row's bits depend neither on the other rows of the batch nor on the
//! number of threads: a replay gives exactly what the rollout gave. [`supports`] says where the operations can
//! be used; on another backend the layers compose the engine's own operations.
//!
//! They compute in f32. Inputs in bf16 are widened, which is exact, and the result is rounded once; a frozen weight stays in bf16 and is
//! widened while it is packed.
//!
//! Read `rows.rs` and `matmul.rs` first: the others are formulas on top of them.

mod activation;
mod attention;
mod gated;
mod linear;
mod matmul;
mod norm;
mod rotary_norm;
pub(crate) mod rows;

pub use activation::gelu_tanh;
pub use attention::attention;
pub use gated::gated_sum;
pub use linear::{LowRank, linear};
pub use norm::{Modulation, modulated_norm};
pub use rotary_norm::rms_norm_rotate;

use crate::device::is_cpu;
use crate::layers::cast;
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};

/// Whether a tensor can be given to these operations: on the CPU engine, in f32 or bf16.
pub fn supports<const D: usize>(x: &Tensor<D>) -> bool {
    matches!(x.dtype(), DType::F32 | DType::BF16) && is_cpu(&x.device())
}

/// What an operation computes with.
fn widened<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    cast(x, DType::F32)
}

/// As `cast`, for tensors of a backend.
pub(crate) fn as_dtype<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if x.dtype() == dtype { x } else { B::float_cast(x, FloatDType::from(dtype)) }
}

/// Stands for an input that is absent: the engine's macro knows no optional tensors.
fn absent<const D: usize, const R: usize>(x: &Tensor<R>) -> Tensor<D> {
    Tensor::zeros([1; D], &x.device().inner())
}

/// # Panics
/// If the tensor has another rank.
pub(crate) fn dims<const D: usize>(x: &FlexTensor) -> [usize; D] {
    let shape = x.layout().shape();
    assert_eq!(shape.num_dims(), D, "rank");
    std::array::from_fn(|i| shape[i])
}

/// The values of a contiguous tensor.
///
/// # Panics
/// If the tensor is not f32 and contiguous, which the callers make sure of.
pub(crate) fn floats(x: &FlexTensor) -> &[f32] {
    x.as_slice::<f32>().expect("contiguous f32")
}

pub(crate) fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}
