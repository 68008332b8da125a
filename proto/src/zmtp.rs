//! Connections to ZeroMQ sockets, as far as the events of engines need them: a subscriber or a dealer, with one peer, without
//! authentication (ZMTP 3.0, NULL mechanism).
//!
//! A peer is somebody else's process: nothing that it sends can take more memory than [`MESSAGE_BYTES_MAX`] or end ours, and a peer that
//! does not speak ends in time. Whether a connection stands is known to its owner, who dials again. Why this is no library:
//! `docs/adr/0050-zmtp-of-our-own.md`. Not here: what messages say (`engine_events.rs`).

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

/// Longest message: the events of a step that stores four million tokens take less.
pub const MESSAGE_BYTES_MAX: usize = 32 << 20;

/// Most frames of a message; engines send three, and four with a delimiter.
const FRAMES_MAX: usize = 8;

/// Longest until a connection is made, and until both ends have said who they are.
const OPEN_MAX: Duration = Duration::from_secs(5);

/// Read at once. Its room is there before the bytes are.
const READ_BYTES: usize = 64 << 10;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Hears what the peer publishes.
    Subscriber,
    /// Asks the peer, and hears its answers.
    Dealer,
}

impl Role {
    fn own(self) -> &'static str {
        match self {
            Role::Subscriber => "SUB",
            Role::Dealer => "DEALER",
        }
    }

    fn fits(self, peer: &str) -> bool {
        match self {
            Role::Subscriber => ["PUB", "XPUB"].contains(&peer),
            Role::Dealer => ["ROUTER", "REP", "DEALER"].contains(&peer),
        }
    }
}

/// Where a socket is: `tcp://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Name or address.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl Endpoint {
    /// The same host, so many ports further; nothing behind the last port.
    #[must_use]
    pub fn further(&self, ports: u16) -> Option<Endpoint> {
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
        // Names and addresses are resolved without the brackets of version 6.
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Endpoint { host, port })
    }
}

/// A text is no endpoint that can be dialed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{given:?} is no endpoint to dial: write tcp://host:port, with the engine's host in place of * or 0.0.0.0"
)]
pub struct EndpointError {
    given: String,
}

/// Why a connection was not made, or is over.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// The socket says so.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer did not answer.
    #[error("no connection within {} s", OPEN_MAX.as_secs())]
    Late,
    /// What is there does not speak ZMTP.
    #[error("what is there does not speak ZeroMQ's protocol: is it the port of the engine's events?")]
    NotZmtp,
    /// It speaks an old version.
    #[error("the peer speaks ZMTP {major}, and 3 is needed: libzmq has it since 4.0")]
    Version {
        /// Theirs.
        major: u8,
    },
    /// It wants to know who we are.
    #[error(
        "the peer asks for the mechanism {name:?}, and only NULL is spoken: keep the port to the cluster's network instead"
    )]
    Mechanism {
        /// Theirs.
        name: String,
    },
    /// It is a socket of another type.
    #[error(
        "the peer is a socket of type {theirs:?}, which a {ours} does not talk to: are the ports of events and replay the right way round?"
    )]
    Type {
        /// Ours.
        ours: &'static str,
        /// Theirs.
        theirs: String,
    },
    /// It said no.
    #[error("the peer refused the connection: {reason}")]
    Refused {
        /// In its words.
        reason: String,
    },
    /// A frame has flags that none has.
    #[error("a frame begins with {flags:#04x}, as none does")]
    Flags {
        /// Its first byte.
        flags: u8,
    },
    /// A frame, or a message, is longer than any.
    #[error("{bytes} bytes in one message, the limit is {limit}")]
    TooLong {
        /// How many.
        bytes: u64,
        /// At most.
        limit: usize,
    },
    /// A message has more frames than any.
    #[error("more than {FRAMES_MAX} frames in one message")]
    TooMany,
    /// A command cannot be read.
    #[error("a command of the protocol is cut or has no sense")]
    Command,
}

/// A connection with one peer, greeted.
#[derive(Debug)]
pub struct Connection<S = TcpStream> {
    stream: S,
    incoming: BytesMut,
    outgoing: BytesMut,
    /// Of the message that is being read.
    frames: Vec<Bytes>,
}

impl Connection<TcpStream> {
    /// Dials a socket that listens.
    ///
    /// # Errors
    /// It is not there, or not what was expected there; within five seconds.
    pub async fn dial(endpoint: &Endpoint, role: Role) -> Result<Connection, ZmtpError> {
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port));
        let stream = tokio::time::timeout(OPEN_MAX, stream).await.map_err(|_| ZmtpError::Late)??;
        Connection::over(stream, role).await
    }

    /// Greets whoever is at the other end, who may have dialed us.
    ///
    /// # Errors
    /// It is not what was expected; within five seconds.
    pub async fn over(stream: TcpStream, role: Role) -> Result<Connection, ZmtpError> {
        notice_when_gone(&stream)?;
        Connection::greet(stream, role).await
    }
}

/// A publisher has nothing to say for hours, and a host that vanished says nothing either: two seconds of silence and three questions
/// without an answer tell them apart.
fn notice_when_gone(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// Says who we are, and hears it from the peer, over a stream of any kind.
    ///
    /// # Errors
    /// It is not what was expected; within five seconds.
    pub async fn greet(stream: S, role: Role) -> Result<Connection<S>, ZmtpError> {
        let (incoming, outgoing) = (BytesMut::new(), BytesMut::new());
        let mut connection = Connection { stream, incoming, outgoing, frames: Vec::new() };
        let greeted = tokio::time::timeout(OPEN_MAX, connection.shake_hands(role));
        greeted.await.map_err(|_| ZmtpError::Late)??;
        Ok(connection)
    }

    async fn shake_hands(&mut self, role: Role) -> Result<(), ZmtpError> {
        wire::put_greeting(&mut self.outgoing);
        while wire::take_greeting(&mut self.incoming)?.is_none() {
            self.more().await?;
        }
        wire::put_ready(&mut self.outgoing, role);
        loop {
            let Some(frame) = wire::take_frame(&mut self.incoming, 0)? else {
                self.more().await?;
                continue;
            };
            if !frame.is_command {
                return Err(ZmtpError::Command);
            }
            match wire::command(frame.body)? {
                Command::Ready(theirs) if role.fits(&theirs) => return self.flush().await,
                Command::Ready(theirs) => return Err(ZmtpError::Type { ours: role.own(), theirs }),
                Command::Error(reason) => return Err(ZmtpError::Refused { reason }),
                Command::Ping(_) | Command::Other => return Err(ZmtpError::Command),
            }
        }
    }

    /// Asks a publisher for all messages whose topic begins so.
    ///
    /// # Errors
    /// The connection is over.
    pub async fn subscribe(&mut self, topic: &[u8]) -> Result<(), ZmtpError> {
        self.send(&[&[&[1], topic].concat()]).await
    }

    /// Sends a message of these frames.
    ///
    /// # Errors
    /// The connection is over.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        for (at, frame) in frames.iter().enumerate() {
            wire::put_frame(&mut self.outgoing, false, at + 1 < frames.len(), frame);
        }
        self.flush().await
    }

    /// The frames of the next message. What was read of one stays when this is dropped before its end.
    ///
    /// # Errors
    /// The connection is over; it is of no use after any of them.
    pub async fn receive(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        loop {
            let held: usize = self.frames.iter().map(Bytes::len).sum();
            let Some(frame) = wire::take_frame(&mut self.incoming, MESSAGE_BYTES_MAX - held)? else {
                self.more().await?;
                continue;
            };
            if frame.is_command {
                self.obey(wire::command(frame.body)?)?;
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

    fn obey(&mut self, command: Command) -> Result<(), ZmtpError> {
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

    /// Waits for more bytes, after saying what is to be said.
    async fn more(&mut self) -> Result<(), ZmtpError> {
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
