//! Ports of the routers. They must be known before the first router starts, because each one's
//! configuration lists all; everyone else takes any free port and says which.

use std::collections::BTreeMap;
use std::net::{TcpListener, UdpSocket};
use std::path::Path;

use super::name;
use super::shape::Shape;
use crate::process::Role;

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

/// Whether an earlier start chose the addresses for this data directory, or left Raft data in it.
pub(super) fn are_kept(directory: &Path) -> bool {
    directory.join(FILE).exists() || directory.join(name((Role::Router, 1))).exists()
}

/// Takes back a choice that was made for a start that failed, and the Raft data that names its voters by
/// it. Only for a directory whose addresses were not kept before that start.
pub(super) fn forget(directory: &Path, routers: u32) -> std::io::Result<()> {
    let gone = |removed: std::io::Result<()>| match removed {
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => Err(cause),
        _ => Ok(()),
    };
    for number in 1..=u64::from(routers) {
        gone(std::fs::remove_dir_all(directory.join(name((Role::Router, number)))))?;
    }
    gone(std::fs::remove_file(directory.join(FILE)))
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
    if kept.len() != shape.routers as usize {
        anyhow::bail!(
            "{} holds the data of {} routers, --routers says {}: use the same number or another --data-dir",
            directory.display(),
            kept.len(),
            shape.routers
        );
    }
    let first = kept.values().next().map(String::as_str).unwrap_or_default();
    if let Some(base) = shape.base_port
        && !kept.values().zip(u32::from(base)..).all(|(address, port)| address.ends_with(&format!(":{port}")))
    {
        anyhow::bail!(
            "{} holds the data of routers from {first} on, --base-port says {base}: leave out --base-port, or use another --data-dir",
            directory.display()
        );
    }
    Ok(kept)
}

fn from_base(base: u16, count: u32) -> anyhow::Result<Vec<u16>> {
    (0..count)
        .map(|offset| {
            let port = u16::try_from(u32::from(base) + offset).map_err(|_| {
                anyhow::anyhow!("--base-port {base} leaves no room for {count} routers: give a lower one")
            })?;
            if is_free(port) {
                return Ok(port);
            }
            anyhow::bail!(
                "port {port} of router {} is in use: choose another --base-port, or stop what uses it",
                offset + 1
            )
        })
        .collect()
}

/// So many free ports that no router has, as routers do not listen yet.
pub(super) fn beside(routers: &BTreeMap<u64, String>, count: u32) -> anyhow::Result<Vec<u16>> {
    let is_a_routers = |port: &u16| routers.values().any(|address| address.ends_with(&format!(":{port}")));
    let more = count.saturating_add(u32::try_from(routers.len()).unwrap_or(u32::MAX));
    let free = free_ports(more)?;
    Ok(free.into_iter().filter(|port| !is_a_routers(port)).take(count as usize).collect())
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
    anyhow::bail!(
        "no {count} free ports from {PORT_MIN} to {PORT_END}: stop what uses them, or give --base-port"
    )
}

fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok() && UdpSocket::bind(("127.0.0.1", port)).is_ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn a_taken_port_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = from_base(port, 1).unwrap_err();
        says("a port in use, of a router of `up`", &error, &[&port.to_string()]);
    }

    #[test]
    fn the_last_port_is_the_last() {
        says("a base port too near the last one", &from_base(65_535, 2).unwrap_err(), &[]);
    }

    #[test]
    fn chosen_ports_are_kept_for_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape { routers: 3, ..Shape::small("kvfleet".into()) };
        let first = router_addresses(&shape, dir.path()).unwrap();
        assert_eq!(first.len(), 3);
        assert_eq!(router_addresses(&shape, dir.path()).unwrap(), first);
        let other = Shape { routers: 5, ..shape };
        let error = router_addresses(&other, dir.path()).unwrap_err();
        let here = dir.path().display().to_string();
        says("data of another number of routers", &error, &[&here]);
    }

    #[test]
    fn another_base_port_than_the_kept_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape { routers: 2, ..Shape::small("kvfleet".into()) };
        std::fs::write(dir.path().join(FILE), r#"{"1":"127.0.0.1:25000","2":"127.0.0.1:25001"}"#).unwrap();
        let same = Shape { base_port: Some(25_000), ..shape.clone() };
        assert_eq!(router_addresses(&same, dir.path()).unwrap().len(), 2);
        let other = Shape { base_port: Some(25_001), ..shape };
        let message = router_addresses(&other, dir.path()).unwrap_err().to_string();
        let varying = dir.path().display().to_string();
        says("a data directory whose routers listen elsewhere", &message, &[&varying]);
    }

    #[test]
    fn a_choice_that_failed_is_taken_back_with_what_was_built_on_it() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape { routers: 2, ..Shape::small("kvfleet".into()) };
        assert!(!are_kept(dir.path()));
        router_addresses(&shape, dir.path()).unwrap();
        assert!(are_kept(dir.path()));
        std::fs::create_dir(dir.path().join("router-1")).unwrap();
        std::fs::create_dir(dir.path().join("node-1")).unwrap();
        forget(dir.path(), 2).unwrap();
        assert!(!are_kept(dir.path()) && !dir.path().join("router-1").exists());
        assert!(dir.path().join("node-1").exists(), "a node's data names no router");
    }
}
