//! The messages of the TOML reader in our words: field, value, what was expected, a hint.

use super::{DEFAULT_RECIPE, SettingsError};

/// Names that are further from a known one than this are not called a typo of it (1 is equal).
const SIMILAR: f64 = 0.8;

const SEE_INSPECT: &str = "`flash-grpo inspect` prints a complete recipe";

/// `field` is the dotted key (empty if unknown), `value` its text (empty if unknown), `message` what the reader said.
pub(super) fn describe(place: &str, field: &str, value: &str, message: &str) -> SettingsError {
    let (field, message, hint) = unknown_key(field, message)
        .or_else(|| unknown_choice(field, message))
        .or_else(|| missing_key(field, message))
        .or_else(|| wrong_type(field, value, message))
        .unwrap_or_else(|| {
            let subject = if field.is_empty() { String::new() } else { format!("`{field}`: ") };
            (field.to_owned(), format!("{subject}{message}"), SEE_INSPECT.to_owned())
        });
    SettingsError::new(place, field, message, hint)
}

/// Field, message, hint.
type Described = Option<(String, String, String)>;

fn unknown_key(field: &str, message: &str) -> Described {
    let (unknown, known) = unknown_name(message, "unknown field ")?;
    let section = section_of(field, unknown);
    let place = if section.is_empty() { "at the top level".to_owned() } else { format!("in `{section}`") };
    let hint = hint_for_key(section, unknown, &known);
    Some((join(section, unknown), format!("unknown key `{unknown}` {place}"), hint))
}

fn unknown_choice(field: &str, message: &str) -> Described {
    let (unknown, known) = unknown_name(message, "unknown variant ").or_else(|| unknown_name(message, "unknown method "))?;
    // the reader of rewards does not say which key it was at, but only one has choices
    let field = if ["reward", "eval_reward"].contains(&field) { format!("{field}.type") } else { field.to_owned() };
    let message = format!("`{field}` is `{unknown}`, which is no known choice");
    Some((field, message, hint_for_choice(unknown, &known)))
}

fn missing_key(field: &str, message: &str) -> Described {
    let missing = message.strip_prefix("missing field `")?.strip_suffix('`')?;
    let key = join(field, missing);
    Some((key.clone(), format!("`{key}` is missing"), SEE_INSPECT.to_owned()))
}

fn wrong_type(field: &str, value: &str, message: &str) -> Described {
    let (got, expected) = message.strip_prefix("invalid ")?.split_once(", expected ")?;
    let got = got.split_once(": ").map_or(got, |(_, got)| got);
    let shown = if value.is_empty() { got.replace('"', "`") } else { format!("`{value}`") };
    let subject = if field.is_empty() { "a value".to_owned() } else { format!("`{field}`") };
    let message = format!("{subject} is {shown}, expected {}", in_words(expected));
    Some((field.to_owned(), message, hint_for_type(expected, got)))
}

/// Splits "unknown field `x`, expected one of `a`, `b`" into `x` and [`a`, `b`].
fn unknown_name<'a>(message: &'a str, prefix: &str) -> Option<(&'a str, Vec<&'a str>)> {
    let mut names = message.strip_prefix(prefix)?.split('`').skip(1).step_by(2);
    let unknown = names.next()?;
    Some((unknown, names.collect()))
}

fn section_of<'a>(field: &'a str, unknown: &str) -> &'a str {
    match field.strip_suffix(unknown) {
        Some(section) => section.trim_end_matches('.'),
        None => field,
    }
}

fn join(section: &str, name: &str) -> String {
    if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") }
}

fn hint_for_key(section: &str, unknown: &str, known: &[&str]) -> String {
    if let Some(near) = nearest(unknown, known.iter().copied()) {
        return format!("did you mean `{near}`?");
    }
    let everywhere = known_keys();
    let elsewhere = everywhere.iter().find(|key| key.rsplit('.').next() == Some(unknown));
    match elsewhere {
        Some(key) => format!("did you mean `{key}`?"),
        None if known.is_empty() => format!("`{section}` takes no keys"),
        None => format!("the keys here are {}", listed(known)),
    }
}

/// The nearest of the `known` choices, if one is near, and all of them.
pub(crate) fn hint_for_choice(unknown: &str, known: &[&str]) -> String {
    let choices = format!("the choices are {}", listed(known));
    match nearest(unknown, known.iter().copied()) {
        Some(near) => format!("did you mean `{near}`? {choices}"),
        None => choices,
    }
}

fn hint_for_type(expected: &str, got: &str) -> String {
    match expected {
        _ if got.starts_with("length") => "the list has too few or too many entries",
        "a string" => "put text in quotes",
        _ if got.starts_with("string") => "numbers and true/false stand without quotes",
        _ if got.starts_with("integer `-") => "the value cannot be negative",
        _ if got.starts_with("floating point") => "write it without a decimal point",
        _ => SEE_INSPECT,
    }
    .to_owned()
}

/// Rust's type names mean nothing to the author of a recipe.
fn in_words(expected: &str) -> &str {
    match expected {
        "usize" | "u64" | "u32" => "a whole number",
        "f64" | "f32" => "a number",
        "a boolean" => "true or false",
        "path string" | "a string" => "text in quotes",
        "a sequence" => "a list",
        "an array of length 2" => "a list of two numbers",
        other => other.strip_prefix("struct ").map_or(other, |_| "a table"),
    }
}

fn listed(names: &[&str]) -> String {
    format!("`{}`", names.join("`, `"))
}

fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// Dotted names of all keys of the built-in recipe.
fn known_keys() -> Vec<String> {
    let table = DEFAULT_RECIPE.parse::<toml::Table>().unwrap_or_default();
    let mut keys = Vec::new();
    for (section, value) in &table {
        match value {
            toml::Value::Table(inner) => keys.extend(inner.keys().map(|key| join(section, key))),
            _ => keys.push(section.clone()),
        }
    }
    keys
}
