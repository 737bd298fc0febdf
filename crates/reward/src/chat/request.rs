//! What the judge is asked.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{ChatScore, ChatSettings, PLACEHOLDER};
use crate::encode::Image;
use crate::{Encoding, Sample};

/// Alternatives of a token that are asked for; servers allow 20.
const ALTERNATIVES: u32 = 20;

/// The body of a request: the frames, then the question.
///
/// # Errors
/// Frames that do not fit into an image file.
pub(super) fn body(settings: &ChatSettings, sample: &Sample<'_>) -> Result<Value, String> {
    let indices = settings.frames.indices(sample.frames.num_frames(), sample.fps);
    let mut content = indices.iter().map(|&index| image(settings.encoding, sample, index)).collect::<Result<Vec<Value>, String>>()?;
    content.push(json!({"type": "text", "text": settings.prompt.replace(PLACEHOLDER, sample.prompt)}));
    let mut messages: Vec<Value> = settings.system.iter().map(|text| json!({"role": "system", "content": text})).collect();
    messages.push(json!({"role": "user", "content": content}));
    let mut body =
        json!({"model": settings.model, "messages": messages, "temperature": settings.temperature, "max_tokens": settings.max_tokens});
    if let Some(seed) = settings.seed {
        body["seed"] = json!(seed);
    }
    match &settings.score {
        ChatScore::Regex(_) => {}
        ChatScore::Json(field) => body["response_format"] = response_format(field, settings.range),
        ChatScore::YesProbability => {
            body["max_tokens"] = json!(1);
            body["logprobs"] = json!(true);
            body["top_logprobs"] = json!(ALTERNATIVES);
        }
    }
    Ok(body)
}

fn image(encoding: Encoding, sample: &Sample<'_>, index: usize) -> Result<Value, String> {
    let kind = if encoding == Encoding::Png { "png" } else { "jpeg" };
    let data = STANDARD.encode(Image::of(sample.frames, index).encode(encoding)?);
    Ok(json!({"type": "image_url", "image_url": {"url": format!("data:image/{kind};base64,{data}")}}))
}

/// An object with one number.
fn response_format(field: &str, range: Option<[f64; 2]>) -> Value {
    let number = match range {
        Some([low, high]) => json!({"type": "number", "minimum": low, "maximum": high}),
        None => json!({"type": "number"}),
    };
    let schema = json!({"type": "object", "properties": {field: number}, "required": [field], "additionalProperties": false});
    json!({"type": "json_schema", "json_schema": {"name": "score", "strict": true, "schema": schema}})
}
