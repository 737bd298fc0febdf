//! What differs between two recipes, key by key.

use super::Settings;
use std::collections::BTreeMap;
use std::fmt;

/// Keys (or sections, with a dot at the end) that change how long a run goes on and what it writes, but not what it computes.
const HARMLESS: [&str; 9] = [
    "output_dir",
    "model.embedding_cache",
    "train.iterations",
    "train.activation_checkpointing",
    "scoring.cache",
    "checkpoint.",
    "debug.",
    "eval.videos",
    "eval.bootstrap",
];

/// Keys of a reward that say how it is reached, and how long it is waited for, but not what a video is worth. (`batch_size` is none of them:
/// what is computed together may be rounded otherwise.)
const TRANSPORT: [&str; 8] = ["url", "api_key_env", "connection.", "concurrency", "processes", "timeout_s", "restarts", "cache"];

/// Keys that name what a run reads. A checkpoint has its checksum ([`crate::inputs`]), and it is that which has to be the same.
const INPUTS: [&str; 3] = ["model.path", "prompts.train", "prompts.eval"];

/// One key with different values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Dotted name.
    pub key: String,
    /// Value before; nothing if the key is new.
    pub old: Option<String>,
    /// Value now; nothing if the key is gone.
    pub new: Option<String>,
}

impl Change {
    /// Whether a run can go on with this change and end as if it had been there from the start. Where [`names_input`](Self::names_input), that
    /// holds for the same content under another name.
    pub fn is_harmless(&self) -> bool {
        is_one_of(&self.key, &HARMLESS) || self.names_input() || self.of_reward().is_some_and(|key| self.is_transport(key))
    }

    /// Whether the key names something that is read, and compared by its content.
    pub fn names_input(&self) -> bool {
        is_one_of(&self.key, &INPUTS)
    }

    fn is_transport(&self, key: &str) -> bool {
        // without a folder frames are encoded, with one they are not
        let other_folder = key == "shared_folder" && self.old.is_some() && self.new.is_some();
        other_folder || is_one_of(key, &TRANSPORT)
    }

    /// The key within a reward's table: `url` of `reward.0.url`.
    fn of_reward(&self) -> Option<&str> {
        let (place, key) = self.key.strip_prefix("reward.").or_else(|| self.key.strip_prefix("eval_reward."))?.split_once('.')?;
        place.parse::<usize>().ok().map(|_| key)
    }
}

/// Whether `key` is one of the names, or in one of the sections.
fn is_one_of(key: &str, names: &[&str]) -> bool {
    names.iter().any(|name| key == *name || (name.ends_with('.') && key.starts_with(name)))
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "(not set)".into());
        write!(f, "{} = {} -> {}", self.key, value(&self.old), value(&self.new))
    }
}

impl Settings {
    /// Every key whose value is not that of `old`, in alphabetical order.
    pub fn changes_since(&self, old: &Settings) -> Vec<Change> {
        let (old, new) = (flat(old), flat(self));
        let keys: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
        let change = |key: &String| Change { key: key.clone(), old: old.get(key).cloned(), new: new.get(key).cloned() };
        keys.into_iter().map(change).filter(|change| change.old != change.new).collect()
    }
}

fn flat(settings: &Settings) -> BTreeMap<String, String> {
    let mut values = BTreeMap::new();
    if let Ok(value) = toml::Value::try_from(settings) {
        flatten("", &value, &mut values);
    }
    values
}

fn flatten(prefix: &str, value: &toml::Value, into: &mut BTreeMap<String, String>) {
    let named = |name: &str| if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
    match value {
        toml::Value::Table(table) => table.iter().for_each(|(name, value)| flatten(&named(name), value, into)),
        toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
            items.iter().enumerate().for_each(|(i, value)| flatten(&named(&i.to_string()), value, into));
        }
        value => {
            into.insert(prefix.to_owned(), value.to_string());
        }
    }
}
