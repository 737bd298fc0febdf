//! One self-contained HTML file about a training run: curves, videos before and after, numbers, the recipe.
//!
//! It opens from disk, asks for nothing over the network, and runs no script. [`load`](mod@load) reads the run folder, [`chart`] draws,
//! [`page`] writes.

pub mod chart;
pub mod comparison;
pub mod load;
pub mod page;

use std::path::{Path, PathBuf};

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the run folder.
    #[error("`{path}`: {reason}\nhint: {hint}", path = path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        hint: &'static str,
    },
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The page about a comparison, from its `table.json`.
///
/// # Errors
/// A table that is not one.
pub fn comparison_html(table: &serde_json::Value) -> Result<String> {
    let table = serde_json::from_value(table.clone()).map_err(|e| Error::File {
        path: "table.json".into(),
        reason: e.to_string(),
        hint: "make the comparison anew; finished runs are not made again",
    })?;
    Ok(comparison::render(&table))
}

/// The page about the run in `folder`, finished or not.
///
/// # Errors
/// A folder that holds no run, or a file in it that cannot be read.
pub fn html(folder: &Path) -> Result<String> {
    Ok(page::render(&load::Run::load(folder)?))
}
