//! From text to [`Settings`]: method base, file and overrides are merged, then read with types; whatever fails is traced
//! back to the line or the override it came from.

use std::ops::Range;

use grpo::Recipe;
use serde::Deserialize;
use toml::{Table, Value};

use super::source::Source;
use super::wording::describe;
use super::{Settings, SettingsError};

/// One `--set a.b=c`.
struct Override {
    text: String,
    path: String,
    value: Value,
}

impl Settings {
    /// Reads a recipe from its text; `name` is what messages call it.
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn parse(name: &str, text: &str, overrides: &[String]) -> Result<Settings, SettingsError> {
        let source = Source { name, text };
        let file: Table = text.parse().map_err(|error| syntax_error(&source, &error))?;
        let overrides = overrides.iter().map(|text| Override::parse(text)).collect::<Result<Vec<_>, _>>()?;
        let settings = resolve(&file, &overrides).map_err(|error| explain(&source, &file, &overrides, &error))?;
        settings.validate().map_err(|problem| {
            let field = problem.field.as_str();
            let culprit = overrides.iter().rev().find(|o| within(&o.path, field) || within(field, &o.path));
            let place = culprit.map_or_else(|| source.locate(field), Override::place);
            SettingsError { place, ..problem }
        })?;
        Ok(settings)
    }
}

/// What could not be read: the message of the reader, with the field if it is known.
struct ReadError {
    field: Option<String>,
    message: String,
}

/// Method base, then file, then overrides.
fn resolve(file: &Table, overrides: &[Override]) -> Result<Settings, ReadError> {
    let mut merged = file.clone();
    for change in overrides {
        set(&mut merged, &change.path, change.value.clone()).map_err(|message| ReadError { field: Some(change.path.clone()), message })?;
    }
    if let Some(Value::Table(method)) = merged.get_mut("method") {
        *method = over_base(method)?;
    }
    Settings::deserialize(merged).map_err(|error| ReadError { field: None, message: error.message().to_owned() })
}

/// The values of the named method, replaced where the recipe says otherwise.
fn over_base(method: &Table) -> Result<Table, ReadError> {
    let Some(Value::String(name)) = method.get("name") else {
        return Ok(method.clone());
    };
    let base = Recipe::named(name).ok_or_else(|| ReadError {
        field: Some("method.name".to_owned()),
        message: format!("unknown method `{name}`, expected one of `{}`", Recipe::NAMES.join("`, `")),
    })?;
    let mut table = Table::try_from(base).map_err(|error| ReadError { field: Some("method".to_owned()), message: error.to_string() })?;
    merge(&mut table, method);
    Ok(table)
}

/// Tables are merged key by key, unless they are choices of a different `type`; everything else is replaced.
fn merge(base: &mut Table, over: &Table) {
    for (key, value) in over {
        match (base.get_mut(key), value) {
            (Some(Value::Table(inner)), Value::Table(value)) if same_choice(inner, value) => merge(inner, value),
            _ => {
                base.insert(key.clone(), value.clone());
            }
        }
    }
}

fn same_choice(base: &Table, over: &Table) -> bool {
    over.get("type").is_none_or(|choice| base.get("type") == Some(choice))
}

/// Puts a value at a dotted path, through tables and (by number) lists.
fn set(table: &mut Table, path: &str, value: Value) -> Result<(), String> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let Some(rest) = rest else {
        if name == "type" && table.get(name) != Some(&value) {
            table.clear(); // another choice has other keys
        }
        let mut single = Table::new();
        single.insert(name.to_owned(), value);
        merge(table, &single);
        return Ok(());
    };
    let inner = table.entry(name).or_insert_with(|| Value::Table(Table::new()));
    if let Value::Array(items) = inner {
        let (index, rest) = rest.split_once('.').ok_or_else(|| format!("`{name}` is a list of tables"))?;
        let item = index.parse().ok().and_then(|index: usize| items.get_mut(index));
        return match item {
            Some(Value::Table(inner)) => set(inner, rest, value),
            _ => Err(format!("`{name}` has no entry `{index}`")),
        };
    }
    match inner {
        Value::Table(inner) => set(inner, rest, value),
        _ => Err(format!("`{name}` is a value, not a table")),
    }
}

impl Override {
    fn parse(text: &str) -> Result<Override, SettingsError> {
        let hint = "write `--set section.key=value`, for instance `--set optimizer.learning_rate=1e-4`";
        let place = format!("--set {text}");
        let Some((path, value)) = text.split_once('=') else {
            return Err(SettingsError::new(place, "", "an override needs a `=`", hint));
        };
        let path = path.trim();
        let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !path.split('.').all(is_name) {
            return Err(SettingsError::new(place, path, format!("`{path}` is not a dotted key"), hint));
        }
        // What is not TOML is a bare word: a path, a name.
        let document = format!("value = {value}").parse::<Table>();
        let parsed = document.ok().filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
        let value = parsed.unwrap_or_else(|| Value::String(value.trim().to_owned()));
        Ok(Override { text: text.to_owned(), path: path.to_owned(), value })
    }

    fn place(&self) -> String {
        format!("--set {}", self.text)
    }
}

/// Whether `field` is `table` or lies in it.
fn within(table: &str, field: &str) -> bool {
    field.strip_prefix(table).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn syntax_error(source: &Source<'_>, error: &toml::de::Error) -> SettingsError {
    let place = error.span().map_or_else(|| source.name.to_owned(), |span| source.place(span.start));
    let message = format!("not valid TOML: {}", error.message().replace('\n', ", "));
    SettingsError::new(place, "", message, "text needs quotes, and each key stands once; see https://toml.io")
}

/// Finds out what an unreadable value is to be blamed on: an override, a field, or a place in the text.
fn explain(source: &Source<'_>, file: &Table, overrides: &[Override], error: &ReadError) -> SettingsError {
    if resolve(file, &[]).is_ok() {
        let guilty = (1..=overrides.len()).find(|&n| resolve(file, &overrides[..n]).is_err());
        if let Some(n) = guilty {
            return blame_override(&overrides[n - 1], error);
        }
    }
    match &error.field {
        Some(field) => describe(&source.locate(field), field, "", &error.message),
        None => blame_text(source, &error.message),
    }
}

fn blame_override(change: &Override, error: &ReadError) -> SettingsError {
    let value = change.text.split_once('=').map_or("", |(_, value)| value.trim());
    let field = error.field.as_deref().unwrap_or(&change.path);
    let about_key = error.message.contains(" field `"); // a key beside the `type`, not the `type`
    let field = field.strip_suffix(".type").filter(|_| about_key).unwrap_or(field);
    describe(&change.place(), field, value, &error.message)
}

/// Reads the text once more, this time for the position alone.
fn blame_text(source: &Source<'_>, message: &str) -> SettingsError {
    let again = toml::from_str::<PositionProbe>(source.text).err();
    let span = again.as_ref().filter(|again| again.message() == message).and_then(toml::de::Error::span);
    let (place, field, value) = span.map_or_else(|| (source.name.to_owned(), String::new(), ""), |span| at_span(source, &span));
    let described = describe(&place, &field, value, message);
    if described.field == field {
        return described;
    }
    // the reader pointed at the table; the key in it is closer
    SettingsError { place: source.locate(&described.field), ..described }
}

fn at_span<'a>(source: &Source<'a>, span: &Range<usize>) -> (String, String, &'a str) {
    let value = source.text.get(span.clone()).unwrap_or("");
    let value = if value.contains('\n') || value.starts_with('[') { "" } else { value };
    (source.place(span.start), source.field_at(span).unwrap_or_default(), value)
}

/// The recipe as it stands in a file, where the method may be partial.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code)] // read for its errors only
struct PositionProbe {
    seed: Option<u64>,
    output_dir: Option<std::path::PathBuf>,
    model: Option<super::ModelSettings>,
    prompts: Option<super::PromptSettings>,
    sampling: Option<super::SamplingSettings>,
    method: Option<MethodProbe>,
    rollout: Option<super::RolloutSettings>,
    policy: Option<super::PolicySettings>,
    optimizer: Option<super::OptimizerSettings>,
    train: Option<super::TrainSettings>,
    eval: Option<super::EvalSettings>,
    reward: Option<Vec<super::RewardSettings>>,
    eval_reward: Option<Vec<super::RewardSettings>>,
    scoring: Option<super::ScoringSettings>,
    checkpoint: Option<super::CheckpointSettings>,
    debug: Option<super::DebugSettings>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code)]
struct MethodProbe {
    name: Option<String>,
    stochastic: Option<grpo::StochasticSteps>,
    trained: Option<grpo::TrainedSteps>,
    sharing: Option<grpo::StepSharing>,
    noise_level: Option<grpo::NoiseLevel>,
    loss_weight: Option<grpo::LossWeight>,
    initial_noise: Option<grpo::InitialNoise>,
    advantage: Option<grpo::AdvantageScale>,
    ratio: Option<grpo::RatioKind>,
    kl_mask: Option<f64>,
}
