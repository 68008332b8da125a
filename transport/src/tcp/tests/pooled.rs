//! Connections that one operation passes on to the next, and those that must be closed.

use kvfleet_proto::data;
use tokio::sync::watch;

use super::*;
use crate::capacity::Capacity;
use crate::serve::{Operations, ServeLimits, TIMES};
use crate::stream::{Stream, encode, read_message};
use crate::suite::ComputedBlocks;
use crate::tcp::handshake;
use crate::tcp::path::TcpPath;
use crate::{FetchRequest, LayeredSaveOutcome, Path, SaveAnswer, SaveRequest, wire};

async fn path_to(address: SocketAddr, authority: &TestAuthority, config: TcpConfig) -> TcpPath {
    TcpDialer::new(&authority.member(), config).open(&address.to_string()).await.unwrap()
}

async fn serve(config: &TcpConfig, service: Arc<MemoryService>) -> (TcpServer, TcpPath) {
    let authority = TestAuthority::new();
    let server = TcpServer::bind_with(ANY, &authority.member(), config, service).unwrap();
    let path = path_to(server.local_addr(), &authority, config.clone()).await;
    (server, path)
}

#[tokio::test]
async fn operations_one_after_another_share_one_connection() {
    let (_server, path) = serve(&TcpConfig::default(), holding(3)).await;
    for _ in 0..3 {
        let hit = FetchAnswer::Hit { tiers: in_dram(3) };
        assert_eq!(suite::fetch(&path, fetch_request(&hashes(3))).await.unwrap(), hit);
        let partial = suite::fetch(&path, fetch_request(&hashes(4))).await.unwrap();
        assert_eq!(partial, FetchAnswer::Partial { tiers: in_dram(3), reason: MissReason::NotHeld });
        assert!(matches!(
            suite::save(&path, save_request(&hashes(3)), 1000).await.unwrap(),
            SaveAnswer::Done(_)
        ));
        path.release(kv_core::id::LeaseId(1)).await.unwrap();
        path.ping().await.unwrap();
        assert_eq!(path.pool.idle_count(), 1);
    }
}

#[tokio::test]
async fn an_early_end_leaves_the_connection_reusable() {
    let service = holding(3);
    let (_server, path) = serve(&TcpConfig::default(), service.clone()).await;
    service.end_with(MissReason::Busy);
    for _ in 0..2 {
        let answer = suite::fetch(&path, fetch_request(&hashes(3))).await.unwrap();
        assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::Busy });
        assert_eq!(path.pool.idle_count(), 1);
    }
}

#[tokio::test]
async fn a_dropped_fetch_closes_its_connection() {
    let service = holding(3);
    let (_server, path) = serve(&TcpConfig::default(), service.clone()).await;
    path.ping().await.unwrap();
    service.set_gate(1);
    let came = watch::Sender::new(0);
    let mut seen = came.subscribe();
    let mut sink = |_| came.send_modify(|came| *came += 1);
    tokio::select! {
        answer = path.fetch(fetch_request(&hashes(3)), &mut sink) => panic!("the fetch passed a closed gate: \
            {answer:?}"),
        _ = seen.wait_for(|came| *came == 1) => {}
    }
    assert_eq!(path.pool.idle_count(), 0, "its connection was kept");
    service.set_gate(100);
    // Other blocks than those in transit.
    service.hold(frame(hash(9), 500));
    let answer = suite::fetch(&path, fetch_request(&[hash(9)])).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(1) });
}

#[tokio::test]
async fn a_late_fetch_closes_its_connection() {
    let service = holding(3);
    let (_server, path) = serve(&TcpConfig::default(), service.clone()).await;
    service.set_gate(1);
    let request = FetchRequest { deadline: Duration::from_secs(2), ..fetch_request(&hashes(3)) };
    let answer = suite::fetch(&path, request).await.unwrap();
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::TooLate });
    assert_eq!(path.pool.idle_count(), 0);
    service.set_gate(100);
    let answer = suite::fetch(&path, fetch_request(&hashes(3))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(3) });
}

#[tokio::test]
async fn excess_operations_wait_within_their_deadlines() {
    let service = holding(2);
    let config = TcpConfig { connections_per_peer: 1, ..TcpConfig::default() };
    let (_server, path) = serve(&config, service.clone()).await;
    service.set_gate(0);
    let first = suite::fetch(&path, fetch_request(&hashes(2)));
    let second = async {
        let request = FetchRequest { deadline: Duration::from_millis(100), ..fetch_request(&hashes(2)) };
        let late = suite::fetch(&path, request).await.unwrap();
        service.set_gate(10);
        late
    };
    let third = suite::fetch(&path, fetch_request(&hashes(2)));
    let (first, second, third) = tokio::join!(first, second, third);
    let hit = FetchAnswer::Hit { tiers: in_dram(2) };
    assert_eq!((first.unwrap(), third.unwrap()), (hit.clone(), hit));
    assert_eq!(second, FetchAnswer::Miss { reason: MissReason::TooLate });
}

#[tokio::test]
async fn idle_connections_are_closed_by_the_client_first() {
    let config = TcpConfig { idle_timeout: Duration::from_millis(100), ..TcpConfig::default() };
    let (_server, path) = serve(&config, holding(1)).await;
    path.ping().await.unwrap();
    let emptied = async {
        while path.pool.idle_count() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, emptied).await.expect("idle connections are not closed");
    path.ping().await.unwrap();
}

/// A node that serves one operation per connection and then closes it as if idle. If `told`, it
/// sends the close alert at once, otherwise only after the next request.
async fn closing_node(authority: &TestAuthority, told: bool) -> SocketAddr {
    let tls = Arc::new(authority.member().tcp_server());
    let listener = tokio::net::TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut lifelines = Vec::new();
        for number in 0.. {
            let (socket, _) = listener.accept().await.unwrap();
            let tls = tls.clone();
            lifelines.push(tokio::spawn(async move {
                let ends = StreamShared {
                    buffers: Arc::default(),
                    received: Arc::default(),
                    min_size: BufferSize::Small,
                };
                let (mut stream, _) = handshake::accept(socket, &tls, ends).await.unwrap();
                while stream.wait_for_data().await == Ok(true) {
                    let request: data::DataRequest = read_message(&mut stream).await.unwrap();
                    let save = match wire::operation_from_pb(request).unwrap() {
                        wire::Operation::Save(..) => {
                            Some(crate::SaveOffer::Refused(crate::SaveRefusal::Full))
                        }
                        _ => None,
                    };
                    let pong = data::Pong { version: wire::PROTOCOL_VERSION };
                    let answer = match save {
                        Some(offer) => encode(&wire::offer_to_pb(&offer)).unwrap(),
                        None => encode(&pong).unwrap(),
                    };
                    stream.write(answer).await.unwrap();
                    stream.flush().await.unwrap();
                    // The first connection is the keepalive connection.
                    if number > 0 {
                        if !told {
                            let _ = stream.wait_for_data().await;
                        }
                        return stream.close();
                    }
                }
            }));
        }
    });
    address
}

#[tokio::test]
async fn a_connection_closed_by_the_node_is_replaced_silently() {
    for told in [true, false] {
        let authority = TestAuthority::new();
        let address = closing_node(&authority, told).await;
        let path = path_to(address, &authority, TcpConfig::default()).await;
        for round in 0..3 {
            path.ping().await.unwrap_or_else(|error| panic!("ping {round}, told {told}: {error}"));
            path.release(kv_core::id::LeaseId(1)).await.unwrap();
            let saved = suite::save(&path, save_request(&hashes(1)), 100).await.unwrap();
            assert_eq!(saved, SaveAnswer::Refused(crate::SaveRefusal::Full));
        }
        assert!(path.failure().is_none());
    }
}

#[tokio::test]
async fn connections_beyond_the_servers_limit_are_refused() {
    let authority = TestAuthority::new();
    let config = TcpConfig { connections_max: 2, ..TcpConfig::default() };
    let server = TcpServer::bind_with(ANY, &authority.member(), &config, holding(1)).unwrap();
    let path = path_to(server.local_addr(), &authority, config.clone()).await;
    path.ping().await.unwrap();
    let dialer = TcpDialer::new(&authority.member(), config);
    let error = dialer.dial(server.local_addr().to_string()).await.err().unwrap();
    assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
    // Existing connections are served.
    let answer = suite::fetch(&path, fetch_request(&hashes(1))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(1) });
    drop(path);
    let freed = async {
        while dialer.dial(server.local_addr().to_string()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, freed).await.expect("the connections of a dropped path are not closed");
}

#[tokio::test]
async fn too_many_bytes_in_flight_are_busy() {
    let service = holding(2);
    let config = TcpConfig { fetch_bytes_in_flight_max: 1, ..TcpConfig::default() };
    let (_server, path) = serve(&config, service.clone()).await;
    service.set_gate(1);
    let seen = watch::Sender::new(0);
    let mut watch = seen.subscribe();
    let first = async {
        let mut sink = |_| seen.send_modify(|seen| *seen += 1);
        path.fetch(fetch_request(&hashes(2)), &mut sink).await.unwrap()
    };
    let second = async {
        watch.wait_for(|seen| *seen == 1).await.unwrap();
        let busy = suite::fetch(&path, fetch_request(&hashes(2))).await.unwrap();
        service.set_gate(10);
        busy
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!(first, FetchAnswer::Hit { tiers: in_dram(2) }, "a lone operation was refused");
    assert!(matches!(second, FetchAnswer::Busy { .. }));
    let again = suite::fetch(&path, fetch_request(&hashes(2))).await.unwrap();
    assert_eq!(again, FetchAnswer::Hit { tiers: in_dram(2) }, "the reservation was not returned");
}

#[tokio::test]
async fn an_unknown_congestion_control_falls_back_to_the_default() {
    for name in [None, Some("no such rule".to_owned())] {
        let config = TcpConfig { congestion_control: name, ..TcpConfig::default() };
        let (_server, path) = serve(&config, holding(1)).await;
        let answer = suite::fetch(&path, fetch_request(&hashes(1))).await.unwrap();
        assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(1) });
    }
}

#[tokio::test]
async fn a_connection_with_used_up_keys_is_retired() {
    let (_server, path) = serve(&TcpConfig::default(), holding(1)).await;
    path.ping().await.unwrap();
    path.pool.wear_out();
    assert!(path.pool.take_idle().is_none());
    path.ping().await.unwrap();
    assert!(path.pool.take_idle().is_some());
}

/// A node of a release without layer-wise saves.
async fn older_node(authority: &TestAuthority, service: Arc<MemoryService>) -> SocketAddr {
    let tls = Arc::new(authority.member().tcp_server());
    let listener = tokio::net::TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (tls, service) = (tls.clone(), service.clone());
            tokio::spawn(async move {
                let ends = StreamShared {
                    buffers: Arc::default(),
                    received: Arc::default(),
                    min_size: BufferSize::Small,
                };
                let (mut stream, _) = handshake::accept(socket, &tls, ends).await.unwrap();
                let limits = ServeLimits { stall_timeout: PATIENCE, times: TIMES };
                let operations = Operations::new(Capacity::new(1 << 20, 1 << 20, 4096), limits);
                while stream.wait_for_data().await == Ok(true) {
                    let mut request = operations.request(&mut stream).await.unwrap();
                    if let Some(data::data_request::Op::Save(save)) = &mut request.op {
                        save.slice_bytes.clear();
                    }
                    if operations.serve_request(request, &*service, &mut stream).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn an_older_node_gets_frames_and_rare_layer_offers() {
    let (authority, service) = (TestAuthority::new(), holding(0));
    let address = older_node(&authority, service.clone()).await;
    let path = path_to(address, &authority, TcpConfig::default()).await;
    assert!(path.streams_saves());
    let frame_bytes = frame(hash(0), 1000).bytes.len() as u64;
    let request = SaveRequest { frame_bytes, ..save_request(&[hash(0)]) };
    let mut layers = ComputedBlocks::new(&[hash(0)], &[500, 500]);
    assert_eq!(path.save_layers(request.clone(), &mut layers).await.unwrap(), LayeredSaveOutcome::Abandoned);
    assert!(!path.streams_saves(), "layers are offered again too early");
    let saved = suite::done(path.save(request, &|_| layers.frame(0)).await.unwrap());
    assert_eq!((saved.stored_blocks, service.holds(hash(0))), (1, true));
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(1))
        .await
        .expect("the offered layer-wise save was not aborted");
    tokio::time::pause();
    tokio::time::advance(crate::layered::LAYERS_RETRY_AFTER).await;
    assert!(path.streams_saves(), "layers are never offered again");
}

#[tokio::test]
async fn a_slow_computation_does_not_fail_the_path() {
    let service = holding(0);
    let config = TcpConfig { stall_timeout: Duration::from_secs(2), ..TcpConfig::default() };
    let authority = TestAuthority::new();
    let server = TcpServer::bind_with(ANY, &authority.member(), &config, service.clone()).unwrap();
    let path = path_to(server.local_addr(), &authority, config).await;
    let frame_bytes = frame(hash(0), 1000).bytes.len() as u64;
    let request = SaveRequest { frame_bytes, ..save_request(&[hash(0)]) };
    let mut layers = ComputedBlocks::new(&[hash(0)], &[500, 500]).with_layers(1);
    let saving = tokio::time::timeout(PATIENCE, path.save_layers(request.clone(), &mut layers));
    let saved = saving.await.expect("the save waits for a stalled computation").unwrap();
    assert_eq!(saved, LayeredSaveOutcome::Abandoned);
    assert!(path.failure().is_none() && path.streams_saves());
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(1))
        .await
        .expect("the node does not learn of the abandoned save");
    // A path with another stall timeout.
    let other = path_to(server.local_addr(), &authority, TcpConfig::default()).await;
    let saved = suite::done(other.save(request, &|_| layers.frame(0)).await.unwrap());
    assert_eq!((saved.stored_blocks, service.holds(hash(0))), (1, true));
}
