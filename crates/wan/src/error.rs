//! The crate's one error type: every message names the file, what was found, and what to do.

use std::path::{Path, PathBuf};

/// What can go wrong when a model folder, an adapter or a request is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused to read or write a file.
    #[error("cannot {action} `{path}`: {source}\nhint: {hint}")]
    Io {
        /// `read`, `write`, ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
        /// What the user can do.
        hint: String,
    },
    /// A file was read, but its content cannot be used.
    #[error("`{path}`: {reason}\nhint: {hint}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong, with field and value.
        reason: String,
        /// What the user can do.
        hint: String,
    },
    /// The tensors of a weight file are not those of the model.
    #[error("weights in `{path}` do not fit the model:{misfits}")]
    Weights {
        /// The weight file or folder.
        path: PathBuf,
        /// All that does not fit.
        misfits: Misfits,
    },
    /// A value given by the caller is out of range.
    #[error("{field} is `{value}`: {reason}\nhint: {hint}")]
    Argument {
        /// Name of the setting.
        field: &'static str,
        /// The value given.
        value: String,
        /// Why it cannot be used.
        reason: String,
        /// What the user can do.
        hint: String,
    },
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An [`Error::Io`] for reading, with the hint that fits the system's reason.
    pub fn read(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        let hint = match source.kind() {
            std::io::ErrorKind::NotFound => {
                "check the path; a model folder has the diffusers layout (model_index.json, transformer/, vae/, text_encoder/, tokenizer/, scheduler/)"
            }
            std::io::ErrorKind::PermissionDenied => "give this user the right to read it",
            _ => "check that the file is readable and complete",
        };
        Self::Io { action: "read", path: path.as_ref().into(), source, hint: hint.into() }
    }

    /// An [`Error::Io`] for writing.
    pub fn write(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        let hint = "check free space and permissions of the folder".into();
        Self::Io { action: "write", path: path.as_ref().into(), source, hint }
    }

    /// A value that came from a file: names the file too.
    pub fn in_file(self, path: impl AsRef<Path>) -> Self {
        match self {
            Self::Argument { field, value, reason, hint } => Self::invalid(path, format!("{field} `{value}`: {reason}"), hint),
            other => other,
        }
    }

    /// An [`Error::Invalid`].
    pub fn invalid(path: impl AsRef<Path>, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Invalid { path: path.as_ref().into(), reason: reason.into(), hint: hint.into() }
    }
}

/// How the tensors of a weight file differ from those that a model asks for.
#[derive(Debug, Default)]
pub struct Misfits {
    /// Names the model needs and the file lacks.
    pub missing: Vec<String>,
    /// `name: expected [..], got [..]`.
    pub mis_shaped: Vec<String>,
    /// `name: dtype`, of dtypes that are not read.
    pub unsupported: Vec<String>,
    /// Names of the file that the model does not know.
    pub unexpected: Vec<String>,
}

impl Misfits {
    /// An [`Error::Weights`] about `path`, unless everything fits.
    pub(crate) fn into_result(self, path: &Path) -> Result<()> {
        let lists = [&self.missing, &self.mis_shaped, &self.unsupported, &self.unexpected];
        if lists.iter().all(|names| names.is_empty()) {
            return Ok(());
        }
        Err(Error::Weights { path: path.into(), misfits: self })
    }
}

impl std::fmt::Display for Misfits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { missing, mis_shaped, unsupported, unexpected } = self;
        let titles = [("missing", missing), ("wrong shape", mis_shaped), ("unsupported dtype", unsupported), ("unexpected", unexpected)];
        for (title, names) in titles.into_iter().filter(|(_, names)| !names.is_empty()) {
            write!(f, "\n  {title} ({}):", names.len())?;
            for name in names.iter().take(MAX_LISTED) {
                write!(f, "\n    {name}")?;
            }
            if names.len() > MAX_LISTED {
                write!(f, "\n    ... and {} more", names.len() - MAX_LISTED)?;
            }
        }
        let hint = if unsupported.is_empty() { "config.json and the weights must belong to the same model" } else { SUPPORTED_DTYPES };
        write!(f, "\nhint: {hint}")
    }
}

/// What to do about a dtype that is not read.
pub(crate) const SUPPORTED_DTYPES: &str = "f32, f16 and bf16 weights are supported";

/// Names listed per kind of misfit; a wrong folder would otherwise print a thousand lines.
const MAX_LISTED: usize = 40;
