//! Control calls over our own TLS: no session outlives a certificate, and existing servers and
//! channels present renewed ones. The tests set the clock.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use kv_core::id::NodeId;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::HandshakeKind;
use rustls::time_provider::TimeProvider;
use rustls_pki_types::{CertificateDer, UnixTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use tonic::{Request, Response, Status};

use super::*;
use crate::channel::{connect_lazily, endpoint};
use crate::tls::{Role, server_name};
use kvfleet_proto::pb;
use kvfleet_proto::pb::instance_client::InstanceClient;
use kvfleet_proto::pb::instance_server::{Instance, InstanceServer};

/// Half an hour before and after the end of January 2030, in seconds since 1970. Close enough for a
/// session to be resumed.
const JANUARY: u64 = 1_896_134_400 - 1_800;
const FEBRUARY: u64 = JANUARY + 3_600;

#[derive(Debug)]
struct ListenClock(AtomicU64);

impl TimeProvider for ListenClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0.load(Ordering::Relaxed))))
    }
}

/// An authority, and the common clock.
struct ListenFixture {
    authority: CertifiedIssuer<'static, KeyPair>,
    clock: Arc<ListenClock>,
}

impl ListenFixture {
    fn new() -> ListenFixture {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        ListenFixture { authority, clock: Arc::new(ListenClock(AtomicU64::new(JANUARY))) }
    }

    /// A certificate valid from January until the first of this month, and its key.
    fn issue(&self, until_month: u8) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Role::Node(Some(NodeId(1))).dns_names()).unwrap();
        params.not_before = date_time_ymd(2030, 1, 1);
        params.not_after = date_time_ymd(2030, until_month, 1);
        (params.signed_by(&key, &self.authority).unwrap().pem(), key.serialize_pem())
    }

    fn member(&self, until_month: u8) -> Identity {
        let (cert, key) = self.issue(until_month);
        let clock = Arc::clone(&self.clock) as Arc<dyn TimeProvider>;
        Identity::from_pem_at(self.authority.pem().as_bytes(), cert.as_bytes(), key.as_bytes(), clock)
            .unwrap()
    }

    fn renew(&self, identity: &Identity) {
        let (cert, key) = self.issue(12);
        assert!(identity.renew(cert.as_bytes(), key.as_bytes()).unwrap());
    }
}

fn own_certificate(identity: &Identity) -> CertificateDer<'static> {
    identity.certificate.certified().cert[0].clone()
}

/// A service that records its callers' certificates.
#[derive(Clone, Default)]
struct CallerLog(Arc<Mutex<Vec<CertificateDer<'static>>>>);

#[tonic::async_trait]
impl Instance for CallerLog {
    async fn run(&self, _: Request<pb::RunRequest>) -> Result<Response<pb::RunReply>, Status> {
        Err(Status::unimplemented("this service serves instance_status only"))
    }

    async fn instance_status(
        &self,
        request: Request<pb::InstanceStatusRequest>,
    ) -> Result<Response<pb::InstanceStatusReply>, Status> {
        let leaf = request.peer_certs().and_then(|chain| chain.first().cloned());
        self.0.lock().unwrap().push(leaf.ok_or_else(|| Status::internal("a caller without a certificate"))?);
        Ok(Response::new(pb::InstanceStatusReply::default()))
    }
}

/// Connections of one caller in these tests.
const CONNECTIONS_MAX: usize = 8;

async fn serve(identity: &Identity) -> (SocketAddr, CallerLog) {
    serve_within(identity, HandshakeLimits::default()).await
}

async fn serve_within(identity: &Identity, bounds: HandshakeLimits) -> (SocketAddr, CallerLog) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, callers) = (listener.local_addr().unwrap(), CallerLog::default());
    let served = tonic::transport::Server::builder().add_service(InstanceServer::new(callers.clone()));
    let connections = CallerLimits { per_caller: CONNECTIONS_MAX, total: CONNECTIONS_MAX + 1 };
    let incoming = incoming_with_limits(listener, identity, bounds, connections);
    tokio::spawn(served.serve_with_incoming(incoming));
    (address, callers)
}

fn client(address: SocketAddr, identity: &Identity) -> InstanceClient<tonic::transport::Channel> {
    let endpoint = endpoint(&address.to_string()).unwrap().connect_timeout(Duration::from_secs(5));
    InstanceClient::new(connect_lazily(&endpoint, identity, Role::Node(None)))
}

async fn asks(mut client: InstanceClient<tonic::transport::Channel>) -> Result<(), Status> {
    client.instance_status(pb::InstanceStatusRequest {}).await.map(drop)
}

/// Kind of the handshake, and the server's certificate. Returns after the server's first byte: it
/// has accepted the client's certificate by then.
async fn connects(
    address: SocketAddr,
    config: &Arc<rustls::ClientConfig>,
) -> io::Result<(HandshakeKind, CertificateDer<'static>)> {
    connects_by(TcpStream::connect(address).await?, config).await
}

async fn connects_by(
    socket: TcpStream,
    config: &Arc<rustls::ClientConfig>,
) -> io::Result<(HandshakeKind, CertificateDer<'static>)> {
    let mut stream = TlsConnector::from(Arc::clone(config)).connect(server_name(), socket).await?;
    // An HTTP/2 server sends settings first; session tickets would come before them.
    stream.read_exact(&mut [0]).await?;
    let session = stream.get_ref().1;
    Ok((session.handshake_kind().unwrap(), session.peer_certificates().unwrap()[0].clone()))
}

#[tokio::test]
async fn no_session_resumes_with_an_expired_certificate() {
    let world = ListenFixture::new();
    let (address, _) = serve(&world.member(12)).await;
    let mut config = world.member(2).grpc_client(Role::Node(None));
    // A caller may enable resumption.
    config.resumption = rustls::client::Resumption::in_memory_sessions(8);
    let config = Arc::new(config);
    for _ in 0..2 {
        assert_eq!(connects(address, &config).await.unwrap().0, HandshakeKind::Full);
    }
    world.clock.0.store(FEBRUARY, Ordering::Relaxed);
    let refused = connects(address, &config).await.unwrap_err();
    assert!(refused.to_string().contains("CertificateExpired"), "{refused}");
}

#[tokio::test]
async fn existing_servers_and_channels_present_a_renewed_certificate() {
    let world = ListenFixture::new();
    let (server, caller) = (world.member(2), world.member(2));
    let (address, callers) = serve(&server).await;
    let raw = Arc::new(world.member(12).grpc_client(Role::Node(None)));
    // Made now, and connected on first use.
    let [before, after, never] =
        [caller.clone(), caller.clone(), world.member(2)].map(|by| client(address, &by));
    asks(before.clone()).await.unwrap();
    assert_eq!(*callers.0.lock().unwrap(), [own_certificate(&caller)]);
    let old = own_certificate(&caller);

    world.renew(&server);
    world.renew(&caller);
    assert_eq!(connects(address, &raw).await.unwrap().1, own_certificate(&server));
    asks(after).await.unwrap();
    asks(before.clone()).await.unwrap();
    assert_eq!(
        callers.0.lock().unwrap()[1..],
        [own_certificate(&caller), old.clone()],
        "an existing connection keeps its certificate"
    );

    world.clock.0.store(FEBRUARY, Ordering::Relaxed);
    asks(never).await.unwrap_err();
    let presented = || callers.0.lock().unwrap().last().unwrap().clone();
    // The old connection ends within a second of the old certificate's end.
    let ended = async {
        while asks(before.clone()).await.is_err() || presented() == old {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, ended).await.expect("a connection outlives its certificate");
    assert_eq!(presented(), own_certificate(&caller));
}

/// Far above the duration of any step here, and below a test's limit.
const SOON: Duration = Duration::from_secs(20);

/// Opens connections that send no data.
async fn silent_connections(address: SocketAddr, connections: usize) -> Vec<TcpStream> {
    let mut silent = Vec::new();
    for _ in 0..connections {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    silent
}

/// Waits until the server has closed this connection, which never sent data.
async fn wait_until_closed(connection: &mut TcpStream) {
    let read = timeout(SOON, connection.read(&mut [0])).await.expect("the server keeps the connection");
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
}

fn is_kept(connection: &TcpStream) -> bool {
    connection.try_read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

#[tokio::test]
async fn silent_connections_are_evicted_oldest_first() {
    let world = ListenFixture::new();
    let identity = world.member(12);
    let handshake_max = Duration::from_secs(3_600);
    let bounds = HandshakeLimits { handshakes_max: 4, handshake_max, ..HandshakeLimits::default() };
    let (address, callers) = serve_within(&identity, bounds).await;
    let mut strangers = silent_connections(address, 4).await;
    for calls in 1..=3 {
        timeout(SOON, asks(client(address, &identity)))
            .await
            .expect("silent connections block a caller")
            .unwrap();
        assert_eq!(callers.0.lock().unwrap().len(), calls);
        // The caller's slot is free again. Each stranger after it takes that slot, and the next
        // caller evicts the oldest stranger.
        wait_until_closed(&mut strangers[0]).await;
        strangers.remove(0);
        strangers.extend(silent_connections(address, 1).await);
    }
    // A connection to a full server evicts the oldest; the others stay.
    strangers.extend(silent_connections(address, 1).await);
    wait_until_closed(&mut strangers[0]).await;
    assert_eq!(strangers.iter().map(is_kept).collect::<Vec<_>>(), [false, true, true, true, true]);
}

#[tokio::test]
async fn unfinished_handshakes_time_out() {
    let world = ListenFixture::new();
    let bounds = HandshakeLimits { handshake_max: Duration::from_millis(100), ..HandshakeLimits::default() };
    let (address, _) = serve_within(&world.member(12), bounds).await;
    let before = std::time::Instant::now();
    let mut strangers = silent_connections(address, 2).await;
    // One byte is not a handshake.
    strangers[1].write_all(&[22]).await.unwrap();
    for stranger in &mut strangers {
        wait_until_closed(stranger).await;
    }
    assert!(before.elapsed() >= bounds.handshake_max, "closed too early");
}

/// As when every client reconnects to a restarted server.
#[tokio::test]
async fn handshakes_with_data_are_protected_from_newer_ones() {
    let world = ListenFixture::new();
    let identity = world.member(12);
    let hour = Duration::from_secs(3_600);
    let bounds = HandshakeLimits { handshakes_max: 4, handshake_max: 2 * hour, grace_period: hour };
    let (address, _) = serve_within(&identity, bounds).await;
    let mut talking = silent_connections(address, 4).await;
    for caller in &mut talking {
        // The header of a record that never arrives.
        caller.write_all(&[22, 3, 1, 2, 0]).await.unwrap();
    }
    let (raw, late) =
        (Arc::new(identity.grpc_client(Role::Node(None))), TcpStream::connect(address).await.unwrap());
    let calling = tokio::spawn(async move { connects_by(late, &raw).await });
    // Whatever the server does with the last connection has happened once the previous one is seen
    // to be kept.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(talking.iter().all(is_kept) && !calling.is_finished());
    drop(talking.pop());
    timeout(SOON, calling).await.expect("the caller does not get the free slot").unwrap().unwrap();
    assert!(talking.iter().all(is_kept));
}

#[tokio::test]
async fn stalled_handshakes_become_evictable() {
    let world = ListenFixture::new();
    let identity = world.member(12);
    let bounds = HandshakeLimits {
        handshakes_max: 2,
        handshake_max: Duration::from_secs(3_600),
        grace_period: Duration::from_millis(50),
    };
    let (address, callers) = serve_within(&identity, bounds).await;
    let mut talking = silent_connections(address, 2).await;
    for caller in &mut talking {
        caller.write_all(&[22, 3, 1, 2, 0]).await.unwrap();
    }
    timeout(SOON, asks(client(address, &identity)))
        .await
        .expect("stalled handshakes block a caller")
        .unwrap();
    assert_eq!(callers.0.lock().unwrap().len(), 1);
}

/// The child process of [`silent_connections_leave_descriptors_for_callers`], which starts this
/// program again.
#[tokio::test]
async fn process_with_few_descriptors() {
    use std::io::{BufRead, Write};
    if std::env::var_os("KVFLEET_FEW_DESCRIPTORS").is_none() {
        return;
    }
    let world = ListenFixture::new();
    let identity = world.member(12);
    // More than the descriptors: they are the reason for evictions here.
    let bounds = HandshakeLimits {
        handshakes_max: 1024,
        handshake_max: Duration::from_secs(3_600),
        ..HandshakeLimits::default()
    };
    let (address, _) = serve_within(&identity, bounds).await;
    let raw = Arc::new(identity.grpc_client(Role::Node(None)));
    // The caller opens its descriptor before the limit is lowered.
    let caller = tokio::net::TcpSocket::new_v4().unwrap();
    let limit = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    println!("serves {address}");
    io::stdout().flush().unwrap();
    let told = tokio::task::spawn_blocking(|| io::stdin().lock().read_line(&mut String::new()));
    told.await.unwrap().unwrap();
    let calling = async { connects_by(caller.connect(address).await.unwrap(), &raw).await };
    timeout(SOON, calling).await.expect("silent connections block a caller").unwrap();
    println!("called");
}

#[tokio::test]
async fn silent_connections_leave_descriptors_for_callers() {
    use tokio::io::AsyncBufReadExt;
    let name = "tls::listen::tests::process_with_few_descriptors";
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("KVFLEET_FEW_DESCRIPTORS", "1")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut said = tokio::io::BufReader::new(child.stdout.take().unwrap()).lines();
    let address = loop {
        let line =
            timeout(SOON, said.next_line()).await.unwrap().unwrap().expect("the child process did not serve");
        if let Some((_, address)) = line.split_once("serves ") {
            break address.parse().unwrap();
        }
    };
    let _strangers = silent_connections(address, 100).await;
    child.stdin.take().unwrap().write_all(b"go\n").await.unwrap();
    let mut rest = String::new();
    while let Some(line) = timeout(2 * SOON, said.next_line()).await.unwrap().unwrap() {
        rest += &(line + "\n");
    }
    assert!(child.wait().await.unwrap().success() && rest.contains("called"), "{rest}");
}

#[tokio::test]
async fn a_caller_with_too_many_connections_gets_no_more() {
    let world = ListenFixture::new();
    let identity = world.member(12);
    let (address, callers) = serve(&identity).await;
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        open.push(client(address, &identity));
        asks(open.last().unwrap().clone()).await.unwrap();
    }
    asks(client(address, &identity)).await.unwrap_err();
    for connection in &open {
        asks(connection.clone()).await.unwrap();
    }
    assert_eq!(callers.0.lock().unwrap().len(), 2 * CONNECTIONS_MAX);
    // The place of a closed connection is free.
    drop(open.pop());
    let again = async {
        while asks(client(address, &identity)).await.is_err() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, again).await.expect("a closed connection keeps its place");
}

#[tokio::test]
async fn a_server_of_another_role_gets_no_call() {
    let world = ListenFixture::new();
    let identity = world.member(12);
    let (address, callers) = serve(&identity).await;
    let endpoint = endpoint(&address.to_string()).unwrap().connect_timeout(Duration::from_secs(5));
    let to = |server| InstanceClient::new(connect_lazily(&endpoint, &identity, server));
    asks(to(Role::Node(Some(NodeId(1))))).await.unwrap();
    asks(to(Role::Node(None))).await.unwrap();
    for wrong in [Role::Node(Some(NodeId(2))), Role::Router(None)] {
        let refused = asks(to(wrong)).await.unwrap_err();
        let mut causes = std::error::Error::source(&refused);
        let mut text = String::new();
        while let Some(cause) = causes {
            text = cause.to_string();
            causes = cause.source();
        }
        assert!(text.contains("the server's certificate is one of node-1"), "{text}");
    }
    assert_eq!(callers.0.lock().unwrap().len(), 2, "only the right server is called");
}
