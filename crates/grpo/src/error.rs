//! What a caller can get wrong.

/// A value this crate refuses, with what it expected instead.
///
/// Messages are lower case with values in backticks; [`Error::field`] and [`Error::hint`] let a front end point at the setting.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// One setting is outside its range.
    #[error("`{field}` is `{got}`, expected {expected}")]
    OutOfRange {
        /// Name of the setting, as in a recipe file (`stochastic.pool`).
        field: &'static str,
        /// The refused value.
        got: String,
        /// The accepted range, as a phrase.
        expected: String,
        /// How to put it right, one sentence.
        hint: String,
    },
    /// Two settings exclude each other.
    #[error("`{field}` = `{got}` makes no sense with `{other}`")]
    Conflict {
        /// Name of the setting to change.
        field: &'static str,
        /// The refused value.
        got: String,
        /// The setting (and value) it conflicts with.
        other: String,
        /// Why, and what to do, one sentence.
        hint: String,
    },
    /// A list of sigmas is not a schedule.
    #[error("sigma {index} is `{got}`, expected {expected}")]
    Sigmas {
        /// Position in the list.
        index: usize,
        /// The refused value.
        got: f64,
        /// The accepted values, as a phrase.
        expected: &'static str,
    },
}

impl Error {
    /// The setting the error is about, named as in a recipe file.
    pub fn field(&self) -> &'static str {
        match self {
            Error::OutOfRange { field, .. } | Error::Conflict { field, .. } => field,
            Error::Sigmas { .. } => "sigmas",
        }
    }

    /// How to put it right.
    pub fn hint(&self) -> &str {
        match self {
            Error::OutOfRange { hint, .. } | Error::Conflict { hint, .. } => hint,
            Error::Sigmas { .. } => "a schedule falls strictly from at most 1 and ends with 0",
        }
    }

    pub(crate) fn out_of_range(field: &'static str, got: impl ToString, expected: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::OutOfRange { field, got: got.to_string(), expected: expected.into(), hint: hint.into() }
    }
}
