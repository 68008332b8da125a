//! The allocator of all sides, and the bytes that the program has allocated from it.
//!
//! Not here: pages that the allocator retains, because they depend on earlier runs.

use anyhow::anyhow;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Bytes that are currently allocated.
pub(crate) fn allocated() -> anyhow::Result<u64> {
    let explain = |error| anyhow!("cannot read the allocated bytes from jemalloc: {error}");
    tikv_jemalloc_ctl::epoch::advance().map_err(explain)?;
    Ok(tikv_jemalloc_ctl::stats::allocated::read().map_err(explain)? as u64)
}
