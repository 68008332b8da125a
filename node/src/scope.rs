//! Scope of a caller: its own leases and the tenants it may name.
//!
//! A caller chooses its lease numbers, so another caller may pick the same number, by accident or
//! to end a foreign lease. The book receives an id that is derived from caller and number together.
//! Not here: admission ([`crate::block_service`]) and authentication of connections
//! (`kvfleet-transport`).

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use kv_core::id::{CallerId, LeaseId, TenantId};
use kvfleet_transport::Caller;

/// Permissions of one caller, and its id within this process.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    /// Keyed anew in every process, so that a caller cannot compute the id of another caller's
    /// lease.
    keys: RandomState,
    caller: u64,
    /// `None` means every tenant.
    tenants: Option<Arc<[TenantId]>>,
}

impl Scope {
    /// Scope of this process, with all permissions.
    pub(crate) fn for_process(keys: RandomState) -> Scope {
        Scope { caller: keys.hash_one(Caller::ThisProcess), keys, tenants: None }
    }

    /// Scope of another caller under the same key, for these tenants. `None` means every tenant.
    pub(crate) fn of(&self, caller: &Caller, tenants: Option<Arc<[TenantId]>>) -> Scope {
        Scope { keys: self.keys.clone(), caller: self.keys.hash_one(caller), tenants }
    }

    /// The caller's id in the book.
    pub(crate) fn caller(&self) -> CallerId {
        CallerId(self.caller)
    }

    /// The id of this caller's lease in the book.
    pub(crate) fn lease(&self, number: LeaseId) -> LeaseId {
        LeaseId(self.keys.hash_one((self.caller, number)))
    }

    /// Whether the caller may read and save as this tenant.
    pub(crate) fn has_tenant(&self, tenant: TenantId) -> bool {
        self.tenants.as_ref().is_none_or(|tenants| tenants.contains(&tenant))
    }
}

/// A local user with access to this node.
#[derive(Clone, Debug)]
pub(crate) struct LocalUser {
    pub(crate) uid: u32,
    /// `None` means every tenant.
    pub(crate) tenants: Option<Arc<[TenantId]>>,
    /// Whether its processes may map the memory with every tenant's blocks.
    pub(crate) may_map: bool,
}

/// All local users with access.
#[derive(Clone, Debug, Default)]
pub(crate) struct LocalUsers(Arc<[LocalUser]>);

impl LocalUsers {
    pub(crate) fn new(users: Vec<LocalUser>) -> LocalUsers {
        LocalUsers(users.into())
    }

    /// The permissions of this user, if it has access.
    pub(crate) fn of(&self, uid: u32) -> Option<&LocalUser> {
        self.0.iter().find(|local| local.uid == uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certified(byte: u8) -> Caller {
        Caller::Certified([byte; 300].into())
    }

    fn local(connection: u64) -> Caller {
        Caller::Local { uid: 0, pid: 1, connection }
    }

    #[test]
    fn lease_ids_are_stable_per_caller_and_differ_between_callers() {
        let own = Scope::for_process(RandomState::new());
        let callers = [Caller::ThisProcess, certified(1), certified(2), local(1), local(2)];
        let numbers = [0, 1, 2, u64::MAX].map(LeaseId);
        let leases = |scope: &Scope| numbers.map(|number| scope.lease(number));
        let mut all: Vec<LeaseId> = callers.iter().flat_map(|caller| leases(&own.of(caller, None))).collect();
        assert_eq!(leases(&own), leases(&own.of(&Caller::ThisProcess, None)));
        assert_eq!(leases(&own.of(&certified(1), None)), leases(&own.of(&certified(1), None)));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), callers.len() * numbers.len());
        let elsewhere = Scope::for_process(RandomState::new());
        assert_ne!(
            leases(&own),
            leases(&elsewhere),
            "lease ids must differ between processes, so that callers cannot compute them"
        );
    }

    #[test]
    fn caller_has_exactly_its_tenants() {
        let own = Scope::for_process(RandomState::new());
        let some = own.of(&certified(1), Some([TenantId(3), TenantId(5)].into()));
        let has =
            |scope: &Scope| (0..8).filter(|tenant| scope.has_tenant(TenantId(*tenant))).collect::<Vec<u32>>();
        assert_eq!(has(&own), (0..8).collect::<Vec<u32>>());
        assert_eq!(has(&some), [3, 5]);
        assert_eq!(has(&own.of(&certified(1), Some([].into()))), [0u32; 0]);
    }
}
