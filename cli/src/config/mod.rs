//! Reads a process's configuration: defaults, then the TOML file, then `KVFLEET_*`, then flags.
//!
//! Every key is checked against the defaults, so that a typo is an error with the nearest valid
//! key. Not here: the meaning of keys, which `RouterConfig`, `NodeConfig` and `InstanceConfig`
//! document and validate.

mod keys;
mod layers;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

pub use keys::KeyError;
pub use layers::{Override, environment_overrides, parse_override};

/// Name of the table with the settings of every process (logs, metrics, tracing).
pub const PROCESS_TABLE: &str = "process";

/// Why a configuration is refused. Each message names the source of the value and the fix.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}: {cause}; give a readable file with --config", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{}:{line}:{column}: not valid TOML: {cause}; correct that line", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// Column in characters, counted from 1.
        column: usize,
        /// Expected syntax, on one line.
        cause: String,
    },
    /// A key is unknown or a value has the wrong type.
    #[error("{origin}: {error}")]
    Key {
        /// File, environment variable or flag.
        origin: String,
        /// Problem with the key.
        error: KeyError,
    },
    /// A well-typed value that the service refuses.
    #[error("{origin}: {cause}; correct that key")]
    Value {
        /// The layers that were merged.
        origin: String,
        /// Expected value.
        cause: String,
    },
    /// The defaults cannot be serialised: a defect of the program, not of the input.
    #[error("the built-in defaults cannot be read: {0}")]
    Defaults(String),
}

/// Settings of every process, in addition to those of its service.
#[derive(Clone, Debug, Serialize, serde::Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct ProcessConfig {
    /// `host:port` of the Prometheus text endpoint; empty for none, port 0 for any free one.
    pub metrics_listen: String,
    /// Loopback `host:port` for drain requests; empty for none, port 0 for a free one.
    pub drain_listen: String,
    /// OTLP gRPC collector (`http://host:4317`); empty for no export.
    pub otlp: String,
    /// Log filter in the syntax of `RUST_LOG`.
    pub log: String,
    /// Log as JSON objects, one per line.
    pub log_json: bool,
}

impl Default for ProcessConfig {
    fn default() -> Self {
        Self {
            metrics_listen: "127.0.0.1:0".to_owned(),
            drain_listen: String::new(),
            otlp: String::new(),
            log: "info".to_owned(),
            log_json: false,
        }
    }
}

impl ProcessConfig {
    /// Checks everything that can be checked without listening.
    ///
    /// # Errors
    /// If `drain_listen` is not a loopback address. Any caller of that address can end the work of
    /// this process, and callers are not authenticated.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let at = self.drain_listen.parse::<SocketAddr>();
        if self.drain_listen.is_empty() || at.is_ok_and(|at| at.ip().is_loopback()) {
            return Ok(());
        }
        let cause = format!(
            "{:?} is not a loopback address: give one, as in 127.0.0.1:7409, or \"\" for none",
            self.drain_listen
        );
        Err(ConfigError::Value { origin: "process.drain_listen".to_owned(), cause })
    }
}

/// Configuration of a service and its process.
#[derive(Clone, Debug)]
pub struct Settings<T> {
    /// Logs, metrics, tracing.
    pub process: ProcessConfig,
    /// The service's own keys.
    pub service: T,
}

/// Reads the layers above `T::default()`: the file (if any), then `overrides` in order.
pub fn load<T>(file: Option<&Path>, overrides: &[Override]) -> Result<Settings<T>, ConfigError>
where
    T: Default + Serialize + DeserializeOwned,
{
    let schema = schema::<T>()?;
    let mut merged = Table::new();
    let mut origins = vec![];
    if let Some(path) = file {
        let origin = path.display().to_string();
        let table = read_table(path)?;
        keys::check(&table, &schema).map_err(|error| ConfigError::Key { origin: origin.clone(), error })?;
        layers::merge(&mut merged, table);
        origins.push(origin);
    }
    for layer in overrides {
        let fail = |error| ConfigError::Key { origin: layer.origin.clone(), error };
        let table = layer.to_table(&schema).map_err(fail)?;
        keys::check(&table, &schema).map_err(fail)?;
        layers::merge(&mut merged, table);
        origins.push(layer.origin.clone());
    }
    deserialize(merged, &origins.join(" + "))
}

/// A service's configuration as TOML that [`load`] reads back.
pub fn to_toml<T: Serialize>(settings: &Settings<T>) -> Result<String, ConfigError> {
    let as_table = |value: Result<Value, toml::ser::Error>| match value {
        Ok(Value::Table(table)) => Ok(table),
        Ok(_) => Err(ConfigError::Defaults("a configuration must be a table".to_owned())),
        Err(cause) => Err(ConfigError::Defaults(cause.to_string())),
    };
    let mut table = as_table(Value::try_from(&settings.service))?;
    table.insert(PROCESS_TABLE.to_owned(), Value::Table(as_table(Value::try_from(&settings.process))?));
    toml::to_string(&table).map_err(|cause| ConfigError::Defaults(cause.to_string()))
}

/// The valid keys, each with a value of its type, as JSON because it keeps absent options.
fn schema<T: Default + Serialize>() -> Result<serde_json::Value, ConfigError> {
    let to_json = |value: Result<serde_json::Value, serde_json::Error>| {
        value.map_err(|cause| ConfigError::Defaults(cause.to_string()))
    };
    let mut schema = to_json(serde_json::to_value(T::default()))?;
    let process = to_json(serde_json::to_value(ProcessConfig::default()))?;
    match schema.as_object_mut() {
        Some(object) => {
            object.insert(PROCESS_TABLE.to_owned(), process);
            Ok(schema)
        }
        None => Err(ConfigError::Defaults("a configuration must be a table".to_owned())),
    }
}

fn read_table(path: &Path) -> Result<Table, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|cause| ConfigError::Unreadable { path: path.to_owned(), cause })?;
    text.parse::<Table>().map_err(|cause| syntax(path, &text, &cause))
}

/// Position as editors count it; the parser's own text spans several lines.
fn syntax(path: &Path, text: &str, cause: &toml::de::Error) -> ConfigError {
    let at = cause.span().map_or(0, |span| span.start);
    let before = text.get(..at).unwrap_or_default();
    let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
    ConfigError::Syntax {
        path: path.to_owned(),
        line: before.matches('\n').count() + 1,
        column,
        cause: cause.message().replace('\n', ", "),
    }
}

/// Splits off the process table, and deserialises both parts.
fn deserialize<T: DeserializeOwned>(mut merged: Table, origin: &str) -> Result<Settings<T>, ConfigError> {
    let origin = if origin.is_empty() { "built-in defaults" } else { origin };
    let fail = |cause: toml::de::Error| ConfigError::Value {
        origin: origin.to_owned(),
        cause: plain_types(&cause.to_string().trim_end().replace('\n', " ")),
    };
    let process = merged.remove(PROCESS_TABLE).unwrap_or_else(|| Value::Table(Table::new()));
    Ok(Settings {
        process: process.try_into().map_err(fail)?,
        service: Value::Table(merged).try_into().map_err(fail)?,
    })
}

/// Replaces Rust types in serde's text by plain words.
fn plain_types(text: &str) -> String {
    const TYPES: [(&str, &str); 4] = [
        ("expected u16", "expected a whole number from 0 to 65535"),
        ("expected u32", "expected a whole number from 0 to 4294967295"),
        ("expected u64", "expected a whole number from 0"),
        ("expected usize", "expected a whole number from 0"),
    ];
    TYPES.iter().fold(text.to_owned(), |text, (of_serde, plain)| text.replace(of_serde, plain))
}

#[cfg(test)]
mod tests;
