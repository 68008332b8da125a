//! Eager saves, which send their frames with the offer, and when they are used.

use std::os::fd::{AsFd, OwnedFd};

use super::super::mapping::{Mapping, ShmBounceFrame, memory_file};
use super::super::packet::{ClientPacket, NodePacket};
use super::hostile::{FakeNode, PART, RawConnection, good_welcome};
use super::*;
use crate::suite::save_request;
use crate::{PathError, SaveAnswer, SaveDone, wire};
use kvfleet_proto::frame::VolatileBytes;

/// A path to a fake node, the fake node's end, and the bounce buffer.
async fn forged() -> (Arc<dyn Path>, RawConnection, OwnedFd) {
    let forger = FakeNode::new();
    let (tray, arena) = (memory_file(2 * PART).unwrap(), memory_file(PART).unwrap());
    let welcome = NodePacket::Welcome(good_welcome()).encode();
    let (path, raw) = forger.welcome(&welcome, &[tray.as_fd(), arena.as_fd()]).await.unwrap();
    (path, raw, tray)
}

/// Saves one small block; returns the client's first packet, and the result when the node sends
/// `answer`.
async fn save_result(
    path: &Arc<dyn Path>,
    raw: &mut RawConnection,
    answer: impl FnOnce(u64) -> NodePacket,
) -> (ClientPacket, Result<SaveAnswer, PathError>) {
    let saving = {
        let path = Arc::clone(path);
        let request = SaveRequest { frame_bytes: 2000, ..save_request(&[hash(7)]) };
        tokio::spawn(async move { path.save(request, &|_| frame(hash(7), 1000)).await })
    };
    let said = raw.receive_from_client().await;
    let (ClientPacket::Save { op, .. } | ClientPacket::Begin { op, .. }) = said else { panic!("{said:?}") };
    raw.send_to_client(&answer(op));
    (said, saving.await.unwrap())
}

fn done(stored: u32) -> impl FnOnce(u64) -> NodePacket {
    let done = SaveDone { stored_blocks: stored, present_blocks: 1 - stored, ..SaveDone::default() };
    move |op| NodePacket::Done { op, done: wire::done_to_pb(&done) }
}

fn busy(op: u64) -> NodePacket {
    let offer = SaveOffer::Busy { retry_after: Duration::from_millis(3) };
    NodePacket::Offer { op, offer: wire::offer_to_pb(&offer) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saves_are_eager_while_their_frames_are_wanted() {
    let (path, mut raw, tray) = forged().await;
    let tray = Arc::new(Mapping::read_write(&tray, PART).unwrap());
    for _ in 0..2 {
        let (said, answer) = save_result(&path, &mut raw, done(1)).await;
        let ClientPacket::Save { places, .. } = said else { panic!("{said:?}") };
        let mut there = vec![0; places[0].len as usize];
        ShmBounceFrame::new(&tray, places[0].at, places[0].len).unwrap().copy(0, &mut there);
        assert_eq!(there, frame(hash(7), 1000).bytes, "the frame must be in the given range");
        assert!(matches!(answer, Ok(SaveAnswer::Done(SaveDone { stored_blocks: 1, .. }))), "{answer:?}");
    }
    let (said, _) = save_result(&path, &mut raw, done(0)).await;
    assert!(matches!(said, ClientPacket::Save { .. }), "{said:?}");
    let (said, answer) = save_result(&path, &mut raw, busy).await;
    assert!(
        matches!(said, ClientPacket::Begin { .. }),
        "the last frame was not wanted, so the client must ask first: {said:?}"
    );
    assert_eq!(answer.unwrap(), SaveAnswer::Busy { retry_after: Duration::from_millis(3) });
    let (said, answer) = save_result(&path, &mut raw, busy).await;
    assert!(matches!(said, ClientPacket::Save { .. }), "and then try eagerly again: {said:?}");
    assert_eq!(answer.unwrap(), SaveAnswer::Busy { retry_after: Duration::from_millis(3) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offer_for_eager_frames_is_refused() {
    let (path, mut raw, _tray) = forged().await;
    let wanted = |op| NodePacket::Offer { op, offer: wire::offer_to_pb(&SaveOffer::Wanted(vec![true])) };
    let (said, answer) = save_result(&path, &mut raw, wanted).await;
    assert!(matches!(said, ClientPacket::Save { .. }), "{said:?}");
    assert!(matches!(answer, Err(PathError::Protocol { .. })), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_wanted_eager_frames_are_stored() {
    let service = Arc::new(MemoryService::new(None));
    [1, 3].into_iter().for_each(|number| service.hold(frame(hash(number), 1000)));
    let node = ShmTestNode::start(service.clone(), None, server_config(), true);
    let path = node.dial().await.unwrap();
    let request = SaveRequest { frame_bytes: 2000, ..save_request(&hashes(5)) };
    let answer = path.save(request, &|position| frame(hashes(5)[position], 1000)).await.unwrap();
    let SaveAnswer::Done(done) = answer else { panic!("{answer:?}") };
    assert_eq!((done.stored_blocks, done.present_blocks, done.refused_blocks), (3, 2, 0));
    let fetched = fetch(path.as_ref(), fetch_request(&hashes(5))).await.unwrap();
    assert_eq!(fetched, FetchAnswer::Hit { tiers: in_dram(5) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_without_bounce_space_asks_first() {
    let (path, mut raw, _tray) = forged().await;
    let large = SaveRequest { frame_bytes: PART / 2, ..save_request(&[hash(7)]) };
    let begin = || {
        let (path, request) = (Arc::clone(&path), large.clone());
        tokio::spawn(async move { path.save(request, &|_| frame(hash(7), 400_000)).await })
    };
    let (mut waiting, mut at_once) = (Vec::new(), 0);
    loop {
        waiting.push(begin());
        match raw.receive_from_client().await {
            ClientPacket::Save { .. } => at_once += 1,
            ClientPacket::Begin { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(at_once, 2, "as many as have space");
    drop(raw);
    for saving in waiting {
        assert!(saving.await.unwrap().is_err(), "the node is gone");
    }
}
