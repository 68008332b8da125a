//! Errors about wrong files. Not here: handshakes (transport's behaviour suite).
#![allow(clippy::unwrap_used)]

use super::*;
use kv_core::id::{NodeId, RouterId, TenantId};
use kvfleet_errors_doc::says;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};

struct TestAuthority(CertifiedIssuer<'static, KeyPair>);

impl TestAuthority {
    fn new() -> TestAuthority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        TestAuthority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
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
    CertificateParams::new(vec![name.to_owned(), "kvfleet-node-1".to_owned()]).unwrap()
}

fn check(ca: &str, (cert, key): &(String, String)) -> Result<Identity, TlsError> {
    Identity::from_pem(ca.as_bytes(), cert.as_bytes(), key.as_bytes())
}

fn message(ca: &str, pair: &(String, String)) -> String {
    check(ca, pair).unwrap_err().to_string()
}

#[test]
fn a_valid_identity_makes_all_configurations() {
    let authority = TestAuthority::new();
    let identity = check(&authority.pem(), &authority.member()).unwrap();
    assert_eq!(identity.quic_server().alpn_protocols, [ALPN]);
    assert_eq!(identity.quic_client().alpn_protocols, [ALPN]);
    let (server, client) = (identity.tcp_server(), identity.tcp_client());
    assert_eq!(
        (&server.alpn_protocols, &client.alpn_protocols),
        (&vec![ALPN_TCP.to_vec()], &vec![ALPN_TCP.to_vec()])
    );
    assert_eq!((server.max_early_data_size, client.enable_early_data), (0, false));
    let (server, client) = (identity.grpc_server(), identity.grpc_client(Role::Node(None)));
    assert_eq!(
        (&server.alpn_protocols, &client.alpn_protocols),
        (&vec![ALPN_GRPC.to_vec()], &vec![ALPN_GRPC.to_vec()])
    );
    assert_eq!((server.max_early_data_size, client.enable_early_data), (0, false));
    let _ = identity.client_tls();
    assert_eq!(format!("{identity:?}"), "Identity(..)");
}

#[test]
fn certificates_without_one_role_are_refused() {
    let authority = TestAuthority::new();
    let issue = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        authority.issue(&CertificateParams::new(names).unwrap())
    };
    let none = message(&authority.pem(), &issue(&["kvfleet", "node-1"]));
    says("a certificate without a role", &none, &[]);
    let two = message(&authority.pem(), &issue(&["kvfleet", "kvfleet-node-1", "kvfleet-admin"]));
    says("a certificate with two roles", &two, &[]);
    let misspelt = message(&authority.pem(), &issue(&["kvfleet", "kvfleet-node-01"]));
    says("a certificate with a misspelt role", &misspelt, &[]);
}

#[test]
fn tenant_certificates_are_for_clients_only() {
    let authority = TestAuthority::new();
    let issue = |names: &[&str], usages: &[ExtendedKeyUsagePurpose]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = usages.to_vec();
        authority.issue(&params)
    };
    let pair = issue(&["tenant-3.kvfleet", "tenant-7.kvfleet"], &[ExtendedKeyUsagePurpose::ClientAuth]);
    let identity = check(&authority.pem(), &pair).unwrap();
    assert_eq!(identity.role(), Role::Tenants([3, 7].map(TenantId).into()));
    let node = Role::Node(Some(NodeId(1)));
    assert_eq!(check(&authority.pem(), &authority.member()).unwrap().role(), node);

    let wrong = issue(&["kvfleet", "kvfleet-node-1", "tenant-03.kvfleet"], &[]);
    says("a certificate that names a tenant wrongly", &message(&authority.pem(), &wrong), &[]);
    let both = issue(&["kvfleet", "tenant-3.kvfleet"], &[]);
    says("a certificate that names tenants and the cluster", &message(&authority.pem(), &both), &[]);
    let servers = issue(&["tenant-3.kvfleet"], &[ExtendedKeyUsagePurpose::ServerAuth]);
    says("a tenant's certificate for servers only", &message(&authority.pem(), &servers), &[]);
    assert!(
        message(&TestAuthority::new().pem(), &pair)
            .contains("both files must come from the same cluster authority")
    );

    let dir = tempfile::tempdir().unwrap();
    let [ca, cert, key] = ["ca.pem", "cert.pem", "cert.key"].map(|name| dir.path().join(name));
    let files = TlsFiles { ca, cert, key };
    let write = |pair: &(String, String)| {
        std::fs::write(&files.ca, authority.pem()).unwrap();
        std::fs::write(&files.cert, &pair.0).unwrap();
        std::fs::write(&files.key, &pair.1).unwrap();
    };
    write(&pair);
    assert!(files.load().is_ok());
    let here = dir.path().display().to_string();
    says(
        "a tenant's certificate where others are to connect",
        &files.load_server(&node).unwrap_err(),
        &[&here],
    );
    write(&authority.member());
    assert!(files.load_server(&node).is_ok() && files.load_server(&Role::Node(None)).is_ok());
    let wrong = files.load_server(&Role::Router(Some(RouterId(1)))).unwrap_err();
    says("a node's certificate in a router's configuration", &wrong, &[&here]);
    assert!(files.load_server(&Role::Node(Some(NodeId(2)))).is_err());
}

#[test]
fn missing_files_are_named() {
    let absent = |at: usize| {
        let present = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let mut paths = [present.clone(), present.clone(), present];
        paths[at] = "/absent/file.pem".into();
        let [ca, cert, key] = paths;
        TlsFiles { ca, cert, key }.load().unwrap_err()
    };
    says("an authority's file that is absent", &absent(0), &[]);
    says("a certificate that is absent", &absent(1), &[]);
    says("a private key that is absent", &absent(2), &[]);
}

#[test]
fn text_that_is_not_pem_is_named() {
    let authority = TestAuthority::new();
    let (cert, key) = authority.member();
    for bad in ["", "hello", "-----BEGIN CERTIFICATE-----\nAAAA"] {
        let message = message(bad, &(cert.clone(), key.clone()));
        assert!(message.starts_with("memory:ca holds no certificate in PEM form"), "{message}");
    }
    let broken = message(&authority.pem(), &("nothing".into(), key.clone()));
    says("a certificate's file that is no PEM", &broken, &[]);
    let broken = message(&authority.pem(), &(cert.clone(), "nothing".into()));
    says("a key's file that is no PEM", &broken, &[]);
    let broken = message("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &(cert, key));
    says("an authority's certificate that is damaged", &broken, &[]);
}

#[test]
fn a_key_in_place_of_the_authority_is_named() {
    let authority = TestAuthority::new();
    let (cert, key) = authority.member();
    says("a key in place of the authority's certificate", &message(&key.clone(), &(cert, key)), &[]);
}

#[test]
fn a_key_of_another_certificate_is_refused() {
    let authority = TestAuthority::new();
    let (cert, _) = authority.member();
    let (_, key) = authority.member();
    says("a key of another certificate", &message(&authority.pem(), &(cert, key)), &[]);
}

#[test]
fn another_authority_is_refused() {
    let message = message(&TestAuthority::new().pem(), &TestAuthority::new().member());
    says("a certificate of another authority", &message, &[]);
}

#[test]
fn another_name_and_other_times_are_refused() {
    let authority = TestAuthority::new();
    let wrong_name = message(&authority.pem(), &authority.issue(&named("example")));
    says("a certificate for another name", &wrong_name, &[]);

    let mut past = named("kvfleet");
    past.not_before = rcgen::date_time_ymd(2001, 1, 1);
    past.not_after = rcgen::date_time_ymd(2002, 1, 1);
    let expired = message(&authority.pem(), &authority.issue(&past));
    says("a certificate that has expired", &expired, &times(&expired));

    let mut future = named("kvfleet");
    future.not_before = rcgen::date_time_ymd(3001, 1, 1);
    future.not_after = rcgen::date_time_ymd(3002, 1, 1);
    let early = message(&authority.pem(), &authority.issue(&future));
    says("a certificate that is not valid yet", &early, &times(&early));
}

/// The seconds in a message: they depend on when the test runs.
fn times(message: &str) -> Vec<&str> {
    let numbers = message.split(|letter: char| !letter.is_ascii_digit());
    numbers.filter(|number| number.len() > 6).collect()
}
