//! Certificates of a local cluster: one authority and one certificate per process, created at the
//! first start and reused, with the cluster's secrets beside them.
//!
//! Not here: verification (`kvfleet_proto::tls`), and the authority of a production fleet, which
//! provides its own files.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::secrets::{self, SecretError};
use crate::tls::{ROUTER_NAME, SERVER_NAME, tenant_name};
use kv_core::id::TenantId;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Name in certificates of a cluster's own processes, which clients verify.
const CLUSTER_NAME: &str = SERVER_NAME;

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
            write(&key, &pair.serialize_pem(), 0o600)?;
            write(&cert, &made.pem(), 0o644)?;
            pair
        };
        Ok(Self { directory: directory.to_owned(), key: pair })
    }

    /// Files of the process `role` (`router-1`, `node-2`, `admin`), created if absent.
    pub fn issue(&self, role: &str) -> Result<CertificateFiles, CertificateError> {
        self.issue_with(role, || process_params(role))
    }

    /// Files of a client that acts for one tenant only (`tenant-3`), created if absent.
    pub fn issue_for_tenant(&self, tenant: TenantId) -> Result<CertificateFiles, CertificateError> {
        let role = tenant.to_string();
        // Without the cluster's name, which would let the holder pose as a node.
        self.issue_with(&role, || params(&role, vec![tenant_name(tenant)]))
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

    fn issue_with(
        &self,
        role: &str,
        params: impl FnOnce() -> Result<CertificateParams, rcgen::Error>,
    ) -> Result<CertificateFiles, CertificateError> {
        let files = files(&self.directory, role);
        if !is_pair_present(&files.cert, &files.key)? {
            let pair = KeyPair::generate().map_err(invalid(&files.key))?;
            let issuer = Issuer::new(authority_params(), &self.key);
            let made =
                params().and_then(|params| params.signed_by(&pair, &issuer)).map_err(invalid(&files.cert))?;
            write(&files.key, &pair.serialize_pem(), 0o600)?;
            write(&files.cert, &made.pem(), 0o644)?;
        }
        Ok(files)
    }
}

/// Paths of the files of `role` in a certificate directory, which may not exist.
#[must_use]
pub fn files(directory: &Path, role: &str) -> CertificateFiles {
    CertificateFiles {
        ca: directory.join(AUTHORITY),
        cert: directory.join(format!("{role}.pem")),
        key: directory.join(format!("{role}.key")),
    }
}

/// Parameters of the authority. They are deterministic except for the key, so that a reopened
/// authority signs under the same name.
fn authority_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "kvfleet cluster authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn process_params(role: &str) -> Result<CertificateParams, rcgen::Error> {
    let router = role.starts_with("router-").then_some(ROUTER_NAME);
    let names = [CLUSTER_NAME, role, "localhost", "127.0.0.1", "::1"].into_iter().chain(router);
    let mut params = params(role, names.map(str::to_owned).collect())?;
    params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    Ok(params)
}

/// Parameters of a client-only certificate; servers add more.
fn params(role: &str, names: Vec<String>) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, role);
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    Ok(params)
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

fn parse_key(path: &Path) -> Result<KeyPair, CertificateError> {
    let text = std::fs::read_to_string(path)
        .map_err(|cause| CertificateError::File { path: path.to_owned(), cause })?;
    KeyPair::from_pem(&text).map_err(invalid(path))
}

fn invalid(path: &Path) -> impl FnOnce(rcgen::Error) -> CertificateError {
    let path = path.to_owned();
    move |cause| CertificateError::Invalid { path, cause }
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), CertificateError> {
    let open = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    open.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .map_err(|cause| CertificateError::File { path: path.to_owned(), cause })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt;

    use crate::tls::TlsFiles;
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn reuses_existing_files() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path()).unwrap().issue("node-1").unwrap();
        let text = std::fs::read_to_string(&first.cert).unwrap();
        let again = Authority::open(dir.path()).unwrap().issue("node-1").unwrap();
        assert_eq!(first, again);
        assert_eq!(text, std::fs::read_to_string(&again.cert).unwrap(), "no new certificate was made");
    }

    #[test]
    fn only_router_certificates_name_a_router() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let names_router = ["router-1", "node-1", "instance-1", "admin"].map(|role| {
            let CertificateFiles { ca, cert, key } = authority.issue(role).unwrap();
            TlsFiles { ca, cert, key }.load().unwrap().has_router_name()
        });
        assert_eq!(names_router, [true, false, false, false]);
    }

    #[test]
    fn tenant_certificates_name_the_tenant_and_are_client_only() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let CertificateFiles { ca, cert, key } = authority.issue_for_tenant(TenantId(3)).unwrap();
        assert_eq!(cert, dir.path().join("tenant-3.pem"));
        let files = TlsFiles { ca, cert, key };
        assert_eq!(files.load().unwrap().tenants(), Some([TenantId(3)].into()));
        assert!(files.load_server().is_err());
        let CertificateFiles { ca, cert, key } = authority.issue("admin").unwrap();
        assert_eq!(TlsFiles { ca, cert, key }.load_server().unwrap().tenants(), None);
    }

    #[test]
    fn keys_are_readable_by_their_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let files = Authority::open(dir.path()).unwrap().issue("router-1").unwrap();
        for key in [files.key, dir.path().join(AUTHORITY_KEY)] {
            assert_eq!(std::fs::metadata(key).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn names_a_missing_key() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let files = authority.issue("node-1").unwrap();
        std::fs::remove_file(&files.key).unwrap();
        let error = authority.issue("node-1").unwrap_err();
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
