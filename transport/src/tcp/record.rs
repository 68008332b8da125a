//! Records of an established TLS 1.3 connection: plain bytes in, records out, and back.
//!
//! rustls does the handshake and each record's cipher, nonce, padding and tag; what is here is where a record
//! begins and ends, so that bytes are opened where they were read and nothing waits in buffers between. Nothing
//! but data and alerts comes on such a connection: no session is resumed and no key is changed (a connection that
//! sent or got [`RECORDS_RETIRE`] is left for a new one).
//! Not here: the handshake (`handshake.rs`), sockets (`stream.rs`).

use std::ops::Range;

use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundChunks,
    OutboundPlainMessage,
};
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, ExtractedSecrets, ProtocolVersion,
    Tls13CipherSuite,
};

use super::alert_loss;
use crate::stream::Loss;

/// Plain bytes of one record, at most: what TLS allows.
pub(super) const PLAIN_BYTES_MAX: usize = 16_384;

/// Bytes before each record: type, version, length.
pub(super) const HEAD_BYTES: usize = 5;

/// Bytes of the largest record: its head, what TLS 1.3 allows behind it.
pub(super) const RECORD_BYTES_MAX: usize = HEAD_BYTES + PLAIN_BYTES_MAX + 256;

/// Records after which a connection takes no further operation: 64 GiB, a quarter of what one key may seal.
pub(super) const RECORDS_RETIRE: u64 = 1 << 22;

/// Records one key seals or opens at most (RFC 8446 section 5.5: 2^24.5 full ones for AES-GCM).
const RECORDS_MAX: u64 = 1 << 24;

const _: () = assert!(RECORDS_RETIRE < RECORDS_MAX / 2, "the operation under way must still fit");

/// Makes records.
pub(super) struct Sealer {
    cipher: Box<dyn MessageEncrypter>,
    records: u64,
}

/// Opens records.
pub(super) struct Opener {
    cipher: Box<dyn MessageDecrypter>,
    records: u64,
}

/// What lies at the start of the bytes that came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// No whole record yet.
    Part,
    /// Data, and how many bytes its record had.
    Data { plain: Range<usize>, record: usize },
    /// The peer said that it sends no more.
    Closed,
}

/// Both directions of a connection whose handshake is over.
pub(super) fn ciphers(
    suite: &'static Tls13CipherSuite,
    secrets: ExtractedSecrets,
) -> Result<(Sealer, Opener), Loss> {
    let ((sealed, seal), (opened, open)) = (secrets.tx, secrets.rx);
    let ((seal_key, seal_iv), (open_key, open_iv)) = (key_of(seal)?, key_of(open)?);
    let sealer = Sealer { cipher: suite.aead_alg.encrypter(seal_key, seal_iv), records: sealed };
    let opener = Opener { cipher: suite.aead_alg.decrypter(open_key, open_iv), records: opened };
    Ok((sealer, opener))
}

fn key_of(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv), Loss> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(Loss::Protocol("a cipher that was not offered".to_owned())),
    }
}

/// Takes the next number of a direction.
fn next_number(records: &mut u64) -> Result<u64, Loss> {
    let number = *records;
    if number >= RECORDS_MAX {
        return Err(Loss::Broken("the connection's keys are used up".to_owned()));
    }
    *records += 1;
    Ok(number)
}

impl Sealer {
    /// One record of data, at most [`PLAIN_BYTES_MAX`].
    pub(super) fn seal(&mut self, plain: OutboundChunks<'_>) -> Result<Vec<u8>, Loss> {
        self.seal_as(ContentType::ApplicationData, plain)
    }

    /// Says that nothing more is sent.
    pub(super) fn seal_close(&mut self) -> Result<Vec<u8>, Loss> {
        const WARNING: u8 = 1;
        let alert = [WARNING, AlertDescription::CloseNotify.into()];
        self.seal_as(ContentType::Alert, OutboundChunks::Single(&alert))
    }

    fn seal_as(&mut self, typ: ContentType, payload: OutboundChunks<'_>) -> Result<Vec<u8>, Loss> {
        let number = next_number(&mut self.records)?;
        let message = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_3, payload };
        let sealed = self.cipher.encrypt(message, number);
        sealed.map(|record| record.encode()).map_err(|error| Loss::Broken(error.to_string()))
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
    /// Opens the record that `came` begins with, in place.
    pub(super) fn open(&mut self, came: &mut [u8]) -> Result<Opened, Loss> {
        let Some(record) = record_len(came)? else { return Ok(Opened::Part) };
        let Some(body) = came.get_mut(HEAD_BYTES..record) else { return Ok(Opened::Part) };
        let number = next_number(&mut self.records)?;
        let typ = ContentType::ApplicationData;
        let sealed = InboundOpaqueMessage::new(typ, ProtocolVersion::TLSv1_2, body);
        let opened = self.cipher.decrypt(sealed, number);
        let opened = opened.map_err(|_| Loss::Broken("a record that was changed on its way".to_owned()))?;
        match opened.typ {
            ContentType::ApplicationData => {
                let plain = HEAD_BYTES..HEAD_BYTES + opened.payload.len();
                Ok(Opened::Data { plain, record })
            }
            ContentType::Alert => match opened.payload {
                &[_, description] => match AlertDescription::from(description) {
                    AlertDescription::CloseNotify => Ok(Opened::Closed),
                    other => Err(alert_loss(other)),
                },
                _ => Err(Loss::Protocol("an alert that is none".to_owned())),
            },
            _ => Err(Loss::Protocol("a TLS handshake message among data".to_owned())),
        }
    }

    pub(super) fn is_worn(&self) -> bool {
        self.records >= RECORDS_RETIRE
    }
}

/// Bytes of the record that `came` begins with, once its head is there; after the handshake all look alike.
fn record_len(came: &[u8]) -> Result<Option<usize>, Loss> {
    const DATA: u8 = 23;
    match head(came)? {
        Some((DATA, record)) => Ok(Some(record)),
        Some(_) => Err(no_tls()),
        None => Ok(None),
    }
}

/// Type and bytes of the record that `came` begins with, once its head is there.
pub(super) fn head(came: &[u8]) -> Result<Option<(u8, usize)>, Loss> {
    // Change of cipher, alert, handshake, data.
    if came.first().is_some_and(|typ| !(20..=23).contains(typ)) {
        return Err(no_tls());
    }
    let &[typ, major, _, high, low, ..] = came else { return Ok(None) };
    let record = HEAD_BYTES + usize::from(u16::from_be_bytes([high, low]));
    if major != 3 || record > RECORD_BYTES_MAX { Err(no_tls()) } else { Ok(Some((typ, record))) }
}

fn no_tls() -> Loss {
    Loss::Protocol("bytes that are no TLS 1.3".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_head_says_how_long_its_record_is_or_that_it_is_none() {
        assert_eq!(head(b""), Ok(None));
        assert_eq!(head(b"\x17\x03\x03\x40"), Ok(None));
        assert_eq!(head(b"\x17\x03\x03\x40\x11 and more"), Ok(Some((23, 5 + 0x4011))));
        for no_tls in
            [&b"G"[..], b"\x00", b"\x18\x03\x03\x00\x01", b"\x17\x02\x03\x00\x01", b"\x17\x03\x03\xff\xff"]
        {
            assert!(matches!(head(no_tls), Err(Loss::Protocol(_))), "{no_tls:?}");
        }
        let largest = u16::try_from(RECORD_BYTES_MAX - HEAD_BYTES).unwrap();
        let head_of = |bytes: u16| head(&[&b"\x17\x03\x03"[..], &bytes.to_be_bytes()].concat());
        assert!(head_of(largest).is_ok() && head_of(largest + 1).is_err());
        // After the handshake only data comes.
        assert!(record_len(b"\x16\x03\x03\x00\x01\x00").is_err());
    }

    #[test]
    fn a_key_seals_no_more_than_it_may() {
        let mut records = RECORDS_MAX - 1;
        assert_eq!(next_number(&mut records), Ok(RECORDS_MAX - 1));
        assert!(next_number(&mut records).is_err());
    }
}
