//! What is wrong with a recipe, where, and what to do about it.

use std::path::Path;

/// One problem with a recipe.
///
/// ```text
/// recipes/mine.toml:12:14: `sampling.num_frames` is `10`, expected 4k + 1 frames
/// hint: the nearest are 9 and 13
/// ```
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{place}: {message}\nhint: {hint}")]
pub struct SettingsError {
    /// `file:line:column`, a file, or the `--set` override.
    pub place: String,
    /// The dotted key, as in the file; empty if the problem is no single key.
    pub field: String,
    /// What is wrong, with field and value in backticks.
    pub message: String,
    /// What to do.
    pub hint: String,
}

impl SettingsError {
    pub(crate) fn new(place: impl Into<String>, field: impl Into<String>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        SettingsError { place: place.into(), field: field.into(), message: message.into(), hint: hint.into() }
    }

    pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> Self {
        let hint = "paths are relative to the current directory; without a recipe the built-in one is used";
        SettingsError::new(path.display().to_string(), "", format!("cannot read the recipe: {}", reason(error)), hint)
    }
}

/// An I/O error in our style: lower case, without the number of the operating system.
pub(super) fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "no such file".to_owned(),
        std::io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        std::io::ErrorKind::IsADirectory => "it is a folder".to_owned(),
        std::io::ErrorKind::InvalidData => "not UTF-8 text".to_owned(),
        _ => error.to_string().to_lowercase(),
    }
}
