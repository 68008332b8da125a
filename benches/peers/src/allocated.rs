//! One allocator for all sides, and how many bytes the program has from it.
//!
//! Not here: pages the allocator keeps for later; they depend on what ran before.

use anyhow::anyhow;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Bytes allocated and not freed, at this moment.
pub(crate) fn allocated() -> anyhow::Result<u64> {
    let explain = |error| anyhow!("jemalloc does not say what is allocated: {error}");
    tikv_jemalloc_ctl::epoch::advance().map_err(explain)?;
    Ok(tikv_jemalloc_ctl::stats::allocated::read().map_err(explain)? as u64)
}
