//! Shape of a local cluster: counts, capacities, identity. Built from flags or by tests.

use std::path::PathBuf;

use kv_core::prefix::IdentityManifest;
use kvfleet_client::Transport;
use kvfleet_gateway::ModelConfig;

use crate::args::{ShapeArgs, Target};

/// Layers of an emulated block.
pub const LAYERS: u32 = 32;

/// Capacity of each node, in blocks of the cluster's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeCapacity {
    /// Blocks in DRAM.
    pub dram_blocks: u64,
    /// Blocks on SSD; 0 for no SSD tier.
    pub ssd_blocks: u64,
}

/// Shape of a local cluster.
#[derive(Clone, Debug)]
pub struct ClusterShape {
    /// Path of the `kvfleet` binary.
    pub binary: PathBuf,
    /// Number of routers.
    pub routers: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Number of instances; instance N uses node N as its local node, if it exists.
    pub instances: u32,
    /// Payload of one block in bytes.
    pub block_bytes: u64,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Layers of one block.
    pub layers: u32,
    /// Capacity of each node.
    pub capacity: NodeCapacity,
    /// Eviction policy of the nodes.
    pub policy: String,
    /// High and low fill level of each tier; `None` for the defaults.
    pub watermarks: Option<(f64, f64)>,
    /// Hardware profile for modelled compute.
    pub profile: String,
    /// The first instances, which only prefill; the others then only decode. 0: all do both.
    pub prefill_instances: u32,
    /// Real compute time as a share of the modelled time.
    pub time_scale: f64,
    /// Least time for a fetch, in milliseconds.
    pub fetch_floor_ms: u64,
    /// Transport of block bytes.
    pub transport: Transport,
    /// Persistent data directory; `None` for a temporary one.
    pub data_dir: Option<PathBuf>,
    /// First port of the routers; `None` for free ones.
    pub base_port: Option<u16>,
    /// OTLP collector; empty for none.
    pub otlp: String,
    /// Log filter of the processes.
    pub log: String,
    /// Further keys, as `role.key=value`.
    pub overrides: Vec<String>,
    /// OpenAI-compatible API; `None` for none.
    pub openai: Option<OpenAiShape>,
}

/// OpenAI-compatible API, and how prompts are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenAiShape {
    /// Port of router 1; router N uses the port N - 1 higher. 0 for free ports.
    pub port: u16,
    /// Whether other hosts can reach it, without a key.
    pub open: bool,
    /// Models with their tokenizers; if empty, every model name is accepted.
    pub models: Vec<ModelConfig>,
}

impl ClusterShape {
    /// One router, one node and one instance, with capacity for a thousand blocks of 4 KiB: a base
    /// for changes.
    #[must_use]
    pub fn small(binary: PathBuf) -> Self {
        Self {
            binary,
            routers: 1,
            nodes: 1,
            instances: 1,
            block_bytes: 4096,
            block_tokens: 512,
            layers: 4,
            capacity: NodeCapacity { dram_blocks: 1000, ssd_blocks: 0 },
            policy: "lru".to_owned(),
            watermarks: Some((1.0, 1.0)),
            profile: kv_core::schedule::HardwareProfile::default().name.to_owned(),
            prefill_instances: 0,
            time_scale: 0.0,
            fetch_floor_ms: 10_000,
            transport: Transport::Quic,
            data_dir: None,
            base_port: None,
            otlp: String::new(),
            log: "info".to_owned(),
            overrides: vec![],
            openai: None,
        }
    }

    /// Time scale of the routers' predictions. Without compute time, they predict the profile's own
    /// times.
    #[must_use]
    pub fn predicted_time_scale(&self) -> f64 {
        if self.time_scale > 0.0 { self.time_scale } else { 1.0 }
    }

    /// The identity that every process of this cluster serves.
    #[must_use]
    pub fn manifest(&self) -> IdentityManifest {
        manifest(self.block_tokens, self.layers)
    }
}

/// Number of prefill instances; at least one other instance is needed to decode.
fn prefill_instances(args: &ShapeArgs) -> anyhow::Result<u32> {
    let ShapeArgs { prefill_instances, instances, .. } = *args;
    anyhow::ensure!(
        prefill_instances == 0 || prefill_instances < instances,
        "--prefill-instances is {prefill_instances} of {instances} instances: leave at least one to decode, \
         or give --instances {}",
        u64::from(prefill_instances) + 1
    );
    Ok(prefill_instances)
}

/// Identity of the emulated model with this block geometry.
#[must_use]
pub fn manifest(block_tokens: u32, layers: u32) -> IdentityManifest {
    IdentityManifest { block_tokens, layers, ..IdentityManifest::default() }
}

impl ClusterShape {
    /// Shape from the flags, with this binary; the command adds capacity and base port.
    pub fn from_args(args: &ShapeArgs) -> anyhow::Result<Self> {
        let binary = std::env::current_exe().map_err(|cause| {
            anyhow::anyhow!("cannot find this program's own file to start processes: {cause}")
        })?;
        Ok(Self {
            routers: args.routers,
            nodes: args.nodes,
            instances: args.instances,
            block_bytes: args.block_bytes,
            layers: LAYERS,
            policy: args.policy.clone(),
            watermarks: args.watermarks.map(|marks| (marks.high, marks.low)),
            profile: args.profile.clone(),
            prefill_instances: prefill_instances(args)?,
            time_scale: args.time_scale,
            transport: args.transport,
            data_dir: args.data_dir.clone(),
            otlp: args.otlp.clone().unwrap_or_default(),
            log: args.log.clone(),
            overrides: args.overrides.clone(),
            ..Self::small(binary)
        })
    }

    /// Checks that a fault's target exists in a cluster of this shape.
    pub fn check_target(args: &ShapeArgs, target: Target) -> Result<(), String> {
        let check = |what: &str, number: u64, count: u32| {
            if (1..=u64::from(count)).contains(&number) {
                Ok(())
            } else {
                Err(format!("there is no {what} {number}: the cluster has {what}s 1 to {count}"))
            }
        };
        match target {
            Target::Node(number) => check("node", number.into(), args.nodes),
            Target::Router(number) => check("router", number, args.routers),
            Target::Instance(number) => check("instance", number.into(), args.instances),
            Target::RouterLeader => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;
    use kvfleet_errors_doc::says;

    use super::*;

    #[derive(Parser)]
    struct ShapeCommandLine {
        #[command(flatten)]
        args: ShapeArgs,
    }

    #[test]
    fn requires_a_decode_instance() {
        let shape = |count: &str| {
            let cli = ShapeCommandLine::parse_from(["up", "--instances", "3", "--prefill-instances", count]);
            ClusterShape::from_args(&cli.args)
        };
        assert_eq!(["0", "2"].map(|count| shape(count).unwrap().prefill_instances), [0, 2]);
        says("pairs of which nobody goes on", &shape("3").unwrap_err(), &[]);
    }
}
