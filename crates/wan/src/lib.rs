//! Wan2.1 and Wan2.2, from text and from images, on burn: transformer, autoencoder, text encoder, solvers, adapters, in the diffusers folder
//! layout.

pub mod error;
pub mod layers;
pub mod ops;
pub mod param;
pub mod weights;

pub mod clip;
pub mod config;
pub mod device;
pub mod experts;
pub mod guidance;
pub mod hub;
pub mod image;
pub mod lora;
pub mod original;
pub mod pipeline;
pub mod random_model;
pub mod solver;
pub mod text;
pub mod transformer;
pub mod umt5;
pub mod vae;
pub use error::{Error, Misfits, Result};
