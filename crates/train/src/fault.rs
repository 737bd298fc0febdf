//! Points at which a test can end the process, as a power cut would.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// `FLASH_GRPO_ABORT_AT=checkpoint-renamed:3` aborts the process when it passes that point for the third time.
const VARIABLE: &str = "FLASH_GRPO_ABORT_AT";

struct Fault {
    name: String,
    left: AtomicUsize,
}

/// Aborts the process if the environment asks for it at this point.
pub(crate) fn point(name: &str) {
    static FAULT: OnceLock<Option<Fault>> = OnceLock::new();
    let fault = FAULT.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let (name, count) = text.split_once(':')?;
        Some(Fault { name: name.to_owned(), left: AtomicUsize::new(count.parse().ok()?) })
    });
    if let Some(fault) = fault.as_ref().filter(|fault| fault.name == name)
        && fault.left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        std::process::abort();
    }
}
