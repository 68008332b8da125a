//! Sockets: their options, and reads that notice when the socket is empty.
//!
//! Not here: records (`stream.rs`).

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;

use tokio::io::Interest;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::stream::StreamError;

/// Connects to `address`, with Nagle's algorithm off.
pub(super) async fn connect(
    address: SocketAddr,
    congestion_control: Option<&str>,
) -> std::io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    set_congestion_control(&socket, congestion_control);
    let socket = socket.connect(address).await?;
    socket.set_nodelay(true)?;
    Ok(socket)
}

/// Listens at `address`; accepted sockets inherit the congestion control.
pub(super) fn listen(address: SocketAddr, congestion_control: Option<&str>) -> std::io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind(address)?;
    set_congestion_control(&listener, congestion_control);
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Sets the congestion control of an unconnected socket, if the system has it. A socket that
/// changed later would keep the old one's pacing. On failure the system's default applies, which
/// works too.
fn set_congestion_control(socket: impl AsFd, congestion_control: Option<&str>) {
    if let Some(name) = congestion_control {
        let _ = rustix::net::sockopt::set_tcp_congestion(socket, name);
    }
}

/// Reads the available bytes. A read that does not fill `to` emptied the socket, so the next one
/// waits for readiness without a system call.
pub(super) fn try_read(socket: &TcpStream, to: &mut [u8]) -> std::io::Result<usize> {
    let room = to.len();
    let mut short = None;
    let read = socket.try_io(Interest::READABLE, || {
        let bytes = rustix::io::read(socket, &mut *to)?;
        if (1..room).contains(&bytes) {
            short = Some(bytes);
            // Tells the runtime that the socket is empty; it will report later data.
            return Err(ErrorKind::WouldBlock.into());
        }
        Ok(bytes)
    });
    short.map_or(read, Ok)
}

/// A socket error as a stream error.
pub(super) fn io_stream_error(error: &Error) -> StreamError {
    StreamError::Broken(error.to_string())
}
