//! A server that does everything wrong, over more than a thousand requests: no sample is lost or scored twice, nothing hangs, memory stays
//! bounded, and where another attempt can help, the scores are those of a healthy server.

#![allow(clippy::print_stderr, reason = "measurements, and what was skipped")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Server, test_file};
use reward::http::{HttpReward, HttpSettings};
use reward::net::{Client, ConnectionSettings};
use reward::{Reward, Sample, Scored, Stop};
use video::Frames;

/// Small clips, each unlike every other.
fn clips(count: usize) -> Vec<Frames> {
    let value = |clip: usize, i: usize| ((clip * 31 + i * 7) % 256) as f32 / 255.0;
    (0..count).map(|clip| Frames::new(1, 2, 2, (0..12).map(|i| value(clip, i)).collect()).expect("frames")).collect()
}

fn chaos(mode: &str) -> Server {
    Server::python(&[&test_file("stubs/chaos_server.py"), mode], &std::env::temp_dir())
}

fn connection() -> ConnectionSettings {
    ConnectionSettings {
        connect_timeout_s: 1.5,
        request_timeout_s: 1.5,
        budget_s: 30.0,
        first_delay_s: 0.002,
        max_delay_s: 0.2,
        max_response_mib: 1,
        ..ConnectionSettings::default()
    }
}

/// Time-outs for the speed of this machine as it is, and how many times as long as on an idle one everything may take.
fn calibrated() -> (ConnectionSettings, f64) {
    let (healthy, start) = (chaos("healthy"), Instant::now());
    let patient = ConnectionSettings { connect_timeout_s: 60.0, request_timeout_s: 60.0, budget_s: 600.0, ..connection() };
    assert!(score(&reward(&healthy.url, patient), &clips(200)).iter().all(Result::is_ok));
    // A second for two hundred samples is what an idle machine needs, and more.
    let factor = start.elapsed().as_secs_f64().max(1.0);
    let slow = |seconds: f64| seconds * factor;
    let settings = ConnectionSettings { connect_timeout_s: slow(1.5), request_timeout_s: slow(1.5), budget_s: slow(30.0), ..connection() };
    (settings, factor)
}

fn reward(url: &str, connection: ConnectionSettings) -> HttpReward {
    HttpReward::new(HttpSettings { concurrency: 8, connection, ..HttpSettings::new(url) }).expect("settings")
}

fn score(reward: &HttpReward, clips: &[Frames]) -> Vec<Scored> {
    let prompts: Vec<String> = (0..clips.len()).map(|i| format!("clip {i}")).collect();
    let batch: Vec<Sample<'_>> = prompts.iter().zip(clips).map(|(prompt, frames)| Sample::new(prompt, frames)).collect();
    reward.score(&batch)
}

#[derive(Debug, serde::Deserialize)]
struct Stats {
    requests: usize,
    served: usize,
    again: usize,
    faults: BTreeMap<String, usize>,
}

fn stats(server: &Server) -> Stats {
    let bytes = Client::new(&server.url, connection()).get("/stats").expect("stats");
    serde_json::from_slice(&bytes).expect("json")
}

/// Largest memory of this process so far, in MiB; 0 where the system does not say.
fn peak_mib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    line.and_then(|line| line.split_whitespace().nth(1)).and_then(|kib| kib.parse::<usize>().ok()).unwrap_or(0) / 1024
}

#[test]
fn faults_that_pass_change_nothing() {
    let clips = clips(1000);
    let (healthy, chaotic, (connection, factor)) = (chaos("healthy"), chaos("passing"), calibrated());
    let expected: Vec<f64> = score(&reward(&healthy.url, connection), &clips).into_iter().map(|s| s.expect("healthy").value).collect();
    for (clip, value) in clips.iter().zip(&expected) {
        assert!((common::mean_byte(clip) - value).abs() < 1e-12);
    }
    let start = Instant::now();
    let scores = score(&reward(&chaotic.url, connection), &clips);
    let seconds = start.elapsed().as_secs_f64();
    let values: Vec<f64> = scores.into_iter().map(|score| score.expect("every sample is scored in the end").value).collect();
    assert_eq!(values, expected, "bit for bit those of the healthy server");
    let stats = stats(&chaotic);
    eprintln!("{} requests for 1000 samples in {seconds:.1} s: {:?}", stats.requests, stats.faults);
    assert!(stats.requests > 1200, "{stats:?}");
    for fault in ["slow", "500", "503", "429", "408", "reset", "reset-mid-body", "too-short", "garbage", "drip", "hang", "down"] {
        assert!(stats.faults.contains_key(fault), "{fault} was not tried: {stats:?}");
    }
    assert_eq!((stats.served, stats.again), (1000, 0), "nothing is lost, and nothing is asked again after it was answered");
    assert!(seconds < 60.0 * factor, "{seconds}");
}

#[test]
fn faults_that_last_cost_their_samples_and_no_others() {
    let clips = clips(1000);
    let (chaotic, (connection, factor)) = (chaos("lasting"), calibrated());
    let (before, start) = (peak_mib(), Instant::now());
    let scores = score(&reward(&chaotic.url, connection), &clips);
    let mut errors: BTreeMap<String, usize> = BTreeMap::new();
    for (clip, score) in clips.iter().zip(scores) {
        match score {
            Ok(score) => assert!((score.value - common::mean_byte(clip)).abs() < 1e-12, "never a made-up number"),
            Err(error) => {
                *errors.entry(error.reason.split(" id `").next().unwrap_or_default().chars().take(60).collect()).or_default() += 1
            }
        }
    }
    let failed: usize = errors.values().sum();
    let grown = peak_mib().saturating_sub(before);
    eprintln!("{failed} of 1000 samples failed in {:.1} s, memory grew by {grown} MiB: {errors:?}", start.elapsed().as_secs_f64());
    assert!((150..350).contains(&failed), "a quarter of the ids meet a lasting fault");
    for reason in [
        "not what the protocol",
        "two scores",
        "a score for the",
        "no score for",
        "larger than",
        "`400",
        "`301",
        "server says",
        "no number",
    ] {
        assert!(errors.keys().any(|error| error.contains(reason)), "{reason}: {errors:?}");
    }
    assert!(grown < 64, "{grown} MiB");
    assert!(start.elapsed().as_secs_f64() < 60.0 * factor);
}

#[test]
fn a_server_that_died_costs_a_few_budgets_however_many_samples_wait() {
    let dead = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        format!("http://{}", listener.local_addr().expect("its address"))
    };
    let short = ConnectionSettings { budget_s: 0.5, breaker_failures: 2, breaker_cooldown_s: 30.0, ..connection() };
    let (reward, start) = (reward(&dead, short), Instant::now());
    let scores = score(&reward, &clips(1000));
    assert!(scores.iter().all(Result::is_err));
    let refused = scores.iter().filter(|score| score.as_ref().is_err_and(|error| error.reason.starts_with("not asked: "))).count();
    assert!(refused > 980, "{refused}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn a_server_that_never_answers_costs_no_more_than_the_budget() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", silent.local_addr().expect("its address"));
    let short = ConnectionSettings { request_timeout_s: 0.3, budget_s: 1.0, breaker_failures: 100, ..connection() };
    let start = Instant::now();
    let scores = score(&reward(&url, short), &clips(8));
    let error = scores[0].as_ref().expect_err("silence").to_string();
    assert!(error.contains("gave up after") && error.contains("no answer in time"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn a_request_to_stop_ends_the_retries() {
    let flag = Arc::new(AtomicUsize::new(0));
    let patient = ConnectionSettings { budget_s: 60.0, first_delay_s: 30.0, max_delay_s: 30.0, ..connection() };
    let reward = reward("http://127.0.0.1:1", patient).with_stop(Stop::new(flag.clone()));
    let start = Instant::now();
    check_stopped(&reward, flag);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

/// Asks to stop 300 ms after the first of many clips is handed in: none has a score.
fn check_stopped(reward: &HttpReward, flag: Arc<AtomicUsize>) {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        flag.store(2, Ordering::Relaxed);
    });
    let scores = score(reward, &clips(100));
    assert!(scores.iter().all(|score| score.as_ref().is_err_and(|error| error.reason.contains("asked to stop"))), "{:?}", scores[0]);
}

/// The run that was asked to stop has a checkpoint to write: it does not wait for the answers to come.
#[test]
fn a_request_to_stop_is_heard_while_a_server_takes_its_time() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", silent.local_addr().expect("its address"));
    let patient = ConnectionSettings { connect_timeout_s: 60.0, request_timeout_s: 300.0, budget_s: 600.0, ..connection() };
    let flag = Arc::new(AtomicUsize::new(0));
    let reward = reward(&url, patient).with_stop(Stop::new(flag.clone()));
    let start = Instant::now();
    check_stopped(&reward, flag);
    assert!(reward.prepare().is_err_and(|error| error.message.contains("asked to stop")));
    let elapsed = start.elapsed();
    assert!((Duration::from_millis(300)..Duration::from_secs(5)).contains(&elapsed), "{elapsed:?}");
}
