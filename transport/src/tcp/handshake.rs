//! TLS handshakes: turns a socket into a stream of records.
//!
//! rustls gets one record at a time, so that bytes after the handshake stay here and are decrypted
//! as data. Both ends check the other's certificate; the client learns only from the first answer
//! whether its own was accepted. Not here: timeouts (`server.rs`, `dialer.rs`).

use std::sync::Arc;

use kvfleet_net::tls::{ALPN_TCP, SERVER_NAME};
use rustls::{
    ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection, SupportedCipherSuite,
};
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;

use super::record::{RECORD_BYTES_MAX, ciphers, record_head};
use super::socket::io_stream_error;
use super::stream::{StreamShared, TlsStream};
use super::tls_stream_error;
use crate::stream::StreamError;

/// Bytes read from a refused client before the socket closes. Unread bytes would turn the close
/// into a reset, and the client might not learn the reason.
const DRAIN_BYTES_MAX: usize = 256 << 10;

/// The chain of the certificate that a peer proved to own, leaf first.
pub(super) type PeerChain = Vec<CertificateDer<'static>>;

/// The client's handshake.
pub(super) async fn connect(
    socket: TcpStream,
    config: &Arc<ClientConfig>,
    ends: StreamShared,
) -> Result<(TlsStream, PeerChain), StreamError> {
    let name = ServerName::try_from(SERVER_NAME).expect("the constant is a valid DNS name");
    let client = ClientConnection::new(Arc::clone(config), name).map_err(|error| tls_stream_error(&error))?;
    HandshakeState::new(socket, client.into()).run().await?.into_stream(ends)
}

/// The server's handshake.
pub(super) async fn accept(
    socket: TcpStream,
    config: &Arc<ServerConfig>,
    ends: StreamShared,
) -> Result<(TlsStream, PeerChain), StreamError> {
    let server = ServerConnection::new(Arc::clone(config)).map_err(|error| tls_stream_error(&error))?;
    HandshakeState::new(socket, server.into()).run().await?.into_stream(ends)
}

struct HandshakeState {
    socket: TcpStream,
    tls: Connection,
    /// Received bytes not yet given to rustls.
    unread: Vec<u8>,
}

impl HandshakeState {
    fn new(socket: TcpStream, tls: Connection) -> HandshakeState {
        HandshakeState { socket, tls, unread: Vec::new() }
    }

    async fn run(mut self) -> Result<HandshakeState, StreamError> {
        loop {
            self.send().await?;
            if !self.tls.is_handshaking() {
                return Ok(self);
            }
            let record = self.record().await?;
            if let Err(error) = self.feed(&record) {
                self.send_alert_and_drain().await;
                return Err(tls_stream_error(&error));
            }
        }
    }

    /// Sends rustls's pending output.
    async fn send(&mut self) -> Result<(), StreamError> {
        let mut output = Vec::new();
        while self.tls.wants_write() {
            self.tls.write_tls(&mut output).expect("a vector accepts all bytes");
        }
        write_all(&self.socket, &output).await
    }

    /// The next whole record.
    async fn record(&mut self) -> Result<Vec<u8>, StreamError> {
        loop {
            if let Some((_, bytes)) = record_head(&self.unread)?
                && self.unread.len() >= bytes
            {
                let rest = self.unread.split_off(bytes);
                return Ok(std::mem::replace(&mut self.unread, rest));
            }
            if !self.read().await? {
                return Err(StreamError::Broken(
                    "the peer closed the connection during the handshake".to_owned(),
                ));
            }
        }
    }

    async fn read(&mut self) -> Result<bool, StreamError> {
        self.unread.reserve(RECORD_BYTES_MAX);
        loop {
            self.socket.readable().await.map_err(|error| io_stream_error(&error))?;
            match self.socket.try_read_buf(&mut self.unread) {
                Ok(bytes) => return Ok(bytes > 0),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(io_stream_error(&error)),
            }
        }
    }

    fn feed(&mut self, mut record: &[u8]) -> Result<(), rustls::Error> {
        while !record.is_empty() {
            let taken = self.tls.read_tls(&mut record);
            taken.map_err(|error| rustls::Error::General(error.to_string()))?;
            self.tls.process_new_packets()?;
        }
        Ok(())
    }

    /// Sends the alert and drains the socket, so that the peer can read it.
    async fn send_alert_and_drain(&mut self) {
        let _ = self.send().await; // without it, the peer still sees the connection end
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut self.socket).await;
        let mut heard = 0;
        while heard < DRAIN_BYTES_MAX && matches!(self.read().await, Ok(true)) {
            heard += self.unread.len();
            self.unread.clear();
        }
    }

    fn into_stream(self, ends: StreamShared) -> Result<(TlsStream, PeerChain), StreamError> {
        if self.tls.alpn_protocol() != Some(ALPN_TCP) {
            return Err(StreamError::Protocol("no protocol that this release supports".to_owned()));
        }
        let Some(SupportedCipherSuite::Tls13(suite)) = self.tls.negotiated_cipher_suite() else {
            return Err(StreamError::Protocol("another version of TLS".to_owned()));
        };
        let chain = self.tls.peer_certificates().unwrap_or_default().to_vec();
        let secrets = self.tls.dangerous_extract_secrets().map_err(|error| tls_stream_error(&error))?;
        let (sealer, opener) = ciphers(suite, secrets)?;
        Ok((TlsStream::new(self.socket, sealer, opener, &self.unread, ends), chain))
    }
}

async fn write_all(socket: &TcpStream, mut bytes: &[u8]) -> Result<(), StreamError> {
    while !bytes.is_empty() {
        socket.writable().await.map_err(|error| io_stream_error(&error))?;
        match socket.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(io_stream_error(&error)),
        }
    }
    Ok(())
}
