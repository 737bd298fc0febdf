//! A headless Chromium, driven over the DevTools protocol: JSON messages that end with a zero byte, over a pair of pipes.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longest wait for an answer; machines may be busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// The browser to test with: `$CHROMIUM`, or the first of the usual names on the path.
pub fn find() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("CHROMIUM") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    names.iter().find_map(|name| std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file()))
}

/// A browser process; it ends with this value.
pub struct Browser {
    process: Child,
    requests: ChildStdin,
    answers: Receiver<Value>,
    profile: tempfile::TempDir,
    last_id: u64,
    /// What happened that nobody asked for.
    events: Vec<Value>,
}

/// An open page.
pub struct Page<'a> {
    browser: &'a mut Browser,
    session: String,
}

/// How a page is looked at.
#[derive(Debug, Clone, Copy)]
pub struct View {
    pub width: u32,
    pub dark: bool,
}

impl Browser {
    pub fn start(program: &Path) -> Self {
        let profile = tempfile::tempdir().expect("folder");
        // the browser reads from descriptor 3 and writes to 4; the shell makes them of its standard input and output
        let mut process = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1"])
            .arg(program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"])
            .args(["--remote-debugging-pipe", &format!("--user-data-dir={}", profile.path().display()), "about:blank"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let (requests, output) = (process.stdin.take().expect("pipe"), process.stdout.take().expect("pipe"));
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(output).split(0).map_while(Result::ok) {
                let message = serde_json::from_slice(&message).expect("the browser writes JSON");
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        Self { process, requests, answers, profile, last_id: 0, events: Vec::new() }
    }

    fn receive(&mut self) -> Value {
        self.answers.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("no answer from the browser: {error}"))
    }

    /// Calls a method and waits for its result; events that arrive before are kept.
    fn call(&mut self, session: Option<&str>, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let mut request = json!({ "id": self.last_id, "method": method, "params": params });
        if let Some(session) = session {
            request["sessionId"] = session.into();
        }
        self.requests.write_all(format!("{request}\0").as_bytes()).expect("the browser listens");
        loop {
            let mut message = self.receive();
            if message["id"] != self.last_id {
                self.events.push(message);
                continue;
            }
            assert!(message.get("error").is_none(), "{method}: {}", message["error"]);
            return message["result"].take();
        }
    }

    /// Opens a file as a person would, and waits until it is loaded.
    pub fn open(&mut self, file: &Path, view: View) -> Page<'_> {
        self.events.clear();
        let target = self.call(None, "Target.createTarget", json!({ "url": "about:blank" }))["targetId"].take();
        let session = self.call(None, "Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        let session = session["sessionId"].as_str().expect("session").to_owned();
        let mut page = Page { browser: self, session };
        for domain in ["Page", "Runtime", "Log", "Network"] {
            page.call(&format!("{domain}.enable"), json!({}));
        }
        let size = json!({ "width": view.width, "height": 900, "deviceScaleFactor": 1, "mobile": view.width < 600 });
        page.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = json!({ "name": "prefers-color-scheme", "value": if view.dark { "dark" } else { "light" } });
        page.call("Emulation.setEmulatedMedia", json!({ "features": [scheme] }));
        page.call("Page.navigate", json!({ "url": format!("file://{}", file.display()) }));
        page.wait_for("Page.loadEventFired");
        page
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // asked to, it ends its helpers too
        let _ = self.requests.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        let asked = Instant::now();
        while asked.elapsed() < Duration::from_secs(10) {
            if matches!(self.process.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = &self.profile;
    }
}

impl Page<'_> {
    fn call(&mut self, method: &str, params: Value) -> Value {
        self.browser.call(Some(&self.session), method, params)
    }

    fn wait_for(&mut self, event: &str) {
        while !self.browser.events.iter().any(|seen| seen["method"] == event) {
            let message = self.browser.receive();
            self.browser.events.push(message);
        }
    }

    /// The value of a script, or of what its promise comes to.
    pub fn evaluate(&mut self, script: &str) -> Value {
        let params = json!({ "expression": script, "awaitPromise": true, "returnByValue": true });
        let mut result = self.call("Runtime.evaluate", params);
        assert!(result.get("exceptionDetails").is_none(), "{script}: {}", result["exceptionDetails"]);
        result["result"]["value"].take()
    }

    /// Everything on the console, exceptions and the browser's own messages included.
    pub fn complaints(&self) -> Vec<String> {
        let said = |event: &&Value| {
            matches!(event["method"].as_str(), Some("Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded"))
        };
        self.browser.events.iter().filter(said).map(|event| event["params"].to_string()).collect()
    }

    /// The addresses of all requests, but those for data inside of the page.
    pub fn requests(&self) -> Vec<String> {
        let address = |event: &Value| {
            let sent = event["method"] == "Network.requestWillBeSent";
            sent.then(|| event["params"]["request"]["url"].as_str().unwrap_or_default().to_owned())
        };
        self.browser.events.iter().filter_map(address).filter(|address| !address.starts_with("data:")).collect()
    }

    /// Presses the tabulator key once.
    pub fn press_tab(&mut self) {
        for kind in ["rawKeyDown", "keyUp"] {
            let key = json!({ "type": kind, "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9 });
            self.call("Input.dispatchKeyEvent", key);
        }
    }

    /// A picture of the whole page, as PNG in base64.
    pub fn picture(&mut self) -> String {
        let picture = self.call("Page.captureScreenshot", json!({ "captureBeyondViewport": true, "format": "png" }));
        picture["data"].as_str().expect("picture").to_owned()
    }
}
