//! Packets of the local path, encoded and decoded, for both directions.
//!
//! Little endian: operation u64 · kind u8 · sender CPU u8 · rows u16 · body bytes u32 · body ·
//! rows. A packet has exactly this length. Bodies are the messages of `data.proto` that the network
//! paths use; rows have a fixed length. Packets are validated here as far as possible without
//! knowing the connection. No input causes a panic. Not here: sockets, and what packets mean to a
//! connection.

use kv_core::id::GrantId;
use kv_core::lease_grant::{GrantDescriptor, GrantMemory};
use kvfleet_proto::data;
use prost::Message;

use super::PACKET_BYTES_MAX;

/// First bytes of a client's first packet.
const MAGIC: [u8; 8] = *b"KVFSHM1\0";

/// Version of these packets. Both ends are on one host and mostly of one release; another version
/// is refused.
pub(super) const VERSION: u32 = 3;

/// Bytes before a packet's body.
const HEAD_BYTES: usize = 16;

/// Maximum rows of one packet: the maximum blocks of an operation.
pub(super) const ROWS_MAX: usize = 2048;

/// Longest address of a node in bytes: a DNS name and a port.
const ADDRESS_BYTES_MAX: usize = 262;

const DESCRIPTOR_BYTES: usize = 24;
const PLACE_BYTES: usize = 16;
const LOAN_BYTES: usize = 8;

/// Limit of a body, whatever its rows.
pub(super) const BODY_BYTES_MAX: usize = PACKET_BYTES_MAX - HEAD_BYTES;

const _: () = assert!(ROWS_MAX * DESCRIPTOR_BYTES + 4096 < BODY_BYTES_MAX, "a head with all its rows fits");

/// Why bytes are not a valid packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PacketError {
    #[error("a packet of {0} bytes, which does not match its header")]
    Length(usize),
    #[error("a packet of unknown kind {0}: run the same release on both ends")]
    Kind(u8),
    #[error("a packet with an invalid {0}")]
    Field(&'static str),
    #[error("version {0} of this protocol, expected {VERSION}: run the same release on both ends")]
    Version(u32),
}

/// A range of a bounce buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BounceRange {
    pub(super) at: u64,
    pub(super) len: u32,
}

/// A packet from a client.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ClientPacket {
    /// The first packet; `wants_mapping` says whether the client wants to map the arena.
    Hello { wants_mapping: bool },
    /// Starts an operation.
    Begin { op: u64, request: data::DataRequest },
    /// Starts an eager save: its frames are already in these ranges, one for each block, and no
    /// others follow.
    Save { op: u64, request: data::DataRequest, places: Vec<BounceRange> },
    /// The next wanted frames of a save are in these ranges.
    Put { op: u64, places: Vec<BounceRange> },
    /// No further frames of this save follow.
    Finish { op: u64 },
    /// Cancels the operation.
    Cancel { op: u64 },
    /// Returns grants that are no longer read.
    Return { loans: Vec<GrantId> },
}

/// A packet from a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum NodePacket {
    /// Answers a hello; carries the descriptor of the bounce buffer, and that of the arena if it is
    /// mapped.
    Welcome(Welcome),
    /// Answers a fetch, with the blocks that can be read now.
    Head { op: u64, head: data::FetchHead, rows: Vec<GrantDescriptor> },
    /// Further blocks of a fetch that can be read.
    More { op: u64, rows: Vec<GrantDescriptor> },
    /// Ends a fetch; the number of a miss reason, or zero.
    End { op: u64, reason: u32 },
    /// Answers a save's offer.
    Offer { op: u64, offer: data::SaveOffer },
    /// This number of frames of a save was read from the bounce buffer.
    Taken { op: u64, frames: u32 },
    /// Ends a save with its result.
    Done { op: u64, done: data::SaveDone },
    /// Answers a release or a ping.
    Acknowledged { op: u64, pong: data::Pong },
    /// The operation was cancelled, or could not be served.
    Ended { op: u64 },
    /// The node closes the connection.
    Closing(CloseReason),
}

/// A connection's parameters for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    /// Length of the arena in bytes; zero if it may not be mapped.
    pub(super) arena_bytes: u64,
    /// Length in bytes of the bounce buffer's first part, which the client writes.
    pub(super) bounce_in_bytes: u64,
    /// Length in bytes of the second part, which the client reads.
    pub(super) bounce_out_bytes: u64,
    pub(super) frame_bytes_max: u32,
    /// Address at which the node serves other hosts.
    pub(super) address: String,
}

/// Why a node closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum CloseReason {
    Stopping = 1,
    Refused = 2,
    Full = 3,
    Protocol = 4,
}

impl CloseReason {
    const ALL: [CloseReason; 4] =
        [CloseReason::Stopping, CloseReason::Refused, CloseReason::Full, CloseReason::Protocol];

    /// Text for the client.
    pub(super) fn cause(self) -> &'static str {
        match self {
            CloseReason::Stopping => "the node stops",
            CloseReason::Refused => {
                "the node does not serve processes of this user, name it in the node's shm.peers"
            }
            CloseReason::Full => {
                "the node has as many clients of its host as it takes, raise its shm.bounce_buffer_bytes or run fewer"
            }
            CloseReason::Protocol => {
                "the node reports a protocol violation by this process, run the same release on both ends"
            }
        }
    }
}

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const BEGIN: u8 = 2;
    pub(super) const PUT: u8 = 3;
    pub(super) const FINISH: u8 = 4;
    pub(super) const CANCEL: u8 = 5;
    pub(super) const RETURN: u8 = 6;
    pub(super) const SAVE: u8 = 7;
    pub(super) const WELCOME: u8 = 16;
    pub(super) const HEAD: u8 = 17;
    pub(super) const MORE: u8 = 18;
    pub(super) const END: u8 = 19;
    pub(super) const OFFER: u8 = 20;
    pub(super) const TAKEN: u8 = 21;
    pub(super) const DONE: u8 = 22;
    pub(super) const ACKNOWLEDGED: u8 = 23;
    pub(super) const ENDED: u8 = 24;
    pub(super) const CLOSING: u8 = 25;
}

/// Offset of the sender's processor in a packet to a node (`cpu_migration.rs`).
const SENDER_CPU_OFFSET: usize = 9;

/// Sets the sender's processor in a packet to a node.
pub(super) fn set_sender_cpu(packet: &mut [u8], from: u8) {
    if let Some(byte) = packet.get_mut(SENDER_CPU_OFFSET) {
        *byte = from;
    }
}

/// The sender's processor in a packet to a node; zero if unknown.
pub(super) fn sender_cpu(packet: &[u8]) -> u8 {
    packet.get(SENDER_CPU_OFFSET).copied().unwrap_or(0)
}

impl ClientPacket {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            ClientPacket::Hello { wants_mapping: maps } => {
                let mut packet = PacketWriter::new(0, kind::HELLO, 0);
                packet.0.extend_from_slice(&MAGIC);
                packet.u32(VERSION).u32(u32::from(*maps)).end_body()
            }
            ClientPacket::Begin { op, request } => {
                PacketWriter::new(*op, kind::BEGIN, 0).message(request).end_body()
            }
            ClientPacket::Save { op, request, places } => {
                PacketWriter::new(*op, kind::SAVE, places.len()).message(request).places(places)
            }
            ClientPacket::Put { op, places } => {
                PacketWriter::new(*op, kind::PUT, places.len()).places(places)
            }
            ClientPacket::Finish { op } => PacketWriter::new(*op, kind::FINISH, 0).0,
            ClientPacket::Cancel { op } => PacketWriter::new(*op, kind::CANCEL, 0).0,
            ClientPacket::Return { loans } => {
                let mut packet = PacketWriter::new(0, kind::RETURN, loans.len());
                loans.iter().for_each(|loan| {
                    packet.u64(loan.0);
                });
                packet.0
            }
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<ClientPacket, PacketError> {
        let parts = PacketParts::read(bytes)?;
        let op = parts.op;
        let packet = match parts.kind {
            kind::HELLO => {
                let fields = parts.body.strip_prefix(&MAGIC).ok_or(PacketError::Field("beginning"))?;
                let mut fields = FieldReader(fields);
                match fields.u32()? {
                    VERSION => {
                        let flags = fields.u32()?;
                        fields.end()?;
                        ClientPacket::Hello { wants_mapping: flags & 1 != 0 }
                    }
                    other => return Err(PacketError::Version(other)),
                }
            }
            kind::BEGIN => ClientPacket::Begin { op, request: parts.message()? },
            kind::SAVE => ClientPacket::Save {
                op,
                request: parts.message()?,
                places: parts.rows(PLACE_BYTES, read_range)?,
            },
            kind::PUT => ClientPacket::Put { op, places: parts.rows(PLACE_BYTES, read_range)? },
            kind::FINISH => ClientPacket::Finish { op },
            kind::CANCEL => ClientPacket::Cancel { op },
            kind::RETURN => {
                ClientPacket::Return { loans: parts.rows(LOAN_BYTES, |row| Ok(GrantId(row.u64()?)))? }
            }
            other => return Err(PacketError::Kind(other)),
        };
        let (has_rows, has_body) = match packet {
            ClientPacket::Save { .. } => (true, true),
            ClientPacket::Put { .. } | ClientPacket::Return { .. } => (true, false),
            ClientPacket::Hello { .. } | ClientPacket::Begin { .. } => (false, true),
            ClientPacket::Finish { .. } | ClientPacket::Cancel { .. } => (false, false),
        };
        parts.expect_rows(has_rows)?;
        parts.expect_body(has_body)?;
        Ok(packet)
    }
}

impl NodePacket {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            NodePacket::Welcome(welcome) => {
                let mut packet = PacketWriter::new(0, kind::WELCOME, 0);
                packet.u32(VERSION).u32(welcome.frame_bytes_max).u64(welcome.arena_bytes);
                packet.u64(welcome.bounce_in_bytes).u64(welcome.bounce_out_bytes);
                packet.0.extend_from_slice(welcome.address.as_bytes());
                packet.end_body()
            }
            NodePacket::Head { op, head, rows } => {
                PacketWriter::new(*op, kind::HEAD, rows.len()).message(head).descriptors(rows)
            }
            NodePacket::More { op, rows } => PacketWriter::new(*op, kind::MORE, rows.len()).descriptors(rows),
            NodePacket::End { op, reason } => PacketWriter::new(*op, kind::END, 0).u32(*reason).end_body(),
            NodePacket::Offer { op, offer } => {
                PacketWriter::new(*op, kind::OFFER, 0).message(offer).end_body()
            }
            NodePacket::Taken { op, frames } => {
                PacketWriter::new(*op, kind::TAKEN, 0).u32(*frames).end_body()
            }
            NodePacket::Done { op, done } => PacketWriter::new(*op, kind::DONE, 0).message(done).end_body(),
            NodePacket::Acknowledged { op, pong } => {
                PacketWriter::new(*op, kind::ACKNOWLEDGED, 0).message(pong).end_body()
            }
            NodePacket::Ended { op } => PacketWriter::new(*op, kind::ENDED, 0).0,
            NodePacket::Closing(why) => PacketWriter::new(0, kind::CLOSING, 0).u32(*why as u32).end_body(),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<NodePacket, PacketError> {
        let parts = PacketParts::read(bytes)?;
        if parts.sender_cpu != 0 {
            return Err(PacketError::Field("head"));
        }
        let op = parts.op;
        let number = || {
            let mut fields = FieldReader(parts.body);
            fields.u32().and_then(|number| fields.end().map(|()| number))
        };
        let descriptors = || parts.rows(DESCRIPTOR_BYTES, read_descriptor);
        let packet = match parts.kind {
            kind::WELCOME => NodePacket::Welcome(read_welcome(parts.body)?),
            kind::HEAD => NodePacket::Head { op, head: parts.message()?, rows: descriptors()? },
            kind::MORE => NodePacket::More { op, rows: descriptors()? },
            kind::END => NodePacket::End { op, reason: number()? },
            kind::OFFER => NodePacket::Offer { op, offer: parts.message()? },
            kind::TAKEN => NodePacket::Taken { op, frames: number()? },
            kind::DONE => NodePacket::Done { op, done: parts.message()? },
            kind::ACKNOWLEDGED => NodePacket::Acknowledged { op, pong: parts.message()? },
            kind::ENDED => NodePacket::Ended { op },
            kind::CLOSING => {
                let said = number()?;
                let why = CloseReason::ALL.into_iter().find(|why| *why as u32 == said);
                NodePacket::Closing(why.ok_or(PacketError::Field("reason"))?)
            }
            other => return Err(PacketError::Kind(other)),
        };
        parts.expect_rows(matches!(packet, NodePacket::Head { .. } | NodePacket::More { .. }))?;
        parts.expect_body(!matches!(packet, NodePacket::More { .. } | NodePacket::Ended { .. }))?;
        Ok(packet)
    }
}

fn read_range(row: &mut FieldReader<'_>) -> Result<BounceRange, PacketError> {
    let place = BounceRange { at: row.u64()?, len: row.u32()? };
    match row.u32()? {
        0 => Ok(place),
        _ => Err(PacketError::Field("place")),
    }
}

fn read_descriptor(row: &mut FieldReader<'_>) -> Result<GrantDescriptor, PacketError> {
    let (loan, at, len) = (GrantId(row.u64()?), row.u64()?, row.u32()?);
    let place = match row.u32()? {
        0 => GrantMemory::Arena,
        1 => GrantMemory::BounceBuffer,
        _ => return Err(PacketError::Field("place")),
    };
    Ok(GrantDescriptor { grant: loan, memory: place, offset: at, len })
}

fn read_welcome(body: &[u8]) -> Result<Welcome, PacketError> {
    let mut fields = FieldReader(body);
    match fields.u32()? {
        VERSION => {}
        other => return Err(PacketError::Version(other)),
    }
    let frame_bytes_max = fields.u32()?;
    let (arena_bytes, tray_in_bytes, tray_out_bytes) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let address = std::str::from_utf8(fields.0).ok().filter(|address| address.len() <= ADDRESS_BYTES_MAX);
    let address = address.ok_or(PacketError::Field("address"))?.to_owned();
    Ok(Welcome {
        arena_bytes,
        bounce_in_bytes: tray_in_bytes,
        bounce_out_bytes: tray_out_bytes,
        frame_bytes_max,
        address,
    })
}

/// Builds a packet.
struct PacketWriter(Vec<u8>);

impl PacketWriter {
    fn new(op: u64, kind: u8, rows: usize) -> PacketWriter {
        debug_assert!(rows <= ROWS_MAX, "{rows} rows");
        let mut bytes = Vec::with_capacity(HEAD_BYTES + 64 + rows * DESCRIPTOR_BYTES);
        bytes.extend_from_slice(&op.to_le_bytes());
        bytes.extend_from_slice(&[kind, 0]);
        bytes.extend_from_slice(&u16::try_from(rows).unwrap_or(u16::MAX).to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        PacketWriter(bytes)
    }

    fn u32(&mut self, number: u32) -> &mut PacketWriter {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn u64(&mut self, number: u64) -> &mut PacketWriter {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn message<M: Message>(&mut self, message: &M) -> &mut PacketWriter {
        message.encode(&mut self.0).expect("a vector grows as needed");
        self
    }

    /// Ends the body; rows follow.
    fn end_body(&mut self) -> Vec<u8> {
        let body = u32::try_from(self.0.len() - HEAD_BYTES).unwrap_or(u32::MAX);
        self.0[12..HEAD_BYTES].copy_from_slice(&body.to_le_bytes());
        std::mem::take(&mut self.0)
    }

    fn places(&mut self, rows: &[BounceRange]) -> Vec<u8> {
        self.0 = self.end_body();
        for row in rows {
            self.u64(row.at).u32(row.len).u32(0);
        }
        std::mem::take(&mut self.0)
    }

    fn descriptors(&mut self, rows: &[GrantDescriptor]) -> Vec<u8> {
        self.0 = self.end_body();
        for row in rows {
            self.u64(row.grant.0)
                .u64(row.offset)
                .u32(row.len)
                .u32(u32::from(row.memory == GrantMemory::BounceBuffer));
        }
        std::mem::take(&mut self.0)
    }
}

/// The parts of a packet that all kinds share.
struct PacketParts<'a> {
    op: u64,
    kind: u8,
    sender_cpu: u8,
    count: usize,
    body: &'a [u8],
    rows: &'a [u8],
}

impl<'a> PacketParts<'a> {
    fn read(bytes: &'a [u8]) -> Result<PacketParts<'a>, PacketError> {
        let mut head = FieldReader(bytes);
        let (op, kind, from, count, body) = (head.u64()?, head.u8()?, head.u8()?, head.u16()?, head.u32()?);
        let wrong = PacketError::Length(bytes.len());
        let (body, rows) = head.0.split_at_checked(body as usize).ok_or(wrong)?;
        let count = usize::from(count);
        if count > ROWS_MAX {
            return Err(PacketError::Field("number of rows"));
        }
        Ok(PacketParts { op, kind, sender_cpu: from, count, body, rows })
    }

    fn message<M: Message + Default>(&self) -> Result<M, PacketError> {
        M::decode(self.body).map_err(|_| PacketError::Field("body"))
    }

    fn rows<T>(
        &self,
        bytes: usize,
        read: impl Fn(&mut FieldReader<'a>) -> Result<T, PacketError>,
    ) -> Result<Vec<T>, PacketError> {
        if self.rows.len() != self.count * bytes {
            return Err(PacketError::Length(HEAD_BYTES + self.body.len() + self.rows.len()));
        }
        self.rows.chunks_exact(bytes).map(|row| read(&mut FieldReader(row))).collect()
    }

    fn expect_rows(&self, some: bool) -> Result<(), PacketError> {
        if some || self.count == 0 && self.rows.is_empty() { Ok(()) } else { Err(PacketError::Field("rows")) }
    }

    fn expect_body(&self, some: bool) -> Result<(), PacketError> {
        if some || self.body.is_empty() { Ok(()) } else { Err(PacketError::Field("body")) }
    }
}

/// Reads fixed-length fields in sequence.
struct FieldReader<'a>(&'a [u8]);

impl FieldReader<'_> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], PacketError> {
        let (first, rest) = self.0.split_first_chunk().ok_or(PacketError::Field("length"))?;
        self.0 = rest;
        Ok(*first)
    }

    fn u8(&mut self) -> Result<u8, PacketError> {
        self.bytes::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, PacketError> {
        self.bytes().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, PacketError> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, PacketError> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn end(&self) -> Result<(), PacketError> {
        if self.0.is_empty() { Ok(()) } else { Err(PacketError::Field("length")) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::wire;
    use kv_core::id::LeaseId;
    use proptest::prelude::*;

    fn descriptors(count: usize) -> Vec<GrantDescriptor> {
        let row = |number: u64| {
            let place = if number.is_multiple_of(2) { GrantMemory::Arena } else { GrantMemory::BounceBuffer };
            GrantDescriptor { grant: GrantId(number + 1), memory: place, offset: number << 40, len: 7 }
        };
        (0..count as u64).map(row).collect()
    }

    fn to_node() -> Vec<ClientPacket> {
        vec![
            ClientPacket::Hello { wants_mapping: true },
            ClientPacket::Hello { wants_mapping: false },
            ClientPacket::Begin { op: 1, request: wire::release_to_pb(LeaseId(4)) },
            ClientPacket::Put { op: 2, places: vec![BounceRange { at: 1 << 33, len: 9 }; 3] },
            ClientPacket::Save {
                op: 2,
                request: wire::release_to_pb(LeaseId(4)),
                places: vec![BounceRange { at: 5, len: u32::MAX }],
            },
            ClientPacket::Finish { op: 3 },
            ClientPacket::Cancel { op: u64::MAX },
            ClientPacket::Return { loans: (0..ROWS_MAX as u64).map(GrantId).collect() },
        ]
    }

    fn to_client() -> Vec<NodePacket> {
        let head = data::FetchHead { tiers: vec![0; ROWS_MAX], blocks: 3, ..data::FetchHead::default() };
        let mut all = vec![
            NodePacket::Welcome(Welcome {
                arena_bytes: 1 << 40,
                bounce_in_bytes: 2,
                bounce_out_bytes: 3,
                frame_bytes_max: 4,
                address: "node:1".to_owned(),
            }),
            NodePacket::Head { op: 1, head, rows: descriptors(ROWS_MAX) },
            NodePacket::More { op: 2, rows: descriptors(2) },
            NodePacket::End { op: 3, reason: 4 },
            NodePacket::Offer {
                op: 4,
                offer: data::SaveOffer { wanted: vec![1], ..data::SaveOffer::default() },
            },
            NodePacket::Taken { op: 5, frames: 6 },
            NodePacket::Done { op: 6, done: data::SaveDone { seq: 1, ..data::SaveDone::default() } },
            NodePacket::Acknowledged { op: 7, pong: data::Pong { version: 1 } },
            NodePacket::Ended { op: 8 },
        ];
        all.extend(CloseReason::ALL.map(NodePacket::Closing));
        all
    }

    #[test]
    fn packets_round_trip() {
        for packet in to_node() {
            let bytes = packet.encode();
            assert!(bytes.len() <= PACKET_BYTES_MAX);
            assert_eq!(ClientPacket::decode(&bytes), Ok(packet));
        }
        for packet in to_client() {
            let bytes = packet.encode();
            assert!(bytes.len() <= PACKET_BYTES_MAX);
            assert_eq!(NodePacket::decode(&bytes), Ok(packet));
        }
    }

    #[test]
    fn malformed_packets_are_refused() {
        for packet in to_node() {
            let bytes = packet.encode();
            // A message may end anywhere, a packet may not.
            assert!((0..HEAD_BYTES).all(|len| ClientPacket::decode(&bytes[..len]).is_err()), "{packet:?}");
            assert!(ClientPacket::decode(&[&bytes[..], &[0]].concat()).is_err(), "{packet:?} and a byte");
        }
        for packet in to_client() {
            let bytes = packet.encode();
            assert!((0..HEAD_BYTES).all(|len| NodePacket::decode(&bytes[..len]).is_err()), "{packet:?}");
            assert!(NodePacket::decode(&[&bytes[..], &[0]].concat()).is_err(), "{packet:?} and a byte");
        }
        let said = |bytes: &[u8]| ClientPacket::decode(bytes).unwrap_err().to_string();
        let mut hello = ClientPacket::Hello { wants_mapping: false }.encode();
        hello[HEAD_BYTES + 8] = 9;
        assert_eq!(said(&hello), "version 9 of this protocol, expected 3: run the same release on both ends");
        hello[8] = 77;
        assert_eq!(said(&hello), "a packet of unknown kind 77: run the same release on both ends");
        let mut rows = ClientPacket::Return { loans: vec![GrantId(1)] }.encode();
        rows[10..12].copy_from_slice(&u16::MAX.to_le_bytes());
        assert_eq!(said(&rows), "a packet with an invalid number of rows");
        assert!(
            ClientPacket::decode(&NodePacket::Ended { op: 1 }.encode()).is_err(),
            "a packet of the other direction"
        );
    }

    proptest! {
        /// Any bytes decode to a result, and a decoded packet survives another round trip.
        #[test]
        fn any_bytes_decode_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            kind in 0_u8..30,
            rows in 0_u8..5,
            row in prop::sample::select(vec![LOAN_BYTES, PLACE_BYTES, DESCRIPTOR_BYTES]),
        ) {
            let mut bytes = bytes;
            if bytes.len() >= HEAD_BYTES {
                let body = bytes.len() - HEAD_BYTES;
                let body = body.saturating_sub(usize::from(rows) * row).to_le_bytes();
                bytes[8..12].copy_from_slice(&[kind, 0, rows, 0]);
                bytes[12..16].copy_from_slice(&body[..4]);
            }
            if let Ok(packet) = ClientPacket::decode(&bytes) {
                prop_assert_eq!(ClientPacket::decode(&packet.encode()), Ok(packet));
            }
            if let Ok(packet) = NodePacket::decode(&bytes) {
                prop_assert_eq!(NodePacket::decode(&packet.encode()), Ok(packet));
            }
        }
    }
}
