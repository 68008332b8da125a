//! Unix sockets that carry whole packets with file descriptors, and identify the peer process.
//!
//! No call here blocks; a call that would block says so. Not here: the contents of packets
//! (`packet.rs`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect, listen, recvmsg, sendmsg, shutdown, socket_with,
};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::PACKET_BYTES_MAX;
use super::mapping::peer_credentials;

/// Maximum descriptors of one packet. The receive buffer holds one more, to detect an excess.
pub(super) const DESCRIPTORS_MAX: usize = 2;

/// Backlog of connections to accept. Further ones get an error and retry.
const BACKLOG: i32 = 64;

/// One end of a connection, or a listener.
#[derive(Debug)]
pub(super) struct Seqpacket(OwnedFd);

/// The peer process, as the kernel recorded it when it connected or listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerProcess {
    pub(super) uid: u32,
    /// 0 if it is in another pid namespace and not visible from here.
    pub(super) pid: i32,
}

/// Result of a receive call.
#[derive(Debug)]
pub(super) enum RecvOutcome {
    /// A packet of this length in bytes, with its descriptors.
    Packet(usize, Vec<OwnedFd>),
    /// The peer is gone, and everything that it sent was received.
    Closed,
    /// No packet yet.
    WouldBlock,
}

/// Result of a send call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendOutcome {
    /// The packet is in the peer's queue.
    Queued,
    /// The peer's queue is full: retry when it is writable.
    WouldBlock,
    /// The peer is gone.
    Closed,
}

impl Seqpacket {
    /// Listens at an unused path. Only this user may connect until the permissions are changed.
    pub(super) fn listen(at: &Path) -> io::Result<Seqpacket> {
        let socket = open()?;
        // `bind` creates the file with the permissions of the socket.
        rustix::fs::fchmod(&socket, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
        bind(&socket, &SocketAddrUnix::new(at)?)?;
        listen(&socket, BACKLOG)?;
        Ok(Seqpacket(socket))
    }

    pub(super) fn connect(to: &Path) -> io::Result<Seqpacket> {
        let socket = open()?;
        connect(&socket, &SocketAddrUnix::new(to)?)?;
        Ok(Seqpacket(socket))
    }

    /// The next connection, or `None` if there is none.
    pub(super) fn accept(&self) -> io::Result<Option<Seqpacket>> {
        match accept_with(&self.0, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(Seqpacket(socket))),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(None),
            Err(cause) => Err(cause.into()),
        }
    }

    pub(super) fn peer(&self) -> io::Result<PeerProcess> {
        let (uid, pid) = peer_credentials(&self.0)?;
        Ok(PeerProcess { uid, pid })
    }

    pub(super) fn send(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<SendOutcome> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&self.0, &[IoSlice::new(packet)], &mut control, flags) {
            Ok(_) => Ok(SendOutcome::Queued),
            Err(Errno::WOULDBLOCK | Errno::INTR | Errno::NOBUFS) => Ok(SendOutcome::WouldBlock),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(SendOutcome::Closed),
            Err(cause) => Err(cause.into()),
        }
    }

    /// # Errors
    /// If a packet is too long or has too many descriptors, or the system's error. Its descriptors
    /// are closed.
    pub(super) fn recv(&self, into: &mut [u8; PACKET_BYTES_MAX]) -> io::Result<RecvOutcome> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX + 1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.0, &mut [IoSliceMut::new(into)], &mut control, flags) {
            Ok(received) => received,
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(RecvOutcome::WouldBlock),
            Err(Errno::CONNRESET) => return Ok(RecvOutcome::Closed),
            Err(cause) => return Err(cause.into()),
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                descriptors.extend(came);
            }
        }
        let is_cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
        if is_cut || descriptors.len() > DESCRIPTORS_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a packet is too long or has too many descriptors",
            ));
        }
        // An empty packet is not part of this protocol, and cannot be distinguished from the end.
        Ok(if received.bytes == 0 {
            RecvOutcome::Closed
        } else {
            RecvOutcome::Packet(received.bytes, descriptors)
        })
    }

    /// Ends sending: the peer sees the end after it has received everything. Its packets still
    /// arrive.
    pub(super) fn shutdown_send(&self) {
        // Fails if the peer is already gone, which needs no handling.
        let _ = shutdown(&self.0, Shutdown::Write);
    }
}

/// The runtime's handle is deprecated in its safe form, because a type may close its descriptor
/// while it is watched. These types do not: one owns the descriptor until it is dropped, the other
/// borrows it.
#[allow(deprecated)]
impl Seqpacket {
    /// Watches for readability only. A socket that is also watched for writability wakes with every
    /// packet that the peer takes.
    pub(super) fn into_async(self) -> io::Result<AsyncFd<Seqpacket>> {
        AsyncFd::with_interest(self, Interest::READABLE)
    }

    /// Waits until the socket is writable. Rare enough for a separate handle while it waits.
    pub(super) async fn writable(&self) -> io::Result<()> {
        let again = AsyncFd::with_interest(self.0.try_clone()?, Interest::WRITABLE)?;
        again.writable().await?.retain_ready();
        Ok(())
    }

    /// Watches for readability.
    pub(super) fn readable(&self) -> io::Result<AsyncFd<BorrowedFd<'_>>> {
        AsyncFd::with_interest(self.0.as_fd(), Interest::READABLE)
    }
}

impl AsRawFd for Seqpacket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for Seqpacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::shm::mapping::memory_file;

    fn pair() -> (Seqpacket, Seqpacket) {
        let dir = tempfile::tempdir().unwrap();
        let listener = Seqpacket::listen(&dir.path().join("s")).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let client = Seqpacket::connect(&dir.path().join("s")).unwrap();
        (client, listener.accept().unwrap().unwrap())
    }

    fn receive(socket: &Seqpacket) -> io::Result<RecvOutcome> {
        socket.recv(&mut [0; PACKET_BYTES_MAX])
    }

    #[test]
    fn packets_stay_whole_and_bring_descriptors() {
        let (client, server) = pair();
        assert!(matches!(receive(&server), Ok(RecvOutcome::WouldBlock)));
        let file = memory_file(4096).unwrap();
        assert_eq!(client.send(b"one", &[]).unwrap(), SendOutcome::Queued);
        assert_eq!(client.send(b"three", &[file.as_fd(), file.as_fd()]).unwrap(), SendOutcome::Queued);
        let mut buffer = [0; PACKET_BYTES_MAX];
        assert!(matches!(server.recv(&mut buffer), Ok(RecvOutcome::Packet(3, came)) if came.is_empty()));
        assert_eq!(&buffer[..3], b"one");
        let Ok(RecvOutcome::Packet(5, came)) = server.recv(&mut buffer) else { panic!("the second packet") };
        assert_eq!(came.len(), 2);
        drop(client);
        assert!(matches!(receive(&server), Ok(RecvOutcome::Closed)));
        assert_eq!(server.send(b"x", &[]).unwrap(), SendOutcome::Closed);
    }

    #[test]
    fn both_ends_see_the_peer_credentials() {
        let (client, server) = pair();
        let expected =
            PeerProcess { uid: rustix::process::getuid().as_raw(), pid: std::process::id().cast_signed() };
        assert_eq!((client.peer().unwrap(), server.peer().unwrap()), (expected, expected));
    }

    #[test]
    fn a_process_of_another_pid_namespace_has_no_number() {
        const SOCKET: &str = "KVFLEET_TEST_SOCKET";
        if let Some(at) = std::env::var_os(SOCKET) {
            let peer = Seqpacket::connect(Path::new(&at)).unwrap().peer().unwrap();
            assert_eq!(peer, PeerProcess { uid: rustix::process::geteuid().as_raw(), pid: 0 });
            return;
        }
        let unshare = || {
            let mut unshare = std::process::Command::new("unshare");
            unshare.args(["--pid", "--fork"]);
            unshare
        };
        if !unshare().arg("true").status().is_ok_and(|status| status.success()) {
            eprintln!("skipped: this user cannot make a pid namespace");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("s");
        let _listener = Seqpacket::listen(&at).unwrap();
        let name = "shm::seqpacket::tests::a_process_of_another_pid_namespace_has_no_number";
        let mut inside = unshare();
        inside.arg(std::env::current_exe().unwrap()).args(["--exact", name, "--nocapture"]).env(SOCKET, &at);
        let said = inside.output().unwrap();
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    fn invalid_packets_are_errors() {
        let (client, server) = pair();
        assert_eq!(client.send(&vec![1; PACKET_BYTES_MAX + 1], &[]).unwrap(), SendOutcome::Queued);
        assert!(receive(&server).is_err(), "too long");
        let file = memory_file(4096).unwrap();
        assert!(client.send(b"x", &[file.as_fd(); 3]).is_err(), "more than this end ever sends");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let many = [file.as_fd(); 9];
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        sendmsg(&client.0, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        assert!(receive(&server).is_err(), "too many descriptors");
    }

    #[test]
    fn an_end_that_stopped_sending_still_receives() {
        let (client, server) = pair();
        server.shutdown_send();
        assert!(matches!(receive(&client), Ok(RecvOutcome::Closed)));
        assert_eq!(client.send(b"still", &[]).unwrap(), SendOutcome::Queued);
        assert!(matches!(receive(&server), Ok(RecvOutcome::Packet(5, _))));
        assert!(matches!(receive(&server), Ok(RecvOutcome::WouldBlock)), "the client is there");
        drop(client);
        assert!(matches!(receive(&server), Ok(RecvOutcome::Closed)));
    }

    #[test]
    fn a_full_queue_would_block() {
        let (client, server) = pair();
        let packet = [7; 1024];
        let sent =
            (0..100_000).take_while(|_| client.send(&packet, &[]).unwrap() == SendOutcome::Queued).count();
        assert!(sent > 10 && sent < 100_000, "{sent}");
        assert!(matches!(receive(&server), Ok(RecvOutcome::Packet(1024, _))));
    }
}
