//! As much of JSON Schema as docs/reward_protocol.schema.json uses; a keyword that is not understood is a failure, never ignored.

#![allow(dead_code, reason = "every test takes what it needs")]

use serde_json::Value;

/// Whether `message` obeys the definition `name`.
pub fn check(name: &str, message: &Value) -> Result<(), String> {
    let path = crate::common::root().join("docs/reward_protocol.schema.json");
    let schema: Value = serde_json::from_slice(&std::fs::read(path).expect("the schema")).expect("json");
    obeys(&schema, &schema["$defs"][name], message, "message")
}

fn obeys(root: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    for (keyword, rule) in schema.as_object().ok_or_else(|| format!("{at}: no schema"))? {
        let number = || value.as_f64().unwrap_or(f64::NAN);
        let fine = match keyword.as_str() {
            "description" | "title" => true,
            "$ref" => {
                let target = rule.as_str().and_then(|path| root.pointer(path.trim_start_matches('#'))).expect("a definition");
                return obeys(root, target, value, at);
            }
            "type" => is(rule.as_str().expect("a type"), value),
            "const" => value == rule,
            "enum" => rule.as_array().expect("values").contains(value),
            "minimum" => !value.is_number() || number() >= rule.as_f64().expect("a number"),
            "exclusiveMinimum" => !value.is_number() || number() > rule.as_f64().expect("a number"),
            "minLength" => value.as_str().is_none_or(|text| text.len() as u64 >= rule.as_u64().expect("a number")),
            "minItems" => value.as_array().is_none_or(|items| items.len() as u64 >= rule.as_u64().expect("a number")),
            "required" => rule.as_array().expect("names").iter().all(|name| value.get(name.as_str().expect("a name")).is_some()),
            "oneOf" => rule.as_array().expect("schemas").iter().filter(|one| obeys(root, one, value, at).is_ok()).count() == 1,
            "items" => {
                for (i, item) in value.as_array().into_iter().flatten().enumerate() {
                    obeys(root, rule, item, &format!("{at}[{i}]"))?;
                }
                true
            }
            "properties" => {
                for (name, rule) in rule.as_object().expect("properties") {
                    value.get(name).map_or(Ok(()), |value| obeys(root, rule, value, &format!("{at}.{name}")))?;
                }
                true
            }
            "additionalProperties" => {
                for (name, value) in value.as_object().into_iter().flatten() {
                    obeys(root, rule, value, &format!("{at}.{name}"))?;
                }
                true
            }
            other => return Err(format!("{at}: the keyword `{other}` is not understood")),
        };
        if !fine {
            return Err(format!("{at}: `{keyword}` {rule} does not hold"));
        }
    }
    Ok(())
}

fn is(kind: &str, value: &Value) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_u64() || value.is_i64(),
        other => panic!("type `{other}`"),
    }
}
