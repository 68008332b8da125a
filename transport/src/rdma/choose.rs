//! Which ports of which RDMA devices are used, and by which of their addresses.
//!
//! What there is stands in files of the kernel, so that looking needs no library. Not here: opening (`verbs.rs`).

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use super::RdmaError;
use super::rail::Gid;
use super::topology::{Distance, RdmaNear, Spot};

/// Where the kernel shows what there is.
pub(super) const SYS: &str = "/sys";

/// Where it lists devices of RDMA, under that.
const DEVICES: &str = "class/infiniband";

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
    /// How near it is to what is wanted.
    pub(super) distance: Distance,
}

/// In the place of names of devices: all there are.
const ALL: &str = "all";

/// What the user wants; by default the best that works.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaChoice {
    /// A device's name, such as `mlx5_0`: its best port is taken.
    pub device: Option<String>,
    /// Names of further devices: each port of all of them is a rail. `all` stands for every device. Nothing: one port is taken.
    pub devices: Vec<String>,
    /// The address of the port. An IPv4 address is that of its network interface.
    pub address: Option<IpAddr>,
    /// What devices are to be near to: of those that are equally good otherwise the nearest is best.
    pub near: RdmaNear,
}

impl Candidate {
    fn is_wanted(&self, choice: &RdmaChoice) -> bool {
        let is_named = |device: &String| *device == self.device || device == ALL;
        let mut named = choice.device.iter().chain(&choice.devices).peekable();
        let device = named.peek().is_none() || named.any(is_named);
        let address = choice.address.is_none_or(|address| gid_of(address) == self.gid);
        device && address
    }

    /// The best is the least: routed before bare, addresses of interfaces before those that only a link knows, near before far.
    fn rank(&self) -> impl Ord + use<> {
        let address = Ipv6Addr::from(self.gid.0);
        let is_interface = address.to_ipv4_mapped().is_some();
        (Reverse(self.is_routed), Reverse(is_interface), address.is_unicast_link_local())
    }
}

/// The address as ports have it.
fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(address) => Gid(address.to_ipv6_mapped().octets()),
        IpAddr::V6(address) => Gid(address.octets()),
    }
}

/// Devices that were named and of which no port was chosen.
pub(super) fn missing<'a>(chosen: &[Candidate], choice: &'a RdmaChoice) -> Vec<&'a str> {
    let named = choice.device.iter().chain(&choice.devices).map(String::as_str).filter(|name| *name != ALL);
    named.filter(|name| chosen.iter().all(|candidate| candidate.device != *name)).collect()
}

/// What is there and wanted, the best first; each port by its best address. One port, unless several devices are named. Among equals the
/// first device by name.
pub(super) fn choose(found: &[Candidate], choice: &RdmaChoice) -> Result<Vec<Candidate>, RdmaError> {
    let wanted = found.iter().filter(|candidate| candidate.is_active && candidate.is_wanted(choice));
    let mut wanted: Vec<&Candidate> = wanted.collect();
    let rank = |one: &&Candidate| (one.rank(), one.distance, one.device.clone(), one.port, one.gid_index);
    wanted.sort_by_cached_key(rank);
    let mut chosen: Vec<Candidate> = Vec::new();
    for candidate in wanted {
        let is_same = |other: &Candidate| (&other.device, other.port) == (&candidate.device, candidate.port);
        if !chosen.iter().any(is_same) {
            chosen.push(candidate.clone());
        }
    }
    if choice.devices.is_empty() {
        chosen.truncate(1);
    }
    if chosen.is_empty() {
        let list = |candidate: &Candidate| {
            let state = if candidate.is_active { "" } else { " (not active)" };
            format!("{} port {} {:?}{state}", candidate.device, candidate.port, candidate.gid)
        };
        let there: Vec<String> = found.iter().map(list).collect();
        let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
        return Err(RdmaError::NoDevice { there });
    }
    Ok(chosen)
}

/// Every address of every port. What cannot be read is not there.
pub(super) fn look(sys: &Path, near: &RdmaNear) -> Vec<Candidate> {
    let (mut found, near) = (Vec::new(), near.spot(sys));
    for (device, folder) in entries(&sys.join(DEVICES)) {
        let distance = Spot::of_device(&folder.join("device")).distance(&near);
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
                    distance,
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
    use std::os::unix::fs::symlink;

    use super::super::topology::tests::put_pci;
    use super::*;

    fn candidate(device: &str, gid_index: u8, gid: &str, is_routed: bool) -> Candidate {
        let gid = Gid(gid.parse::<Ipv6Addr>().unwrap().octets());
        let (device, distance) = (device.to_owned(), Distance::Unknown);
        Candidate { device, port: 1, gid_index, gid, is_routed, is_active: true, distance }
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
        let chosen = choose(found, choice).unwrap();
        assert_eq!(chosen.len(), 1);
        (chosen[0].device.clone(), chosen[0].gid_index)
    }

    fn named(devices: &[&str]) -> RdmaChoice {
        let devices = devices.iter().map(ToString::to_string).collect();
        RdmaChoice { devices, ..RdmaChoice::default() }
    }

    #[test]
    fn the_routed_address_of_an_interface_is_best_unless_another_is_wanted() {
        let anything = RdmaChoice::default();
        assert_eq!(chosen(&found(), &anything), ("mlx5_0".to_owned(), 3));
        assert_eq!(chosen(&found()[..3], &anything).1, 1, "routed before an interface's");
        let second = RdmaChoice { device: Some("mlx5_1".to_owned()), ..RdmaChoice::default() };
        assert_eq!(chosen(&found(), &second), ("mlx5_1".to_owned(), 3));
        let address = RdmaChoice { address: Some("10.0.0.2".parse().unwrap()), ..anything };
        assert_eq!(chosen(&found(), &address).0, "mlx5_1");
    }

    #[test]
    fn each_port_of_the_named_devices_is_a_rail() {
        let rails = |found: &[Candidate], devices: &[&str]| -> Vec<(String, u8, u8)> {
            let chosen = choose(found, &named(devices)).unwrap();
            chosen.iter().map(|rail| (rail.device.clone(), rail.port, rail.gid_index)).collect()
        };
        let mut found = found();
        let one = RdmaChoice { device: Some("mlx5_1".to_owned()), ..RdmaChoice::default() };
        let (first, second) = (("mlx5_0".to_owned(), 1, 3), ("mlx5_1".to_owned(), 1, 3));
        assert_eq!(rails(&found, &["all"]), [first.clone(), second.clone()]);
        assert_eq!(rails(&found, &["mlx5_1", "mlx5_0"]), [first.clone(), second.clone()]);
        assert_eq!(rails(&found, &["mlx5_1", "none of this name"]), std::slice::from_ref(&second));
        let some = named(&["mlx5_1", "none of this name", "all"]);
        assert_eq!(missing(&choose(&found, &some).unwrap(), &some), ["none of this name"]);
        found.push(Candidate { port: 2, ..found[4].clone() });
        assert_eq!(rails(&found, &["mlx5_1"]), [second.clone(), ("mlx5_1".to_owned(), 2, 3)]);
        assert_eq!(chosen(&found, &one).0, "mlx5_1");
        let both = RdmaChoice { device: one.device, ..named(&["mlx5_0"]) };
        assert_eq!(choose(&found, &both).unwrap().len(), 3);
        found[5].is_active = false;
        assert_eq!(rails(&found, &["all"]), [first, second], "a port that is down is left out");
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
        let found = look(root.path(), &RdmaNear::Process);
        let expected =
            [candidate("rxe0", 0, "fe80::1", false), candidate("rxe0", 1, "::ffff:10.77.0.1", true)];
        assert_eq!(found, expected);
        assert_eq!(look(&root.path().join("nothing"), &RdmaNear::Process), []);
    }

    /// A host with two processors, a card and a GPU at each, and a card that only has an address of its link beside the second GPU.
    #[test]
    fn of_equal_cards_the_nearest_is_best_and_rails_are_in_this_order() {
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
            std::fs::create_dir_all(sys.join(DEVICES)).unwrap();
            symlink(pci.join("infiniband").join(device), sys.join(DEVICES).join(device)).unwrap();
        };
        let (left, right) = (["pci0000:16", "0000:16:01.0"], ["pci0000:97", "0000:97:01.0"]);
        put("mlx5_0", &left, "0000:17:00.0", 0, "::ffff:10.0.0.1");
        put("mlx5_1", &right, "0000:98:00.0", 1, "::ffff:10.0.1.1");
        put("mlx5_2", &right, "0000:99:00.0", 1, "fe80::1");
        put_pci(sys, &right, "0000:9a:00.0", 1);
        let chosen = |devices: &[&str], near: RdmaNear| -> Vec<String> {
            let choice = RdmaChoice { near, ..named(devices) };
            let chosen = choose(&look(sys, &choice.near), &choice).unwrap();
            chosen.into_iter().map(|rail| rail.device).collect()
        };
        let gpu = || RdmaNear::Pci("0000:9a:00.0".to_owned());
        assert_eq!(chosen(&[], gpu()), ["mlx5_1"], "an address that others reach comes before being near");
        assert_eq!(chosen(&["all"], gpu()), ["mlx5_1", "mlx5_0", "mlx5_2"]);
        assert_eq!(chosen(&["mlx5_0"], gpu()), ["mlx5_0"], "what is named is taken");
        let nowhere = RdmaNear::Pci("0000:ff:00.0".to_owned());
        assert_eq!(chosen(&[], nowhere), ["mlx5_0"], "the first by name");
    }
}
