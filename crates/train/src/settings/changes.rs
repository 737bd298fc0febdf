//! What differs between two recipes, key by key.

use super::Settings;
use std::collections::BTreeMap;
use std::fmt;

/// Keys (or sections, with a dot at the end) that change how long a run goes on and what it writes, but not what it computes.
const HARMLESS: [&str; 8] = [
    "output_dir",
    "model.embedding_cache",
    "train.iterations",
    "train.activation_checkpointing",
    "checkpoint.",
    "debug.",
    "eval.videos",
    "eval.bootstrap",
];

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
    /// Whether a run can go on with this change and end as if it had been there from the start.
    pub fn is_harmless(&self) -> bool {
        HARMLESS.iter().any(|harmless| self.key == *harmless || (harmless.ends_with('.') && self.key.starts_with(harmless)))
    }
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
