//! TLS of the listener, with certificates that change while it serves, and TLS towards engines.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Empty;
use hyper::Request;
use hyper_util::rt::TokioIo;
use kvfleet_errors_doc::says;
use kvfleet_net::tls::ServerCertificate;
use kvfleet_testkit::cluster::{HANG, until};
use kvfleet_testkit::write_secret;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::engine::{ScriptedEngine, json_answer};
use super::fixture::{CHAT, ClientAnswer, GatewayFixture, golden, read_answer};

/// Name of the server in its certificates.
const NAME: &str = "api.example.org";

/// A CA, and the files of a server.
struct TlsFixture {
    folder: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl TlsFixture {
    fn new() -> TlsFixture {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let fixture = TlsFixture { folder: tempfile::tempdir().unwrap(), authority };
        fixture.issue();
        fixture
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a new certificate and key.
    fn issue(&self) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![NAME.to_owned(), "127.0.0.1".to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.authority).unwrap();
        std::fs::write(self.file("ca.crt"), self.authority.pem()).unwrap();
        std::fs::write(self.file("tls.crt"), cert.pem()).unwrap();
        std::fs::write(self.file("tls.key"), key.serialize_pem()).unwrap();
    }

    async fn connect(&self, house: &GatewayFixture) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.der().clone()).unwrap();
        let config = ClientConfig::builder_with_provider(kvfleet_net::tls::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(house.address).await.unwrap();
        let connecting = TlsConnector::from(Arc::new(config)).connect(NAME.try_into().unwrap(), stream);
        tokio::time::timeout(HANG, connecting).await.expect("a handshake in time").unwrap()
    }

    /// The certificate that a new connection shows.
    async fn shown(&self, house: &GatewayFixture) -> Vec<u8> {
        let stream = self.connect(house).await;
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    }
}

/// Puts TLS in front of an engine.
async fn serve_tls(fixture: &TlsFixture, engine: SocketAddr) -> SocketAddr {
    let certificate = ServerCertificate::load(&fixture.file("tls.crt"), &fixture.file("tls.key")).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(certificate.http_server()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut caller) = acceptor.accept(stream).await else { return };
                let mut engine = TcpStream::connect(engine).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut caller, &mut engine).await; // ends with either
            });
        }
    });
    address
}

async fn models(stream: TlsStream<TcpStream>) -> ClientAnswer {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(async move { drop(connection.await) });
    let request = Request::get("/v1/models").header("host", NAME).body(Empty::<Bytes>::new()).unwrap();
    let answer = read_answer(sender.send_request(request).await.unwrap()).await;
    connection.abort();
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_https_and_shows_renewed_certificates() {
    let engine = ScriptedEngine::start(vec![]).await;
    let fixture = TlsFixture::new();
    let house = GatewayFixture::open(&[&engine], |config| {
        config.openai.tls.cert = fixture.file("tls.crt");
        config.openai.tls.key = fixture.file("tls.key");
        config.openai.reload_ms = 20;
    })
    .await;
    let before = fixture.shown(&house).await;
    let open = fixture.connect(&house).await;
    let answer = models(fixture.connect(&house).await).await;
    assert_eq!((answer.status, answer.is_whole), (200, true));

    let mut plain = TcpStream::connect(house.address).await.unwrap();
    plain.write_all(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut received = Vec::new();
    let _ = plain.read_to_end(&mut received).await; // an alert or a reset
    assert!(!received.starts_with(b"HTTP"), "no plain HTTP on a port with TLS");

    fixture.issue();
    until("the new certificate", || async { (fixture.shown(&house).await != before).then_some(()) }).await;
    assert_eq!(models(open).await.status, 200, "open connections go on");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_engines_with_tls_and_their_key() {
    let fixture = TlsFixture::new();
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let address = serve_tls(&fixture, engine.address).await;
    write_secret(&fixture.file("key"), "of-engines\n");
    for trusts_authority in [true, false] {
        let house = GatewayFixture::open_at(&[address], |config| {
            config.endpoints[0].url = format!("https://{address}");
            config.upstream.api_key_file = fixture.file("key");
            if trusts_authority {
                config.upstream.ca = fixture.file("ca.crt");
            }
        })
        .await;
        let body = golden(1).body;
        let answer = house.request(CHAT, &[("authorization", "Bearer of-a-caller")], &body).await;
        let calls = engine.received();
        if trusts_authority {
            assert_eq!(answer.status, 200, "{answer:?}");
            assert_eq!(calls.len(), 1);
            assert_eq!(calls[0].header("authorization").as_deref(), Some("Bearer of-engines"));
            until("a health check", || async { (engine.health_checks() > 0).then_some(()) }).await;
        } else {
            assert_eq!(answer.status, 502);
            says("an engine with a certificate of an unknown CA", &answer.error().0, &[]);
            assert_eq!(calls.len(), 1, "no request before the certificate is checked");
        }
        house.close().await;
    }
}
