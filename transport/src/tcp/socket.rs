//! Sockets: how they are set up, and reads that know when there is no more to read.
//!
//! Not here: records (`stream.rs`).

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;

use tokio::io::Interest;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::stream::Loss;

/// A connection to `address`. What is written to it leaves at once.
pub(super) async fn connect(
    address: SocketAddr,
    congestion_control: Option<&str>,
) -> std::io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    rule(&socket, congestion_control);
    let socket = socket.connect(address).await?;
    socket.set_nodelay(true)?;
    Ok(socket)
}

/// A socket that listens at `address`; what it accepts has its congestion control.
pub(super) fn listen(address: SocketAddr, congestion_control: Option<&str>) -> std::io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind(address)?;
    rule(&listener, congestion_control);
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Sets the congestion control of a socket that is not connected yet, if the system has it: one that began under
/// another keeps that one's pacing. Without it the system's own rules, which moves the same bytes.
fn rule(socket: impl AsFd, congestion_control: Option<&str>) {
    if let Some(name) = congestion_control {
        let _ = rustix::net::sockopt::set_tcp_congestion(socket, name);
    }
}

/// Reads what is there. A read that does not fill `to` found the socket empty, so the next one waits without asking.
pub(super) fn try_read(socket: &TcpStream, to: &mut [u8]) -> std::io::Result<usize> {
    let room = to.len();
    let mut short = None;
    let read = socket.try_io(Interest::READABLE, || {
        let bytes = rustix::io::read(socket, &mut *to)?;
        if (1..room).contains(&bytes) {
            short = Some(bytes);
            // To the runtime the socket is as one that had nothing; it hears of what came since.
            return Err(ErrorKind::WouldBlock.into());
        }
        Ok(bytes)
    });
    short.map_or(read, Ok)
}

/// What a socket says as a loss.
pub(super) fn io_loss(error: &Error) -> Loss {
    Loss::Broken(error.to_string())
}
