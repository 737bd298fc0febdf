//! A model fetched from a server that speaks the hub's protocol, that cuts connections, and that refuses.

#![cfg(feature = "download")]

use assert_cmd::Command;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// The SHA-256 of `weights()`: the hub names large files by theirs.
const ETAG: &str = "2c4085b1ab9817526311b5a5b04451140dc922067c6922a59a77e1503918357b";
/// A SHA-256 of other bytes.
const OTHER_ETAG: &str = "3333333333333333333333333333333333333333333333333333333333333333";

fn weights() -> Vec<u8> {
    (0..200_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// Where the server moves small files to, as the hub does.
const CACHED: &str = "/api/resolve-cache/models/Wan-AI/Tiny/";

/// The server: what was asked for, how often a connection is still to be cut in the middle of a file, how often it says that it is busy, and
/// whether it closes the connection when it is asked something for the first time.
struct Shared {
    files: BTreeMap<&'static str, (Vec<u8>, String)>,
    asked: Mutex<Vec<String>>,
    cuts: Mutex<usize>,
    busy: Mutex<usize>,
    flaky: bool,
    /// Another host, where the bytes of large files are.
    elsewhere: Option<String>,
}

fn serve(etag: &str, cuts: usize) -> (String, Arc<Shared>) {
    serve_with(etag, cuts, 0, false, None)
}

fn serve_with(etag: &str, cuts: usize, busy: usize, flaky: bool, elsewhere: Option<String>) -> (String, Arc<Shared>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let files = BTreeMap::from([
        ("model_index.json", (b"{}".to_vec(), "aaaa".to_owned())),
        ("transformer/diffusion_pytorch_model.safetensors", (weights(), etag.to_owned())),
        ("README.md", (b"not wanted".to_vec(), "cccc".to_owned())),
    ]);
    let shared = Arc::new(Shared { files, asked: Mutex::default(), cuts: Mutex::new(cuts), busy: Mutex::new(busy), flaky, elsewhere });
    let own = Arc::clone(&shared);
    std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| answer(stream, &own)));
    (url, shared)
}

fn answer(mut stream: TcpStream, shared: &Shared) {
    let mut lines = BufReader::new(stream.try_clone().expect("a stream")).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
    let request = lines.next().unwrap_or_default();
    let headers: Vec<String> = lines.map(|line| line.to_lowercase()).collect();
    let range = headers.iter().find_map(|line| line.strip_prefix("range: bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let authorised = headers.iter().any(|line| line == "authorization: bearer secret");
    let (method, path) = request.split_once(' ').map(|(m, rest)| (m, rest.split(' ').next().unwrap_or_default())).unwrap_or_default();
    let line = format!("{method} {path} {}", range.map(|r| r.to_string()).unwrap_or_default());
    let before = {
        let mut asked = shared.asked.lock().expect("not poisoned");
        asked.push(line.clone());
        asked.iter().filter(|asked| **asked == line).count() - 1
    };
    if shared.flaky && before == 0 {
        return;
    }
    let respond = |stream: &mut TcpStream, status: &str, extra: &str, body: &[u8], announced: usize| {
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {announced}\r\nconnection: close\r\n{extra}\r\n");
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    };
    if !authorised {
        return respond(&mut stream, "401 Unauthorized", "", b"", 0);
    }
    if path == "/api/models/Wan-AI/Tiny/revision/main" {
        let list: Vec<String> = shared.files.keys().map(|name| format!("{{\"rfilename\": \"{name}\"}}")).collect();
        let body = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", list.join(","));
        let sent = if shared.flaky && before == 1 { 10 } else { body.len() };
        return respond(&mut stream, "200 OK", "", &body.as_bytes()[..sent], body.len());
    }
    let asked = path.strip_prefix(&format!("/Wan-AI/Tiny/resolve/{COMMIT}/"));
    let Some((name, (bytes, etag))) = asked.or(path.strip_prefix(CACHED)).and_then(|name| shared.files.get_key_value(name)) else {
        return respond(&mut stream, "404 Not Found", "", b"", 0);
    };
    {
        let mut busy = shared.busy.lock().expect("not poisoned");
        if *busy > 0 {
            *busy -= 1;
            return respond(&mut stream, "429 Too Many Requests", "retry-after: 1\r\n", b"slow down", 9);
        }
    }
    let etag = format!("etag: \"{etag}\"\r\n");
    match (&shared.elsewhere, bytes.len() < 1000) {
        // the length of the redirect is not that of the file
        (_, true) if asked.is_some() => {
            let moved = format!("location: {CACHED}{name}\r\netag: \"of the redirect\"\r\n");
            return respond(&mut stream, "307 Temporary Redirect", &moved, if method == "HEAD" { b"" } else { b"moved away" }, 10);
        }
        (Some(host), false) => {
            let about = etag.replace("etag", "x-linked-etag") + &format!("x-linked-size: {}\r\n", bytes.len());
            let moved = format!("location: {host}{path}\r\n{about}");
            return respond(&mut stream, "302 Found", &moved, if method == "HEAD" { b"" } else { b"moved away" }, 10);
        }
        _ => {}
    }
    if method == "HEAD" {
        return respond(&mut stream, "200 OK", &etag, b"", bytes.len());
    }
    let (status, rest) = range.map_or(("200 OK", &bytes[..]), |from| ("206 Partial Content", &bytes[from..]));
    let mut cuts = shared.cuts.lock().expect("not poisoned");
    let sent = if *cuts > 0 && rest.len() > 1000 {
        *cuts -= 1;
        &rest[..rest.len() / 2]
    } else {
        rest
    };
    respond(&mut stream, status, &etag, sent, rest.len());
}

fn download(endpoint: &str, home: &Path, token: &str) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    let command = command.args(["download", "Wan-AI/Tiny"]).env("HF_ENDPOINT", endpoint).env("HF_HOME", home).env("HF_TOKEN", token);
    command.env_remove("HF_HUB_CACHE").env_remove("HF_HUB_OFFLINE").output().expect("runs")
}

fn message(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_model_is_fetched_as_python_lays_it_out_and_cut_connections_go_on() {
    let home = tempfile::tempdir().expect("folder");
    let (url, shared) = serve(ETAG, 3);
    let output = download(&url, home.path(), "secret");
    assert!(output.status.success(), "{}", message(&output));
    let model = home.path().join("hub/models--Wan-AI--Tiny");
    let snapshot = model.join("snapshots").join(COMMIT);
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), snapshot.display().to_string());
    let file = snapshot.join("transformer/diffusion_pytorch_model.safetensors");
    assert_eq!(std::fs::read(&file).expect("the file"), weights());
    #[cfg(unix)]
    assert_eq!(std::fs::read_link(&file).expect("a link"), Path::new(&format!("../../../blobs/{ETAG}")));
    assert_eq!(std::fs::read_to_string(model.join("refs/main")).expect("the ref"), COMMIT);
    assert!(!snapshot.join("README.md").exists());
    let gets = |shared: &Shared| -> Vec<String> {
        let asked = shared.asked.lock().expect("not poisoned");
        asked
            .iter()
            .filter(|line| line.starts_with("GET") && line.contains("safetensors"))
            .map(|line| line.rsplit(' ').next().unwrap_or_default().to_owned())
            .collect()
    };
    assert_eq!(gets(&shared), ["", "100000", "150000", "175000"], "each attempt goes on where the last one was cut off");
    // a second time nothing is fetched again
    assert!(download(&url, home.path(), "secret").status.success());
    assert_eq!(gets(&shared).len(), 4);
}

/// A host that has the weights, and is nobody's to be trusted with a token: what it was asked, with all headers.
fn other_host() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let asked = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&asked);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let lines = BufReader::new(stream.try_clone().expect("a stream")).lines().map_while(Result::ok);
            let request: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            own.lock().expect("not poisoned").push(request.join("\n"));
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", weights().len());
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&weights()));
        }
    });
    (url, asked)
}

#[test]
fn redirects_are_followed_and_the_token_stays_on_the_hub() {
    let home = tempfile::tempdir().expect("folder");
    let (host, seen) = other_host();
    let (url, shared) = serve_with(ETAG, 0, 2, false, Some(host));
    let start = std::time::Instant::now();
    let output = download(&url, home.path(), "secret");
    assert!(output.status.success(), "{}", message(&output));
    assert!(start.elapsed().as_secs() >= 2, "a busy server says when to come back");
    let snapshot = home.path().join("hub/models--Wan-AI--Tiny/snapshots").join(COMMIT);
    // a small file: behind a redirect on the hub, which asks for the token again, and whose length is not the file's
    assert_eq!(std::fs::read(snapshot.join("model_index.json")).expect("the file"), b"{}");
    #[cfg(unix)]
    assert_eq!(std::fs::read_link(snapshot.join("model_index.json")).expect("a link"), Path::new("../../blobs/aaaa"));
    assert_eq!(std::fs::read(snapshot.join("transformer/diffusion_pytorch_model.safetensors")).expect("the file"), weights());
    let asked = shared.asked.lock().expect("not poisoned").join("\n");
    assert!(
        asked.contains(&format!("HEAD {CACHED}model_index.json")) && asked.contains(&format!("GET {CACHED}model_index.json")),
        "{asked}"
    );
    let seen = seen.lock().expect("not poisoned");
    assert!(seen.len() == 1 && !seen[0].to_lowercase().contains("authorization") && !seen[0].contains("secret"), "{seen:?}");
}

#[test]
fn connections_that_are_closed_without_an_answer_are_opened_again() {
    let home = tempfile::tempdir().expect("folder");
    let (url, shared) = serve_with(ETAG, 0, 0, true, None);
    let output = download(&url, home.path(), "secret");
    assert!(output.status.success(), "{}", message(&output));
    let asked = shared.asked.lock().expect("not poisoned");
    let times = |line: &str| asked.iter().filter(|asked| asked.trim_end() == line).count();
    assert_eq!(times("GET /api/models/Wan-AI/Tiny/revision/main"), 3, "no answer, half of one, and all: {asked:?}");
    let weights = format!("/Wan-AI/Tiny/resolve/{COMMIT}/transformer/diffusion_pytorch_model.safetensors");
    assert_eq!((times(&format!("HEAD {weights}")), times(&format!("GET {weights}"))), (2, 2), "{asked:?}");
}

/// Also where the cache is not beside it.
#[test]
fn the_token_is_where_python_has_it() {
    let folder = tempfile::tempdir().expect("folder");
    let at = |path: &str| folder.path().join(path);
    for (path, token) in [
        ("home/.cache/huggingface/token", "secret\n"),
        ("xdg/huggingface/token", "secret"),
        ("own/token", "secret"),
        ("elsewhere", "secret"),
        ("data/token", "wrong"),
        ("empty/token", "\n"),
    ] {
        std::fs::create_dir_all(at(path).parent().expect("folder")).expect("folder");
        std::fs::write(at(path), token).expect("token");
    }
    let path = |name| at(name).display().to_string();
    let cases = [
        vec![("HOME", path("home"))],
        vec![("HOME", path("home")), ("HF_TOKEN", " ".into())],
        vec![("XDG_CACHE_HOME", path("xdg")), ("HOME", path("data"))],
        vec![("HF_HOME", path("own")), ("HOME", path("data"))],
        vec![("HF_TOKEN_PATH", path("elsewhere")), ("HF_HOME", path("data"))],
        vec![("HF_TOKEN", " secret\n".into()), ("HF_HOME", path("data"))],
        vec![("HF_TOKEN", String::new()), ("HUGGING_FACE_HUB_TOKEN", "secret".into()), ("HF_HOME", path("data"))],
    ];
    let run = |variables: &[(&str, String)], cache: &Path| {
        let (url, _) = serve(ETAG, 0);
        let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
        command.args(["download", "Wan-AI/Tiny"]).env_clear().env("HF_ENDPOINT", url).env("HF_HUB_CACHE", cache);
        command.envs(variables.iter().cloned()).output().expect("runs")
    };
    for variables in cases {
        let output = run(&variables, &at("data/hub"));
        assert!(output.status.success(), "{variables:?}: {}", message(&output));
        std::fs::remove_dir_all(at("data/hub")).expect("the cache");
    }
    let text = message(&run(&[("HF_HOME", path("empty"))], &at("data/hub")));
    assert!(text.contains("401"), "an empty token is none: {text}");
}

#[test]
fn what_cannot_be_fetched_is_said() {
    let home = tempfile::tempdir().expect("folder");
    let (url, _) = serve("bbbb", 0);
    let text = message(&download(&url, home.path(), "wrong"));
    assert!(text.contains("401") && text.contains("`HF_TOKEN`"), "{text}");
    // other bytes than announced: kept nowhere
    let (url, _) = serve(OTHER_ETAG, 0);
    let text = message(&download(&url, home.path(), "secret"));
    assert!(text.contains("are not the 200000 that were announced"), "{text}");
    assert!(!home.path().join("hub/models--Wan-AI--Tiny/refs/main").exists(), "an incomplete model has no ref");
    let text = message(&download("http://127.0.0.1:1", home.path(), ""));
    assert!(text.contains("HF_ENDPOINT"), "{text}");
}
