//! What a wrong file says. Not here: handshakes (transport's behaviour suite).
#![allow(clippy::unwrap_used)]

use super::*;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    fn issue(&self, params: &CertificateParams) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    fn member(&self) -> (String, String) {
        self.issue(&named("kvfleet"))
    }
}

fn named(name: &str) -> CertificateParams {
    CertificateParams::new(vec![name.to_owned(), "node".to_owned()]).unwrap()
}

fn check(ca: &str, (cert, key): &(String, String)) -> Result<Identity, TlsError> {
    Identity::from_pem(ca.as_bytes(), cert.as_bytes(), key.as_bytes())
}

fn message(ca: &str, pair: &(String, String)) -> String {
    check(ca, pair).unwrap_err().to_string()
}

#[test]
fn a_good_identity_makes_all_four_configurations() {
    let authority = Authority::new();
    let identity = check(&authority.pem(), &authority.member()).unwrap();
    assert_eq!(identity.quic_server().alpn_protocols, [ALPN]);
    assert_eq!(identity.quic_client().alpn_protocols, [ALPN]);
    let _ = (identity.server_tls(), identity.client_tls());
    assert_eq!(format!("{identity:?}"), "Identity(..)");
}

#[test]
fn missing_files_are_named() {
    let files = TlsFiles { ca: "/absent/ca.pem".into(), cert: "c".into(), key: "k".into() };
    let message = files.load().unwrap_err().to_string();
    assert!(message.starts_with("cannot read cluster authority /absent/ca.pem: "), "{message}");
    assert!(message.ends_with("check the path and its permissions"), "{message}");
}

#[test]
fn text_that_is_not_pem_is_named() {
    let authority = Authority::new();
    let (cert, key) = authority.member();
    for bad in ["", "hello", "-----BEGIN CERTIFICATE-----\nAAAA"] {
        let message = message(bad, &(cert.clone(), key.clone()));
        assert!(message.starts_with("memory:ca holds no certificate in PEM form"), "{message}");
    }
    let broken = message(&authority.pem(), &("nothing".into(), key.clone()));
    assert!(broken.starts_with("memory:cert holds no certificate"), "{broken}");
    let broken = message(&authority.pem(), &(cert.clone(), "nothing".into()));
    assert!(broken.starts_with("memory:key holds no private key"), "{broken}");
    let broken = message("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &(cert, key));
    assert!(broken.starts_with("memory:ca holds no usable certificate"), "{broken}");
}

#[test]
fn a_key_in_place_of_the_authority_is_named() {
    let authority = Authority::new();
    let (cert, key) = authority.member();
    let message = message(&key.clone(), &(cert, key));
    assert!(message.contains("give the certificate (not the key) of the cluster authority"), "{message}");
}

#[test]
fn a_key_of_another_certificate_is_refused() {
    let authority = Authority::new();
    let (cert, _) = authority.member();
    let (_, key) = authority.member();
    let message = message(&authority.pem(), &(cert, key));
    assert!(message.starts_with("key memory:key does not belong to certificate memory:cert"), "{message}");
}

#[test]
fn another_authority_is_refused() {
    let message = message(&Authority::new().pem(), &Authority::new().member());
    assert!(message.contains("both files must come from the same cluster authority"), "{message}");
}

#[test]
fn another_name_and_other_times_are_refused() {
    let authority = Authority::new();
    let wrong_name = message(&authority.pem(), &authority.issue(&named("example")));
    assert!(wrong_name.contains("subject alternative name \"kvfleet\""), "{wrong_name}");

    let mut past = named("kvfleet");
    past.not_before = rcgen::date_time_ymd(2001, 1, 1);
    past.not_after = rcgen::date_time_ymd(2002, 1, 1);
    let expired = message(&authority.pem(), &authority.issue(&past));
    assert!(expired.ends_with("issue a new certificate"), "{expired}");

    let mut future = named("kvfleet");
    future.not_before = rcgen::date_time_ymd(3001, 1, 1);
    future.not_after = rcgen::date_time_ymd(3002, 1, 1);
    let early = message(&authority.pem(), &authority.issue(&future));
    assert!(early.ends_with("check the clock of this machine"), "{early}");
}
