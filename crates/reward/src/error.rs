//! What can go wrong: with one sample, or with a reward as a whole.

use std::fmt::Display;

/// Why a sample could not be scored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("reward `{reward}` cannot score the prompt `{prompt}`: {reason}")]
pub struct RewardError {
    /// The reward's name.
    pub reward: String,
    /// The sample's prompt.
    pub prompt: String,
    /// What is wrong.
    pub reason: String,
}

impl RewardError {
    /// An error of the reward `reward` at a sample with this prompt.
    pub fn new(reward: &str, prompt: &str, reason: impl Display) -> Self {
        Self { reward: reward.to_owned(), prompt: prompt.to_owned(), reason: reason.to_string() }
    }
}

/// Why a reward cannot be used at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("reward `{reward}`: {message}\nhint: {hint}")]
pub struct SetupError {
    /// The reward's name.
    pub reward: String,
    /// The key of `[[reward]]` that is wrong; empty if it is no single key.
    pub field: &'static str,
    /// What is wrong, with field and value in backticks.
    pub message: String,
    /// What to do.
    pub hint: String,
}

impl SetupError {
    /// A problem that is not one of the recipe's keys.
    pub fn new(reward: &str, message: impl Display, hint: impl Display) -> Self {
        Self { reward: reward.to_owned(), field: "", message: message.to_string(), hint: hint.to_string() }
    }

    /// A key whose value cannot be used; the reward's name is filled in by whoever knows it.
    pub(crate) fn field(field: &'static str, value: impl Display, expected: &str, hint: impl Display) -> Self {
        let message = format!("`{field}` is `{value}`, expected {expected}");
        Self { reward: String::new(), field, message, hint: hint.to_string() }
    }

    pub(crate) fn of(self, reward: &str) -> Self {
        Self { reward: reward.to_owned(), ..self }
    }
}

/// A condition on a key of `[[reward]]`.
pub(crate) fn require(holds: bool, field: &'static str, value: impl Display, expected: &str, hint: impl Display) -> Result<(), SetupError> {
    if holds { Ok(()) } else { Err(SetupError::field(field, value, expected, hint)) }
}
