//! Model ids of the Hugging Face hub, found in the cache that the Python libraries keep, and fetched into it when asked to.

#[cfg(feature = "download")]
mod download;

#[cfg(feature = "download")]
pub use download::{Hub, Progress};

use crate::error::{Error, Result};
use std::env;
use std::path::{Path, PathBuf};

/// The folder of a model: `path` itself if it exists, else, if it reads like a hub id (`organisation/name`, optionally `@revision`), its
/// snapshot in the cache:
///
/// ```text
/// CACHE/models--organisation--name/refs/REVISION        a commit
/// CACHE/models--organisation--name/snapshots/COMMIT/    the files
/// ```
///
/// `CACHE` is `HF_HUB_CACHE`, or `hub` in `HF_HOME`, or `~/.cache/huggingface/hub`, as for the Python libraries. The revision is `main` where
/// none is given; a commit stands for itself.
///
/// # Errors
/// An id that the cache does not hold, with the command that fetches it.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    match HubId::parse(path) {
        Some(id) if !path.exists() => id.find(&cache()?),
        _ => Ok(path.to_owned()),
    }
}

/// The cache's folder.
fn cache() -> Result<PathBuf> {
    let found = path_in("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")));
    let hint = "name the folder of the model, or set `HF_HOME`";
    found.ok_or_else(|| Error::invalid(Path::new("HF_HOME"), "neither it nor `HOME` is set, so there is no cache", hint))
}

/// Where the Python libraries keep what belongs to a user: cache and token, unless they are told otherwise.
fn home() -> Option<PathBuf> {
    let caches = || path_in("XDG_CACHE_HOME").or_else(|| Some(path_in("HOME")?.join(".cache")));
    path_in("HF_HOME").or_else(|| Some(caches()?.join("huggingface")))
}

/// The path in an environment variable.
fn path_in(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// `organisation/name[@revision]`
struct HubId<'a> {
    organisation: &'a str,
    name: &'a str,
    revision: &'a str,
}

impl<'a> HubId<'a> {
    fn parse(path: &'a Path) -> Option<Self> {
        let (id, revision) = path.to_str().map(|text| text.split_once('@').unwrap_or((text, "main")))?;
        let (organisation, name) = id.split_once('/')?;
        let fits =
            |part: &str| !part.is_empty() && !part.starts_with('.') && part.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c));
        let revision_fits = !revision.is_empty() && !revision.contains("..") && !revision.starts_with('/');
        (fits(organisation) && fits(name) && revision_fits).then_some(Self { organisation, name, revision })
    }

    /// Where the cache keeps all that belongs to the model.
    fn folder(&self, cache: &Path) -> PathBuf {
        cache.join(format!("models--{}--{}", self.organisation, self.name))
    }

    fn find(&self, cache: &Path) -> Result<PathBuf> {
        let Self { organisation, name, revision } = self;
        let model = self.folder(cache);
        let commit =
            std::fs::read_to_string(model.join("refs").join(revision)).map_or_else(|_| (*revision).to_owned(), |c| c.trim().to_owned());
        let snapshot = model.join("snapshots").join(&commit);
        if !commit.contains(['/', '\\']) && snapshot.is_dir() {
            return Ok(snapshot);
        }
        let reason = format!("no such folder, and revision `{revision}` of that model is not in the cache `{}`", cache.display());
        Err(Error::invalid(PathBuf::from(format!("{organisation}/{name}")), reason, FETCH))
    }
}

const FETCH: &str =
    "fetch it with `flash-grpo download ORGANISATION/NAME`, or `hf download` (Python: huggingface_hub), or name the folder of the model";

#[cfg(test)]
mod tests {
    use super::*;

    fn find(cache: &Path, id: &str) -> Result<PathBuf> {
        HubId::parse(Path::new(id)).expect("an id").find(cache)
    }

    #[test]
    fn snapshots_are_found_by_branch_and_commit() {
        let cache = tempfile::tempdir().expect("folder");
        let model = cache.path().join("models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers");
        for commit in ["0fad780a534b6463e45facd96134c9f345acfa5b", "1111111111111111111111111111111111111111"] {
            std::fs::create_dir_all(model.join("snapshots").join(commit)).expect("snapshot");
        }
        std::fs::create_dir_all(model.join("refs/pr")).expect("refs");
        std::fs::write(model.join("refs/main"), "0fad780a534b6463e45facd96134c9f345acfa5b\n").expect("ref");
        std::fs::write(model.join("refs/pr/2"), "1111111111111111111111111111111111111111").expect("ref");
        let id = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers";
        let ends = |id: &str, commit: &str| find(cache.path(), id).expect("found").ends_with(commit);
        assert!(ends(id, "0fad780a534b6463e45facd96134c9f345acfa5b"));
        assert!(ends(&format!("{id}@pr/2"), "1111111111111111111111111111111111111111"));
        assert!(ends(&format!("{id}@1111111111111111111111111111111111111111"), "1111111111111111111111111111111111111111"));
        let message = find(cache.path(), &format!("{id}@v9")).expect_err("unknown").to_string();
        assert!(message.contains("revision `v9`") && message.contains("hf download"), "{message}");
    }

    #[test]
    fn paths_are_no_ids() {
        for path in ["models", "./models/wan", "../wan/x", "/models/wan", "a/b/c", "a/", "a/b@../../c", "a/b@"] {
            assert!(HubId::parse(Path::new(path)).is_none(), "{path}");
        }
    }

    #[test]
    fn a_folder_is_itself() {
        let folder = tempfile::tempdir().expect("folder");
        assert_eq!(resolve(folder.path()).expect("there"), folder.path());
    }
}
