//! Control messages about memory and queue pairs, encoded and decoded. Everything that a peer may
//! send is validated here.
//!
//! Not here: when messages are sent (`link.rs`, `server.rs`, `fetch_server.rs`, `save_server.rs`).

use std::net::{Ipv4Addr, Ipv6Addr};

use bytes::{Buf, BufMut};
use kv_core::id::GrantId;
use kv_core::lease_grant::{GrantDescriptor, GrantMemory};
use kvfleet_proto::data;
use kvfleet_transport::MissReason;

use super::rail::{Gid, QueuePairAddress, RailPort};

/// Version of the upgraded connection's protocol.
pub(super) const VERSION: u32 = 1;

/// Bytes of a row of [`data::ReadGrants`].
pub(super) const ROW_BYTES: usize = 24;

/// Largest 24-bit value: the limit of packet sequence numbers and queue pair numbers.
pub(super) const U24_MAX: u32 = (1 << 24) - 1;

/// Value of the epoch word once the node revokes every grant. No epoch has this value.
pub(super) const REVOKED: u64 = u64::MAX;

/// Numbers of `Attached.outcome`.
pub(super) mod outcome {
    pub(in super::super) const ATTACHED: u32 = 1;
    pub(in super::super) const BUSY: u32 = 2;
    pub(in super::super) const OFFERED: u32 = 4;
    pub(in super::super) const REFUSED: u32 = kvfleet_transport::upgrade::UPGRADE_REFUSED;
}

/// A value that no peer of this protocol sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {said}, which is not a valid value")]
pub(super) struct MalformedMessage {
    field: &'static str,
    said: u64,
}

impl MalformedMessage {
    pub(super) fn new(field: &'static str, said: impl Into<u64>) -> MalformedMessage {
        MalformedMessage { field, said: said.into() }
    }
}

/// A part of the node's memory that the client may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteWindow {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) key: u32,
}

/// This end's queue pair address, as sent to the peer.
pub(super) fn address_to_pb(port: &RailPort, queue: u32, packet: u32) -> data::QueuePairInfo {
    let gid = port.gid.0.to_vec();
    let (lid, mtu, reads) = (port.lid.into(), port.mtu.into(), port.max_reads.into());
    data::QueuePairInfo { gid, lid, mtu, queue, packet, reads }
}

/// Whether a port can have this address. Packets to other addresses would reach parties that sent
/// no request.
fn is_port_address(gid: Ipv6Addr) -> bool {
    let is_no_ipv4 = |address: Ipv4Addr| {
        address.is_unspecified() || address.is_multicast() || address.is_broadcast() || address.is_loopback()
    };
    let is_none = gid.is_unspecified() || gid.is_multicast() || gid.is_loopback();
    !is_none && !gid.to_ipv4_mapped().is_some_and(is_no_ipv4)
}

pub(super) fn address_from_pb(end: &data::QueuePairInfo) -> Result<QueuePairAddress, MalformedMessage> {
    let gid = <[u8; 16]>::try_from(&end.gid[..]);
    let gid = gid.map_err(|_| MalformedMessage::new("the length of a gid", end.gid.len() as u64))?;
    if !is_port_address(Ipv6Addr::from(gid)) {
        return Err(MalformedMessage::new("the first byte of a gid", gid[0]));
    }
    let lid = u16::try_from(end.lid).map_err(|_| MalformedMessage::new("a lid", end.lid))?;
    let mtu = u8::try_from(end.mtu).ok().filter(|mtu| (1..=5).contains(mtu));
    let limited = |field, number: u32| match number {
        0..=U24_MAX => Ok(number),
        _ => Err(MalformedMessage::new(field, number)),
    };
    let reads = u8::try_from(end.reads).ok().filter(|reads| *reads > 0);
    Ok(QueuePairAddress {
        max_reads: reads.ok_or(MalformedMessage::new("the number of reads at once", end.reads))?,
        gid: Gid(gid),
        lid,
        mtu: mtu.ok_or(MalformedMessage::new("an mtu", end.mtu))?,
        qp_number: limited("a queue pair's number", end.queue)?,
        first_psn: limited("a packet's number", end.packet)?,
    })
}

pub(super) fn window_to_pb(window: RemoteWindow) -> data::Window {
    data::Window { address: window.address, bytes: window.bytes, key: window.key }
}

pub(super) fn window_from_pb(window: &data::Window) -> Result<RemoteWindow, MalformedMessage> {
    let data::Window { address, bytes, key } = *window;
    if address.checked_add(bytes).is_none() {
        return Err(MalformedMessage::new("the start of a window", address));
    }
    Ok(RemoteWindow { address, bytes, key })
}

pub(super) fn rows_to_bytes(rows: &[GrantDescriptor]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(rows.len() * ROW_BYTES);
    for row in rows {
        bytes.put_u64_le(row.grant.0);
        bytes.put_u64_le(row.offset);
        bytes.put_u32_le(row.len);
        bytes.put_u32_le(match row.memory {
            GrantMemory::Arena => 1,
            GrantMemory::BounceBuffer => 2,
        });
    }
    bytes
}

pub(super) fn rows_from_bytes(mut bytes: &[u8]) -> Result<Vec<GrantDescriptor>, MalformedMessage> {
    if !bytes.len().is_multiple_of(ROW_BYTES) {
        return Err(MalformedMessage::new("the length of rows", bytes.len() as u64));
    }
    let mut rows = Vec::with_capacity(bytes.len() / ROW_BYTES);
    while bytes.has_remaining() {
        let (loan, at, len) = (GrantId(bytes.get_u64_le()), bytes.get_u64_le(), bytes.get_u32_le());
        let place = match bytes.get_u32_le() {
            1 => GrantMemory::Arena,
            2 => GrantMemory::BounceBuffer,
            number => return Err(MalformedMessage::new("where a block lies", number)),
        };
        rows.push(GrantDescriptor { grant: loan, memory: place, offset: at, len });
    }
    Ok(rows)
}

pub(super) fn loans_to_bytes(loans: &[GrantId]) -> Vec<u8> {
    loans.iter().flat_map(|loan| loan.0.to_le_bytes()).collect()
}

pub(super) fn loans_from_bytes(bytes: &[u8]) -> Result<Vec<GrantId>, MalformedMessage> {
    let (whole, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(MalformedMessage::new("the length of loans", bytes.len() as u64));
    }
    Ok(whole.iter().map(|loan| GrantId(u64::from_le_bytes(*loan))).collect())
}

/// Why no further block came. A number that only a later release knows gives `None`.
pub(super) fn miss_reason_from_number(number: u32) -> Option<MissReason> {
    MissReason::ALL.into_iter().find(|reason| *reason as u32 == number)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rows_and_loans_round_trip_and_malformed_bytes_are_refused() {
        let row =
            |loan, place| GrantDescriptor { grant: GrantId(loan), memory: place, offset: 7 << 40, len: 9 };
        let rows = [row(1, GrantMemory::Arena), row(2, GrantMemory::BounceBuffer)];
        let bytes = rows_to_bytes(&rows);
        assert_eq!(rows_from_bytes(&bytes).unwrap(), rows);
        assert!(rows_from_bytes(&bytes[1..]).is_err());
        let mut unknown = bytes;
        unknown[20] = 3;
        assert!(rows_from_bytes(&unknown).is_err());
        let loans = [GrantId(1), GrantId(u64::MAX)];
        assert_eq!(loans_from_bytes(&loans_to_bytes(&loans)).unwrap(), loans);
        assert!(loans_from_bytes(&[0; 9]).is_err());
    }

    #[test]
    fn impossible_queue_pair_addresses_are_refused() {
        let port = RailPort { device: "rxe0".to_owned(), gid: Gid([9; 16]), lid: 3, mtu: 5, max_reads: 16 };
        let good = address_to_pb(&port, 17, U24_MAX);
        let end = QueuePairAddress {
            gid: Gid([9; 16]),
            lid: 3,
            mtu: 5,
            qp_number: 17,
            first_psn: U24_MAX,
            max_reads: 16,
        };
        assert_eq!(address_from_pb(&good).unwrap(), end);
        let ipv4 = |bytes: [u8; 4]| Ipv4Addr::from(bytes).to_ipv6_mapped().octets().to_vec();
        let routed = data::QueuePairInfo { gid: ipv4([10, 0, 0, 1]), ..good };
        let bad = [
            data::QueuePairInfo { gid: vec![9; 15], ..good.clone() },
            data::QueuePairInfo { mtu: 6, ..good.clone() },
            data::QueuePairInfo { mtu: 0, ..good.clone() },
            data::QueuePairInfo { lid: 65_536, ..good.clone() },
            data::QueuePairInfo { queue: 1 << 24, ..good.clone() },
            data::QueuePairInfo { packet: 1 << 24, ..good.clone() },
            data::QueuePairInfo { reads: 0, ..good.clone() },
            data::QueuePairInfo { reads: 256, ..good.clone() },
            data::QueuePairInfo { gid: vec![0; 16], ..good.clone() },
            data::QueuePairInfo { gid: vec![0xFF; 16], ..good.clone() },
            data::QueuePairInfo { gid: ipv4([224, 0, 0, 1]), ..good.clone() },
            data::QueuePairInfo { gid: ipv4([255; 4]), ..good.clone() },
            data::QueuePairInfo { gid: ipv4([0; 4]), ..good },
        ];
        for end in bad {
            assert!(address_from_pb(&end).is_err(), "{end:?}");
        }
        assert!(address_from_pb(&routed).is_ok());
        let window = data::Window { address: u64::MAX, bytes: 2, key: 0 };
        assert!(window_from_pb(&window).is_err(), "the window ends beyond the address space");
    }
}
