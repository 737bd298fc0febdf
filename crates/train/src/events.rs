//! What a run tells whoever watches it.

use crate::iteration::IterationMetrics;

/// Something happened. The library prints nothing; the command draws bars, a test ignores it.
#[derive(Debug, Clone)]
pub enum Event<'a> {
    /// A phase of so many units begins.
    Phase {
        /// What is being done.
        name: &'a str,
        /// Number of units.
        total: u64,
    },
    /// So many units of the present phase are done.
    Progress(u64),
    /// The present phase is over.
    Done,
    /// An iteration is over.
    Iteration(&'a IterationMetrics),
    /// A line for people.
    Note(&'a str),
    /// A line that people must not miss.
    Warning(&'a str),
}

/// Receives events.
pub type Watch<'a> = dyn FnMut(Event<'_>) + 'a;
