//! Certificate of a server for clients outside the cluster, which know it by a public or company CA.
//!
//! It names hosts and no role. Clients are not authenticated by TLS. It is renewed while it is in use
//! (`renew/`). Not here: the identity of the cluster's own processes (`mod.rs`), and listening
//! (`listen/`).

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::{ALPN_HTTP, TlsError, certificates, certified_key, private_key, provider, read};

/// A checked certificate with its key. Clones share it: a renewal takes effect in all of them, and in
/// every configuration.
#[derive(Clone)]
pub struct ServerCertificate {
    cert: PathBuf,
    key: PathBuf,
    current: Arc<ServerCertResolver>,
}

/// Presents the current certificate.
struct ServerCertResolver(RwLock<ServerCertPair>);

#[derive(Clone)]
struct ServerCertPair {
    cert_pem: Arc<[u8]>,
    key_pem: Arc<[u8]>,
    certified: Arc<CertifiedKey>,
}

impl std::fmt::Debug for ServerCertificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerCertificate").field("cert", &self.cert).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for ServerCertResolver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServerCertResolver(..)")
    }
}

impl ResolvesServerCert for ServerCertResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.pair().certified)
    }
}

impl ServerCertResolver {
    fn pair(&self) -> ServerCertPair {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Checks that the key belongs to the certificate. Its names and times concern clients only.
fn parse(cert: &Path, key: &Path, cert_pem: &[u8], key_pem: &[u8]) -> Result<ServerCertPair, TlsError> {
    let remedy = "give the file with the certificate of the server, and those of its intermediate CAs";
    let chain = certificates("certificate", cert, cert_pem, remedy)?;
    let certified = certified_key(cert, key, chain, private_key(key, key_pem)?)?;
    Ok(ServerCertPair { cert_pem: cert_pem.into(), key_pem: key_pem.into(), certified: Arc::new(certified) })
}

impl ServerCertificate {
    /// Reads the two PEM files and checks that they belong together.
    ///
    /// # Errors
    /// Names the first file that is missing, malformed or mismatched.
    pub fn load(cert: &Path, key: &Path) -> Result<ServerCertificate, TlsError> {
        let (cert_pem, key_pem) = (read("certificate", cert)?, read("private key", key)?);
        let pair = parse(cert, key, &cert_pem, &key_pem)?;
        let current = Arc::new(ServerCertResolver(RwLock::new(pair)));
        Ok(ServerCertificate { cert: cert.to_owned(), key: key.to_owned(), current })
    }

    /// Files of the certificate and of its key.
    pub(super) fn paths(&self) -> (&PathBuf, &PathBuf) {
        (&self.cert, &self.key)
    }

    /// Presents this certificate and key from now on. Returns whether they differ from before; after
    /// an error the old ones stay in use.
    pub(super) fn renew(&self, cert_pem: &[u8], key_pem: &[u8]) -> Result<bool, TlsError> {
        let before = self.current.pair();
        if *before.cert_pem == *cert_pem && *before.key_pem == *key_pem {
            return Ok(false);
        }
        let pair = parse(&self.cert, &self.key, cert_pem, key_pem)?;
        *self.current.0.write().unwrap_or_else(PoisonError::into_inner) = pair;
        Ok(true)
    }

    /// Configuration of an HTTPS server: TLS 1.2 or 1.3, [`ALPN_HTTP`], no certificates of clients.
    #[must_use]
    pub fn http_server(&self) -> ServerConfig {
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("ring supports TLS 1.2 and 1.3")
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(&self.current) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![ALPN_HTTP.to_vec()];
        config
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;
    use rcgen::{CertificateParams, KeyPair};

    use super::*;
    use crate::tls::{Renewal, RenewalOutcome};

    fn issue() -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["api.example.org".to_owned()]).unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn files_are_checked_together_and_renewed() {
        let folder = tempfile::tempdir().unwrap();
        let (cert, key) = (folder.path().join("tls.crt"), folder.path().join("tls.key"));
        let shown = folder.path().display().to_string();
        let write = |cert_pem: &str, key_pem: &str| {
            std::fs::write(&cert, cert_pem).unwrap();
            std::fs::write(&key, key_pem).unwrap();
        };
        let refused = || ServerCertificate::load(&cert, &key).expect_err("must be refused");
        says("a server's certificate that is not there", &refused(), &[&shown]);
        let ((first, first_key), (second, second_key)) = (issue(), issue());
        write("", &first_key);
        says("a server's certificate that is no PEM", &refused(), &[&shown]);
        write(&first, &second_key);
        says("a server's key of another certificate", &refused(), &[&shown]);

        write(&first, &first_key);
        let certificate = ServerCertificate::load(&cert, &key).unwrap();
        let presented = || certificate.current.pair().certified.cert.clone();
        let (before, mut renewal) = (presented(), Renewal::of_server(certificate.clone()));
        assert_eq!(renewal.check(), RenewalOutcome::Unchanged);
        write(&second, &first_key);
        assert!(matches!(renewal.check(), RenewalOutcome::Rejected(TlsError::KeyMismatch { .. })));
        assert_eq!(renewal.check(), RenewalOutcome::Unchanged, "reported twice");
        assert_eq!(presented(), before, "the old certificate must stay");
        write(&second, &second_key);
        assert_eq!((renewal.check(), renewal.check()), (RenewalOutcome::Renewed, RenewalOutcome::Unchanged));
        assert_ne!(presented(), before);
        assert!(!format!("{renewal:?}").contains("PRIVATE"));
    }
}
