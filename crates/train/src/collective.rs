//! The seam for many processes: what ranks have to agree on, and nothing else.

use burn::tensor::Tensor;

/// Sums over ranks. Plans, noise and prompts need no communication: they are functions of (seed, iteration, prompt, rollout).
pub trait Collective: Send + Sync {
    /// This process.
    fn rank(&self) -> usize;

    /// Number of processes.
    fn world_size(&self) -> usize;

    /// Replaces every tensor by its sum over all ranks.
    fn all_reduce_sum(&self, tensors: &mut [Tensor<1>]);
}

/// One process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_reduce_sum(&self, _: &mut [Tensor<1>]) {}
}
