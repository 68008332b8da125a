//! Records of an established TLS 1.3 connection: seals plain bytes into records, and opens them.
//!
//! rustls does the handshake and each record's cipher, nonce, padding and tag. This file finds the
//! record boundaries, so that bytes are opened in their read buffer without another copy. Such a
//! connection carries only data and alerts: no session is resumed, and no key is updated (a
//! connection is retired after [`RECORDS_RETIRE`] records). Not here: the handshake
//! (`handshake.rs`), sockets (`stream.rs`).

use std::ops::Range;

use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundChunks,
    OutboundPlainMessage,
};
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, ExtractedSecrets, ProtocolVersion,
    Tls13CipherSuite,
};

use super::alert_stream_error;
use crate::stream::StreamError;

/// Most plain bytes of one record, as TLS allows.
pub(super) const PLAIN_BYTES_MAX: usize = 16_384;

/// Bytes before each record: type, version, length.
pub(super) const HEAD_BYTES: usize = 5;

/// Largest record in bytes: its head, and the most that TLS 1.3 allows after it.
pub(super) const RECORD_BYTES_MAX: usize = HEAD_BYTES + PLAIN_BYTES_MAX + 256;

/// Records after which a connection takes no further operation: 64 GiB, a quarter of a key's limit.
pub(super) const RECORDS_RETIRE: u64 = 1 << 22;

/// Most records that one key may seal or open (RFC 8446 section 5.5: 2^24.5 full ones for AES-GCM).
const RECORDS_MAX: u64 = 1 << 24;

const _: () = assert!(RECORDS_RETIRE < RECORDS_MAX / 2, "the running operation must still fit");

/// Seals records.
pub(super) struct Sealer {
    cipher: Box<dyn MessageEncrypter>,
    records: u64,
}

/// Opens records.
pub(super) struct Opener {
    cipher: Box<dyn MessageDecrypter>,
    records: u64,
}

/// The content at the start of the received bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OpenedRecord {
    /// No complete record yet.
    Incomplete,
    /// Data: its range, and the length of its record.
    Data { plain: Range<usize>, record: usize },
    /// The peer closes its side.
    Closed,
}

/// The ciphers of both directions after the handshake.
pub(super) fn ciphers(
    suite: &'static Tls13CipherSuite,
    secrets: ExtractedSecrets,
) -> Result<(Sealer, Opener), StreamError> {
    let ((sealed, seal), (opened, open)) = (secrets.tx, secrets.rx);
    let ((seal_key, seal_iv), (open_key, open_iv)) = (key_of(seal)?, key_of(open)?);
    let sealer = Sealer { cipher: suite.aead_alg.encrypter(seal_key, seal_iv), records: sealed };
    let opener = Opener { cipher: suite.aead_alg.decrypter(open_key, open_iv), records: opened };
    Ok((sealer, opener))
}

fn key_of(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv), StreamError> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(StreamError::Protocol("a cipher that was not offered".to_owned())),
    }
}

/// Takes the next record number of a direction.
fn next_number(records: &mut u64) -> Result<u64, StreamError> {
    let number = *records;
    if number >= RECORDS_MAX {
        return Err(StreamError::Broken("the connection's keys are used up".to_owned()));
    }
    *records += 1;
    Ok(number)
}

impl Sealer {
    /// Seals one data record of at most [`PLAIN_BYTES_MAX`].
    pub(super) fn seal(&mut self, plain: OutboundChunks<'_>) -> Result<Vec<u8>, StreamError> {
        self.seal_as(ContentType::ApplicationData, plain)
    }

    /// Seals the alert that closes our side.
    pub(super) fn seal_close(&mut self) -> Result<Vec<u8>, StreamError> {
        const WARNING: u8 = 1;
        let alert = [WARNING, AlertDescription::CloseNotify.into()];
        self.seal_as(ContentType::Alert, OutboundChunks::Single(&alert))
    }

    fn seal_as(&mut self, typ: ContentType, payload: OutboundChunks<'_>) -> Result<Vec<u8>, StreamError> {
        let number = next_number(&mut self.records)?;
        let message = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_3, payload };
        let sealed = self.cipher.encrypt(message, number);
        sealed.map(|record| record.encode()).map_err(|error| StreamError::Broken(error.to_string()))
    }

    pub(super) fn is_worn(&self) -> bool {
        self.records >= RECORDS_RETIRE
    }

    #[cfg(test)]
    pub(super) fn wear_out(&mut self) {
        self.records = RECORDS_RETIRE;
    }
}

impl Opener {
    /// Opens the record at the start of `came`, in place.
    pub(super) fn open(&mut self, received: &mut [u8]) -> Result<OpenedRecord, StreamError> {
        let Some(record) = record_len(received)? else { return Ok(OpenedRecord::Incomplete) };
        let Some(body) = received.get_mut(HEAD_BYTES..record) else { return Ok(OpenedRecord::Incomplete) };
        let number = next_number(&mut self.records)?;
        let typ = ContentType::ApplicationData;
        let sealed = InboundOpaqueMessage::new(typ, ProtocolVersion::TLSv1_2, body);
        let opened = self.cipher.decrypt(sealed, number);
        let opened =
            opened.map_err(|_| StreamError::Broken("a record was modified in transit".to_owned()))?;
        match opened.typ {
            ContentType::ApplicationData => {
                let plain = HEAD_BYTES..HEAD_BYTES + opened.payload.len();
                Ok(OpenedRecord::Data { plain, record })
            }
            ContentType::Alert => match opened.payload {
                &[_, description] => match AlertDescription::from(description) {
                    AlertDescription::CloseNotify => Ok(OpenedRecord::Closed),
                    other => Err(alert_stream_error(other)),
                },
                _ => Err(StreamError::Protocol("a malformed alert".to_owned())),
            },
            _ => Err(StreamError::Protocol("a TLS handshake message among data".to_owned())),
        }
    }

    pub(super) fn is_retired(&self) -> bool {
        self.records >= RECORDS_RETIRE
    }
}

/// Length of the data record at the start of `came`, once its head is there. After the handshake
/// all records have the data type.
fn record_len(came: &[u8]) -> Result<Option<usize>, StreamError> {
    const DATA: u8 = 23;
    match record_head(came)? {
        Some((DATA, record)) => Ok(Some(record)),
        Some(_) => Err(not_tls()),
        None => Ok(None),
    }
}

/// Type and length of the record at the start of `came`, once its head is there.
pub(super) fn record_head(came: &[u8]) -> Result<Option<(u8, usize)>, StreamError> {
    // Change of cipher, alert, handshake, data.
    if came.first().is_some_and(|typ| !(20..=23).contains(typ)) {
        return Err(not_tls());
    }
    let &[typ, major, _, high, low, ..] = came else { return Ok(None) };
    let record = HEAD_BYTES + usize::from(u16::from_be_bytes([high, low]));
    if major != 3 || record > RECORD_BYTES_MAX { Err(not_tls()) } else { Ok(Some((typ, record))) }
}

fn not_tls() -> StreamError {
    StreamError::Protocol("bytes that are not TLS 1.3".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn record_heads_are_parsed_or_rejected() {
        assert_eq!(record_head(b""), Ok(None));
        assert_eq!(record_head(b"\x17\x03\x03\x40"), Ok(None));
        assert_eq!(record_head(b"\x17\x03\x03\x40\x11 and more"), Ok(Some((23, 5 + 0x4011))));
        for no_tls in
            [&b"G"[..], b"\x00", b"\x18\x03\x03\x00\x01", b"\x17\x02\x03\x00\x01", b"\x17\x03\x03\xff\xff"]
        {
            assert!(matches!(record_head(no_tls), Err(StreamError::Protocol(_))), "{no_tls:?}");
        }
        let largest = u16::try_from(RECORD_BYTES_MAX - HEAD_BYTES).unwrap();
        let head_of = |bytes: u16| record_head(&[&b"\x17\x03\x03"[..], &bytes.to_be_bytes()].concat());
        assert!(head_of(largest).is_ok() && head_of(largest + 1).is_err());
        // After the handshake only data records are valid.
        assert!(record_len(b"\x16\x03\x03\x00\x01\x00").is_err());
    }

    #[test]
    fn a_key_seals_no_more_than_its_limit() {
        let mut records = RECORDS_MAX - 1;
        assert_eq!(next_number(&mut records), Ok(RECORDS_MAX - 1));
        assert!(next_number(&mut records).is_err());
    }
}
