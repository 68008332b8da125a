//! Checks the keys and value types of a table against a configuration's defaults.
//!
//! Not here: the source of the table, and the validity of well-typed values.

use serde_json::Value as Json;
use toml::{Table, Value};

/// Least similarity of a suggestion (Jaro-Winkler, 0 to 1).
const NEAREST_SIMILARITY_MIN: f64 = 0.7;

/// Keys of before the field's terms were used, and their names now; the table goes with version 1.0.
/// The old name is the last part of the key's path.
const RENAMED_KEYS: [(&str, &str); 5] = [
    ("doors", "gateway"),
    ("truth", "anti_entropy"),
    ("tray_bytes", "bounce_buffer_bytes"),
    ("lent_bytes", "in_place_bytes"),
    ("asks_to_decode", "checks_decode_admission"),
];

/// Problem with one key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The key is unknown.
    #[error("unknown key `{key}`; {hint}")]
    Unknown {
        /// Path of the key, joined with dots.
        key: String,
        /// The nearest valid key, or all valid ones.
        hint: String,
    },
    /// The value has the wrong type.
    #[error("key `{key}` is {got}, expected {expected}")]
    Type {
        /// Path of the key, joined with dots.
        key: String,
        /// Type that was found.
        got: String,
        /// Expected type, with the default as an example.
        expected: String,
    },
}

/// Checks every key of `table` recursively. An empty table among the defaults accepts any key (a
/// map), `null` accepts any value.
pub(super) fn check(table: &Table, schema: &Json) -> Result<(), KeyError> {
    check_level(table, schema, schema, "")
}

fn check_level(table: &Table, level: &Json, root: &Json, path: &str) -> Result<(), KeyError> {
    let Some(valid) = level.as_object().filter(|valid| !valid.is_empty()) else {
        return Ok(());
    };
    for (name, value) in table {
        let key = join(path, name);
        let Some(default) = valid.get(name) else {
            return Err(KeyError::Unknown { hint: hint(&key, name, valid.keys(), path, root), key });
        };
        match (value, default) {
            (Value::Table(inner), Json::Object(_)) => check_level(inner, default, root, &key)?,
            _ if type_matches(value, default) => {}
            _ => return Err(type_error(key, value, default)),
        }
    }
    Ok(())
}

/// All key paths of the schema, joined with dots.
pub(super) fn paths(schema: &Json) -> Vec<String> {
    let mut found = vec![];
    collect(schema, "", &mut found);
    found
}

/// The default value at a dotted path.
pub(super) fn default_at<'a>(schema: &'a Json, path: &str) -> Option<&'a Json> {
    path.split('.').try_fold(schema, |level, name| level.get(name))
}

fn collect(level: &Json, path: &str, found: &mut Vec<String>) {
    for (name, value) in level.as_object().into_iter().flatten() {
        let key = join(path, name);
        collect(value, &key, found);
        found.push(key);
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Nearest key by name at this level, or by path elsewhere; otherwise the keys of this level.
fn hint<'a>(
    key: &str,
    name: &str,
    level: impl Iterator<Item = &'a String> + Clone,
    path: &str,
    root: &Json,
) -> String {
    let renamed = RENAMED_KEYS.iter().find(|(old, _)| *old == name);
    if let Some((_, new)) = renamed.filter(|(_, new)| level.clone().any(|valid| valid == new)) {
        return format!("it is named `{}` now: rename it", join(path, new));
    }
    let everywhere = paths(root);
    let here = level.clone().map(|valid| (strsim::jaro_winkler(name, valid), join(path, valid)));
    let last = |full: &str| full.rsplit('.').next().unwrap_or_default().to_owned();
    let elsewhere = everywhere.iter().map(|full| {
        let by_path = strsim::jaro_winkler(key, full);
        // A correct name at the wrong level beats a similar name at this level.
        let by_name = if last(full) == name { 0.99 } else { 0.0 };
        (f64::max(by_path * 0.95, by_name), full.clone())
    });
    let best = here.chain(elsewhere).max_by(|a, b| a.0.total_cmp(&b.0));
    match best {
        Some((similarity, nearest)) if similarity >= NEAREST_SIMILARITY_MIN => {
            format!("the nearest valid key is `{nearest}`")
        }
        _ => format!("valid keys here: {}", level.cloned().collect::<Vec<_>>().join(", ")),
    }
}

fn type_matches(value: &Value, default: &Json) -> bool {
    match default {
        Json::Null => true,
        Json::Bool(_) => value.is_bool(),
        Json::Number(number) if number.is_f64() => value.is_float() || value.is_integer(),
        Json::Number(_) => value.is_integer(),
        Json::String(_) => value.is_str(),
        Json::Array(_) => value.is_array(),
        Json::Object(_) => value.is_table(),
    }
}

fn type_error(key: String, value: &Value, default: &Json) -> KeyError {
    let kind = match default {
        Json::Bool(_) => "true or false",
        Json::Number(number) if number.is_f64() => "a number",
        Json::Number(_) => "a whole number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "a table",
        Json::Null => "another value",
    };
    KeyError::Type {
        key,
        got: format!("{} ({})", article(value.type_str()), shorten(&value.to_string())),
        expected: format!("{kind} (default {})", shorten(&default.to_string())),
    }
}

fn article(kind: &str) -> String {
    let vowel = kind.starts_with(['a', 'e', 'i', 'o', 'u']);
    format!("{} {kind}", if vowel { "an" } else { "a" })
}

/// Keeps messages on one line for any value.
fn shorten(text: &str) -> String {
    const SHOWN_CHARS_MAX: usize = 40;
    let line = text.replace('\n', " ");
    match line.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
