//! Where prompts come from.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shapes::{CaptionSet, World};

use super::SettingsError;
use super::error::reason;

/// A set of prompts: captions of a demo world, or a text file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PromptSource {
    /// `shapes:train`, `shapes:held-out`, `signs:train` or `signs:held-out`.
    World(CaptionSet),
    /// One prompt per line; blank lines and lines that start with `#` do not count.
    File(PathBuf),
}

impl TryFrom<String> for PromptSource {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let names_a_world = World::ALL.iter().any(|world| text.strip_prefix(world.name()).is_some_and(|rest| rest.starts_with(':')));
        if names_a_world { text.parse().map(PromptSource::World) } else { Ok(PromptSource::File(text.into())) }
    }
}

impl From<PromptSource> for String {
    fn from(source: PromptSource) -> String {
        match source {
            PromptSource::World(captions) => captions.to_string(),
            PromptSource::File(path) => path.display().to_string(),
        }
    }
}

/// A prompt, and for models of image-to-video what the video starts with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// What the video should show.
    pub text: String,
    /// A PNG or JPEG file.
    pub image: Option<PathBuf>,
    /// Whatever rewards should know beside the text; passed on to them as it is.
    pub metadata: Option<Value>,
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self { text, image: None, metadata: None }
    }
}

/// A line of a prompt file that ends in `.jsonl`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: String,
    /// Relative to the folder of the prompt file.
    #[serde(default)]
    image: Option<PathBuf>,
    /// Any JSON.
    #[serde(default)]
    metadata: Option<Value>,
}

/// Reads a prompt file: one prompt per line, trimmed; blank lines and lines that start with `#` do not count. In a file that ends in `.jsonl`, a line is
/// `{"prompt": "...", "image": "picture.png", "metadata": {...}}`, of which only the prompt must be there.
///
/// # Errors
/// A file that cannot be read, holds no prompt, a line that cannot be used, or a prompt with control characters. `field` is the key that names the
/// file.
pub fn read_prompt_file(path: &Path, field: &str) -> Result<Vec<Prompt>, SettingsError> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| {
        let hint = "a text file with one prompt per line, relative to the current directory; or `shapes:train`";
        let message = format!("`{field}` is `{name}`, which cannot be read: {}", reason(&error));
        SettingsError::new(&name, field, message, hint)
    })?;
    let is_json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
    let mut prompts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim().trim_start_matches('\u{feff}');
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let place = format!("{name}:{}", index + 1);
        let prompt = if is_json { from_json(line, path, &place, field)? } else { Prompt::from(line.to_owned()) };
        check_prompt(&prompt.text, &place, field)?;
        prompts.push(prompt);
    }
    if prompts.is_empty() {
        let message = format!("`{field}` is `{name}`, which holds no prompt");
        return Err(SettingsError::new(&name, field, message, "one prompt per line; lines that start with `#` do not count"));
    }
    Ok(prompts)
}

fn from_json(line: &str, path: &Path, place: &str, field: &str) -> Result<Prompt, SettingsError> {
    let Line { prompt, image, metadata } = serde_json::from_str(line).map_err(|error| {
        let message = format!("`{field}`: {error}");
        SettingsError::new(place, field, message, "a line is an object: `{\"prompt\": \"a red fox\", \"image\": \"fox.png\"}`")
    })?;
    let folder = path.parent().unwrap_or(Path::new(""));
    Ok(Prompt { text: prompt.trim().to_owned(), image: image.map(|image| folder.join(image)), metadata })
}

/// Refuses control characters: they are invisible, and the tokenizer would pass them to the model.
pub(super) fn check_prompt(prompt: &str, place: &str, field: &str) -> Result<(), SettingsError> {
    let Some((index, control)) = prompt.chars().enumerate().find(|(_, c)| c.is_control() && *c != '\t') else {
        return Ok(());
    };
    let shown = prompt.escape_debug();
    let code = u32::from(control);
    let message = format!("`{field}`: the prompt `{shown}` has control character U+{code:04X} at position {}", index + 1);
    Err(SettingsError::new(place, field, message, "delete it; a prompt is one line of plain text"))
}
