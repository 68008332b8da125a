//! Follows KV events of discovered engines.
//!
//! Not here: the connections (`kvfleet_router`).

use std::collections::BTreeMap;

use kvfleet_router::{EngineConfig, RouterHandle};

/// Keeps the set of followed engines equal to the wanted one.
pub(crate) struct EngineEvents {
    router: RouterHandle,
    followed: BTreeMap<u32, EngineConfig>,
}

impl EngineEvents {
    pub(crate) fn new(router: RouterHandle) -> EngineEvents {
        EngineEvents { router, followed: BTreeMap::new() }
    }

    /// Follows exactly these engines, keyed by the instance of their first rank. Returns problems
    /// with some of them.
    pub(crate) fn follow_exactly(&mut self, wanted: BTreeMap<u32, EngineConfig>) -> Vec<String> {
        let obsolete: Vec<_> = self
            .followed
            .iter()
            .filter(|(instance, engine)| wanted.get(instance) != Some(engine))
            .map(|(instance, _)| *instance)
            .collect();
        for instance in obsolete {
            self.followed.remove(&instance);
            self.router.unfollow(instance);
        }
        let mut problems = Vec::new();
        for (instance, engine) in wanted {
            if !self.followed.contains_key(&instance) {
                match self.router.follow(engine.clone()) {
                    Ok(()) => drop(self.followed.insert(instance, engine)),
                    Err(error) => {
                        problems
                            .push(format!("the events of instance {instance} cannot be followed: {error}"));
                    }
                }
            }
        }
        problems
    }
}
