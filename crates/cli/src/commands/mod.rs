//! The subcommands: each has its arguments and a function `run`.

pub mod sample;
