//! Keys of what a node offers by RDMA.
//!
//! Not here: whether there is a device (`crate::rdma` finds out at start, and a node without one serves all the same).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{ConfigError, NodeConfig, wrong};

/// What queue pairs and their buffers take beside a connection's tray, in bytes, generously.
const LINK_BYTES: u64 = 256 << 10;

/// One-sided reads and writes by network cards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RdmaSection {
    /// Whether it is offered to clients that come over TCP. Needs a build with the feature `rdma`. A node that finds no device
    /// says so and serves without.
    pub enabled: bool,
    /// The device's name, such as `mlx5_0`; the best there is when nothing is said.
    pub device: Option<String>,
    /// Further devices: each port of all of them is a rail; `all` for every device there is. Clients use the rails side by side, and
    /// another where one fails.
    pub devices: Vec<String>,
    /// The address of the device's port; for an IPv4 address, that of its network interface.
    pub address: Option<IpAddr>,
    /// Whether clients read blocks where they lie. Their cards may then read all of the DRAM tier, free places too, whoever's
    /// blocks lie there: for clusters all of whose own certificates may read every tenant's blocks. Otherwise they get copies, as do
    /// those whose certificates name tenants.
    pub in_place: bool,
    /// Memory of each client's connection for copies and saves, in bytes.
    pub tray_bytes: u64,
    /// Connections that have such memory at once; a client has up to four, or two for each pair of rails if that is more. What comes
    /// beyond is served over TCP.
    pub links_max: u32,
    /// Class of the packets, by which networks without loss know them.
    pub traffic_class: u8,
}

impl Default for RdmaSection {
    fn default() -> RdmaSection {
        RdmaSection {
            enabled: false,
            device: None,
            devices: Vec::new(),
            address: None,
            in_place: false,
            tray_bytes: 16 << 20,
            links_max: 64,
            traffic_class: 0,
        }
    }
}

impl RdmaSection {
    /// Bytes of trays at most, with what goes with them.
    pub(crate) fn memory_bytes_max(&self) -> u64 {
        let one = self.tray_bytes.saturating_add(LINK_BYTES);
        if self.enabled { one.saturating_mul(self.links_max.into()) } else { 0 }
    }
}

impl NodeConfig {
    pub(super) fn validate_rdma(&self) -> Result<(), ConfigError> {
        self.validate_rdma_where(cfg!(feature = "rdma"))
    }

    fn validate_rdma_where(&self, is_built: bool) -> Result<(), ConfigError> {
        if !self.rdma.enabled {
            return Ok(());
        }
        if !is_built {
            let remedy = "this program was built without RDMA: build it with --features rdma, or give false";
            return wrong("rdma.enabled", &true, remedy.to_owned());
        }
        self.validate_rdma_values()
    }

    fn validate_rdma_values(&self) -> Result<(), ConfigError> {
        if !self.data_tcp {
            let remedy = "clients ask for RDMA over TCP: set data_tcp to true, or give false here";
            return wrong("rdma.enabled", &true, remedy.to_owned());
        }
        let one = self.frame_bytes_max() as u64;
        if self.rdma.tray_bytes < one {
            let remedy = format!("one block must fit, give at least {one}");
            return wrong("rdma.tray_bytes", &self.rdma.tray_bytes, remedy);
        }
        if self.rdma.links_max == 0 {
            let remedy = "give at least 1, or set rdma.enabled to false".to_owned();
            return wrong("rdma.links_max", &0, remedy);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    fn offering(change: impl FnOnce(&mut NodeConfig)) -> NodeConfig {
        let rdma = RdmaSection { enabled: true, ..RdmaSection::default() };
        let mut config = NodeConfig { rdma, ..NodeConfig::default() };
        change(&mut config);
        config
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refused = |change: fn(&mut NodeConfig)| offering(change).validate_rdma_values().unwrap_err();
        says("a node: rdma.enabled without TCP", &refused(|config| config.data_tcp = false), &[]);
        says("a node: rdma.tray_bytes", &refused(|config| config.rdma.tray_bytes = 1 << 20), &[]);
        says("a node: rdma.links_max", &refused(|config| config.rdma.links_max = 0), &[]);
        assert_eq!(offering(|_| {}).validate_rdma_values(), Ok(()));
        let off = offering(|config| {
            config.rdma.enabled = false;
            config.rdma.links_max = 0;
        });
        assert_eq!(off.validate(), Ok(()), "what is not used may be anything");
    }

    #[test]
    fn a_build_without_rdma_says_what_to_do() {
        let refused = offering(|_| {}).validate_rdma_where(false).unwrap_err();
        says("a node: rdma.enabled, in a build without RDMA", &refused, &[]);
    }
}
