//! Certificates of clients outside the cluster, such as Envoy, under a CA of their own.
//!
//! They have no role: the listener decides what its clients may do. Not here: certificates of the
//! cluster (`mod.rs`).

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::server::WebPkiClientVerifier;
use rustls::server::danger;

use super::{TlsError, file_roots, provider};

/// Accepts the certificates that the CAs of a file issued for clients.
#[derive(Clone)]
pub struct ClientVerifier(pub(super) Arc<dyn danger::ClientCertVerifier>);

impl fmt::Debug for ClientVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientVerifier(..)")
    }
}

impl ClientVerifier {
    /// Reads the CAs of a PEM file.
    ///
    /// # Errors
    /// A file that cannot be read or has no usable certificate.
    pub fn load(path: &Path) -> Result<ClientVerifier, TlsError> {
        let roots = Arc::new(file_roots(path)?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
        let verifier = verifier.map_err(|error| TlsError::NotPem {
            what: "usable certificate",
            path: path.to_owned(),
            cause: error.to_string(),
            remedy: "give the certificate (not the key) of the CA",
        })?;
        Ok(ClientVerifier(verifier))
    }
}
