//! Ports of the routers. They must be known before the first router starts, because each
//! configuration lists all routers. Other processes bind free ports and report them.

use std::collections::BTreeMap;
use std::net::{TcpListener, UdpSocket};
use std::path::Path;

use super::process_name;
use super::shape::ClusterShape;
use crate::process::Role;

/// Ports are below the ephemeral range, so that outgoing connections never take a router's port
/// during its restart.
const PORT_MIN: u16 = 20_000;

/// End of the range, exclusive.
const PORT_END: u16 = 32_000;

/// File in the data directory that stores the choice, so that persistent Raft data stays valid.
const FILE: &str = "routers.json";

/// Addresses by router number: stored ones, those from `base_port`, or free ones.
pub(super) fn router_addresses(
    shape: &ClusterShape,
    directory: &Path,
) -> anyhow::Result<BTreeMap<u64, String>> {
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

/// Whether the data directory has stored addresses, or Raft data of an earlier start.
pub(super) fn has_kept_addresses(directory: &Path) -> bool {
    directory.join(FILE).exists() || directory.join(process_name((Role::Router, 1))).exists()
}

/// Discards the stored choice of a failed start, and the Raft data that names its voters by it.
/// Only for a directory without stored addresses before that start.
pub(super) fn discard_choice(directory: &Path, routers: u32) -> std::io::Result<()> {
    let gone = |removed: std::io::Result<()>| match removed {
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => Err(cause),
        _ => Ok(()),
    };
    for number in 1..=u64::from(routers) {
        gone(std::fs::remove_dir_all(directory.join(process_name((Role::Router, number)))))?;
    }
    gone(std::fs::remove_file(directory.join(FILE)))
}

fn read_kept(file: &Path) -> anyhow::Result<Option<BTreeMap<u64, String>>> {
    match std::fs::read_to_string(file) {
        Ok(text) => serde_json::from_str(&text).map(Some).map_err(|cause| {
            anyhow::anyhow!("{}: {cause}; remove the data directory to start over", file.display())
        }),
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(anyhow::anyhow!("cannot read {}: {cause}", file.display())),
    }
}

fn check_kept(
    kept: BTreeMap<u64, String>,
    shape: &ClusterShape,
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
            "{} holds the data of routers from {first} on, --base-port says {base}: leave out --base-port, \
             or use another --data-dir",
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
                "port {port} of router {} is in use: choose another --base-port, or stop the process that uses it",
                offset + 1
            )
        })
        .collect()
}

/// Free ports that differ from the routers' ports, on which no router listens yet.
pub(super) fn free_engine_ports(routers: &BTreeMap<u64, String>, count: u32) -> anyhow::Result<Vec<u16>> {
    let is_a_routers = |port: &u16| routers.values().any(|address| address.ends_with(&format!(":{port}")));
    let more = count.saturating_add(u32::try_from(routers.len()).unwrap_or(u32::MAX));
    let free = free_ports(more)?;
    Ok(free.into_iter().filter(|port| !is_a_routers(port)).take(count as usize).collect())
}

fn free_ports(count: u32) -> anyhow::Result<Vec<u16>> {
    let range = u32::from(PORT_END - PORT_MIN);
    // A start position by process id, so that two clusters rarely compete.
    let start = std::process::id().wrapping_mul(7919) % range;
    let candidates =
        (0..range).map(|step| PORT_MIN + u16::try_from((start + step) % range).unwrap_or_default());
    let free: Vec<u16> = candidates.filter(|&port| is_free(port)).take(count as usize).collect();
    if free.len() == count as usize {
        return Ok(free);
    }
    anyhow::bail!(
        "no {count} free ports from {PORT_MIN} to {PORT_END}: stop the processes that use them, or give --base-port"
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
    fn names_a_taken_port() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = from_base(port, 1).unwrap_err();
        says("a port in use, of a router of `up`", &error, &[&port.to_string()]);
    }

    #[test]
    fn refuses_ports_beyond_the_last() {
        says("a base port too near the last one", &from_base(65_535, 2).unwrap_err(), &[]);
    }

    #[test]
    fn keeps_chosen_ports() {
        let dir = tempfile::tempdir().unwrap();
        let shape = ClusterShape { routers: 3, ..ClusterShape::small("kvfleet".into()) };
        let first = router_addresses(&shape, dir.path()).unwrap();
        assert_eq!(first.len(), 3);
        assert_eq!(router_addresses(&shape, dir.path()).unwrap(), first);
        let other = ClusterShape { routers: 5, ..shape };
        let error = router_addresses(&other, dir.path()).unwrap_err();
        let here = dir.path().display().to_string();
        says("data of another number of routers", &error, &[&here]);
    }

    #[test]
    fn refuses_a_different_base_port() {
        let dir = tempfile::tempdir().unwrap();
        let shape = ClusterShape { routers: 2, ..ClusterShape::small("kvfleet".into()) };
        std::fs::write(dir.path().join(FILE), r#"{"1":"127.0.0.1:25000","2":"127.0.0.1:25001"}"#).unwrap();
        let same = ClusterShape { base_port: Some(25_000), ..shape.clone() };
        assert_eq!(router_addresses(&same, dir.path()).unwrap().len(), 2);
        let other = ClusterShape { base_port: Some(25_001), ..shape };
        let message = router_addresses(&other, dir.path()).unwrap_err().to_string();
        let varying = dir.path().display().to_string();
        says("a data directory whose routers listen elsewhere", &message, &[&varying]);
    }

    #[test]
    fn discards_a_failed_choice() {
        let dir = tempfile::tempdir().unwrap();
        let shape = ClusterShape { routers: 2, ..ClusterShape::small("kvfleet".into()) };
        assert!(!has_kept_addresses(dir.path()));
        router_addresses(&shape, dir.path()).unwrap();
        assert!(has_kept_addresses(dir.path()));
        std::fs::create_dir(dir.path().join("router-1")).unwrap();
        std::fs::create_dir(dir.path().join("node-1")).unwrap();
        discard_choice(dir.path(), 2).unwrap();
        assert!(!has_kept_addresses(dir.path()) && !dir.path().join("router-1").exists());
        assert!(dir.path().join("node-1").exists(), "node data contains no router addresses");
    }
}
