//! A msgpack reader for untrusted bytes.
//!
//! It checks every length against the remaining bytes, and nesting uses no stack. Not here: the
//! meaning of the values.

use rmp::Marker;
use rmp::decode::{read_array_len, read_bin_len, read_int, read_map_len, read_str_len};

use super::EventError;

/// First bytes of non-negative integers, by their length.
const U8: u8 = 0xcc;
const U16: u8 = 0xcd;
const U32: u8 = 0xce;
const U64: u8 = 0xcf;

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueType {
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

impl ValueType {
    fn of_marker(marker: Marker) -> ValueType {
        match marker {
            Marker::Null | Marker::Reserved => ValueType::Nil,
            Marker::True | Marker::False => ValueType::Bool,
            Marker::FixPos(_)
            | Marker::FixNeg(_)
            | Marker::U8
            | Marker::U16
            | Marker::U32
            | Marker::U64
            | Marker::I8
            | Marker::I16
            | Marker::I32
            | Marker::I64 => ValueType::Integer,
            Marker::F32 | Marker::F64 => ValueType::Float,
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => ValueType::Text,
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => ValueType::Bytes,
            Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => ValueType::Array,
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => ValueType::Map,
            _ => ValueType::Extension,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            ValueType::Nil => "nil",
            ValueType::Bool => "a boolean",
            ValueType::Integer => "an integer",
            ValueType::Float => "a float",
            ValueType::Text => "a text",
            ValueType::Bytes => "bytes",
            ValueType::Array => "an array",
            ValueType::Map => "a map",
            ValueType::Extension => "an extension",
        }
    }
}

/// The values still to be read.
#[derive(Clone, Debug)]
pub(super) struct MsgpackReader<'a> {
    rest: &'a [u8],
}

impl<'a> MsgpackReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> MsgpackReader<'a> {
        MsgpackReader { rest: bytes }
    }

    /// Type of the next value.
    pub(super) fn peek_type(&self, field: &'static str) -> Result<ValueType, EventError> {
        let first = self.rest.first().ok_or(EventError::Truncated { field })?;
        Ok(ValueType::of_marker(Marker::from_u8(*first)))
    }

    /// The error for a value of another type than `wanted`.
    fn type_error(&self, field: &'static str, wanted: ValueType) -> EventError {
        match self.peek_type(field) {
            Ok(kind) if kind != wanted => EventError::UnexpectedType { field, got: kind.name() },
            _ => EventError::Truncated { field },
        }
    }

    /// `count`, capped by the remaining bytes: each value takes at least one byte.
    pub(super) fn capped_count(&self, count: usize) -> usize {
        count.min(self.rest.len())
    }

    pub(super) fn array(&mut self, field: &'static str) -> Result<usize, EventError> {
        let mut left = self.rest;
        let count = read_array_len(&mut left).map_err(|_| self.type_error(field, ValueType::Array))?;
        self.rest = left;
        Ok(count as usize)
    }

    pub(super) fn map(&mut self, field: &'static str) -> Result<usize, EventError> {
        let mut left = self.rest;
        let count = read_map_len(&mut left).map_err(|_| self.type_error(field, ValueType::Map))?;
        self.rest = left;
        Ok(count as usize)
    }

    /// Calls `each` for every field of a map, or of an array with the given field order. Fields
    /// beyond `names` get an empty name.
    pub(super) fn fields(
        &mut self,
        what: &'static str,
        names: &[&'static str],
        mut each: impl FnMut(&mut Self, &str) -> Result<(), EventError>,
    ) -> Result<(), EventError> {
        if self.peek_type(what)? == ValueType::Map {
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
        let mut left = self.rest;
        let length = read_str_len(&mut left).map_err(|_| self.type_error(field, ValueType::Text))?;
        self.take(left, length, field)
    }

    pub(super) fn bytes(&mut self, field: &'static str) -> Result<&'a [u8], EventError> {
        let mut left = self.rest;
        let length = read_bin_len(&mut left).map_err(|_| self.type_error(field, ValueType::Bytes))?;
        self.take(left, length, field)
    }

    fn take(&mut self, left: &'a [u8], length: u32, field: &'static str) -> Result<&'a [u8], EventError> {
        let (own, rest) = left.split_at_checked(length as usize).ok_or(EventError::Truncated { field })?;
        self.rest = rest;
        Ok(own)
    }

    /// A 64-bit integer; a negative one is returned by its bits.
    pub(super) fn int_bits(&mut self, field: &'static str) -> Result<u64, EventError> {
        let mut left = self.rest;
        if let Ok(number) = read_int::<u64, _>(&mut left) {
            self.rest = left;
            return Ok(number);
        }
        let mut left = self.rest;
        let number = read_int::<i64, _>(&mut left).map_err(|_| self.type_error(field, ValueType::Integer))?;
        self.rest = left;
        Ok(number.cast_unsigned())
    }

    /// An integer encoded as a full `uint64`, as nearly all hashes are. If the next value is
    /// something else, returns `None` and reads no byte.
    #[inline]
    pub(super) fn full_u64(&mut self) -> Option<u64> {
        let (&[U64, a, b, c, d, e, f, g, h], rest) = self.rest.split_first_chunk()? else { return None };
        self.rest = rest;
        Some(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }

    /// `count` token ids; `None` if another value is among them. The reader's position is then
    /// unspecified.
    pub(super) fn tokens(&mut self, count: usize) -> Option<Vec<u32>> {
        // Each takes at least one byte.
        if count > self.rest.len() {
            return None;
        }
        let mut ids = vec![0; count];
        for id in &mut ids {
            let (token, rest) = match *self.rest {
                [byte @ 0..=0x7f, ref rest @ ..] => (byte.into(), rest),
                [U16, a, b, ref rest @ ..] => (u16::from_be_bytes([a, b]).into(), rest),
                [U32, a, b, c, d, ref rest @ ..] => (u32::from_be_bytes([a, b, c, d]), rest),
                [U8, byte, ref rest @ ..] => (byte.into(), rest),
                _ => (self.token()?, self.rest),
            };
            (*id, self.rest) = (token, rest);
        }
        Some(ids)
    }

    /// A token id; if the next value is something else, returns `None` and reads no byte.
    pub(super) fn token(&mut self) -> Option<u32> {
        let mut left = self.rest;
        let id = read_int::<u32, _>(&mut left).ok()?;
        self.rest = left;
        Some(id)
    }

    pub(super) fn number(&mut self, field: &'static str) -> Result<f64, EventError> {
        let mut left = self.rest;
        let number = match self.peek_type(field)? {
            ValueType::Float if self.rest.first() == Some(&Marker::F32.to_u8()) => {
                rmp::decode::read_f32(&mut left).ok().map(f64::from)
            }
            ValueType::Float => rmp::decode::read_f64(&mut left).ok(),
            #[expect(clippy::cast_precision_loss, reason = "a time in seconds")]
            ValueType::Integer => read_int::<i64, _>(&mut left).ok().map(|number| number as f64),
            other => return Err(EventError::UnexpectedType { field, got: other.name() }),
        };
        self.rest = left;
        number.ok_or(EventError::Truncated { field })
    }

    /// Whether the next value is nil; if so, consumes it.
    pub(super) fn take_nil(&mut self, field: &'static str) -> Result<bool, EventError> {
        let is_nil = self.peek_type(field)? == ValueType::Nil;
        if is_nil {
            self.rest = &self.rest[1..];
        }
        Ok(is_nil)
    }

    pub(super) fn optional_u32(&mut self, field: &'static str) -> Result<Option<u32>, EventError> {
        if self.take_nil(field)? {
            return Ok(None);
        }
        self.token().map(Some).ok_or_else(|| self.type_error(field, ValueType::Integer))
    }

    pub(super) fn optional_text(&mut self, field: &'static str) -> Result<Option<&'a [u8]>, EventError> {
        if self.take_nil(field)? { Ok(None) } else { self.text(field).map(Some) }
    }

    pub(super) fn optional_string(&mut self, field: &'static str) -> Result<Option<String>, EventError> {
        let text = self.optional_text(field)?;
        Ok(text.map(|text| String::from_utf8_lossy(text).into_owned()))
    }

    /// A reader of the next value alone, which counts as consumed.
    pub(super) fn take_value(&mut self, field: &'static str) -> Result<MsgpackReader<'a>, EventError> {
        let before = self.rest;
        self.skip().map_err(|_| EventError::Truncated { field })?;
        Ok(MsgpackReader { rest: &before[..before.len() - self.rest.len()] })
    }

    /// Skips the next value and everything nested in it.
    pub(super) fn skip(&mut self) -> Result<(), EventError> {
        let cut = EventError::Truncated { field: "a value" };
        // Counted in 64 bits: a 32-bit length for every byte of the payload cannot overflow it.
        let mut values = 1u64;
        while values > 0 {
            values -= 1;
            let (first, rest) = self.rest.split_first().ok_or(cut.clone())?;
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
            self.rest = rest.get(bytes..).ok_or(cut.clone())?;
            values += inside;
        }
        Ok(())
    }
}
