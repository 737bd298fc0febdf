//! Where prompts come from.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
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

/// Reads a prompt file: one prompt per line, trimmed; blank lines and lines that start with `#` do not count.
///
/// # Errors
/// A file that cannot be read, holds no prompt, or a prompt with control characters. `field` is the key that names the file.
pub fn read_prompt_file(path: &Path, field: &str) -> Result<Vec<String>, SettingsError> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| {
        let hint = "a text file with one prompt per line, relative to the current directory; or `shapes:train`";
        let message = format!("`{field}` is `{name}`, which cannot be read: {}", reason(&error));
        SettingsError::new(&name, field, message, hint)
    })?;
    let mut prompts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let prompt = line.trim().trim_start_matches('\u{feff}');
        if prompt.is_empty() || prompt.starts_with('#') {
            continue;
        }
        check_prompt(prompt, &format!("{name}:{}", index + 1), field)?;
        prompts.push(prompt.to_owned());
    }
    if prompts.is_empty() {
        let message = format!("`{field}` is `{name}`, which holds no prompt");
        return Err(SettingsError::new(&name, field, message, "one prompt per line; lines that start with `#` do not count"));
    }
    Ok(prompts)
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
