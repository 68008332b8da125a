//! The node's RDMA offer: opens the devices once at start; without a device the node serves without
//! RDMA.
//!
//! Only this file depends on the `rdma` feature. Not here: the configuration keys
//! (`config/rdma.rs`) and the transport (`kvfleet-rdma`).

use std::net::SocketAddr;
use std::sync::Arc;

use kv_core::id::Epoch;
use kvfleet_net::tls::Identity;
use kvfleet_transport::tcp::{TcpBindError, TcpConfig, TcpServer};
use kvfleet_transport::{BlockService, Capacity, TrafficCounters};
use tokio::sync::watch;

use crate::arena::Arena;
use crate::config::NodeConfig;

/// RDMA offered to clients that connect over TCP.
#[cfg(feature = "rdma")]
pub(crate) type RdmaOfferHandle = Arc<kvfleet_rdma::RdmaServer>;

/// Uninhabited: without the feature, the configuration refuses `rdma.enabled`.
#[cfg(not(feature = "rdma"))]
#[derive(Clone, Debug)]
pub(crate) enum NoRdmaOffer {}

#[cfg(not(feature = "rdma"))]
pub(crate) use NoRdmaOffer as RdmaOfferHandle;

/// Opens the devices, and registers the arena on each if it may be read in place. On failure, logs
/// the cause with a remedy, and the node serves without RDMA.
#[cfg(feature = "rdma")]
pub(crate) async fn open(config: &NodeConfig, arena: &Arena) -> Option<RdmaOfferHandle> {
    use kvfleet_rdma::{Rdma, RdmaAffinity, RdmaChoice, RdmaConfig, RdmaError, RdmaServer, RdmaTuning};
    let section = &config.rdma;
    if !section.enabled {
        return None;
    }
    let (device, devices) = (section.device.clone(), section.devices.clone());
    let near = RdmaAffinity::Memory(arena.address());
    let rdma = RdmaConfig {
        choice: RdmaChoice { device, devices, address: section.address, affinity: near },
        tuning: RdmaTuning { traffic_class: section.traffic_class, ..RdmaTuning::default() },
        bounce_buffer_bytes: usize::try_from(section.bounce_buffer_bytes).unwrap_or(usize::MAX),
        links_max: section.links_max as usize,
        ..RdmaConfig::default()
    };
    let lent = section.in_place.then(|| Arc::new(arena.as_device_memory()));
    let in_place = section.in_place;
    let opened = tokio::task::spawn_blocking(move || {
        let offer = RdmaServer::with_rails(&Rdma::open_all(&rdma)?, lent.as_ref())?;
        tracing::info!(?offer, in_place, "node offers RDMA");
        Ok::<_, RdmaError>(offer)
    });
    let warn = |cause: &dyn std::fmt::Display| {
        tracing::warn!(
            "{cause}; the node serves without RDMA; set rdma.enabled to false if that is intended"
        );
    };
    match opened.await {
        Ok(opened) => opened.inspect_err(|error| warn(error)).ok(),
        Err(ended) => {
            warn(&ended);
            None
        }
    }
}

/// Returns `None`: without the feature, RDMA cannot be enabled.
#[cfg(not(feature = "rdma"))]
pub(crate) async fn open(_: &NodeConfig, _: &Arena) -> Option<RdmaOfferHandle> {
    None
}

/// Publishes every epoch that the routers assign to RDMA readers.
#[cfg(feature = "rdma")]
pub(crate) async fn publish_epochs(offer: RdmaOfferHandle, mut joined: watch::Receiver<Epoch>) {
    while joined.changed().await.is_ok() {
        offer.set_epoch(*joined.borrow_and_update());
    }
}

/// Unreachable: without the feature there is no offer.
#[cfg(not(feature = "rdma"))]
pub(crate) async fn publish_epochs(offer: RdmaOfferHandle, _: watch::Receiver<Epoch>) {
    match offer {}
}

/// Listens for TCP, with the RDMA offer if there is one.
pub(crate) fn bind(
    room: &Capacity,
    offer: Option<&RdmaOfferHandle>,
    address: SocketAddr,
    identity: &Identity,
    service: Arc<dyn BlockService>,
) -> Result<TcpServer, TcpBindError> {
    let config = TcpConfig::default();
    match offer {
        #[cfg(feature = "rdma")]
        Some(offer) => TcpServer::bind_offering(room, address, identity, &config, offer.clone(), service),
        #[cfg(not(feature = "rdma"))]
        Some(never) => match *never {},
        None => TcpServer::bind_in(room, address, identity, &config, service),
    }
}

/// Bytes carried by RDMA so far.
pub(crate) fn carried(offer: &RdmaOfferHandle) -> TrafficCounters {
    #[cfg(feature = "rdma")]
    return offer.carried();
    #[cfg(not(feature = "rdma"))]
    match *offer {}
}

#[cfg(all(test, feature = "rdma"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;
    use crate::arena::ArenaShape;
    use crate::config::RdmaSection;

    #[tokio::test]
    async fn missing_device_is_logged_once_with_a_remedy() {
        let arena = Arena::new(ArenaShape::equal(4096, 4, 0)).unwrap();
        let device = Some("no such device".to_owned());
        let rdma = RdmaSection { enabled: true, in_place: true, device, ..RdmaSection::default() };
        let log = kvfleet_errors_doc::log::Log::start();
        assert!(open(&NodeConfig { rdma, ..NodeConfig::default() }, &arena).await.is_none());
        assert!(open(&NodeConfig::default(), &arena).await.is_none(), "RDMA was not enabled");
        assert_eq!(log.count("RDMA is not used"), 1);
        let said = log.line("RDMA is not used");
        let there = said.split("there is: ").nth(1).and_then(|rest| rest.split("; bring").next()).unwrap();
        says("a node that is to offer RDMA without a device", &said, &[there]);
    }
}
