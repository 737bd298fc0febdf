//! A request to give up, from whoever waits for scores.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// How long a wait goes on without looking.
const SLICE: Duration = Duration::from_millis(50);

/// A flag shared with a signal handler: calls are given up once it is not 0.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicUsize>);

impl Stop {
    /// Listens to a flag.
    pub fn new(flag: Arc<AtomicUsize>) -> Self {
        Self(flag)
    }

    /// # Errors
    /// Once somebody asked.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.0.load(Ordering::Relaxed) == 0 { Ok(()) } else { Err("given up: the run was asked to stop".to_owned()) }
    }

    /// Waits, in slices.
    ///
    /// # Errors
    /// Once somebody asked.
    pub(crate) fn sleep(&self, wait: Duration) -> Result<(), String> {
        let end = Instant::now() + wait;
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            self.check()?;
            std::thread::sleep(left.min(SLICE));
        }
        self.check()
    }

    /// What `work` gives, on a thread of its own. Once somebody asked it is left to itself: nobody hears what becomes of it.
    ///
    /// # Errors
    /// Once somebody asked; work that panics.
    pub(crate) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
        self.check()?;
        let (result, results) = sync_channel(1);
        std::thread::spawn(move || result.send(work()));
        loop {
            match results.recv_timeout(SLICE) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) => self.check()?,
                Err(RecvTimeoutError::Disconnected) => return Err("the attempt broke off".to_owned()),
            }
        }
    }

    /// What `poll` finds within `wait`; it is called again and again with how long it may take.
    ///
    /// # Errors
    /// Once somebody asked.
    pub(crate) fn poll<T>(&self, wait: Duration, mut poll: impl FnMut(Duration) -> Option<T>) -> Result<Option<T>, String> {
        let end = Instant::now() + wait;
        loop {
            self.check()?;
            let left = end.saturating_duration_since(Instant::now());
            match poll(left.min(SLICE)) {
                None if !left.is_zero() => {}
                found => return Ok(found),
            }
        }
    }
}
