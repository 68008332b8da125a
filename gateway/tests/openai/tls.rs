//! TLS of the listener, with certificates that change while it serves.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Empty;
use hyper::Request;
use hyper_util::rt::TokioIo;
use kvfleet_testkit::cluster::{HANG, until};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::engine::ScriptedEngine;
use super::fixture::{ClientAnswer, GatewayFixture, read_answer};

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
        let params = CertificateParams::new(vec![NAME.to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.authority).unwrap();
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
