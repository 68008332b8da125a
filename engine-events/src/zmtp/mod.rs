//! A minimal ZeroMQ client for engine events: a SUB or DEALER socket with one peer, without
//! authentication (ZMTP 3.0, NULL mechanism).
//!
//! A peer is a foreign process. It cannot make this process allocate more than
//! [`MESSAGE_BYTES_MAX`] or panic, and a silent peer runs into a timeout. The owner of a connection
//! redials after a failure. Why no library: `docs/adr/0050-own-zmtp-client.md`. Not here: the
//! content of messages (`engine_events.rs`).

use std::fmt;
use std::io;
use std::str::FromStr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use wire::Command;

#[cfg(test)]
mod tests;
mod wire;

/// Longest message in bytes. The events of a step that stores four million tokens are shorter.
pub const MESSAGE_BYTES_MAX: usize = 32 << 20;

/// Most frames per message. Engines send three, or four with a delimiter.
const FRAMES_MAX: usize = 8;

/// Timeout for the TCP connection, and for the ZMTP handshake.
const OPEN_MAX: Duration = Duration::from_secs(5);

/// Bytes reserved for one read.
const READ_BYTES: usize = 64 << 10;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Receives the peer's published messages.
    Subscriber,
    /// Sends requests and receives the answers.
    Dealer,
}

impl Role {
    fn socket_type(self) -> &'static str {
        match self {
            Role::Subscriber => "SUB",
            Role::Dealer => "DEALER",
        }
    }

    fn accepts(self, peer: &str) -> bool {
        match self {
            Role::Subscriber => ["PUB", "XPUB"].contains(&peer),
            Role::Dealer => ["ROUTER", "REP", "DEALER"].contains(&peer),
        }
    }
}

/// Address of a socket: `tcp://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Host name or address.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl Endpoint {
    /// The endpoint `ports` higher on the same host; `None` beyond port 65535.
    #[must_use]
    pub fn offset_port(&self, ports: u16) -> Option<Endpoint> {
        Some(Endpoint { host: self.host.clone(), port: self.port.checked_add(ports)? })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}:{}", self.host, self.port)
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || EndpointError { given: text.to_owned() };
        let (host, port) =
            text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(wrong)?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
        if ["", "*", "0.0.0.0", "::", "[::]"].contains(&host) {
            return Err(wrong());
        }
        // Resolvers take IPv6 addresses without brackets.
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Endpoint { host, port })
    }
}

/// A text that is not a dialable endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{given:?} is no endpoint to dial: write tcp://host:port, with the engine's host in place of * or 0.0.0.0"
)]
pub struct EndpointError {
    given: String,
}

/// Why a connection could not be made, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer did not answer in time.
    #[error("no connection within {} s", OPEN_MAX.as_secs())]
    Timeout,
    /// The peer does not speak ZMTP.
    #[error("the peer does not speak the ZeroMQ protocol: is it the port of the engine's events?")]
    NotZmtp,
    /// The peer speaks an older version.
    #[error("the peer speaks ZMTP {major}, but version 3 is needed: upgrade its libzmq to 4.0 or later")]
    Version {
        /// Its major version.
        major: u8,
    },
    /// The peer requires authentication.
    #[error(
        "the peer asks for the mechanism {name:?}, but only NULL is supported: keep the port to the \
         cluster's network instead"
    )]
    Mechanism {
        /// Its mechanism.
        name: String,
    },
    /// The peer's socket type does not match.
    #[error(
        "the peer is a socket of type {theirs:?}, which does not match a {ours}: are the ports of events and \
         replay swapped?"
    )]
    Type {
        /// Own socket type.
        ours: &'static str,
        /// The peer's socket type.
        theirs: String,
    },
    /// The peer refused the connection.
    #[error("the peer refused the connection: {reason}")]
    Refused {
        /// Its reason.
        reason: String,
    },
    /// A frame has invalid flags.
    #[error("a frame begins with {flags:#04x}, which are no valid flags")]
    Flags {
        /// The flags byte.
        flags: u8,
    },
    /// A frame or message exceeds the limit.
    #[error("{bytes} bytes in one message, the limit is {limit}")]
    TooLong {
        /// Its length in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: usize,
    },
    /// A message has too many frames.
    #[error("more than {FRAMES_MAX} frames in one message")]
    TooMany,
    /// A malformed command.
    #[error("a ZMTP command is truncated or malformed")]
    Command,
}

/// A connection with one peer after the handshake.
#[derive(Debug)]
pub struct Connection<S = TcpStream> {
    stream: S,
    incoming: BytesMut,
    outgoing: BytesMut,
    /// Frames received of the current message.
    frames: Vec<Bytes>,
}

impl Connection<TcpStream> {
    /// Dials a listening socket.
    ///
    /// # Errors
    /// When there is no suitable peer, or no answer within five seconds.
    pub async fn dial(endpoint: &Endpoint, role: Role) -> Result<Connection, ZmtpError> {
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port));
        let stream = tokio::time::timeout(OPEN_MAX, stream).await.map_err(|_| ZmtpError::Timeout)??;
        Connection::from_stream(stream, role).await
    }

    /// Takes over a stream in either direction and performs the handshake.
    ///
    /// # Errors
    /// When the peer is not suitable, or does not answer within five seconds.
    pub async fn from_stream(stream: TcpStream, role: Role) -> Result<Connection, ZmtpError> {
        enable_keepalive(&stream)?;
        Connection::handshake(stream, role).await
    }
}

/// Enables TCP keepalive. A publisher may be silent for hours, and so is a vanished host: two idle
/// seconds and three unanswered probes tell them apart.
fn enable_keepalive(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// Performs the handshake over any stream.
    ///
    /// # Errors
    /// When the peer is not suitable, or does not answer within five seconds.
    pub async fn handshake(stream: S, role: Role) -> Result<Connection<S>, ZmtpError> {
        let (incoming, outgoing) = (BytesMut::new(), BytesMut::new());
        let mut connection = Connection { stream, incoming, outgoing, frames: Vec::new() };
        let greeted = tokio::time::timeout(OPEN_MAX, connection.exchange_greetings(role));
        greeted.await.map_err(|_| ZmtpError::Timeout)??;
        Ok(connection)
    }

    async fn exchange_greetings(&mut self, role: Role) -> Result<(), ZmtpError> {
        wire::put_greeting(&mut self.outgoing);
        while wire::take_greeting(&mut self.incoming)?.is_none() {
            self.read_more().await?;
        }
        wire::put_ready(&mut self.outgoing, role);
        loop {
            let Some(frame) = wire::take_frame(&mut self.incoming, 0)? else {
                self.read_more().await?;
                continue;
            };
            if !frame.is_command {
                return Err(ZmtpError::Command);
            }
            match wire::parse_command(frame.body)? {
                Command::Ready(theirs) if role.accepts(&theirs) => return self.flush().await,
                Command::Ready(theirs) => return Err(ZmtpError::Type { ours: role.socket_type(), theirs }),
                Command::Error(reason) => return Err(ZmtpError::Refused { reason }),
                Command::Ping(_) | Command::Other => return Err(ZmtpError::Command),
            }
        }
    }

    /// Subscribes to all messages with this topic prefix.
    ///
    /// # Errors
    /// When the connection failed.
    pub async fn subscribe(&mut self, topic: &[u8]) -> Result<(), ZmtpError> {
        self.send(&[&[&[1], topic].concat()]).await
    }

    /// Sends a message of these frames.
    ///
    /// # Errors
    /// When the connection failed.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        for (at, frame) in frames.iter().enumerate() {
            wire::put_frame(&mut self.outgoing, false, at + 1 < frames.len(), frame);
        }
        self.flush().await
    }

    /// The frames of the next message. Cancel safe: a partly read message is kept.
    ///
    /// # Errors
    /// When the connection failed; it must not be used afterwards.
    pub async fn receive(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        loop {
            let held: usize = self.frames.iter().map(Bytes::len).sum();
            let Some(frame) = wire::take_frame(&mut self.incoming, MESSAGE_BYTES_MAX - held)? else {
                self.read_more().await?;
                continue;
            };
            if frame.is_command {
                self.handle_command(wire::parse_command(frame.body)?)?;
                continue;
            }
            if self.frames.len() == FRAMES_MAX {
                return Err(ZmtpError::TooMany);
            }
            self.frames.push(frame.body);
            if !frame.has_more {
                return Ok(std::mem::take(&mut self.frames));
            }
        }
    }

    fn handle_command(&mut self, command: Command) -> Result<(), ZmtpError> {
        match command {
            Command::Ping(context) => {
                wire::put_pong(&mut self.outgoing, &context);
                Ok(())
            }
            Command::Error(reason) => Err(ZmtpError::Refused { reason }),
            Command::Ready(_) | Command::Other => Ok(()),
        }
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
        self.stream.write_all_buf(&mut self.outgoing).await?;
        Ok(self.stream.flush().await?)
    }

    /// Flushes the output, then waits for more bytes.
    async fn read_more(&mut self) -> Result<(), ZmtpError> {
        if !self.outgoing.is_empty() {
            self.flush().await?;
        }
        self.incoming.reserve(READ_BYTES);
        match self.stream.read_buf(&mut self.incoming).await? {
            0 => Err(ZmtpError::Closed),
            _ => Ok(()),
        }
    }
}
