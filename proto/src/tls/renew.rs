//! What a process shows, renewed while it runs: a certificate and its key in place of those before.
//!
//! Handshakes ask for it each time, so connections that begin later show the new one, and those that are there go on. What
//! cannot be used (torn, mismatched, not accepted) changes nothing and is said once. The authority is not renewed: another
//! one is another cluster. Not here: how often somebody looks (`keep.rs`), and tonic's own TLS, whose
//! configurations hold what was shown when they were made.

use std::collections::BTreeSet;
use std::mem::{Discriminant, discriminant};
use std::sync::{Arc, PoisonError, RwLock};

use kv_core::id::TenantId;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::{Checked, Identity, TlsError, TlsFiles, in_memory, read, tenants_of};

/// The certificate and key of a process, exchangeable.
pub(super) struct Shown {
    now: RwLock<Pair>,
}

#[derive(Clone)]
struct Pair {
    cert_pem: Arc<[u8]>,
    key_pem: Arc<[u8]>,
    certified: Arc<CertifiedKey>,
}

impl Shown {
    pub(super) fn new(cert_pem: Vec<u8>, key_pem: Vec<u8>, certified: CertifiedKey) -> Shown {
        Shown { now: RwLock::new(Pair::new(cert_pem, key_pem, certified)) }
    }

    fn pair(&self) -> Pair {
        self.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn certified(&self) -> Arc<CertifiedKey> {
        self.pair().certified
    }

    pub(super) fn tenants(&self) -> Option<BTreeSet<TenantId>> {
        tenants_of_pair(&self.certified())
    }

    pub(super) fn tonic(&self) -> tonic::transport::Identity {
        let pair = self.pair();
        tonic::transport::Identity::from_pem(pair.cert_pem, pair.key_pem)
    }
}

/// What it shows was accepted, so that its names can be told.
fn tenants_of_pair(certified: &CertifiedKey) -> Option<BTreeSet<TenantId>> {
    certified.cert.first().and_then(|leaf| tenants_of(leaf).ok()).flatten()
}

impl Pair {
    fn new(cert_pem: Vec<u8>, key_pem: Vec<u8>, certified: CertifiedKey) -> Pair {
        Pair { cert_pem: cert_pem.into(), key_pem: key_pem.into(), certified: Arc::new(certified) }
    }
}

impl std::fmt::Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shown(..)")
    }
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.certified())
    }
}

impl ResolvesClientCert for Shown {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.certified())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl Identity {
    /// Shows this certificate with this key from now on, if they pass the checks of a start under the authority in use.
    /// Whether they are others than before.
    ///
    /// # Errors
    /// As [`Identity::from_pem`]; what was shown before goes on.
    pub fn renew(&self, cert_pem: &[u8], key_pem: &[u8]) -> Result<bool, TlsError> {
        self.renew_as(&in_memory(), cert_pem, key_pem)
    }

    fn renew_as(&self, files: &TlsFiles, cert_pem: &[u8], key_pem: &[u8]) -> Result<bool, TlsError> {
        let certified = Checked { files }.certified(&self.roots, self.clock.as_ref(), cert_pem, key_pem)?;
        let before = self.shown.pair();
        if *before.cert_pem == *cert_pem && *before.key_pem == *key_pem {
            return Ok(false);
        }
        let pair = Pair::new(cert_pem.to_vec(), key_pem.to_vec(), certified);
        // Others connect to this process by its old certificate, and would not by the new one.
        if tenants_of_pair(&before.certified).is_none() && tenants_of_pair(&pair.certified).is_some() {
            let cause = "it names tenants, and the one before is of the cluster's own";
            return Err(Checked { files }.refused(&cause, "start this process anew to make it a tenant's"));
        }
        *self.shown.now.write().unwrap_or_else(PoisonError::into_inner) = pair;
        Ok(true)
    }
}

/// Keeps an identity as its files are.
pub struct Renewal {
    identity: Identity,
    files: TlsFiles,
    /// What was refused last and how, so that it is said once: the words hold the time of the look.
    said: Option<(Discriminant<TlsError>, Option<Files>)>,
}

impl std::fmt::Debug for Renewal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Renewal").field("files", &self.files).finish_non_exhaustive()
    }
}

/// What the two files hold. Never shown: one of them is a secret.
#[derive(PartialEq, Eq)]
struct Files {
    cert: Vec<u8>,
    key: Vec<u8>,
}

/// What a look at the files gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing new.
    Same,
    /// Others are shown from now on.
    Renewed,
    /// The files cannot be used, and what was shown before goes on. Said once for each reason; when nothing was put in the
    /// place of a certificate that ran out, that is the reason.
    Kept(TlsError),
}

impl Renewal {
    /// Of an identity that was loaded from these files.
    #[must_use]
    pub fn new(identity: Identity, files: TlsFiles) -> Renewal {
        Renewal { identity, files, said: None }
    }

    /// Reads the files, and shows what is in them if it is new and can be used. Blocks while it reads.
    pub fn look(&mut self) -> Look {
        let files = self.read();
        let renewed = match &files {
            Ok(Files { cert, key }) => self.identity.renew_as(&self.files, cert, key),
            Err(error) => Err(error.clone()),
        };
        let error = match renewed {
            Ok(is_new) => {
                self.said = None;
                return if is_new { Look::Renewed } else { Look::Same };
            }
            Err(error) => error,
        };
        let says = Some((discriminant(&error), files.ok()));
        if self.said == says {
            return Look::Same;
        }
        self.said = says;
        Look::Kept(error)
    }

    fn read(&self) -> Result<Files, TlsError> {
        let cert = read("certificate", &self.files.cert)?;
        Ok(Files { cert, key: read("private key", &self.files.key)? })
    }
}

#[cfg(test)]
#[path = "renew_tests.rs"]
mod tests;
