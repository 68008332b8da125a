//! Msgpack values one after the other, out of bytes that anybody may have sent.
//!
//! Nothing is believed: a length is compared with what is left, and nesting costs no stack. Not here: what the values mean.

use rmp::Marker;
use rmp::decode::{read_array_len, read_bin_len, read_int, read_map_len, read_str_len};

use super::EventError;

/// First bytes of numbers that are not negative, by their length.
const U8: u8 = 0xcc;
const U16: u8 = 0xcd;
const U32: u8 = 0xce;
const U64: u8 = 0xcf;

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Nil,
    Bool,
    Integer,
    Float,
    Text,
    Bytes,
    Array,
    Map,
    Extension,
}

impl Kind {
    fn of(marker: Marker) -> Kind {
        match marker {
            Marker::Null | Marker::Reserved => Kind::Nil,
            Marker::True | Marker::False => Kind::Bool,
            Marker::FixPos(_)
            | Marker::FixNeg(_)
            | Marker::U8
            | Marker::U16
            | Marker::U32
            | Marker::U64
            | Marker::I8
            | Marker::I16
            | Marker::I32
            | Marker::I64 => Kind::Integer,
            Marker::F32 | Marker::F64 => Kind::Float,
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => Kind::Text,
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => Kind::Bytes,
            Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => Kind::Array,
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => Kind::Map,
            _ => Kind::Extension,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Nil => "nil",
            Kind::Bool => "a boolean",
            Kind::Integer => "an integer",
            Kind::Float => "a float",
            Kind::Text => "a text",
            Kind::Bytes => "bytes",
            Kind::Array => "an array",
            Kind::Map => "a map",
            Kind::Extension => "an extension",
        }
    }
}

/// Values that are still to be read.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { left: bytes }
    }

    /// What the next value is.
    pub(super) fn kind(&self, field: &'static str) -> Result<Kind, EventError> {
        let first = self.left.first().ok_or(EventError::Cut { field })?;
        Ok(Kind::of(Marker::from_u8(*first)))
    }

    /// What stands there in place of what was to be.
    fn wrong(&self, field: &'static str, wanted: Kind) -> EventError {
        match self.kind(field) {
            Ok(kind) if kind != wanted => EventError::Kind { field, got: kind.name() },
            _ => EventError::Cut { field },
        }
    }

    /// How many of `count` values there can be: each is a byte at least.
    pub(super) fn plausible(&self, count: usize) -> usize {
        count.min(self.left.len())
    }

    pub(super) fn array(&mut self, field: &'static str) -> Result<usize, EventError> {
        let mut left = self.left;
        let count = read_array_len(&mut left).map_err(|_| self.wrong(field, Kind::Array))?;
        self.left = left;
        Ok(count as usize)
    }

    pub(super) fn map(&mut self, field: &'static str) -> Result<usize, EventError> {
        let mut left = self.left;
        let count = read_map_len(&mut left).map_err(|_| self.wrong(field, Kind::Map))?;
        self.left = left;
        Ok(count as usize)
    }

    /// The fields of an array whose order is known, or of a map, each by its name. One whose name is not known has an empty one.
    pub(super) fn fields(
        &mut self,
        what: &'static str,
        names: &[&'static str],
        mut each: impl FnMut(&mut Self, &str) -> Result<(), EventError>,
    ) -> Result<(), EventError> {
        if self.kind(what)? == Kind::Map {
            for _ in 0..self.map(what)? {
                let name = self.text("a field's name")?;
                each(self, std::str::from_utf8(name).unwrap_or_default())?;
            }
            return Ok(());
        }
        for at in 0..self.array(what)? {
            each(self, names.get(at).copied().unwrap_or_default())?;
        }
        Ok(())
    }

    pub(super) fn text(&mut self, field: &'static str) -> Result<&'a [u8], EventError> {
        let mut left = self.left;
        let length = read_str_len(&mut left).map_err(|_| self.wrong(field, Kind::Text))?;
        self.take(left, length, field)
    }

    pub(super) fn bytes(&mut self, field: &'static str) -> Result<&'a [u8], EventError> {
        let mut left = self.left;
        let length = read_bin_len(&mut left).map_err(|_| self.wrong(field, Kind::Bytes))?;
        self.take(left, length, field)
    }

    fn take(&mut self, left: &'a [u8], length: u32, field: &'static str) -> Result<&'a [u8], EventError> {
        let (own, rest) = left.split_at_checked(length as usize).ok_or(EventError::Cut { field })?;
        self.left = rest;
        Ok(own)
    }

    /// An integer of 64 bits, a negative one by its bits.
    pub(super) fn bits(&mut self, field: &'static str) -> Result<u64, EventError> {
        let mut left = self.left;
        if let Ok(number) = read_int::<u64, _>(&mut left) {
            self.left = left;
            return Ok(number);
        }
        let mut left = self.left;
        let number = read_int::<i64, _>(&mut left).map_err(|_| self.wrong(field, Kind::Integer))?;
        self.left = left;
        Ok(number.cast_unsigned())
    }

    /// A number of 64 bits in full length, as nearly all hashes are; nothing where something else stands, which is not read then.
    #[inline]
    pub(super) fn long(&mut self) -> Option<u64> {
        let (&[U64, a, b, c, d, e, f, g, h], rest) = self.left.split_first_chunk()? else { return None };
        self.left = rest;
        Some(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }

    /// Ids of so many tokens; nothing where something else stands among them, and then nobody knows how far was read.
    pub(super) fn tokens(&mut self, count: usize) -> Option<Vec<u32>> {
        // Each is a byte at least.
        if count > self.left.len() {
            return None;
        }
        let mut ids = vec![0; count];
        for id in &mut ids {
            let (token, rest) = match *self.left {
                [byte @ 0..=0x7f, ref rest @ ..] => (byte.into(), rest),
                [U16, a, b, ref rest @ ..] => (u16::from_be_bytes([a, b]).into(), rest),
                [U32, a, b, c, d, ref rest @ ..] => (u32::from_be_bytes([a, b, c, d]), rest),
                [U8, byte, ref rest @ ..] => (byte.into(), rest),
                _ => (self.token()?, self.left),
            };
            (*id, self.left) = (token, rest);
        }
        Some(ids)
    }

    /// A token's id; nothing where something else stands, which is not read then.
    pub(super) fn token(&mut self) -> Option<u32> {
        let mut left = self.left;
        let id = read_int::<u32, _>(&mut left).ok()?;
        self.left = left;
        Some(id)
    }

    pub(super) fn number(&mut self, field: &'static str) -> Result<f64, EventError> {
        let mut left = self.left;
        let number = match self.kind(field)? {
            Kind::Float if self.left.first() == Some(&Marker::F32.to_u8()) => {
                rmp::decode::read_f32(&mut left).ok().map(f64::from)
            }
            Kind::Float => rmp::decode::read_f64(&mut left).ok(),
            #[expect(clippy::cast_precision_loss, reason = "a time in seconds")]
            Kind::Integer => read_int::<i64, _>(&mut left).ok().map(|number| number as f64),
            other => return Err(EventError::Kind { field, got: other.name() }),
        };
        self.left = left;
        number.ok_or(EventError::Cut { field })
    }

    /// Whether there is nothing, which is read then.
    pub(super) fn nil(&mut self, field: &'static str) -> Result<bool, EventError> {
        let is_nil = self.kind(field)? == Kind::Nil;
        if is_nil {
            self.left = &self.left[1..];
        }
        Ok(is_nil)
    }

    pub(super) fn optional_u32(&mut self, field: &'static str) -> Result<Option<u32>, EventError> {
        if self.nil(field)? {
            return Ok(None);
        }
        self.token().map(Some).ok_or_else(|| self.wrong(field, Kind::Integer))
    }

    pub(super) fn optional_text(&mut self, field: &'static str) -> Result<Option<&'a [u8]>, EventError> {
        if self.nil(field)? { Ok(None) } else { self.text(field).map(Some) }
    }

    pub(super) fn optional_string(&mut self, field: &'static str) -> Result<Option<String>, EventError> {
        let text = self.optional_text(field)?;
        Ok(text.map(|text| String::from_utf8_lossy(text).into_owned()))
    }

    /// The next value by itself, which counts as read.
    pub(super) fn whole(&mut self, field: &'static str) -> Result<Reader<'a>, EventError> {
        let before = self.left;
        self.skip().map_err(|_| EventError::Cut { field })?;
        Ok(Reader { left: &before[..before.len() - self.left.len()] })
    }

    /// Passes over the next value, and all that is in it.
    pub(super) fn skip(&mut self) -> Result<(), EventError> {
        let cut = EventError::Cut { field: "a value" };
        // Counted in 64 bits: a length of 32 for each byte there is does not get near it.
        let mut values = 1u64;
        while values > 0 {
            values -= 1;
            let (first, rest) = self.left.split_first().ok_or(cut.clone())?;
            let marker = Marker::from_u8(*first);
            let number = |bytes: usize| {
                let digits = rest.get(..bytes).ok_or(cut.clone())?;
                Ok::<_, EventError>(digits.iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte)))
            };
            let (bytes, inside) = match marker {
                Marker::Null | Marker::True | Marker::False | Marker::Reserved => (0, 0),
                Marker::FixPos(_) | Marker::FixNeg(_) => (0, 0),
                Marker::U8 | Marker::I8 => (1, 0),
                Marker::U16 | Marker::I16 => (2, 0),
                Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
                Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
                Marker::FixStr(length) => (length.into(), 0),
                Marker::Str8 | Marker::Bin8 => (1 + number(1)?, 0),
                Marker::Str16 | Marker::Bin16 => (2 + number(2)?, 0),
                Marker::Str32 | Marker::Bin32 => (4 + number(4)?, 0),
                Marker::FixArray(count) => (0, count.into()),
                Marker::Array16 => (2, number(2)?),
                Marker::Array32 => (4, number(4)?),
                Marker::FixMap(count) => (0, 2 * u64::from(count)),
                Marker::Map16 => (2, 2 * number(2)?),
                Marker::Map32 => (4, 2 * number(4)?),
                Marker::FixExt1 => (2, 0),
                Marker::FixExt2 => (3, 0),
                Marker::FixExt4 => (5, 0),
                Marker::FixExt8 => (9, 0),
                Marker::FixExt16 => (17, 0),
                Marker::Ext8 => (2 + number(1)?, 0),
                Marker::Ext16 => (3 + number(2)?, 0),
                Marker::Ext32 => (5 + number(4)?, 0),
            };
            let bytes = usize::try_from(bytes).map_err(|_| cut.clone())?;
            self.left = rest.get(bytes..).ok_or(cut.clone())?;
            values += inside;
        }
        Ok(())
    }
}
