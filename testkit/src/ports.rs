//! Ports for routers that tests stop and start again; also used by `chaos-tests`. Not here: the
//! ports of a cluster that `kvfleet up` starts, which are kept for its next start.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Below the ephemeral port range: such a port may belong to another socket while a router
/// restarts, and two requests for a free port may return the same one.
const FIRST_PORT: u32 = 10_000;

const PORTS: u32 = 10_000;

/// Number of ports given out by this process.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A loopback address with a port that is unused and was not given out by this process. Concurrent
/// processes start at different ports.
pub fn unused_address() -> String {
    let start = std::process::id().wrapping_mul(7_919) % PORTS;
    loop {
        let given = NEXT.fetch_add(1, Ordering::Relaxed);
        assert!(given < PORTS, "no port from {FIRST_PORT} to {} is free", FIRST_PORT + PORTS - 1);
        let address = format!("127.0.0.1:{}", FIRST_PORT + (start + given) % PORTS);
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}
