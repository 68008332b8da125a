//! Renewal from files: accepted and rejected certificates, and their reports. Handshakes are tested
//! in `kvfleet-transport`.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::id::{NodeId, TenantId};
use kvfleet_errors_doc::says;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::time_provider::TimeProvider;
use rustls_pki_types::UnixTime;

use super::*;

/// The certificates here are valid in January 2030.
const JANUARY: u64 = 1_893_456_000 + 14 * 86_400;
const FEBRUARY: u64 = JANUARY + 31 * 86_400;

/// A clock that a test sets, in seconds since 1970.
#[derive(Debug)]
struct RenewClock(AtomicU64);

impl TimeProvider for RenewClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(std::time::Duration::from_secs(self.0.load(Ordering::Relaxed))))
    }
}

/// A directory with the files of one process, and the authority that issues them.
struct RenewFixture {
    dir: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
    files: TlsFiles,
}

impl RenewFixture {
    fn new() -> RenewFixture {
        let dir = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let file = |name: &str| dir.path().join(name);
        let files = TlsFiles { ca: file("ca.pem"), cert: file("cert.pem"), key: file("cert.key") };
        let world = RenewFixture { dir, authority, files };
        let (cert, key) = world.issue();
        world.write(&cert, &key);
        world
    }

    fn issue(&self) -> (String, String) {
        self.issue_for(&Role::Node(Some(NodeId(1))))
    }

    fn issue_for(&self, role: &Role) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(role.dns_names()).unwrap();
        params.not_before = date_time_ymd(2030, 1, 1);
        params.not_after = date_time_ymd(2030, 2, 1);
        (params.signed_by(&key, &self.authority).unwrap().pem(), key.serialize_pem())
    }

    fn write(&self, cert: &str, key: &str) {
        std::fs::write(&self.files.cert, cert).unwrap();
        std::fs::write(&self.files.key, key).unwrap();
    }

    fn renewal(&self) -> (Identity, Renewal, Arc<RenewClock>) {
        let clock = Arc::new(RenewClock(AtomicU64::new(JANUARY)));
        let [cert, key] = [&self.files.cert, &self.files.key].map(|file| std::fs::read(file).unwrap());
        let timed = Arc::clone(&clock) as Arc<dyn TimeProvider>;
        let identity = Identity::from_pem_at(self.authority.pem().as_bytes(), &cert, &key, timed).unwrap();
        (identity.clone(), Renewal::new(identity, self.files.clone()), clock)
    }

    fn here(&self) -> String {
        self.dir.path().display().to_string()
    }
}

fn rejection(look: RenewalOutcome) -> TlsError {
    let RenewalOutcome::Rejected(error) = look else { panic!("{look:?}") };
    error
}

#[test]
fn existing_configurations_present_the_renewed_certificate() {
    let world = RenewFixture::new();
    let (identity, mut renewal, _) = world.renewal();
    let client = identity.quic_client();
    let shown = || client.client_auth_cert_resolver.resolve(&[], &[]).unwrap().cert.clone();
    let before = shown();
    assert_eq!(renewal.check(), RenewalOutcome::Unchanged);
    let (cert, key) = world.issue();
    world.write(&cert, &key);
    assert_eq!((renewal.check(), renewal.check()), (RenewalOutcome::Renewed, RenewalOutcome::Unchanged));
    assert_ne!(shown(), before);
    assert_eq!(shown(), identity.certificate.certified().cert);
}

#[test]
fn unusable_files_change_no_state_and_are_reported_once() {
    let world = RenewFixture::new();
    let (identity, mut renewal, _) = world.renewal();
    let before = identity.certificate.certified().cert.clone();
    let (cert, key) = world.issue();
    let here = world.here();

    std::fs::write(&world.files.cert, &cert).unwrap();
    says("a certificate that was replaced before its key", &rejection(renewal.check()), &[&here]);
    assert_eq!(renewal.check(), RenewalOutcome::Unchanged, "reported twice");
    world.write(&cert[..cert.len() / 2], &key);
    says("a certificate that is half written when it is renewed", &rejection(renewal.check()), &[&here]);
    world.write("", &key);
    assert!(matches!(rejection(renewal.check()), TlsError::NotPem { .. }));
    std::fs::remove_file(&world.files.key).unwrap();
    assert!(matches!(rejection(renewal.check()), TlsError::Unreadable { .. }));
    let (other_cert, other_key) = RenewFixture::new().issue();
    world.write(&other_cert, &other_key);
    says("a certificate of another authority when it is renewed", &rejection(renewal.check()), &[&here]);
    assert_eq!(identity.certificate.certified().cert, before, "the old certificate must stay");

    world.write(&cert, &key);
    assert_eq!(renewal.check(), RenewalOutcome::Renewed);
    assert_ne!(identity.certificate.certified().cert, before);
}

#[test]
fn an_expired_certificate_is_reported_once() {
    let world = RenewFixture::new();
    let (_, mut renewal, clock) = world.renewal();
    clock.0.store(FEBRUARY, Ordering::Relaxed);
    let error = rejection(renewal.check());
    says("a certificate that ran out while it was shown", &error, &[&world.here()]);
    clock.0.fetch_add(10, Ordering::Relaxed);
    assert_eq!(renewal.check(), RenewalOutcome::Unchanged);
    clock.0.store(JANUARY, Ordering::Relaxed);
    assert_eq!(renewal.check(), RenewalOutcome::Unchanged);
    clock.0.store(FEBRUARY, Ordering::Relaxed);
    assert!(
        matches!(renewal.check(), RenewalOutcome::Rejected(_)),
        "it is reported again after a valid time"
    );
}

#[test]
fn a_server_is_not_renewed_to_another_role() {
    let world = RenewFixture::new();
    let (identity, mut renewal, _) = world.renewal();
    let (cert, key) = world.issue_for(&Role::tenant(TenantId(3)));
    world.write(&cert, &key);
    says(
        "a tenant's certificate in place of one of the cluster's own",
        &rejection(renewal.check()),
        &[&world.here()],
    );
    assert_eq!(identity.role(), Role::Node(Some(NodeId(1))));
    for other in [Role::Node(Some(NodeId(2))), Role::Admin] {
        let (cert, key) = world.issue_for(&other);
        world.write(&cert, &key);
        assert!(matches!(rejection(renewal.check()), TlsError::Refused { .. }), "{other}");
    }

    let (cert, key) = world.issue_for(&Role::tenant(TenantId(3)));
    world.write(&cert, &key);
    let (identity, mut renewal, _) = world.renewal();
    for role in [Role::tenant(TenantId(5)), Role::Instance(None)] {
        let (cert, key) = world.issue_for(&role);
        world.write(&cert, &key);
        assert_eq!((renewal.check(), identity.role()), (RenewalOutcome::Renewed, role));
    }
}

#[test]
fn a_server_takes_no_other_number_after_a_shared_certificate() {
    let world = RenewFixture::new();
    let (cert, key) = world.issue_for(&Role::Node(None));
    world.write(&cert, &key);
    let (identity, mut renewal, _) = world.renewal();
    identity.certificate.bind(Role::Node(Some(NodeId(1))));
    let (cert, key) = world.issue_for(&Role::Node(Some(NodeId(2))));
    world.write(&cert, &key);
    let error = rejection(renewal.check());
    assert!(error.to_string().contains("node-2") && error.to_string().contains("node-1"), "{error}");
    let (cert, key) = world.issue_for(&Role::Node(Some(NodeId(1))));
    world.write(&cert, &key);
    assert_eq!(renewal.check(), RenewalOutcome::Renewed);
}
