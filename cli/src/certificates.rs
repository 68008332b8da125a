//! Certificates of a local cluster: one authority and one certificate per process, made at first
//! start and reused afterwards.
//!
//! Not here: how certificates are checked (`kvfleet_proto::tls`), nor a fleet's own authority: a
//! fleet brings its files and names them in its configuration.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use kv_core::id::TenantId;
use kvfleet_proto::tls::{ROUTER_NAME, SERVER_NAME, tenant_name};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Name that certificates of a cluster's own processes carry; clients verify it.
const CLUSTER_NAME: &str = SERVER_NAME;

/// File of the authority's certificate.
const AUTHORITY: &str = "ca.pem";

/// File of the authority's key.
const AUTHORITY_KEY: &str = "ca.key";

/// Why certificates could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file could not be read or written.
    #[error("{}: {cause}; check that the directory is writable", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// A file does not hold what its name says, or signing failed.
    #[error("{}: {cause}; remove the directory to have new certificates made", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What the certificate library said.
        cause: rcgen::Error,
    },
    /// Only one half of a pair of files is there.
    #[error("{} is there without {}: restore it, or remove both", present.display(), absent.display())]
    HalfPair {
        /// The file that is there.
        present: PathBuf,
        /// The file that is missing.
        absent: PathBuf,
    },
}

/// The three files a process needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The cluster's authority.
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
    /// Opens the authority in `directory`, making it when the directory has none.
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

    /// The files of the process named `role` (`router-1`, `node-2`, `admin`), made when absent.
    pub fn issue(&self, role: &str) -> Result<CertificateFiles, CertificateError> {
        self.issue_of(role, || process_params(role))
    }

    /// The files of whoever acts for this tenant and nobody else (`tenant-3`), made when absent.
    pub fn issue_for(&self, tenant: TenantId) -> Result<CertificateFiles, CertificateError> {
        let role = tenant.to_string();
        // Without the cluster's name, with which its holder could pose as a node.
        self.issue_of(&role, || params(&role, vec![tenant_name(tenant)]))
    }

    fn issue_of(
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

/// Where the files of `role` are in a cluster's certificate directory, whether or not they exist.
#[must_use]
pub fn files(directory: &Path, role: &str) -> CertificateFiles {
    CertificateFiles {
        ca: directory.join(AUTHORITY),
        cert: directory.join(format!("{role}.pem")),
        key: directory.join(format!("{role}.key")),
    }
}

/// The authority's parameters. Deterministic but for the key, so that a reopened authority signs
/// under the same name.
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

/// Of somebody to whom nobody connects. Others add what they need.
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

    use kvfleet_errors_doc::says;
    use kvfleet_proto::tls::TlsFiles;

    use super::*;

    #[test]
    fn files_are_made_once_and_reused() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path()).unwrap().issue("node-1").unwrap();
        let text = std::fs::read_to_string(&first.cert).unwrap();
        let again = Authority::open(dir.path()).unwrap().issue("node-1").unwrap();
        assert_eq!(first, again);
        assert_eq!(text, std::fs::read_to_string(&again.cert).unwrap(), "no new certificate was made");
    }

    #[test]
    fn only_a_routers_certificate_names_a_router() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let names_router = ["router-1", "node-1", "instance-1", "admin"].map(|role| {
            let CertificateFiles { ca, cert, key } = authority.issue(role).unwrap();
            TlsFiles { ca, cert, key }.load().unwrap().names_router()
        });
        assert_eq!(names_router, [true, false, false, false]);
    }

    #[test]
    fn a_tenants_certificate_names_the_tenant_and_is_no_servers() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let CertificateFiles { ca, cert, key } = authority.issue_for(TenantId(3)).unwrap();
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
    fn a_lost_key_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let files = authority.issue("node-1").unwrap();
        std::fs::remove_file(&files.key).unwrap();
        let error = authority.issue("node-1").unwrap_err();
        says("half of a local cluster's certificate", &error, &[&dir.path().display().to_string()]);
    }

    #[test]
    fn a_damaged_authority_is_named() {
        let dir = tempfile::tempdir().unwrap();
        drop(Authority::open(dir.path()).unwrap());
        std::fs::write(dir.path().join(AUTHORITY_KEY), "not a key").unwrap();
        let error = Authority::open(dir.path()).unwrap_err();
        says("a local authority with a damaged key", &error, &[&dir.path().display().to_string()]);
    }
}
