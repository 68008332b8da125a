//! The authority of a fleet: certificates that expire, one directory for each holder with the file
//! names of a Kubernetes Secret (`ca.crt`, `tls.crt`, `tls.key`), a register of all of them, and the
//! list of the revoked ones (`ca.crl`).
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
use rcgen::{
    CertificateParams, CertificateRevocationListParams, Issuer, KeyPair, RevokedCertParams, SerialNumber,
    date_time_ymd,
};

use crate::certificates::{
    CertificateError, CertificateFiles, authority_params, file_stem, invalid, parse_key, replace, role_params,
};
use crate::secrets::{SecretError, from_hex, hex};
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

/// Register of revoked certificates: a line each, of serial number and Unix time.
const REVOKED: &str = "revoked.tsv";

/// List of revoked certificates, signed by the authority.
const REVOKED_LIST: &str = "ca.crl";

/// When a list names its successor. Processes use it for longer: a list that is not replaced
/// revokes no less.
const LIST_LIFETIME: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

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
    /// No certificate has this serial number, and none was issued to this holder.
    #[error("{0:?} is neither a holder nor a serial number of `kvfleet certs list`: write one of them")]
    Unknown(String),
    /// A line of the register of revoked certificates is none.
    #[error("line {line} of {} has no serial number and time: restore the file", path.display())]
    RevokedRegister {
        /// The register.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
    },
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
    /// Whether it is revoked.
    pub is_revoked: bool,
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
        let list = self.directory.join(REVOKED_LIST);
        if list.exists() {
            let text = std::fs::read_to_string(&list).map_err(unusable(&list))?;
            replace(&directory.join(REVOKED_LIST), &text, 0o644)?;
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
        let revoked = self.revoked()?;
        let entry = |(at, line): (usize, &str)| {
            let entry = parse_entry(line).ok_or(FleetError::Register { path: path.clone(), line: at + 1 })?;
            let is_revoked = revoked.iter().any(|(serial, _)| *serial == entry.serial);
            Ok(IssuedCertificate { is_revoked, ..entry })
        };
        text.lines().enumerate().map(entry).collect()
    }

    /// Revokes the certificates of a holder, or the one with a serial number, and writes the list of
    /// all revoked ones beside the authority and beside each holder's certificate. Returns the newly
    /// revoked ones.
    ///
    /// # Errors
    /// If none matches, or a file cannot be read or written.
    pub fn revoke(&self, which: &str, now: SystemTime) -> Result<Vec<IssuedCertificate>, FleetError> {
        let matching: Vec<_> =
            self.issued()?.into_iter().filter(|one| one.holder == which || one.serial == which).collect();
        if matching.is_empty() {
            return Err(FleetError::Unknown(which.to_owned()));
        }
        let new: Vec<_> = matching.into_iter().filter(|one| !one.is_revoked).collect();
        let lines: String = new.iter().map(|one| format!("{}\t{}\n", one.serial, unix_s(now))).collect();
        append(&self.directory.join(REVOKED), &lines)?;
        self.write_list(now)?;
        Ok(new)
    }

    /// Signs the list of all revoked certificates and writes it to each place.
    fn write_list(&self, now: SystemTime) -> Result<(), FleetError> {
        let (list, revoked, epoch) =
            (self.directory.join(REVOKED_LIST), self.revoked()?, date_time_ymd(1970, 1, 1));
        // The next list has more entries, so their number grows with each.
        let number = SerialNumber::from(u64::try_from(revoked.len()).unwrap_or(u64::MAX));
        let revoked_certs = revoked.iter().map(|(serial, at_s)| RevokedCertParams {
            serial_number: SerialNumber::from_slice(&from_hex(serial).unwrap_or_default()),
            revocation_time: epoch + Duration::from_secs(*at_s),
            reason_code: None,
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: epoch + since_1970(now),
            next_update: epoch + since_1970(now + LIST_LIFETIME),
            crl_number: number,
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: authority_params().key_identifier_method,
        };
        let signed = params.signed_by(&Issuer::new(authority_params(), &self.key));
        let pem = signed.and_then(|signed| signed.pem()).map_err(invalid(&list))?;
        replace(&list, &pem, 0o644)?;
        let entries = std::fs::read_dir(&self.directory).map_err(unusable(&self.directory))?;
        for entry in entries {
            let holder = entry.map_err(unusable(&self.directory))?.path();
            if holder.join(AUTHORITY).exists() {
                replace(&holder.join(REVOKED_LIST), &pem, 0o644)?;
            }
        }
        Ok(())
    }

    /// Serial numbers of the revoked certificates, and the Unix time of each revocation.
    fn revoked(&self) -> Result<Vec<(String, u64)>, FleetError> {
        let path = self.directory.join(REVOKED);
        if !path.exists() {
            return Ok(Vec::new());
        }
        let text = std::fs::read_to_string(&path).map_err(unusable(&path))?;
        let entry = |(at, line): (usize, &str)| {
            let fields = line.split_once('\t').filter(|(serial, _)| is_serial(serial));
            let entry = fields.and_then(|(serial, at_s)| Some((serial.to_owned(), at_s.parse().ok()?)));
            entry.ok_or(FleetError::RevokedRegister { path: path.clone(), line: at + 1 })
        };
        text.lines().enumerate().map(entry).collect()
    }

    fn register(&self, holder: &str, terms: IssueTerms) -> Result<(), FleetError> {
        let path = self.directory.join(REGISTER);
        let line = format!("{}\t{holder}\t{}\n", hex(&serial_of(terms)), unix_s(terms.now + terms.lifetime));
        Ok(append(&path, &line)?)
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

/// Adds lines to a file, which is created if absent.
fn append(path: &Path, lines: &str) -> Result<(), CertificateError> {
    let open = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    let written = open.and_then(|mut file| file.write_all(lines.as_bytes()).and_then(|()| file.sync_all()));
    written.map_err(unusable(path))
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The parameters with this serial number and validity.
fn limited(mut params: CertificateParams, terms: IssueTerms) -> CertificateParams {
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + since_1970(terms.now - CLOCK_TOLERANCE);
    params.not_after = epoch + since_1970(terms.now + terms.lifetime);
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
    since_1970(time).as_secs()
}

/// Whether a text is a serial number as the registers have them.
fn is_serial(text: &str) -> bool {
    text.len() == 2 * SERIAL_BYTES && text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

fn parse_entry(line: &str) -> Option<IssuedCertificate> {
    let mut fields = line.split('\t');
    let (serial, holder, ends_s) = (fields.next()?, fields.next()?, fields.next()?.parse().ok()?);
    let is_whole = fields.next().is_none() && !serial.is_empty() && !holder.is_empty();
    is_whole.then(|| IssuedCertificate {
        serial: serial.to_owned(),
        holder: holder.to_owned(),
        ends_s,
        is_revoked: false,
    })
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

    use kv_core::id::{NodeId, RouterId, TenantId};
    use kvfleet_errors_doc::says;
    use rustls_pki_types::CertificateDer;
    use rustls_pki_types::pem::PemObject;

    use super::*;
    use crate::tls::{Identity, Renewal, RenewalOutcome};

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

    fn identity(files: &CertificateFiles) -> Result<Identity, TlsError> {
        let CertificateFiles { ca, cert, key } = files.clone();
        TlsFiles { ca, cert, key }.load()
    }

    fn chain(files: &CertificateFiles) -> Vec<CertificateDer<'static>> {
        CertificateDer::pem_file_iter(&files.cert).unwrap().collect::<Result<_, _>>().unwrap()
    }

    #[tokio::test]
    async fn a_revoked_certificate_is_refused_and_its_connections_end() {
        let dir = tempfile::tempdir().unwrap();
        let authority = FleetAuthority::create(dir.path(), terms(1)).unwrap();
        let node = authority.issue(&Role::Node(Some(NodeId(1))), terms(2)).unwrap();
        let router = authority.issue(&Role::Router(None), terms(3)).unwrap();
        let identity_of_router = identity(&router).unwrap();
        let CertificateFiles { ca, cert, key } = router.clone();
        let mut renewal = Renewal::new(identity_of_router.clone(), TlsFiles { ca, cert, key });
        assert_eq!(renewal.check(), RenewalOutcome::Unchanged);
        let of_client = tokio::spawn(identity_of_router.clone().client_end(chain(&node)));
        let of_server = tokio::spawn(identity_of_router.clone().server_end(chain(&node)));
        let of_itself = tokio::spawn(identity_of_router.clone().client_end(chain(&router)));

        let revoked = authority.revoke("node-1", SystemTime::now()).unwrap();
        assert_eq!(revoked.iter().map(|one| &*one.holder).collect::<Vec<_>>(), ["node-1"]);
        assert_eq!((renewal.check(), renewal.check()), (RenewalOutcome::Renewed, RenewalOutcome::Unchanged));
        let is_revoked = rustls::Error::InvalidCertificate(rustls::CertificateError::Revoked);
        assert_eq!(
            (of_client.await.unwrap(), of_server.await.unwrap()),
            (is_revoked.clone(), is_revoked.clone())
        );
        assert!(!of_itself.is_finished(), "other certificates are valid");
        let error = identity(&node).unwrap_err();
        says("a certificate that was revoked", &error, &[&dir.path().display().to_string()]);
        let states: Vec<_> = authority.issued().unwrap().iter().map(|one| one.is_revoked).collect();
        assert_eq!(states, [true, false]);

        // A list that is gone was not taken back.
        std::fs::remove_file(router.ca.with_file_name("ca.crl")).unwrap();
        assert_eq!(renewal.check(), RenewalOutcome::Unchanged);
        assert_eq!(identity_of_router.clone().client_end(chain(&node)).await, is_revoked);
        // A new certificate replaces the revoked one, and only that one is revoked the next time.
        let again = authority.issue(&Role::Node(Some(NodeId(1))), terms(4)).unwrap();
        assert_eq!(load(&again), Ok(Role::Node(Some(NodeId(1)))));
        assert_eq!(authority.revoke("node-1", SystemTime::now()).unwrap().len(), 1);
        assert!(load(&again).is_err() && authority.revoke("node-1", SystemTime::now()).unwrap().is_empty());
        let serial = authority.issued().unwrap()[1].serial.clone();
        assert_eq!(authority.revoke(&serial, SystemTime::now()).unwrap()[0].holder, "router");
        says(
            "a certificate to revoke that is not there",
            &authority.revoke("node-2", SystemTime::now()).unwrap_err(),
            &[],
        );
    }

    #[test]
    fn other_lists_of_revoked_certificates_are_refused_and_the_last_one_stays() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [ours, theirs] =
            [&dirs[0], &dirs[1]].map(|dir| FleetAuthority::create(dir.path(), terms(1)).unwrap());
        let [node, other] =
            [&ours, &theirs].map(|authority| authority.issue(&Role::Node(None), terms(2)).unwrap());
        theirs.revoke("node", SystemTime::now()).unwrap();
        let list = node.ca.with_file_name("ca.crl");
        let here = dirs[0].path().display().to_string();
        let before = identity(&node).unwrap();
        // Both authorities have one name, and the signature is not ours.
        std::fs::copy(other.ca.with_file_name("ca.crl"), &list).unwrap();
        says("a list of revoked certificates of another authority", &identity(&node).unwrap_err(), &[&here]);
        let CertificateFiles { ca, cert, key } = node.clone();
        let mut renewal = Renewal::new(before, TlsFiles { ca, cert, key });
        assert!(matches!(renewal.check(), RenewalOutcome::Rejected(TlsError::NoRevokedList { .. })));
        std::fs::write(&list, "no list").unwrap();
        says("a file that is no list of revoked certificates", &identity(&node).unwrap_err(), &[&here]);
        std::fs::write(dirs[0].path().join(REVOKED), "42\t7\n").unwrap();
        says("a damaged register of revoked certificates", &ours.issued().unwrap_err(), &[&here]);
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
