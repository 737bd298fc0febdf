//! Files that appear whole or not at all.

use std::{fs::File, io::Write, path::Path};

use crate::VideoError;

/// Writes `bytes` to `path`: beside it first, then to disk, then renamed over whatever was there.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), VideoError> {
    write_beside(path, bytes).map_err(|source| VideoError::Write { path: path.to_owned(), source })
}

fn write_beside(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    // The parent of a bare file name is the empty path, which no system can open.
    let folder = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    let mut file = builder().tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    sync_folder(folder)
}

/// How the name of a file begins while it is being written.
const UNFINISHED: &str = ".writing-";

/// A temporary file with the permissions of an ordinary one: what the user's umask leaves, not just the owner.
#[cfg(unix)]
fn builder() -> tempfile::Builder<'static, 'static> {
    use std::os::unix::fs::PermissionsExt;
    let mut builder = tempfile::Builder::new();
    builder.prefix(UNFINISHED);
    builder.permissions(std::fs::Permissions::from_mode(0o666));
    builder
}

#[cfg(not(unix))]
fn builder() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(UNFINISHED);
    builder
}

/// The rename itself is on disk only once the folder is.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> std::io::Result<()> {
    Ok(())
}
