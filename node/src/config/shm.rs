//! What may be said about serving processes of the same host over shared memory.
//!
//! Not here: serving them ([`crate::host`]), and how a connection proves whose it is (`kvfleet-transport`).

use std::path::PathBuf;

use kv_core::id::TenantId;
use kvfleet_transport::shm;
use serde::{Deserialize, Serialize};

use super::{ConfigError, NodeConfig, wrong};
use crate::scope::{Local, Locals};

/// Shared memory with processes of the same host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShmSection {
    /// Directory of the socket, which the nodes and clients of a host share. Without it the node serves over the network only.
    pub dir: Option<PathBuf>,
    /// Users whose processes are served; none: this process's own user, which may map.
    pub peers: Vec<ShmPeerSection>,
    /// Bytes of blocks that clients may read in place at one time, and so keep where they are; half of the DRAM tier when
    /// nothing is said. One client may have half of it. At 0 clients get copies.
    pub lent_bytes: Option<u64>,
    /// Memory for copies and saves of all clients together, in bytes.
    pub tray_bytes: u64,
}

/// A user of this host whose processes are served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShmPeerSection {
    /// Its number.
    pub uid: u32,
    /// Tenants it may name; none: every one.
    #[serde(default)]
    pub tenants: Vec<u32>,
    /// Whether it may map the node's memory, and so read what every tenant keeps there.
    #[serde(default)]
    pub map: bool,
}

impl Default for ShmSection {
    fn default() -> ShmSection {
        ShmSection { dir: None, peers: Vec::new(), lent_bytes: None, tray_bytes: 256 << 20 }
    }
}

impl ShmSection {
    /// Who is served, where `own` is the user of this process.
    pub(crate) fn locals(&self, own: u32) -> Locals {
        if self.dir.is_none() {
            return Locals::default();
        }
        if self.peers.is_empty() {
            return Locals::new(vec![Local { uid: own, tenants: None, maps: true }]);
        }
        let local = |peer: &ShmPeerSection| {
            let tenants: Vec<TenantId> = peer.tenants.iter().copied().map(TenantId).collect();
            let tenants = (!tenants.is_empty()).then(|| tenants.into());
            Local { uid: peer.uid, tenants, maps: peer.map }
        };
        Locals::new(self.peers.iter().map(local).collect())
    }

    /// Bytes of trays at most.
    pub(crate) fn tray_bytes_max(&self) -> u64 {
        if self.dir.is_some() { self.tray_bytes } else { 0 }
    }
}

impl NodeConfig {
    pub(super) fn validate_shm(&self) -> Result<(), ConfigError> {
        let section = &self.shm;
        let mut seen = std::collections::BTreeSet::new();
        for peer in &section.peers {
            if !seen.insert(peer.uid) {
                let remedy = "each user once, with all its tenants".to_owned();
                return wrong("shm.peers", &format_args!("user {} twice", peer.uid), remedy);
            }
            if peer.map && !peer.tenants.is_empty() {
                let remedy = "who maps the memory reads what every tenant keeps there: leave out its tenants, or its map";
                return wrong("shm.peers", &format_args!("user {}", peer.uid), remedy.to_owned());
            }
        }
        let one = shm::tray_bytes(u32::try_from(self.frame_bytes_max()).unwrap_or(u32::MAX));
        if section.dir.is_some() && section.tray_bytes < one {
            let remedy = format!("what one client needs must fit, give at least {one}");
            return wrong("shm.tray_bytes", &section.tray_bytes, remedy);
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
    fn those_who_are_named_are_served_and_without_a_name_the_own_user() {
        let known = |section: &ShmSection, uid| {
            let locals = section.locals(7);
            locals.of(uid).map(|local| (local.tenants.as_ref().map(|tenants| tenants.to_vec()), local.maps))
        };
        let own = section(Vec::new());
        assert_eq!((known(&own, 7), known(&own, 0)), (Some((None, true)), None));
        let named = section(vec![peer(1, &[], true), peer(2, &[5], false)]);
        assert_eq!(known(&named, 1), Some((None, true)));
        assert_eq!(known(&named, 2), Some((Some(vec![TenantId(5)]), false)));
        assert_eq!(known(&named, 7), None, "not even the own user when others are named");
        assert_eq!(known(&ShmSection::default(), 7), None, "there is no socket");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refused = |shm| NodeConfig { shm, ..NodeConfig::default() }.validate().unwrap_err();
        let twice = vec![peer(1, &[], true), peer(1, &[2], false)];
        says("a node: shm.peers, one twice", &refused(section(twice)), &[]);
        says("a node: shm.peers, tenants and map", &refused(section(vec![peer(1, &[2], true)])), &[]);
        let small = ShmSection { tray_bytes: 1 << 20, ..section(Vec::new()) };
        says("a node: shm.tray_bytes", &refused(small), &[]);
        let off = NodeConfig {
            shm: ShmSection { tray_bytes: 0, ..ShmSection::default() },
            ..NodeConfig::default()
        };
        assert_eq!(off.validate(), Ok(()));
    }
}
