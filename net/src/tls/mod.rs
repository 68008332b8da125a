//! TLS identity of a process: one cluster authority, one certificate, one key.
//!
//! [`TlsFiles`] are read and checked *together* at start. So a wrong file is an error with a file
//! name and a remedy, and not a failed handshake later. The result yields rustls configurations for
//! control calls, QUIC and TLS over TCP, and tonic's for clients that connect once. Both directions
//! are always authenticated. The certificate can be renewed while configurations are in use (`tls/renew.rs`).
//!
//! Not here: making certificates (`cli/`) and opening connections.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::sign::CertifiedKey;
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};
use rustls::{CertificateError, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tonic::transport::{Certificate, ClientTlsConfig};

pub mod access;
mod authority;
pub mod callers;
mod client;
mod client_verifier;
mod der;
mod ending_stream;
pub mod listen;
mod names;
mod reload;
mod renew;
mod server;

pub use client::{file_roots, https_client};
pub use client_verifier::ClientVerifier;
pub use names::{NamesError, Role, RoleKind, role_of, tenant_name};
pub use reload::{RENEW_INTERVAL, keep_renewed};
pub use renew::{Renewal, RenewalOutcome};
pub use server::ServerCertificate;

use authority::{PeerVerifier, TrustedAuthority, Verifiers, revoked_file};
pub use ending_stream::EndingStream;
use renew::CertResolver;

/// DNS name in the certificates of the cluster's own processes, which every client requires.
/// Addresses change, the cluster does not. Each certificate with it also names one [`Role`]. A
/// tenant's certificate ([`tenant_name`]) must not carry it: its holder could pose as a node.
pub const SERVER_NAME: &str = "kvfleet";

/// ALPN protocol of the block path. Incompatible versions have different numbers, so their
/// handshakes fail early.
pub const ALPN: &[u8] = b"kvfleet/1";

/// ALPN protocol of the block path over TCP, where operations follow one another on a connection.
pub const ALPN_TCP: &[u8] = b"kvfleet-tcp/1";

/// ALPN protocol of HTTPS ports for clients outside the cluster.
pub const ALPN_HTTP: &[u8] = b"http/1.1";

/// ALPN protocol of control calls: HTTP/2, as gRPC needs.
pub const ALPN_GRPC: &[u8] = b"h2";

/// The three PEM files of a process. If there is a list of revoked certificates beside the
/// authority's, with the ending `.crl`, it is read too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate of the cluster authority.
    pub ca: PathBuf,
    /// Certificate chain of this process, issued by that authority for [`SERVER_NAME`], or for
    /// tenants.
    pub cert: PathBuf,
    /// Private key of that certificate.
    pub key: PathBuf,
}

/// Why the files of an identity cannot be used. Every message names the file and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {what} {}: {cause}; check the path and its permissions", path.display())]
    Unreadable {
        /// Expected content of the file.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Error of the system.
        cause: String,
    },
    /// A file holds no PEM section of the wanted kind.
    #[error("{} holds no {what} in PEM form ({cause}); {remedy}", path.display())]
    NotPem {
        /// Expected content of the file.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why the content was rejected.
        cause: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The key does not belong to the certificate.
    #[error(
        "key {} does not belong to certificate {}: {cause}; use the pair that was made together",
        key.display(), cert.display()
    )]
    KeyMismatch {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Error of the TLS library.
        cause: String,
    },
    /// The list of revoked certificates cannot be used.
    #[error("{} is no list of revoked certificates ({cause}); restore the one that `kvfleet certs revoke` wrote",
        path.display())]
    NoRevokedList {
        /// The file.
        path: PathBuf,
        /// Why the content was rejected.
        cause: String,
    },
    /// Peers in the cluster would not accept the certificate.
    #[error("certificate {} is not accepted under authority {}: {cause}; {remedy}", cert.display(), ca.display())]
    Refused {
        /// The certificate's file.
        cert: PathBuf,
        /// The authority's file.
        ca: PathBuf,
        /// Why they would not.
        cause: String,
        /// What to do.
        remedy: &'static str,
    },
}

/// A checked identity, the basis of TLS configurations. Clones share one identity: a renewal takes
/// effect in all of them, and in every configuration for QUIC and TLS over TCP.
#[derive(Clone)]
pub struct Identity {
    ca_pem: Arc<[u8]>,
    authority: Arc<TrustedAuthority>,
    certificate: Arc<CertResolver>,
    clock: Arc<dyn TimeProvider>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identity(..)")
    }
}

/// The only place that names the cryptography provider. tonic takes the process default, so it is
/// installed here too; a second install changes no state.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The provider of bulk connections, the cheapest cipher first. AES-128 needs slightly less CPU
/// than AES-256 and half of ChaCha20, which stays for processors without AES.
fn bulk_provider() -> Arc<CryptoProvider> {
    use rustls::crypto::ring::cipher_suite;
    let mut provider = CryptoProvider::clone(&provider());
    provider.cipher_suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(provider)
}

impl TlsFiles {
    /// Reads and checks the three files.
    ///
    /// # Errors
    /// Names the first file that is missing, malformed, mismatched or not accepted.
    pub fn load(&self) -> Result<Identity, TlsError> {
        let ca = read("cluster authority", &self.ca)?;
        let cert = read("certificate", &self.cert)?;
        let key = read("private key", &self.key)?;
        let pems = IdentityPems { ca, cert, key, revoked: self.read_revoked()? };
        IdentityBuilder { files: self }.identity(pems, Arc::new(DefaultTimeProvider))
    }

    /// The list of revoked certificates; `None` if there is none.
    fn read_revoked(&self) -> Result<Option<Vec<u8>>, TlsError> {
        let path = revoked_file(&self.ca);
        match read("list of revoked certificates", &path) {
            Err(_) if !path.exists() => Ok(None),
            list => list.map(Some),
        }
    }

    /// Like [`Self::load`], for a server process with this role.
    ///
    /// # Errors
    /// As [`Self::load`], and when the certificate is of another role or number.
    pub fn load_server(&self, own: &Role) -> Result<Identity, TlsError> {
        let identity = self.load()?;
        if identity.role().may_be(own) {
            identity.certificate.bind(own.clone());
            return Ok(identity);
        }
        let cause = format!("it is one of {}, and this process is {own}", identity.role());
        let remedy = "give this process one with the subject alternative names \"kvfleet\" and that of its own role \
                      and number";
        Err(IdentityBuilder { files: self }.refused_error(&cause, remedy))
    }
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    let unreadable = |error: std::io::Error| TlsError::Unreadable {
        what,
        path: path.to_owned(),
        cause: error.to_string(),
    };
    std::fs::read(path).map_err(unreadable)
}

/// The text of the files of an identity.
struct IdentityPems {
    ca: Vec<u8>,
    cert: Vec<u8>,
    key: Vec<u8>,
    revoked: Option<Vec<u8>>,
}

/// Builds an identity; holds the file names for errors.
struct IdentityBuilder<'a> {
    files: &'a TlsFiles,
}

impl IdentityBuilder<'_> {
    fn identity(&self, pems: IdentityPems, clock: Arc<dyn TimeProvider>) -> Result<Identity, TlsError> {
        let verifiers = self.verifiers(&Arc::new(self.roots(&pems.ca)?), pems.revoked)?;
        let (role, certified) = self.certified_key(&verifiers, clock.as_ref(), &pems.cert, &pems.key)?;
        let certificate = Arc::new(CertResolver::new(pems.cert, pems.key, certified, role));
        let authority = Arc::new(TrustedAuthority::new(verifiers));
        Ok(Identity { ca_pem: pems.ca.into(), authority, certificate, clock })
    }

    fn verifiers(&self, roots: &Arc<RootCertStore>, revoked: Option<Vec<u8>>) -> Result<Verifiers, TlsError> {
        Verifiers::new(roots, revoked)
            .map_err(|cause| TlsError::NoRevokedList { path: revoked_file(&self.files.ca), cause })
    }

    /// The role, certificate and key, checked as a peer would.
    fn certified_key(
        &self,
        verifiers: &Verifiers,
        clock: &dyn TimeProvider,
        cert_pem: &[u8],
        key_pem: &[u8],
    ) -> Result<(Role, CertifiedKey), TlsError> {
        let remedy = "give the certificate file of this process";
        let chain = certificates("certificate", &self.files.cert, cert_pem, remedy)?;
        let key = private_key(&self.files.key, key_pem)?;
        let role = self.check_accepted(verifiers, clock, &chain)?;
        Ok((role, certified_key(&self.files.cert, &self.files.key, chain, key)?))
    }

    fn roots(&self, ca_pem: &[u8]) -> Result<RootCertStore, TlsError> {
        let remedy = "give the certificate (not the key) of the cluster authority";
        let mut roots = RootCertStore::empty();
        for certificate in certificates("certificate", &self.files.ca, ca_pem, remedy)? {
            roots.add(certificate).map_err(|error| TlsError::NotPem {
                what: "usable certificate",
                path: self.files.ca.clone(),
                cause: error.to_string(),
                remedy,
            })?;
        }
        Ok(roots)
    }

    fn refused_error(&self, error: &dyn std::fmt::Display, remedy: &'static str) -> TlsError {
        TlsError::Refused {
            cert: self.files.cert.clone(),
            ca: self.files.ca.clone(),
            cause: error.to_string(),
            remedy,
        }
    }

    /// Verifies our own certificate as a peer will; returns its role.
    fn check_accepted(
        &self,
        verifiers: &Verifiers,
        clock: &dyn TimeProvider,
        chain: &[CertificateDer<'static>],
    ) -> Result<Role, TlsError> {
        let role = chain.first().map_or(Err(NamesError::Unreadable), |leaf| role_of(leaf));
        let verified = if let Ok(Role::Tenants(_)) = role {
            // A tenant's certificate is for clients only.
            verifiers.verify_client(chain, now(clock))
        } else {
            if let Err(error @ (NamesError::Malformed(_) | NamesError::TenantAndMember(_))) = &role {
                return Err(self.refused_error(error, NEW_NAMES));
            }
            verifiers.verify_server(chain, now(clock))
        };
        verified.map_err(|error| match &error {
            rustls::Error::InvalidCertRevocationList(_) => {
                TlsError::NoRevokedList { path: revoked_file(&self.files.ca), cause: error.to_string() }
            }
            _ => self.refused_error(&error, remedy(&error)),
        })?;
        role.map_err(|error| self.refused_error(&error, NEW_NAMES))
    }
}

/// What to do about a certificate without a clear role.
const NEW_NAMES: &str = "issue a new one with the right names";

/// The time of `clock`. If it fails, 1970, so that no certificate is valid yet.
fn now(clock: &dyn TimeProvider) -> UnixTime {
    clock.current_time().unwrap_or_else(|| UnixTime::since_unix_epoch(std::time::Duration::ZERO))
}

fn remedy(error: &rustls::Error) -> &'static str {
    use CertificateError as Bad;
    match error {
        rustls::Error::InvalidCertificate(Bad::UnknownIssuer | Bad::BadSignature) => {
            "both files must come from the same cluster authority"
        }
        rustls::Error::InvalidCertificate(Bad::Expired | Bad::ExpiredContext { .. } | Bad::Revoked) => {
            "issue a new certificate"
        }
        rustls::Error::InvalidCertificate(Bad::NotValidYet | Bad::NotValidYetContext { .. }) => {
            "check the clock of this machine"
        }
        rustls::Error::InvalidCertificate(Bad::NotValidForName | Bad::NotValidForNameContext { .. }) => {
            "issue it with the subject alternative names \"kvfleet\" and that of a role"
        }
        _ => "issue a new certificate under this authority",
    }
}

fn certificates(
    what: &'static str,
    path: &Path,
    pem: &[u8],
    remedy: &'static str,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let not_pem = |cause: String| TlsError::NotPem { what, path: path.to_owned(), cause, remedy };
    let found = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| not_pem(error.to_string()))?;
    if found.is_empty() { Err(not_pem("no certificate section found".to_owned())) } else { Ok(found) }
}

/// The private key in the PEM text of this file.
fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| TlsError::NotPem {
        what: "private key",
        path: path.to_owned(),
        cause: error.to_string(),
        remedy: "give the key file that was made with the certificate",
    })
}

/// A certificate with its key; the paths are those of their files.
fn certified_key(
    cert: &Path,
    key: &Path,
    chain: Vec<CertificateDer<'static>>,
    private_key: PrivateKeyDer<'static>,
) -> Result<CertifiedKey, TlsError> {
    CertifiedKey::from_der(chain, private_key, &provider()).map_err(|error| TlsError::KeyMismatch {
        cert: cert.to_owned(),
        key: key.to_owned(),
        cause: error.to_string(),
    })
}

/// Stand-ins for file names in errors about PEM text in memory.
fn memory_files() -> TlsFiles {
    TlsFiles { ca: "memory:ca".into(), cert: "memory:cert".into(), key: "memory:key".into() }
}

pub(crate) fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("the constant is a valid DNS name")
}

impl Identity {
    /// Makes an identity from PEM text in memory, with the checks of [`TlsFiles::load`]. For tests,
    /// and for processes that make their own certificates.
    ///
    /// # Errors
    /// As [`TlsFiles::load`], with `memory:` names in place of files.
    pub fn from_pem(ca: &[u8], cert: &[u8], key: &[u8]) -> Result<Identity, TlsError> {
        Identity::from_pem_at(ca, cert, key, Arc::new(DefaultTimeProvider))
    }

    /// Like [`Self::from_pem`], with the caller's clock, which handshakes use too.
    ///
    /// # Errors
    /// As [`Identity::from_pem`].
    pub fn from_pem_at(
        ca: &[u8],
        cert: &[u8],
        key: &[u8],
        clock: Arc<dyn TimeProvider>,
    ) -> Result<Identity, TlsError> {
        let pems = IdentityPems { ca: ca.to_vec(), cert: cert.to_vec(), key: key.to_vec(), revoked: None };
        IdentityBuilder { files: &memory_files() }.identity(pems, clock)
    }

    /// The role of our own certificate.
    #[must_use]
    pub fn role(&self) -> Role {
        self.certificate.role()
    }

    /// Configuration of a control server: TLS 1.3, mutual, [`ALPN_GRPC`] (`listen.rs`).
    #[must_use]
    pub fn grpc_server(&self) -> rustls::ServerConfig {
        self.server(provider(), ALPN_GRPC)
    }

    /// Like [`Self::grpc_server`], for callers outside the cluster, and with TLS 1.2 allowed. With
    /// `clients`, each needs a certificate that it accepts.
    #[must_use]
    pub fn grpc_server_for_outsiders(&self, clients: Option<ClientVerifier>) -> rustls::ServerConfig {
        let config = rustls::ServerConfig::builder_with_details(provider(), Arc::clone(&self.clock))
            .with_safe_default_protocol_versions()
            .expect("ring supports TLS 1.2 and 1.3");
        let config = match clients {
            Some(ClientVerifier(verifier)) => config.with_client_cert_verifier(verifier),
            None => config.with_no_client_auth(),
        };
        let mut config = config
            .with_cert_resolver(Arc::clone(&self.certificate) as Arc<dyn rustls::server::ResolvesServerCert>);
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.alpn_protocols = vec![ALPN_GRPC.to_vec()];
        config
    }

    /// Configuration of a control client of servers with this role: TLS 1.3, mutual, [`ALPN_GRPC`];
    /// connect to [`SERVER_NAME`].
    #[must_use]
    pub fn grpc_client(&self, server: Role) -> rustls::ClientConfig {
        self.client(provider(), ALPN_GRPC, server)
    }

    /// Configuration of a tonic channel for a single connection. It presents the current
    /// certificate, also after a renewal, and requires [`SERVER_NAME`], and neither a role of the
    /// server nor that it is not revoked. `channel::connect_lazily`
    /// makes long-lived channels.
    #[must_use]
    pub fn client_tls(&self) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .domain_name(SERVER_NAME)
            .ca_certificate(Certificate::from_pem(&self.ca_pem))
            .identity(self.certificate.tonic())
    }

    /// Configuration of a QUIC server: TLS 1.3, mutual, [`ALPN`].
    #[must_use]
    pub fn quic_server(&self) -> rustls::ServerConfig {
        self.server(provider(), ALPN)
    }

    /// Configuration of a QUIC client: TLS 1.3, mutual, [`ALPN`]; connect to [`SERVER_NAME`]. The
    /// server must be a node.
    #[must_use]
    pub fn quic_client(&self) -> rustls::ClientConfig {
        self.client(provider(), ALPN, Role::Node(None))
    }

    /// Configuration of a server of TLS over TCP: TLS 1.3, mutual, [`ALPN_TCP`]. After the
    /// handshake only data records follow, so their keys may be extracted.
    #[must_use]
    pub fn tcp_server(&self) -> rustls::ServerConfig {
        let mut config = self.server(bulk_provider(), ALPN_TCP);
        config.enable_secret_extraction = true;
        config
    }

    /// Configuration of a client of TLS over TCP, like [`Self::tcp_server`]; connect to
    /// [`SERVER_NAME`]. The server must be a node.
    #[must_use]
    pub fn tcp_client(&self) -> rustls::ClientConfig {
        let mut config = self.client(bulk_provider(), ALPN_TCP, Role::Node(None));
        config.enable_secret_extraction = true;
        config
    }

    /// Every connection does a full handshake: a resumed session could outlive its certificate.
    fn server(&self, provider: Arc<CryptoProvider>, alpn: &[u8]) -> rustls::ServerConfig {
        let mut config = rustls::ServerConfig::builder_with_details(provider, Arc::clone(&self.clock))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("ring supports TLS 1.3")
            .with_client_cert_verifier(PeerVerifier::of_clients(&self.authority))
            .with_cert_resolver(Arc::clone(&self.certificate) as Arc<dyn rustls::server::ResolvesServerCert>);
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.alpn_protocols = vec![alpn.to_vec()];
        config
    }

    /// Configuration of a client of servers with this role.
    fn client(&self, provider: Arc<CryptoProvider>, alpn: &[u8], server: Role) -> rustls::ClientConfig {
        let mut config = rustls::ClientConfig::builder_with_details(provider, Arc::clone(&self.clock))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("ring supports TLS 1.3")
            // It verifies as the library's own, and then the role.
            .dangerous()
            .with_custom_certificate_verifier(PeerVerifier::of_servers(&self.authority, server))
            .with_client_cert_resolver(
                Arc::clone(&self.certificate) as Arc<dyn rustls::client::ResolvesClientCert>
            );
        config.resumption = rustls::client::Resumption::disabled();
        config.alpn_protocols = vec![alpn.to_vec()];
        config
    }
}

#[cfg(test)]
mod tests;
