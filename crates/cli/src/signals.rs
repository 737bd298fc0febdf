//! Signals: the first asks the run to write a checkpoint and end, a second one ends the process at once.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io::Result;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use train::stop::Stop;

/// Slurm sends SIGUSR1 before it preempts, if asked to (`--signal=USR1@300`).
#[cfg(unix)]
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, signal_hook::consts::SIGUSR1];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// Lets signals reach `stop`.
///
/// # Errors
/// The system refuses a handler.
pub fn listen(stop: &Stop) -> Result<()> {
    let again = Arc::new(AtomicBool::new(false));
    for signal in SIGNALS {
        flag::register_conditional_shutdown(signal, 128 + signal, again.clone())?;
        flag::register(signal, again.clone())?;
        flag::register_usize(signal, stop.flag(), signal as usize)?;
    }
    Ok(())
}
