//! Packets of the local path as bytes, both ways.
//!
//! Little endian: operation u64 · kind u8 · zero u8 · rows u16 · body bytes u32 · body · rows. A packet is exactly as long as
//! that says. Bodies are the messages of `data.proto` that the network paths use, rows are of fixed length. What
//! comes is checked here as far as it can be without knowing the connection; nothing here panics, whatever the bytes.
//! Not here: sockets, and what the packets mean to a connection.

use kv_core::id::LoanId;
use kv_core::lend::{Descriptor, Place};
use kvfleet_proto::data;
use prost::Message;

use super::PACKET_BYTES_MAX;

/// First bytes of the first packet of a client.
const MAGIC: [u8; 8] = *b"KVFSHM1\0";

/// Version of these packets. Both ends are of one host and mostly of one release; another version is refused.
pub(super) const VERSION: u32 = 3;

/// Bytes before a packet's body.
const HEAD_BYTES: usize = 16;

/// Rows of one packet: as many blocks as an operation may ask for.
pub(super) const ROWS_MAX: usize = 2048;

/// Longest address a node says, in bytes: a name of the domain system and a port.
const ADDRESS_BYTES_MAX: usize = 262;

const DESCRIPTOR_BYTES: usize = 24;
const PLACE_BYTES: usize = 16;
const LOAN_BYTES: usize = 8;

/// Bodies stay below this beside a full set of rows.
pub(super) const BODY_BYTES_MAX: usize = PACKET_BYTES_MAX - HEAD_BYTES;

const _: () = assert!(ROWS_MAX * DESCRIPTOR_BYTES + 4096 < BODY_BYTES_MAX, "a head with all its rows fits");

/// Why bytes are no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PacketError {
    #[error("a packet of {0} bytes, which is not what it says")]
    Length(usize),
    #[error("a packet of kind {0}, which is not known here: run the same release on both ends")]
    Kind(u8),
    #[error("a packet whose {0} makes no sense")]
    Field(&'static str),
    #[error("version {0} of this protocol, expected {VERSION}: run the same release on both ends")]
    Version(u32),
}

/// Bytes of a tray.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TrayPlace {
    pub(super) at: u64,
    pub(super) len: u32,
}

/// What a client sends.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ToNode {
    /// First; `maps` says that it would like to map the arena.
    Hello { maps: bool },
    /// Begins an operation.
    Ask { op: u64, request: data::DataRequest },
    /// Begins a save whose frames lie there already, one for each block in their order, and no others follow.
    Save { op: u64, request: data::DataRequest, places: Vec<TrayPlace> },
    /// The next wanted frames of a save lie there.
    Put { op: u64, places: Vec<TrayPlace> },
    /// No frames of this save follow.
    Finish { op: u64 },
    /// The operation is not wanted any more.
    Cancel { op: u64 },
    /// Nobody reads these any more.
    Return { loans: Vec<LoanId> },
}

/// What a node sends.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ToClient {
    /// Answers a hello; the tray's descriptor comes with it, and the arena's when it is mapped.
    Welcome(Welcome),
    /// Answers a fetch, with what can be read now.
    Head { op: u64, head: data::FetchHead, rows: Vec<Descriptor> },
    /// More of a fetch can be read.
    More { op: u64, rows: Vec<Descriptor> },
    /// No more of a fetch comes; the number of a miss reason, or zero.
    End { op: u64, reason: u32 },
    /// Answers a save's offer.
    Offer { op: u64, offer: data::SaveOffer },
    /// So many frames of a save were read from the tray.
    Taken { op: u64, frames: u32 },
    /// A save is over.
    Done { op: u64, done: data::SaveDone },
    /// Answers a release or a ping.
    Noted { op: u64, pong: data::Pong },
    /// The operation was cancelled, or could not be served.
    Ended { op: u64 },
    /// The node ends the connection.
    Closing(Closing),
}

/// What a client learns of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    /// The arena, in bytes; zero when it may not be mapped.
    pub(super) arena_bytes: u64,
    /// First part of the tray, which the client writes, in bytes.
    pub(super) tray_in_bytes: u64,
    /// The part behind it, from which the client reads, in bytes.
    pub(super) tray_out_bytes: u64,
    pub(super) frame_bytes_max: u32,
    /// Where the node serves others.
    pub(super) address: String,
}

/// Why a node ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Closing {
    Stops = 1,
    Refused = 2,
    Full = 3,
    Protocol = 4,
}

impl Closing {
    const ALL: [Closing; 4] = [Closing::Stops, Closing::Refused, Closing::Full, Closing::Protocol];

    /// What the client is told.
    pub(super) fn cause(self) -> &'static str {
        match self {
            Closing::Stops => "the node stops",
            Closing::Refused => {
                "the node does not serve processes of this user, name it in the node's shm.peers"
            }
            Closing::Full => {
                "the node has as many clients of its host as it takes, raise its shm.tray_bytes or run fewer"
            }
            Closing::Protocol => {
                "the node says that this process does not keep to the protocol, run the same release on both ends"
            }
        }
    }
}

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const ASK: u8 = 2;
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
    pub(super) const NOTED: u8 = 23;
    pub(super) const ENDED: u8 = 24;
    pub(super) const CLOSING: u8 = 25;
}

/// Where a packet to a node says on which processor it was sent (`aside.rs`).
const FROM_AT: usize = 9;

/// Has a packet to a node say from where it comes.
pub(super) fn say_from(packet: &mut [u8], from: u8) {
    if let Some(byte) = packet.get_mut(FROM_AT) {
        *byte = from;
    }
}

/// From where a packet to a node says that it comes; zero where it does not.
pub(super) fn said_from(packet: &[u8]) -> u8 {
    packet.get(FROM_AT).copied().unwrap_or(0)
}

impl ToNode {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            ToNode::Hello { maps } => {
                let mut packet = Packet::new(0, kind::HELLO, 0);
                packet.0.extend_from_slice(&MAGIC);
                packet.u32(VERSION).u32(u32::from(*maps)).end_body()
            }
            ToNode::Ask { op, request } => Packet::new(*op, kind::ASK, 0).message(request).end_body(),
            ToNode::Save { op, request, places } => {
                Packet::new(*op, kind::SAVE, places.len()).message(request).places(places)
            }
            ToNode::Put { op, places } => Packet::new(*op, kind::PUT, places.len()).places(places),
            ToNode::Finish { op } => Packet::new(*op, kind::FINISH, 0).0,
            ToNode::Cancel { op } => Packet::new(*op, kind::CANCEL, 0).0,
            ToNode::Return { loans } => {
                let mut packet = Packet::new(0, kind::RETURN, loans.len());
                loans.iter().for_each(|loan| {
                    packet.u64(loan.0);
                });
                packet.0
            }
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<ToNode, PacketError> {
        let parts = Parts::read(bytes)?;
        let op = parts.op;
        let packet = match parts.kind {
            kind::HELLO => {
                let fields = parts.body.strip_prefix(&MAGIC).ok_or(PacketError::Field("beginning"))?;
                let mut fields = Fields(fields);
                match fields.u32()? {
                    VERSION => {
                        let flags = fields.u32()?;
                        fields.end()?;
                        ToNode::Hello { maps: flags & 1 != 0 }
                    }
                    other => return Err(PacketError::Version(other)),
                }
            }
            kind::ASK => ToNode::Ask { op, request: parts.message()? },
            kind::SAVE => {
                ToNode::Save { op, request: parts.message()?, places: parts.rows(PLACE_BYTES, place)? }
            }
            kind::PUT => ToNode::Put { op, places: parts.rows(PLACE_BYTES, place)? },
            kind::FINISH => ToNode::Finish { op },
            kind::CANCEL => ToNode::Cancel { op },
            kind::RETURN => ToNode::Return { loans: parts.rows(LOAN_BYTES, |row| Ok(LoanId(row.u64()?)))? },
            other => return Err(PacketError::Kind(other)),
        };
        let (has_rows, has_body) = match packet {
            ToNode::Save { .. } => (true, true),
            ToNode::Put { .. } | ToNode::Return { .. } => (true, false),
            ToNode::Hello { .. } | ToNode::Ask { .. } => (false, true),
            ToNode::Finish { .. } | ToNode::Cancel { .. } => (false, false),
        };
        parts.expect_rows(has_rows)?;
        parts.expect_body(has_body)?;
        Ok(packet)
    }
}

impl ToClient {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            ToClient::Welcome(welcome) => {
                let mut packet = Packet::new(0, kind::WELCOME, 0);
                packet.u32(VERSION).u32(welcome.frame_bytes_max).u64(welcome.arena_bytes);
                packet.u64(welcome.tray_in_bytes).u64(welcome.tray_out_bytes);
                packet.0.extend_from_slice(welcome.address.as_bytes());
                packet.end_body()
            }
            ToClient::Head { op, head, rows } => {
                Packet::new(*op, kind::HEAD, rows.len()).message(head).descriptors(rows)
            }
            ToClient::More { op, rows } => Packet::new(*op, kind::MORE, rows.len()).descriptors(rows),
            ToClient::End { op, reason } => Packet::new(*op, kind::END, 0).u32(*reason).end_body(),
            ToClient::Offer { op, offer } => Packet::new(*op, kind::OFFER, 0).message(offer).end_body(),
            ToClient::Taken { op, frames } => Packet::new(*op, kind::TAKEN, 0).u32(*frames).end_body(),
            ToClient::Done { op, done } => Packet::new(*op, kind::DONE, 0).message(done).end_body(),
            ToClient::Noted { op, pong } => Packet::new(*op, kind::NOTED, 0).message(pong).end_body(),
            ToClient::Ended { op } => Packet::new(*op, kind::ENDED, 0).0,
            ToClient::Closing(why) => Packet::new(0, kind::CLOSING, 0).u32(*why as u32).end_body(),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<ToClient, PacketError> {
        let parts = Parts::read(bytes)?;
        if parts.from != 0 {
            return Err(PacketError::Field("head"));
        }
        let op = parts.op;
        let number = || {
            let mut fields = Fields(parts.body);
            fields.u32().and_then(|number| fields.end().map(|()| number))
        };
        let descriptors = || parts.rows(DESCRIPTOR_BYTES, descriptor);
        let packet = match parts.kind {
            kind::WELCOME => ToClient::Welcome(welcome(parts.body)?),
            kind::HEAD => ToClient::Head { op, head: parts.message()?, rows: descriptors()? },
            kind::MORE => ToClient::More { op, rows: descriptors()? },
            kind::END => ToClient::End { op, reason: number()? },
            kind::OFFER => ToClient::Offer { op, offer: parts.message()? },
            kind::TAKEN => ToClient::Taken { op, frames: number()? },
            kind::DONE => ToClient::Done { op, done: parts.message()? },
            kind::NOTED => ToClient::Noted { op, pong: parts.message()? },
            kind::ENDED => ToClient::Ended { op },
            kind::CLOSING => {
                let said = number()?;
                let why = Closing::ALL.into_iter().find(|why| *why as u32 == said);
                ToClient::Closing(why.ok_or(PacketError::Field("reason"))?)
            }
            other => return Err(PacketError::Kind(other)),
        };
        parts.expect_rows(matches!(packet, ToClient::Head { .. } | ToClient::More { .. }))?;
        parts.expect_body(!matches!(packet, ToClient::More { .. } | ToClient::Ended { .. }))?;
        Ok(packet)
    }
}

fn place(row: &mut Fields<'_>) -> Result<TrayPlace, PacketError> {
    let place = TrayPlace { at: row.u64()?, len: row.u32()? };
    match row.u32()? {
        0 => Ok(place),
        _ => Err(PacketError::Field("place")),
    }
}

fn descriptor(row: &mut Fields<'_>) -> Result<Descriptor, PacketError> {
    let (loan, at, len) = (LoanId(row.u64()?), row.u64()?, row.u32()?);
    let place = match row.u32()? {
        0 => Place::Arena,
        1 => Place::Tray,
        _ => return Err(PacketError::Field("place")),
    };
    Ok(Descriptor { loan, place, at, len })
}

fn welcome(body: &[u8]) -> Result<Welcome, PacketError> {
    let mut fields = Fields(body);
    match fields.u32()? {
        VERSION => {}
        other => return Err(PacketError::Version(other)),
    }
    let frame_bytes_max = fields.u32()?;
    let (arena_bytes, tray_in_bytes, tray_out_bytes) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let address = std::str::from_utf8(fields.0).ok().filter(|address| address.len() <= ADDRESS_BYTES_MAX);
    let address = address.ok_or(PacketError::Field("address"))?.to_owned();
    Ok(Welcome { arena_bytes, tray_in_bytes, tray_out_bytes, frame_bytes_max, address })
}

/// A packet being written.
struct Packet(Vec<u8>);

impl Packet {
    fn new(op: u64, kind: u8, rows: usize) -> Packet {
        debug_assert!(rows <= ROWS_MAX, "{rows} rows");
        let mut bytes = Vec::with_capacity(HEAD_BYTES + 64 + rows * DESCRIPTOR_BYTES);
        bytes.extend_from_slice(&op.to_le_bytes());
        bytes.extend_from_slice(&[kind, 0]);
        bytes.extend_from_slice(&u16::try_from(rows).unwrap_or(u16::MAX).to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        Packet(bytes)
    }

    fn u32(&mut self, number: u32) -> &mut Packet {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn u64(&mut self, number: u64) -> &mut Packet {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn message<M: Message>(&mut self, message: &M) -> &mut Packet {
        message.encode(&mut self.0).expect("a vector grows as needed");
        self
    }

    /// All that was written is the body.
    fn end_body(&mut self) -> Vec<u8> {
        let body = u32::try_from(self.0.len() - HEAD_BYTES).unwrap_or(u32::MAX);
        self.0[12..HEAD_BYTES].copy_from_slice(&body.to_le_bytes());
        std::mem::take(&mut self.0)
    }

    fn places(&mut self, rows: &[TrayPlace]) -> Vec<u8> {
        self.0 = self.end_body();
        for row in rows {
            self.u64(row.at).u32(row.len).u32(0);
        }
        std::mem::take(&mut self.0)
    }

    fn descriptors(&mut self, rows: &[Descriptor]) -> Vec<u8> {
        self.0 = self.end_body();
        for row in rows {
            self.u64(row.loan.0).u64(row.at).u32(row.len).u32(u32::from(row.place == Place::Tray));
        }
        std::mem::take(&mut self.0)
    }
}

/// A packet that was taken apart, as far as that goes for all kinds.
struct Parts<'a> {
    op: u64,
    kind: u8,
    from: u8,
    count: usize,
    body: &'a [u8],
    rows: &'a [u8],
}

impl<'a> Parts<'a> {
    fn read(bytes: &'a [u8]) -> Result<Parts<'a>, PacketError> {
        let mut head = Fields(bytes);
        let (op, kind, from, count, body) = (head.u64()?, head.u8()?, head.u8()?, head.u16()?, head.u32()?);
        let wrong = PacketError::Length(bytes.len());
        let (body, rows) = head.0.split_at_checked(body as usize).ok_or(wrong)?;
        let count = usize::from(count);
        if count > ROWS_MAX {
            return Err(PacketError::Field("number of rows"));
        }
        Ok(Parts { op, kind, from, count, body, rows })
    }

    fn message<M: Message + Default>(&self) -> Result<M, PacketError> {
        M::decode(self.body).map_err(|_| PacketError::Field("body"))
    }

    fn rows<T>(
        &self,
        bytes: usize,
        read: impl Fn(&mut Fields<'a>) -> Result<T, PacketError>,
    ) -> Result<Vec<T>, PacketError> {
        if self.rows.len() != self.count * bytes {
            return Err(PacketError::Length(HEAD_BYTES + self.body.len() + self.rows.len()));
        }
        self.rows.chunks_exact(bytes).map(|row| read(&mut Fields(row))).collect()
    }

    fn expect_rows(&self, some: bool) -> Result<(), PacketError> {
        if some || self.count == 0 && self.rows.is_empty() { Ok(()) } else { Err(PacketError::Field("rows")) }
    }

    fn expect_body(&self, some: bool) -> Result<(), PacketError> {
        if some || self.body.is_empty() { Ok(()) } else { Err(PacketError::Field("body")) }
    }
}

/// Numbers one after another.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
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

    fn descriptors(count: usize) -> Vec<Descriptor> {
        let row = |number: u64| {
            let place = if number.is_multiple_of(2) { Place::Arena } else { Place::Tray };
            Descriptor { loan: LoanId(number + 1), place, at: number << 40, len: 7 }
        };
        (0..count as u64).map(row).collect()
    }

    fn to_node() -> Vec<ToNode> {
        vec![
            ToNode::Hello { maps: true },
            ToNode::Hello { maps: false },
            ToNode::Ask { op: 1, request: wire::release_to_pb(LeaseId(4)) },
            ToNode::Put { op: 2, places: vec![TrayPlace { at: 1 << 33, len: 9 }; 3] },
            ToNode::Save {
                op: 2,
                request: wire::release_to_pb(LeaseId(4)),
                places: vec![TrayPlace { at: 5, len: u32::MAX }],
            },
            ToNode::Finish { op: 3 },
            ToNode::Cancel { op: u64::MAX },
            ToNode::Return { loans: (0..ROWS_MAX as u64).map(LoanId).collect() },
        ]
    }

    fn to_client() -> Vec<ToClient> {
        let head = data::FetchHead { tiers: vec![0; ROWS_MAX], blocks: 3, ..data::FetchHead::default() };
        let mut all = vec![
            ToClient::Welcome(Welcome {
                arena_bytes: 1 << 40,
                tray_in_bytes: 2,
                tray_out_bytes: 3,
                frame_bytes_max: 4,
                address: "node:1".to_owned(),
            }),
            ToClient::Head { op: 1, head, rows: descriptors(ROWS_MAX) },
            ToClient::More { op: 2, rows: descriptors(2) },
            ToClient::End { op: 3, reason: 4 },
            ToClient::Offer {
                op: 4,
                offer: data::SaveOffer { wanted: vec![1], ..data::SaveOffer::default() },
            },
            ToClient::Taken { op: 5, frames: 6 },
            ToClient::Done { op: 6, done: data::SaveDone { seq: 1, ..data::SaveDone::default() } },
            ToClient::Noted { op: 7, pong: data::Pong { version: 1 } },
            ToClient::Ended { op: 8 },
        ];
        all.extend(Closing::ALL.map(ToClient::Closing));
        all
    }

    #[test]
    fn packets_survive_the_wire() {
        for packet in to_node() {
            let bytes = packet.encode();
            assert!(bytes.len() <= PACKET_BYTES_MAX);
            assert_eq!(ToNode::decode(&bytes), Ok(packet));
        }
        for packet in to_client() {
            let bytes = packet.encode();
            assert!(bytes.len() <= PACKET_BYTES_MAX);
            assert_eq!(ToClient::decode(&bytes), Ok(packet));
        }
    }

    #[test]
    fn packets_that_make_no_sense_are_refused() {
        for packet in to_node() {
            let bytes = packet.encode();
            // A message may end anywhere, a packet may not.
            assert!((0..HEAD_BYTES).all(|len| ToNode::decode(&bytes[..len]).is_err()), "{packet:?}");
            assert!(ToNode::decode(&[&bytes[..], &[0]].concat()).is_err(), "{packet:?} and a byte");
        }
        for packet in to_client() {
            let bytes = packet.encode();
            assert!((0..HEAD_BYTES).all(|len| ToClient::decode(&bytes[..len]).is_err()), "{packet:?}");
            assert!(ToClient::decode(&[&bytes[..], &[0]].concat()).is_err(), "{packet:?} and a byte");
        }
        let said = |bytes: &[u8]| ToNode::decode(bytes).unwrap_err().to_string();
        let mut hello = ToNode::Hello { maps: false }.encode();
        hello[HEAD_BYTES + 8] = 9;
        assert_eq!(said(&hello), "version 9 of this protocol, expected 3: run the same release on both ends");
        hello[8] = 77;
        assert_eq!(
            said(&hello),
            "a packet of kind 77, which is not known here: run the same release on both ends"
        );
        let mut rows = ToNode::Return { loans: vec![LoanId(1)] }.encode();
        rows[10..12].copy_from_slice(&u16::MAX.to_le_bytes());
        assert_eq!(said(&rows), "a packet whose number of rows makes no sense");
        assert!(
            ToNode::decode(&ToClient::Ended { op: 1 }.encode()).is_err(),
            "a packet of the other direction"
        );
    }

    proptest! {
        /// Any bytes give an answer, and what is taken for a packet says the same when written again.
        #[test]
        fn any_bytes_get_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0_u8..30, rows in 0_u8..5, row in prop::sample::select(vec![LOAN_BYTES, PLACE_BYTES, DESCRIPTOR_BYTES])) {
            let mut bytes = bytes;
            if bytes.len() >= HEAD_BYTES {
                let body = bytes.len() - HEAD_BYTES;
                let body = body.saturating_sub(usize::from(rows) * row).to_le_bytes();
                bytes[8..12].copy_from_slice(&[kind, 0, rows, 0]);
                bytes[12..16].copy_from_slice(&body[..4]);
            }
            if let Ok(packet) = ToNode::decode(&bytes) {
                prop_assert_eq!(ToNode::decode(&packet.encode()), Ok(packet));
            }
            if let Ok(packet) = ToClient::decode(&bytes) {
                prop_assert_eq!(ToClient::decode(&packet.encode()), Ok(packet));
            }
        }
    }
}
