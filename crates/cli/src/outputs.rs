//! Files a command is asked to write: refused before the work starts, not after.

use anyhow::{Context, Result, bail};
use std::path::Path;

/// Checks that a file can be put at `path`.
///
/// # Errors
/// The folder does not exist or cannot be written, or `path` is itself a folder.
pub fn check_file(path: &Path) -> Result<()> {
    if path.is_dir() {
        bail!("cannot write `{}`: it is a folder\nhint: give a file name", path.display());
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !dir.is_dir() {
        bail!("cannot write `{}`: there is no folder `{}`\nhint: create it first", path.display(), dir.display());
    }
    let probe = dir.join(format!(".flash-grpo-{}", std::process::id()));
    let refused = || format!("cannot write `{}`\nhint: check free space and permissions of `{}`", path.display(), dir.display());
    std::fs::write(&probe, b"").and_then(|()| std::fs::remove_file(&probe)).with_context(refused)
}

/// Checks that a video can be written to `path`: as [`check_file`], and the name says which format.
///
/// # Errors
/// As [`check_file`], or another extension than `.mp4` and `.gif`.
pub fn check_video(path: &Path) -> Result<()> {
    let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
    if !["mp4", "gif"].iter().any(|known| extension == *known) {
        bail!("cannot tell the video format of `{}`\nhint: name the file `.mp4` or `.gif`", path.display());
    }
    check_file(path)
}
