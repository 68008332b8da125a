//! The API keys in use. They are replaced when their file changes; a file that cannot be used leaves
//! them as they are, and is logged once.
//!
//! Not here: the form of the file (`file.rs`).

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use kvfleet_router::Tenants;
use parking_lot::RwLock;
use tokio::time::{MissedTickBehavior, interval};

use super::file::{self, KeyContext};
use super::{ApiKey, AuthError, KeyFileError, KeyTable};

/// A file of keys, and what its keys are checked against.
#[derive(Debug)]
pub(crate) struct KeySource {
    pub(crate) path: PathBuf,
    pub(crate) tenants: Arc<Tenants>,
    /// Longest body of one request.
    pub(crate) body_bytes_max: usize,
}

/// The keys in use.
#[derive(Debug)]
pub(crate) struct KeyRing(RwLock<Arc<KeyTable>>);

/// Reloads the keys of a ring.
pub(crate) struct KeyReload {
    ring: Arc<KeyRing>,
    source: KeySource,
    /// Last text of the file, valid or not.
    text: String,
    /// Last failure to read it, so that it is reported once.
    failure: Option<String>,
}

impl fmt::Debug for KeyReload {
    /// Omits the text of the file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyReload").field("source", &self.source).finish_non_exhaustive()
    }
}

/// Result of a look at the file.
#[derive(Debug)]
pub(super) enum KeyChange {
    /// No change.
    Unchanged,
    /// There are this many keys from now on.
    Reloaded(usize),
    /// The file cannot be used, and the keys stay. Reported once.
    Rejected(KeyFileError),
}

impl KeySource {
    fn parse(&self, text: &str, earlier: &KeyTable) -> Result<KeyTable, KeyFileError> {
        let KeySource { path, tenants, body_bytes_max } = self;
        file::parse(text, &KeyContext { path, tenants, body_bytes_max: *body_bytes_max, earlier })
    }
}

impl KeyRing {
    /// Loads the keys of a file. The second value keeps them current, see [`keep_reloaded`].
    pub(crate) fn load(source: KeySource) -> Result<(Arc<KeyRing>, KeyReload), KeyFileError> {
        let text = file::read(&source.path)?;
        let table = source.parse(&text, &KeyTable::default())?;
        if table.0.is_empty() {
            tracing::warn!(
                file = %source.path.display(),
                "there is no API key, so every caller is refused: make one with `kvfleet keys new`"
            );
        }
        let ring = Arc::new(KeyRing(RwLock::new(Arc::new(table))));
        Ok((Arc::clone(&ring), KeyReload { ring, source, text, failure: None }))
    }

    /// The key that a request presents.
    pub(crate) fn authenticate(&self, headers: &HeaderMap) -> Result<Arc<ApiKey>, AuthError> {
        let table = Arc::clone(&self.0.read());
        table.authenticate(headers)
    }
}

impl KeyReload {
    /// Reads the file, and uses its keys if it has changed. Blocks while it reads.
    pub(super) fn check(&mut self) -> KeyChange {
        let text = match file::read(&self.source.path) {
            Ok(text) => text,
            Err(error) => {
                let failure = Some(error.to_string());
                if self.failure == failure {
                    return KeyChange::Unchanged;
                }
                self.failure = failure;
                return KeyChange::Rejected(error);
            }
        };
        self.failure = None;
        if self.text == text {
            return KeyChange::Unchanged;
        }
        self.text = text;
        let earlier = Arc::clone(&self.ring.0.read());
        match self.source.parse(&self.text, &earlier) {
            Ok(table) => {
                let count = table.0.len();
                *self.ring.0.write() = Arc::new(table);
                KeyChange::Reloaded(count)
            }
            Err(error) => KeyChange::Rejected(error),
        }
    }
}

/// Keeps keys current until dropped, and logs every change.
pub(crate) async fn keep_reloaded(mut reload: KeyReload, every: Duration) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Files may lie on a network: only this task waits for them.
        let checked = tokio::task::spawn_blocking(move || (reload.check(), reload)).await;
        let Ok((change, again)) = checked else {
            tracing::error!("the check of the file of API keys crashed: they are no longer reloaded");
            return;
        };
        reload = again;
        match change {
            KeyChange::Unchanged => {}
            KeyChange::Reloaded(keys) => tracing::info!(keys, "the API keys were reloaded"),
            KeyChange::Rejected(error) => {
                tracing::warn!(%error, "the file of API keys cannot be used, the keys before stay valid");
            }
        }
    }
}
