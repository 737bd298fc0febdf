//! Waiting in a program whose main thread is one of the pool's.

use rayon::Yield;
use std::time::Duration;

/// Between two looks while there is nothing to do.
const PAUSE: Duration = Duration::from_micros(200);

/// Waits for `done`, working for the thread pool meanwhile if this thread belongs to it: another thread may be waiting for just that work,
/// and with a single core nobody else would do it.
pub fn help_until(done: impl Fn() -> bool) {
    while !done() {
        if rayon::yield_now() != Some(Yield::Executed) {
            std::thread::sleep(PAUSE);
        }
    }
}
