//! A node with a full DRAM tier in the same process: a fetch leases blocks and returns references
//! to their bytes, and its release ends the lease.
//!
//! Not here: the measurements (the parent module), and networks.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use kv_core::id::{BlockHash, Category, IdentityDigest, LeaseId, RequestId, TenantId};
use kvfleet_net::certificates::{Authority, CertificateFiles};
use kvfleet_net::tls::Role;
use kvfleet_node::{Node, NodeConfig, TlsSection};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_transport::{
    BlockService, FetchAnswer, FetchRequest, Progress, RequestContext, SaveOffer, SaveRequest,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::runtime::{Builder, Runtime};

/// Payload of a block, so that a frame is a page. The size does not affect a reference.
const BLOCK_BYTES: u64 = 3 << 10;

/// Blocks of one prefix: the longest fetch.
pub(super) const PREFIX_BLOCKS: usize = 512;

/// Number of stored prefixes.
const PREFIXES: usize = 256;

/// Number of stored blocks.
pub(super) const BLOCKS: usize = PREFIXES * PREFIX_BLOCKS;

/// A node full of blocks.
pub(super) struct DramTier {
    runtime: Runtime,
    node: Node,
    blocks: Arc<dyn BlockService>,
    identity: IdentityDigest,
    leases: u64,
    rng: ChaCha8Rng,
}

impl DramTier {
    /// Starts a node with [`BLOCKS`] blocks in DRAM and no other tier, on the caller's thread;
    /// `dir` holds its files.
    ///
    /// # Errors
    /// If the node does not start, or does not store every block.
    pub(super) fn open(dir: &Path) -> anyhow::Result<DramTier> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let mut config = NodeConfig {
            dram_blocks: Some(BLOCKS as u64 + 64),
            block_bytes: BLOCK_BYTES,
            watermark_high: 1.0,
            watermark_low: 1.0,
            data_dir: dir.join("data"),
            tls: certificates(dir, &Role::Node(None))?,
            ..NodeConfig::default()
        };
        config.identity.layers = 1;
        let identity = config.identity.manifest().digest();
        let node = runtime.block_on(Node::start(config, &prometheus::Registry::new()))?;
        let blocks = node.blocks();
        let chance = ChaCha8Rng::seed_from_u64(1);
        let mut tier = DramTier { runtime, node, blocks, identity, leases: 0, rng: chance };
        for prefix in 0..PREFIXES {
            tier.save(prefix)?;
        }
        Ok(tier)
    }

    fn asker(&mut self) -> RequestContext {
        self.leases += 1;
        RequestContext {
            request: RequestId(self.leases),
            lease: LeaseId(self.leases),
            tenant: TenantId(0),
            identity: self.identity,
            category: Category::default(),
            traceparent: String::new(),
            class: None,
        }
    }

    fn save(&mut self, prefix: usize) -> anyhow::Result<()> {
        let (asker, hashes) = (self.asker(), hashes(prefix, PREFIX_BLOCKS));
        let slice = u32::try_from(BLOCK_BYTES / 2)?;
        let payload = vec![7u8; usize::try_from(BLOCK_BYTES)?];
        let sealed =
            |hash: &BlockHash| seal(self.identity, *hash, KeyForm::Rotated, &[slice, slice], &payload);
        let frames = hashes.iter().map(sealed);
        let frames: Vec<Frame> = frames.collect::<Result<_, _>>()?;
        let frame_bytes = frames.first().map_or(0, |frame| frame.bytes.len() as u64);
        let request =
            SaveRequest { context: asker, parent: None, first_offset_blocks: 0, hashes, frame_bytes };
        let lease = request.context.lease;
        self.runtime.block_on(async {
            let (offer, session) = self.blocks.save(request).await;
            ensure!(matches!(offer, SaveOffer::Wanted(_)), "the node answers {offer:?}");
            let mut session = session.context("the node accepts no block")?;
            for frame in frames {
                session.put(frame).await;
            }
            let done = session.finish().await;
            ensure!(done.stored_blocks as usize == PREFIX_BLOCKS, "the node stored too few blocks: {done:?}");
            self.blocks.release(lease).await;
            Ok(())
        })
    }

    /// Runs `count` fetches of the first `blocks` blocks of a random prefix, each with its release.
    /// Returns the sum of the blocks' addresses, so that no work is optimized away.
    ///
    /// # Errors
    /// If a stored block is not returned.
    pub(super) fn get(&mut self, blocks: usize, count: u64) -> anyhow::Result<u64> {
        let mut sum = 0u64;
        for _ in 0..count {
            let (asker, prefix) = (self.asker(), self.rng.random_range(0..PREFIXES));
            let (deadline, epoch) = (Duration::from_secs(1), Default::default());
            let request = FetchRequest {
                context: asker,
                epoch,
                first_offset_blocks: 0,
                hashes: hashes(prefix, blocks),
                deadline,
                progress: Progress::default(),
            };
            let lease = request.context.lease;
            self.runtime.block_on(async {
                let mut reply = self.blocks.fetch(request).await;
                ensure!(
                    matches!(reply.answer, FetchAnswer::Hit { .. }),
                    "the node answers {:?}",
                    reply.answer
                );
                for _ in 0..blocks {
                    let frame = reply.frames.next().await.context("a block is missing")?;
                    sum = sum.wrapping_add(frame.bytes.as_ptr() as u64);
                }
                self.blocks.release(lease).await;
                Ok(())
            })?;
        }
        Ok(sum)
    }

    /// Stops the node.
    pub(super) fn close(self) {
        self.runtime.block_on(self.node.shutdown());
    }
}

/// The first blocks of a prefix.
fn hashes(prefix: usize, blocks: usize) -> Vec<BlockHash> {
    let number = |block: usize| (prefix * PREFIX_BLOCKS + block) as u64;
    let hash = |block: usize| {
        // Uniform in both halves, as real hashes are.
        let low = number(block).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        BlockHash::from_words(low.rotate_left(29).wrapping_mul(0xD6E8_FEB8_6659_FD93), low)
    };
    (0..blocks).map(hash).collect()
}

/// Certificate files of a role in this directory, which has an authority of its own.
pub(crate) fn certificates(dir: &Path, role: &Role) -> anyhow::Result<TlsSection> {
    let CertificateFiles { ca, cert, key } = Authority::open(dir)?.issue(role)?;
    Ok(TlsSection { ca, cert, key })
}
