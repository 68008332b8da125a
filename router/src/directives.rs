//! Directives that every node must respect (pins, quotas, TTLs), as one message rebuilt on change.
//!
//! The version is a checksum of the contents: every router gives equal contents the same version,
//! so a node that reconnects elsewhere need not read them again. Not here: enforcement of pins
//! (nodes do that).

use std::sync::Arc;
use std::time::Duration;

use kv_core::index::Index;
use kv_core::index::command::PinKind;
use kvfleet_proto::{convert, pb};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::view::published::PublishedReplica;

/// Shortest time between two rebuilds. Each rebuild sends all pins and quotas to every node, so a
/// series of changes must not send all of them each time. The first change after a quiet time goes
/// at once; of several changes within the interval, only the last state is sent.
const REBUILD_INTERVAL: Duration = Duration::from_millis(10);

/// Builds the directives of an index.
pub(crate) fn from_index(index: &Index) -> pb::Directives {
    let quotas = index.quotas().map(|(tenant, bytes)| pb::Quota { tenant: tenant.0, bytes });
    let pins = index.pins().map(|pin| pb::PinnedBlocks {
        pin: pin.pin.0,
        blocks: convert::hashes_to_bytes(&pin.blocks),
        soft: pin.kind == PinKind::Soft,
        ends_ms: pin.ends_ms,
        left_ms: 0,
    });
    let ttls = index.ttls().map(|(group, ttl_ms)| pb::GroupTtl { group: group.0, ttl_ms });
    let mut directives =
        pb::Directives { version: 0, quotas: quotas.collect(), pins: pins.collect(), ttls: ttls.collect() };
    directives.version = version(&directives);
    directives
}

/// The directives at this Unix time in milliseconds: without expired pins, and with the remaining
/// time of the others. The version stays that of the index contents.
pub(crate) fn at_time(directives: &pb::Directives, now_ms: u64) -> pb::Directives {
    let left = |pin: &pb::PinnedBlocks| match pin.ends_ms {
        None => Some(0),
        Some(ends_ms) => ends_ms.checked_sub(now_ms).filter(|left_ms| *left_ms > 0),
    };
    let in_force = directives.pins.iter().filter_map(|pin| Some((pin, left(pin)?)));
    pb::Directives {
        version: directives.version,
        quotas: directives.quotas.clone(),
        pins: in_force.map(|(pin, left_ms)| pb::PinnedBlocks { left_ms, ..pin.clone() }).collect(),
        ttls: directives.ttls.clone(),
    }
}

/// Two checksums over the contents, the second seeded by the first. Never 0, which means "none
/// yet".
fn version(directives: &pb::Directives) -> u64 {
    let mut crc = 0u32;
    let mut count = 0u32;
    let mut add = |bytes: &[u8]| {
        crc = crc32c::crc32c_append(crc, bytes);
        count = crc32c::crc32c_append(count.rotate_left(7) ^ crc, bytes);
    };
    for quota in &directives.quotas {
        add(&quota.tenant.to_le_bytes());
        add(&quota.bytes.to_le_bytes());
    }
    add(b"pins");
    for pin in &directives.pins {
        add(&pin.pin.to_le_bytes());
        add(&pin.blocks);
        add(&[u8::from(pin.soft), u8::from(pin.ends_ms.is_some())]);
        add(&pin.ends_ms.unwrap_or_default().to_le_bytes());
    }
    add(b"ttls");
    for ttl in &directives.ttls {
        add(&ttl.group.to_le_bytes());
        add(&ttl.ttl_ms.to_le_bytes());
    }
    (u64::from(count) << 32 | u64::from(crc)).max(1)
}

/// Starts the task that rebuilds the directives after a published change of them.
pub(crate) fn start(
    published: Arc<PublishedReplica>,
    stop: CancellationToken,
) -> watch::Receiver<Arc<pb::Directives>> {
    let mut touched = published.watch_rules();
    touched.mark_unchanged();
    let (sender, receiver) = watch::channel(Arc::new(from_index(&published.read().index)));
    tokio::spawn(stop.run_until_cancelled_owned(async move {
        let mut due = Instant::now();
        while touched.changed().await.is_ok() {
            tokio::time::sleep_until(due).await;
            due = Instant::now() + REBUILD_INTERVAL;
            touched.mark_unchanged();
            let next = from_index(&published.read().index);
            sender.send_if_modified(|current| {
                let changed = **current != next;
                if changed {
                    *current = Arc::new(next);
                }
                changed
            });
        }
    }));
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::id::{BlockHash, PinId, TenantId};
    use kv_core::index::IndexLimits;
    use kv_core::index::command::{Command, Pin};

    use crate::raft::StoredMembership;
    use crate::view::published::Replica;

    /// A hard pin that ends at `ends_ms`.
    fn until(number: u64, ends_ms: u64) -> Pin {
        let (pin, owner, blocks) = (PinId(number), "me".into(), vec![BlockHash([1; _])]);
        Pin { pin, owner, blocks, kind: PinKind::Hard, ends_ms: Some(ends_ms) }
    }

    #[test]
    fn nodes_get_remaining_pin_times_and_no_expired_pins() {
        let mut index = Index::new(IndexLimits::default());
        [until(1, 5_000), until(2, 9_000)].into_iter().for_each(|pin| drop(index.apply(&Command::Pin(pin))));
        index.apply(&Command::Pin(Pin { kind: PinKind::Soft, ends_ms: None, ..until(3, 0) }));
        let all = from_index(&index);
        let told = |now_ms| {
            let told = at_time(&all, now_ms);
            assert_eq!(told.version, all.version, "the version is unchanged");
            told.pins.iter().map(|pin| (pin.pin, pin.soft, pin.left_ms)).collect::<Vec<_>>()
        };
        assert_eq!(told(4_999), [(1, false, 1), (2, false, 4_001), (3, true, 0)]);
        assert_eq!(told(5_000), [(2, false, 4_000), (3, true, 0)]);
        assert_eq!(told(u64::MAX), [(3, true, 0)]);
    }

    #[test]
    fn versions_follow_contents() {
        let mut index = Index::new(IndexLimits::default());
        let empty = from_index(&index);
        assert_ne!(empty.version, 0);
        index.apply(&Command::SetQuota { tenant: TenantId(1), bytes: Some(10) });
        let quota = from_index(&index);
        let pin = Pin { ends_ms: None, kind: PinKind::Hard, ..until(1, 0) };
        index.apply(&Command::Pin(pin.clone()));
        let pinned = from_index(&index);
        assert_eq!(pinned.pins.len(), 1);
        let mut versions = vec![pinned.version];
        for (kind, ends_ms) in [(PinKind::Soft, None), (PinKind::Soft, Some(0)), (PinKind::Hard, Some(0))] {
            index.apply(&Command::Pin(Pin { kind, ends_ms, ..pin.clone() }));
            versions.push(from_index(&index).version);
        }
        versions.sort_unstable();
        versions.dedup();
        assert_eq!(versions.len(), 4, "a kind and an end make another version");
        assert!(empty.version != quota.version && quota.version != pinned.version);
        index.apply(&Command::Unpin { pin: PinId(1), owner: "me".into(), ends_ms: None });
        assert_eq!(from_index(&index), quota);
    }

    #[tokio::test]
    async fn rapid_changes_are_rate_limited() {
        let index = Index::new(IndexLimits::default());
        let replica = Replica { index, applied: None, membership: StoredMembership::default() };
        let published = Arc::new(PublishedReplica::new(replica));
        let mut told = start(Arc::clone(&published), CancellationToken::new());
        let from = Instant::now();
        for tenant in 1..=5 {
            let quota = Command::SetQuota { tenant: TenantId(tenant), bytes: Some(10) };
            published.begin_entry().apply_slice(|replica| replica.index.apply(&quota));
            published.notify_rules();
            told.changed().await.expect("the task lives");
            assert_eq!(told.borrow_and_update().quotas.len(), tenant as usize);
        }
        assert!(from.elapsed() >= 4 * REBUILD_INTERVAL, "{:?}", from.elapsed());
    }
}
