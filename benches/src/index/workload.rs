//! Blocks that all sides of the index bench store and look up; identical in every run.
//!
//! Not here: the measurements (`index.rs`).

use benches::next_hash;
use kv_core::id::{BlockHash, IdentityDigest, NodeId, Seq, Tier};
use kv_core::index::command::{Announcement, Change, Command, NodeRecord};
use rand::SeedableRng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

pub(super) const NODES: u32 = 64;
const CHAIN_BLOCKS: usize = 500;
const SHARED_BLOCKS: usize = 64;
const SHARED_BY: usize = 16;
const RUN_BLOCKS: usize = 16;
/// Announcements per command, as in a router.
const BATCH: usize = 64;
const SEED: u64 = 20_240_711;

/// Chains of block hashes, each held by one node, in the order of their announcement.
pub(super) struct Workload {
    chains: Vec<Vec<BlockHash>>,
    unknown: Vec<BlockHash>,
}

impl Workload {
    /// As many chains as make up about `copies` stored blocks.
    pub(super) fn new(copies: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(SEED);
        let count = (copies as usize).div_ceil(CHAIN_BLOCKS);
        let mut chains: Vec<Vec<BlockHash>> = Vec::with_capacity(count);
        for number in 0..count {
            let mut chain = match number % SHARED_BY {
                0 => Vec::with_capacity(CHAIN_BLOCKS),
                behind => chains[number - behind][..SHARED_BLOCKS].to_vec(),
            };
            extend(&mut random, &mut chain);
            chains.push(chain);
        }
        let mut unknown = Vec::new();
        extend(&mut random, &mut unknown);
        Self { chains, unknown }
    }

    pub(super) fn chains(&self) -> impl Iterator<Item = &[BlockHash]> {
        self.chains.iter().map(Vec::as_slice)
    }

    /// A chain that no node holds.
    pub(super) fn unknown_chain(&self) -> &[BlockHash] {
        &self.unknown
    }

    /// `count` random chains, so that caches cannot predict the next one.
    pub(super) fn random_chains(&self, count: usize) -> Vec<&[BlockHash]> {
        let mut random = ChaCha8Rng::seed_from_u64(SEED + 1);
        (0..count).filter_map(|_| self.chains.choose(&mut random)).map(Vec::as_slice).collect()
    }

    /// Announced blocks, including repetitions.
    pub(super) fn stored_blocks(&self) -> u64 {
        (self.chains.len() * CHAIN_BLOCKS) as u64
    }

    /// Runs with their announcing nodes, in the order of storing.
    pub(super) fn runs(&self) -> impl Iterator<Item = (NodeId, &[BlockHash])> {
        let nodes = (0..NODES).map(NodeId).cycle();
        self.chains
            .iter()
            .zip(nodes)
            .flat_map(|(chain, node)| chain.chunks(RUN_BLOCKS).map(move |run| (node, run)))
    }

    /// The same as log commands: every node joins, then announcements in batches.
    pub(super) fn commands(&self) -> impl Iterator<Item = Command> {
        let joins = (0..NODES).map(|node| Command::Join(record(node)));
        let mut seq = [0u64; NODES as usize];
        let announcements: Vec<_> = self
            .runs()
            .map(move |(node, run)| {
                seq[node.0 as usize] += 1;
                let stored = Change::Stored { parent: None, blocks: run.to_vec(), tier: Tier::Dram };
                let (epoch, seq) = (kv_core::id::Epoch(1), Seq(seq[node.0 as usize]));
                Announcement { node, epoch, seq, changes: vec![stored] }
            })
            .collect();
        let batches: Vec<_> =
            announcements.chunks(BATCH).map(|batch| Command::Announce(batch.to_vec())).collect();
        joins.chain(batches)
    }
}

/// Extends a chain to the common length.
fn extend(random: &mut ChaCha8Rng, chain: &mut Vec<BlockHash>) {
    while chain.len() < CHAIN_BLOCKS {
        chain.push(next_hash(random, chain));
    }
}

fn record(node: u32) -> NodeRecord {
    NodeRecord {
        node: NodeId(node),
        data_address: String::new(),
        control_address: String::new(),
        host: String::new(),
        instance: None,
        identity: IdentityDigest::default(),
        block_bytes: 1,
    }
}
