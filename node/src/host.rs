//! Serves processes of this host: the socket's directory, the server, and its metrics.
//!
//! Not here: the users with access ([`crate::scope`]) and the transport (`kvfleet_transport::shm`).

use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::sync::Arc;
use std::time::Duration;

use kvfleet_transport::shm::{
    SPIN_WAIT, ShmBindError, ShmRuntimes, ShmServer, ShmServerConfig, ShmStats, socket_path,
};
use kvfleet_transport::{BlockService, SharedArena};
use tokio::runtime::Handle;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::arena::Arena;
use crate::config::NodeConfig;
use crate::low_latency::LowLatencyThread;
use crate::metrics::Metrics;

/// Interval of metric updates.
const METRICS_INTERVAL: Duration = Duration::from_secs(1);

/// A client that reads one fetch for this long has probably forgotten it: no prompt waits a minute
/// for its prefix.
const LONG_READ: Duration = Duration::from_secs(60);

/// Timeout of a stalled save, and of a client that does not read its messages.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Listens for processes of this host, under the address that other hosts use for the node. `None`
/// if disabled by the configuration.
pub(crate) fn serve(
    config: &NodeConfig,
    address: &str,
    arena: Arena,
    service: Arc<dyn BlockService>,
    quick: &LowLatencyThread,
) -> Result<Option<Arc<ShmServer>>, ShmBindError> {
    let Some(dir) = &config.shm.dir else { return Ok(None) };
    let lent_bytes_max = in_place_bytes_max(config, arena.len_bytes());
    // On a single processor, a spinning server keeps the client from running.
    let is_alone = std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1);
    let server = ShmServerConfig {
        address: address.to_owned(),
        frame_bytes_max: u32::try_from(config.frame_bytes_max()).unwrap_or(u32::MAX),
        granted_bytes_max: lent_bytes_max,
        bounce_bytes_max: config.shm.bounce_buffer_bytes,
        lease: config.lease(),
        stall_timeout: STALL_TIMEOUT,
        spin_wait: if is_alone { Duration::ZERO } else { SPIN_WAIT },
        serves_other_users: serves_others(config),
    };
    let arena = (lent_bytes_max > 0).then(|| Arc::new(arena) as Arc<dyn SharedArena>);
    let ends = ShmRuntimes { event_loop: quick.handle().clone(), may_move: true, bulk: Handle::current() };
    let path = socket_path(dir, address);
    let server = ShmServer::bind(&path, server, arena, service, ends)?;
    tracing::info!(path = %path.display(), lent_bytes_max, "node serves this host");
    Ok(Some(Arc::new(server)))
}

/// Maximum bytes read in place at one time.
fn in_place_bytes_max(config: &NodeConfig, arena_bytes: u64) -> u64 {
    use kv_core::tier::Capacity;
    config.shm.in_place_bytes.unwrap_or(match config.dram_capacity() {
        Capacity::Bytes(bytes) => bytes / 2,
        Capacity::Blocks(blocks) => {
            blocks.saturating_mul(config.frame_bytes_max() as u64).min(arena_bytes) / 2
        }
    })
}

/// Whether processes of other users are served.
fn serves_others(config: &NodeConfig) -> bool {
    let own = rustix::process::geteuid().as_raw();
    config.shm.peers.iter().any(|peer| peer.uid != own)
}

/// Creates the directory of the socket unless it exists or the path is disabled. Permissions of an
/// existing directory are its owner's choice.
pub(crate) fn make_dir(config: &NodeConfig) -> Result<(), ShmBindError> {
    let Some(dir) = &config.shm.dir else { return Ok(()) };
    let made = match std::fs::metadata(dir) {
        Ok(_) => Ok(()),
        Err(_) => {
            let mode = if serves_others(config) { 0o711 } else { 0o700 };
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
            // Without the mask of the process, which keeps all other files private.
            made.and_then(|()| std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)))
        }
    };
    made.map_err(|cause| ShmBindError { path: dir.to_owned(), cause })
}

/// Keeps the metrics up to date until `stop`.
pub(crate) async fn report_metrics(server: Arc<ShmServer>, metrics: Metrics, stop: CancellationToken) {
    let mut tick = tokio::time::interval(METRICS_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_warned = false;
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let numbers = server.stats();
        metrics.host(&numbers);
        is_warned = warn_long_read(&numbers, is_warned);
    }
}

/// Logs once if a client keeps its fetched blocks for long. Returns whether the warning is active.
fn warn_long_read(numbers: &ShmStats, is_warned: bool) -> bool {
    let Some(oldest) = numbers.oldest.filter(|oldest| oldest.age >= LONG_READ) else { return false };
    if !is_warned {
        let (uid, pid, seconds) = (oldest.uid, oldest.pid, oldest.age.as_secs());
        tracing::warn!(
            uid,
            pid,
            seconds,
            in_place_bytes = numbers.granted_bytes,
            "a process of this host keeps blocks that it fetched, so they cannot be evicted; stop the \
             process if it hangs"
        );
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvfleet_errors_doc::says;
    use kvfleet_transport::shm::OldestGrant;

    #[test]
    fn long_read_is_logged_once() {
        let kept = |seconds| ShmStats {
            oldest: Some(OldestGrant { age: Duration::from_secs(seconds), uid: 5, pid: 77 }),
            ..ShmStats::default()
        };
        let log = kvfleet_errors_doc::log::Log::start();
        assert!(!warn_long_read(&kept(59), false));
        assert!(warn_long_read(&kept(60), false));
        assert!(warn_long_read(&kept(61), true));
        assert!(!warn_long_read(&ShmStats::default(), true));
        assert_eq!(log.count("keeps blocks that it fetched"), 1);
        says("a process that keeps fetched blocks", &log.line("keeps blocks"), &[]);
    }

    #[test]
    fn in_place_bytes_default_to_half_of_dram() {
        let config = |dram_bytes, dram_blocks, in_place_bytes| {
            let shm = crate::config::ShmSection { in_place_bytes, ..Default::default() };
            NodeConfig { dram_bytes, dram_blocks, shm, ..NodeConfig::default() }
        };
        assert_eq!(in_place_bytes_max(&config(1 << 30, None, None), u64::MAX), 1 << 29);
        assert_eq!(in_place_bytes_max(&config(1 << 30, None, Some(0)), u64::MAX), 0);
        let blocks = config(0, Some(10), None);
        assert_eq!(in_place_bytes_max(&blocks, u64::MAX), 5 * blocks.frame_bytes_max() as u64);
        assert_eq!(in_place_bytes_max(&config(0, Some(u64::MAX), None), 1 << 20), 1 << 19);
    }
}
