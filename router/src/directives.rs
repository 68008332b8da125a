//! What every node must respect (pins, quotas, TTLs), as one message that is rebuilt when it changes.
//!
//! The version is a checksum of the contents, so that every router gives equal contents the same version
//! and a node that reconnects elsewhere need not take them again. Not here: keeping a pin (the nodes do).

use std::sync::Arc;
use std::time::Duration;

use kv_core::index::Index;
use kv_core::index::command::PinKind;
use kvfleet_proto::{convert, pb};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::view::published::Published;

/// Time between two rebuilds. All pins and quotas go to every node each time, so what changes many of them one after the
/// other must not send all of them as often. A change after a quiet time goes at once; of several within the time
/// nodes are told the last.
const REBUILD_EVERY: Duration = Duration::from_millis(10);

/// The directives an index stands for.
pub(crate) fn of(index: &Index) -> pb::Directives {
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

/// The directives as they are told at this Unix time in milliseconds: without the pins that are over, and with what is
/// left of the others. They keep their version, which is that of what the index says.
pub(crate) fn told_at(directives: &pb::Directives, now_ms: u64) -> pb::Directives {
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

/// Two checksums over the contents, the second started by the first; never 0, which means "none yet".
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

/// Starts the task that rebuilds the directives when a published change touched them.
pub(crate) fn start(
    published: Arc<Published>,
    stop: CancellationToken,
) -> watch::Receiver<Arc<pb::Directives>> {
    let mut touched = published.rules_changes();
    touched.mark_unchanged();
    let (sender, receiver) = watch::channel(Arc::new(of(&published.read().index)));
    tokio::spawn(stop.run_until_cancelled_owned(async move {
        let mut due = Instant::now();
        while touched.changed().await.is_ok() {
            tokio::time::sleep_until(due).await;
            due = Instant::now() + REBUILD_EVERY;
            touched.mark_unchanged();
            let next = of(&published.read().index);
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

    /// A hard pin with this end, in milliseconds.
    fn until(number: u64, ends_ms: u64) -> Pin {
        let (pin, owner, blocks) = (PinId(number), "me".into(), vec![BlockHash([1; 16])]);
        Pin { pin, owner, blocks, kind: PinKind::Hard, ends_ms: Some(ends_ms) }
    }

    #[test]
    fn nodes_are_told_what_is_left_of_a_pin_and_of_none_that_is_over() {
        let mut index = Index::new(IndexLimits::default());
        [until(1, 5_000), until(2, 9_000)].into_iter().for_each(|pin| drop(index.apply(&Command::Pin(pin))));
        index.apply(&Command::Pin(Pin { kind: PinKind::Soft, ends_ms: None, ..until(3, 0) }));
        let all = of(&index);
        let told = |now_ms| {
            let told = told_at(&all, now_ms);
            assert_eq!(told.version, all.version, "it stands for the same");
            told.pins.iter().map(|pin| (pin.pin, pin.soft, pin.left_ms)).collect::<Vec<_>>()
        };
        assert_eq!(told(4_999), [(1, false, 1), (2, false, 4_001), (3, true, 0)]);
        assert_eq!(told(5_000), [(2, false, 4_000), (3, true, 0)]);
        assert_eq!(told(u64::MAX), [(3, true, 0)]);
    }

    #[test]
    fn equal_contents_have_equal_versions_and_others_differ() {
        let mut index = Index::new(IndexLimits::default());
        let empty = of(&index);
        assert_ne!(empty.version, 0);
        index.apply(&Command::SetQuota { tenant: TenantId(1), bytes: Some(10) });
        let quota = of(&index);
        let pin = Pin { ends_ms: None, kind: PinKind::Hard, ..until(1, 0) };
        index.apply(&Command::Pin(pin.clone()));
        let pinned = of(&index);
        assert_eq!(pinned.pins.len(), 1);
        let mut versions = vec![pinned.version];
        for (kind, ends_ms) in [(PinKind::Soft, None), (PinKind::Soft, Some(0)), (PinKind::Hard, Some(0))] {
            index.apply(&Command::Pin(Pin { kind, ends_ms, ..pin.clone() }));
            versions.push(of(&index).version);
        }
        versions.sort_unstable();
        versions.dedup();
        assert_eq!(versions.len(), 4, "a kind and an end make another version");
        assert!(empty.version != quota.version && quota.version != pinned.version);
        index.apply(&Command::Unpin { pin: PinId(1), owner: "me".into(), ends_ms: None });
        assert_eq!(of(&index), quota);
    }

    #[tokio::test]
    async fn changes_one_after_the_other_do_not_send_everything_as_often() {
        let index = Index::new(IndexLimits::default());
        let replica = Replica { index, applied: None, membership: StoredMembership::default() };
        let published = Arc::new(Published::new(replica));
        let mut told = start(Arc::clone(&published), CancellationToken::new());
        let from = Instant::now();
        for tenant in 1..=5 {
            let quota = Command::SetQuota { tenant: TenantId(tenant), bytes: Some(10) };
            published.entry().slice(|replica| replica.index.apply(&quota));
            published.rules_changed();
            told.changed().await.expect("the task lives");
            assert_eq!(told.borrow_and_update().quotas.len(), tenant as usize);
        }
        assert!(from.elapsed() >= 4 * REBUILD_EVERY, "{:?}", from.elapsed());
    }
}
