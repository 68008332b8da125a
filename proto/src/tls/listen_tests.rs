//! Control calls over connections of our own: no session outlives a certificate, and what is renewed is shown by servers and
//! channels that are there. By a clock that the tests hold.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::HandshakeKind;
use rustls::time_provider::TimeProvider;
use rustls_pki_types::{CertificateDer, UnixTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use tonic::{Request, Response, Status};

use super::*;
use crate::channel::{connect_lazily, endpoint};
use crate::pb;
use crate::pb::instance_client::InstanceClient;
use crate::pb::instance_server::{Instance, InstanceServer};
use crate::tls::server_name;

/// Half an hour before and after the end of January 2030, in seconds since 1970: a session of before could be resumed after.
const JANUARY: u64 = 1_896_134_400 - 1_800;
const FEBRUARY: u64 = JANUARY + 3_600;

#[derive(Debug)]
struct Clock(AtomicU64);

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0.load(Ordering::Relaxed))))
    }
}

/// An authority, and the clock of everybody.
struct World {
    authority: CertifiedIssuer<'static, KeyPair>,
    clock: Arc<Clock>,
}

impl World {
    fn new() -> World {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        World { authority, clock: Arc::new(Clock(AtomicU64::new(JANUARY))) }
    }

    /// A certificate that is good from January until the first of this month, and its key.
    fn issue(&self, until_month: u8) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["kvfleet".to_owned()]).unwrap();
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

fn shown(identity: &Identity) -> CertificateDer<'static> {
    identity.shown.certified().cert[0].clone()
}

/// A service that notes who called.
#[derive(Clone, Default)]
struct Callers(Arc<Mutex<Vec<CertificateDer<'static>>>>);

#[tonic::async_trait]
impl Instance for Callers {
    async fn run(&self, _: Request<pb::RunRequest>) -> Result<Response<pb::RunReply>, Status> {
        Err(Status::unimplemented("only status is asked for here"))
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

async fn serve(identity: &Identity) -> (SocketAddr, Callers) {
    serve_within(identity, Bounds::default()).await
}

async fn serve_within(identity: &Identity, bounds: Bounds) -> (SocketAddr, Callers) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, callers) = (listener.local_addr().unwrap(), Callers::default());
    let served = tonic::transport::Server::builder().add_service(InstanceServer::new(callers.clone()));
    tokio::spawn(served.serve_with_incoming(incoming_within(listener, identity, bounds)));
    (address, callers)
}

fn client(address: SocketAddr, identity: &Identity) -> InstanceClient<tonic::transport::Channel> {
    let endpoint = endpoint(&address.to_string()).unwrap().connect_timeout(Duration::from_secs(5));
    InstanceClient::new(connect_lazily(&endpoint, identity))
}

async fn asks(mut client: InstanceClient<tonic::transport::Channel>) -> Result<(), Status> {
    client.instance_status(pb::InstanceStatusRequest {}).await.map(drop)
}

/// How the handshake went and what the server showed, once it has spoken: by then it has taken the client's certificate.
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
    // Settings, which a server of HTTP/2 sends first; tickets would stand before them.
    stream.read_exact(&mut [0]).await?;
    let session = stream.get_ref().1;
    Ok((session.handshake_kind().unwrap(), session.peer_certificates().unwrap()[0].clone()))
}

#[tokio::test]
async fn no_session_goes_on_with_a_certificate_that_ran_out() {
    let world = World::new();
    let (address, _) = serve(&world.member(12)).await;
    let mut config = world.member(2).grpc_client();
    // As a caller may who would have it so.
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
async fn a_renewed_certificate_is_shown_by_servers_and_channels_that_were_made_before() {
    let world = World::new();
    let (server, caller) = (world.member(2), world.member(2));
    let (address, callers) = serve(&server).await;
    let raw = Arc::new(world.member(12).grpc_client());
    // Made now, and connected when first used.
    let [before, after, never] =
        [caller.clone(), caller.clone(), world.member(2)].map(|by| client(address, &by));
    asks(before.clone()).await.unwrap();
    assert_eq!(*callers.0.lock().unwrap(), [shown(&caller)]);
    let old = shown(&caller);

    world.renew(&server);
    world.renew(&caller);
    world.clock.0.store(FEBRUARY, Ordering::Relaxed);
    assert_eq!(connects(address, &raw).await.unwrap().1, shown(&server));
    asks(after).await.unwrap();
    asks(before).await.unwrap();
    assert_eq!(callers.0.lock().unwrap()[1..], [shown(&caller), old], "what is there goes on");
    asks(never).await.unwrap_err();
    assert_eq!(callers.0.lock().unwrap().len(), 3);
}

/// Far above what anything here takes, and below what a test may.
const SOON: Duration = Duration::from_secs(20);

/// So many connections that say nothing.
async fn silent(address: SocketAddr, connections: usize) -> Vec<TcpStream> {
    let mut silent = Vec::new();
    for _ in 0..connections {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    silent
}

/// Waits until the server has ended this connection, to which it never said anything.
async fn is_ended(connection: &mut TcpStream) {
    let read = timeout(SOON, connection.read(&mut [0])).await.expect("the server keeps the connection");
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
}

fn is_kept(connection: &TcpStream) -> bool {
    connection.try_read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

#[tokio::test]
async fn strangers_who_say_nothing_make_way_oldest_first_and_stop_nobody() {
    let world = World::new();
    let identity = world.member(12);
    let handshake_max = Duration::from_secs(3_600);
    let bounds = Bounds { handshakes_max: 4, handshake_max, ..Bounds::default() };
    let (address, callers) = serve_within(&identity, bounds).await;
    let mut strangers = silent(address, 4).await;
    for calls in 1..=3 {
        timeout(SOON, asks(client(address, &identity))).await.expect("strangers stop a caller").unwrap();
        assert_eq!(callers.0.lock().unwrap().len(), calls);
        // The caller's place is free again, so each stranger that comes after it takes that, and the next caller the oldest's.
        is_ended(&mut strangers[0]).await;
        strangers.remove(0);
        strangers.extend(silent(address, 1).await);
    }
    // One that comes to a full server ends the oldest, and the others stay.
    strangers.extend(silent(address, 1).await);
    is_ended(&mut strangers[0]).await;
    assert_eq!(strangers.iter().map(is_kept).collect::<Vec<_>>(), [false, true, true, true, true]);
}

#[tokio::test]
async fn who_says_nothing_goes_when_the_time_of_a_handshake_is_over() {
    let world = World::new();
    let bounds = Bounds { handshake_max: Duration::from_millis(100), ..Bounds::default() };
    let (address, _) = serve_within(&world.member(12), bounds).await;
    let before = std::time::Instant::now();
    let mut strangers = silent(address, 2).await;
    // A word is no handshake.
    strangers[1].write_all(&[22]).await.unwrap();
    for stranger in &mut strangers {
        is_ended(stranger).await;
    }
    assert!(before.elapsed() >= bounds.handshake_max, "not before");
}

/// As where everybody comes back to a server that was away.
#[tokio::test]
async fn who_has_spoken_is_not_ended_for_those_who_come_behind() {
    let world = World::new();
    let identity = world.member(12);
    let hour = Duration::from_secs(3_600);
    let bounds = Bounds { handshakes_max: 4, handshake_max: 2 * hour, undisturbed: hour };
    let (address, _) = serve_within(&identity, bounds).await;
    let mut talking = silent(address, 4).await;
    for caller in &mut talking {
        // The head of a record that never comes.
        caller.write_all(&[22, 3, 1, 2, 0]).await.unwrap();
    }
    let (raw, late) = (Arc::new(identity.grpc_client()), TcpStream::connect(address).await.unwrap());
    let calling = tokio::spawn(async move { connects_by(late, &raw).await });
    // Whatever the server does with the one that came last, it did when the one before was seen to be kept.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(talking.iter().all(is_kept) && !calling.is_finished());
    drop(talking.pop());
    timeout(SOON, calling).await.expect("there is a place now").unwrap().unwrap();
    assert!(talking.iter().all(is_kept));
}

#[tokio::test]
async fn who_has_spoken_and_does_not_go_on_makes_way_after_a_time() {
    let world = World::new();
    let identity = world.member(12);
    let bounds = Bounds {
        handshakes_max: 2,
        handshake_max: Duration::from_secs(3_600),
        undisturbed: Duration::from_millis(50),
    };
    let (address, callers) = serve_within(&identity, bounds).await;
    let mut talking = silent(address, 2).await;
    for caller in &mut talking {
        caller.write_all(&[22, 3, 1, 2, 0]).await.unwrap();
    }
    timeout(SOON, asks(client(address, &identity))).await.expect("they stop a caller").unwrap();
    assert_eq!(callers.0.lock().unwrap().len(), 1);
}

/// The process of [`strangers_do_not_have_the_last_descriptors`], when that test starts this program again.
#[tokio::test]
async fn process_with_few_descriptors() {
    use std::io::{BufRead, Write};
    if std::env::var_os("KVFLEET_FEW_DESCRIPTORS").is_none() {
        return;
    }
    let world = World::new();
    let identity = world.member(12);
    // More than there are descriptors: it is for want of these that strangers have to go.
    let bounds =
        Bounds { handshakes_max: 1024, handshake_max: Duration::from_secs(3_600), ..Bounds::default() };
    let (address, _) = serve_within(&identity, bounds).await;
    let raw = Arc::new(identity.grpc_client());
    // What the caller needs it has.
    let caller = tokio::net::TcpSocket::new_v4().unwrap();
    let limit = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    println!("serves {address}");
    io::stdout().flush().unwrap();
    let told = tokio::task::spawn_blocking(|| io::stdin().lock().read_line(&mut String::new()));
    told.await.unwrap().unwrap();
    let calling = async { connects_by(caller.connect(address).await.unwrap(), &raw).await };
    timeout(SOON, calling).await.expect("strangers stop a caller").unwrap();
    println!("called");
}

#[tokio::test]
async fn strangers_do_not_have_the_last_descriptors() {
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
        let line = timeout(SOON, said.next_line()).await.unwrap().unwrap().expect("it serves");
        if let Some((_, address)) = line.split_once("serves ") {
            break address.parse().unwrap();
        }
    };
    let _strangers = silent(address, 100).await;
    child.stdin.take().unwrap().write_all(b"go\n").await.unwrap();
    let mut rest = String::new();
    while let Some(line) = timeout(2 * SOON, said.next_line()).await.unwrap().unwrap() {
        rest += &(line + "\n");
    }
    assert!(child.wait().await.unwrap().success() && rest.contains("called"), "{rest}");
}
