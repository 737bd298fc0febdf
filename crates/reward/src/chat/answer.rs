//! How an answer becomes a number.

use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::require;
use crate::protocol::beginning;
use crate::{RewardBreakdown, SetupError};

/// How an answer becomes a number:
///
/// ```text
/// { regex = 'Score: ([0-9.]+)' }   the first group of the last match: judges reason first
/// { json = "score" }               that field of an object, which the server is asked to enforce (`response_format`)
/// "yes_probability"                p(Yes) / (p(Yes) + p(No)) of the first token, summed over spellings; in [0, 1]
/// ```
///
/// The last is the softmax over the two answers. Their share of all probability is the component `mass`: where it is small, the judge
/// wanted to say something else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatScore {
    /// By pattern.
    Regex(String),
    /// By field.
    Json(String),
    /// By log-probabilities.
    YesProbability,
}

impl ChatScore {
    pub(super) fn validate(&self) -> Result<(), SetupError> {
        match self {
            Self::Json(field) => require(!field.is_empty(), "score", "{ json = \"\" }", "the name of a field", "for instance `score`"),
            Self::Regex(_) | Self::YesProbability => self.reader().map(drop),
        }
    }

    pub(super) fn reader(&self) -> Result<Reader, SetupError> {
        let hint = "for instance `{ regex = 'Score: ([0-9.]+)' }`";
        Ok(match self {
            Self::Regex(pattern) => Reader::Regex(
                Regex::new(pattern)
                    .map_err(|error| SetupError::field("score", pattern, "a regular expression", format!("{error}; {hint}")))?,
            ),
            Self::Json(field) => Reader::Json(field.clone()),
            Self::YesProbability => Reader::YesProbability,
        })
    }
}

/// [`ChatScore`], ready to use.
pub(super) enum Reader {
    Regex(Regex),
    Json(String),
    YesProbability,
}

#[derive(Deserialize)]
struct Completion {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
    finish_reason: Option<String>,
    logprobs: Option<LogProbs>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
}

#[derive(Deserialize)]
struct LogProbs {
    content: Option<Vec<Token>>,
}

#[derive(Deserialize)]
struct Token {
    #[serde(default)]
    top_logprobs: Vec<Alternative>,
}

#[derive(Deserialize)]
struct Alternative {
    token: String,
    logprob: f64,
}

impl Reader {
    /// The number of an answer.
    ///
    /// # Errors
    /// An answer that is no completion, or has no such number in it.
    pub fn read(&self, answer: &[u8]) -> Result<RewardBreakdown, String> {
        let completion: Completion = serde_json::from_slice(answer)
            .map_err(|error| format!("the answer is no chat completion: {error}; it begins with `{}`", beginning(answer)))?;
        let choice = completion.choices.into_iter().next().ok_or("the answer has no choices")?;
        let text = choice.message.content.unwrap_or_default();
        let value = match self {
            Self::YesProbability => return yes_probability(choice.logprobs.and_then(|l| l.content).unwrap_or_default()),
            Self::Regex(pattern) => by_pattern(pattern, &text),
            Self::Json(field) => serde_json::from_str::<Value>(&text).ok().and_then(|object| object.get(field)?.as_f64()),
        };
        let cut = if choice.finish_reason.as_deref() == Some("length") { " (cut off: raise `max_tokens`)" } else { "" };
        let value = value.filter(|value| value.is_finite());
        value.map(Into::into).ok_or_else(|| format!("the judge's answer has no score{cut}: `{}`", beginning(text.as_bytes())))
    }
}

fn by_pattern(pattern: &Regex, text: &str) -> Option<f64> {
    let last = pattern.captures_iter(text).last()?;
    last.get(1).or_else(|| last.get(0))?.as_str().trim().parse().ok()
}

fn yes_probability(tokens: Vec<Token>) -> Result<RewardBreakdown, String> {
    let first = tokens.into_iter().next().ok_or("the answer has no log-probabilities; the server must support `logprobs`")?;
    let total = |word: &str| -> f64 {
        let spelled = |token: &str| token.trim_matches(|c: char| !c.is_alphanumeric()).eq_ignore_ascii_case(word);
        first.top_logprobs.iter().filter(|alternative| spelled(&alternative.token)).map(|alternative| alternative.logprob.exp()).sum()
    };
    let (yes, no) = (total("yes"), total("no"));
    let mass = yes + no;
    if mass > 0.0 && mass.is_finite() {
        return Ok(RewardBreakdown { value: yes / mass, components: [("mass".to_owned(), mass)].into() });
    }
    let likely: Vec<&str> = first.top_logprobs.iter().take(5).map(|alternative| alternative.token.as_str()).collect();
    Err(format!("neither Yes nor No is among the likely answers {likely:?}"))
}

/// Names in an answer of `GET /models`; none where it is something else.
pub(super) fn model_ids(answer: &[u8]) -> Vec<String> {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let models = answer["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    models.iter().filter_map(|model| model["id"].as_str()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(score: &ChatScore, choice: &Value) -> Result<f64, String> {
        let answer = json!({"choices": [choice]}).to_string();
        score.reader().expect("a reader").read(answer.as_bytes()).map(|score| score.value)
    }

    #[test]
    fn the_last_match_counts() {
        let score = ChatScore::Regex("Score: ([0-9.]+)".into());
        let text = "Score: 1 would be too low.\nFinal Score: 4.5";
        assert_eq!(read(&score, &json!({"message": {"content": text}})), Ok(4.5));
        let cut = read(&score, &json!({"message": {"content": "I think"}, "finish_reason": "length"})).expect_err("no score");
        assert_eq!(cut, "the judge's answer has no score (cut off: raise `max_tokens`): `I think`");
        assert!(read(&ChatScore::Regex("inf".into()), &json!({"message": {"content": "inf"}})).is_err(), "not finite");
    }

    #[test]
    fn fields_must_be_numbers() {
        let score = ChatScore::Json("score".into());
        assert_eq!(read(&score, &json!({"message": {"content": "{\"score\": 3}"}})), Ok(3.0));
        for text in ["{\"score\": \"3\"}", "{\"value\": 3}", "3", "Sure! {\"score\": 3}", ""] {
            assert!(read(&score, &json!({"message": {"content": text}})).is_err(), "{text}");
        }
    }

    #[test]
    fn spellings_of_yes_and_no_are_added() {
        let top = |words: &[(&str, f64)]| -> Value {
            let list: Vec<Value> = words.iter().map(|(token, p)| json!({"token": token, "logprob": p.ln()})).collect();
            json!({"message": {"content": "Yes"}, "logprobs": {"content": [{"token": "Yes", "logprob": 0, "top_logprobs": list}]}})
        };
        let value = read(&ChatScore::YesProbability, &top(&[("Yes", 0.4), (" yes", 0.2), ("No", 0.2), ("Maybe", 0.1)])).expect("a score");
        assert!((value - 0.75).abs() < 1e-12);
        let error = read(&ChatScore::YesProbability, &top(&[("Maybe", 0.9)])).expect_err("neither");
        assert!(error.contains("neither Yes nor No") && error.contains("Maybe"));
        assert!(read(&ChatScore::YesProbability, &json!({"message": {"content": "Yes"}})).is_err(), "no log-probabilities");
    }
}
