//! Tests of the registry; probing is tested next to its code.

use super::*;

fn endpoint(instance: u32, authority: &str) -> Endpoint {
    let authority = authority.to_owned();
    let instance = InstanceId(instance);
    Endpoint {
        instance,
        authority,
        is_tls: false,
        fetches: false,
        role: InstanceRole::Both,
        place: String::new(),
        is_draining: false,
        origin: Origin::Admin,
    }
}

#[test]
fn finds_endpoints_by_instance_and_address() {
    let all = EndpointRegistry::default();
    all.put(endpoint(2, "b:80"));
    all.put(endpoint(1, "a:80"));
    let address = "10.0.0.2:80".parse().expect("an address");
    all.update_status(InstanceId(2), "b:80", |standing| standing.addresses = vec![address]);
    let instance = |authority| all.by_address(authority).map(|endpoint| endpoint.instance.0);
    assert_eq!([instance("a:80"), instance("b:80"), instance("10.0.0.2:80")], [Some(1), Some(2), Some(2)]);
    assert_eq!([instance("a:81"), instance("10.0.0.1:80"), instance("")], [None; 3]);
    assert_eq!(all.addresses(InstanceId(2)), [address]);
    assert_eq!(all.list().iter().map(|one| one.instance.0).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn status_of_another_address_is_dropped() {
    let all = EndpointRegistry::default();
    all.put_reporting(endpoint(1, "a:80"), true);
    all.update_status(InstanceId(1), "a:80", |standing| standing.is_unhealthy = true);
    assert!(!all.is_open(InstanceId(1)));
    all.put(endpoint(1, "a:80"));
    assert!(!all.is_open(InstanceId(1)) && all.reports_itself(InstanceId(1)), "replaced by the same address");
    all.put(endpoint(1, "b:80"));
    assert!(all.is_open(InstanceId(1)));
    all.update_status(InstanceId(1), "a:80", |standing| standing.is_unhealthy = true);
    assert!(all.is_open(InstanceId(1)), "a late update for the previous address");
}

#[test]
fn draining_closes_an_endpoint_and_notifies() {
    let all = EndpointRegistry::default();
    let mut changes = all.changes();
    assert!(!all.drain(InstanceId(1)) && !changes.has_changed().expect("the sender lives"));
    all.put(endpoint(1, "a:80"));
    assert!(changes.has_changed().expect("the sender lives") && all.is_open(InstanceId(1)));
    changes.mark_unchanged();
    assert!(all.drain(InstanceId(1)) && changes.has_changed().expect("the sender lives"));
    assert!(!all.is_open(InstanceId(1)) && all.get(InstanceId(1)).is_some_and(|one| one.is_draining));
    let changed = all.update(InstanceId(1), |one| one.is_draining = false);
    assert!(changed.is_some_and(|one| !one.is_draining) && all.is_open(InstanceId(1)));
    assert!(all.remove(InstanceId(1)).is_some() && all.remove(InstanceId(1)).is_none());
    assert!(!all.is_open(InstanceId(1)) && all.status(InstanceId(1)).is_none());
    assert!(
        all.update(InstanceId(1), |one| one.is_draining = true).is_none(),
        "a removed endpoint stays removed"
    );
    assert!(all.get(InstanceId(1)).is_none());
}
