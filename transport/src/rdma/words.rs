//! What both ends say of memory and queue pairs, as messages and back. Whatever a peer may send is checked here.
//!
//! Not here: when it is said (`link.rs`, `offer.rs`, `lending.rs`, `taking.rs`).

use std::net::{Ipv4Addr, Ipv6Addr};

use bytes::{Buf, BufMut};
use kv_core::id::LoanId;
use kv_core::lend::{Descriptor, Place as LentIn};
use kvfleet_proto::data;

use super::rail::{End, Gid, Port};
use crate::MissReason;

/// Version of the upgraded connection's protocol.
pub(super) const VERSION: u32 = 1;

/// Bytes of a row of [`data::Lent`].
pub(super) const ROW_BYTES: usize = 24;

/// Bytes of a packet's number.
pub(super) const PACKET_MAX: u32 = (1 << 24) - 1;

/// What stands on the board once the node takes everything back. No epoch ever is.
pub(super) const REVOKED: u64 = u64::MAX;

/// Numbers of `Attached.outcome`.
pub(super) mod outcome {
    pub(in super::super) const ATTACHED: u32 = 1;
    pub(in super::super) const BUSY: u32 = 2;
    pub(in super::super) const OFFERED: u32 = 4;
    pub(in super::super) const REFUSED: u32 = crate::tcp::RDMA_REFUSED;
}

/// Something that no peer of this protocol says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {said}, which cannot be")]
pub(crate) struct Nonsense {
    field: &'static str,
    said: u64,
}

impl Nonsense {
    pub(super) fn new(field: &'static str, said: impl Into<u64>) -> Nonsense {
        Nonsense { field, said: said.into() }
    }
}

/// A part of the node's memory that the client may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) key: u32,
}

/// This end's queue pair, as the peer must know it.
pub(super) fn end_to_pb(port: &Port, queue: u32, packet: u32) -> data::QueueEnd {
    let gid = port.gid.0.to_vec();
    let (lid, mtu, reads) = (port.lid.into(), port.mtu.into(), port.reads.into());
    data::QueueEnd { gid, lid, mtu, queue, packet, reads }
}

/// Whether one port can have it. Others would be answered that never asked.
fn is_of_a_port(gid: Ipv6Addr) -> bool {
    let is_no_ipv4 = |address: Ipv4Addr| {
        address.is_unspecified() || address.is_multicast() || address.is_broadcast() || address.is_loopback()
    };
    let is_none = gid.is_unspecified() || gid.is_multicast() || gid.is_loopback();
    !is_none && !gid.to_ipv4_mapped().is_some_and(is_no_ipv4)
}

pub(super) fn end_from_pb(end: &data::QueueEnd) -> Result<End, Nonsense> {
    let gid = <[u8; 16]>::try_from(&end.gid[..]);
    let gid = gid.map_err(|_| Nonsense::new("the length of a gid", end.gid.len() as u64))?;
    if !is_of_a_port(Ipv6Addr::from(gid)) {
        return Err(Nonsense::new("the first byte of a gid", gid[0]));
    }
    let lid = u16::try_from(end.lid).map_err(|_| Nonsense::new("a lid", end.lid))?;
    let mtu = u8::try_from(end.mtu).ok().filter(|mtu| (1..=5).contains(mtu));
    let limited = |field, number: u32| match number {
        0..=PACKET_MAX => Ok(number),
        _ => Err(Nonsense::new(field, number)),
    };
    let reads = u8::try_from(end.reads).ok().filter(|reads| *reads > 0);
    Ok(End {
        reads: reads.ok_or(Nonsense::new("the number of reads at once", end.reads))?,
        gid: Gid(gid),
        lid,
        mtu: mtu.ok_or(Nonsense::new("an mtu", end.mtu))?,
        queue: limited("a queue pair's number", end.queue)?,
        packet: limited("a packet's number", end.packet)?,
    })
}

pub(super) fn window_to_pb(window: Window) -> data::Window {
    data::Window { address: window.address, bytes: window.bytes, key: window.key }
}

pub(super) fn window_from_pb(window: &data::Window) -> Result<Window, Nonsense> {
    let data::Window { address, bytes, key } = *window;
    if address.checked_add(bytes).is_none() {
        return Err(Nonsense::new("the start of a window", address));
    }
    Ok(Window { address, bytes, key })
}

pub(super) fn rows_to_bytes(rows: &[Descriptor]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(rows.len() * ROW_BYTES);
    for row in rows {
        bytes.put_u64_le(row.loan.0);
        bytes.put_u64_le(row.at);
        bytes.put_u32_le(row.len);
        bytes.put_u32_le(match row.place {
            LentIn::Arena => 1,
            LentIn::Tray => 2,
        });
    }
    bytes
}

pub(super) fn rows_from_bytes(mut bytes: &[u8]) -> Result<Vec<Descriptor>, Nonsense> {
    if !bytes.len().is_multiple_of(ROW_BYTES) {
        return Err(Nonsense::new("the length of rows", bytes.len() as u64));
    }
    let mut rows = Vec::with_capacity(bytes.len() / ROW_BYTES);
    while bytes.has_remaining() {
        let (loan, at, len) = (LoanId(bytes.get_u64_le()), bytes.get_u64_le(), bytes.get_u32_le());
        let place = match bytes.get_u32_le() {
            1 => LentIn::Arena,
            2 => LentIn::Tray,
            number => return Err(Nonsense::new("where a block lies", number)),
        };
        rows.push(Descriptor { loan, place, at, len });
    }
    Ok(rows)
}

pub(super) fn loans_to_bytes(loans: &[LoanId]) -> Vec<u8> {
    loans.iter().flat_map(|loan| loan.0.to_le_bytes()).collect()
}

pub(super) fn loans_from_bytes(bytes: &[u8]) -> Result<Vec<LoanId>, Nonsense> {
    let (whole, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(Nonsense::new("the length of loans", bytes.len() as u64));
    }
    Ok(whole.iter().map(|loan| LoanId(u64::from_le_bytes(*loan))).collect())
}

/// Why no more came. A number that only a later release knows is none.
pub(super) fn reason_from_number(number: u32) -> Option<MissReason> {
    MissReason::ALL.into_iter().find(|reason| *reason as u32 == number)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rows_and_loans_survive_the_wire_and_nonsense_does_not() {
        let row = |loan, place| Descriptor { loan: LoanId(loan), place, at: 7 << 40, len: 9 };
        let rows = [row(1, LentIn::Arena), row(2, LentIn::Tray)];
        let bytes = rows_to_bytes(&rows);
        assert_eq!(rows_from_bytes(&bytes).unwrap(), rows);
        assert!(rows_from_bytes(&bytes[1..]).is_err());
        let mut unknown = bytes;
        unknown[20] = 3;
        assert!(rows_from_bytes(&unknown).is_err());
        let loans = [LoanId(1), LoanId(u64::MAX)];
        assert_eq!(loans_from_bytes(&loans_to_bytes(&loans)).unwrap(), loans);
        assert!(loans_from_bytes(&[0; 9]).is_err());
    }

    #[test]
    fn ends_that_cannot_be_are_refused() {
        let port = Port { device: "rxe0".to_owned(), gid: Gid([9; 16]), lid: 3, mtu: 5, reads: 16 };
        let good = end_to_pb(&port, 17, PACKET_MAX);
        let end = End { gid: Gid([9; 16]), lid: 3, mtu: 5, queue: 17, packet: PACKET_MAX, reads: 16 };
        assert_eq!(end_from_pb(&good).unwrap(), end);
        let ipv4 = |bytes: [u8; 4]| Ipv4Addr::from(bytes).to_ipv6_mapped().octets().to_vec();
        let routed = data::QueueEnd { gid: ipv4([10, 0, 0, 1]), ..good };
        let bad = [
            data::QueueEnd { gid: vec![9; 15], ..good.clone() },
            data::QueueEnd { mtu: 6, ..good.clone() },
            data::QueueEnd { mtu: 0, ..good.clone() },
            data::QueueEnd { lid: 65_536, ..good.clone() },
            data::QueueEnd { queue: 1 << 24, ..good.clone() },
            data::QueueEnd { packet: 1 << 24, ..good.clone() },
            data::QueueEnd { reads: 0, ..good.clone() },
            data::QueueEnd { reads: 256, ..good.clone() },
            data::QueueEnd { gid: vec![0; 16], ..good.clone() },
            data::QueueEnd { gid: vec![0xFF; 16], ..good.clone() },
            data::QueueEnd { gid: ipv4([224, 0, 0, 1]), ..good.clone() },
            data::QueueEnd { gid: ipv4([255; 4]), ..good.clone() },
            data::QueueEnd { gid: ipv4([0; 4]), ..good },
        ];
        for end in bad {
            assert!(end_from_pb(&end).is_err(), "{end:?}");
        }
        assert!(end_from_pb(&routed).is_ok());
        let window = data::Window { address: u64::MAX, bytes: 2, key: 0 };
        assert!(window_from_pb(&window).is_err(), "it ends behind all memory");
    }
}
