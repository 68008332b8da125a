//! Saves whose frames go with the offer, and when they do.

use std::os::fd::{AsFd, OwnedFd};

use super::super::map::{Mapping, TrayFrame, memory_file};
use super::super::packet::{ToClient, ToNode};
use super::hostile::{Forger, PART, Raw, good_welcome};
use super::*;
use crate::suite::save_request;
use crate::{PathError, SaveAnswer, SaveDone, wire};
use kvfleet_proto::frame::Unsettled;

/// A path to a node that says what the test wants, that node's end, and the tray.
async fn forged() -> (Arc<dyn Path>, Raw, OwnedFd) {
    let forger = Forger::new();
    let (tray, arena) = (memory_file(2 * PART).unwrap(), memory_file(PART).unwrap());
    let welcome = ToClient::Welcome(good_welcome()).encode();
    let (path, raw) = forger.welcome(&welcome, &[tray.as_fd(), arena.as_fd()]).await.unwrap();
    (path, raw, tray)
}

/// Saves one small block; what the client says, and how it ends when the node says `answer`.
async fn saved(
    path: &Arc<dyn Path>,
    raw: &mut Raw,
    answer: impl FnOnce(u64) -> ToClient,
) -> (ToNode, Result<SaveAnswer, PathError>) {
    let saving = {
        let path = Arc::clone(path);
        let request = SaveRequest { frame_bytes: 2000, ..save_request(&[hash(7)]) };
        tokio::spawn(async move { path.save(request, &|_| frame(hash(7), 1000)).await })
    };
    let said = raw.hear_client().await;
    let (ToNode::Save { op, .. } | ToNode::Ask { op, .. }) = said else { panic!("{said:?}") };
    raw.tell(&answer(op));
    (said, saving.await.unwrap())
}

fn done(stored: u32) -> impl FnOnce(u64) -> ToClient {
    let done = SaveDone { stored_blocks: stored, present_blocks: 1 - stored, ..SaveDone::default() };
    move |op| ToClient::Done { op, done: wire::done_to_pb(&done) }
}

fn busy(op: u64) -> ToClient {
    let offer = SaveOffer::Busy { retry_after: Duration::from_millis(3) };
    ToClient::Offer { op, offer: wire::offer_to_pb(&offer) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_go_with_the_offer_as_long_as_they_are_wanted() {
    let (path, mut raw, tray) = forged().await;
    let tray = Arc::new(Mapping::to_write(&tray, PART).unwrap());
    for _ in 0..2 {
        let (said, answer) = saved(&path, &mut raw, done(1)).await;
        let ToNode::Save { places, .. } = said else { panic!("{said:?}") };
        let mut there = vec![0; places[0].len as usize];
        TrayFrame::new(&tray, places[0].at, places[0].len).unwrap().copy(0, &mut there);
        assert_eq!(there, frame(hash(7), 1000).bytes, "and lie where it says");
        assert!(matches!(answer, Ok(SaveAnswer::Done(SaveDone { stored_blocks: 1, .. }))), "{answer:?}");
    }
    let (said, _) = saved(&path, &mut raw, done(0)).await;
    assert!(matches!(said, ToNode::Save { .. }), "{said:?}");
    let (said, answer) = saved(&path, &mut raw, busy).await;
    assert!(matches!(said, ToNode::Ask { .. }), "the last one was not wanted, so it asks first: {said:?}");
    assert_eq!(answer.unwrap(), SaveAnswer::Busy { retry_after: Duration::from_millis(3) });
    let (said, answer) = saved(&path, &mut raw, busy).await;
    assert!(matches!(said, ToNode::Save { .. }), "and then tries again: {said:?}");
    assert_eq!(answer.unwrap(), SaveAnswer::Busy { retry_after: Duration::from_millis(3) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_offers_what_it_was_sent_is_not_believed() {
    let (path, mut raw, _tray) = forged().await;
    let wanted = |op| ToClient::Offer { op, offer: wire::offer_to_pb(&SaveOffer::Wanted(vec![true])) };
    let (said, answer) = saved(&path, &mut raw, wanted).await;
    assert!(matches!(said, ToNode::Save { .. }), "{said:?}");
    assert!(matches!(answer, Err(PathError::Protocol { .. })), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_frames_that_came_at_once_those_are_taken_that_are_wanted() {
    let service = Arc::new(MemoryService::new(None));
    [1, 3].into_iter().for_each(|number| service.hold(frame(hash(number), 1000)));
    let node = Node::start(service.clone(), None, server_config(), true);
    let path = node.dial().await.unwrap();
    let request = SaveRequest { frame_bytes: 2000, ..save_request(&hashes(5)) };
    let answer = path.save(request, &|position| frame(hashes(5)[position], 1000)).await.unwrap();
    let SaveAnswer::Done(done) = answer else { panic!("{answer:?}") };
    assert_eq!((done.stored_blocks, done.present_blocks, done.refused_blocks), (3, 2, 0));
    let fetched = fetch(path.as_ref(), fetch_request(&hashes(5))).await.unwrap();
    assert_eq!(fetched, FetchAnswer::Hit { tiers: in_dram(5) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_for_which_the_tray_has_no_place_asks_first() {
    let (path, mut raw, _tray) = forged().await;
    let large = SaveRequest { frame_bytes: PART / 2, ..save_request(&[hash(7)]) };
    let begin = || {
        let (path, request) = (Arc::clone(&path), large.clone());
        tokio::spawn(async move { path.save(request, &|_| frame(hash(7), 400_000)).await })
    };
    let (mut waiting, mut at_once) = (Vec::new(), 0);
    loop {
        waiting.push(begin());
        match raw.hear_client().await {
            ToNode::Save { .. } => at_once += 1,
            ToNode::Ask { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(at_once, 2, "as many as have a place");
    drop(raw);
    for saving in waiting {
        assert!(saving.await.unwrap().is_err(), "the node is gone");
    }
}
