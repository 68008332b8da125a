//! Ports of the routers. They must be known before the first router starts, because each one's
//! configuration lists all; everyone else takes any free port and says which.

use std::collections::BTreeMap;
use std::net::{TcpListener, UdpSocket};
use std::path::Path;

use super::shape::Shape;

/// Ports are chosen below the range that systems hand out for outgoing connections, so that none of
/// those takes a router's port while it restarts.
const PORT_MIN: u16 = 20_000;

/// One above the last port chosen.
const PORT_END: u16 = 32_000;

/// File in the data directory that keeps the choice, so that kept Raft data finds its voters again.
const FILE: &str = "routers.json";

/// Addresses by router number: those kept from an earlier start, those from `base_port`, or free ones.
pub(super) fn router_addresses(shape: &Shape, directory: &Path) -> anyhow::Result<BTreeMap<u64, String>> {
    let file = directory.join(FILE);
    if let Some(kept) = read_kept(&file)? {
        return check_kept(kept, shape, directory);
    }
    let chosen = match shape.base_port {
        Some(base) => from_base(base, shape.routers)?,
        None => free_ports(shape.routers)?,
    };
    let addresses: BTreeMap<u64, String> =
        (1..).zip(chosen).map(|(number, port)| (number, format!("127.0.0.1:{port}"))).collect();
    std::fs::write(&file, serde_json::to_string(&addresses)?)?;
    Ok(addresses)
}

fn read_kept(file: &Path) -> anyhow::Result<Option<BTreeMap<u64, String>>> {
    match std::fs::read_to_string(file) {
        Ok(text) => serde_json::from_str(&text).map(Some).map_err(|cause| {
            anyhow::anyhow!("{}: {cause}; remove the data directory to start anew", file.display())
        }),
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(anyhow::anyhow!("cannot read {}: {cause}", file.display())),
    }
}

fn check_kept(
    kept: BTreeMap<u64, String>,
    shape: &Shape,
    directory: &Path,
) -> anyhow::Result<BTreeMap<u64, String>> {
    if kept.len() == shape.routers as usize {
        return Ok(kept);
    }
    anyhow::bail!(
        "{} holds the data of {} routers, --routers says {}: use the same number or another --data-dir",
        directory.display(),
        kept.len(),
        shape.routers
    )
}

fn from_base(base: u16, count: u32) -> anyhow::Result<Vec<u16>> {
    (0..count)
        .map(|offset| {
            let port = u16::try_from(u32::from(base) + offset)
                .map_err(|_| anyhow::anyhow!("--base-port {base} leaves no room for {count} routers"))?;
            if is_free(port) {
                return Ok(port);
            }
            anyhow::bail!("port {port} of router {} is in use: choose another --base-port", offset + 1)
        })
        .collect()
}

fn free_ports(count: u32) -> anyhow::Result<Vec<u16>> {
    let range = u32::from(PORT_END - PORT_MIN);
    // Starting at a place of its own, two clusters started together rarely meet.
    let start = std::process::id().wrapping_mul(7919) % range;
    let candidates =
        (0..range).map(|step| PORT_MIN + u16::try_from((start + step) % range).unwrap_or_default());
    let free: Vec<u16> = candidates.filter(|&port| is_free(port)).take(count as usize).collect();
    if free.len() == count as usize {
        return Ok(free);
    }
    anyhow::bail!("no {count} free ports from {PORT_MIN} to {PORT_END}")
}

fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok() && UdpSocket::bind(("127.0.0.1", port)).is_ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_taken_port_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let message = from_base(port, 1).unwrap_err().to_string();
        assert_eq!(message, format!("port {port} of router 1 is in use: choose another --base-port"));
    }

    #[test]
    fn the_last_port_is_the_last() {
        assert!(from_base(65_535, 2).unwrap_err().to_string().contains("no room for 2 routers"));
    }

    #[test]
    fn chosen_ports_are_kept_for_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape { routers: 3, ..Shape::small("kvfleet".into()) };
        let first = router_addresses(&shape, dir.path()).unwrap();
        assert_eq!(first.len(), 3);
        assert_eq!(router_addresses(&shape, dir.path()).unwrap(), first);
        let other = Shape { routers: 5, ..shape };
        let message = router_addresses(&other, dir.path()).unwrap_err().to_string();
        assert!(message.contains("holds the data of 3 routers"), "{message}");
    }
}
