//! TLS of clients towards servers outside the cluster, such as engines behind https.
//!
//! Servers are checked by name. Not here: calls of the cluster's own processes (`mod.rs`).

use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};

use super::{TlsError, certificates, provider, read};

/// Configuration of an HTTPS client that trusts these CAs. It sends no certificate.
#[must_use]
pub fn https_client(roots: RootCertStore) -> ClientConfig {
    ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("ring supports TLS 1.2 and 1.3")
        .with_root_certificates(Arc::new(roots))
        .with_no_client_auth()
}

/// The CAs of a PEM file.
///
/// # Errors
/// A file that cannot be read or has no usable certificate.
pub fn file_roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let remedy = "give the certificate (not the key) of the CA";
    let mut roots = RootCertStore::empty();
    for certificate in certificates("certificate", path, &read("certificate of a CA", path)?, remedy)? {
        roots.add(certificate).map_err(|error| TlsError::NotPem {
            what: "usable certificate",
            path: path.to_owned(),
            cause: error.to_string(),
            remedy,
        })?;
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn a_file_of_no_ca_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (path, shown) = (folder.path().join("ca.pem"), folder.path().display().to_string());
        let refused = || file_roots(&path).expect_err("must be refused");
        says("a CA of engines that is not there", &refused(), &[&shown]);
        std::fs::write(&path, "no certificate").unwrap();
        says("a CA of engines that is no PEM", &refused(), &[&shown]);
    }
}
