//! Unix sockets that carry whole packets, with descriptors beside them, and say who the other end is.
//!
//! Nothing here waits: what would block says so. Not here: what is in a packet (`packet.rs`).

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
use super::map::peer_credentials;

/// Descriptors that one packet can bring. One more is looked for, to see that there are too many.
pub(super) const DESCRIPTORS_MAX: usize = 2;

/// Connections that wait to be accepted. More get an error and come again.
const BACKLOG: i32 = 64;

/// One end of a connection, or a listener.
#[derive(Debug)]
pub(super) struct Seqpacket(OwnedFd);

/// Who is at the other end, as the kernel says: at the time it connected or listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) uid: u32,
    /// 0 when it cannot be seen from here: it is in another pid namespace.
    pub(super) pid: i32,
}

/// What was there to receive.
#[derive(Debug)]
pub(super) enum Got {
    /// A packet of so many bytes, with descriptors.
    Packet(usize, Vec<OwnedFd>),
    /// The other end is gone, and all that it sent was received.
    Ended,
    /// Nothing yet.
    Later,
}

/// What became of a packet that was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The other end has it in its queue.
    Queued,
    /// Its queue is full: once more when it is writable.
    Later,
    /// It is gone.
    Ended,
}

impl Seqpacket {
    /// Listens at a path where nothing is. Nobody but this user may connect until somebody says otherwise.
    pub(super) fn listen(at: &Path) -> io::Result<Seqpacket> {
        let socket = open()?;
        // The file that `bind` makes has the rights of the socket.
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

    /// The next connection; nothing while there is none.
    pub(super) fn accept(&self) -> io::Result<Option<Seqpacket>> {
        match accept_with(&self.0, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(Seqpacket(socket))),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(None),
            Err(cause) => Err(cause.into()),
        }
    }

    pub(super) fn peer(&self) -> io::Result<Peer> {
        let (uid, pid) = peer_credentials(&self.0)?;
        Ok(Peer { uid, pid })
    }

    pub(super) fn send(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<Sent> {
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
            Ok(_) => Ok(Sent::Queued),
            Err(Errno::WOULDBLOCK | Errno::INTR | Errno::NOBUFS) => Ok(Sent::Later),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(Sent::Ended),
            Err(cause) => Err(cause.into()),
        }
    }

    /// # Errors
    /// When a packet is larger than any may be or brings too many descriptors, or what the system said. Descriptors that
    /// came with it are closed.
    pub(super) fn recv(&self, into: &mut [u8; PACKET_BYTES_MAX]) -> io::Result<Got> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX + 1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.0, &mut [IoSliceMut::new(into)], &mut control, flags) {
            Ok(received) => received,
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(Got::Later),
            Err(Errno::CONNRESET) => return Ok(Got::Ended),
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
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet is larger than any may be"));
        }
        // An empty packet is none of this protocol, and cannot be told from the end.
        Ok(if received.bytes == 0 { Got::Ended } else { Got::Packet(received.bytes, descriptors) })
    }

    /// The other end sees the end once it has received what was sent. What it sends still comes.
    pub(super) fn end_sending(&self) {
        // Fails when it is gone already, which is as good.
        let _ = shutdown(&self.0, Shutdown::Write);
    }
}

/// The runtime's own handle is deprecated in its safe form, because a type may close its descriptor while it is watched. These
/// types do not: one owns the descriptor until it is dropped, the other borrows it.
#[allow(deprecated)]
impl Seqpacket {
    /// To be waited for until something can be received. A socket that is also watched for room to send wakes with every
    /// packet that the other end takes.
    pub(super) fn watched(self) -> io::Result<AsyncFd<Seqpacket>> {
        AsyncFd::with_interest(self, Interest::READABLE)
    }

    /// Waits until there is room to send. Rare enough for a handle of its own for as long as it waits.
    pub(super) async fn room(&self) -> io::Result<()> {
        let again = AsyncFd::with_interest(self.0.try_clone()?, Interest::WRITABLE)?;
        again.writable().await?.retain_ready();
        Ok(())
    }

    /// To be waited for until something can be received.
    pub(super) fn heard(&self) -> io::Result<AsyncFd<BorrowedFd<'_>>> {
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
    use crate::shm::map::memory_file;

    fn pair() -> (Seqpacket, Seqpacket) {
        let dir = tempfile::tempdir().unwrap();
        let listener = Seqpacket::listen(&dir.path().join("s")).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let client = Seqpacket::connect(&dir.path().join("s")).unwrap();
        (client, listener.accept().unwrap().unwrap())
    }

    fn received(socket: &Seqpacket) -> io::Result<Got> {
        socket.recv(&mut [0; PACKET_BYTES_MAX])
    }

    #[test]
    fn packets_stay_whole_and_bring_descriptors() {
        let (client, server) = pair();
        assert!(matches!(received(&server), Ok(Got::Later)));
        let file = memory_file(4096).unwrap();
        assert_eq!(client.send(b"one", &[]).unwrap(), Sent::Queued);
        assert_eq!(client.send(b"three", &[file.as_fd(), file.as_fd()]).unwrap(), Sent::Queued);
        let mut buffer = [0; PACKET_BYTES_MAX];
        assert!(matches!(server.recv(&mut buffer), Ok(Got::Packet(3, came)) if came.is_empty()));
        assert_eq!(&buffer[..3], b"one");
        let Ok(Got::Packet(5, came)) = server.recv(&mut buffer) else { panic!("the second packet") };
        assert_eq!(came.len(), 2);
        drop(client);
        assert!(matches!(received(&server), Ok(Got::Ended)));
        assert_eq!(server.send(b"x", &[]).unwrap(), Sent::Ended);
    }

    #[test]
    fn both_ends_know_each_other() {
        let (client, server) = pair();
        let expected =
            Peer { uid: rustix::process::getuid().as_raw(), pid: std::process::id().cast_signed() };
        assert_eq!((client.peer().unwrap(), server.peer().unwrap()), (expected, expected));
    }

    #[test]
    fn a_process_of_another_pid_namespace_has_no_number() {
        const SOCKET: &str = "KVFLEET_TEST_SOCKET";
        if let Some(at) = std::env::var_os(SOCKET) {
            let peer = Seqpacket::connect(Path::new(&at)).unwrap().peer().unwrap();
            assert_eq!(peer, Peer { uid: rustix::process::geteuid().as_raw(), pid: 0 });
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
    fn what_no_packet_may_be_is_an_error() {
        let (client, server) = pair();
        assert_eq!(client.send(&vec![1; PACKET_BYTES_MAX + 1], &[]).unwrap(), Sent::Queued);
        assert!(received(&server).is_err(), "too long");
        let file = memory_file(4096).unwrap();
        assert!(client.send(b"x", &[file.as_fd(); 3]).is_err(), "more than this end ever sends");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let many = [file.as_fd(); 9];
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        sendmsg(&client.0, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        assert!(received(&server).is_err(), "too many descriptors");
    }

    #[test]
    fn an_end_that_stopped_sending_still_receives() {
        let (client, server) = pair();
        server.end_sending();
        assert!(matches!(received(&client), Ok(Got::Ended)));
        assert_eq!(client.send(b"still", &[]).unwrap(), Sent::Queued);
        assert!(matches!(received(&server), Ok(Got::Packet(5, _))));
        assert!(matches!(received(&server), Ok(Got::Later)), "the client is there");
        drop(client);
        assert!(matches!(received(&server), Ok(Got::Ended)));
    }

    #[test]
    fn a_full_queue_says_later() {
        let (client, server) = pair();
        let packet = [7; 1024];
        let sent = (0..100_000).take_while(|_| client.send(&packet, &[]).unwrap() == Sent::Queued).count();
        assert!(sent > 10 && sent < 100_000, "{sent}");
        assert!(matches!(received(&server), Ok(Got::Packet(1024, _))));
    }
}
