//! What went over which path in a replay, as the instances of its own cluster count it.
//!
//! An instance that was killed takes its counts with it. Not here: counting (`kvfleet_transport::pick`).

use std::collections::BTreeMap;

use kvfleet_proto::pb;

use crate::calls::{channel, instance_status};
use crate::cluster::{Cluster, name};
use crate::process::Role;

/// Encoded bytes of blocks that went over a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathBytes {
    /// From nodes.
    pub fetched: u64,
    /// To nodes.
    pub saved: u64,
}

/// What all instances say of their paths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Bytes by the path's name.
    pub bytes: BTreeMap<String, PathBytes>,
    /// A line for each instance and node: which path is taken, and why.
    pub reasons: Vec<String>,
}

impl Carried {
    /// Asks every instance that runs. One that gives no answer is left out.
    pub(super) async fn of(cluster: &Cluster) -> anyhow::Result<Carried> {
        let identity = cluster.identity()?;
        let mut carried = Carried::default();
        for (id, child) in cluster.children().filter(|((role, _), _)| *role == Role::Instance) {
            let Some(address) = child.ready().and_then(|ready| ready.addresses.get("grpc")) else { continue };
            match instance_status(channel(address, &identity)?).await {
                Ok(status) => carried.add(&name(*id), status),
                Err(status) => tracing::debug!(%status, address, "an instance does not say what it carried"),
            }
        }
        Ok(carried)
    }

    fn add(&mut self, instance: &str, status: pb::InstanceStatusReply) {
        for path in status.paths {
            let sum = self.bytes.entry(path.path).or_default();
            sum.fetched += path.fetched_bytes;
            sum.saved += path.saved_bytes;
        }
        self.reasons.extend(status.path_reasons.iter().map(|reason| format!("{instance}: {reason}")));
    }

    /// All that went over any path, in bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.bytes.values().map(|path| path.fetched + path.saved).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_added_up_by_path() {
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
        let mut carried = Carried::default();
        carried.add("instance-1", status(vec![path("quic", 1, 2), path("tcp", 4, 8)]));
        carried.add("instance-2", status(vec![path("quic", 16, 32)]));
        assert_eq!(carried.bytes["quic"], PathBytes { fetched: 17, saved: 34 });
        assert_eq!(carried.bytes["tcp"], PathBytes { fetched: 4, saved: 8 });
        assert_eq!((carried.total_bytes(), carried.reasons.len()), (63, 2));
        assert_eq!(carried.reasons[0], "instance-1: why");
    }
}
