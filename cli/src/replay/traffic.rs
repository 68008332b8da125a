//! Bytes that each transport path carried in a replay, as reported by the instances of its own
//! cluster.
//!
//! The counts of a killed instance are lost. `kvfleet_transport::pick` does the counting.

use std::collections::BTreeMap;

use kvfleet_net::tls;
use kvfleet_proto::pb;

use crate::calls::{channel, instance_status};
use crate::cluster::{LocalCluster, process_name};
use crate::process::Role;

/// Encoded bytes of blocks transferred over a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathBytes {
    /// Read from nodes.
    pub fetched: u64,
    /// Written to nodes.
    pub saved: u64,
}

/// Path counters summed over all instances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplayTraffic {
    /// Bytes by path name.
    pub bytes: BTreeMap<String, PathBytes>,
    /// One line for each instance and node: the path in use and the reason for it.
    pub reasons: Vec<String>,
}

impl ReplayTraffic {
    /// Queries every running instance. Instances that do not answer are left out.
    pub(super) async fn collect(cluster: &LocalCluster) -> anyhow::Result<ReplayTraffic> {
        let identity = cluster.identity()?;
        let mut traffic = ReplayTraffic::default();
        for (id, child) in cluster.children().filter(|((role, _), _)| *role == Role::Instance) {
            let Some(address) = child.ready().and_then(|ready| ready.addresses.get("grpc")) else { continue };
            match instance_status(channel(address, &identity, tls::Role::Instance(None))?).await {
                Ok(status) => traffic.add(&process_name(*id), status),
                Err(status) => {
                    tracing::debug!(%status, address, "cannot read the path counters of an instance");
                }
            }
        }
        Ok(traffic)
    }

    fn add(&mut self, instance: &str, status: pb::InstanceStatusReply) {
        for path in status.paths {
            let sum = self.bytes.entry(path.path).or_default();
            sum.fetched += path.fetched_bytes;
            sum.saved += path.saved_bytes;
        }
        self.reasons.extend(status.path_reasons.iter().map(|reason| format!("{instance}: {reason}")));
    }

    /// Total bytes over all paths.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.bytes.values().map(|path| path.fetched + path.saved).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_instances_by_path() {
        let path = |path: &str, fetched_bytes, saved_bytes| pb::PathBytes {
            path: path.to_owned(),
            fetched_bytes,
            saved_bytes,
        };
        let status = |paths| pb::InstanceStatusReply {
            paths,
            path_reasons: vec!["why".to_owned()],
            ..Default::default()
        };
        let mut carried = ReplayTraffic::default();
        carried.add("instance-1", status(vec![path("quic", 1, 2), path("tcp", 4, 8)]));
        carried.add("instance-2", status(vec![path("quic", 16, 32)]));
        assert_eq!(carried.bytes["quic"], PathBytes { fetched: 17, saved: 34 });
        assert_eq!(carried.bytes["tcp"], PathBytes { fetched: 4, saved: 8 });
        assert_eq!((carried.total_bytes(), carried.reasons.len()), (63, 2));
        assert_eq!(carried.reasons[0], "instance-1: why");
    }
}
