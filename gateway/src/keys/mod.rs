//! API keys of callers: each names a tenant, and the models and limits of its requests.
//!
//! - `file.rs`: the file of keys, and new keys.
//! - `reload.rs`: the keys in use, reloaded when the file changes.
//!
//! A key is known by its SHA-256 only (ADR 0086). Not here: HTTP answers (`crate::openai`), and the
//! hashes of a tenant's prompts (`kvfleet_router::Tenants`).

mod file;
mod reload;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use kv_core::id::TenantId;
use kvfleet_net::secrets::sha256;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use file::{KeyEntry, KeyEntryError, KeyFileError, NewKey, NewKeyError};
pub(crate) use reload::{KeyReload, KeyRing, KeySource, keep_reloaded};

/// Longest key that is hashed, in bytes: new keys have 72, and a longer header would only cost time.
const KEY_BYTES_MAX: usize = 256;

/// The caller of a request.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    /// A caller without a key, where none are required.
    Anyone,
    /// The holder of a key.
    Key(Arc<ApiKey>),
}

/// One API key. The key itself is not stored.
#[derive(Debug)]
pub(crate) struct ApiKey {
    name: String,
    tenant: TenantId,
    /// The `cache_salt` of its requests; `None` for tenant 0.
    salt: Option<String>,
    /// Models that it may use; `None` for all.
    models: Option<BTreeSet<String>>,
    /// Limit of its requests in flight.
    requests: Option<KeyLimit>,
    /// Limit of the bytes of its bodies in flight.
    body_bytes: Option<KeyLimit>,
}

/// A limit, and its free part. Reloading the file keeps it while its value stays.
#[derive(Clone, Debug)]
struct KeyLimit {
    max: usize,
    free: Arc<Semaphore>,
}

/// All keys of a file, by the SHA-256 of each. The lookup compares hashes, so its time tells nothing
/// about a key.
#[derive(Default)]
pub(crate) struct KeyTable(HashMap<[u8; 32], Arc<ApiKey>>);

/// Why a caller is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AuthError {
    /// The request has no key.
    #[error("this API needs a key: send the header `Authorization: Bearer KEY`")]
    Missing,
    /// No such key is in use.
    #[error("the API key is not valid: send another one as `Authorization: Bearer KEY`")]
    Unknown,
}

/// A limit of a key is reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KeyBusy {
    /// Too many requests in flight.
    #[error("the API key {name:?} is at its limit of requests in flight ({max}); retry when one has ended")]
    Requests {
        /// Name of the key.
        name: String,
        /// Its limit.
        max: usize,
    },
    /// Too many bytes of bodies in flight.
    #[error(
        "the API key {name:?} is at its limit of bytes in flight ({max}); retry when a request has ended"
    )]
    Bytes {
        /// Name of the key.
        name: String,
        /// Its limit.
        max: usize,
    },
}

impl fmt::Debug for KeyTable {
    /// Omits the hashes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.values().map(|key| &key.name)).finish()
    }
}

impl KeyLimit {
    /// A limit; `earlier` is that of the same key before.
    fn new(max: usize, earlier: Option<&KeyLimit>) -> KeyLimit {
        match earlier.filter(|earlier| earlier.max == max) {
            Some(same) => same.clone(),
            None => KeyLimit { max, free: Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS))) },
        }
    }
}

impl ApiKey {
    /// Admits one request. The permit is held while it is in flight; `None` without a limit.
    pub(crate) fn admit(&self) -> Result<Option<OwnedSemaphorePermit>, KeyBusy> {
        let Some(KeyLimit { max, free }) = &self.requests else { return Ok(None) };
        let permit = free.clone().try_acquire_owned();
        permit.map(Some).map_err(|_| KeyBusy::Requests { name: self.name.clone(), max: *max })
    }

    /// Admits bytes of a body, as [`ApiKey::admit`].
    pub(crate) fn admit_bytes(&self, bytes: u32) -> Result<Option<OwnedSemaphorePermit>, KeyBusy> {
        let Some(KeyLimit { max, free }) = &self.body_bytes else { return Ok(None) };
        let permit = free.clone().try_acquire_many_owned(bytes);
        permit.map(Some).map_err(|_| KeyBusy::Bytes { name: self.name.clone(), max: *max })
    }
}

impl Caller {
    /// Tenant of its requests.
    pub(crate) fn tenant(&self) -> TenantId {
        self.key().map_or(TenantId(0), |key| key.tenant)
    }

    /// The `cache_salt` that the gateway adds to its requests; `None` for none.
    pub(crate) fn own_salt(&self) -> Option<&str> {
        self.key()?.salt.as_deref()
    }

    /// Whether it may use this model.
    pub(crate) fn may_use(&self, model: &str) -> bool {
        self.models().is_none_or(|models| models.contains(model))
    }

    /// Whether it may use certain models only.
    pub(crate) fn has_models(&self) -> bool {
        self.models().is_some()
    }

    fn models(&self) -> Option<&BTreeSet<String>> {
        self.key()?.models.as_ref()
    }

    /// Its key, if it has one.
    pub(crate) fn key(&self) -> Option<&ApiKey> {
        match self {
            Caller::Anyone => None,
            Caller::Key(key) => Some(key),
        }
    }
}

impl KeyTable {
    /// The key that a request presents.
    fn authenticate(&self, headers: &HeaderMap) -> Result<Arc<ApiKey>, AuthError> {
        let key = presented_key(headers)?;
        self.0.get(&sha256(key)).cloned().ok_or(AuthError::Unknown)
    }
}

/// The key of `Authorization: Bearer KEY`.
fn presented_key(headers: &HeaderMap) -> Result<&[u8], AuthError> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().ok_or(AuthError::Missing)?.as_bytes();
    // With two headers, another component might read the other one.
    if values.next().is_some() {
        return Err(AuthError::Unknown);
    }
    let space = value.iter().position(|byte| *byte == b' ').ok_or(AuthError::Unknown)?;
    let (scheme, key) = (&value[..space], value[space..].trim_ascii());
    let is_key = scheme.eq_ignore_ascii_case(b"bearer") && (1..=KEY_BYTES_MAX).contains(&key.len());
    if is_key { Ok(key) } else { Err(AuthError::Unknown) }
}
