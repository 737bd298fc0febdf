//! HTTP calls that end: timeouts, a total budget, retries only where they can help, and a breaker.

mod breaker;
mod client;

pub(crate) use breaker::{Admission, Breaker};
pub use client::{Client, ConnectionSettings};
