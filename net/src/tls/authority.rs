//! The authority that a process trusts, less the certificates that it revoked.
//!
//! The list of revoked certificates (RFC 5280, section 5) lies beside the authority's certificate:
//! `ca.crl` beside `ca.crt`. It is read again with the process's own certificate (`renew/`). Each
//! handshake uses the current list, and open connections end with the validity of their peer's
//! certificate. Not here: the permissions of roles (`access/`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use tokio::sync::watch;
use tokio::time::sleep;

use super::der::{list_issuer, not_after};
use super::names::role_of;
use super::{Identity, Role, now, provider, server_name};

/// How often the validity of an open connection's certificate is compared with the clock, which may
/// be set meanwhile.
const VALIDITY_INTERVAL: Duration = Duration::from_secs(1);

/// The list of revoked certificates that belongs to an authority's certificate file.
pub(super) fn revoked_file(ca: &Path) -> PathBuf {
    ca.with_extension("crl")
}

/// The authority, with the current list of revoked certificates.
#[derive(Debug)]
pub(super) struct TrustedAuthority {
    subjects: Vec<DistinguishedName>,
    current: watch::Sender<Arc<Verifiers>>,
}

/// Verifiers under one list of revoked certificates.
#[derive(Debug)]
pub(super) struct Verifiers {
    roots: Arc<RootCertStore>,
    revoked_pem: Option<Vec<u8>>,
    servers: Arc<WebPkiServerVerifier>,
    clients: Arc<dyn ClientCertVerifier>,
}

impl Verifiers {
    /// Verifiers under these roots.
    ///
    /// # Errors
    /// In words, when the list is none.
    pub(super) fn new(roots: &Arc<RootCertStore>, revoked_pem: Option<Vec<u8>>) -> Result<Verifiers, String> {
        let lists = revoked_pem.as_deref().map_or(Ok(Vec::new()), |pem| {
            CertificateRevocationListDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>()
        });
        let lists = lists.map_err(|error| error.to_string())?;
        if revoked_pem.is_some() && lists.is_empty() {
            return Err("no list section found".to_owned());
        }
        let subjects = roots.subjects();
        let is_ours = |list: &CertificateRevocationListDer<'_>| {
            let issuer = list_issuer(list).map(DistinguishedName::in_sequence);
            issuer.is_some_and(|issuer| subjects.iter().any(|subject| subject.as_ref() == issuer.as_ref()))
        };
        if !lists.iter().all(is_ours) {
            return Err("it is of another authority".to_owned());
        }
        let servers = WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), provider());
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider());
        // While an authority is replaced, only one of the two may have a list.
        let servers = servers.with_crls(lists.iter().cloned()).allow_unknown_revocation_status().build();
        let clients = clients.with_crls(lists).allow_unknown_revocation_status().build();
        Ok(Verifiers {
            roots: Arc::clone(roots),
            revoked_pem,
            servers: servers.map_err(|error| error.to_string())?,
            clients: clients.map_err(|error| error.to_string())?,
        })
    }

    pub(super) fn roots(&self) -> &Arc<RootCertStore> {
        &self.roots
    }

    /// The list of revoked certificates in PEM form; `None` without one.
    pub(super) fn revoked_pem(&self) -> Option<&[u8]> {
        self.revoked_pem.as_deref()
    }

    /// Verifies the certificate of a server of the cluster.
    pub(super) fn verify_server(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<(), Error> {
        let (leaf, intermediates) = split(chain)?;
        self.servers.verify_server_cert(leaf, intermediates, &server_name(), &[], now).map(drop)
    }

    /// Verifies the certificate of a client.
    pub(super) fn verify_client(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<(), Error> {
        let (leaf, intermediates) = split(chain)?;
        self.clients.verify_client_cert(leaf, intermediates, now).map(drop)
    }
}

fn split<'a, 'b>(
    chain: &'a [CertificateDer<'b>],
) -> Result<(&'a CertificateDer<'b>, &'a [CertificateDer<'b>]), Error> {
    chain.split_first().ok_or(Error::NoCertificatesPresented)
}

impl TrustedAuthority {
    pub(super) fn new(verifiers: Verifiers) -> TrustedAuthority {
        let subjects = verifiers.roots.subjects();
        TrustedAuthority { subjects, current: watch::Sender::new(Arc::new(verifiers)) }
    }

    pub(super) fn verifiers(&self) -> Arc<Verifiers> {
        Arc::clone(&self.current.borrow())
    }

    /// Uses these verifiers from now on, also for open connections.
    pub(super) fn replace(&self, verifiers: Verifiers) {
        self.current.send_replace(Arc::new(verifiers));
    }
}

/// Verifies peers in handshakes, under the current list of revoked certificates.
#[derive(Debug)]
pub(super) struct PeerVerifier {
    authority: Arc<TrustedAuthority>,
    /// Required role of a server. Clients may have any: the access table decides on their calls.
    server: Option<Role>,
}

impl PeerVerifier {
    /// Verifies servers of this role.
    pub(super) fn of_servers(authority: &Arc<TrustedAuthority>, role: Role) -> Arc<PeerVerifier> {
        Arc::new(PeerVerifier { authority: Arc::clone(authority), server: Some(role) })
    }

    /// Verifies clients, of every role.
    pub(super) fn of_clients(authority: &Arc<TrustedAuthority>) -> Arc<PeerVerifier> {
        Arc::new(PeerVerifier { authority: Arc::clone(authority), server: None })
    }

    fn verifiers(&self) -> Arc<Verifiers> {
        self.authority.verifiers()
    }
}

/// A server has another role than the called one.
struct WrongServer(String);

/// The TLS library prints causes in this form.
impl fmt::Debug for WrongServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for WrongServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongServer {}

/// Checks that a server's certificate has the wanted role.
fn check_server_role(leaf: &[u8], wanted: &Role) -> Result<(), String> {
    match role_of(leaf) {
        Ok(role) if role.may_be(wanted) => Ok(()),
        Ok(role) => Err(format!(
            "{wanted} is called, and the server's certificate is one of {role}: correct the address, or issue the \
             server's certificate with the name {:?}",
            wanted.name()
        )),
        Err(error) => Err(format!("the server's certificate is not accepted: {error}; issue a new one")),
    }
}

impl ServerCertVerifier for PeerVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.verifiers().servers.verify_server_cert(leaf, intermediates, name, ocsp, now)?;
        if let Some(wanted) = &self.server {
            check_server_role(leaf, wanted)
                .map_err(|error| CertificateError::Other(OtherError(Arc::new(WrongServer(error)))))?;
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifiers().servers.verify_tls12_signature(message, leaf, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifiers().servers.verify_tls13_signature(message, leaf, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifiers().servers.supported_verify_schemes()
    }
}

impl ClientCertVerifier for PeerVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.authority.subjects
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verifiers().clients.verify_client_cert(leaf, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifiers().clients.verify_tls12_signature(message, leaf, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifiers().clients.verify_tls13_signature(message, leaf, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifiers().clients.supported_verify_schemes()
    }
}

impl Identity {
    /// Waits until the certificate of a connected client ends or is revoked, and returns why. The
    /// chain is the one of the handshake, leaf first.
    pub async fn client_end(self, chain: Vec<CertificateDer<'static>>) -> Error {
        self.peer_end(chain, Verifiers::verify_client).await
    }

    /// Like [`Self::client_end`], for the certificate of a server.
    pub async fn server_end(self, chain: Vec<CertificateDer<'static>>) -> Error {
        self.peer_end(chain, Verifiers::verify_server).await
    }

    async fn peer_end(
        self,
        chain: Vec<CertificateDer<'static>>,
        verify: fn(&Verifiers, &[CertificateDer<'_>], UnixTime) -> Result<(), Error>,
    ) -> Error {
        let mut current = self.authority.current.subscribe();
        let end = chain.first().and_then(|leaf| not_after(leaf));
        loop {
            let verifiers = Arc::clone(&current.borrow_and_update());
            if let Err(error) = verify(&verifiers, &chain, now(self.clock.as_ref())) {
                return error;
            }
            // Signatures are verified again only when the list or the clock may change the result.
            loop {
                tokio::select! {
                    _ = current.changed() => break, // its sender lives as long as this identity
                    () = sleep(VALIDITY_INTERVAL) => {}
                }
                if end.is_none_or(|end| now(self.clock.as_ref()) > end) {
                    break;
                }
            }
        }
    }
}
