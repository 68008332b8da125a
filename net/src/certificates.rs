//! Certificates of a local cluster: one authority and one certificate per process, created at the
//! first start and reused, with the cluster's secrets beside them.
//!
//! Not here: verification (`tls/`), and the authority of a production fleet, which
//! provides its own files.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::secrets::{self, SecretError};
use crate::tls::{Role, role_of};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

/// File of the authority's certificate.
const AUTHORITY: &str = "ca.pem";

/// File of the authority's key.
const AUTHORITY_KEY: &str = "ca.key";

/// File with the key of block hashes.
const HASH_SECRET: &str = "hash.secret";

/// File with the secret of the admin API.
const ADMIN_SECRET: &str = "admin.secret";

/// Why certificates could not be created or read.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file could not be read or written.
    #[error("{}: {cause}; check that the directory is writable", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// A file is invalid, or signing failed.
    #[error("{}: {cause}; remove the directory to have new certificates made", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Error of the certificate library.
        cause: rcgen::Error,
    },
    /// One file of a pair is missing.
    #[error("{} exists without {}: restore it, or remove both", present.display(), absent.display())]
    HalfPair {
        /// The existing file.
        present: PathBuf,
        /// The missing file.
        absent: PathBuf,
    },
}

/// The three files of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// Certificate of the cluster's authority.
    pub ca: PathBuf,
    /// This process's certificate.
    pub cert: PathBuf,
    /// This process's key.
    pub key: PathBuf,
}

/// A directory with an authority that signs certificates for processes of one cluster.
#[derive(Debug)]
pub struct Authority {
    directory: PathBuf,
    key: KeyPair,
}

impl Authority {
    /// Opens the authority in `directory`, or creates it.
    pub fn open(directory: &Path) -> Result<Self, CertificateError> {
        std::fs::create_dir_all(directory)
            .map_err(|cause| CertificateError::File { path: directory.to_owned(), cause })?;
        let (cert, key) = (directory.join(AUTHORITY), directory.join(AUTHORITY_KEY));
        let pair = if is_pair_present(&cert, &key)? {
            parse_key(&key)?
        } else {
            let pair = KeyPair::generate().map_err(invalid(&key))?;
            let made = authority_params().self_signed(&pair).map_err(invalid(&cert))?;
            replace(&key, &pair.serialize_pem(), 0o600)?;
            replace(&cert, &made.pem(), 0o644)?;
            pair
        };
        Ok(Self { directory: directory.to_owned(), key: pair })
    }

    /// Files of a holder of this role, named after it (`router-1`, `node-2`, `admin`), created if
    /// absent. A certificate of another role, as of an earlier version, is replaced with its key.
    pub fn issue(&self, role: &Role) -> Result<CertificateFiles, CertificateError> {
        let files = files(&self.directory, role);
        let is_present = is_pair_present(&files.cert, &files.key)?;
        if is_present && has_role(&files.cert, role) {
            return Ok(files);
        }
        let pair = KeyPair::generate().map_err(invalid(&files.key))?;
        let issuer = Issuer::new(authority_params(), &self.key);
        let made = role_params(role)
            .and_then(|params| params.signed_by(&pair, &issuer))
            .map_err(invalid(&files.cert))?;
        // After a crash between the two, a replaced certificate still has its old role, so the next
        // start replaces it again; a first one is missing, which `is_pair_present` reports.
        replace(&files.key, &pair.serialize_pem(), 0o600)?;
        replace(&files.cert, &made.pem(), 0o644)?;
        Ok(files)
    }

    /// File with the key of the cluster's block hashes, made if absent.
    pub fn hash_secret(&self) -> Result<PathBuf, SecretError> {
        self.secret(HASH_SECRET)
    }

    /// File with the secret of the admin API, made if absent.
    pub fn admin_secret(&self) -> Result<PathBuf, SecretError> {
        self.secret(ADMIN_SECRET)
    }

    fn secret(&self, name: &str) -> Result<PathBuf, SecretError> {
        let path = self.directory.join(name);
        secrets::load_or_create(&path)?;
        Ok(path)
    }
}

/// Paths of the files of `role` in a certificate directory, which may not exist.
#[must_use]
pub fn files(directory: &Path, role: &Role) -> CertificateFiles {
    let stem = file_stem(role);
    CertificateFiles {
        ca: directory.join(AUTHORITY),
        cert: directory.join(format!("{stem}.pem")),
        key: directory.join(format!("{stem}.key")),
    }
}

/// Name of the files or directory of a holder: `router-1`, `admin`, `tenant-3+tenant-5`.
pub(crate) fn file_stem(role: &Role) -> String {
    match role {
        Role::Tenants(tenants) => {
            let names: Vec<String> = tenants.iter().map(ToString::to_string).collect();
            names.join("+")
        }
        role => role.to_string(),
    }
}

/// Parameters of the authority. They are deterministic except for the key, so that a reopened
/// authority signs under the same name.
pub(crate) fn authority_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "kvfleet cluster authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// Parameters of a certificate. Tenants' are for clients only; others also serve, on this machine.
pub(crate) fn role_params(role: &Role) -> Result<CertificateParams, rcgen::Error> {
    let serves = !matches!(role, Role::Tenants(_));
    let local = ["localhost", "127.0.0.1", "::1"].into_iter().filter(|_| serves).map(str::to_owned);
    let mut params = CertificateParams::new(role.dns_names().into_iter().chain(local).collect::<Vec<_>>())?;
    params.distinguished_name.push(DnType::CommonName, role.to_string());
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if serves {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    Ok(params)
}

/// Whether a certificate file gives this role.
fn has_role(cert: &Path, role: &Role) -> bool {
    CertificateDer::from_pem_file(cert).is_ok_and(|leaf| role_of(&leaf).as_ref() == Ok(role))
}

fn is_pair_present(cert: &Path, key: &Path) -> Result<bool, CertificateError> {
    let half = |present: &Path, absent: &Path| CertificateError::HalfPair {
        present: present.to_owned(),
        absent: absent.to_owned(),
    };
    match (cert.exists(), key.exists()) {
        (true, false) => Err(half(cert, key)),
        (false, true) => Err(half(key, cert)),
        (both, _) => Ok(both),
    }
}

pub(crate) fn parse_key(path: &Path) -> Result<KeyPair, CertificateError> {
    let text = std::fs::read_to_string(path)
        .map_err(|cause| CertificateError::File { path: path.to_owned(), cause })?;
    KeyPair::from_pem(&text).map_err(invalid(path))
}

pub(crate) fn invalid(path: &Path) -> impl FnOnce(rcgen::Error) -> CertificateError {
    let path = path.to_owned();
    move |cause| CertificateError::Invalid { path, cause }
}

/// Writes a file under another name first, so that readers find the old content or the new one.
pub(crate) fn replace(path: &Path, text: &str, mode: u32) -> Result<(), CertificateError> {
    let partial = path.with_added_extension("partial");
    let write = || {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&partial)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&partial, path)
    };
    write().map_err(|cause| CertificateError::File { path: path.to_owned(), cause })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt;

    use crate::tls::TlsFiles;
    use kv_core::id::{InstanceId, NodeId, RouterId, TenantId};
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn reuses_existing_files() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path()).unwrap().issue(&Role::Node(Some(NodeId(1)))).unwrap();
        let text = std::fs::read_to_string(&first.cert).unwrap();
        let again = Authority::open(dir.path()).unwrap().issue(&Role::Node(Some(NodeId(1)))).unwrap();
        assert_eq!(first, again);
        assert_eq!(text, std::fs::read_to_string(&again.cert).unwrap(), "no new certificate was made");
    }

    #[test]
    fn each_certificate_names_its_role() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let roles = [
            Role::Router(Some(RouterId(1))),
            Role::Router(None),
            Role::Node(Some(NodeId(2))),
            Role::Instance(Some(InstanceId(3))),
            Role::Frontend,
            Role::Admin,
            Role::tenant(TenantId(3)),
        ];
        for role in roles {
            let CertificateFiles { ca, cert, key } = authority.issue(&role).unwrap();
            assert_eq!(TlsFiles { ca, cert, key }.load().unwrap().role(), role);
        }
        assert!(
            ["router-1.pem", "router.pem", "node-2.key", "admin.pem", "tenant-3.pem"]
                .iter()
                .all(|file| dir.path().join(file).exists())
        );
    }

    #[test]
    fn tenant_certificates_are_client_only() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let role = Role::tenant(TenantId(3));
        let CertificateFiles { ca, cert, key } = authority.issue(&role).unwrap();
        let files = TlsFiles { ca, cert, key };
        assert!(files.load().is_ok());
        assert!(files.load_server(&Role::Node(None)).is_err());
    }

    #[test]
    fn certificates_without_a_role_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let role = Role::Node(Some(NodeId(1)));
        let files = files(dir.path(), &role);
        let other = authority.issue(&Role::Node(None)).unwrap();
        std::fs::copy(&other.cert, &files.cert).unwrap();
        std::fs::copy(&other.key, &files.key).unwrap();
        let CertificateFiles { ca, cert, key } = authority.issue(&role).unwrap();
        assert_eq!(TlsFiles { ca, cert, key }.load().unwrap().role(), role);
    }

    #[test]
    fn keys_are_readable_by_their_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let files = Authority::open(dir.path()).unwrap().issue(&Role::Router(Some(RouterId(1)))).unwrap();
        for key in [files.key, dir.path().join(AUTHORITY_KEY)] {
            assert_eq!(std::fs::metadata(key).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn names_a_missing_key() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let files = authority.issue(&Role::Node(Some(NodeId(1)))).unwrap();
        std::fs::remove_file(&files.key).unwrap();
        let error = authority.issue(&Role::Node(Some(NodeId(1)))).unwrap_err();
        says("half of a local cluster's certificate", &error, &[&dir.path().display().to_string()]);
    }

    #[test]
    fn names_a_damaged_authority() {
        let dir = tempfile::tempdir().unwrap();
        drop(Authority::open(dir.path()).unwrap());
        std::fs::write(dir.path().join(AUTHORITY_KEY), "not a key").unwrap();
        let error = Authority::open(dir.path()).unwrap_err();
        says("a local authority with a damaged key", &error, &[&dir.path().display().to_string()]);
    }
}
