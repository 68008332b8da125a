//! The file of API keys, in TOML: one table `[[keys]]` for each key, with its SHA-256 and rights.
//!
//! Errors never show text of the file, because a key may have been written into it by mistake. Not
//! here: reading it again when it changes (`reload.rs`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_core::id::TenantId;
use kvfleet_net::secrets::{self, SecretError, hex, sha256};
use kvfleet_router::Tenants;
use serde::{Deserialize, Serialize};

use super::{ApiKey, KeyLimit, KeyTable};

/// Longest file in bytes: about ten thousand keys, which are read in milliseconds.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Longest name of a key in bytes: it appears in errors and logs.
const NAME_BYTES_MAX: usize = 64;

/// Begins every new key, so that scanners for leaked secrets find it.
const KEY_PREFIX: &str = "kvfleet-";

/// Why a file of keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It cannot be read, or all local users can read it.
    #[error(transparent)]
    File(#[from] SecretError),
    /// It is not a list of keys.
    #[error(
        "{}, line {line}: {problem}; write a table [[keys]] with name, sha256 and tenant for each key, as `kvfleet \
         keys new` prints it",
        path.display()
    )]
    Form {
        /// The file.
        path: PathBuf,
        /// Line of the problem.
        line: usize,
        /// The problem.
        problem: String,
    },
    /// A key is invalid.
    #[error("{}: {error}", path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// The problem.
        error: KeyEntryError,
    },
}

/// An invalid key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the API key {name:?} {problem}")]
pub struct KeyEntryError {
    name: String,
    problem: String,
}

/// The file.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct KeysDocument {
    keys: Vec<KeyEntry>,
}

/// One key of the file.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// Name of the key, for errors and logs.
    pub name: String,
    /// SHA-256 of the key, in 64 hexadecimal digits.
    pub sha256: String,
    /// Tenant of its requests: 0, or one that `engines.tenants` has with this number.
    pub tenant: u32,
    /// Models that it may use; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<String>>,
    /// Most requests in flight; no limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_max: Option<u32>,
    /// Most bytes of the bodies of its requests in flight; no limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bodies_bytes_max: Option<usize>,
}

/// A fresh key. It is shown once, and not stored.
pub struct NewKey {
    /// The key, for its caller.
    pub key: String,
    /// Its table, for the file.
    pub table: String,
}

/// Why no key was made.
#[derive(Debug, thiserror::Error)]
pub enum NewKeyError {
    /// Invalid rights.
    #[error(transparent)]
    Entry(#[from] KeyEntryError),
    /// No random bytes.
    #[error(transparent)]
    Random(#[from] SecretError),
}

impl NewKey {
    /// Makes a key of 256 random bits with these rights; `sha256` of the entry is replaced.
    ///
    /// # Errors
    /// [`NewKeyError`]: an invalid entry, or no random bytes.
    pub fn new(entry: KeyEntry) -> Result<NewKey, NewKeyError> {
        let key = format!("{KEY_PREFIX}{}", secrets::random_hex()?);
        let entry = KeyEntry { sha256: hex(&sha256(key.as_bytes())), ..entry };
        entry.check()?;
        let table = toml::to_string(&KeysDocument { keys: vec![entry.clone()] });
        let table = table.map_err(|error| entry.error(format!("cannot be written as TOML: {error}")))?;
        Ok(NewKey { key, table })
    }
}

impl KeyEntry {
    fn error(&self, problem: impl Into<String>) -> KeyEntryError {
        KeyEntryError { name: self.name.clone(), problem: problem.into() }
    }

    /// Checks the values that need no other configuration. Returns the hash.
    fn check(&self) -> Result<[u8; 32], KeyEntryError> {
        let is_name = (1..=NAME_BYTES_MAX).contains(&self.name.len())
            && self.name.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_name {
            let name = self.name.chars().take(NAME_BYTES_MAX).collect();
            let problem =
                format!("has no usable name: write 1 to {NAME_BYTES_MAX} ASCII characters without spaces");
            return Err(KeyEntryError { name, problem });
        }
        if self.models.as_ref().is_some_and(Vec::is_empty) {
            return Err(self.error("has an empty list of models; leave `models` out to allow all"));
        }
        if self.requests_max == Some(0) {
            return Err(self.error("may have no request in flight; remove its table to disable it"));
        }
        parse_hash(&self.sha256).ok_or_else(|| {
            self.error(
                "has no sha256 of 64 hexadecimal digits; `kvfleet keys new` prints one with each new key",
            )
        })
    }
}

fn parse_hash(digits: &str) -> Option<[u8; 32]> {
    secrets::from_hex(digits)?.try_into().ok()
}

/// Reads the text of a file of keys.
pub(super) fn read(path: &Path) -> Result<String, KeyFileError> {
    Ok(secrets::load_text(path, FILE_BYTES_MAX)?)
}

/// What keys are checked against, and the keys before.
pub(super) struct KeyContext<'a> {
    pub(super) path: &'a Path,
    pub(super) tenants: &'a Tenants,
    /// Longest body of one request.
    pub(super) body_bytes_max: usize,
    /// Keys before: limits that stay keep their count of requests in flight.
    pub(super) earlier: &'a KeyTable,
}

/// Parses the text of a file of keys.
pub(super) fn parse(text: &str, context: &KeyContext<'_>) -> Result<KeyTable, KeyFileError> {
    let document: KeysDocument = toml::from_str(text).map_err(|error| {
        let before = error.span().map_or("", |span| text.get(..span.start).unwrap_or_default());
        KeyFileError::Form {
            path: context.path.to_owned(),
            line: before.matches('\n').count() + 1,
            problem: without_text(error.message()).to_owned(),
        }
    })?;
    let earlier: HashMap<&str, &ApiKey> =
        context.earlier.0.values().map(|key| (key.name.as_str(), key.as_ref())).collect();
    let mut table = KeyTable::default();
    let mut names = HashSet::new();
    for entry in &document.keys {
        let refused = |error| KeyFileError::Entry { path: context.path.to_owned(), error };
        let hash = entry.check().map_err(refused)?;
        if !names.insert(&entry.name) {
            return Err(refused(entry.error("is there twice; give each key its own name")));
        }
        let key = context.key(entry, earlier.get(entry.name.as_str()).copied()).map_err(refused)?;
        if table.0.insert(hash, Arc::new(key)).is_some() {
            let problem = "has the sha256 of another key; make a new one with `kvfleet keys new`";
            return Err(refused(entry.error(problem)));
        }
    }
    Ok(table)
}

/// An error of the TOML library without its parts that may quote the file: those behind a colon, and
/// in backquotes unless they name a field of ours.
fn without_text(message: &str) -> &str {
    let head = message.split(':').next().unwrap_or_default();
    match head.split_once('`') {
        Some((before, _)) if before != "missing field " => before.trim_end().trim_end_matches(", expected"),
        _ => head,
    }
}

impl KeyContext<'_> {
    /// The key of an entry with valid values; `earlier` is the key with its name before.
    fn key(&self, entry: &KeyEntry, earlier: Option<&ApiKey>) -> Result<ApiKey, KeyEntryError> {
        let tenant = TenantId(entry.tenant);
        let salt = self.tenants.salt(tenant);
        // Without a salt it would share the engines' caches with tenant 0.
        if salt.is_none() && entry.tenant != 0 {
            return Err(entry.error(format!(
                "is of tenant {0}, which engines.tenants does not have; add {{ tenant = {0}, salt, secret_file }} \
                 there, and restart the router",
                entry.tenant
            )));
        }
        if entry.bodies_bytes_max.is_some_and(|max| max < self.body_bytes_max) {
            return Err(entry.error(format!(
                "has a bodies_bytes_max below the limit of one body ({}); set at least that",
                self.body_bytes_max
            )));
        }
        let requests = earlier.and_then(|key| key.requests.as_ref());
        let body_bytes = earlier.and_then(|key| key.body_bytes.as_ref());
        Ok(ApiKey {
            name: entry.name.clone(),
            tenant,
            salt: salt.map(str::to_owned),
            models: entry.models.as_ref().map(|models| models.iter().cloned().collect::<BTreeSet<_>>()),
            requests: entry.requests_max.map(|max| KeyLimit::new(max as usize, requests)),
            body_bytes: entry.bodies_bytes_max.map(|max| KeyLimit::new(max, body_bytes)),
        })
    }
}
