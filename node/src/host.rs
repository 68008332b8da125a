//! Serving the processes of this host: the socket's directory, the server, and figures of what they read.
//!
//! Not here: who is served ([`crate::scope`]), and the path itself (`kvfleet_transport::shm`).

use std::os::unix::fs::DirBuilderExt;
use std::sync::Arc;
use std::time::Duration;

use kvfleet_transport::shm::{
    AWAKE, ShmBindError, ShmEnds, ShmNumbers, ShmServer, ShmServerConfig, socket_path,
};
use kvfleet_transport::{BlockService, SharedArena};
use tokio::runtime::Handle;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::arena::Arena;
use crate::config::NodeConfig;
use crate::metrics::Metrics;
use crate::quick::QuickThread;

/// How often the figures are brought up to date.
const FIGURES: Duration = Duration::from_secs(1);

/// A client that reads one fetch for so long has forgotten it, most likely: nobody waits a minute for a prefix.
const LONG_LOAN: Duration = Duration::from_secs(60);

/// How long a save may stand still, and how long a client may leave unread what it is sent.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Listens for processes of this host as the node that others reach at `address`; nothing when the configuration says so.
pub(crate) fn serve(
    config: &NodeConfig,
    address: &str,
    arena: Arena,
    service: Arc<dyn BlockService>,
    quick: &QuickThread,
) -> Result<Option<Arc<ShmServer>>, ShmBindError> {
    let Some(dir) = &config.shm.dir else { return Ok(None) };
    let lent_bytes_max = lent_bytes_max(config, arena.len_bytes());
    // With one processor, who waits without sleeping keeps the client from asking.
    let is_alone = std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1);
    let server = ShmServerConfig {
        address: address.to_owned(),
        frame_bytes_max: u32::try_from(config.frame_bytes_max()).unwrap_or(u32::MAX),
        lent_bytes_max,
        tray_bytes_max: config.shm.tray_bytes,
        lease: config.lease(),
        stall_timeout: STALL_TIMEOUT,
        awake: if is_alone { Duration::ZERO } else { AWAKE },
        serves_others: serves_others(config),
    };
    let arena = (lent_bytes_max > 0).then(|| Arc::new(arena) as Arc<dyn SharedArena>);
    let ends = ShmEnds { quick: quick.handle().clone(), may_move: true, bulk: Handle::current() };
    let path = socket_path(dir, address);
    let server = ShmServer::bind(&path, server, arena, service, ends)?;
    tracing::info!(path = %path.display(), lent_bytes_max, "node serves this host");
    Ok(Some(Arc::new(server)))
}

/// What may be read in place at one time, in bytes.
fn lent_bytes_max(config: &NodeConfig, arena_bytes: u64) -> u64 {
    use kv_core::tier::Capacity;
    config.shm.lent_bytes.unwrap_or(match config.dram_capacity() {
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

/// Makes the directory of the socket unless it is there, or there is to be none. Who may do what in one that is there is its
/// owner's to say.
pub(crate) fn make_dir(config: &NodeConfig) -> Result<(), ShmBindError> {
    let Some(dir) = &config.shm.dir else { return Ok(()) };
    let mode = if serves_others(config) { 0o711 } else { 0o700 };
    let made = std::fs::DirBuilder::new().recursive(true).mode(mode).create(dir);
    made.map_err(|cause| ShmBindError { path: dir.to_owned(), cause })
}

/// Keeps the figures up to date until told to stop.
pub(crate) async fn tell(server: Arc<ShmServer>, metrics: Metrics, stop: CancellationToken) {
    let mut tick = tokio::time::interval(FIGURES);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_warned = false;
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let numbers = server.numbers();
        metrics.host(&numbers);
        is_warned = warn(&numbers, is_warned);
    }
}

/// Says once of a client that it keeps what it read; whether it was said.
fn warn(numbers: &ShmNumbers, is_warned: bool) -> bool {
    let Some(oldest) = numbers.oldest.filter(|oldest| oldest.age >= LONG_LOAN) else { return false };
    if !is_warned {
        let (uid, pid, seconds) = (oldest.uid, oldest.pid, oldest.age.as_secs());
        tracing::warn!(
            uid,
            pid,
            seconds,
            lent_bytes = numbers.lent_bytes,
            "a process of this host keeps blocks that it fetched, so they cannot leave; end it if it has forgotten them"
        );
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvfleet_errors_doc::says;
    use kvfleet_transport::shm::OldestLoan;

    #[test]
    fn who_keeps_blocks_is_named_once() {
        let kept = |seconds| ShmNumbers {
            oldest: Some(OldestLoan { age: Duration::from_secs(seconds), uid: 5, pid: 77 }),
            ..ShmNumbers::default()
        };
        let log = crate::test_log::Log::start();
        assert!(!warn(&kept(59), false));
        assert!(warn(&kept(60), false));
        assert!(warn(&kept(61), true));
        assert!(!warn(&ShmNumbers::default(), true));
        assert_eq!(log.count("keeps blocks that it fetched"), 1);
        says("a process that keeps what it fetched", &log.line("keeps blocks"), &[]);
    }

    #[test]
    fn half_of_dram_is_lent_unless_said_otherwise() {
        let config = |dram_bytes, dram_blocks, lent_bytes| {
            let shm = crate::config::ShmSection { lent_bytes, ..Default::default() };
            NodeConfig { dram_bytes, dram_blocks, shm, ..NodeConfig::default() }
        };
        assert_eq!(lent_bytes_max(&config(1 << 30, None, None), u64::MAX), 1 << 29);
        assert_eq!(lent_bytes_max(&config(1 << 30, None, Some(0)), u64::MAX), 0);
        let blocks = config(0, Some(10), None);
        assert_eq!(lent_bytes_max(&blocks, u64::MAX), 5 * blocks.frame_bytes_max() as u64);
        assert_eq!(lent_bytes_max(&config(0, Some(u64::MAX), None), 1 << 20), 1 << 19);
    }
}
