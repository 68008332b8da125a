//! foyer's disk cache, without its memory cache.
//!
//! Not here: the measurements (the parent module).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, bail, ensure};
use benches::ssd_tier::IoShape;
use bytes::Bytes;
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, IoEngineConfig, Load,
    PsyncIoEngineConfig, UringIoEngineConfig,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::runtime::{Builder, Runtime};

/// Bytes written before each flush. foyer drops data that exceeds its buffers, so the buffers are
/// twice this size.
const DRAIN_BYTES: u64 = 64 << 20;

/// Memory in front of the disk; writes bypass it.
const MEMORY_BYTES: usize = 1 << 20;

/// foyer's I/O engine.
#[derive(Clone, Copy, Debug)]
pub(super) enum IoEngine {
    Uring,
    Psync,
}

impl IoEngine {
    fn config(self) -> Box<dyn IoEngineConfig> {
        match self {
            IoEngine::Uring => Box::new(UringIoEngineConfig::new()),
            IoEngine::Psync => Box::new(PsyncIoEngineConfig::new()),
        }
    }
}

/// A cache with values.
pub(super) struct Foyer {
    runtime: Runtime,
    cache: HybridCache<u64, Bytes>,
    value: Bytes,
    /// Number of readable keys: the most recent ones.
    stock: u64,
    next: u64,
}

impl Foyer {
    pub(super) fn open(io: IoEngine, shape: &IoShape, dir: &Path, stock_bytes: u64) -> anyhow::Result<Foyer> {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let buffers = usize::try_from(2 * DRAIN_BYTES)?;
        // Half again as large as the stock, with some space for foyer's own records.
        let capacity = usize::try_from(stock_bytes / 2 * 3)?;
        let device = FsDeviceBuilder::new(dir).with_capacity(capacity).with_direct(true).build()?;
        let engine = BlockEngineConfig::new(device)
            .with_buffer_pool_size(buffers)
            .with_submit_queue_size_threshold(buffers);
        let cache = runtime.block_on(
            HybridCacheBuilder::new()
                .with_name("peer")
                .memory(MEMORY_BYTES)
                .with_weighter(|_, value: &Bytes| value.len())
                .storage()
                .with_io_engine_config(io.config())
                .with_engine_config(engine)
                .build(),
        )?;
        let mut value = vec![0; shape.block_bytes as usize - 1024];
        ChaCha8Rng::seed_from_u64(1).fill(&mut value[..]);
        let stock = stock_bytes / u64::from(shape.block_bytes);
        let mut foyer = Foyer { runtime, cache, value: value.into(), stock, next: 0 };
        // As on the kvfleet side: everything is written once before measuring.
        foyer.put(stock * 5 / 2);
        Ok(foyer)
    }

    pub(super) fn run(&mut self, shape: &IoShape, count: u64) -> anyhow::Result<()> {
        if shape.is_put {
            self.put(count);
            return Ok(());
        }
        self.get(shape.in_flight, count)
    }

    fn put(&mut self, count: u64) {
        let at_once = DRAIN_BYTES / self.value.len() as u64;
        for number in 0..count {
            // A value written only to disk returns no handle.
            drop(self.cache.storage_writer(self.next).force().insert(self.value.clone()));
            self.next += 1;
            if number % at_once == at_once - 1 || number == count - 1 {
                self.runtime.block_on(self.cache.storage().wait());
            }
        }
    }

    fn get(&self, in_flight: usize, count: u64) -> anyhow::Result<()> {
        let left = Arc::new(AtomicU64::new(count));
        let readers: Vec<_> = (0..in_flight as u64)
            .map(|reader| {
                let (cache, left) = (self.cache.clone(), Arc::clone(&left));
                let (keys, len) = (self.next - self.stock..self.next, self.value.len());
                let mut chance = ChaCha8Rng::seed_from_u64(reader ^ self.next);
                self.runtime.spawn(async move {
                    while left
                        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                        .is_ok()
                    {
                        match cache.storage().load(&chance.random_range(keys.clone())).await? {
                            Load::Entry { value, .. } => ensure!(value.len() == len, "wrong value length"),
                            other => bail!("a written value cannot be read: {other:?}"),
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        self.runtime.block_on(async {
            for reader in readers {
                reader.await.context("a reader ended early")??;
            }
            Ok(())
        })
    }
}
