//! The subcommands: each has its arguments and a function `run`.

pub mod compare;
pub mod doctor;
#[cfg(feature = "download")]
pub mod download;
pub mod eval;
pub mod inspect;
pub mod plan;
pub mod pretrain;
pub mod random_model;
pub mod replay;
pub mod report;
pub mod reward;
pub mod sample;
pub mod train;
