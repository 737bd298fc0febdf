//! The schema against what is really sent, by the trainer's side and by the reference server.

mod common;
mod schema;

use std::io::{Read, Write};
use std::net::TcpListener;

use common::{Server, clips, quick, reward_server};
use reward::http::{HttpReward, HttpSettings};
use reward::net::Client;
use reward::protocol::sample_id;
use reward::{Encoding, Reward, Sample};
use serde_json::{Value, json};

/// What is posted to a server that answers with an empty object.
fn posted(settings: impl FnOnce(&str) -> HttpSettings, metadata: Option<&Value>) -> Value {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("its address"));
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut bytes = Vec::new();
        loop {
            let mut part = [0; 4096];
            let read = stream.read(&mut part).expect("a request");
            bytes.extend(&part[..read]);
            let text = String::from_utf8_lossy(&bytes).to_lowercase();
            let Some((head, _)) = text.split_once("\r\n\r\n") else { continue };
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length").parse::<usize>().expect("a number");
            if bytes.len() == head.len() + 4 + length {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").expect("an answer");
                return serde_json::from_slice(&bytes[head.len() + 4..]).expect("json");
            }
        }
    });
    let reward = HttpReward::new(settings(&url)).expect("settings");
    let clips = clips(2);
    let batch: Vec<Sample<'_>> = clips.iter().map(|(prompt, frames)| Sample { metadata, ..Sample::new(prompt, frames) }).collect();
    assert!(reward.score(&batch).iter().all(Result::is_err), "an empty object is no answer");
    server.join().expect("no panic")
}

#[test]
fn requests_obey_the_schema() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = |url: &str| HttpSettings { batch_size: 2, connection: quick(), ..HttpSettings::new(url) };
    let metadata = json!({"text": "open"});
    let requests = [
        posted(settings, None),
        posted(|url| HttpSettings { encoding: Encoding::Png, ..settings(url) }, Some(&metadata)),
        posted(|url| HttpSettings { encoding: Encoding::Jpeg, ..settings(url) }, None),
        posted(|url| HttpSettings { shared_folder: Some(folder.path().to_owned()), ..settings(url) }, None),
    ];
    for request in &requests {
        schema::check("request", request).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(request["samples"].as_array().expect("samples").len(), 2);
    }
    assert_eq!(requests[1]["samples"][0]["metadata"], metadata);
    assert!(requests[3]["samples"][0]["frames"]["path"].is_string() && requests[3]["samples"][0]["frames"]["data"].is_null());
}

#[test]
fn the_reference_servers_answers_obey_the_schema() {
    let folder = tempfile::tempdir().expect("folder");
    std::fs::write(
        folder.path().join("mine.py"),
        "def score(sample):\n    return {'a': 1, 'b': [1, 2]}.get(sample.prompt, float('nan'))\n",
    )
    .expect("write");
    let server = Server::python(&[&reward_server(), "--function", "mine:score", "--port", "0", "--max-batch", "9"], folder.path());
    let client = Client::new(&server.url, quick());
    let json = |bytes: Vec<u8>| serde_json::from_slice::<Value>(&bytes).expect("json");
    let info = json(client.get("/v1/info").expect("info"));
    schema::check("info", &info).unwrap_or_else(|error| panic!("{error}"));
    let frames = json!({"encoding": "raw", "height": 1, "width": 1, "indices": [0], "data": ["AAAA"]});
    let samples: Vec<Value> = ["a", "b", "c"].iter().map(|p| json!({"id": *p, "prompt": *p, "fps": 16, "frames": frames})).collect();
    let request = json!({"protocol": 1, "samples": samples});
    schema::check("request", &request).unwrap_or_else(|error| panic!("{error}"));
    let answer = json(client.post("/v1/score", "application/json", request.to_string().into_bytes(), "key").expect("an answer"));
    schema::check("answer", &answer).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(answer["scores"][0], json!({"id": "a", "value": 1.0}));
    assert_eq!(answer["scores"][2], json!({"id": "c", "error": "ValueError: the reward is nan, not a finite number"}));
    let error = client.post("/v1/score", "application/json", b"{\"protocol\": 7}".to_vec(), "key").expect_err("another protocol");
    assert!(error.contains("400") && error.contains("protocol 7, expected 1"), "{error}");
}

#[test]
fn the_schema_refuses_what_the_reader_refuses() {
    for bad in [
        json!({"scores": [{"id": "a", "value": null}]}),
        json!({"scores": [{"id": "a"}]}),
        json!({"scores": [{"value": 1}]}),
        json!({"scores": [{"id": "a", "value": 1, "frame_values": [1]}]}),
        json!({"scores": [{"id": "a", "value": "1"}]}),
        json!({"scores": [{"id": "a", "value": 1, "components": {"x": null}}]}),
        json!({}),
    ] {
        assert!(schema::check("answer", &bad).is_err(), "{bad}");
    }
}

#[test]
fn ids_are_functions_of_the_sample() {
    let clips = clips(2);
    let [first, second] = [0, 1].map(|i| Sample::new(&clips[i].0, &clips[i].1));
    assert_eq!(sample_id(&first, 0), sample_id(&first, 0));
    assert_ne!(sample_id(&first, 0), sample_id(&first, 1));
    assert_ne!(sample_id(&first, 0), sample_id(&second, 0));
}
