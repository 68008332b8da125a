//! Layers above the file: environment variables and flags, each one key with a value.
//!
//! Not here: the valid keys (`keys.rs`), and the order of layers (`mod.rs`).

use serde_json::Value as Json;
use toml::{Table, Value};

use super::keys::{self, KeyError};

/// Prefix of environment variables that set configuration keys.
const ENVIRONMENT_PREFIX: &str = "KVFLEET_";

/// Variables with the prefix that the command line reads itself.
const NOT_KEYS: [&str; 3] = ["KVFLEET_CLUSTER", "KVFLEET_TLS_DIR", "KVFLEET_CONFIG"];

/// One key set outside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// Source of the value, for messages: a flag or a variable.
    pub origin: String,
    /// Path of the key, joined with dots.
    pub key: String,
    /// The value as typed.
    pub text: String,
}

impl Override {
    /// Value of a flag for a key.
    pub fn flag(flag: &str, key: &str, text: impl Into<String>) -> Self {
        Self { origin: format!("flag {flag}"), key: key.to_owned(), text: text.into() }
    }

    /// Table with only this key, typed like the key's default.
    pub(super) fn to_table(&self, schema: &Json) -> Result<Table, KeyError> {
        let value = parse_as(&self.text, keys::default_at(schema, &self.key));
        let mut names = self.key.rsplit('.');
        let last = names.next().unwrap_or_default().to_owned();
        let innermost = Table::from_iter([(last, value)]);
        Ok(names.fold(innermost, |inner, name| Table::from_iter([(name.to_owned(), Value::Table(inner))])))
    }
}

/// Parses `--set key.path=value`.
pub fn parse_override(text: &str) -> Result<Override, String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => Ok(Override::flag("--set", key.trim(), value.trim())),
        _ => Err(format!("`{text}` is not KEY=VALUE, for example --set process.log=debug")),
    }
}

/// All `KVFLEET_*` variables as overrides: `KVFLEET_PROCESS__LOG` sets `process.log`.
pub fn environment_overrides(variables: impl Iterator<Item = (String, String)>) -> Vec<Override> {
    let mut found: Vec<Override> = variables
        .filter(|(name, _)| name.starts_with(ENVIRONMENT_PREFIX) && !NOT_KEYS.contains(&name.as_str()))
        .map(|(name, text)| Override {
            key: name[ENVIRONMENT_PREFIX.len()..].to_lowercase().replace("__", "."),
            origin: format!("environment variable {name}"),
            text,
        })
        .collect();
    found.sort_by(|a, b| a.key.cmp(&b.key));
    found
}

/// Merges `upper` over `lower`, table by table.
pub(super) fn merge(lower: &mut Table, upper: Table) {
    for (name, value) in upper {
        match (lower.get_mut(&name), value) {
            (Some(Value::Table(below)), Value::Table(above)) => merge(below, above),
            (_, value) => {
                lower.insert(name, value);
            }
        }
    }
}

/// A typed value if the text is one, unless the key takes a string.
fn parse_as(text: &str, default: Option<&Json>) -> Value {
    let plain = || Value::String(text.to_owned());
    if matches!(default, Some(Json::String(_))) {
        return plain();
    }
    let parsed = format!("value = {text}").parse::<Table>();
    parsed.ok().and_then(|mut table| table.remove("value")).unwrap_or_else(plain)
}
