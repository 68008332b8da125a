//! Peers that send malformed messages, or access memory without permission.

use bytes::Bytes;
use kv_core::id::GrantId;
use kv_core::lease_grant::{GrantDescriptor, GrantMemory};
use kvfleet_proto::data::{self, data_request::Op};
use kvfleet_transport::suite::accept_one;
use kvfleet_transport::upgrade::{Stream, UpgradeRequest, encode, read_message, wire};
use kvfleet_transport::{Path, SaveRequest};
use tokio::net::TcpListener;

use super::super::messages;
use super::super::server::ServerLink;
use super::*;

fn row(loan: u64, at: u64, len: u32) -> GrantDescriptor {
    GrantDescriptor { grant: GrantId(loan), memory: GrantMemory::BounceBuffer, offset: at, len }
}

/// Sends a message and flushes the stream.
pub(super) async fn say(stream: &mut impl Stream, message: &impl prost::Message) {
    stream.write(encode(message).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
}

/// Answers a client's attach requests over this connection until it has a link.
pub(super) async fn attach(offer: &Arc<RdmaServer>, stream: &mut impl Stream) -> ServerLink {
    loop {
        let asked: data::DataRequest = read_message(stream).await.unwrap();
        let Some(Op::Attach(attach)) = asked.op else { panic!("{asked:?}") };
        let request = UpgradeRequest { attach, caller: &Arc::from([0]), may_map: false };
        let (attached, answer) = offer.attach_link(request).await.unwrap();
        say(stream, &answer).await;
        if let Some(attached) = attached {
            return attached;
        }
    }
}

/// A node that attaches correctly and then sends `lies` as grants for a fetch of two blocks.
/// Returns the client's answer and its transfers.
async fn fetch_from_liar(lies: Vec<data::ReadGrants>) -> (FetchAnswer, Vec<rail::Transfer>) {
    let fabric = Fabric::default();
    let [node, client] = [1, 2].map(|number| Rdma::from_rail(fabric.rail(number), &small()).unwrap());
    let offer = RdmaServer::new(&node, None).unwrap();
    let authority = TestAuthority::new();
    let listener = TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let identity = authority.member();
    let serving = tokio::spawn(async move {
        let mut lifeline = accept_one(&listener, &identity).await;
        let _: data::DataRequest = read_message(&mut lifeline).await.unwrap();
        say(&mut lifeline, &data::Pong { version: wire::PROTOCOL_VERSION }).await;
        let mut stream = accept_one(&listener, &identity).await;
        let attached = attach(&offer, &mut stream).await;
        attached.observe_epoch(suite::EPOCH);
        let _: data::DataRequest = read_message(&mut stream).await.unwrap();
        let hit = FetchAnswer::Hit { tiers: in_dram(2) };
        say(&mut stream, &wire::head_to_pb(&hit, suite::EPOCH)).await;
        for lie in lies {
            say(&mut stream, &lie).await;
        }
        // The client ends the connection or goes on; both keepalive connections stay open.
        let _ = read_message::<data::ReturnedGrants>(&mut stream).await;
        std::future::pending::<()>().await;
        drop((lifeline, attached));
    });
    let dialer = RdmaDialer::new(&client, &authority.member(), TcpConfig::default()).unwrap();
    let path = dialer.dial(address).await.unwrap();
    let tried = fabric.transfers().len();
    let request = FetchRequest { deadline: Duration::from_secs(20), ..fetch_request(&hashes(2)) };
    let answer =
        path.fetch(request, &mut |frame| panic!("a frame of a liar was delivered: {frame:?}")).await.unwrap();
    serving.abort();
    (answer, fabric.transfers().split_off(tried))
}

fn lent(rows: &[GrantDescriptor]) -> data::ReadGrants {
    let lease_us = 10_000_000;
    let epoch = suite::EPOCH.0;
    data::ReadGrants {
        rows: messages::rows_to_bytes(rows),
        grant_us: lease_us,
        epoch,
        ..data::ReadGrants::default()
    }
}

#[tokio::test]
async fn impossible_descriptors_are_not_read() {
    let tray = small().bounce_buffer_bytes as u64;
    let lost = FetchAnswer::Miss { reason: MissReason::NodeLost };
    let lies = [
        vec![row(1, tray - 10, 11)],
        vec![row(1, u64::MAX, 2)],
        vec![row(1, 0, 0)],
        vec![row(1, 0, u32::MAX)],
        vec![row(1, 0, 64), row(1, 64, 64)],
        vec![row(2, 0, 64), row(1, 64, 64)],
        vec![row(1, 0, 64), row(2, 64, 64), row(3, 128, 64)],
        vec![GrantDescriptor { memory: GrantMemory::Arena, ..row(1, 0, 64) }],
    ];
    for lie in lies {
        let (answer, transfers) = fetch_from_liar(vec![lent(&lie)]).await;
        assert_eq!((&answer, &transfers[..]), (&lost, &[][..]), "{lie:?}");
    }
}

#[tokio::test]
async fn a_repeated_grant_is_refused() {
    // The bytes are not a frame, so the first grant is refused after its bytes were read.
    let (answer, transfers) = fetch_from_liar(vec![lent(&[row(1, 0, 64)]), lent(&[row(1, 0, 64)])]).await;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::Corrupt });
    assert_eq!(transfers.len(), 2, "the block, and the epoch word");
}

#[tokio::test]
async fn an_expired_lease_is_not_used() {
    let over = data::ReadGrants { grant_us: 0, ..lent(&[row(1, 0, 64)]) };
    let (answer, _) = fetch_from_liar(vec![over]).await;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::TooLate });
}

#[tokio::test]
async fn rows_of_another_epoch_are_not_read() {
    let other = data::ReadGrants { epoch: suite::EPOCH.0 + 1, ..lent(&[row(1, 0, 64)]) };
    let (answer, transfers) = fetch_from_liar(vec![other]).await;
    assert_eq!((answer, transfers.len()), (FetchAnswer::Miss { reason: MissReason::StaleEpoch }, 0));
}

#[tokio::test]
async fn malformed_rows_end_the_connection() {
    let torn = data::ReadGrants { rows: vec![1; messages::ROW_BYTES + 1], ..lent(&[]) };
    let (answer, transfers) = fetch_from_liar(vec![torn]).await;
    assert_eq!((answer, transfers.len()), (FetchAnswer::Miss { reason: MissReason::NodeLost }, 0));
}

/// Reads with a key and address of the client's choice.
async fn reads(link: &mut RdmaLink, address: u64, key: u32) -> bool {
    let (_, _, reach) = link.split();
    let place = reach.local.transient.take(64).unwrap();
    let tray = reach.bounce_window;
    (reach.bounce_window.address, reach.bounce_window.key) = (address, key);
    let begun = reach.read(GrantMemory::BounceBuffer, 0, place).await;
    reach.bounce_window = tray;
    match begun {
        Ok(arriving) => arriving.wait().await.is_ok(),
        Err(_) => false,
    }
}

#[tokio::test]
async fn known_keys_do_not_open_the_arena_or_foreign_bounce_buffers() {
    let world = world(&service_with_blocks(1, 1000), false, &small());
    let mut other = world.link().await;
    let (address, key) = {
        let tray = other.split().2.bounce_window;
        (tray.address, tray.key)
    };
    assert!(
        reads(&mut other, address, key).await && other.prepare_reuse(),
        "a client may read its own bounce buffer"
    );
    let mut link = world.link().await;
    assert!(
        !reads(&mut link, address, key).await,
        "a client must not read the bounce buffer of another connection"
    );
    assert!(!link.prepare_reuse(), "a link with a failed transfer must not be reused");
    // Keys are small numbers here, as on real cards: all of them are tried at the arena's address.
    let arena = world.arena.take(64).unwrap().address();
    for key in 0..world.fabric.queues().into_iter().max().unwrap() + 8 {
        let mut link = world.link().await;
        assert!(!reads(&mut link, arena, key).await, "with key {key}");
    }
}

#[tokio::test]
async fn a_reader_of_the_arena_cannot_write_it() {
    let world = world(&service_with_blocks(1, 1000), true, &small());
    let mut link = world.link().await;
    let arena = world.arena.take(64).unwrap();
    let (_, _, reach) = link.split();
    let key = reach.arena_key().unwrap();
    (reach.bounce_window.address, reach.bounce_window.key) = (arena.address(), key);
    let place = reach.local.transient.take(64).unwrap();
    let written = reach.write_arena(place).await.unwrap().wait().await;
    assert!(written.is_err(), "the arena is registered read-only");
}

/// Checks that the node ends the connection after these messages.
async fn assert_node_disconnects(world: &RdmaWorld, said: impl AsyncFnOnce(&mut RdmaLink)) {
    let mut link = world.link().await;
    said(&mut link).await;
    let heard = async {
        loop {
            if read_message::<data::Pong>(&mut link.control).await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, heard).await.expect("the node must end the connection");
    drop(link);
    world.wait_until("all its queue pairs are destroyed", |world| world.fabric.queues().is_empty()).await;
}

#[tokio::test]
async fn a_client_that_breaks_the_rules_loses_only_its_connection() {
    let service = service_with_blocks(3, 1000);
    let world = world(&service, true, &small());
    let fetch = || wire::fetch_to_pb(&fetch_request(&hashes(3)));
    for loans in [vec![99_u64], vec![1, 1], vec![u64::MAX]] {
        assert_node_disconnects(&world, async |link| {
            say(&mut link.control, &fetch()).await;
            let loans = messages::loans_to_bytes(&loans.into_iter().map(GrantId).collect::<Vec<_>>());
            say(&mut link.control, &data::ReturnedGrants { grants: loans }).await;
        })
        .await;
    }
    assert_node_disconnects(&world, async |link| {
        say(&mut link.control, &fetch()).await;
        say(&mut link.control, &data::ReturnedGrants { grants: vec![1; 7] }).await;
    })
    .await;
    let save = || wire::save_to_pb(&SaveRequest { hashes: vec![hash(50)], ..save_request(&[]) });
    for bytes in [u32::MAX, (1 << 20) + 1] {
        assert_node_disconnects(&world, async |link| {
            say(&mut link.control, &save()).await;
            say(&mut link.control, &data::WriteDone { bytes, is_frame: false }).await;
        })
        .await;
    }
    assert_node_disconnects(&world, async |link| {
        let attach = Op::Attach(data::Attach::default());
        say(&mut link.control, &data::DataRequest { op: Some(attach), traceparent: String::new() }).await;
    })
    .await;
    assert_node_disconnects(&world, async |link| {
        link.control.write(Bytes::from_static(&[0xFF; 64])).await.unwrap();
        link.control.flush().await.unwrap();
    })
    .await;
    assert!(!service.holds(hash(50)));
    let path = world.path().await;
    assert_eq!(suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap().tiers().len(), 3);
}

#[tokio::test]
async fn a_written_non_frame_is_refused_and_consumes_its_slot() {
    let service = service_with_blocks(0, 0);
    let world = world(&service, true, &small());
    let mut link = world.link().await;
    let save = wire::save_to_pb(&SaveRequest { hashes: vec![hash(0), hash(1)], ..save_request(&[]) });
    say(&mut link.control, &save).await;
    let _: data::SaveOffer = read_message(&mut link.control).await.unwrap();
    let slots: data::Slots = read_message(&mut link.control).await.unwrap();
    assert_eq!((slots.slots, slots.slot_bytes), (1, 1 << 20), "the bounce buffer has space for one frame");
    say(&mut link.control, &data::WriteDone { bytes: 100, is_frame: false }).await;
    let data::WriteAck {} = read_message(&mut link.control).await.unwrap();
    let good = frame(hash(1), 1000).bytes;
    let (_, _, reach) = link.split();
    let mut place = reach.local.transient.take(u32::try_from(good.len()).unwrap()).unwrap();
    place.write(&good);
    reach.write(0, place).await.unwrap().wait().await.unwrap();
    say(&mut link.control, &data::WriteDone { bytes: u32::try_from(good.len()).unwrap(), is_frame: false })
        .await;
    let data::WriteAck {} = read_message(&mut link.control).await.unwrap();
    let done: data::SaveDone = read_message(&mut link.control).await.unwrap();
    assert_eq!((done.stored_blocks, done.refused_blocks), (1, 1));
    assert!(service.holds(hash(1)) && !service.holds(hash(0)));
}

#[tokio::test]
async fn invalid_attach_requests_are_refused() {
    let world = world(&service_with_blocks(0, 0), true, &small());
    let good = {
        let port = world.client.transfers.rail().port();
        let end = messages::address_to_pb(port, 7, 7);
        data::Attach {
            version: messages::VERSION,
            bounce_buffer: Some(end.clone()),
            arena: Some(end),
            frame_bytes_max: 100,
            rail: 0,
        }
    };
    let with_end = |end: data::QueuePairInfo| data::Attach { bounce_buffer: Some(end), ..good.clone() };
    let end = good.bounce_buffer.clone().unwrap();
    let bad = [
        data::Attach { version: 2, ..good.clone() },
        data::Attach { bounce_buffer: None, ..good.clone() },
        data::Attach { arena: None, ..good.clone() },
        data::Attach { rail: 1, ..good.clone() },
        with_end(data::QueuePairInfo { gid: vec![], ..end.clone() }),
        with_end(data::QueuePairInfo { queue: u32::MAX, ..end.clone() }),
        with_end(data::QueuePairInfo { mtu: 99, ..end }),
    ];
    let caller = Arc::from([0]);
    let ask = |attach| UpgradeRequest { attach, caller: &caller, may_map: true };
    for attach in bad {
        assert!(world.rdma_server.attach_link(ask(attach.clone())).await.is_err(), "{attach:?}");
    }
    world.wait_until("its queue pairs are destroyed", |world| world.fabric.queues().is_empty()).await;
    assert!(world.rdma_server.attach_link(ask(good)).await.is_ok());
    let _: &dyn Path = world.path().await.as_ref();
}

/// Advances the clock, and lets all other tasks run many times.
pub(super) async fn advance_time(time: Duration) {
    tokio::time::advance(time).await;
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
}

/// Granted blocks cannot be evicted while the client may read them, so a silent client must not
/// hold them forever. Each returned grant restarts the timeout, so slow reading is possible.
#[tokio::test]
async fn a_client_that_returns_no_grant_for_ten_seconds_is_disconnected() {
    let world = world(&service_with_blocks(3, 1000), true, &small());
    let mut link = world.link().await;
    let stall_timeout = TcpConfig::default().stall_timeout;
    assert_eq!(stall_timeout, Duration::from_secs(10), "the documented timeout");
    tokio::time::pause();
    // A paused clock advances whenever all tasks are idle, so this task keeps the runtime busy.
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
        let lent: data::ReadGrants = read_message(&mut link.control).await.unwrap();
        rows.extend(messages::rows_from_bytes(&lent.rows).unwrap());
        is_last = lent.is_last;
    }
    let state = || (world.arena.buffers_in_use(), world.fabric.queues().len());
    assert_eq!((rows.len(), state()), (3, (3, 4)), "three grants, over two queue pairs at each of two ends");
    let almost = stall_timeout - Duration::from_secs(1);
    for left in [2, 1] {
        advance_time(almost).await;
        assert_eq!(state(), (left + 1, 4), "too early");
        let loans = messages::loans_to_bytes(&[rows[left].grant]);
        say(&mut link.control, &data::ReturnedGrants { grants: loans }).await;
        world
            .wait_until("the node receives the returned grant", |world| world.arena.buffers_in_use() == left)
            .await;
    }
    advance_time(almost).await;
    assert_eq!(state(), (1, 4));
    advance_time(stall_timeout - almost).await;
    busy.abort();
    tokio::time::resume();
    let ended = async {
        world
            .wait_until("the node destroyed its queue pairs", |world| world.fabric.queues().len() == 2)
            .await;
        world.wait_until("the granted blocks are free", |world| world.arena.buffers_in_use() == 0).await;
    };
    tokio::time::timeout(stall_timeout, ended)
        .await
        .expect("it must end now, and not with the longest fetch");
    let heard = tokio::time::timeout(PATIENCE, read_message::<data::ReadGrants>(&mut link.control)).await;
    assert!(heard.expect("the client must learn of it").is_err());
    assert!(!reads_arena(&mut link, &rows[0]).await, "the client must not read any more");
}

/// Reads the bytes that a row names.
async fn reads_arena(link: &mut RdmaLink, row: &GrantDescriptor) -> bool {
    let (_, _, reach) = link.split();
    let place = reach.local.transient.take(row.len).unwrap();
    match reach.read(row.memory, row.offset, place).await {
        Ok(arriving) => arriving.wait().await.is_ok(),
        Err(_) => false,
    }
}
