//! Engines whose events are followed because something found them, and not the configuration.
//!
//! Not here: following (`kvfleet_router`).

use std::collections::BTreeMap;

use kvfleet_router::{Desk, EngineConfig};

/// Follows what is wanted, and nothing that is not any more.
pub(crate) struct Events {
    desk: Desk,
    followed: BTreeMap<u32, EngineConfig>,
}

impl Events {
    pub(crate) fn new(desk: Desk) -> Events {
        Events { desk, followed: BTreeMap::new() }
    }

    /// Follows these, by the instance of their first rank, and no others; what is wrong with some of them.
    pub(crate) fn settle(&mut self, wanted: BTreeMap<u32, EngineConfig>) -> Vec<String> {
        let over: Vec<_> = self
            .followed
            .iter()
            .filter(|(instance, engine)| wanted.get(instance) != Some(engine))
            .map(|(instance, _)| *instance)
            .collect();
        for instance in over {
            self.followed.remove(&instance);
            self.desk.unfollow(instance);
        }
        let mut problems = Vec::new();
        for (instance, engine) in wanted {
            if !self.followed.contains_key(&instance) {
                match self.desk.follow(engine.clone()) {
                    Ok(()) => drop(self.followed.insert(instance, engine)),
                    Err(error) => {
                        problems.push(format!("the events of instance {instance} are not heard: {error}"));
                    }
                }
            }
        }
        problems
    }
}
