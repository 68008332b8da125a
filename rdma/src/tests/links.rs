//! Links: their number, and when a link is replaced.

use kvfleet_proto::data;
use kvfleet_transport::suite::accept_one;
use kvfleet_transport::upgrade::{read_message, wire};
use kvfleet_transport::{SaveOffer, SaveRefusal};
use tokio::net::TcpListener;

use super::hostile::{attach, say};
use super::*;

#[tokio::test]
async fn links_are_reused_by_later_operations() {
    let world = world(&service_with_blocks(3, 1000), true, &small());
    let path = world.path().await;
    let first = world.fabric.queues();
    for _ in 0..3 {
        suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap();
        suite::save(path.as_ref(), save_request(&hashes(4)), 1000).await.unwrap();
    }
    assert_eq!(world.fabric.queues(), first);
    drop(path);
    world.wait_until("the links end with the path", |world| world.fabric.queues().is_empty()).await;
}

#[tokio::test]
async fn operations_above_the_link_limit_use_the_connection() {
    let config = RdmaConfig { links_max: 1, ..small() };
    let service = service_with_blocks(3, 1000);
    let world = world(&service, true, &config);
    let path = world.path().await;
    let other = world.dialer().dial(world.address()).await.err().unwrap();
    says("a node whose RDMA links are all taken", &other, &[&world.address()]);
    service.set_gate(0);
    let before = world.client.stats().read_bytes;
    let both = async {
        let request = || suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
        let (first, second) = tokio::join!(request(), request());
        (first.unwrap().tiers().len(), second.unwrap().tiers().len())
    };
    let open = async {
        // The second request gets no link at once, and uses the connection.
        world.wait_until("both requests are in flight", |_| service.deadlines().len() == 2).await;
        service.set_gate(100);
    };
    assert_eq!(tokio::join!(both, open).0, (3, 3));
    let read = world.client.stats().read_bytes - before;
    assert!((3 * 1000..2 * 3 * 1000).contains(&read), "one of them must use the connection: {read}");
}

#[tokio::test]
async fn a_node_without_rdma_is_recognised() {
    let world = world(&service_with_blocks(0, 0), true, &small());
    let plain = TcpServer::bind(ANY, &world.identity, Arc::new(MemoryService::default())).unwrap();
    let error = world.dialer().dial(plain.local_addr().to_string()).await.err().unwrap();
    assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
    // Queue pairs of the failed attempt are destroyed by a separate thread.
    world.wait_until("its queue pairs are destroyed", |world| world.fabric.queues().is_empty()).await;
    let tcp = TcpDialer::new(&world.authority.member(), TcpConfig::default());
    for (at, is_refused) in [(plain.local_addr().to_string(), true), (world.address(), false)] {
        let tcp = tcp.open(&at).await.unwrap();
        let offered = RdmaLink::query_rails(&tcp).await.unwrap();
        assert_eq!(offered.is_err(), is_refused, "a query uses no queue pairs: {offered:?}");
        kvfleet_transport::Path::ping(&tcp).await.unwrap();
    }
    assert!(world.fabric.queues().is_empty());
    says("a node without RDMA", &error, &[&plain.local_addr().to_string()]);
}

#[tokio::test]
async fn a_lost_node_is_detected_and_everything_is_released() {
    let service = service_with_blocks(3, 1000);
    let world = world(&service, true, &small());
    let path = world.path().await;
    service.set_gate(1);
    let (first, came) = tokio::sync::oneshot::channel();
    let mut first = Some(first);
    let mut sink = |_| {
        if let Some(first) = first.take() {
            first.send(()).unwrap();
        }
    };
    let fetch = path.fetch(fetch_request(&hashes(3)), &mut sink);
    let RdmaWorld { server, fabric, .. } = world;
    let killed = async {
        came.await.unwrap();
        server.close().await;
    };
    let (answer, ()) = tokio::join!(fetch, killed);
    let expected = FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::NodeLost };
    assert_eq!(answer.unwrap(), expected, "delivered blocks must count");
    // It has a minute, and must not spend it waiting for a link.
    let again = suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
    let error = tokio::time::timeout(Duration::from_secs(20), again).await.unwrap().unwrap_err();
    assert!(matches!(error, PathError::Broken { .. } | PathError::Unreachable { .. }), "{error}");
    drop(path);
    tokio::time::timeout(PATIENCE, async {
        while !fabric.queues().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_link_closed_by_the_node_is_replaced() {
    let service = service_with_blocks(3, 1000);
    let fabric = Fabric::default();
    let config = small();
    let [node, client] = [1, 2].map(|number| Rdma::from_rail(fabric.rail(number), &config).unwrap());
    let offer = RdmaServer::new(&node, None).unwrap();
    let authority = TestAuthority::new();
    // The node closes links that are idle for three times as long; keepalive messages come more
    // often, so only the link is idle.
    let idle = TcpConfig { idle_timeout: Duration::from_millis(400), ..TcpConfig::default() };
    let server = bind(&authority.member(), &idle, offer, Arc::new(service));
    let dialer = RdmaDialer::new(&client, &authority.member(), TcpConfig::default()).unwrap();
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    // One at each end, because no arena is offered: the client destroys its queue pair for that.
    while fabric.queues().len() != 2 {
        tokio::task::yield_now().await;
    }
    while fabric.queues().len() == 2 {
        tokio::task::yield_now().await;
    }
    let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap();
    assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(3) });
}

#[tokio::test]
async fn a_probe_does_not_wait_for_fetch_buffers() {
    let world = world(&service_with_blocks(1, 1000), true, &small());
    let local = LocalRail::new(&world.client).unwrap();
    let all = u32::try_from(local.transient.len_bytes()).unwrap();
    let fetched = local.transient.take(all).unwrap();
    let link =
        tokio::time::timeout(PATIENCE, world.link_with(&local)).await.expect("the probe must not wait");
    drop((link, fetched));
}

#[tokio::test]
async fn retained_frames_never_block_fetches() {
    // Half of the client's memory holds three frames.
    let config = RdmaConfig { local_bytes: 700_000, ..small() };
    let world = world(&service_with_blocks(20, 100_000), true, &config);
    let path = world.path().await;
    let mut kept = Vec::new();
    let mut keep = |frame| kept.push(frame);
    let fetched = path.fetch(fetch_request(&hashes(20)), &mut keep);
    let hit = tokio::time::timeout(PATIENCE, fetched)
        .await
        .expect("fetches must not wait for retained buffers")
        .unwrap();
    assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(20) });
    for (number, frame) in (0..).zip(&kept) {
        frame.verify(suite::IDENTITY, hash(number)).unwrap();
    }
    drop(path);
    world.wait_until("all links ended", |world| world.fabric.queues().is_empty()).await;
    for (number, frame) in (0..).zip(&kept) {
        frame.verify(suite::IDENTITY, hash(number)).expect("retained frames outlive their path");
    }
}

#[tokio::test]
async fn transfers_in_flight_are_bounded() {
    let tuning = RdmaTuning { queue_in_flight_max: 3, ..RdmaTuning::default() };
    let world = world(&service_with_blocks(20, 1000), true, &RdmaConfig { tuning, ..small() });
    let path = world.path().await;
    world.fabric.hold();
    let fetch = suite::fetch(path.as_ref(), fetch_request(&hashes(20)));
    let watch = async {
        world.wait_until("three transfers are in flight", |world| world.fabric.held() == 3).await;
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        assert_eq!((world.fabric.held(), world.client.transfers.in_flight()), (3, 3));
        world.fabric.release();
    };
    let (hit, ()) = tokio::join!(fetch, watch);
    assert_eq!(hit.unwrap(), FetchAnswer::Hit { tiers: in_dram(20) });
}

#[tokio::test]
async fn a_silent_peer_leaves_transfers_to_others() {
    let tuning = RdmaTuning { in_flight_max: 16, ..RdmaTuning::default() };
    let world = world(&service_with_blocks(20, 1000), true, &RdmaConfig { tuning, ..small() });
    let paths = [world.path().await, world.path().await];
    world.fabric.hold();
    let [first, second] =
        paths.each_ref().map(|path| suite::fetch(path.as_ref(), fetch_request(&hashes(20))));
    let watch = async {
        world.wait_until("each peer has its share", |world| world.fabric.held() == 4).await;
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        assert_eq!((world.fabric.held(), world.client.transfers.in_flight()), (4, 4));
        world.fabric.release();
    };
    let (first, second, ()) = tokio::join!(first, second, watch);
    assert_eq!((first.unwrap().tiers().len(), second.unwrap().tiers().len()), (20, 20));
}

#[tokio::test]
async fn a_stale_epoch_does_not_cost_the_link() {
    let service = service_with_blocks(3, 1000);
    let world = world(&service, true, &small());
    let path = world.path().await;
    let first = world.fabric.queues();
    for epoch in [suite::EPOCH.0 + 1, suite::EPOCH.0 + 2] {
        let newer = kv_core::id::Epoch(epoch);
        service.set_epoch(newer);
        let stale = suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap();
        assert_eq!(stale, FetchAnswer::Miss { reason: MissReason::StaleEpoch });
        let request = FetchRequest { epoch: newer, ..fetch_request(&hashes(3)) };
        let hit = suite::fetch(path.as_ref(), request).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(3) });
    }
    assert_eq!(world.fabric.queues(), first);
}

#[tokio::test]
async fn leases_of_many_requests_do_not_accumulate() {
    let world = world(&service_with_blocks(1, 100), true, &small());
    let path = world.path().await;
    for lease in 0..300 {
        let asker = kvfleet_transport::RequestContext {
            lease: kv_core::id::LeaseId(lease),
            ..fetch_request(&hashes(1)).context
        };
        let request = FetchRequest { context: asker, ..fetch_request(&hashes(1)) };
        let hit = suite::fetch(path.as_ref(), request).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(1) }, "lease {lease}");
    }
}

#[tokio::test]
async fn a_path_without_packet_flow_is_not_opened() {
    let world = world(&service_with_blocks(1, 100), true, &small());
    world.fabric.fail_next(12);
    let error = world.dialer().dial(world.address()).await.err().unwrap();
    assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
    says("a node to which RDMA packets do not pass", &error, &[&world.address()]);
    world
        .wait_until("the queue pairs at both ends are destroyed", |world| world.fabric.queues().is_empty())
        .await;
    world.dialer().dial(world.address()).await.unwrap();
}

#[tokio::test]
async fn operations_use_the_connection_if_no_link_can_be_made() {
    for refuse in [Fabric::refuse_register, Fabric::refuse_queue] {
        let service = service_with_blocks(3, 1000);
        let world = world(&service, true, &small());
        let path = world.path().await;
        refuse(&world.fabric, libc::ENOMEM);
        service.set_gate(0);
        let both = async {
            let request = || suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
            let (first, second) = tokio::join!(request(), request());
            (first.unwrap().tiers().len(), second.unwrap().tiers().len())
        };
        let open = async {
            world.wait_until("both requests are in flight", |_| service.deadlines().len() == 2).await;
            service.set_gate(100);
        };
        assert_eq!(tokio::join!(both, open).0, (3, 3));
    }
}

/// A device that neither completes nor fails a transfer must not hold an operation until its deadline.
#[tokio::test]
async fn a_device_without_completions_is_replaced_by_the_connection() {
    let tuning = RdmaTuning { completion_timeout: Duration::from_millis(200), ..RdmaTuning::default() };
    let world = world(&service_with_blocks(3, 1000), true, &RdmaConfig { tuning, ..small() });
    let path = world.path().await;
    world.fabric.hold();
    let request = FetchRequest { deadline: PATIENCE, ..fetch_request(&hashes(3)) };
    let hit = suite::fetch(path.as_ref(), request).await.unwrap();
    assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(3) });
    world.fabric.release();
    assert_eq!(suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap().tiers().len(), 3);
}

#[tokio::test]
async fn waiting_for_a_link_counts_against_the_deadline() {
    let config = RdmaConfig { links_per_peer: 1, ..small() };
    let service = service_with_blocks(3, 1000);
    let world = world(&service, true, &config);
    let path = world.path().await;
    service.set_gate(0);
    let first = suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
    let second = async {
        world.wait_until("the first fetch has the link", |_| service.deadlines().len() == 1).await;
        let deadline = Duration::from_millis(500);
        let waits = suite::fetch(path.as_ref(), FetchRequest { deadline, ..fetch_request(&hashes(3)) });
        let open = async {
            tokio::time::timeout(deadline / 2, std::future::pending::<()>()).await.unwrap_err();
            service.set_gate(3);
        };
        tokio::join!(waits, open).0
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!(first.unwrap().tiers().len(), 3);
    assert_eq!(second.unwrap(), FetchAnswer::Miss { reason: MissReason::TooLate });
    let asked = service.deadlines();
    assert!(asked[1] <= Duration::from_millis(250), "the node must be told the remaining time: {asked:?}");
}

#[tokio::test]
async fn links_do_not_occupy_connection_slots() {
    let world = world(&service_with_blocks(1, 100), true, &small());
    let config = TcpConfig { connections_per_peer: 1, ..TcpConfig::default() };
    let dialer = RdmaDialer::new(&world.client, &world.authority.member(), config).unwrap();
    let path = dialer.dial(world.address()).await.unwrap();
    suite::fetch(path.as_ref(), fetch_request(&hashes(1))).await.unwrap();
    tokio::time::timeout(PATIENCE, path.ping()).await.expect("a connection slot must be free").unwrap();
    path.release(kv_core::id::LeaseId(1)).await.unwrap();
}

#[tokio::test]
async fn a_client_closes_idle_links() {
    let world = world(&service_with_blocks(1, 100), true, &small());
    let config = TcpConfig { idle_timeout: Duration::from_millis(200), ..TcpConfig::default() };
    let dialer = RdmaDialer::new(&world.client, &world.authority.member(), config).unwrap();
    let path = dialer.dial(world.address()).await.unwrap();
    // The node would close it only after a minute.
    world.wait_until("ended", |world| world.fabric.queues().is_empty()).await;
    let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(1))).await.unwrap();
    assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(1) });
}

#[tokio::test]
async fn a_save_is_repeated_over_another_link_if_the_node_closed_it() {
    let fabric = Fabric::default();
    let [node, client] = [1, 2].map(|number| Rdma::from_rail(fabric.rail(number), &small()).unwrap());
    let offer = RdmaServer::new(&node, None).unwrap();
    let authority = TestAuthority::new();
    let (identity, listener) = (authority.member(), TcpListener::bind(ANY).await.unwrap());
    let address = listener.local_addr().unwrap().to_string();
    let serving = tokio::spawn(async move {
        let mut lifeline = accept_one(&listener, &identity).await;
        let _: data::DataRequest = read_message(&mut lifeline).await.unwrap();
        say(&mut lifeline, &data::Pong { version: wire::PROTOCOL_VERSION }).await;
        // It closes the first link at the second operation, without an answer, and keeps the second
        // link.
        for answered in [1, usize::MAX] {
            let mut stream = accept_one(&listener, &identity).await;
            let _attached = attach(&offer, &mut stream).await;
            for number in 0.. {
                if read_message::<data::DataRequest>(&mut stream).await.is_err() || number == answered {
                    break;
                }
                say(&mut stream, &wire::offer_to_pb(&SaveOffer::Refused(SaveRefusal::Full))).await;
            }
        }
    });
    let dialer = RdmaDialer::new(&client, &authority.member(), TcpConfig::default()).unwrap();
    let path = dialer.dial(address).await.unwrap();
    for _ in 0..3 {
        let answer = suite::save(path.as_ref(), save_request(&[hash(9)]), 1000).await.unwrap();
        assert_eq!(answer, kvfleet_transport::SaveAnswer::Refused(SaveRefusal::Full));
    }
    serving.abort();
}

#[tokio::test]
async fn a_fetch_without_a_link_in_time_uses_the_connection() {
    let world = world(&service_with_blocks(3, 1000), true, &small());
    let config = TcpConfig { idle_timeout: Duration::from_millis(200), ..TcpConfig::default() };
    let dialer = RdmaDialer::new(&world.client, &world.authority.member(), config).unwrap();
    let path = dialer.dial(world.address()).await.unwrap();
    world.wait_until("no link is left", |world| world.fabric.queues().is_empty()).await;
    // From now on the network loses every packet.
    world.fabric.hold();
    for _ in 0..2 {
        let request = FetchRequest { deadline: Duration::from_secs(2), ..fetch_request(&hashes(3)) };
        let hit = suite::fetch(path.as_ref(), request).await.unwrap();
        assert_eq!(
            hit,
            FetchAnswer::Hit { tiers: in_dram(3) },
            "over the TCP connection, while there is time"
        );
    }
}
