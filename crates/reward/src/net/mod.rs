//! HTTP calls that end: timeouts, a total budget, retries only where they can help, a breaker, and a stop that is heard while a server thinks.

mod breaker;
mod client;

pub(crate) use breaker::{Admission, Breaker};
pub use client::{Client, ConnectionSettings};
