//! Configuration keys of the node's RDMA offer.
//!
//! Not here: device discovery (`crate::rdma` opens the devices at start; a node without one serves
//! without RDMA).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{ConfigError, NodeConfig, wrong};

/// Memory of queue pairs and their buffers beside a connection's bounce buffer, in bytes, rounded
/// up.
const LINK_BYTES: u64 = 256 << 10;

/// One-sided reads and writes by network cards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RdmaSection {
    /// Whether RDMA is offered to clients that connect over TCP. Needs a build with the feature
    /// `rdma`. A node without a device logs that and serves without RDMA.
    pub enabled: bool,
    /// Device name, such as `mlx5_0`; by default the best one.
    pub device: Option<String>,
    /// Further devices; `all` for every device. Each port of each device is a rail. Clients use the
    /// rails in parallel, and another one if a rail fails.
    pub devices: Vec<String>,
    /// Address of the device's port; for an IPv4 address, that of its network interface.
    pub address: Option<IpAddr>,
    /// Whether clients read blocks in place. Their network cards can then read the whole DRAM tier,
    /// including every tenant's blocks and free slots. Enable it only if every cluster certificate
    /// may read all tenants' blocks. Otherwise clients receive copies, as do clients with tenant
    /// certificates.
    pub in_place: bool,
    /// Bounce buffer of each client connection for copies and saves, in bytes.
    pub bounce_buffer_bytes: u64,
    /// Maximum connections with a bounce buffer. A client opens up to four, or two for each pair of
    /// rails if that is more. Further connections are served over TCP.
    pub links_max: u32,
    /// Traffic class of the packets. Lossless networks classify them by it.
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
            bounce_buffer_bytes: 16 << 20,
            links_max: 64,
            traffic_class: 0,
        }
    }
}

impl RdmaSection {
    /// Maximum bytes of bounce buffers, with their queue pairs.
    pub(crate) fn memory_bytes_max(&self) -> u64 {
        let one = self.bounce_buffer_bytes.saturating_add(LINK_BYTES);
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
        if self.rdma.bounce_buffer_bytes < one {
            let remedy = format!("one block must fit, give at least {one}");
            return wrong("rdma.bounce_buffer_bytes", &self.rdma.bounce_buffer_bytes, remedy);
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
    fn invalid_values_are_refused() {
        let refused = |change: fn(&mut NodeConfig)| offering(change).validate_rdma_values().unwrap_err();
        says("a node: rdma.enabled without TCP", &refused(|config| config.data_tcp = false), &[]);
        says(
            "a node: rdma.bounce_buffer_bytes",
            &refused(|config| config.rdma.bounce_buffer_bytes = 1 << 20),
            &[],
        );
        says("a node: rdma.links_max", &refused(|config| config.rdma.links_max = 0), &[]);
        assert_eq!(offering(|_| {}).validate_rdma_values(), Ok(()));
        let off = offering(|config| {
            config.rdma.enabled = false;
            config.rdma.links_max = 0;
        });
        assert_eq!(off.validate(), Ok(()), "values of a disabled section are not validated");
    }

    #[test]
    fn build_without_rdma_names_the_remedy() {
        let refused = offering(|_| {}).validate_rdma_where(false).unwrap_err();
        says("a node: rdma.enabled, in a build without RDMA", &refused, &[]);
    }
}
