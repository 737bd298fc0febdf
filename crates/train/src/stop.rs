//! A request to end a run early, from a signal or from code.

use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Shared by whoever asks and the run that listens: it abandons the rollout at hand, writes a checkpoint, and ends.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicUsize>);

impl Stop {
    /// Asks the run to end because of `signal`.
    pub fn request(&self, signal: usize) {
        self.0.store(signal, Ordering::Relaxed);
    }

    /// The number that was asked with; `None` as long as nobody asked.
    pub fn requested(&self) -> Option<usize> {
        Some(self.0.load(Ordering::Relaxed)).filter(|&signal| signal != 0)
    }

    /// The place where a signal handler stores its signal's number.
    pub fn flag(&self) -> Arc<AtomicUsize> {
        self.0.clone()
    }

    /// # Errors
    /// [`Error::Stopped`] once somebody asked.
    pub fn check(&self) -> Result<()> {
        self.requested().map_or(Ok(()), |signal| Err(Error::Stopped { signal }))
    }
}
