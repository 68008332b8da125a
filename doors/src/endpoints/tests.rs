//! The registry itself; what is asked of engines is tested beside it.

use super::*;

fn endpoint(instance: u32, authority: &str) -> Endpoint {
    let authority = authority.to_owned();
    let instance = InstanceId(instance);
    Endpoint {
        instance,
        authority,
        fetches: false,
        role: Role::Both,
        place: String::new(),
        draining: false,
        origin: Origin::Called,
    }
}

#[test]
fn an_endpoint_is_found_by_instance_and_by_each_of_its_addresses() {
    let all = Endpoints::default();
    all.put(endpoint(2, "b:80"));
    all.put(endpoint(1, "a:80"));
    let address = "10.0.0.2:80".parse().expect("an address");
    all.note(InstanceId(2), "b:80", |standing| standing.addresses = vec![address]);
    let instance = |authority| all.at(authority).map(|endpoint| endpoint.instance.0);
    assert_eq!([instance("a:80"), instance("b:80"), instance("10.0.0.2:80")], [Some(1), Some(2), Some(2)]);
    assert_eq!([instance("a:81"), instance("10.0.0.1:80"), instance("")], [None; 3]);
    assert_eq!(all.addresses(InstanceId(2)), [address]);
    assert_eq!(all.list().iter().map(|one| one.instance.0).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn what_was_heard_of_an_address_does_not_count_for_another() {
    let all = Endpoints::default();
    all.put_that_reports(endpoint(1, "a:80"), true);
    all.note(InstanceId(1), "a:80", |standing| standing.is_unwell = true);
    assert!(!all.is_open(InstanceId(1)));
    all.put(endpoint(1, "a:80"));
    assert!(!all.is_open(InstanceId(1)) && all.reports_itself(InstanceId(1)), "the same, put again");
    all.put(endpoint(1, "b:80"));
    assert!(all.is_open(InstanceId(1)));
    all.note(InstanceId(1), "a:80", |standing| standing.is_unwell = true);
    assert!(all.is_open(InstanceId(1)), "a late word of the one before");
}

#[test]
fn one_that_drains_is_not_open_and_changes_are_told() {
    let all = Endpoints::default();
    let mut changes = all.changes();
    assert!(!all.drain(InstanceId(1)) && !changes.has_changed().expect("it lives"));
    all.put(endpoint(1, "a:80"));
    assert!(changes.has_changed().expect("it lives") && all.is_open(InstanceId(1)));
    changes.mark_unchanged();
    assert!(all.drain(InstanceId(1)) && changes.has_changed().expect("it lives"));
    assert!(!all.is_open(InstanceId(1)) && all.get(InstanceId(1)).is_some_and(|one| one.draining));
    let changed = all.update(InstanceId(1), |one| one.draining = false);
    assert!(changed.is_some_and(|one| !one.draining) && all.is_open(InstanceId(1)));
    assert!(all.remove(InstanceId(1)).is_some() && all.remove(InstanceId(1)).is_none());
    assert!(!all.is_open(InstanceId(1)) && all.standing(InstanceId(1)).is_none());
    assert!(
        all.update(InstanceId(1), |one| one.draining = true).is_none(),
        "what is gone does not come back"
    );
    assert!(all.get(InstanceId(1)).is_none());
}
