//! One server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

use super::{Admission, Breaker};
use crate::error::require;
use crate::protocol::gist;
use crate::{SetupError, Stop};

/// How long to wait, how often to ask, and when to stop asking.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConnectionSettings {
    /// For the connection to stand.
    pub connect_timeout_s: f64,
    /// For one attempt, answer included.
    pub request_timeout_s: f64,
    /// For all attempts of a call together.
    pub budget_s: f64,
    /// Wait before the second attempt; it doubles from attempt to attempt.
    pub first_delay_s: f64,
    /// The longest wait between attempts.
    pub max_delay_s: f64,
    /// The largest answer that is read.
    pub max_response_mib: usize,
    /// Calls in a row that fail before no more are made for a while.
    pub breaker_failures: u32,
    /// How long that is.
    pub breaker_cooldown_s: f64,
}

impl Default for ConnectionSettings {
    fn default() -> Self {
        Self {
            connect_timeout_s: 5.0,
            request_timeout_s: 60.0,
            budget_s: 300.0,
            first_delay_s: 0.5,
            max_delay_s: 30.0,
            max_response_mib: 16,
            breaker_failures: 3,
            breaker_cooldown_s: 60.0,
        }
    }
}

/// Attempts that may end in a Python traceback: status 500 is also what servers say to a request that they will never understand.
const TRACEBACKS: u32 = 5;

/// A day: anything longer is a mistake, and far longer ones are no duration.
const LONGEST_S: f64 = 86_400.0;

impl ConnectionSettings {
    pub(crate) fn validate(&self) -> Result<(), SetupError> {
        for (field, seconds) in [
            ("connection.connect_timeout_s", self.connect_timeout_s),
            ("connection.request_timeout_s", self.request_timeout_s),
            ("connection.budget_s", self.budget_s),
            ("connection.first_delay_s", self.first_delay_s),
            ("connection.max_delay_s", self.max_delay_s),
            ("connection.breaker_cooldown_s", self.breaker_cooldown_s),
        ] {
            require(seconds > 0.0 && seconds <= LONGEST_S, field, seconds, "seconds, above 0 and at most a day", "60 is one minute")?;
        }
        let hint = "16 is the default; answers are small";
        require((1..=4096).contains(&self.max_response_mib), "connection.max_response_mib", self.max_response_mib, "1 to 4096", hint)?;
        require(self.breaker_failures > 0, "connection.breaker_failures", 0, "at least 1", "3 is the default")
    }
}

/// Why an attempt brought no answer.
enum Failure {
    /// Another attempt may help; not before so long, if the server said so.
    Passing(String, Option<Duration>),
    /// It will not.
    Lasting(String),
}

/// A server and what is known of its health.
pub struct Client {
    agent: Agent,
    url: String,
    authorization: Option<String>,
    settings: ConnectionSettings,
    breaker: Breaker,
    stop: Stop,
}

impl Client {
    /// A client of the server at `url`; further paths are appended to it.
    pub fn new(url: &str, settings: ConnectionSettings) -> Self {
        let seconds = Duration::from_secs_f64;
        let proxy = if url.starts_with("https://") { ureq::Proxy::try_from_env() } else { None };
        let config = Agent::config_builder()
            .timeout_connect(Some(seconds(settings.connect_timeout_s)))
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(proxy)
            .user_agent("flash-grpo")
            .build();
        let breaker = Breaker::new(settings.breaker_failures, seconds(settings.breaker_cooldown_s));
        Self {
            agent: config.into(),
            url: url.trim_end_matches('/').to_owned(),
            authorization: None,
            settings,
            breaker,
            stop: Stop::default(),
        }
    }

    /// The same with the key that stands in the environment variable, if one is named, in every request: `Authorization: Bearer KEY`.
    ///
    /// # Errors
    /// A variable that is not set, or is no key.
    pub fn with_api_key(self, variable: Option<&str>) -> Result<Self, SetupError> {
        let Some(variable) = variable else { return Ok(self) };
        let key = std::env::var(variable).map(|key| key.trim().to_owned()).unwrap_or_default();
        let fits = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
        let hint = "set it before the run; keys never stand in recipes";
        require(fits, "api_key_env", variable, "an environment variable that is set to a key, in ASCII without blanks", hint)?;
        Ok(Self { authorization: Some(format!("Bearer {key}")), ..self })
    }

    /// The same, giving up once it is asked to.
    pub fn with_stop(self, stop: Stop) -> Self {
        Self { stop, ..self }
    }

    /// Posts `body`; the answer's body. `key` names the call: the jitter between attempts is a function of it.
    ///
    /// # Errors
    /// What the last attempt met, after retries of connection errors, time-outs and status 408, 429 and 5xx within the budget; a stop.
    pub fn post(&self, path: &str, content_type: &str, body: Vec<u8>, key: &str) -> Result<Vec<u8>, String> {
        let (url, body, limit) = (format!("{}{path}", self.url), Arc::new(body), self.limit());
        self.call(key, |timeout| {
            let mut request = self.agent.post(&url).header("content-type", content_type);
            if let Some(authorization) = &self.authorization {
                request = request.header("authorization", authorization);
            }
            let (request, body) = (request.config().timeout_global(Some(timeout)).build(), Arc::clone(&body));
            self.stop.run(move || read(request.send(&body[..]), limit))
        })
    }

    /// Gets a path, with one attempt.
    ///
    /// # Errors
    /// What the attempt met; a stop.
    pub fn get(&self, path: &str) -> Result<Vec<u8>, String> {
        let url = format!("{}{path}", self.url);
        let mut request = self.agent.get(&url);
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        let timeout = Duration::from_secs_f64(self.settings.request_timeout_s.min(self.settings.budget_s));
        let (request, limit) = (request.config().timeout_global(Some(timeout)).build(), self.limit());
        self.stop.run(move || read(request.call(), limit))?.map_err(|failure| match failure {
            Failure::Passing(reason, _) | Failure::Lasting(reason) => reason,
        })
    }

    /// The largest answer in bytes.
    fn limit(&self) -> u64 {
        (self.settings.max_response_mib << 20) as u64
    }

    /// The outer error of an attempt is that it was given up.
    fn call(&self, key: &str, attempt: impl Fn(Duration) -> Result<Result<Vec<u8>, Failure>, String>) -> Result<Vec<u8>, String> {
        self.stop.check()?;
        let admission = self.breaker.admit()?;
        let (start, budget) = (Instant::now(), Duration::from_secs_f64(self.settings.budget_s));
        for number in 1u32.. {
            let left = budget.saturating_sub(start.elapsed());
            let (reason, wait) = match attempt(left.min(Duration::from_secs_f64(self.settings.request_timeout_s)))? {
                Ok(answer) => {
                    self.breaker.answered();
                    return Ok(answer);
                }
                Err(Failure::Lasting(reason)) => {
                    self.breaker.answered();
                    return Err(reason);
                }
                Err(Failure::Passing(reason, _)) if number >= TRACEBACKS && reason.contains("Traceback (most recent call last)") => {
                    self.breaker.answered();
                    return Err(format!("gave up after {number} attempts: {reason}"));
                }
                Err(Failure::Passing(reason, wait)) => (reason, self.delay(key, number).max(wait.unwrap_or_default())),
            };
            if admission == Admission::Trial || start.elapsed().saturating_add(wait) >= budget {
                self.breaker.failed();
                let (seconds, plural) = (start.elapsed().as_secs_f64(), if number == 1 { "" } else { "s" });
                return Err(format!("gave up after {number} attempt{plural} in {seconds:.1} s: {reason}"));
            }
            self.stop.sleep(wait)?;
        }
        Err("no attempt was made".to_owned())
    }

    /// Wait after attempt `number`, from 1, of the call named `key`:
    ///
    /// ```text
    /// min(first 2^(number - 1), max) (1/2 + u/2),   u in [0, 1) a function of (url, key, number)
    /// ```
    ///
    /// so that calls that fail together do not come back together.
    fn delay(&self, key: &str, number: u32) -> Duration {
        let full = (self.settings.first_delay_s * 2f64.powi(number.min(60) as i32 - 1)).min(self.settings.max_delay_s);
        Duration::from_secs_f64(full * (0.5 + 0.5 * unit(&[self.url.as_bytes(), key.as_bytes(), &number.to_le_bytes()])))
    }
}

/// The body of an answer, of at most `limit` bytes.
fn read(result: Result<Response<Body>, ureq::Error>, limit: u64) -> Result<Vec<u8>, Failure> {
    let response = result.map_err(classify)?;
    let status = response.status();
    let wait = response.headers().get("retry-after").and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok());
    let body = response.into_body().into_with_config().limit(limit).read_to_vec();
    if status == StatusCode::OK {
        return body.map_err(classify);
    }
    let reason = format!("the server answers `{status}`: {}", gist(&body.unwrap_or_default()));
    let passing = status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT || status == StatusCode::TOO_MANY_REQUESTS;
    Err(if passing { Failure::Passing(reason, wait.map(Duration::from_secs)) } else { Failure::Lasting(reason) })
}

/// Connections that were refused, cut or too slow may be better next time; what is wrong with the request or its address is not.
fn classify(error: ureq::Error) -> Failure {
    use ureq::Error;
    match error {
        Error::Timeout(kind) => Failure::Passing(format!("no answer in time ({kind})"), None),
        Error::Io(_) | Error::HostNotFound | Error::ConnectionFailed | Error::Protocol(_) => Failure::Passing(error.to_string(), None),
        Error::BodyExceedsLimit(limit) => Failure::Lasting(format!("the answer is larger than {} MiB", limit >> 20)),
        other => Failure::Lasting(other.to_string()),
    }
}

/// A number in [0, 1) from the hash of the parts.
fn unit(parts: &[&[u8]]) -> f64 {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    let digest = hash.finalize();
    let bits = digest.iter().take(6).fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
    bits as f64 / (1u64 << 48) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_are_a_function_of_the_key() {
        let client = Client::new("http://127.0.0.1:1/", ConnectionSettings::default());
        let delays: Vec<f64> = (1..100).map(|number| client.delay("a", number).as_secs_f64()).collect();
        assert_eq!(delays[0], client.delay("a", 1).as_secs_f64());
        assert_ne!(delays[0], client.delay("b", 1).as_secs_f64());
        let full = |i: usize| (0.5 * 2f64.powi(i as i32)).min(30.0);
        assert!(delays.iter().enumerate().all(|(i, d)| (0.5 * full(i)..full(i)).contains(d)), "{delays:?}");
    }
}
