//! Convolution of clips on the CPU, with the norm and activation before it and the residual sum after it in one go.
//!
//! burn's own convolution is written for many channels; the small autoencoder has 8 to 32, where it reaches a tenth of
//! what the processor can do. Fusing also saves memory: a training step keeps only the input of each convolution,
//! and activates it again on the way back.
//!
//! Read `shape` first (the idea), then `kernel` (the inner loops), `sweep` and `weight_gradient` (the work), and
//! `op` (the operation as burn sees it).

mod activation;
mod kernel;
mod op;
mod shape;
mod sweep;
mod weight_gradient;

pub use op::{FusedConv, fused_conv3d, supports};
