//! Valid and invalid tenant names in certificates, and bytes that are not a certificate.
#![allow(clippy::unwrap_used)]

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, KeyUsagePurpose, SanType};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use super::*;

/// A certificate with these DNS names, between names of other kinds and further extensions.
fn leaf(names: &[&str]) -> Vec<u8> {
    let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    params.subject_alt_names.extend(names.iter().map(|name| SanType::DnsName((*name).try_into().unwrap())));
    params.subject_alt_names.push(SanType::Rfc822Name("tenant-9.kvfleet".try_into().unwrap()));
    params.subject_alt_names.push(SanType::URI("tenant-8.kvfleet".try_into().unwrap()));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
}

fn role(names: &[&str]) -> Result<Role, NamesError> {
    role_of(&leaf(names))
}

fn tenants(names: &[&str]) -> Result<Option<Vec<u32>>, NamesError> {
    role(names).map(|role| match role {
        Role::Tenants(tenants) => Some(tenants.into_iter().map(|tenant| tenant.0).collect()),
        _ => None,
    })
}

#[test]
fn a_certificate_names_the_cluster_and_one_role() {
    let roles = [
        ("kvfleet-router", Role::Router(None)),
        ("kvfleet-router-1", Role::Router(Some(RouterId(1)))),
        ("kvfleet-router-18446744073709551615", Role::Router(Some(RouterId(u64::MAX)))),
        ("kvfleet-node", Role::Node(None)),
        ("kvfleet-node-0", Role::Node(Some(NodeId(0)))),
        ("kvfleet-instance", Role::Instance(None)),
        ("kvfleet-instance-4294967295", Role::Instance(Some(InstanceId(u32::MAX)))),
        ("kvfleet-frontend", Role::Frontend),
        ("kvfleet-admin", Role::Admin),
    ];
    for (name, wanted) in &roles {
        assert_eq!(role(&["kvfleet", name]).as_ref(), Ok(wanted));
        assert_eq!(role(&[name, "localhost", "kvfleet", name]).as_ref(), Ok(wanted));
        assert_eq!(role(&["KVfleet", name]).as_ref(), Ok(wanted), "verifiers ignore case too");
        assert_eq!((wanted.name().as_str(), wanted.dns_names().len()), (*name, 2));
        assert_eq!(role(&[name]), Err(NamesError::NoCluster((*name).to_owned())));
        for (second, other) in roles.iter().filter(|(second, _)| second != name) {
            let two = NamesError::TwoRoles(wanted.name(), other.name());
            assert_eq!(role(&["kvfleet", name, second]), Err(two));
        }
        let both = NamesError::TenantAndMember((*name).to_owned());
        assert_eq!(role(&["tenant-3.kvfleet", name]), Err(both));
    }
}

#[test]
fn misspelt_role_names_are_rejected() {
    let bad = [
        "kvfleet-router-01",
        "kvfleet-router-",
        "kvfleet-router-+1",
        "kvfleet-router-1-2",
        "kvfleet-router-18446744073709551616",
        "kvfleet-node-4294967296",
        "kvfleet-node-x",
        "kvfleet-instance--1",
        "kvfleet-frontend-1",
        "kvfleet-admin-1",
        "kvfleet-Admin",
        "KVfleet-node-1",
        "kvfleet-nod-1",
        "kvfleet-",
        "kvfleet-router.",
        "kvfleet-router-1.",
    ];
    for name in bad {
        for names in [vec![name], vec!["kvfleet", name], vec!["kvfleet", "kvfleet-node-1", name]] {
            assert_eq!(role(&names), Err(NamesError::MalformedRole(name.to_owned())), "{names:?}");
        }
    }
    // Host names may stand beside the role.
    let hosts = ["kvfleet-router-0.kvfleet-routers", "kvfleet-router.kvfleet.svc", "kvfleet.example"];
    for host in hosts {
        assert_eq!(role(&["kvfleet", "kvfleet-node-1", host]), Ok(Role::Node(Some(NodeId(1)))), "{host}");
    }
}

#[test]
fn a_role_without_a_number_may_be_any() {
    let number = |number| Role::Router(Some(RouterId(number)));
    let any = Role::Router(None);
    assert!(any.may_be(&number(3)) && number(3).may_be(&any) && number(3).may_be(&number(3)));
    assert!(
        !number(3).may_be(&number(4)) && !Role::Node(None).may_be(&any) && Role::Admin.may_be(&Role::Admin)
    );
}

#[test]
fn a_certificate_names_the_cluster_or_tenants() {
    // Other names that certificates of the cluster may carry.
    let beside =
        ["router-1", "node-2.example", "kvfleet.example", "node-3.kvfleet.svc.cluster.local", "a-tenant-3"];
    for name in beside {
        assert_eq!(tenants(&["kvfleet", "kvfleet-admin", name]), Ok(None), "{name}");
    }
    assert_eq!(tenants(&["tenant-3.kvfleet"]), Ok(Some(vec![3])));
    let many = ["tenant-4294967295.kvfleet", "engine.example", "tenant-0.kvfleet", "tenant-17.kvfleet"];
    assert_eq!(tenants(&many), Ok(Some(vec![0, 17, u32::MAX])));
    for number in [0, 7, u32::MAX] {
        assert_eq!(tenants(&[&tenant_name(TenantId(number))]), Ok(Some(vec![number])));
    }
    // Enough for DER lengths of two and three bytes.
    let all: Vec<String> = (0..5_000).map(|number| tenant_name(TenantId(number))).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    assert_eq!(tenants(&all), Ok(Some((0..5_000).collect())));
}

/// Made by openssl, with critical alternative names that include a URI and a directory name.
const FOREIGN: &str = "\
-----BEGIN CERTIFICATE-----
MIIB3DCCAYKgAwIBAgIUKgk1K2Z2VtlWvnqJY85Ib3vS/jYwCgYIKoZIzj0EAwIw
DTELMAkGA1UEAwwCY2EwHhcNMjYxMTIzMTkzMTA5WhcNMjYxMjIzMTkzMTA5WjAT
MREwDwYDVQQDDAh0ZW5hbnQtMzBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABIc4
+2a09e5vXT0iLgzazx4t28Z2QUtAvr329Vswj9KlQmCfD7p6rlBIuYEnDcbJkcdQ
Y6qhijRKniiX5ltRB2KjgbkwgbYwTwYDVR0RAQH/BEUwQ4IQdGVuYW50LTMua3Zm
bGVldIYMc3BpZmZlOi8veC95ghF0ZW5hbnQtNzAua3ZmbGVldKQOMAwxCjAIBgNV
BAMMAXgwEwYDVR0lBAwwCgYIKwYBBQUHAwIwDgYDVR0PAQH/BAQDAgeAMB0GA1Ud
DgQWBBQDP1ZBxk9M+JmsmQ2ocSfAX72EJDAfBgNVHSMEGDAWgBSqjdM5texG9vl1
vsKl07koMo7fijAKBggqhkjOPQQDAgNIADBFAiEAlff4Jf6wDUcwh3XOEM7svK5H
UKwyof2BKcQT9pQSsWoCIErwvm7dL5yr5OtOYMJuDHnVGEfCTYGAy7Zyjt7am//G
-----END CERTIFICATE-----
";

#[test]
fn reads_a_certificate_made_by_openssl() {
    let leaf = CertificateDer::from_pem_slice(FOREIGN.as_bytes()).unwrap();
    assert_eq!(role_of(&leaf), Ok(Role::Tenants([3, 70].map(TenantId).into())));
}

#[test]
fn misspelt_tenant_names_are_rejected() {
    let bad = [
        "tenant-x.kvfleet",
        "tenant-.kvfleet",
        "tenant-03.kvfleet",
        "tenant-+3.kvfleet",
        "tenant--3.kvfleet",
        "tenant-4294967296.kvfleet",
        "tenant-99999999999999999999.kvfleet",
        "Tenant-3.kvfleet",
        "tenant-3.KVFLEET",
        "tenant-3.kvfleet.",
        "tenant-3.kvfleet.example",
        "tenant-*.kvfleet",
        "tenant-3 .kvfleet",
        "tenant-3.kvfleet\0",
        "tenant-3.4.kvfleet",
        "tenant-3.kvfleet.kvfleet",
        "tenant-0x3.kvfleet",
        "tenant-3_.kvfleet",
        // One of the required letters is missing.
        "tenant3.kvfleet",
        "tenant_3.kvfleet",
        "tenants-3.kvfleet",
        "tenant-3",
        "tenant-3.kvflet",
        "tenant-3,kvfleet",
        "Tenant3",
        "tenant",
        "tenat-3.kvfleet",
        "3.kvfleet",
        " tenant-3.kvfleet",
        "*.kvfleet",
        ".KVfleet",
        "tenat-3.kvfleet.",
    ];
    for name in bad {
        for names in [vec![name], vec!["kvfleet", name], vec!["tenant-1.kvfleet", name]] {
            assert_eq!(tenants(&names), Err(NamesError::Malformed(name.to_owned())), "{names:?}");
        }
    }
    let long = format!("tenant-{}.kvfleet", "9".repeat(200));
    let Err(NamesError::Malformed(shown)) = tenants(&[&long]) else { panic!() };
    assert!(long.starts_with(&shown) && shown.len() == SHOWN_CHARS_MAX);
}

#[test]
fn certificates_without_a_role_are_rejected() {
    for own in ["kvfleet", "KVFLEET"] {
        let both = NamesError::TenantAndMember(SERVER_NAME.to_owned());
        assert_eq!(tenants(&["tenant-3.kvfleet", own]), Err(both));
        assert_eq!(tenants(&[own, "node-1"]), Err(NamesError::NoRole));
    }
    for names in [&[][..], &["node"], &["kvfleet.example"]] {
        assert_eq!(tenants(names), Err(NamesError::NoName), "{names:?}");
    }
}

#[test]
fn absolute_names_are_rejected() {
    for name in ["kvfleet.", "KVfleet."] {
        for names in [vec![name], vec!["kvfleet", name], vec!["tenant-1.kvfleet", name]] {
            assert_eq!(tenants(&names), Err(NamesError::Malformed(name.to_owned())), "{names:?}");
        }
    }
}

#[test]
fn malformed_certificates_are_rejected() {
    let whole = leaf(&["tenant-3.kvfleet"]);
    for len in 0..whole.len() {
        assert_eq!(role_of(&whole[..len]), Err(NamesError::Unreadable), "the first {len} bytes");
    }
    assert_eq!(role_of(&[&whole[..], &[0]].concat()), Err(NamesError::Unreadable));
    for bytes in
        [&[0x30, 0x80, 0, 0][..], &[0x30, 0x85, 0, 0, 0, 0, 0], &[0x30, 0x84, 255, 255, 255, 255], &[40; 40]]
    {
        assert_eq!(role_of(bytes), Err(NamesError::Unreadable));
    }
    // The parser never reads past the end. One flipped bit elsewhere never yields a member, or a
    // tenant that is not written there.
    let at = whole.windows(16).position(|part| part == b"tenant-3.kvfleet").unwrap();
    let written: BTreeSet<_> = [3, 8, 9].map(TenantId).into();
    for place in (0..whole.len()).filter(|place| !(at..at + 16).contains(place)) {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[place] ^= 1 << bit;
            if let Ok(found) = role_of(&bytes) {
                let is_written = matches!(&found, Role::Tenants(tenants) if tenants.is_subset(&written));
                assert!(is_written, "bit {bit} of byte {place}");
            }
        }
    }
}
