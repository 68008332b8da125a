//! How the gateway calls engines: TLS for `https` URLs, and the key that engines ask for.
//!
//! Probes and requests share it. Not here: addresses of engines (`endpoints/`), and the connection
//! pool (`openai/upstream.rs`).

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderValue};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use kvfleet_net::secrets::{self, SecretError};
use kvfleet_net::tls::{TlsError, file_roots, https_client};
use rustls::{ClientConfig, RootCertStore};
use serde::{Deserialize, Serialize};

/// Calls to engines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpstreamConfig {
    /// PEM file with the CAs of engines with `https` URLs; empty for those of the system.
    pub ca: PathBuf,
    /// File with the key that engines ask for (`--api-key` of vLLM and SGLang), in one line; empty
    /// for none. It replaces the `authorization` of callers.
    pub api_key_file: PathBuf,
}

/// Why engines cannot be called.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamConfigError {
    /// The CA cannot be used.
    #[error("gateway.upstream.ca: {0}")]
    Ca(#[from] TlsError),
    /// The file of the key cannot be read, or all local users can read it.
    #[error("gateway.upstream.api_key_file: {0}")]
    KeyFile(#[from] SecretError),
    /// The file does not hold a key.
    #[error("gateway.upstream.api_key_file: {} does not hold a key, which is one line without spaces", .0.display())]
    Key(PathBuf),
}

/// TLS and key for calls to engines.
#[derive(Clone)]
pub(crate) struct EngineAccess {
    tls: ClientConfig,
    /// Value of `authorization`; marked as sensitive.
    authorization: Option<HeaderValue>,
}

impl fmt::Debug for EngineAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineAccess").field("has_key", &self.authorization.is_some()).finish_non_exhaustive()
    }
}

impl EngineAccess {
    /// Reads the files.
    pub(crate) fn load(config: &UpstreamConfig) -> Result<EngineAccess, UpstreamConfigError> {
        let roots = if config.ca.as_os_str().is_empty() { system_roots() } else { file_roots(&config.ca)? };
        let tls = https_client(roots);
        let path = &config.api_key_file;
        if path.as_os_str().is_empty() {
            return Ok(EngineAccess { tls, authorization: None });
        }
        let key = secrets::load(path)?;
        let is_key = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
        let value = is_key.then(|| HeaderValue::from_str(&format!("Bearer {key}")).ok()).flatten();
        let mut value = value.ok_or_else(|| UpstreamConfigError::Key(path.clone()))?;
        value.set_sensitive(true);
        Ok(EngineAccess { tls, authorization: Some(value) })
    }

    /// A connector for URLs with `http` or `https`.
    pub(crate) fn connector(&self, connect_timeout: Duration) -> HttpsConnector<HttpConnector> {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect_timeout));
        connector.enforce_http(false);
        HttpsConnectorBuilder::new()
            .with_tls_config(self.tls.clone())
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector)
    }

    /// Adds the key of engines to a request.
    pub(crate) fn authorize(&self, headers: &mut HeaderMap) {
        if let Some(value) = &self.authorization {
            headers.insert(AUTHORIZATION, value.clone());
        }
    }
}

/// CAs of the system. Those that cannot be read are left out; without any, each handshake fails with
/// an error that says so.
fn system_roots() -> RootCertStore {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (trusted, ignored) = roots.add_parsable_certificates(found.certs);
    tracing::debug!(trusted, ignored, errors = found.errors.len(), "read the CAs of the system");
    roots
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;
    use kvfleet_testkit::write_secret;

    use super::*;

    #[test]
    fn a_key_is_one_line_and_stays_hidden() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let shown = folder.path().display().to_string();
        let load = || {
            let config = UpstreamConfig { api_key_file: path.clone(), ..UpstreamConfig::default() };
            EngineAccess::load(&config)
        };
        says("a key of engines that is not there", &load().unwrap_err(), &[&shown]);
        for none in ["", "two words", "two\nlines"] {
            write_secret(&path, none);
            says("a key of engines that is none", &load().unwrap_err(), &[&shown]);
        }
        write_secret(&path, "5ec1e7\n");
        let access = load().unwrap();
        let mut headers = HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static("Bearer other"))]);
        access.authorize(&mut headers);
        assert_eq!(headers.get_all(AUTHORIZATION).iter().collect::<Vec<_>>(), ["Bearer 5ec1e7"]);
        assert!(!format!("{access:?} {headers:?}").contains("5ec1e7"));
    }
}
