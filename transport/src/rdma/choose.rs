//! Which port of which RDMA device is used, and by which of its addresses.
//!
//! What there is stands in files of the kernel, so that looking needs no library. Not here: opening (`verbs.rs`).

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use super::RdmaError;
use super::rail::Gid;

/// Where the kernel lists devices.
pub(super) const DEVICES: &str = "/sys/class/infiniband";

/// One address of one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) device: String,
    pub(super) port: u8,
    pub(super) gid_index: u8,
    pub(super) gid: Gid,
    /// Whether packets are UDP, which networks route, in contrast to bare Ethernet or InfiniBand.
    pub(super) is_routed: bool,
    pub(super) is_active: bool,
}

/// What the user wants; by default anything that works.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaChoice {
    /// The device's name, such as `mlx5_0`.
    pub device: Option<String>,
    /// The address of the port. An IPv4 address is that of its network interface.
    pub address: Option<IpAddr>,
}

impl Candidate {
    fn is_wanted(&self, choice: &RdmaChoice) -> bool {
        let device = choice.device.as_ref().is_none_or(|device| *device == self.device);
        let address = choice.address.is_none_or(|address| gid_of(address) == self.gid);
        device && address
    }

    /// The best is the least: routed before bare, addresses of interfaces before those that only a link knows.
    fn rank(&self) -> impl Ord + use<> {
        let address = Ipv6Addr::from(self.gid.0);
        let is_interface = address.to_ipv4_mapped().is_some();
        (Reverse(self.is_routed), Reverse(is_interface), address.is_unicast_link_local(), self.gid_index)
    }
}

/// The address as ports have it.
fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(address) => Gid(address.to_ipv6_mapped().octets()),
        IpAddr::V6(address) => Gid(address.octets()),
    }
}

/// The best of what is there and wanted. Among equals the first device by name.
pub(super) fn choose(found: &[Candidate], choice: &RdmaChoice) -> Result<Candidate, RdmaError> {
    let wanted = found.iter().filter(|candidate| candidate.is_active && candidate.is_wanted(choice));
    let best = wanted.min_by_key(|candidate| (candidate.rank(), candidate.device.clone(), candidate.port));
    best.cloned().ok_or_else(|| {
        let list = |candidate: &Candidate| {
            let state = if candidate.is_active { "" } else { " (not active)" };
            format!("{} port {} {:?}{state}", candidate.device, candidate.port, candidate.gid)
        };
        let there: Vec<String> = found.iter().map(list).collect();
        let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
        RdmaError::NoDevice { there }
    })
}

/// Every address of every port. What cannot be read is not there.
pub(super) fn look(devices: &Path) -> Vec<Candidate> {
    let mut found = Vec::new();
    for (device, folder) in entries(devices) {
        for (number, port) in entries(&folder.join("ports")) {
            let Ok(number) = number.parse::<u8>() else { continue };
            let is_active = text(&port.join("state")).is_some_and(|state| state.contains("ACTIVE"));
            for (index, file) in entries(&port.join("gids")) {
                let Ok(gid_index) = index.parse::<u8>() else { continue };
                let Some(gid) = text(&file).and_then(|text| text.parse::<Ipv6Addr>().ok()) else { continue };
                if gid.is_unspecified() {
                    continue;
                }
                let kind = text(&port.join("gid_attrs/types").join(&index)).unwrap_or_default();
                found.push(Candidate {
                    device: device.clone(),
                    port: number,
                    gid_index,
                    gid: Gid(gid.octets()),
                    is_routed: kind.contains("v2"),
                    is_active,
                });
            }
        }
    }
    found.sort_by_key(|candidate| (candidate.device.clone(), candidate.port, candidate.gid_index));
    found
}

/// Names and paths in a folder; nothing when there is none.
fn entries(folder: &Path) -> Vec<(String, std::path::PathBuf)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let named = |entry: std::fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
    entries.filter_map(Result::ok).filter_map(named).collect()
}

fn text(file: &Path) -> Option<String> {
    Some(std::fs::read_to_string(file).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn candidate(device: &str, gid_index: u8, gid: &str, is_routed: bool) -> Candidate {
        let gid = Gid(gid.parse::<Ipv6Addr>().unwrap().octets());
        Candidate { device: device.to_owned(), port: 1, gid_index, gid, is_routed, is_active: true }
    }

    fn found() -> Vec<Candidate> {
        vec![
            candidate("mlx5_0", 0, "fe80::1", false),
            candidate("mlx5_0", 1, "fe80::1", true),
            candidate("mlx5_0", 2, "::ffff:10.0.0.1", false),
            candidate("mlx5_0", 3, "::ffff:10.0.0.1", true),
            candidate("mlx5_1", 3, "::ffff:10.0.0.2", true),
        ]
    }

    fn chosen(found: &[Candidate], choice: &RdmaChoice) -> (String, u8) {
        let candidate = choose(found, choice).unwrap();
        (candidate.device, candidate.gid_index)
    }

    #[test]
    fn the_routed_address_of_an_interface_is_best_unless_another_is_wanted() {
        let anything = RdmaChoice::default();
        assert_eq!(chosen(&found(), &anything), ("mlx5_0".to_owned(), 3));
        assert_eq!(chosen(&found()[..3], &anything).1, 1, "routed before an interface's");
        let second = RdmaChoice { device: Some("mlx5_1".to_owned()), address: None };
        assert_eq!(chosen(&found(), &second), ("mlx5_1".to_owned(), 3));
        let address = RdmaChoice { device: None, address: Some("10.0.0.2".parse().unwrap()) };
        assert_eq!(chosen(&found(), &address).0, "mlx5_1");
    }

    #[test]
    fn who_wants_what_is_not_there_hears_what_is() {
        let mut found = found();
        found.truncate(1);
        found[0].is_active = false;
        let error = choose(&found, &RdmaChoice::default()).unwrap_err().to_string();
        assert!(error.contains("mlx5_0 port 1 fe80::1 (not active)"), "{error}");
        let error = choose(&[], &RdmaChoice::default()).unwrap_err();
        kvfleet_errors_doc::says("RDMA without a device", &error, &["none"]);
    }

    #[test]
    fn the_kernels_files_are_read() {
        let root = tempfile::tempdir().unwrap();
        let port = root.path().join("rxe0/ports/1");
        std::fs::create_dir_all(port.join("gids")).unwrap();
        std::fs::create_dir_all(port.join("gid_attrs/types")).unwrap();
        let put = |path: &str, text: &str| std::fs::write(port.join(path), text).unwrap();
        put("state", "4: ACTIVE\n");
        put("gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001\n");
        put("gids/1", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n");
        put("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        put("gids/nonsense", "x\n");
        put("gid_attrs/types/1", "RoCE v2\n");
        let found = look(root.path());
        let expected =
            [candidate("rxe0", 0, "fe80::1", false), candidate("rxe0", 1, "::ffff:10.77.0.1", true)];
        assert_eq!(found, expected);
        assert_eq!(look(&root.path().join("nothing")), []);
    }
}
