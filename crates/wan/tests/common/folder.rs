//! Model folders to change.

use std::path::Path;

/// Copies a folder and all that is in it.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("folder");
    for path in std::fs::read_dir(from).expect("folder").map(|entry| entry.expect("entry").path()) {
        let target = to.join(path.file_name().expect("name"));
        if path.is_dir() {
            copy(&path, &target);
        } else {
            std::fs::copy(&path, &target).expect("copy");
        }
    }
}
