//! For whom a service answers: one caller, with leases of its own and the tenants it may name.
//!
//! A lease is a number that its caller chose, so another caller may choose the same one, by chance or to end what it
//! does not hold. The book is told a number of this process that only the two together give. Not here: who is admitted
//! ([`crate::serve`]), and how a connection proves whose it is (`kvfleet-transport`).

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use kv_core::id::{CallerId, LeaseId, TenantId};
use kvfleet_transport::Caller;

/// What one caller may do, and its name in this process.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    /// Keyed anew in every process: who does not know the key finds no number that is another caller's.
    keys: RandomState,
    caller: u64,
    /// Nothing: every tenant there is.
    tenants: Option<Arc<[TenantId]>>,
}

impl Scope {
    /// Of this process, which may do everything.
    pub(crate) fn own(keys: RandomState) -> Scope {
        Scope { caller: keys.hash_one(Caller::Own), keys, tenants: None }
    }

    /// Of another caller under the same key, for these tenants; for every one if none are named.
    pub(crate) fn of(&self, caller: &Caller, tenants: Option<Arc<[TenantId]>>) -> Scope {
        Scope { keys: self.keys.clone(), caller: self.keys.hash_one(caller), tenants }
    }

    /// The book's name for this caller.
    pub(crate) fn caller(&self) -> CallerId {
        CallerId(self.caller)
    }

    /// The book's name for this caller's lease.
    pub(crate) fn lease(&self, number: LeaseId) -> LeaseId {
        LeaseId(self.keys.hash_one((self.caller, number)))
    }

    /// Whether the caller may read and save as this tenant.
    pub(crate) fn has(&self, tenant: TenantId) -> bool {
        self.tenants.as_ref().is_none_or(|tenants| tenants.contains(&tenant))
    }
}

/// A user of this host whose processes are served.
#[derive(Clone, Debug)]
pub(crate) struct Local {
    pub(crate) uid: u32,
    /// Nothing: every tenant there is.
    pub(crate) tenants: Option<Arc<[TenantId]>>,
    /// Whether they may map the memory of every tenant's blocks.
    pub(crate) maps: bool,
}

/// All of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Locals(Arc<[Local]>);

impl Locals {
    pub(crate) fn new(users: Vec<Local>) -> Locals {
        Locals(users.into())
    }

    /// What this user may do, if it is one of them.
    pub(crate) fn of(&self, uid: u32) -> Option<&Local> {
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
    fn a_lease_is_the_same_for_one_caller_and_another_for_every_other() {
        let own = Scope::own(RandomState::new());
        let callers = [Caller::Own, certified(1), certified(2), local(1), local(2)];
        let numbers = [0, 1, 2, u64::MAX].map(LeaseId);
        let leases = |scope: &Scope| numbers.map(|number| scope.lease(number));
        let mut all: Vec<LeaseId> = callers.iter().flat_map(|caller| leases(&own.of(caller, None))).collect();
        assert_eq!(leases(&own), leases(&own.of(&Caller::Own, None)));
        assert_eq!(leases(&own.of(&certified(1), None)), leases(&own.of(&certified(1), None)));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), callers.len() * numbers.len());
        let elsewhere = Scope::own(RandomState::new());
        assert_ne!(leases(&own), leases(&elsewhere), "nobody can compute them outside this process");
    }

    #[test]
    fn a_caller_has_the_tenants_it_was_given_and_no_others() {
        let own = Scope::own(RandomState::new());
        let some = own.of(&certified(1), Some([TenantId(3), TenantId(5)].into()));
        let has = |scope: &Scope| (0..8).filter(|tenant| scope.has(TenantId(*tenant))).collect::<Vec<u32>>();
        assert_eq!(has(&own), (0..8).collect::<Vec<u32>>());
        assert_eq!(has(&some), [3, 5]);
        assert_eq!(has(&own.of(&certified(1), Some([].into()))), [0u32; 0]);
    }
}
