//! Configuration keys of shared memory with processes of this host.
//!
//! Not here: the server ([`crate::host`]) and authentication of connections (`kvfleet-transport`).

use std::path::PathBuf;

use kv_core::id::TenantId;
use kvfleet_transport::shm;
use serde::{Deserialize, Serialize};

use super::{ConfigError, NodeConfig, wrong};
use crate::scope::{LocalUser, LocalUsers};

/// Shared memory with processes of the same host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShmSection {
    /// Directory of the socket, shared by the nodes and clients of a host. Without it the node
    /// serves over the network only.
    pub dir: Option<PathBuf>,
    /// Users with access. By default only this process's own user, which may map the memory.
    pub peers: Vec<ShmPeerSection>,
    /// Maximum bytes of blocks that clients read in place, which keeps them from eviction. Default:
    /// half of the DRAM tier. One client may use half of it. At 0 clients receive copies.
    pub in_place_bytes: Option<u64>,
    /// Bounce buffers for copies and saves of all clients together, in bytes.
    pub bounce_buffer_bytes: u64,
}

/// A user of this host with access.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShmPeerSection {
    /// User id.
    pub uid: u32,
    /// Tenants it may name; empty for every tenant.
    #[serde(default)]
    pub tenants: Vec<u32>,
    /// Whether it may map the node's memory, and so read every tenant's blocks.
    #[serde(default)]
    pub map: bool,
}

impl Default for ShmSection {
    fn default() -> ShmSection {
        ShmSection { dir: None, peers: Vec::new(), in_place_bytes: None, bounce_buffer_bytes: 256 << 20 }
    }
}

impl ShmSection {
    /// The users with access; `own` is the user of this process.
    pub(crate) fn local_users(&self, own: u32) -> LocalUsers {
        if self.dir.is_none() {
            return LocalUsers::default();
        }
        if self.peers.is_empty() {
            return LocalUsers::new(vec![LocalUser { uid: own, tenants: None, may_map: true }]);
        }
        let local = |peer: &ShmPeerSection| {
            let tenants: Vec<TenantId> = peer.tenants.iter().copied().map(TenantId).collect();
            let tenants = (!tenants.is_empty()).then(|| tenants.into());
            LocalUser { uid: peer.uid, tenants, may_map: peer.map }
        };
        LocalUsers::new(self.peers.iter().map(local).collect())
    }

    /// Maximum bytes of bounce buffers.
    pub(crate) fn bounce_buffer_bytes_max(&self) -> u64 {
        if self.dir.is_some() { self.bounce_buffer_bytes } else { 0 }
    }
}

impl NodeConfig {
    pub(super) fn validate_shm(&self) -> Result<(), ConfigError> {
        let section = &self.shm;
        let mut seen = std::collections::BTreeSet::new();
        for peer in &section.peers {
            if !seen.insert(peer.uid) {
                let remedy = "list each user once, with all its tenants".to_owned();
                return wrong("shm.peers", &format_args!("user {} twice", peer.uid), remedy);
            }
            if peer.map && !peer.tenants.is_empty() {
                let remedy = "a process that maps the memory can read every tenant's blocks: leave out its \
                    tenants, or its map";
                return wrong("shm.peers", &format_args!("user {}", peer.uid), remedy.to_owned());
            }
        }
        let one = shm::bounce_bytes(u32::try_from(self.frame_bytes_max()).unwrap_or(u32::MAX));
        if section.dir.is_some() && section.bounce_buffer_bytes < one {
            let remedy = format!("the buffers of one client must fit, give at least {one}");
            return wrong("shm.bounce_buffer_bytes", &section.bounce_buffer_bytes, remedy);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    fn section(peers: Vec<ShmPeerSection>) -> ShmSection {
        ShmSection { dir: Some(PathBuf::from("run")), peers, ..ShmSection::default() }
    }

    fn peer(uid: u32, tenants: &[u32], map: bool) -> ShmPeerSection {
        ShmPeerSection { uid, tenants: tenants.to_vec(), map }
    }

    #[test]
    fn only_listed_users_are_served_and_by_default_the_own_user() {
        let known = |section: &ShmSection, uid| {
            let locals = section.local_users(7);
            locals
                .of(uid)
                .map(|local| (local.tenants.as_ref().map(|tenants| tenants.to_vec()), local.may_map))
        };
        let own = section(Vec::new());
        assert_eq!((known(&own, 7), known(&own, 0)), (Some((None, true)), None));
        let named = section(vec![peer(1, &[], true), peer(2, &[5], false)]);
        assert_eq!(known(&named, 1), Some((None, true)));
        assert_eq!(known(&named, 2), Some((Some(vec![TenantId(5)]), false)));
        assert_eq!(known(&named, 7), None, "the own user has no access when others are listed");
        assert_eq!(known(&ShmSection::default(), 7), None, "without a socket no user has access");
    }

    #[test]
    fn invalid_values_are_refused() {
        let refused = |shm| NodeConfig { shm, ..NodeConfig::default() }.validate().unwrap_err();
        let twice = vec![peer(1, &[], true), peer(1, &[2], false)];
        says("a node: shm.peers, one twice", &refused(section(twice)), &[]);
        says("a node: shm.peers, tenants and map", &refused(section(vec![peer(1, &[2], true)])), &[]);
        let small = ShmSection { bounce_buffer_bytes: 1 << 20, ..section(Vec::new()) };
        says("a node: shm.bounce_buffer_bytes", &refused(small), &[]);
        let off = NodeConfig {
            shm: ShmSection { bounce_buffer_bytes: 0, ..ShmSection::default() },
            ..NodeConfig::default()
        };
        assert_eq!(off.validate(), Ok(()));
    }
}
