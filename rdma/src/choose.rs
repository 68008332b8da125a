//! Selects RDMA devices, ports, and the address of each port.
//!
//! All information comes from sysfs, so no library is needed. Not here: opening a device
//! (`verbs.rs`).

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use super::RdmaError;
use super::rail::Gid;
use super::topology::{Distance, HardwareLocation, RdmaAffinity};

/// Root of sysfs.
pub(super) const SYSFS_ROOT: &str = "/sys";

/// Folder of RDMA devices in sysfs.
const DEVICES_FOLDER: &str = "class/infiniband";

/// One address of one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GidCandidate {
    pub(super) device: String,
    pub(super) port: u8,
    pub(super) gid_index: u8,
    pub(super) gid: Gid,
    /// Whether packets are UDP, which networks route, in contrast to bare Ethernet or InfiniBand.
    pub(super) is_routed: bool,
    pub(super) is_active: bool,
    /// Distance to the configured affinity.
    pub(super) distance: Distance,
}

/// Stands for every device in the list of names.
const ALL_DEVICES: &str = "all";

/// Devices that the user selects; the default is the best usable one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaChoice {
    /// A device name, such as `mlx5_0`: its best port is used.
    pub device: Option<String>,
    /// Names of further devices: each of their ports is a rail. `all` stands for every device. If
    /// empty, one port is used.
    pub devices: Vec<String>,
    /// Address of the port. An IPv4 address is that of its network interface.
    pub address: Option<IpAddr>,
    /// Among otherwise equal devices, the nearest to this is best.
    pub affinity: RdmaAffinity,
}

impl GidCandidate {
    fn is_wanted(&self, choice: &RdmaChoice) -> bool {
        let is_named = |device: &String| *device == self.device || device == ALL_DEVICES;
        let mut named = choice.device.iter().chain(&choice.devices).peekable();
        let device = named.peek().is_none() || named.any(is_named);
        let address = choice.address.is_none_or(|address| gid_of(address) == self.gid);
        device && address
    }

    /// Smaller is better: routed before bare, and interface addresses before link-local ones.
    fn rank(&self) -> impl Ord + use<> {
        let address = Ipv6Addr::from(self.gid.0);
        let is_interface = address.to_ipv4_mapped().is_some();
        (Reverse(self.is_routed), Reverse(is_interface), address.is_unicast_link_local())
    }
}

/// The address in the form that ports use.
fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(address) => Gid(address.to_ipv6_mapped().octets()),
        IpAddr::V6(address) => Gid(address.octets()),
    }
}

/// Named devices without a chosen port.
pub(super) fn unmatched_devices<'a>(chosen: &[GidCandidate], choice: &'a RdmaChoice) -> Vec<&'a str> {
    let named =
        choice.device.iter().chain(&choice.devices).map(String::as_str).filter(|name| *name != ALL_DEVICES);
    named.filter(|name| chosen.iter().all(|candidate| candidate.device != *name)).collect()
}

/// Usable ports that match the choice, the best first, each with its best address. One port, unless
/// `devices` names several. Ties go to the first device by name.
pub(super) fn select_candidates(
    found: &[GidCandidate],
    choice: &RdmaChoice,
) -> Result<Vec<GidCandidate>, RdmaError> {
    let wanted = found.iter().filter(|candidate| candidate.is_active && candidate.is_wanted(choice));
    let mut wanted: Vec<&GidCandidate> = wanted.collect();
    let rank = |one: &&GidCandidate| (one.rank(), one.distance, one.device.clone(), one.port, one.gid_index);
    wanted.sort_by_cached_key(rank);
    let mut chosen: Vec<GidCandidate> = Vec::new();
    for candidate in wanted {
        let is_same =
            |other: &GidCandidate| (&other.device, other.port) == (&candidate.device, candidate.port);
        if !chosen.iter().any(is_same) {
            chosen.push(candidate.clone());
        }
    }
    if choice.devices.is_empty() {
        chosen.truncate(1);
    }
    if chosen.is_empty() {
        let list = |candidate: &GidCandidate| {
            let state = if candidate.is_active { "" } else { " (not active)" };
            format!("{} port {} {:?}{state}", candidate.device, candidate.port, candidate.gid)
        };
        let there: Vec<String> = found.iter().map(list).collect();
        let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
        return Err(RdmaError::NoDevice { there });
    }
    Ok(chosen)
}

/// Every address of every port. Unreadable entries are skipped.
pub(super) fn scan_devices(sys: &Path, near: &RdmaAffinity) -> Vec<GidCandidate> {
    let (mut found, near) = (Vec::new(), near.location(sys));
    for (device, folder) in entries(&sys.join(DEVICES_FOLDER)) {
        let distance = HardwareLocation::of_device(&folder.join("device")).distance(&near);
        for (number, port) in entries(&folder.join("ports")) {
            let Ok(number) = number.parse::<u8>() else { continue };
            let is_active = read_trimmed(&port.join("state")).is_some_and(|state| state.contains("ACTIVE"));
            for (index, file) in entries(&port.join("gids")) {
                let Ok(gid_index) = index.parse::<u8>() else { continue };
                let Some(gid) = read_trimmed(&file).and_then(|text| text.parse::<Ipv6Addr>().ok()) else {
                    continue;
                };
                if gid.is_unspecified() {
                    continue;
                }
                let kind = read_trimmed(&port.join("gid_attrs/types").join(&index)).unwrap_or_default();
                found.push(GidCandidate {
                    device: device.clone(),
                    port: number,
                    gid_index,
                    gid: Gid(gid.octets()),
                    is_routed: kind.contains("v2"),
                    is_active,
                    distance,
                });
            }
        }
    }
    found.sort_by_key(|candidate| (candidate.device.clone(), candidate.port, candidate.gid_index));
    found
}

/// Names and paths in a folder; empty if there is none.
fn entries(folder: &Path) -> Vec<(String, std::path::PathBuf)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let named = |entry: std::fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
    entries.filter_map(Result::ok).filter_map(named).collect()
}

fn read_trimmed(file: &Path) -> Option<String> {
    Some(std::fs::read_to_string(file).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::symlink;

    use super::super::topology::tests::put_pci;
    use super::*;

    fn candidate(device: &str, gid_index: u8, gid: &str, is_routed: bool) -> GidCandidate {
        let gid = Gid(gid.parse::<Ipv6Addr>().unwrap().octets());
        let (device, distance) = (device.to_owned(), Distance::Unknown);
        GidCandidate { device, port: 1, gid_index, gid, is_routed, is_active: true, distance }
    }

    fn found() -> Vec<GidCandidate> {
        vec![
            candidate("mlx5_0", 0, "fe80::1", false),
            candidate("mlx5_0", 1, "fe80::1", true),
            candidate("mlx5_0", 2, "::ffff:10.0.0.1", false),
            candidate("mlx5_0", 3, "::ffff:10.0.0.1", true),
            candidate("mlx5_1", 3, "::ffff:10.0.0.2", true),
        ]
    }

    fn chosen(found: &[GidCandidate], choice: &RdmaChoice) -> (String, u8) {
        let chosen = select_candidates(found, choice).unwrap();
        assert_eq!(chosen.len(), 1);
        (chosen[0].device.clone(), chosen[0].gid_index)
    }

    fn named(devices: &[&str]) -> RdmaChoice {
        let devices = devices.iter().map(ToString::to_string).collect();
        RdmaChoice { devices, ..RdmaChoice::default() }
    }

    #[test]
    fn the_routed_interface_address_is_best_by_default() {
        let anything = RdmaChoice::default();
        assert_eq!(chosen(&found(), &anything), ("mlx5_0".to_owned(), 3));
        assert_eq!(
            chosen(&found()[..3], &anything).1,
            1,
            "a routed address comes before an interface address"
        );
        let second = RdmaChoice { device: Some("mlx5_1".to_owned()), ..RdmaChoice::default() };
        assert_eq!(chosen(&found(), &second), ("mlx5_1".to_owned(), 3));
        let address = RdmaChoice { address: Some("10.0.0.2".parse().unwrap()), ..anything };
        assert_eq!(chosen(&found(), &address).0, "mlx5_1");
    }

    #[test]
    fn each_port_of_the_named_devices_is_a_rail() {
        let rails = |found: &[GidCandidate], devices: &[&str]| -> Vec<(String, u8, u8)> {
            let chosen = select_candidates(found, &named(devices)).unwrap();
            chosen.iter().map(|rail| (rail.device.clone(), rail.port, rail.gid_index)).collect()
        };
        let mut found = found();
        let one = RdmaChoice { device: Some("mlx5_1".to_owned()), ..RdmaChoice::default() };
        let (first, second) = (("mlx5_0".to_owned(), 1, 3), ("mlx5_1".to_owned(), 1, 3));
        assert_eq!(rails(&found, &["all"]), [first.clone(), second.clone()]);
        assert_eq!(rails(&found, &["mlx5_1", "mlx5_0"]), [first.clone(), second.clone()]);
        assert_eq!(rails(&found, &["mlx5_1", "none of this name"]), std::slice::from_ref(&second));
        let some = named(&["mlx5_1", "none of this name", "all"]);
        assert_eq!(
            unmatched_devices(&select_candidates(&found, &some).unwrap(), &some),
            ["none of this name"]
        );
        found.push(GidCandidate { port: 2, ..found[4].clone() });
        assert_eq!(rails(&found, &["mlx5_1"]), [second.clone(), ("mlx5_1".to_owned(), 2, 3)]);
        assert_eq!(chosen(&found, &one).0, "mlx5_1");
        let both = RdmaChoice { device: one.device, ..named(&["mlx5_0"]) };
        assert_eq!(select_candidates(&found, &both).unwrap().len(), 3);
        found[5].is_active = false;
        assert_eq!(rails(&found, &["all"]), [first, second], "a port that is down is skipped");
    }

    #[test]
    fn the_error_for_a_missing_device_lists_those_found() {
        let mut found = found();
        found.truncate(1);
        found[0].is_active = false;
        let error = select_candidates(&found, &RdmaChoice::default()).unwrap_err().to_string();
        assert!(error.contains("mlx5_0 port 1 fe80::1 (not active)"), "{error}");
        let error = select_candidates(&[], &RdmaChoice::default()).unwrap_err();
        kvfleet_errors_doc::says("RDMA without a device", &error, &["none"]);
    }

    #[test]
    fn sysfs_files_are_read() {
        let root = tempfile::tempdir().unwrap();
        let port = root.path().join("class/infiniband/rxe0/ports/1");
        std::fs::create_dir_all(port.join("gids")).unwrap();
        std::fs::create_dir_all(port.join("gid_attrs/types")).unwrap();
        let put = |path: &str, text: &str| std::fs::write(port.join(path), text).unwrap();
        put("state", "4: ACTIVE\n");
        put("gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001\n");
        put("gids/1", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n");
        put("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        put("gids/nonsense", "x\n");
        put("gid_attrs/types/1", "RoCE v2\n");
        let found = scan_devices(root.path(), &RdmaAffinity::Process);
        let expected =
            [candidate("rxe0", 0, "fe80::1", false), candidate("rxe0", 1, "::ffff:10.77.0.1", true)];
        assert_eq!(found, expected);
        assert_eq!(scan_devices(&root.path().join("nothing"), &RdmaAffinity::Process), []);
    }

    /// A host with two processors, a card and a GPU at each, and a card with only a link-local
    /// address beside the second GPU.
    #[test]
    fn equal_cards_are_ordered_by_distance() {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path();
        let put = |device: &str, bridges: &[&str], address: &str, numa, gid: &str| {
            let pci = put_pci(sys, bridges, address, numa);
            let port = pci.join("infiniband").join(device).join("ports/1");
            std::fs::create_dir_all(port.join("gids")).unwrap();
            std::fs::create_dir_all(port.join("gid_attrs/types")).unwrap();
            std::fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
            std::fs::write(port.join("gids/3"), gid).unwrap();
            std::fs::write(port.join("gid_attrs/types/3"), "RoCE v2\n").unwrap();
            symlink(&pci, pci.join("infiniband").join(device).join("device")).unwrap();
            std::fs::create_dir_all(sys.join(DEVICES_FOLDER)).unwrap();
            symlink(pci.join("infiniband").join(device), sys.join(DEVICES_FOLDER).join(device)).unwrap();
        };
        let (left, right) = (["pci0000:16", "0000:16:01.0"], ["pci0000:97", "0000:97:01.0"]);
        put("mlx5_0", &left, "0000:17:00.0", 0, "::ffff:10.0.0.1");
        put("mlx5_1", &right, "0000:98:00.0", 1, "::ffff:10.0.1.1");
        put("mlx5_2", &right, "0000:99:00.0", 1, "fe80::1");
        put_pci(sys, &right, "0000:9a:00.0", 1);
        let chosen = |devices: &[&str], near: RdmaAffinity| -> Vec<String> {
            let choice = RdmaChoice { affinity: near, ..named(devices) };
            let chosen = select_candidates(&scan_devices(sys, &choice.affinity), &choice).unwrap();
            chosen.into_iter().map(|rail| rail.device).collect()
        };
        let gpu = || RdmaAffinity::Pci("0000:9a:00.0".to_owned());
        assert_eq!(chosen(&[], gpu()), ["mlx5_1"], "a reachable address outweighs distance");
        assert_eq!(chosen(&["all"], gpu()), ["mlx5_1", "mlx5_0", "mlx5_2"]);
        assert_eq!(chosen(&["mlx5_0"], gpu()), ["mlx5_0"], "the named device is taken");
        let nowhere = RdmaAffinity::Pci("0000:ff:00.0".to_owned());
        assert_eq!(chosen(&[], nowhere), ["mlx5_0"], "the first by name");
    }
}
