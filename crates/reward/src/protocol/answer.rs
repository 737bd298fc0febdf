//! What is answered, and what an answer must satisfy.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use crate::{Aggregation, RewardBreakdown};

/// What a server says of itself at `GET /v1/info`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Must be [`super::PROTOCOL`].
    pub protocol: u32,
    /// Name of the reward.
    pub name: String,
    /// Changes whenever values would: it is part of the cache's key.
    pub version: String,
    /// Samples that it takes at once, if limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_batch: Option<usize>,
    /// Bytes of a request that it takes, if limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<usize>,
}

#[derive(Deserialize)]
struct Answer {
    scores: Vec<Score>,
}

#[derive(Deserialize)]
struct Score {
    id: String,
    value: Option<f64>,
    frame_values: Option<Vec<Option<f64>>>,
    #[serde(default)]
    components: BTreeMap<String, Option<f64>>,
    error: Option<String>,
}

/// What became of each sample, or why the answer as a whole is worth nothing.
pub type Matched = Result<Vec<Result<RewardBreakdown, String>>, String>;

/// The scores of an answer in the order of `expected`, which are ids with their numbers of frames.
///
/// # Errors
/// The whole answer is refused where it is no JSON of the protocol, or names an id twice or one that was not asked for: then nobody knows
/// which score belongs to whom. A sample without a score, or whose score is no finite number, has an error of its own.
pub fn parse_answer(answer: &[u8], expected: &[(&str, usize)], aggregate: Aggregation) -> Matched {
    let answer: Answer = serde_json::from_slice(&without_nan(answer))
        .map_err(|error| format!("the answer is not what the protocol says: {error}; it begins with `{}`", beginning(answer)))?;
    let mut scores: HashMap<String, Score> = HashMap::new();
    for score in answer.scores {
        if !expected.iter().any(|(id, _)| *id == score.id) {
            return Err(format!("the answer has a score for the id `{}`, which was not asked for", beginning(score.id.as_bytes())));
        }
        if let Some(twice) = scores.insert(score.id.clone(), score) {
            return Err(format!("the answer has two scores for the id `{}`", twice.id));
        }
    }
    let one = |(id, num_frames): &(&str, usize)| {
        let score = scores.remove(*id).ok_or_else(|| format!("the answer has no score for the id `{id}`"))?;
        breakdown(score, *num_frames, aggregate)
    };
    Ok(expected.iter().map(one).collect())
}

fn breakdown(score: Score, num_frames: usize, aggregate: Aggregation) -> Result<RewardBreakdown, String> {
    let value = match (score.value, score.frame_values, score.error) {
        (_, _, Some(error)) => return Err(format!("the server says: {}", beginning(error.as_bytes()))),
        (Some(value), None, None) => value,
        (None, Some(values), None) if values.len() == num_frames => {
            let values: Vec<f64> = values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect();
            aggregate.of(&values).unwrap_or(f64::NAN)
        }
        (None, Some(values), None) => return Err(format!("the answer has {} frame values for {num_frames} frames", values.len())),
        (Some(_), Some(_), None) => return Err("the answer has both `value` and `frame_values`; give one".to_owned()),
        (None, None, None) => return Err("the answer has no number as `value`".to_owned()),
    };
    let components: BTreeMap<String, f64> = score.components.into_iter().map(|(k, v)| (k, v.unwrap_or(f64::NAN))).collect();
    match components.iter().find(|(_, value)| !value.is_finite()) {
        _ if !value.is_finite() => Err(format!("the value is `{value}`, not a finite number")),
        Some((part, _)) => Err(format!("the component `{part}` is not a finite number")),
        None => Ok(RewardBreakdown { value, components }),
    }
}

/// `NaN` and `Infinity` outside of strings as `null`: JSON has no such numbers, but Python writes them, and one bad sample should not cost
/// the others of its request.
fn without_nan(json: &[u8]) -> Vec<u8> {
    let (mut out, mut rest, mut in_string) = (Vec::with_capacity(json.len()), json, false);
    while let Some((&byte, tail)) = rest.split_first() {
        let word = [&b"NaN"[..], b"-Infinity", b"Infinity"].into_iter().find(|word| !in_string && rest.starts_with(word));
        match (byte, word) {
            (_, Some(word)) => {
                out.extend(b"null");
                rest = &rest[word.len()..];
                continue;
            }
            (b'\\', None) if in_string => {
                out.push(byte);
                out.extend(tail.first());
                rest = tail.get(1..).unwrap_or_default();
                continue;
            }
            (b'"', None) => in_string = !in_string,
            _ => {}
        }
        out.push(byte);
        rest = tail;
    }
    out
}

/// Bytes of a text from outside that a message shows.
const SHOWN: usize = 200;

/// The beginning of a text from outside and, of a longer one, its last line, where a Python traceback has its reason.
pub(crate) fn gist(text: &[u8]) -> String {
    let text = text.trim_ascii_end();
    let last = text.rsplit(|&byte| byte == b'\n').next().unwrap_or_default();
    if text.len() <= SHOWN || last.len() == text.len() {
        return beginning(text);
    }
    format!("{} ... {}", beginning(text), beginning(last))
}

/// The beginning of a text from outside, fit for a message.
pub(crate) fn beginning(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(SHOWN)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Vec<Result<f64, String>>, String> {
        let parsed = parse_answer(json.as_bytes(), &[("a", 2), ("b", 2)], Aggregation::Max)?;
        Ok(parsed.into_iter().map(|score| score.map(|s| s.value)).collect())
    }

    #[test]
    fn the_reason_of_a_traceback_is_shown() {
        let traceback = format!("Traceback (most recent call last):\n{}KeyError: 'meta_datas'\n", "  File \"app.py\"\n".repeat(40));
        let shown = gist(traceback.as_bytes());
        assert!(shown.starts_with("Traceback (most recent call last):") && shown.ends_with(" ... KeyError: 'meta_datas'"), "{shown}");
        assert_eq!((gist(b"{}\n"), gist(b"one\ntwo")), ("{}".into(), "one two".into()));
        assert_eq!(gist("x".repeat(1000).as_bytes()), "x".repeat(200));
    }

    #[test]
    fn scores_are_matched_by_id() {
        let answer = r#"{"scores": [{"id": "b", "frame_values": [1, 3]}, {"id": "a", "value": 0.5, "later": true}]}"#;
        assert_eq!(parse(answer), Ok(vec![Ok(0.5), Ok(3.0)]));
    }

    #[test]
    fn one_bad_sample_does_not_cost_the_other() {
        for (bad, reason) in [
            (r#"{"id": "b", "value": NaN}"#, "no number"),
            (r#"{"id": "b", "value": -Infinity}"#, "no number"),
            (r#"{"id": "b", "value": null}"#, "no number"),
            (r#"{"id": "b", "error": "out of memory \" NaN"}"#, "the server says: out of memory \" NaN"),
            (r#"{"id": "b", "frame_values": [1]}"#, "1 frame values for 2 frames"),
            (r#"{"id": "b", "frame_values": [1, NaN]}"#, "not a finite number"),
            (r#"{"id": "b", "value": 1, "frame_values": [1, 2]}"#, "both"),
            (r#"{"id": "b", "value": 1, "components": {"x": NaN}}"#, "component `x`"),
        ] {
            let scores = parse(&format!(r#"{{"scores": [{{"id": "a", "value": 1}}, {bad}]}}"#)).expect("an answer");
            assert_eq!(scores[0], Ok(1.0), "{bad}");
            assert!(scores[1].as_ref().is_err_and(|error| error.contains(reason)), "{bad}: {scores:?}");
        }
        let missing = parse(r#"{"scores": [{"id": "a", "value": 1}]}"#).expect("an answer");
        assert_eq!(missing[1], Err("the answer has no score for the id `b`".into()));
    }

    #[test]
    fn an_answer_that_could_belong_to_others_is_refused() {
        for (bad, reason) in [
            (r#"{"scores": [{"id": "a", "value": 1}, {"id": "a", "value": 2}, {"id": "b", "value": 2}]}"#, "two scores for the id `a`"),
            (r#"{"scores": [{"id": "c", "value": 1}]}"#, "`c`, which was not asked for"),
            (r#"{"scores": [{"id": "a", "value": "1"}]}"#, "not what the protocol says"),
            ("<html>", "it begins with `<html>`"),
            ("", "not what the protocol says"),
        ] {
            assert!(parse(bad).is_err_and(|error| error.contains(reason)), "{bad}");
        }
    }
}
