//! TLS handshakes: a socket in, a stream of records out.
//!
//! rustls gets one record at a time, so that what follows the handshake stays here and is opened as data. Both
//! ends end up with the other's certificate checked; whether a client's is taken the client learns only from
//! the first answer. Not here: how long it may take (`server.rs`, `dialer.rs`).

use std::sync::Arc;

use kvfleet_proto::tls::{ALPN_TCP, SERVER_NAME};
use rustls::{
    ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection, SupportedCipherSuite,
};
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;

use super::record::{RECORD_BYTES_MAX, ciphers, head};
use super::socket::io_loss;
use super::stream::{Ends, TlsStream};
use super::tls_loss;
use crate::stream::Loss;

/// Bytes of a refused client that are read before the socket goes: unread ones would turn the goodbye into a reset,
/// and the client might not learn why.
const FAREWELL_BYTES_MAX: usize = 256 << 10;

/// The client's end.
pub(super) async fn connect(
    socket: TcpStream,
    config: &Arc<ClientConfig>,
    ends: Ends,
) -> Result<TlsStream, Loss> {
    let name = ServerName::try_from(SERVER_NAME).expect("the constant is a valid DNS name");
    let client = ClientConnection::new(Arc::clone(config), name).map_err(|error| tls_loss(&error))?;
    Handshake::new(socket, client.into()).run().await?.into_stream(ends)
}

/// The server's end, and the certificate that the client proved to be its own.
pub(super) async fn accept(
    socket: TcpStream,
    config: &Arc<ServerConfig>,
    ends: Ends,
) -> Result<(TlsStream, Option<Arc<[u8]>>), Loss> {
    let server = ServerConnection::new(Arc::clone(config)).map_err(|error| tls_loss(&error))?;
    let handshake = Handshake::new(socket, server.into()).run().await?;
    let chain = handshake.tls.peer_certificates();
    let leaf = chain.and_then(<[_]>::first).map(|leaf| Arc::from(leaf.as_ref()));
    Ok((handshake.into_stream(ends)?, leaf))
}

struct Handshake {
    socket: TcpStream,
    tls: Connection,
    /// What came and was not given to rustls.
    came: Vec<u8>,
}

impl Handshake {
    fn new(socket: TcpStream, tls: Connection) -> Handshake {
        Handshake { socket, tls, came: Vec::new() }
    }

    async fn run(mut self) -> Result<Handshake, Loss> {
        loop {
            self.send().await?;
            if !self.tls.is_handshaking() {
                return Ok(self);
            }
            let record = self.record().await?;
            if let Err(error) = self.take(&record) {
                self.farewell().await;
                return Err(tls_loss(&error));
            }
        }
    }

    /// Sends what rustls has to say.
    async fn send(&mut self) -> Result<(), Loss> {
        let mut said = Vec::new();
        while self.tls.wants_write() {
            self.tls.write_tls(&mut said).expect("a vector takes all");
        }
        write_all(&self.socket, &said).await
    }

    /// The next whole record.
    async fn record(&mut self) -> Result<Vec<u8>, Loss> {
        loop {
            if let Some((_, bytes)) = head(&self.came)?
                && self.came.len() >= bytes
            {
                let rest = self.came.split_off(bytes);
                return Ok(std::mem::replace(&mut self.came, rest));
            }
            if !self.read().await? {
                return Err(Loss::Broken("the peer closed the connection during the handshake".to_owned()));
            }
        }
    }

    async fn read(&mut self) -> Result<bool, Loss> {
        self.came.reserve(RECORD_BYTES_MAX);
        loop {
            self.socket.readable().await.map_err(|error| io_loss(&error))?;
            match self.socket.try_read_buf(&mut self.came) {
                Ok(bytes) => return Ok(bytes > 0),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(io_loss(&error)),
            }
        }
    }

    fn take(&mut self, mut record: &[u8]) -> Result<(), rustls::Error> {
        while !record.is_empty() {
            let taken = self.tls.read_tls(&mut record);
            taken.map_err(|error| rustls::Error::General(error.to_string()))?;
            self.tls.process_new_packets()?;
        }
        Ok(())
    }

    /// Tells the peer why, and lets it hear.
    async fn farewell(&mut self) {
        let _ = self.send().await; // whoever does not hear it sees the connection end
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut self.socket).await;
        let mut heard = 0;
        while heard < FAREWELL_BYTES_MAX && matches!(self.read().await, Ok(true)) {
            heard += self.came.len();
            self.came.clear();
        }
    }

    fn into_stream(self, ends: Ends) -> Result<TlsStream, Loss> {
        if self.tls.alpn_protocol() != Some(ALPN_TCP) {
            return Err(Loss::Protocol("no protocol this release speaks".to_owned()));
        }
        let Some(SupportedCipherSuite::Tls13(suite)) = self.tls.negotiated_cipher_suite() else {
            return Err(Loss::Protocol("another version of TLS".to_owned()));
        };
        let secrets = self.tls.dangerous_extract_secrets().map_err(|error| tls_loss(&error))?;
        let (sealer, opener) = ciphers(suite, secrets)?;
        Ok(TlsStream::new(self.socket, sealer, opener, &self.came, ends))
    }
}

async fn write_all(socket: &TcpStream, mut bytes: &[u8]) -> Result<(), Loss> {
    while !bytes.is_empty() {
        socket.writable().await.map_err(|error| io_loss(&error))?;
        match socket.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(io_loss(&error)),
        }
    }
    Ok(())
}
