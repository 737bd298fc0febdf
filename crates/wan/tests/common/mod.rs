//! Reading golden tensors and comparing with them.
#![allow(dead_code)]

pub mod device;

use burn::tensor::{Tensor, TensorData};
use device::{allowed, device};
use std::path::PathBuf;
use wan::weights::{WeightFiles, to_floats};

/// The project's `golden/` folder.
pub fn golden_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden")
}

/// One golden file.
pub struct Golden(WeightFiles);

impl Golden {
    /// Opens `golden/NAME.safetensors`.
    pub fn open(name: &str) -> Self {
        let path = golden_dir().join(format!("{name}.safetensors"));
        Self(WeightFiles::open_file(&path).unwrap_or_else(|e| panic!("{e}")))
    }

    /// Whether there is such a tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    /// All names.
    pub fn names(&self) -> Vec<String> {
        self.0.names().map(str::to_owned).collect()
    }

    /// Elements as f32.
    pub fn values(&self, name: &str) -> Vec<f32> {
        self.0.floats(name).unwrap_or_else(|e| panic!("{e}"))
    }

    /// A tensor on the device of the tests.
    pub fn tensor<const D: usize>(&self, name: &str) -> Tensor<D> {
        let shape = self.0.shape(name).unwrap_or_else(|| panic!("no golden tensor {name}"));
        Tensor::from_data(TensorData::new(self.values(name), shape), &device())
    }
}

/// max|a-b| / max|b|
pub fn relative_error(ours: &[f32], reference: &[f32]) -> f64 {
    assert_eq!(ours.len(), reference.len(), "number of elements");
    let scale = reference.iter().fold(0.0_f64, |m, v| m.max(f64::from(v.abs())));
    let worst = ours.iter().zip(reference).fold(0.0_f64, |m, (a, b)| m.max(f64::from((a - b).abs())));
    if worst.is_nan() { f64::INFINITY } else { worst / scale.max(1e-30) }
}

/// Compares with the golden tensor `name`; the tolerance is that on the CPU.
#[track_caller]
pub fn assert_close<const D: usize>(golden: &Golden, name: &str, ours: Tensor<D>, tolerance: f64) {
    let tolerance = allowed(tolerance);
    let error = relative_error(&to_floats(ours), &golden.values(name));
    assert!(error <= tolerance, "{name}: relative error {error:e} > {tolerance:e}");
}
