//! Peers that die, hang or are cut off during an operation. A relay stands between the two ends.

use tokio::net::UdpSocket;
use tokio::task::JoinHandle;

use super::*;

/// Long enough that QUIC's own timeout plays no role.
const LONG: Duration = Duration::from_secs(3600);

/// Forwards datagrams between one client and a server until told to stop.
struct DatagramRelay {
    address: SocketAddr,
    front: Arc<UdpSocket>,
    passing: Vec<JoinHandle<()>>,
}

impl DatagramRelay {
    async fn to(server: SocketAddr) -> DatagramRelay {
        let front = Arc::new(UdpSocket::bind(ANY).await.unwrap());
        let back = Arc::new(UdpSocket::bind(ANY).await.unwrap());
        back.connect(server).await.unwrap();
        let client = tokio::sync::watch::Sender::new(None);
        let mut known = client.subscribe();
        let (inward, outward) = ((front.clone(), back.clone()), (front.clone(), back));
        let to_server = tokio::spawn(async move {
            let mut datagram = vec![0; 1 << 16];
            while let Ok((bytes, from)) = inward.0.recv_from(&mut datagram).await {
                client.send_replace(Some(from));
                let _ = inward.1.send(&datagram[..bytes]).await;
            }
        });
        let to_client = tokio::spawn(async move {
            let mut datagram = vec![0; 1 << 16];
            while let Ok(bytes) = outward.1.recv(&mut datagram).await {
                let to = known.wait_for(Option::is_some).await.unwrap().unwrap();
                let _ = outward.0.send_to(&datagram[..bytes], to).await;
            }
        });
        DatagramRelay { address: front.local_addr().unwrap(), front, passing: vec![to_server, to_client] }
    }

    /// Stops forwarding; the port stays open, as that of a hung process.
    async fn stop_forwarding(&mut self) {
        for passing in self.passing.drain(..) {
            passing.abort();
            let _ = passing.await;
        }
    }

    /// Closes the port abruptly, as the end of a killed process does.
    async fn close_port(mut self) {
        self.stop_forwarding().await;
        drop(self.front);
    }
}

/// Fetches three blocks through a relay, and calls `then` after two of them.
async fn fail_during_fetch<F: Future<Output = ()>>(
    config: QuicConfig,
    then: impl FnOnce(DatagramRelay) -> F,
) -> (FetchAnswer, PathError) {
    let authority = TestAuthority::new();
    let service = holding(3);
    let server_config = QuicConfig { idle_timeout: config.idle_timeout, ..QuicConfig::default() };
    let server = QuicServer::bind_with(ANY, &authority.member(), &server_config, service.clone()).unwrap();
    let relay = DatagramRelay::to(server.local_addr()).await;
    let dialer = QuicDialer::new(&authority.member(), config);
    let path = dialer.dial(relay.address.to_string()).await.unwrap();
    assert!(path.failure().is_none());
    service.set_gate(2);
    let seen = tokio::sync::watch::Sender::new(0);
    let fetching = async {
        let mut sink = |_| seen.send_modify(|seen| *seen += 1);
        path.fetch(fetch_request(&hashes(3)), &mut sink).await.unwrap()
    };
    let cutting = async {
        seen.subscribe().wait_for(|seen| *seen == 2).await.unwrap();
        then(relay).await;
    };
    let (answer, ()) = tokio::join!(fetching, cutting);
    (answer, path.failure().unwrap())
}

#[tokio::test]
async fn a_dead_process_is_noticed_by_its_closed_port() {
    let config = QuicConfig { silence_max: LONG, idle_timeout: LONG, ..QuicConfig::default() };
    let (answer, failure) = fail_during_fetch(config, DatagramRelay::close_port).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost });
    assert!(matches!(failure, PathError::Unreachable { .. }), "{failure}");
}

#[tokio::test]
async fn a_silent_peer_is_lost_before_quic_gives_up() {
    let config = QuicConfig { idle_timeout: LONG, ..QuicConfig::default() };
    let mut kept = None;
    let (answer, failure) = fail_during_fetch(config, |mut relay| async {
        relay.stop_forwarding().await;
        kept = Some(relay);
    })
    .await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost });
    assert!(matches!(failure, PathError::Unreachable { .. }), "{failure}");
    drop(kept);
}

#[tokio::test]
async fn a_node_with_slow_reads_is_not_lost() {
    let config = QuicConfig::default();
    let longer = 2 * config.silence_max;
    let authority = TestAuthority::new();
    let service = holding(2);
    let server = QuicServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let dialer = QuicDialer::new(&authority.member(), config);
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    service.set_gate(0);
    let opening = async {
        // Real time, because the test is about the arrival of QUIC's keep-alives.
        tokio::time::sleep(longer).await;
        service.set_gate(10);
    };
    let (answer, ()) = tokio::join!(suite::fetch(path.as_ref(), fetch_request(&hashes(2))), opening);
    assert_eq!(answer.unwrap(), FetchAnswer::Hit { tiers: in_dram(2) });
}

#[tokio::test]
async fn dialing_a_closed_port_fails_at_once() {
    let closed = std::net::UdpSocket::bind(ANY).unwrap().local_addr().unwrap();
    let config = QuicConfig { dial_timeout: LONG, idle_timeout: LONG, ..QuicConfig::default() };
    let dialer = QuicDialer::new(&TestAuthority::new().member(), config);
    let error = dialer.dial(closed.to_string()).await.err().unwrap().to_string();
    assert!(error.contains("no process listens on this port"), "{error}");
}
