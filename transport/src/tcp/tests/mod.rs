//! The suite over TLS on TCP, and tests of its own parts: certificates, hostile bytes, the pool,
//! limits, lost peers.
#![allow(clippy::unwrap_used)]

mod callers;
mod hostile;
mod lost;
mod pooled;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use kvfleet_errors_doc::says;
use kvfleet_net::tls::Identity;
use tokio::net::TcpStream;

use super::buffers::BufferSize;
use super::stream::{StreamShared, TlsStream};
use super::*;
use crate::quic::tests::TestAuthority;
use crate::suite::{
    self, MemoryService, PATIENCE, SuitePath, fetch_request, frame, hash, hashes, in_dram, save_request,
};
use crate::{BlockService, Dialer, FetchAnswer, MissReason, PathError, behaviour_suite};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Long enough that no test outcome depends on it.
const LONG: Duration = Duration::from_secs(3600);

async fn pair(service: Arc<dyn BlockService>) -> SuitePath {
    let authority = TestAuthority::new();
    let server = TcpServer::bind(ANY, &authority.member(), service).unwrap();
    let dialer = TcpDialer::new(&authority.member(), TcpConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    SuitePath { path, keep: Box::new((server, dialer)) }
}

behaviour_suite!(pair);
behaviour_suite!(
    pair; MemoryService::default(); layers_come_one_after_the_other, slices_leave_before_the_last_layer,
    leases_in_use_are_renewed,
);

fn holding(blocks: u32) -> Arc<MemoryService> {
    let service = MemoryService::default();
    (0..blocks).for_each(|number| service.hold(frame(hash(number), 4000)));
    Arc::new(service)
}
