//! The processes of a command.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::child::Process;
use crate::Stop;
use crate::net::{Admission, Breaker};

/// Requests in a row that no process could answer before no more are tried for a while.
const FAILURES: u32 = 3;

/// How long that is.
const COOLDOWN: Duration = Duration::from_secs(30);

/// Up to `size` processes of one program; each is started when it is first needed, and again after it died.
pub(crate) struct Pool {
    command: Vec<String>,
    timeout: Duration,
    restarts: u32,
    breaker: Breaker,
    stop: Stop,
    /// Places for processes; some empty.
    free: Mutex<Vec<Option<Process>>>,
    returned: Condvar,
}

impl Pool {
    pub fn new(command: Vec<String>, size: usize, timeout: Duration, restarts: u32) -> Self {
        let free = Mutex::new((0..size.max(1)).map(|_| None).collect());
        Self {
            command,
            timeout,
            restarts,
            breaker: Breaker::new(FAILURES, COOLDOWN),
            stop: Stop::default(),
            free,
            returned: Condvar::new(),
        }
    }

    pub fn with_stop(self, stop: Stop) -> Self {
        Self { stop, ..self }
    }

    /// Starts one process.
    ///
    /// # Errors
    /// A program that cannot be started, or ends at once.
    pub fn start(&self) -> Result<(), String> {
        let place = self.take();
        let started = place.map_or_else(|| Process::start(&self.command), Ok).and_then(Process::that_stays);
        let (place, result) = started.map_or_else(|reason| (None, Err(reason)), |process| (Some(process), Ok(())));
        self.give_back(place);
        result
    }

    /// Asks a free process, and a new one if that one dies, hangs, or says what `read` refuses: after that, nobody knows which of its lines
    /// answers what.
    ///
    /// # Errors
    /// What the last one met.
    pub fn exchange<T>(&self, request: &[u8], read: impl Fn(&[u8]) -> Result<T, String>) -> Result<T, String> {
        self.stop.check()?;
        let restarts = if self.breaker.admit()? == Admission::Full { self.restarts } else { 0 };
        let mut place = self.take();
        let mut result = self.attempt(&mut place, request, &read);
        for _ in 0..restarts {
            if result.is_ok() || self.stop.check().is_err() {
                break;
            }
            result = self.attempt(&mut place, request, &read);
        }
        self.give_back(place);
        match &result {
            Ok(_) => self.breaker.answered(),
            Err(_) => self.breaker.failed(),
        }
        result
    }

    fn attempt<T>(&self, place: &mut Option<Process>, request: &[u8], read: &impl Fn(&[u8]) -> Result<T, String>) -> Result<T, String> {
        let mut process = place.take().map_or_else(|| Process::start(&self.command), Ok)?;
        let answer = process.exchange(request, self.timeout, &self.stop)?;
        let result = read(&answer)?;
        *place = Some(process);
        Ok(result)
    }

    fn take(&self) -> Option<Process> {
        let mut free = self.lock();
        loop {
            if let Some(place) = free.pop() {
                return place;
            }
            free = self.returned.wait(free).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// A process that runs goes on top, so that it is taken before another is started.
    fn give_back(&self, place: Option<Process>) {
        let mut free = self.lock();
        if place.is_some() {
            free.push(place);
        } else {
            free.insert(0, place);
        }
        drop(free);
        self.returned.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Process>>> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
