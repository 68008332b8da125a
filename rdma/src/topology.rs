//! Distance between a device and the user of its bytes, from the kernel's description of the
//! machine.
//!
//! A card reads memory of its own NUMA node without crossing the link between processors. It reads
//! a GPU behind its own PCI switch without reaching a processor. An unknown distance is neither
//! near nor far. Not here: the choice of the device (`choose.rs`).

use std::path::{Path, PathBuf};

/// Folder of PCI devices in sysfs.
const PCI_DEVICES: &str = "bus/pci/devices";

/// What the chosen devices should be close to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RdmaAffinity {
    /// This process's memory, if it is limited to one NUMA node.
    #[default]
    Process,
    /// The memory at this address, if most of it is on one NUMA node.
    Memory(u64),
    /// A device by its PCI address, such as `0000:17:00.0`: a GPU.
    Pci(String),
}

/// Location of a device or of memory in the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HardwareLocation {
    pub(super) numa: Option<u32>,
    /// Its host bridge, the bridges behind that, and the device itself last; empty if it is on no
    /// bus.
    pub(super) pci: Vec<String>,
}

/// Ordered from near to far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Distance {
    /// Behind one PCI switch.
    SameSwitch,
    /// Behind one host bridge.
    SameHostBridge,
    /// On one NUMA node.
    SameNumaNode,
    /// Not known.
    Unknown,
    /// On different NUMA nodes.
    OtherNumaNode,
}

impl HardwareLocation {
    pub(super) fn distance(&self, other: &HardwareLocation) -> Distance {
        let alike = self.pci.iter().zip(&other.pci).take_while(|(ours, theirs)| ours == theirs).count();
        match (alike, self.numa, other.numa) {
            (2.., ..) => Distance::SameSwitch,
            (1, ..) => Distance::SameHostBridge,
            (0, Some(ours), Some(theirs)) if ours == theirs => Distance::SameNumaNode,
            (0, Some(_), Some(_)) => Distance::OtherNumaNode,
            (0, ..) => Distance::Unknown,
        }
    }

    /// Location of the device that this sysfs link points to.
    pub(super) fn of_device(link: &Path) -> HardwareLocation {
        let Ok(path) = link.canonicalize() else { return HardwareLocation::default() };
        let names = path.iter().map(|name| name.to_string_lossy().into_owned());
        let numa = std::fs::read_to_string(path.join("numa_node")).ok();
        HardwareLocation {
            // The kernel reports -1 if the firmware tables have no entry.
            numa: numa.and_then(|text| text.trim().parse().ok()),
            pci: names.skip_while(|name| !name.starts_with("pci")).collect(),
        }
    }
}

impl RdmaAffinity {
    /// Its location.
    pub(super) fn location(&self, sys: &Path) -> HardwareLocation {
        let read =
            |file: &str| std::fs::read_to_string(PathBuf::from("/proc/self").join(file)).unwrap_or_default();
        let numa = match self {
            RdmaAffinity::Pci(address) => {
                return HardwareLocation::of_device(
                    &sys.join(PCI_DEVICES).join(address.to_ascii_lowercase()),
                );
            }
            RdmaAffinity::Process => sole_numa_node(&read("status")),
            RdmaAffinity::Memory(address) => numa_node_at(&read("numa_maps"), *address),
        };
        HardwareLocation { numa, pci: Vec::new() }
    }
}

/// The only NUMA node that the process may allocate from; `None` if there are several.
fn sole_numa_node(status: &str) -> Option<u32> {
    let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
    list.trim().parse().ok()
}

/// The NUMA node of most pages of the mapping at an address; `None` if they are spread or were
/// never touched.
fn numa_node_at(numa_maps: &str, address: u64) -> Option<u32> {
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

    /// Creates a device in a sysfs-like tree behind these bridges, with a link under its PCI
    /// address.
    pub(in super::super) fn put_pci(sys: &Path, bridges: &[&str], address: &str, numa: i32) -> PathBuf {
        let device = bridges.iter().fold(sys.join("devices"), |path, bridge| path.join(bridge)).join(address);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("numa_node"), format!("{numa}\n")).unwrap();
        std::fs::create_dir_all(sys.join(PCI_DEVICES)).unwrap();
        symlink(&device, sys.join(PCI_DEVICES).join(address)).unwrap();
        device
    }

    #[test]
    fn a_longer_shared_bus_path_is_nearer() {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path();
        let [first, second] = ["pci0000:16", "pci0000:64"];
        put_pci(sys, &[first, "0000:16:01.0", "0000:17:00.0"], "0000:18:00.0", 0);
        put_pci(sys, &[first, "0000:16:01.0", "0000:17:01.0"], "0000:19:00.0", 0);
        put_pci(sys, &[first, "0000:16:02.0"], "0000:1a:00.0", 0);
        put_pci(sys, &[second, "0000:64:01.0"], "0000:65:00.0", 0);
        put_pci(sys, &["pci0000:97", "0000:97:01.0"], "0000:98:00.0", 1);
        put_pci(sys, &["pci0000:c9", "0000:c9:01.0"], "0000:ca:00.0", -1);
        let spot = |address: &str| RdmaAffinity::Pci(address.to_owned()).location(sys);
        let gpu = spot("0000:18:00.0");
        assert_eq!(gpu.pci, [first, "0000:16:01.0", "0000:17:00.0", "0000:18:00.0"]);
        let far = |address: &str| gpu.distance(&spot(address));
        let found = ["0000:19:00.0", "0000:1A:00.0", "0000:65:00.0", "0000:ca:00.0", "0000:98:00.0"].map(far);
        let expected = [
            Distance::SameSwitch,
            Distance::SameHostBridge,
            Distance::SameNumaNode,
            Distance::Unknown,
            Distance::OtherNumaNode,
        ];
        assert_eq!(found, expected);
        assert!(expected.is_sorted());
        assert_eq!(far("0000:ff:00.0"), Distance::Unknown, "there is no such device");
        let memory = HardwareLocation { numa: Some(1), pci: Vec::new() };
        assert_eq!(
            [memory.distance(&gpu), memory.distance(&spot("0000:98:00.0"))],
            [Distance::OtherNumaNode, Distance::SameNumaNode]
        );
        assert_eq!(HardwareLocation::default().distance(&gpu), Distance::Unknown);
    }

    #[test]
    fn memory_belongs_to_the_node_of_most_of_its_pages() {
        let maps = "1000 default heap anon=3 N0=3\n\
                    7f0000000000 default anon=100 dirty=100 active=0 N0=10 N1=90 kernelpagesize_kB=4\n\
                    7f0000800000 interleave:0-1 anon=100 N0=50 N1=50\n\
                    7f0001000000 default\n\
                    nonsense N0=x N=1";
        let at = |address| numa_node_at(maps, address);
        assert_eq!([at(0x1000), at(0x7f00_0000_0000), at(0x7f00_0070_0000)], [Some(0), Some(1), Some(1)]);
        assert_eq!(
            [at(0x7f00_0080_0000), at(0x7f00_0100_0000), at(0xFFF)],
            [None; 3],
            "spread, untouched, nowhere"
        );
        assert_eq!(numa_node_at("", 1), None);
    }

    #[test]
    fn a_process_limited_to_one_node_is_located_there() {
        let status = |list: &str| {
            sole_numa_node(&format!("Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{list}\nVm: 1\n"))
        };
        assert_eq!(
            [status("1"), status("0-1"), status("0,2"), sole_numa_node("")],
            [Some(1), None, None, None]
        );
    }
}
