//! The authority of a fleet: certificates that expire, one directory for each holder with the file
//! names of a Kubernetes Secret (`ca.crt`, `tls.crt`, `tls.key`), and a register of all of them.
//!
//! Not here: the certificates of a cluster on one machine (`certificates.rs`), and verification
//! (`tls/`).

use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rand::TryRngCore;
use rand::rngs::OsRng;
use rcgen::{CertificateParams, Issuer, KeyPair, SerialNumber};

use crate::certificates::{
    CertificateError, CertificateFiles, authority_params, file_stem, invalid, parse_key, replace, role_params,
};
use crate::secrets::SecretError;
use crate::tls::{Role, TlsError, TlsFiles};

/// Certificate of the authority.
const AUTHORITY: &str = "ca.crt";

/// Key of the authority.
const AUTHORITY_KEY: &str = "ca.key";

/// Certificate of a holder.
const CERTIFICATE: &str = "tls.crt";

/// Key of a holder.
const KEY: &str = "tls.key";

/// List of all certificates: a line each, of serial number, holder and Unix time of the end.
const REGISTER: &str = "issued.tsv";

/// How long before now a certificate is valid, for machines with clocks that are behind.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(5 * 60);

/// Bytes of a serial number.
pub const SERIAL_BYTES: usize = 16;

/// Why a call of [`FleetAuthority`] fails.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// A file could not be read or written, or is invalid.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// There is an authority already.
    #[error(
        "{} is there: issue certificates under it, or name another directory. A new authority is a new cluster",
        .0.display()
    )]
    Exists(PathBuf),
    /// There is no authority.
    #[error("{} is not there: make an authority with `kvfleet certs init`, or name its directory", .0.display())]
    NoAuthority(PathBuf),
    /// Peers would refuse the new certificate.
    #[error("the new certificate would be refused, and none was written: {0}")]
    Refused(TlsError),
    /// A line of the register is none.
    #[error("line {line} of {} has no serial number, holder and end: restore the file", path.display())]
    Register {
        /// The register.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
    },
}

/// An issued certificate, as the register has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedCertificate {
    /// Its serial number in hexadecimal digits.
    pub serial: String,
    /// Its holder: `router-1`, `admin`, `tenant-3`.
    pub holder: String,
    /// The end of its validity, Unix time in seconds.
    pub ends_s: u64,
}

/// Validity and serial number of a certificate.
#[derive(Clone, Copy, Debug)]
pub struct IssueTerms {
    /// How long it is valid.
    pub lifetime: Duration,
    /// Its serial number; at random.
    pub serial: [u8; SERIAL_BYTES],
    /// The time.
    pub now: SystemTime,
}

impl IssueTerms {
    /// Terms for a certificate that is valid from now on, with a random serial number.
    ///
    /// # Errors
    /// If the operating system gives no random bytes.
    pub fn from_now(lifetime: Duration) -> Result<Self, SecretError> {
        let mut serial = [0; SERIAL_BYTES];
        OsRng.try_fill_bytes(&mut serial).map_err(SecretError::Random)?;
        Ok(Self { lifetime, serial, now: SystemTime::now() })
    }
}

/// A directory with an authority and the certificates under it.
#[derive(Debug)]
pub struct FleetAuthority {
    directory: PathBuf,
    key: KeyPair,
}

impl FleetAuthority {
    /// Makes an authority in this directory, which is created if absent.
    ///
    /// # Errors
    /// If there is one already, or a file cannot be written.
    pub fn create(directory: &Path, terms: IssueTerms) -> Result<Self, FleetError> {
        create_private(directory)?;
        for file in [AUTHORITY, AUTHORITY_KEY].map(|name| directory.join(name)) {
            if file.exists() {
                return Err(FleetError::Exists(file));
            }
        }
        let (certificate, key_file) = (directory.join(AUTHORITY), directory.join(AUTHORITY_KEY));
        let key = KeyPair::generate().map_err(invalid(&key_file))?;
        let made = limited(authority_params(), terms).self_signed(&key).map_err(invalid(&certificate))?;
        replace(&key_file, &key.serialize_pem(), 0o600)?;
        replace(&certificate, &made.pem(), 0o644)?;
        Ok(Self { directory: directory.to_owned(), key })
    }

    /// Opens the authority in this directory.
    ///
    /// # Errors
    /// If there is none, or its key cannot be read.
    pub fn open(directory: &Path) -> Result<Self, FleetError> {
        for file in [AUTHORITY, AUTHORITY_KEY].map(|name| directory.join(name)) {
            if !file.exists() {
                return Err(FleetError::NoAuthority(file));
            }
        }
        let key = parse_key(&directory.join(AUTHORITY_KEY))?;
        Ok(Self { directory: directory.to_owned(), key })
    }

    /// Makes a certificate and key for a holder of this role, in a directory named after it. A
    /// later one replaces them; processes that read the files take it without a restart.
    ///
    /// # Errors
    /// If a file cannot be written, or peers would refuse the certificate.
    pub fn issue(&self, role: &Role, terms: IssueTerms) -> Result<CertificateFiles, FleetError> {
        let holder = file_stem(role);
        let directory = self.directory.join(&holder);
        create_private(&directory)?;
        let files = files_in(&directory);
        let key = KeyPair::generate().map_err(invalid(&files.key))?;
        let issuer = Issuer::new(authority_params(), &self.key);
        let made = role_params(role)
            .and_then(|params| limited(params, terms).signed_by(&key, &issuer))
            .map_err(invalid(&files.cert))?;
        let own = self.directory.join(AUTHORITY);
        let authority = std::fs::read_to_string(&own).map_err(unusable(&own))?;
        // Checked beside the old pair, which stays in use if the new one is refused.
        let new = [&files.ca, &files.cert, &files.key].map(|path| path.with_added_extension("new"));
        for (path, text, mode) in [
            (&new[0], &authority, 0o644),
            (&new[1], &made.pem(), 0o644),
            (&new[2], &key.serialize_pem(), 0o600),
        ] {
            replace(path, text, mode)?;
        }
        let [ca, cert, key] = new.clone();
        if let Err(error) = (TlsFiles { ca, cert, key }).load() {
            new.iter().for_each(|path| drop(std::fs::remove_file(path)));
            return Err(FleetError::Refused(error));
        }
        self.register(&holder, terms)?;
        for (new, path) in new.iter().zip([&files.ca, &files.cert, &files.key]) {
            std::fs::rename(new, path).map_err(unusable(path))?;
        }
        Ok(files)
    }

    /// All issued certificates, the oldest first.
    ///
    /// # Errors
    /// If the register cannot be read or has an invalid line.
    pub fn issued(&self) -> Result<Vec<IssuedCertificate>, FleetError> {
        let path = self.directory.join(REGISTER);
        if !path.exists() {
            return Ok(Vec::new());
        }
        let text = std::fs::read_to_string(&path).map_err(unusable(&path))?;
        let entry = |(at, line): (usize, &str)| {
            parse_entry(line).ok_or(FleetError::Register { path: path.clone(), line: at + 1 })
        };
        text.lines().enumerate().map(entry).collect()
    }

    fn register(&self, holder: &str, terms: IssueTerms) -> Result<(), FleetError> {
        let path = self.directory.join(REGISTER);
        let line = format!("{}\t{holder}\t{}\n", hex(&serial_of(terms)), unix_s(terms.now + terms.lifetime));
        let open = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
        let written =
            open.and_then(|mut file| file.write_all(line.as_bytes()).and_then(|()| file.sync_all()));
        Ok(written.map_err(unusable(&path))?)
    }
}

/// The files of a holder in its directory.
#[must_use]
pub fn files_in(directory: &Path) -> CertificateFiles {
    CertificateFiles {
        ca: directory.join(AUTHORITY),
        cert: directory.join(CERTIFICATE),
        key: directory.join(KEY),
    }
}

/// The parameters with this serial number and validity.
fn limited(mut params: CertificateParams, terms: IssueTerms) -> CertificateParams {
    let at = |time: SystemTime| {
        rcgen::date_time_ymd(1970, 1, 1) + time.duration_since(UNIX_EPOCH).unwrap_or_default()
    };
    params.not_before = at(terms.now - CLOCK_TOLERANCE);
    params.not_after = at(terms.now + terms.lifetime);
    params.serial_number = Some(SerialNumber::from_slice(&serial_of(terms)));
    params
}

/// The serial number as certificates have it: positive, and of full length.
fn serial_of(terms: IssueTerms) -> [u8; SERIAL_BYTES] {
    let mut serial = terms.serial;
    serial[0] = serial[0] & 0x7f | 0x40;
    serial
}

fn unix_s(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse_entry(line: &str) -> Option<IssuedCertificate> {
    let mut fields = line.split('\t');
    let (serial, holder, ends_s) = (fields.next()?, fields.next()?, fields.next()?.parse().ok()?);
    let is_whole = fields.next().is_none() && !serial.is_empty() && !holder.is_empty();
    is_whole.then(|| IssuedCertificate { serial: serial.to_owned(), holder: holder.to_owned(), ends_s })
}

fn create_private(directory: &Path) -> Result<(), CertificateError> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(unusable(directory))
}

fn unusable(path: &Path) -> impl FnOnce(std::io::Error) -> CertificateError {
    let path = path.to_owned();
    move |cause| CertificateError::File { path, cause }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt;

    use kv_core::id::{RouterId, TenantId};
    use kvfleet_errors_doc::says;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn terms(number: u8) -> IssueTerms {
        IssueTerms { lifetime: 90 * DAY, serial: [number; SERIAL_BYTES], now: SystemTime::now() }
    }

    fn load(files: &CertificateFiles) -> Result<Role, TlsError> {
        let CertificateFiles { ca, cert, key } = files.clone();
        TlsFiles { ca, cert, key }.load().map(|identity| identity.role())
    }

    #[test]
    fn issued_certificates_have_their_role_and_are_registered() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("certificates");
        let authority = FleetAuthority::create(&directory, terms(1)).unwrap();
        assert_eq!(authority.issued().unwrap(), []);
        let roles =
            [Role::Router(Some(RouterId(1))), Role::Node(None), Role::Admin, Role::tenant(TenantId(3))];
        for (number, role) in (1..).zip(&roles) {
            let files = FleetAuthority::open(&directory).unwrap().issue(role, terms(number)).unwrap();
            assert_eq!(load(&files).as_ref(), Ok(role));
            let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!((mode(&files.key), mode(files.key.parent().unwrap())), (0o600, 0o700));
        }
        let issued = authority.issued().unwrap();
        let holders: Vec<&str> = issued.iter().map(|one| &*one.holder).collect();
        assert_eq!(holders, ["router-1", "node", "admin", "tenant-3"]);
        assert_eq!(issued[1].serial, format!("42{}", "02".repeat(15)));
        let left_s = issued[0].ends_s - unix_s(SystemTime::now());
        assert!((89 * 86_400..=90 * 86_400).contains(&left_s), "{left_s}");
    }

    #[test]
    fn a_later_certificate_replaces_the_earlier_one() {
        let dir = tempfile::tempdir().unwrap();
        let authority = FleetAuthority::create(dir.path(), terms(1)).unwrap();
        let first = authority.issue(&Role::Admin, terms(2)).unwrap();
        let before = std::fs::read(&first.cert).unwrap();
        let second = authority.issue(&Role::Admin, terms(3)).unwrap();
        assert_eq!(first, second);
        assert_ne!(before, std::fs::read(&second.cert).unwrap());
        assert_eq!(load(&second), Ok(Role::Admin));
        assert_eq!(authority.issued().unwrap().len(), 2);
        let names = std::fs::read_dir(first.cert.parent().unwrap()).unwrap();
        assert_eq!(names.count(), 3, "no partial files are left");
    }

    #[test]
    fn an_expired_certificate_is_refused_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let authority = FleetAuthority::create(dir.path(), terms(1)).unwrap();
        let good = authority.issue(&Role::Admin, terms(2)).unwrap();
        let past = IssueTerms { lifetime: DAY, now: SystemTime::now() - 2 * DAY, ..terms(3) };
        let error = authority.issue(&Role::Admin, past).unwrap_err();
        assert!(error.to_string().contains("issue a new certificate"), "{error}");
        assert_eq!(load(&good), Ok(Role::Admin), "the old one stays");
        assert_eq!(authority.issued().unwrap().len(), 1);
    }

    #[test]
    fn an_authority_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path().display().to_string();
        let absent = FleetAuthority::open(dir.path()).unwrap_err();
        says("certificates without an authority", &absent, &[&here]);
        FleetAuthority::create(dir.path(), terms(1)).unwrap();
        let again = FleetAuthority::create(dir.path(), terms(1)).unwrap_err();
        says("a second authority in one directory", &again, &[&here]);
    }

    #[test]
    fn a_foreign_authority_issues_no_certificate() {
        let dir = tempfile::tempdir().unwrap();
        FleetAuthority::create(dir.path(), terms(1)).unwrap();
        let other = tempfile::tempdir().unwrap();
        FleetAuthority::create(other.path(), terms(1)).unwrap();
        std::fs::copy(other.path().join(AUTHORITY_KEY), dir.path().join(AUTHORITY_KEY)).unwrap();
        let authority = FleetAuthority::open(dir.path()).unwrap();
        let error = authority.issue(&Role::Admin, terms(2)).unwrap_err();
        assert!(matches!(error, FleetError::Refused(_)), "{error}");
        assert!(!dir.path().join("admin/tls.crt").exists());
        assert_eq!(authority.issued().unwrap(), []);
    }

    #[test]
    fn a_damaged_register_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let authority = FleetAuthority::create(dir.path(), terms(1)).unwrap();
        authority.issue(&Role::Admin, terms(2)).unwrap();
        let path = dir.path().join(REGISTER);
        for damaged in ["42\tadmin\n", "42\tadmin\tsoon\n", "\tadmin\t7\n", "42\tadmin\t7\t8\n"] {
            std::fs::write(&path, damaged).unwrap();
            let error = authority.issued().unwrap_err();
            says("a damaged register of certificates", &error, &[&dir.path().display().to_string()]);
        }
    }
}
