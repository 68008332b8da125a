//! What a node offers by RDMA: opens the devices once, at start, and goes on without when there is none.
//!
//! This file knows whether the program was built with RDMA, so that others need not. Not here: the keys
//! (`config/rdma.rs`), and the path itself (`kvfleet_transport::rdma`).

use std::net::SocketAddr;
use std::sync::Arc;

use kv_core::id::Epoch;
use kvfleet_proto::tls::Identity;
use kvfleet_transport::tcp::{BindError, TcpConfig, TcpServer};
use kvfleet_transport::{BlockService, Carried, Room};
use tokio::sync::watch;

use crate::arena::Arena;
use crate::config::NodeConfig;

/// What is offered to clients that come over TCP.
#[cfg(feature = "rdma")]
pub(crate) type Offer = Arc<kvfleet_transport::rdma::RdmaOffer>;

/// Nothing: a configuration that asks for it is refused.
#[cfg(not(feature = "rdma"))]
#[derive(Clone, Debug)]
pub(crate) enum Offer {}

/// Opens the devices and registers the arena on each, if it is to be read in place. Where none can be, the log says why and what to do,
/// and the node serves without.
#[cfg(feature = "rdma")]
pub(crate) async fn open(config: &NodeConfig, arena: &Arena) -> Option<Offer> {
    use kvfleet_transport::rdma::{Rdma, RdmaChoice, RdmaConfig, RdmaError, RdmaNear, RdmaOffer, RdmaTuning};
    let section = &config.rdma;
    if !section.enabled {
        return None;
    }
    let (device, devices) = (section.device.clone(), section.devices.clone());
    let near = RdmaNear::Memory(arena.address());
    let rdma = RdmaConfig {
        choice: RdmaChoice { device, devices, address: section.address, near },
        tuning: RdmaTuning { traffic_class: section.traffic_class, ..RdmaTuning::default() },
        tray_bytes: usize::try_from(section.tray_bytes).unwrap_or(usize::MAX),
        links_max: section.links_max as usize,
        ..RdmaConfig::default()
    };
    let lent = section.in_place.then(|| Arc::new(arena.as_device_memory()));
    let in_place = section.in_place;
    let opened = tokio::task::spawn_blocking(move || {
        let offer = RdmaOffer::over(&Rdma::open_all(&rdma)?, lent.as_ref())?;
        tracing::info!(?offer, in_place, "node offers RDMA");
        Ok::<_, RdmaError>(offer)
    });
    let told = |cause: &dyn std::fmt::Display| {
        tracing::warn!("{cause}; the node serves without, set rdma.enabled to false if it is to");
    };
    match opened.await {
        Ok(opened) => opened.inspect_err(|error| told(error)).ok(),
        Err(ended) => {
            told(&ended);
            None
        }
    }
}

/// Nothing, as nothing can be asked for.
#[cfg(not(feature = "rdma"))]
pub(crate) async fn open(_: &NodeConfig, _: &Arena) -> Option<Offer> {
    None
}

/// Tells those that read blocks of every epoch that the routers give, as long as anybody may.
#[cfg(feature = "rdma")]
pub(crate) async fn tell_epochs(offer: Offer, mut joined: watch::Receiver<Epoch>) {
    while joined.changed().await.is_ok() {
        offer.answered(*joined.borrow_and_update());
    }
}

/// Nothing, as there is no such offer.
#[cfg(not(feature = "rdma"))]
pub(crate) async fn tell_epochs(offer: Offer, _: watch::Receiver<Epoch>) {
    match offer {}
}

/// Listens for TCP, where the offer is made.
pub(crate) fn bind(
    (room, offer): (&Room, Option<&Offer>),
    address: SocketAddr,
    identity: &Identity,
    service: Arc<dyn BlockService>,
) -> Result<TcpServer, BindError> {
    let config = TcpConfig::default();
    match offer {
        #[cfg(feature = "rdma")]
        Some(offer) => TcpServer::bind_offering(room, address, identity, &config, Arc::clone(offer), service),
        #[cfg(not(feature = "rdma"))]
        Some(never) => match *never {},
        None => TcpServer::bind_in(room, address, identity, &config, service),
    }
}

/// What went by RDMA so far.
pub(crate) fn carried(offer: &Offer) -> Carried {
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
    async fn a_node_without_a_device_says_so_once_and_what_to_do() {
        let arena = Arena::new(ArenaShape::equal(4096, 4, 0)).unwrap();
        let device = Some("no such device".to_owned());
        let rdma = RdmaSection { enabled: true, in_place: true, device, ..RdmaSection::default() };
        let log = crate::test_log::Log::start();
        assert!(open(&NodeConfig { rdma, ..NodeConfig::default() }, &arena).await.is_none());
        assert!(open(&NodeConfig::default(), &arena).await.is_none(), "nobody asked");
        assert_eq!(log.count("RDMA is not used"), 1);
        let said = log.line("RDMA is not used");
        let there = said.split("there is: ").nth(1).and_then(|rest| rest.split("; bring").next()).unwrap();
        says("a node that is to offer RDMA without a device", &said, &[there]);
    }
}
