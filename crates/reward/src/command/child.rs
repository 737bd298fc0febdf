//! One process.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Stop;

/// The longest answer that is read.
const LONGEST_LINE: u64 = 16 << 20;

/// Last lines of standard error that are kept.
const KEPT_LINES: usize = 8;

/// How long a new process is watched: one whose script is not there, or does not parse, has ended by then.
const AT_ONCE: Duration = Duration::from_secs(1);

/// How long a process is waited for, and for its last words, to say how it ended.
const SHORTLY: Duration = Duration::from_millis(100);

/// How long a process may take to end by itself once its input is closed.
const GRACE: Duration = Duration::from_millis(500);

/// The last lines that were printed.
type Complaints = Mutex<VecDeque<String>>;

/// A running program. Threads move its input and output, so that one which neither reads nor writes holds up nobody for longer than it may.
pub(crate) struct Process {
    child: Child,
    requests: Option<SyncSender<Vec<u8>>>,
    answers: Receiver<Result<Vec<u8>, String>>,
    complaints: Arc<Complaints>,
    /// Reads standard error until it is closed.
    listener: JoinHandle<()>,
}

impl Process {
    /// # Errors
    /// A program that cannot be started.
    pub fn start(command: &[String]) -> Result<Self, String> {
        let (program, arguments) = command.split_first().ok_or("no program is named")?;
        let mut builder = Command::new(program);
        builder.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        own_group(&mut builder);
        let mut child = builder.spawn().map_err(|error| format!("cannot start `{program}`: {error}"))?;
        let (Some(input), Some(output), Some(errors)) = (child.stdin.take(), child.stdout.take(), child.stderr.take()) else {
            return Err(format!("cannot talk to `{program}`"));
        };
        let (requests, to_write) = sync_channel(1);
        let (read, answers) = sync_channel(1);
        let complaints = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&complaints);
        std::thread::spawn(move || write_lines(input, &to_write));
        let (chatter, kept) = (Arc::clone(&kept), kept);
        std::thread::spawn(move || read_lines(output, &read, &chatter));
        let listener = std::thread::spawn(move || keep_last_lines(errors, &kept));
        Ok(Self { child, requests: Some(requests), answers, complaints, listener })
    }

    /// The process, if it does not end at once.
    ///
    /// # Errors
    /// How it ended, and what it said.
    pub fn that_stays(mut self) -> Result<Self, String> {
        match wait(&mut self.child, AT_ONCE) {
            Some(_) => Err(self.complaint("the process ended at once, before it was asked")),
            None => Ok(self),
        }
    }

    /// Sends a line and waits for one.
    ///
    /// # Errors
    /// A process that died, says too much, or takes longer than `timeout`, and a wait that was given up; the process is of no more use then.
    pub fn exchange(&mut self, request: &[u8], timeout: Duration, stop: &Stop) -> Result<Vec<u8>, String> {
        let line = [request, b"\n"].concat();
        if self.requests.as_ref().is_none_or(|requests| requests.send(line).is_err()) {
            return Err(self.complaint("the process ended before it was asked"));
        }
        let answers = &self.answers;
        let answer = stop.poll(timeout, |slice| match answers.recv_timeout(slice) {
            Err(RecvTimeoutError::Timeout) => None,
            ended => Some(ended),
        })?;
        match answer {
            Some(Ok(answer)) => answer.map_err(|reason| self.complaint(&reason)),
            Some(Err(_)) => Err(self.complaint("the process ended before it answered")),
            None => Err(self.complaint(&format!("no answer within {:.1} s; the process is killed", timeout.as_secs_f64()))),
        }
    }

    /// `reason`, how the process ended if it did, and what it last said on standard error.
    fn complaint(&mut self, reason: &str) -> String {
        let status = wait(&mut self.child, SHORTLY).map(|status| format!(" ({status})")).unwrap_or_default();
        if !status.is_empty() {
            // Its last words may still be on their way. What it has started may keep standard error open.
            let end = Instant::now() + SHORTLY;
            while !self.listener.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        let lines = self.complaints.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let said: Vec<&str> = lines.iter().map(String::as_str).collect();
        if said.is_empty() { format!("{reason}{status}") } else { format!("{reason}{status}; it last said: {}", said.join(" | ")) }
    }
}

impl Drop for Process {
    /// Closes the input, which asks the process to end, and soon kills it with all it started.
    fn drop(&mut self) {
        self.requests = None;
        if wait(&mut self.child, GRACE).is_none() {
            kill_group(&mut self.child);
        }
        let _ = self.child.wait();
    }
}

fn wait(child: &mut Child, longest: Duration) -> Option<std::process::ExitStatus> {
    let end = Instant::now() + longest;
    loop {
        match child.try_wait() {
            Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            Ok(status) => return status,
            Err(_) => return None,
        }
    }
}

fn write_lines(mut input: ChildStdin, lines: &Receiver<Vec<u8>>) {
    for line in lines {
        if input.write_all(&line).and_then(|()| input.flush()).is_err() {
            return;
        }
    }
}

/// Sends every line that can be an answer; what else is printed, such as the progress of a download, is kept with standard error.
fn read_lines(output: ChildStdout, answers: &SyncSender<Result<Vec<u8>, String>>, chatter: &Complaints) {
    let mut output = BufReader::new(output);
    loop {
        let mut line = Vec::new();
        let read = (&mut output).take(LONGEST_LINE).read_until(b'\n', &mut line);
        let answer = match read {
            Ok(0) | Err(_) => return,
            Ok(_) if line.len() as u64 == LONGEST_LINE => Err(format!("an answer is longer than {} MiB", LONGEST_LINE >> 20)),
            Ok(_) if line.trim_ascii_start().first() != Some(&b'{') => {
                keep(chatter, &line);
                continue;
            }
            Ok(_) if line.ends_with(b"\n") => Ok(line),
            Ok(_) => Err("the process ended in the middle of an answer".to_owned()),
        };
        let last = answer.is_err();
        if answers.send(answer).is_err() || last {
            return;
        }
    }
}

fn keep_last_lines(errors: ChildStderr, kept: &Complaints) {
    let mut errors = BufReader::new(errors);
    let mut line = Vec::new();
    while (&mut errors).take(1 << 12).read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        keep(kept, &line);
        line.clear();
    }
}

fn keep(kept: &Complaints, line: &[u8]) {
    let mut kept = kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    kept.push_back(crate::protocol::beginning(line));
    if kept.len() > KEPT_LINES {
        kept.pop_front();
    }
}

/// A group of its own: an interrupt at the terminal is the trainer's business, and what the program starts can be ended with it.
#[cfg(unix)]
fn own_group(builder: &mut Command) {
    std::os::unix::process::CommandExt::process_group(builder, 0);
}

#[cfg(not(unix))]
fn own_group(_: &mut Command) {}

#[cfg(unix)]
fn kill_group(child: &mut Child) {
    if let Ok(group) = i32::try_from(child.id()) {
        // SAFETY: `kill` takes plain numbers. The child has not been waited for, so its number is still its own, and it leads a group.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
    let _ = child.kill();
}

#[cfg(not(unix))]
fn kill_group(child: &mut Child) {
    let _ = child.kill();
}
