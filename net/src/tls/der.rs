//! Reads the parts of DER (X.690) that the TLS library does not give: elements, the end of a
//! certificate's validity, and the issuer of a list of revoked certificates.
//!
//! Not here: the names in certificates (`names/`), and verification (`authority.rs`).

use std::time::Duration;

use rustls_pki_types::UnixTime;

pub(super) const SEQUENCE: u8 = 0x30;
pub(super) const OBJECT_IDENTIFIER: u8 = 0x06;
pub(super) const OCTETS: u8 = 0x04;
const INTEGER: u8 = 0x02;
/// The version of a certificate.
const VERSION: u8 = 0xA0;
/// A time with two digits of the year.
const UTC_TIME: u8 = 0x17;
/// A time with four digits of the year.
const GENERALIZED_TIME: u8 = 0x18;

/// Content of the single element that makes up `bytes`.
pub(super) fn only_element(bytes: &[u8], tag: u8) -> Option<&[u8]> {
    let (found, value, rest) = element(bytes)?;
    (found == tag && rest.is_empty()).then_some(value)
}

/// All elements of `bytes`. A malformed element yields `None` and ends the iteration.
pub(super) fn elements(bytes: &[u8]) -> impl Iterator<Item = Option<(u8, &[u8])>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some((tag, value, behind)) = element(rest) else {
            rest = &[];
            return Some(None);
        };
        rest = behind;
        Some(Some((tag, value)))
    })
}

/// The first element: its tag, its content, and the bytes after it.
pub(super) fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, short], rest) = bytes.split_first_chunk()?;
    // X.509 uses no tags of more than one byte.
    if tag & 0x1F == 0x1F {
        return None;
    }
    let (len, rest) = if short < 0x80 {
        (usize::from(short), rest)
    } else {
        let len_bytes = usize::from(short & 0x7F);
        if !(1..=4).contains(&len_bytes) {
            return None;
        }
        let (len, rest) = rest.split_at_checked(len_bytes)?;
        (len.iter().fold(0, |len, byte| len << 8 | usize::from(*byte)), rest)
    };
    let (value, behind) = rest.split_at_checked(len)?;
    Some((tag, value, behind))
}

/// The last second of a certificate's validity; `None` if it is not DER.
pub(super) fn not_after(leaf: &[u8]) -> Option<UnixTime> {
    let (SEQUENCE, to_be_signed, _) = element(only_element(leaf, SEQUENCE)?)? else { return None };
    let parts = elements(to_be_signed).collect::<Option<Vec<_>>>()?;
    let (tag, _) = *parts.first()?;
    // Before the validity come the version, which may be absent, number, algorithm and issuer.
    let (SEQUENCE, validity) = *parts.get(if tag == VERSION { 4 } else { 3 })? else { return None };
    let (tag, text) = elements(validity).nth(1)??;
    parse_time(tag, text)
}

/// The distinguished name of a list's issuer, without its head; `None` if it is not DER (RFC 5280,
/// section 5.1).
pub(super) fn list_issuer(list: &[u8]) -> Option<&[u8]> {
    let (SEQUENCE, to_be_signed, _) = element(only_element(list, SEQUENCE)?)? else { return None };
    let mut parts = elements(to_be_signed);
    let (tag, _) = parts.next()??;
    // The version may be absent; the algorithm follows.
    let (SEQUENCE, issuer) = parts.nth(usize::from(tag == INTEGER))?? else { return None };
    Some(issuer)
}

/// A time in the form of RFC 5280, section 4.1.2.5: in UTC, with seconds and without fractions.
fn parse_time(tag: u8, text: &[u8]) -> Option<UnixTime> {
    let digits = text.strip_suffix(b"Z")?;
    let pairs: Vec<u64> = digits.chunks(2).map(pair).collect::<Option<_>>()?;
    let (year, rest) = match (tag, &pairs[..]) {
        (UTC_TIME, [year, rest @ ..]) => (if *year < 50 { 2000 } else { 1900 } + year, rest),
        (GENERALIZED_TIME, [century, year, rest @ ..]) => (century * 100 + year, rest),
        _ => return None,
    };
    let [month @ 1..=12, day @ 1..=31, hour, minute, second] = *rest else { return None };
    let seconds = (days_since_1970(year, month, day)? * 24 + hour) * 3600 + minute * 60 + second;
    Some(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
}

fn pair(digits: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok().filter(|text| text.len() == 2 && !text.starts_with('+'))?;
    text.parse().ok()
}

/// Days from 1970 to a date of the Gregorian calendar; `None` for an earlier one.
fn days_since_1970(year: u64, month: u64, day: u64) -> Option<u64> {
    /// Days in the year before each month.
    const BEFORE: [u64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    // Leap days until this date, from the year 0.
    let years = if month > 2 { year + 1 } else { year };
    let leap_days = |years: u64| years.div_ceil(4) - years.div_ceil(100) + years.div_ceil(400);
    let leaps = leap_days(years).checked_sub(leap_days(1970))?;
    Some(year.checked_sub(1970)? * 365 + leaps + BEFORE[usize::try_from(month).ok()? - 1] + day - 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    #[test]
    fn reads_the_end_of_certificates() {
        let key = KeyPair::generate().unwrap();
        for (year, month, day) in [
            (1970, 1, 1),
            (1999, 12, 31),
            (2000, 2, 29),
            (2026, 3, 1),
            (2049, 12, 31),
            (2050, 1, 1),
            (2100, 3, 1),
        ] {
            let mut params = CertificateParams::new(vec!["kvfleet".to_owned()]).unwrap();
            params.not_after = date_time_ymd(year, month, day) + Duration::from_secs(86_399);
            let certificate = params.self_signed(&key).unwrap();
            let end = u64::try_from(params.not_after.unix_timestamp()).unwrap();
            assert_eq!(not_after(certificate.der()).unwrap().as_secs(), end, "{year}-{month}-{day}");
        }
    }

    #[test]
    fn malformed_certificates_have_no_end() {
        let key = KeyPair::generate().unwrap();
        let whole = CertificateParams::default().self_signed(&key).unwrap();
        for length in 0..whole.der().len() {
            assert_eq!(not_after(&whole.der()[..length]), None);
        }
        for text in ["260230", "2602301200000", "+10101000000Z", "261301000000Z", "260100000000Z", "Z", ""] {
            assert_eq!(parse_time(UTC_TIME, text.as_bytes()), None, "{text}");
        }
        assert_eq!(parse_time(GENERALIZED_TIME, b"19691231235959Z"), None, "before 1970");
        assert_eq!(parse_time(OCTETS, b"260101000000Z"), None);
    }
}
