//! Renewing from files: what is taken, what is not, and what is said of it. Handshakes are in `kvfleet-transport`.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU64, Ordering};

use kvfleet_errors_doc::says;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::time_provider::TimeProvider;
use rustls_pki_types::UnixTime;

use super::*;

/// The certificates here are good in January 2030.
const JANUARY: u64 = 1_893_456_000 + 14 * 86_400;
const FEBRUARY: u64 = JANUARY + 31 * 86_400;

/// A clock that a test sets, in seconds since 1970.
#[derive(Debug)]
struct Clock(AtomicU64);

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(std::time::Duration::from_secs(self.0.load(Ordering::Relaxed))))
    }
}

/// A directory with the files of one process, and the authority that issues them.
struct World {
    dir: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
    files: TlsFiles,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let file = |name: &str| dir.path().join(name);
        let files = TlsFiles { ca: file("ca.pem"), cert: file("cert.pem"), key: file("cert.key") };
        let world = World { dir, authority, files };
        let (cert, key) = world.issue();
        world.write(&cert, &key);
        world
    }

    fn issue(&self) -> (String, String) {
        self.issue_for("kvfleet")
    }

    fn issue_for(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2030, 1, 1);
        params.not_after = date_time_ymd(2030, 2, 1);
        (params.signed_by(&key, &self.authority).unwrap().pem(), key.serialize_pem())
    }

    fn write(&self, cert: &str, key: &str) {
        std::fs::write(&self.files.cert, cert).unwrap();
        std::fs::write(&self.files.key, key).unwrap();
    }

    fn renewal(&self) -> (Identity, Renewal, Arc<Clock>) {
        let clock = Arc::new(Clock(AtomicU64::new(JANUARY)));
        let [cert, key] = [&self.files.cert, &self.files.key].map(|file| std::fs::read(file).unwrap());
        let timed = Arc::clone(&clock) as Arc<dyn TimeProvider>;
        let identity = Identity::from_pem_at(self.authority.pem().as_bytes(), &cert, &key, timed).unwrap();
        (identity.clone(), Renewal::new(identity, self.files.clone()), clock)
    }

    fn here(&self) -> String {
        self.dir.path().display().to_string()
    }
}

fn kept(look: Look) -> TlsError {
    let Look::Kept(error) = look else { panic!("{look:?}") };
    error
}

#[test]
fn what_the_files_hold_is_shown_by_every_configuration_made_before() {
    let world = World::new();
    let (identity, mut renewal, _) = world.renewal();
    let client = identity.quic_client();
    let shown = || client.client_auth_cert_resolver.resolve(&[], &[]).unwrap().cert.clone();
    let before = shown();
    assert_eq!(renewal.look(), Look::Same);
    let (cert, key) = world.issue();
    world.write(&cert, &key);
    assert_eq!((renewal.look(), renewal.look()), (Look::Renewed, Look::Same));
    assert_ne!(shown(), before);
    assert_eq!(shown(), identity.shown.certified().cert);
}

#[test]
fn torn_and_wrong_files_change_nothing_and_are_said_once() {
    let world = World::new();
    let (identity, mut renewal, _) = world.renewal();
    let before = identity.shown.certified().cert.clone();
    let (cert, key) = world.issue();
    let here = world.here();

    std::fs::write(&world.files.cert, &cert).unwrap();
    says("a certificate that was replaced before its key", &kept(renewal.look()), &[&here]);
    assert_eq!(renewal.look(), Look::Same, "said once");
    world.write(&cert[..cert.len() / 2], &key);
    says("a certificate that is half written when it is renewed", &kept(renewal.look()), &[&here]);
    world.write("", &key);
    assert!(matches!(kept(renewal.look()), TlsError::NotPem { .. }));
    std::fs::remove_file(&world.files.key).unwrap();
    assert!(matches!(kept(renewal.look()), TlsError::Unreadable { .. }));
    let (other_cert, other_key) = World::new().issue();
    world.write(&other_cert, &other_key);
    says("a certificate of another authority when it is renewed", &kept(renewal.look()), &[&here]);
    assert_eq!(identity.shown.certified().cert, before, "all the while");

    world.write(&cert, &key);
    assert_eq!(renewal.look(), Look::Renewed);
    assert_ne!(identity.shown.certified().cert, before);
}

#[test]
fn a_certificate_that_ran_out_and_was_not_renewed_is_said_once() {
    let world = World::new();
    let (_, mut renewal, clock) = world.renewal();
    clock.0.store(FEBRUARY, Ordering::Relaxed);
    let error = kept(renewal.look());
    says("a certificate that ran out while it was shown", &error, &[&world.here()]);
    clock.0.fetch_add(10, Ordering::Relaxed);
    assert_eq!(renewal.look(), Look::Same);
    clock.0.store(JANUARY, Ordering::Relaxed);
    assert_eq!(renewal.look(), Look::Same);
    clock.0.store(FEBRUARY, Ordering::Relaxed);
    assert!(matches!(renewal.look(), Look::Kept(_)), "it is said anew after it was good");
}

#[test]
fn who_others_connect_to_is_not_renewed_to_a_tenants() {
    let world = World::new();
    let (identity, mut renewal, _) = world.renewal();
    let (cert, key) = world.issue_for("tenant-3.kvfleet");
    world.write(&cert, &key);
    says(
        "a tenant's certificate in place of one of the cluster's own",
        &kept(renewal.look()),
        &[&world.here()],
    );
    assert_eq!(identity.tenants(), None);

    let (identity, mut renewal, _) = world.renewal();
    assert_eq!(identity.tenants(), Some([TenantId(3)].into()));
    for (name, tenants) in [("tenant-5.kvfleet", Some([TenantId(5)].into())), ("kvfleet", None)] {
        let (cert, key) = world.issue_for(name);
        world.write(&cert, &key);
        assert_eq!((renewal.look(), identity.tenants()), (Look::Renewed, tenants), "{name}");
    }
}
