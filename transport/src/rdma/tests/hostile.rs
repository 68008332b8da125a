//! Ends that say what makes no sense, or ask for what is not theirs.

use bytes::Bytes;
use kv_core::id::LoanId;
use kv_core::lend::{Descriptor, Place as LentIn};
use kvfleet_proto::data::{self, data_request::Op};
use tokio::net::TcpListener;

use super::super::words;
use super::*;
use crate::stream::{Stream, encode, read_message};
use crate::tcp::tests::accept_one;
use crate::{Path, SaveRequest, wire};

fn row(loan: u64, at: u64, len: u32) -> Descriptor {
    Descriptor { loan: LoanId(loan), place: LentIn::Tray, at, len }
}

/// Sends a message and what waits before it.
pub(super) async fn say(stream: &mut impl Stream, message: &impl prost::Message) {
    stream.write(encode(message).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
}

/// Answers a client that asks for RDMA over this connection, until it has a link.
pub(super) async fn attach(offer: &Arc<RdmaOffer>, stream: &mut impl Stream) -> Attached {
    loop {
        let asked: data::DataRequest = read_message(stream).await.unwrap();
        let Some(Op::Attach(attach)) = asked.op else { panic!("{asked:?}") };
        let (attached, answer) = offer.attach(attach, (&Arc::from([0]), false)).await.unwrap();
        say(stream, &answer).await;
        if let Some(attached) = attached {
            return attached;
        }
    }
}

/// A node that attaches as it should and then lends these, one after the other, to whoever asks for two blocks; what a client
/// makes of it.
async fn lent_by_a_liar(lies: Vec<data::Lent>) -> (FetchAnswer, Vec<rail::Transfer>) {
    let fabric = Fabric::default();
    let [node, client] = [1, 2].map(|number| Rdma::over(fabric.rail(number), &small()).unwrap());
    let offer = RdmaOffer::new(&node, None).unwrap();
    let authority = Authority::new();
    let listener = TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let identity = authority.member();
    let serving = tokio::spawn(async move {
        let mut lifeline = accept_one(&listener, &identity).await;
        let _: data::DataRequest = read_message(&mut lifeline).await.unwrap();
        say(&mut lifeline, &data::Pong { version: wire::PROTOCOL_VERSION }).await;
        let mut stream = accept_one(&listener, &identity).await;
        let attached = attach(&offer, &mut stream).await;
        attached.answered(suite::EPOCH);
        let _: data::DataRequest = read_message(&mut stream).await.unwrap();
        let hit = FetchAnswer::Hit { tiers: in_dram(2) };
        say(&mut stream, &wire::head_to_pb(&hit, suite::EPOCH)).await;
        for lie in lies {
            say(&mut stream, &lie).await;
        }
        // Whatever the client makes of it, it ends the connection or goes on; both lifelines stay.
        let _ = read_message::<data::GivenBack>(&mut stream).await;
        std::future::pending::<()>().await;
        drop((lifeline, attached));
    });
    let dialer = RdmaDialer::new(&client, &authority.member(), TcpConfig::default()).unwrap();
    let path = dialer.dial(address).await.unwrap();
    let tried = fabric.transfers().len();
    let request = FetchRequest { deadline: Duration::from_secs(20), ..fetch_request(&hashes(2)) };
    let answer = path.fetch(request, &mut |frame| panic!("a frame of a liar: {frame:?}")).await.unwrap();
    serving.abort();
    (answer, fabric.transfers().split_off(tried))
}

fn lent(rows: &[Descriptor]) -> data::Lent {
    let lease_us = 10_000_000;
    let epoch = suite::EPOCH.0;
    data::Lent { rows: words::rows_to_bytes(rows), lease_us, epoch, ..data::Lent::default() }
}

#[tokio::test]
async fn descriptors_that_cannot_be_are_not_followed() {
    let tray = small().tray_bytes as u64;
    let lost = FetchAnswer::Miss { reason: MissReason::NodeLost };
    let lies = [
        vec![row(1, tray - 10, 11)],
        vec![row(1, u64::MAX, 2)],
        vec![row(1, 0, 0)],
        vec![row(1, 0, u32::MAX)],
        vec![row(1, 0, 64), row(1, 64, 64)],
        vec![row(2, 0, 64), row(1, 64, 64)],
        vec![row(1, 0, 64), row(2, 64, 64), row(3, 128, 64)],
        vec![Descriptor { place: LentIn::Arena, ..row(1, 0, 64) }],
    ];
    for lie in lies {
        let (answer, transfers) = lent_by_a_liar(vec![lent(&lie)]).await;
        assert_eq!((&answer, &transfers[..]), (&lost, &[][..]), "{lie:?}");
    }
}

#[tokio::test]
async fn a_loan_that_comes_twice_is_refused() {
    // The bytes are no frame, so that the first is refused by what it holds, after it was read.
    let (answer, transfers) = lent_by_a_liar(vec![lent(&[row(1, 0, 64)]), lent(&[row(1, 0, 64)])]).await;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::Corrupt });
    assert_eq!(transfers.len(), 2, "the block, and the board");
}

#[tokio::test]
async fn a_lease_that_is_over_is_not_used() {
    let over = data::Lent { lease_us: 0, ..lent(&[row(1, 0, 64)]) };
    let (answer, _) = lent_by_a_liar(vec![over]).await;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::TooLate });
}

#[tokio::test]
async fn rows_of_another_epoch_are_not_read() {
    let other = data::Lent { epoch: suite::EPOCH.0 + 1, ..lent(&[row(1, 0, 64)]) };
    let (answer, transfers) = lent_by_a_liar(vec![other]).await;
    assert_eq!((answer, transfers.len()), (FetchAnswer::Miss { reason: MissReason::StaleEpoch }, 0));
}

#[tokio::test]
async fn rows_that_are_no_rows_end_the_connection() {
    let torn = data::Lent { rows: vec![1; words::ROW_BYTES + 1], ..lent(&[]) };
    let (answer, transfers) = lent_by_a_liar(vec![torn]).await;
    assert_eq!((answer, transfers.len()), (FetchAnswer::Miss { reason: MissReason::NodeLost }, 0));
}

/// Reads with a key and from an address of the client's choice.
async fn reads(link: &mut Link, address: u64, key: u32) -> bool {
    let (_, _, reach) = link.parts();
    let place = reach.local.passing.take(64).unwrap();
    let tray = reach.tray;
    (reach.tray.address, reach.tray.key) = (address, key);
    let begun = reach.read(LentIn::Tray, 0, place).await;
    reach.tray = tray;
    match begun {
        Ok(arriving) => arriving.end().await.is_ok(),
        Err(_) => false,
    }
}

#[tokio::test]
async fn nobody_reaches_the_arena_or_anothers_tray_by_knowing_their_keys() {
    let world = world(&holding(1, 1000), false, &small());
    let mut other = world.link().await;
    let (address, key) = {
        let tray = other.parts().2.tray;
        (tray.address, tray.key)
    };
    assert!(reads(&mut other, address, key).await && other.rest(), "its own it may read");
    let mut link = world.link().await;
    assert!(!reads(&mut link, address, key).await, "another connection's it may not");
    assert!(!link.rest(), "a link with a failed transfer is of no more use");
    // Keys are small numbers here, as on real cards: all of them are tried at where the arena lies.
    let arena = world.arena.take(64).unwrap().address();
    for key in 0..world.fabric.queues().into_iter().max().unwrap() + 8 {
        let mut link = world.link().await;
        assert!(!reads(&mut link, arena, key).await, "with key {key}");
    }
}

#[tokio::test]
async fn who_may_read_the_arena_may_not_write_it() {
    let world = world(&holding(1, 1000), true, &small());
    let mut link = world.link().await;
    let arena = world.arena.take(64).unwrap();
    let (_, _, reach) = link.parts();
    let key = reach.arena_key().unwrap();
    (reach.tray.address, reach.tray.key) = (arena.address(), key);
    let place = reach.local.passing.take(64).unwrap();
    let written = reach.write_arena(place).await.unwrap().end().await;
    assert!(written.is_err(), "it is registered to be read");
}

/// Whether the node ends the connection over what a client says.
async fn ends_it(world: &World, said: impl AsyncFnOnce(&mut Link)) {
    let mut link = world.link().await;
    said(&mut link).await;
    let heard = async {
        loop {
            if read_message::<data::Pong>(&mut link.control).await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, heard).await.expect("the node ends the connection");
    drop(link);
    world.until("nothing of it is left", |world| world.fabric.queues().is_empty()).await;
}

#[tokio::test]
async fn a_client_that_breaks_the_rules_loses_its_connection_and_nothing_else() {
    let service = holding(3, 1000);
    let world = world(&service, true, &small());
    let fetch = || wire::fetch_to_pb(&fetch_request(&hashes(3)));
    for loans in [vec![99_u64], vec![1, 1], vec![u64::MAX]] {
        ends_it(&world, async |link| {
            say(&mut link.control, &fetch()).await;
            let loans = words::loans_to_bytes(&loans.into_iter().map(LoanId).collect::<Vec<_>>());
            say(&mut link.control, &data::GivenBack { loans }).await;
        })
        .await;
    }
    ends_it(&world, async |link| {
        say(&mut link.control, &fetch()).await;
        say(&mut link.control, &data::GivenBack { loans: vec![1; 7] }).await;
    })
    .await;
    let save = || wire::save_to_pb(&SaveRequest { hashes: vec![hash(50)], ..save_request(&[]) });
    for bytes in [u32::MAX, (1 << 20) + 1] {
        ends_it(&world, async |link| {
            say(&mut link.control, &save()).await;
            say(&mut link.control, &data::Written { bytes, is_frame: false }).await;
        })
        .await;
    }
    ends_it(&world, async |link| {
        let attach = Op::Attach(data::Attach::default());
        say(&mut link.control, &data::DataRequest { op: Some(attach), traceparent: String::new() }).await;
    })
    .await;
    ends_it(&world, async |link| {
        link.control.write(Bytes::from_static(&[0xFF; 64])).await.unwrap();
        link.control.flush().await.unwrap();
    })
    .await;
    assert!(!service.holds(hash(50)));
    let path = world.path().await;
    assert_eq!(suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap().tiers().len(), 3);
}

#[tokio::test]
async fn what_was_written_and_is_no_frame_is_refused_and_uses_up_its_turn() {
    let service = holding(0, 0);
    let world = world(&service, true, &small());
    let mut link = world.link().await;
    let save = wire::save_to_pb(&SaveRequest { hashes: vec![hash(0), hash(1)], ..save_request(&[]) });
    say(&mut link.control, &save).await;
    let _: data::SaveOffer = read_message(&mut link.control).await.unwrap();
    let slots: data::Slots = read_message(&mut link.control).await.unwrap();
    assert_eq!((slots.slots, slots.slot_bytes), (1, 1 << 20), "the tray has room for one");
    say(&mut link.control, &data::Written { bytes: 100, is_frame: false }).await;
    let data::Taken {} = read_message(&mut link.control).await.unwrap();
    let good = frame(hash(1), 1000).bytes;
    let (_, _, reach) = link.parts();
    let mut place = reach.local.passing.take(u32::try_from(good.len()).unwrap()).unwrap();
    place.write(&good);
    reach.write(0, place).await.unwrap().end().await.unwrap();
    say(&mut link.control, &data::Written { bytes: u32::try_from(good.len()).unwrap(), is_frame: false })
        .await;
    let data::Taken {} = read_message(&mut link.control).await.unwrap();
    let done: data::SaveDone = read_message(&mut link.control).await.unwrap();
    assert_eq!((done.stored_blocks, done.refused_blocks), (1, 1));
    assert!(service.holds(hash(1)) && !service.holds(hash(0)));
}

#[tokio::test]
async fn attaching_with_what_cannot_be_is_refused() {
    let world = world(&holding(0, 0), true, &small());
    let good = {
        let port = world.client.flights.rail().port();
        let end = words::end_to_pb(port, 7, 7);
        data::Attach {
            version: words::VERSION,
            tray: Some(end.clone()),
            arena: Some(end),
            frame_bytes_max: 100,
            rail: 0,
        }
    };
    let with_end = |end: data::QueueEnd| data::Attach { tray: Some(end), ..good.clone() };
    let end = good.tray.clone().unwrap();
    let bad = [
        data::Attach { version: 2, ..good.clone() },
        data::Attach { tray: None, ..good.clone() },
        data::Attach { arena: None, ..good.clone() },
        data::Attach { rail: 1, ..good.clone() },
        with_end(data::QueueEnd { gid: vec![], ..end.clone() }),
        with_end(data::QueueEnd { queue: u32::MAX, ..end.clone() }),
        with_end(data::QueueEnd { mtu: 99, ..end }),
    ];
    let caller = Arc::from([0]);
    for attach in bad {
        assert!(world.offer.attach(attach.clone(), (&caller, true)).await.is_err(), "{attach:?}");
    }
    world.until("no queue pair is left of it", |world| world.fabric.queues().is_empty()).await;
    assert!(world.offer.attach(good, (&caller, true)).await.is_ok());
    let _: &dyn Path = world.path().await.as_ref();
}

/// Lets time pass for whoever waits by the clock, and has everybody else take many turns.
pub(super) async fn pass(time: Duration) {
    tokio::time::advance(time).await;
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
}

/// What is lent is kept from the evictor as long as the client may read it, so that one that says nothing must not go on for ever.
/// Each time that it gives something back counts anew: as much as it likes may be read, slowly.
#[tokio::test]
async fn a_client_that_gives_nothing_back_for_ten_seconds_is_ended() {
    let world = world(&holding(3, 1000), true, &small());
    let mut link = world.link().await;
    let stall_timeout = TcpConfig::default().stall_timeout;
    assert_eq!(stall_timeout, Duration::from_secs(10), "what is written down of it");
    tokio::time::pause();
    // A clock that stands still goes on when nobody has anything to do, which nobody may find.
    let busy = tokio::spawn(async {
        loop {
            tokio::task::yield_now().await;
        }
    });
    say(&mut link.control, &wire::fetch_to_pb(&fetch_request(&hashes(3)))).await;
    let _: data::FetchHead = read_message(&mut link.control).await.unwrap();
    let mut rows = Vec::new();
    let mut is_last = false;
    while !is_last {
        let lent: data::Lent = read_message(&mut link.control).await.unwrap();
        rows.extend(words::rows_from_bytes(&lent.rows).unwrap());
        is_last = lent.is_last;
    }
    let state = || (world.arena.places(), world.fabric.queues().len());
    assert_eq!((rows.len(), state()), (3, (3, 4)), "lent, over two queue pairs of two ends");
    let almost = stall_timeout - Duration::from_secs(1);
    for left in [2, 1] {
        pass(almost).await;
        assert_eq!(state(), (left + 1, 4), "not before its time");
        let loans = words::loans_to_bytes(&[rows[left].loan]);
        say(&mut link.control, &data::GivenBack { loans }).await;
        world.until("it is heard", |world| world.arena.places() == left).await;
    }
    pass(almost).await;
    assert_eq!(state(), (1, 4));
    pass(stall_timeout - almost).await;
    busy.abort();
    tokio::time::resume();
    let ended = async {
        world.until("the node ended its queue pairs", |world| world.fabric.queues().len() == 2).await;
        world.until("what was lent is free", |world| world.arena.places() == 0).await;
    };
    tokio::time::timeout(stall_timeout, ended).await.expect("it is over now, and not with the longest fetch");
    let heard = tokio::time::timeout(PATIENCE, read_message::<data::Lent>(&mut link.control)).await;
    assert!(heard.expect("it hears of it").is_err());
    assert!(!reads_arena(&mut link, &rows[0]).await, "and reads nothing more");
}

/// Reads what a row names.
async fn reads_arena(link: &mut Link, row: &Descriptor) -> bool {
    let (_, _, reach) = link.parts();
    let place = reach.local.passing.take(row.len).unwrap();
    match reach.read(row.place, row.at, place).await {
        Ok(arriving) => arriving.end().await.is_ok(),
        Err(_) => false,
    }
}
