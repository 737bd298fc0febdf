//! One self-contained HTML file about training runs and comparisons: tables, curves, videos before and after, numbers, recipes.
//!
//! It opens from disk, asks for nothing over the network, and runs no script. [`load`](mod@load) reads the folders, [`chart`] draws,
//! [`page`] writes about one run, [`several`] about several, [`comparison`] about a comparison.

pub mod chart;
pub mod comparison;
pub mod load;
pub mod page;
pub mod several;

use load::Subject;
use std::path::{Path, PathBuf};

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of a run or comparison folder.
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

/// The page about the runs and comparisons in `folders`, finished or not, to be put into `place`: it links to what lies below.
///
/// # Errors
/// A folder that holds neither, or a file in it that cannot be read.
pub fn html(folders: &[impl AsRef<Path>], place: &Path) -> Result<String> {
    let subjects = folders.iter().map(|folder| Subject::load(folder.as_ref())).collect::<Result<Vec<_>>>()?.concat();
    Ok(match subjects.as_slice() {
        [Subject::Run(run)] => page::render(run),
        [Subject::Comparison(comparison)] => comparison::render(comparison, place),
        _ => several::render(&subjects, place),
    })
}
