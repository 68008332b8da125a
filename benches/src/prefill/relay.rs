//! A way to a node of a set rate, that can be slow, fall silent or end: bytes pass through two sockets as they are.
//!
//! Not here: what they are (they are encrypted), and packets: what a network does to these only TCP sees.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// What passes at once: less than a layer takes to come.
const CHUNK_BYTES: usize = 32 << 10;

/// What is due sooner passes at once.
const SLEEP_MIN: Duration = Duration::from_micros(300);

/// What becomes of the way once it is armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// So many times as slow.
    Slow(u32),
    /// Behind so many bytes nothing passes any more.
    Silent {
        after: u64,
    },
    /// Behind so many bytes both connections end.
    Cut {
        after: u64,
    },
}

/// A running relay. Ends with its connections when it is dropped.
pub(super) struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    armed: Mutex<Option<Armed>>,
    is_over: AtomicBool,
    /// Bytes towards the client, but those before it was armed.
    passed: AtomicU64,
    sockets: Mutex<Vec<TcpStream>>,
}

#[derive(Clone, Copy)]
struct Armed {
    bytes_per_s: u64,
    fault: Fault,
    due: Instant,
}

impl Relay {
    /// Passes everything on to this node as fast as it comes.
    pub(super) fn start(node: SocketAddr) -> anyhow::Result<Relay> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (address, shared) = (listener.local_addr()?, Arc::<Shared>::default());
        let of = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if of.is_over() || join(client, node, &of).is_err() {
                    return;
                }
            }
        });
        Ok(Relay { address, shared })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on it has this rate towards the client, and this fault.
    pub(super) fn arm(&self, bytes_per_s: u64, fault: Fault) {
        let bytes_per_s =
            if let Fault::Slow(times) = fault { bytes_per_s / u64::from(times) } else { bytes_per_s };
        self.shared.passed.store(0, Ordering::Relaxed);
        *self.shared.armed.lock() =
            Some(Armed { bytes_per_s: bytes_per_s.max(1), fault, due: Instant::now() });
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.end();
        // Wakes who listens.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    fn end(&self) {
        for socket in self.sockets.lock().drain(..) {
            let _ = socket.shutdown(Shutdown::Both); // it may have ended already
        }
    }

    /// Waits until so many bytes may pass; `false` when they never may.
    fn pass(&self, bytes: usize) -> bool {
        let passed = self.passed.load(Ordering::Relaxed);
        let due = match &mut *self.armed.lock() {
            None => return true,
            Some(Armed { fault: Fault::Silent { after }, .. }) if passed >= *after => None,
            Some(Armed { fault: Fault::Cut { after }, .. }) if passed >= *after => {
                self.end();
                return false;
            }
            Some(armed) => {
                // What was not asked for is not made up for.
                let now = Instant::now();
                armed.due = armed.due.max(now.checked_sub(SLEEP_MIN).unwrap_or(now));
                armed.due += Duration::from_secs_f64(bytes as f64 / armed.bytes_per_s as f64);
                Some(armed.due)
            }
        };
        self.passed.fetch_add(bytes as u64, Ordering::Relaxed);
        let Some(due) = due else { return self.hang() };
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

    /// Silent, and seldom awake: it must not take time from the engine.
    fn hang(&self) -> bool {
        while !self.is_over() {
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }
}

fn join(client: TcpStream, node: SocketAddr, shared: &Arc<Shared>) -> std::io::Result<()> {
    let node = TcpStream::connect(node)?;
    for socket in [&client, &node] {
        socket.set_nodelay(true)?;
        shared.sockets.lock().push(socket.try_clone()?);
    }
    let (up, down) = ((client.try_clone()?, node.try_clone()?), (node, client));
    std::thread::spawn(move || copy(up, |_| true));
    let shared = shared.clone();
    std::thread::spawn(move || copy(down, |bytes| shared.pass(bytes)));
    Ok(())
}

/// Until one of the two ends, or may not go on.
fn copy((mut from, mut to): (TcpStream, TcpStream), may_pass: impl Fn(usize) -> bool) {
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(bytes @ 1..) = from.read(&mut chunk) {
        if !may_pass(bytes) || to.write_all(&chunk[..bytes]).is_err() {
            return;
        }
    }
}
