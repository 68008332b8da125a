//! A relay to a node with a set rate, which can slow down, fall silent or disconnect. Bytes pass
//! unchanged through two sockets.
//!
//! Not here: their content (they are encrypted), and packets: only TCP sees a network's effect on
//! those.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Bytes per step: fewer than a layer has.
const CHUNK_BYTES: usize = 32 << 10;

/// Shorter waits do not sleep.
const SLEEP_MIN: Duration = Duration::from_micros(300);

/// The fault of an armed relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RelayFault {
    None,
    /// Slower by this factor.
    Slow(u32),
    /// No more bytes pass after `after` bytes.
    Silent {
        after: u64,
    },
    /// Both connections end after `after` bytes.
    Disconnect {
        after: u64,
    },
}

/// A running relay; dropping it closes its connections.
pub(super) struct Relay {
    address: SocketAddr,
    shared: Arc<RelayState>,
}

#[derive(Default)]
struct RelayState {
    settings: Mutex<Option<RelaySettings>>,
    is_over: AtomicBool,
    /// Bytes towards the client since it was armed.
    passed_bytes: AtomicU64,
    sockets: Mutex<Vec<TcpStream>>,
}

#[derive(Clone, Copy)]
struct RelaySettings {
    bytes_per_s: u64,
    fault: RelayFault,
    due: Instant,
}

impl Relay {
    /// Forwards everything to this node without a limit.
    pub(super) fn start(node: SocketAddr) -> anyhow::Result<Relay> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (address, shared) = (listener.local_addr()?, Arc::<RelayState>::default());
        let of = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if of.is_over() || connect_both(client, node, &of).is_err() {
                    return;
                }
            }
        });
        Ok(Relay { address, shared })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the rate towards the client, and the fault.
    pub(super) fn arm(&self, bytes_per_s: u64, fault: RelayFault) {
        let bytes_per_s =
            if let RelayFault::Slow(times) = fault { bytes_per_s / u64::from(times) } else { bytes_per_s };
        self.shared.passed_bytes.store(0, Ordering::Relaxed);
        *self.shared.settings.lock() =
            Some(RelaySettings { bytes_per_s: bytes_per_s.max(1), fault, due: Instant::now() });
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.end();
        // Wakes the listener.
        let _ = TcpStream::connect(self.address);
    }
}

impl RelayState {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    fn end(&self) {
        for socket in self.sockets.lock().drain(..) {
            let _ = socket.shutdown(Shutdown::Both); // The socket may be closed already.
        }
    }

    /// Waits until `bytes` bytes may pass; returns `false` if they never may.
    fn may_pass(&self, bytes: usize) -> bool {
        let passed = self.passed_bytes.load(Ordering::Relaxed);
        let due = match &mut *self.settings.lock() {
            None => return true,
            Some(RelaySettings { fault: RelayFault::Silent { after }, .. }) if passed >= *after => None,
            Some(RelaySettings { fault: RelayFault::Disconnect { after }, .. }) if passed >= *after => {
                self.end();
                return false;
            }
            Some(armed) => {
                // Unused rate does not accumulate.
                let now = Instant::now();
                armed.due = armed.due.max(now.checked_sub(SLEEP_MIN).unwrap_or(now));
                armed.due += Duration::from_secs_f64(bytes as f64 / armed.bytes_per_s as f64);
                Some(armed.due)
            }
        };
        self.passed_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let Some(due) = due else { return self.stay_silent() };
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if self.is_over() {
                return false;
            }
            if left < SLEEP_MIN {
                return true;
            }
            std::thread::sleep(left.min(Duration::from_millis(5)));
        }
    }

    /// Stays silent and rarely wakes: it must not take time from the engine.
    fn stay_silent(&self) -> bool {
        while !self.is_over() {
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }
}

fn connect_both(client: TcpStream, node: SocketAddr, shared: &Arc<RelayState>) -> std::io::Result<()> {
    let node = TcpStream::connect(node)?;
    for socket in [&client, &node] {
        socket.set_nodelay(true)?;
        shared.sockets.lock().push(socket.try_clone()?);
    }
    let (from_client, to_node) = (client.try_clone()?, node.try_clone()?);
    std::thread::spawn(move || copy(from_client, to_node, |_| true));
    let shared = shared.clone();
    std::thread::spawn(move || copy(node, client, |bytes| shared.may_pass(bytes)));
    Ok(())
}

/// Copies until one side closes or may not continue.
fn copy(mut from: TcpStream, mut to: TcpStream, may_pass: impl Fn(usize) -> bool) {
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(bytes @ 1..) = from.read(&mut chunk) {
        if !may_pass(bytes) || to.write_all(&chunk[..bytes]).is_err() {
            return;
        }
    }
}
