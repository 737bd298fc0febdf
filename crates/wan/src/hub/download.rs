//! Fetching a model into the cache of the Python libraries, laid out as they do it:
//!
//! ```text
//! CACHE/models--organisation--name/blobs/ETAG                  the bytes; ETAG.incomplete while they arrive
//! CACHE/models--organisation--name/snapshots/COMMIT/PATH       a link to its blob
//! CACHE/models--organisation--name/refs/REVISION               the commit; written last
//! ```

use super::{HubId, cache, home, path_in};
use crate::error::{Error, Result};
use crate::weights::write_atomically;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::env;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use ureq::http::{HeaderMap, Response, StatusCode, Uri};
use ureq::{Agent, Body};

/// Folders of a model in the diffusers layout whose files are fetched; the files beside them are, too.
const PARTS: [&str; 8] =
    ["transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler", "image_encoder", "image_processor"];

/// Kinds of files that are read; nothing that is executed when it is loaded.
const KINDS: [&str; 4] = ["json", "safetensors", "txt", "model"];

/// Attempts in a row that bring nothing, each from where the one before it was cut off; the waits between them double.
const ATTEMPTS: u32 = 6;
const FIRST_DELAY: Duration = Duration::from_millis(100);
/// The longest wait that a server may ask for: hubs count requests in windows of five minutes.
const LONGEST_DELAY: Duration = Duration::from_secs(330);

/// Redirects that are followed on the hub itself.
const MAX_REDIRECTS: usize = 10;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// How far a download is.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The file, as its path in the model's folder.
    pub file: &'a str,
    /// Its place among the files, from 0.
    pub index: usize,
    /// Files in all.
    pub files: usize,
    /// Bytes of it that are here.
    pub bytes: u64,
    /// Its bytes.
    pub total: u64,
}

/// A server that speaks the hub's protocol, and the cache it is fetched into.
#[derive(Debug, Clone)]
pub struct Hub {
    /// Its address.
    pub endpoint: String,
    /// What opens models that are not public.
    pub token: Option<String>,
    /// The cache's folder.
    pub cache: PathBuf,
}

/// What the server says of a file before its bytes.
struct Remote {
    etag: String,
    size: u64,
}

/// What is asked of a server.
#[derive(Debug, Clone, Copy)]
enum Ask {
    About,
    Bytes { from: u64 },
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Hub {
    /// As the Python libraries find it: `HF_ENDPOINT`; `HF_TOKEN`, under its old name `HUGGING_FACE_HUB_TOKEN`, or the file
    /// `HF_TOKEN_PATH`, by default `token` in `HF_HOME`; and the cache's folder.
    ///
    /// # Errors
    /// `HF_HUB_OFFLINE`; an environment without a home.
    pub fn from_env() -> Result<Self> {
        let set = |name: &str| env::var(name).ok().filter(|value| !value.trim().is_empty());
        if set("HF_HUB_OFFLINE").is_some_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str())) {
            return Err(Error::invalid("HF_HUB_OFFLINE", "it is set, so nothing is fetched", "unset it, or name the folder of the model"));
        }
        let cache = cache()?;
        let file = || path_in("HF_TOKEN_PATH").or_else(|| Some(home()?.join("token")));
        let stored = || std::fs::read_to_string(file()?).ok();
        let token = set("HF_TOKEN").or_else(|| set("HUGGING_FACE_HUB_TOKEN")).or_else(stored);
        let token = token.map(|token| token.replace(['\r', '\n'], "").trim().to_owned()).filter(|token| !token.is_empty());
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        Ok(Self { endpoint: endpoint.trim_end_matches('/').to_owned(), token, cache })
    }

    /// Fetches what is missing of the model `organisation/name[@revision]`; its folder. What was cut off goes on where it was.
    ///
    /// # Errors
    /// No such model, or none that the token opens; a server that does not answer, or gives other bytes than it announced; a full disk.
    pub fn download(&self, id: &str, report: &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf> {
        let hint = "for instance Wan-AI/Wan2.1-T2V-1.3B-Diffusers, optionally with `@REVISION`";
        let id = HubId::parse(Path::new(id)).ok_or_else(|| Error::invalid(id, "it is no model id `organisation/name`", hint))?;
        let (agent, folder) = (self.agent(), id.folder(&self.cache));
        let revision = self.revision(&agent, &id)?;
        let snapshot = folder.join("snapshots").join(&revision.sha);
        make_folder(&folder.join("blobs"))?;
        let wanted: Vec<&str> = revision.siblings.iter().map(|file| file.rfilename.as_str()).filter(|path| is_wanted(path)).collect();
        for (index, file) in wanted.iter().enumerate() {
            let url = format!("{}/{}/{}/resolve/{}/{file}", self.endpoint, id.organisation, id.name, revision.sha);
            let remote = self.remote(&agent, &url)?;
            let blob = folder.join("blobs").join(&remote.etag);
            let mut told = |bytes| report(Progress { file, index, files: wanted.len(), bytes, total: remote.size });
            if std::fs::metadata(&blob).is_ok_and(|found| found.len() == remote.size) {
                told(remote.size);
            } else {
                self.fetch(&agent, &url, &remote, &blob, &mut told)?;
            }
            link(&snapshot.join(file), &remote.etag, file)?;
        }
        if id.revision != revision.sha {
            let reference = folder.join("refs").join(id.revision);
            make_folder(reference.parent().unwrap_or(&folder))?;
            write_atomically(&reference, revision.sha.as_bytes())?;
        }
        Ok(snapshot)
    }

    fn agent(&self) -> Agent {
        let config = Agent::config_builder()
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(READ_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .http_status_as_error(false)
            .user_agent("flash-grpo");
        config.build().into()
    }

    /// What `read` takes from the answer about `url`. A server that is busy is asked again, when it says so or after a while; so is one whose
    /// connection fails before `read` is done.
    fn ask<T>(&self, agent: &Agent, url: &str, what: Ask, read: fn(Response<Body>) -> Result<T, ureq::Error>) -> Result<T> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let last = attempt == ATTEMPTS;
            let wanted = match self.follow(agent, url, what) {
                Ok(answer) if is_passing(answer.status()) && !last => retry_after(answer.headers()),
                answer => match answer.and_then(read) {
                    Err(e) if is_connection(&e) && !last => None,
                    read => return read.map_err(|e| unreachable(url, &e)),
                },
            };
            std::thread::sleep(wanted.map_or(FIRST_DELAY * (1 << attempt), |wanted| wanted.min(LONGEST_DELAY)));
        }
    }

    /// Small files are behind a redirect to another path of the hub, large ones behind one to another host. The token is sent to the hub and
    /// nowhere else; another host is asked for bytes only, because what the hub says of a file is on its own answer.
    fn follow(&self, agent: &Agent, url: &str, what: Ask) -> Result<Response<Body>, ureq::Error> {
        let request = |at: &str| match what {
            Ask::About => agent.head(at).header("accept-encoding", "identity"),
            Ask::Bytes { from: 0 } => agent.get(at).header("accept-encoding", "identity"),
            Ask::Bytes { from } => agent.get(at).header("accept-encoding", "identity").header("range", format!("bytes={from}-")),
        };
        let mut at = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let mut asked = request(&at);
            if let Some(token) = &self.token {
                asked = asked.header("authorization", format!("Bearer {token}"));
            }
            let answer = asked.config().max_redirects(0).build().call()?;
            let to = text_of(answer.headers(), "location").filter(|_| answer.status().is_redirection());
            match (to.and_then(|to| resolved(&at, to)), what) {
                (Some(next), _) if origin(&next).is_some() && origin(&next) == origin(&self.endpoint) => at = next,
                (Some(elsewhere), Ask::Bytes { .. }) => return request(&elsewhere).call(),
                _ => return Ok(answer),
            }
        }
        Err(ureq::Error::TooManyRedirects)
    }

    fn revision(&self, agent: &Agent, id: &HubId<'_>) -> Result<Revision> {
        let url = format!("{}/api/models/{}/{}/revision/{}", self.endpoint, id.organisation, id.name, id.revision.replace('/', "%2F"));
        let (status, text) = self.ask(agent, &url, Ask::Bytes { from: 0 }, |mut answer| {
            let text = answer.body_mut().read_to_string()?;
            Ok((answer.status(), text))
        })?;
        check_status(&url, status)?;
        let revision: Revision =
            serde_json::from_str(&text).map_err(|e| Error::invalid(&url, format!("the answer is no list of files: {e}"), PROTOCOL))?;
        if revision.sha.len() < 7 || !revision.sha.chars().all(|c| c.is_ascii_hexdigit()) {
            return Err(Error::invalid(&url, format!("`sha` is `{}`, which is no commit", revision.sha), PROTOCOL));
        }
        Ok(revision)
    }

    fn remote(&self, agent: &Agent, url: &str) -> Result<Remote> {
        let answer = self.ask(agent, url, Ask::About, Ok)?;
        let moved = answer.status().is_redirection();
        if !moved {
            check_status(url, answer.status())?;
        }
        let header = |names: &[&str]| names.iter().find_map(|name| text_of(answer.headers(), name));
        let etag = header(&["x-linked-etag", "etag"]).map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
        let etag = etag.filter(|etag| !etag.is_empty() && etag.len() <= 128 && etag.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'));
        // the length of a redirect is its own
        let sizes: &[&str] = if moved { &["x-linked-size"] } else { &["x-linked-size", "content-length"] };
        let size = header(sizes).and_then(|size| size.parse().ok());
        match (etag, size) {
            (Some(etag), Some(size)) => Ok(Remote { etag, size }),
            _ => Err(Error::invalid(url, "the answer does not say `etag` and size", PROTOCOL)),
        }
    }

    /// Fetches `url` to `blob`, going on after what an earlier attempt left.
    fn fetch(&self, agent: &Agent, url: &str, remote: &Remote, blob: &Path, told: &mut dyn FnMut(u64)) -> Result<()> {
        let path = blob.with_added_extension("incomplete");
        let wrap = |e| Error::write(&path, e);
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(&path).map_err(wrap)?;
        if file.try_lock().is_err() {
            return Err(Error::invalid(&path, "another process is fetching it", "wait for that one, then start again"));
        }
        let length = |file: &File| file.metadata().map(|file| file.len()).map_err(wrap);
        let (mut attempt, mut most) = (0, length(&file)?);
        if most > remote.size {
            file.set_len(0).map_err(wrap)?; // of another file
            most = 0;
        }
        while length(&file)? != remote.size {
            let Some(cut) = self.append(agent, url, remote.size, &mut file, told)? else { break };
            let have = length(&file)?;
            attempt = if have > most { 0 } else { attempt + 1 };
            most = most.max(have);
            if attempt == ATTEMPTS {
                return Err(cut);
            }
            std::thread::sleep(FIRST_DELAY * (1 << attempt));
        }
        check_content(&mut file, &path, remote)?;
        file.sync_all().map_err(wrap)?;
        std::fs::rename(&path, blob).map_err(|e| Error::write(blob, e))
    }

    /// One attempt: appends what the file lacks. Why it did not get through, if another attempt may.
    fn append(&self, agent: &Agent, url: &str, size: u64, file: &mut File, told: &mut dyn FnMut(u64)) -> Result<Option<Error>> {
        let wrap = |e| Error::write(url, e);
        let mut have = file.metadata().map_err(wrap)?.len();
        let answer = self.ask(agent, url, Ask::Bytes { from: have }, Ok)?;
        let status = answer.status();
        check_status(url, status)?;
        if status != StatusCode::PARTIAL_CONTENT {
            file.set_len(0).map_err(wrap)?; // the server sends the whole file again
            have = 0;
        }
        let mut body = answer.into_body().into_with_config().limit(size - have + 1).reader();
        let mut buffer = vec![0; 1 << 20];
        loop {
            let count = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(e) => return Ok(Some(Error::invalid(url, format!("cut off after {have} of {size} bytes: {e}"), AGAIN))),
            };
            file.write_all(&buffer[..count]).map_err(wrap)?;
            have += count as u64;
            told(have);
        }
        let short = have < size;
        Ok(short.then(|| Error::invalid(url, format!("ended after {have} of {size} bytes"), AGAIN)))
    }
}

const AGAIN: &str = "start the same command again: it goes on from here";
const PROTOCOL: &str = "is `HF_ENDPOINT` the address of a hub?";

fn is_wanted(path: &str) -> bool {
    let path = Path::new(path);
    let plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    let kind = path.extension().and_then(|kind| kind.to_str()).is_some_and(|kind| KINDS.contains(&kind));
    let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
    plain && kind && (parts.len() == 1 || parts.len() == 2 && PARTS.contains(&parts[0]))
}

/// Where a redirect of `at` leads to.
fn resolved(at: &str, to: &str) -> Option<String> {
    let at: Uri = at.parse().ok()?;
    let (scheme, host) = (at.scheme_str()?, at.authority()?);
    Some(match to {
        to if to.starts_with("https://") || to.starts_with("http://") => to.to_owned(),
        to if to.starts_with("//") => format!("{scheme}:{to}"),
        to if to.starts_with('/') => format!("{scheme}://{host}{to}"),
        to => format!("{scheme}://{host}{}/{to}", at.path().rsplit_once('/').map_or("", |(folder, _)| folder)),
    })
}

/// Scheme, host and port.
fn origin(url: &str) -> Option<(String, String, Option<u16>)> {
    let url: Uri = url.parse().ok()?;
    Some((url.scheme_str()?.to_lowercase(), url.host()?.to_lowercase(), url.port_u16()))
}

fn text_of<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn check_status(url: &str, status: StatusCode) -> Result<()> {
    let hint = match status {
        status if status.is_success() => return Ok(()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "the model may ask for consent: accept its terms, and set `HF_TOKEN`",
        StatusCode::NOT_FOUND => "check the id and the revision",
        _ => AGAIN,
    };
    Err(Error::invalid(url, format!("the server answers `{status}`"), hint))
}

fn is_passing(status: StatusCode) -> bool {
    status.is_server_error() || [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status)
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    text_of(headers, "retry-after").and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs)
}

/// Whether an error is one of the connection, which another may not have.
fn is_connection(error: &ureq::Error) -> bool {
    use ureq::Error::{ConnectionFailed, HostNotFound, Io, Protocol, Timeout};
    matches!(error, ConnectionFailed | HostNotFound | Io(_) | Protocol(_) | Timeout(_))
}

fn unreachable(url: &str, error: &ureq::Error) -> Error {
    Error::invalid(url, error.to_string(), "check the connection; `HF_ENDPOINT` names another hub")
}

/// Size, and the SHA-256 where the etag is one (as it is for large files).
fn check_content(file: &mut File, path: &Path, remote: &Remote) -> Result<()> {
    let wrap = |e| Error::read(path, e);
    let size = file.metadata().map_err(wrap)?.len();
    let mut right = size == remote.size;
    if right && remote.etag.len() == 64 {
        file.rewind().map_err(wrap)?;
        let mut hash = Sha256::new();
        std::io::copy(file, &mut hash).map_err(wrap)?;
        right = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>() == remote.etag;
    }
    if right {
        return Ok(());
    }
    std::fs::remove_file(path).map_err(|e| Error::write(path, e))?;
    Err(Error::invalid(
        path,
        format!("{size} bytes are not the {} that were announced; they are deleted", remote.size),
        "start the same command again",
    ))
}

fn make_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::write(folder, e))
}

/// `snapshots/COMMIT/PATH` -> `blobs/ETAG`, relative, so that the cache may be moved.
fn link(at: &Path, etag: &str, file: &str) -> Result<()> {
    make_folder(at.parent().unwrap_or(at))?;
    let up = "../".repeat(2 + file.matches('/').count());
    let target = PathBuf::from(format!("{up}blobs/{etag}"));
    if std::fs::read_link(at).is_ok_and(|present| present == target) {
        return Ok(());
    }
    let unfinished = at.with_added_extension("unfinished");
    let _ = std::fs::remove_file(&unfinished);
    make_link(&target, &unfinished).and_then(|()| std::fs::rename(&unfinished, at)).map_err(|e| Error::write(at, e))
}

#[cfg(unix)]
fn make_link(target: &Path, at: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, at)
}

#[cfg(not(unix))]
fn make_link(target: &Path, at: &Path) -> std::io::Result<()> {
    let blob = at.parent().map(|folder| folder.join(target)).unwrap_or_default();
    std::fs::hard_link(&blob, at).or_else(|_| std::fs::copy(&blob, at).map(drop))
}

#[cfg(test)]
mod tests {
    use super::{is_wanted, origin, resolved};

    #[test]
    fn a_redirect_is_resolved_and_another_host_is_told_from_the_hub() {
        let at = "https://hub.test/Wan-AI/Tiny/resolve/main/config.json";
        for (to, expected, stays) in [
            ("/api/resolve-cache/a?etag=%22b%22", "https://hub.test/api/resolve-cache/a?etag=%22b%22", true),
            ("other.json", "https://hub.test/Wan-AI/Tiny/resolve/main/other.json", true),
            ("https://HUB.test/a", "https://HUB.test/a", true),
            ("//hub.test.evil/a", "https://hub.test.evil/a", false),
            ("https://cdn.test/a", "https://cdn.test/a", false),
            ("http://hub.test/a", "http://hub.test/a", false),
            ("https://hub.test:8443/a", "https://hub.test:8443/a", false),
            ("https://hub.test@evil.test/a", "https://hub.test@evil.test/a", false),
        ] {
            let next = resolved(at, to).expect("an address");
            assert_eq!(next, expected);
            assert_eq!(origin(&next) == origin("https://hub.test"), stays, "{to}");
        }
    }

    #[test]
    fn weights_and_configs_are_fetched_and_nothing_else() {
        for path in [
            "model_index.json",
            "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
            "tokenizer/spiece.model",
            "vae/config.json",
        ] {
            assert!(is_wanted(path), "{path}");
        }
        for path in [
            "README.md",
            "assets/logo.png",
            "examples/a.json",
            "vae/weights.pth",
            "../x.json",
            "/etc/x.json",
            "vae/../x.json",
            "vae/a/b.json",
            "",
        ] {
            assert!(!is_wanted(path), "{path}");
        }
    }
}
