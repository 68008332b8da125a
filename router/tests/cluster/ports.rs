//! Ports for routers that tests start, stop and start again; the suites of `chaos-tests` use them too. Not here:
//! the ports of a cluster that `kvfleet up` starts, which are kept for its next start.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Below the range that systems hand out for outgoing connections: a port of those may be another socket's
/// while a router restarts, and asking for a free one twice may give the same one twice.
const FIRST: u32 = 10_000;

const COUNT: u32 = 10_000;

/// Ports given out by this process.
static GIVEN: AtomicU32 = AtomicU32::new(0);

/// An address on loopback whose port nobody listens at and which this process has not given out before. Two
/// processes side by side look at different places.
pub fn unused_address() -> String {
    let start = std::process::id().wrapping_mul(7_919) % COUNT;
    loop {
        let given = GIVEN.fetch_add(1, Ordering::Relaxed);
        assert!(given < COUNT, "no port from {FIRST} to {} is free", FIRST + COUNT - 1);
        let address = format!("127.0.0.1:{}", FIRST + (start + given) % COUNT);
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}
