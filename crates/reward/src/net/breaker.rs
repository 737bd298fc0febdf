//! Stops asking a server that does not answer.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// After `failures` calls in a row that failed for good, calls are refused for `cooldown`; then one call is let through, with a single attempt.
/// Its success closes the breaker, its failure refuses for another `cooldown`.
///
/// So a server that died costs `failures` budgets and then one attempt per cooldown, however many samples wait.
pub(crate) struct Breaker {
    failures: u32,
    cooldown: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    failed_in_a_row: u32,
    open_until: Option<Instant>,
}

/// How a call may go.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// With retries.
    Full,
    /// One attempt, to see whether the server is back.
    Trial,
}

impl Breaker {
    pub fn new(failures: u32, cooldown: Duration) -> Self {
        Self { failures, cooldown, state: Mutex::default() }
    }

    /// # Errors
    /// Why the call is refused.
    pub fn admit(&self) -> Result<Admission, String> {
        let (mut state, now) = (self.lock(), Instant::now());
        match state.open_until {
            None => Ok(Admission::Full),
            Some(until) if now < until => {
                let (calls, seconds) = (state.failed_in_a_row, (until - now).as_secs_f64());
                Err(format!("not asked: {calls} calls in a row have failed; the next attempt is in {seconds:.0} s"))
            }
            Some(_) => {
                // The others wait for what this one finds.
                state.open_until = Some(now + self.cooldown);
                Ok(Admission::Trial)
            }
        }
    }

    /// The server answered, with whatever.
    pub fn answered(&self) {
        *self.lock() = State::default();
    }

    /// A call was given up.
    pub fn failed(&self) {
        let mut state = self.lock();
        state.failed_in_a_row = state.failed_in_a_row.saturating_add(1);
        if state.failed_in_a_row >= self.failures {
            state.open_until = Some(Instant::now() + self.cooldown);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_after_failures_in_a_row_and_closes_after_a_trial() {
        let breaker = Breaker::new(2, Duration::from_millis(40));
        breaker.failed();
        breaker.answered();
        breaker.failed();
        assert_eq!(breaker.admit(), Ok(Admission::Full), "not in a row");
        breaker.failed();
        assert!(breaker.admit().is_err_and(|reason| reason.contains("2 calls in a row")));
        std::thread::sleep(Duration::from_millis(60));
        assert_eq!(breaker.admit(), Ok(Admission::Trial));
        assert!(breaker.admit().is_err(), "one trial at a time");
        breaker.failed();
        assert!(breaker.admit().is_err());
        std::thread::sleep(Duration::from_millis(60));
        assert_eq!(breaker.admit(), Ok(Admission::Trial));
        breaker.answered();
        assert_eq!(breaker.admit(), Ok(Admission::Full));
    }
}
