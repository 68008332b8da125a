//! Renewal of a process's certificate and key, and of the list of revoked certificates, while it
//! runs.
//!
//! Every handshake asks for the current certificate. New connections use the new one, and existing
//! connections go on until the old one ends or is revoked. An unusable
//! certificate (truncated, mismatched, not accepted) changes no
//! state and is reported once. The authority is never renewed: another authority is another
//! cluster. Not here: the interval of checks (`reload.rs`), and tonic's own TLS, which keeps its
//! first certificate.

use std::mem::{Discriminant, discriminant};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::{Identity, IdentityBuilder, Role, ServerCertificate, TlsError, TlsFiles, memory_files, read};

/// The certificate and key of a process, exchangeable at run time.
pub(super) struct CertResolver {
    current: RwLock<CertPair>,
    /// The role and number of this process, if it is a server.
    own: OnceLock<Role>,
}

#[derive(Clone)]
struct CertPair {
    cert_pem: Arc<[u8]>,
    key_pem: Arc<[u8]>,
    certified: Arc<CertifiedKey>,
    role: Role,
}

impl CertResolver {
    pub(super) fn new(
        cert_pem: Vec<u8>,
        key_pem: Vec<u8>,
        certified: CertifiedKey,
        role: Role,
    ) -> CertResolver {
        CertResolver {
            current: RwLock::new(CertPair::new(cert_pem, key_pem, certified, role)),
            own: OnceLock::new(),
        }
    }

    /// Binds renewals to the role and number of this process.
    pub(super) fn bind(&self, own: Role) {
        let _ = self.own.set(own); // a process has one
    }

    fn pair(&self) -> CertPair {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn certified(&self) -> Arc<CertifiedKey> {
        self.pair().certified
    }

    pub(super) fn role(&self) -> Role {
        self.pair().role
    }

    pub(super) fn tonic(&self) -> tonic::transport::Identity {
        let pair = self.pair();
        tonic::transport::Identity::from_pem(pair.cert_pem, pair.key_pem)
    }
}

impl CertPair {
    fn new(cert_pem: Vec<u8>, key_pem: Vec<u8>, certified: CertifiedKey, role: Role) -> CertPair {
        CertPair { cert_pem: cert_pem.into(), key_pem: key_pem.into(), certified: Arc::new(certified), role }
    }
}

impl std::fmt::Debug for CertResolver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shown(..)")
    }
}

impl ResolvesServerCert for CertResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.certified())
    }
}

impl ResolvesClientCert for CertResolver {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.certified())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl Identity {
    /// Presents this certificate and key from now on, if they pass the start-up checks under the
    /// current authority. Returns whether they differ from before.
    ///
    /// # Errors
    /// As [`Identity::from_pem`]; the old certificate stays in use.
    pub fn renew(&self, cert_pem: &[u8], key_pem: &[u8]) -> Result<bool, TlsError> {
        self.renew_from(&memory_files(), cert_pem, key_pem)
    }

    fn renew_from(&self, files: &TlsFiles, cert_pem: &[u8], key_pem: &[u8]) -> Result<bool, TlsError> {
        let builder = IdentityBuilder { files };
        let verifiers = self.authority.verifiers();
        let (role, certified) = builder.certified_key(&verifiers, self.clock.as_ref(), cert_pem, key_pem)?;
        let before = self.certificate.pair();
        if *before.cert_pem == *cert_pem && *before.key_pem == *key_pem {
            return Ok(false);
        }
        // Peers accept this process by its own role, and would refuse another one. The certificate
        // before may have had no number.
        let own = self.certificate.own.get().unwrap_or(&before.role);
        if !matches!(own, Role::Tenants(_)) && !role.may_be(own) {
            let cause = format!("it is one of {role}, and this process is one of {own}");
            return Err(builder.refused_error(&cause, "restart this process to change its role"));
        }
        let pair = CertPair::new(cert_pem.to_vec(), key_pem.to_vec(), certified, role);
        *self.certificate.current.write().unwrap_or_else(PoisonError::into_inner) = pair;
        Ok(true)
    }

    /// Refuses the certificates on this list (PEM) from now on, and ends open connections of theirs.
    /// Returns whether the list differs from before. If it is no list of this authority, the old one
    /// stays in use.
    fn revoke_from(&self, files: &TlsFiles, list_pem: &[u8]) -> Result<bool, TlsError> {
        let before = self.authority.verifiers();
        if before.revoked_pem() == Some(list_pem) {
            return Ok(false);
        }
        let builder = IdentityBuilder { files };
        let verifiers = builder.verifiers(before.roots(), Some(list_pem.to_vec()))?;
        // The signature of the list is verified together with a certificate. Whether ours is valid
        // concerns its renewal.
        let chain = &self.certificate.certified().cert;
        match builder.check_accepted(&verifiers, self.clock.as_ref(), chain) {
            Err(error @ TlsError::NoRevokedList { .. }) => return Err(error),
            Ok(_) | Err(_) => self.authority.replace(verifiers),
        }
        Ok(true)
    }
}

/// Renews an identity, or the certificate of a server, from its files.
pub struct Renewal {
    target: RenewalTarget,
    /// Kind of the last rejection and the files, so that it is reported once: the error's text
    /// holds the time of the check.
    reported: Option<(Discriminant<TlsError>, Option<CertFiles>)>,
}

/// The subject of a renewal.
#[derive(Debug)]
enum RenewalTarget {
    Identity { identity: Identity, files: TlsFiles },
    Server(ServerCertificate),
}

impl RenewalTarget {
    fn read(&self) -> Result<CertFiles, TlsError> {
        let ((cert, key), revoked) = match self {
            RenewalTarget::Identity { files, .. } => ((&files.cert, &files.key), files.read_revoked()?),
            RenewalTarget::Server(certificate) => (certificate.paths(), None),
        };
        Ok(CertFiles { cert: read("certificate", cert)?, key: read("private key", key)?, revoked })
    }

    fn renew(&self, CertFiles { cert, key, revoked }: &CertFiles) -> Result<bool, TlsError> {
        let (identity, files) = match self {
            RenewalTarget::Identity { identity, files } => (identity, files),
            RenewalTarget::Server(certificate) => return certificate.renew(cert, key),
        };
        // A list that is gone stays in force: its certificates are still revoked.
        let has_list = revoked.as_deref().map_or(Ok(false), |list| identity.revoke_from(files, list));
        // A list that cannot be used is no reason to keep an old certificate.
        let has_certificate = identity.renew_from(files, cert, key)?;
        Ok(has_list? || has_certificate)
    }
}

impl std::fmt::Debug for Renewal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Renewal").field("target", &self.target).finish_non_exhaustive()
    }
}

/// Content of the files. Never printed: one is a secret.
#[derive(PartialEq, Eq)]
struct CertFiles {
    cert: Vec<u8>,
    key: Vec<u8>,
    revoked: Option<Vec<u8>>,
}

/// Result of a check of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenewalOutcome {
    /// No change.
    Unchanged,
    /// A new certificate is presented from now on, or a new list of revoked ones is in force.
    Renewed,
    /// The files cannot be used, and the old certificate stays. Reported once per reason; an
    /// expired certificate without a successor is a reason too.
    Rejected(TlsError),
}

impl Renewal {
    /// A renewal of an identity that was loaded from these files.
    #[must_use]
    pub fn new(identity: Identity, files: TlsFiles) -> Renewal {
        Renewal { target: RenewalTarget::Identity { identity, files }, reported: None }
    }

    /// A renewal of a server's certificate.
    #[must_use]
    pub fn of_server(certificate: ServerCertificate) -> Renewal {
        Renewal { target: RenewalTarget::Server(certificate), reported: None }
    }

    /// Reads the files and presents their certificate if it is new and usable. Blocks while it
    /// reads.
    pub fn check(&mut self) -> RenewalOutcome {
        let files = self.target.read();
        let renewed = match &files {
            Ok(files) => self.target.renew(files),
            Err(error) => Err(error.clone()),
        };
        let error = match renewed {
            Ok(is_new) => {
                self.reported = None;
                return if is_new { RenewalOutcome::Renewed } else { RenewalOutcome::Unchanged };
            }
            Err(error) => error,
        };
        let report = Some((discriminant(&error), files.ok()));
        if self.reported == report {
            return RenewalOutcome::Unchanged;
        }
        self.reported = report;
        RenewalOutcome::Rejected(error)
    }
}

#[cfg(test)]
mod tests;
