//! Wire words of kvfleet: generated protobuf types, the block frame, conversions to and from the types
//! of `kv-core`, and what both ends need to trust each other and to trace a request.
//!
//! Not here: sockets, connections and streams (`transport/`, and the processes that serve or call).
//! This crate depends on `kv-core` and never the other way round: the pure types know of no wire.

pub mod accepting;
pub mod channel;
pub mod codec;
pub mod content;
pub mod convert;
pub mod engine_events;
pub mod envoy;
pub mod frame;
pub mod identity;
pub mod tls;
pub mod trace_context;
pub mod zmtp;

/// Control calls: router, node and stand-in instance (`kvfleet.v1`).
pub mod pb {
    #![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
    #![allow(clippy::unwrap_used)]
    tonic::include_proto!("kvfleet.v1");
}

/// Whether a server takes calls (`grpc.health.v1`).
pub mod health {
    #![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
    tonic::include_proto!("grpc.health.v1");
}

/// Messages of the block path (`kvfleet.data.v1`).
pub mod data {
    #![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
    tonic::include_proto!("kvfleet.data.v1");
}
