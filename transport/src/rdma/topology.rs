//! How near a device is to what its bytes are for, by what the kernel says of the machine.
//!
//! A card reads memory of its own NUMA node without crossing the link between processors, and a GPU behind its own PCI switch
//! without reaching a processor at all. What nobody knows is neither near nor far. Not here: which device is taken (`choose.rs`).

use std::path::{Path, PathBuf};

/// Where the kernel shows devices, under its root.
const PCI_DEVICES: &str = "bus/pci/devices";

/// What devices are to be near to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RdmaNear {
    /// The memory that this process may have, if it is all of one NUMA node.
    #[default]
    Process,
    /// What lies at this address, if most of it is of one NUMA node.
    Memory(u64),
    /// A device by its PCI address, such as `0000:17:00.0`: a GPU.
    Pci(String),
}

/// Where something is in the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) numa: Option<u32>,
    /// Its host bridge, the bridges behind that, and itself last; nothing for what is on no bus.
    pub(super) pci: Vec<String>,
}

/// From near to far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Distance {
    /// Behind one switch.
    Switch,
    /// Behind one host bridge.
    Bridge,
    /// At one NUMA node.
    Node,
    /// Nobody knows.
    Unknown,
    /// At different NUMA nodes.
    Far,
}

impl Spot {
    pub(super) fn distance(&self, other: &Spot) -> Distance {
        let alike = self.pci.iter().zip(&other.pci).take_while(|(ours, theirs)| ours == theirs).count();
        match (alike, self.numa, other.numa) {
            (2.., ..) => Distance::Switch,
            (1, ..) => Distance::Bridge,
            (0, Some(ours), Some(theirs)) if ours == theirs => Distance::Node,
            (0, Some(_), Some(_)) => Distance::Far,
            (0, ..) => Distance::Unknown,
        }
    }

    /// Where the kernel shows that a device is, at this link to it.
    pub(super) fn of_device(link: &Path) -> Spot {
        let Ok(path) = link.canonicalize() else { return Spot::default() };
        let names = path.iter().map(|name| name.to_string_lossy().into_owned());
        let numa = std::fs::read_to_string(path.join("numa_node")).ok();
        Spot {
            // The kernel says -1 where the machine's tables say nothing.
            numa: numa.and_then(|text| text.trim().parse().ok()),
            pci: names.skip_while(|name| !name.starts_with("pci")).collect(),
        }
    }
}

impl RdmaNear {
    /// Where that is.
    pub(super) fn spot(&self, sys: &Path) -> Spot {
        let read =
            |file: &str| std::fs::read_to_string(PathBuf::from("/proc/self").join(file)).unwrap_or_default();
        let numa = match self {
            RdmaNear::Pci(address) => {
                return Spot::of_device(&sys.join(PCI_DEVICES).join(address.to_ascii_lowercase()));
            }
            RdmaNear::Process => only_node(&read("status")),
            RdmaNear::Memory(address) => node_at(&read("numa_maps"), *address),
        };
        Spot { numa, pci: Vec::new() }
    }
}

/// The one NUMA node of which the process may have memory; nothing when there are several.
fn only_node(status: &str) -> Option<u32> {
    let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
    list.trim().parse().ok()
}

/// The NUMA node of most of the pages of the mapping at an address; nothing when they are spread, or were never touched.
fn node_at(numa_maps: &str, address: u64) -> Option<u32> {
    let start = |line: &str| u64::from_str_radix(line.split(' ').next()?, 16).ok();
    let before = numa_maps.lines().filter(|line| start(line).is_some_and(|start| start <= address));
    let line = before.max_by_key(|line| start(line))?;
    let count = |word: &str| -> Option<(u32, u64)> {
        let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
        Some((node.parse().ok()?, pages.parse().ok()?))
    };
    let pages: Vec<(u32, u64)> = line.split(' ').filter_map(count).collect();
    let all = pages.iter().fold(0_u64, |all, (_, pages)| all.saturating_add(*pages));
    let (node, most) = pages.into_iter().max_by_key(|(_, pages)| *pages)?;
    (most > all / 4 * 3).then_some(node)
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::symlink;

    use super::*;

    /// Puts a device into a tree as the kernel's, behind these bridges, and a link to it under the address that it has there.
    pub(in super::super) fn put_pci(sys: &Path, bridges: &[&str], address: &str, numa: i32) -> PathBuf {
        let device = bridges.iter().fold(sys.join("devices"), |path, bridge| path.join(bridge)).join(address);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("numa_node"), format!("{numa}\n")).unwrap();
        std::fs::create_dir_all(sys.join(PCI_DEVICES)).unwrap();
        symlink(&device, sys.join(PCI_DEVICES).join(address)).unwrap();
        device
    }

    #[test]
    fn what_shares_more_of_the_way_is_nearer() {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path();
        let [first, second] = ["pci0000:16", "pci0000:64"];
        put_pci(sys, &[first, "0000:16:01.0", "0000:17:00.0"], "0000:18:00.0", 0);
        put_pci(sys, &[first, "0000:16:01.0", "0000:17:01.0"], "0000:19:00.0", 0);
        put_pci(sys, &[first, "0000:16:02.0"], "0000:1a:00.0", 0);
        put_pci(sys, &[second, "0000:64:01.0"], "0000:65:00.0", 0);
        put_pci(sys, &["pci0000:97", "0000:97:01.0"], "0000:98:00.0", 1);
        put_pci(sys, &["pci0000:c9", "0000:c9:01.0"], "0000:ca:00.0", -1);
        let spot = |address: &str| RdmaNear::Pci(address.to_owned()).spot(sys);
        let gpu = spot("0000:18:00.0");
        assert_eq!(gpu.pci, [first, "0000:16:01.0", "0000:17:00.0", "0000:18:00.0"]);
        let far = |address: &str| gpu.distance(&spot(address));
        let found = ["0000:19:00.0", "0000:1A:00.0", "0000:65:00.0", "0000:ca:00.0", "0000:98:00.0"].map(far);
        let expected = [Distance::Switch, Distance::Bridge, Distance::Node, Distance::Unknown, Distance::Far];
        assert_eq!(found, expected);
        assert!(expected.is_sorted());
        assert_eq!(far("0000:ff:00.0"), Distance::Unknown, "there is none");
        let memory = Spot { numa: Some(1), pci: Vec::new() };
        assert_eq!(
            [memory.distance(&gpu), memory.distance(&spot("0000:98:00.0"))],
            [Distance::Far, Distance::Node]
        );
        assert_eq!(Spot::default().distance(&gpu), Distance::Unknown);
    }

    #[test]
    fn the_node_of_memory_is_where_most_of_it_is() {
        let maps = "1000 default heap anon=3 N0=3\n\
                    7f0000000000 default anon=100 dirty=100 active=0 N0=10 N1=90 kernelpagesize_kB=4\n\
                    7f0000800000 interleave:0-1 anon=100 N0=50 N1=50\n\
                    7f0001000000 default\n\
                    nonsense N0=x N=1";
        let at = |address| node_at(maps, address);
        assert_eq!([at(0x1000), at(0x7f00_0000_0000), at(0x7f00_0070_0000)], [Some(0), Some(1), Some(1)]);
        assert_eq!(
            [at(0x7f00_0080_0000), at(0x7f00_0100_0000), at(0xFFF)],
            [None; 3],
            "spread, untouched, nowhere"
        );
        assert_eq!(node_at("", 1), None);
    }

    #[test]
    fn a_process_that_may_have_memory_of_one_node_is_there() {
        let status = |list: &str| {
            only_node(&format!("Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{list}\nVm: 1\n"))
        };
        assert_eq!([status("1"), status("0-1"), status("0,2"), only_node("")], [Some(1), None, None, None]);
    }
}
