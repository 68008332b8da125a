//! What the names in a certificate say of its holder: one of the cluster's own processes, or somebody who acts for
//! some tenants and nobody else.
//!
//! What cannot be read is refused, and so is who is neither. Not here: whether the certificate is one of the cluster's,
//! which handshakes verify, and what each may do, which nodes and routers say.

use std::collections::BTreeSet;

use kv_core::id::TenantId;

use super::{ROUTER_NAME, SERVER_NAME};

/// How names of tenants begin.
const PREFIX: &str = "tenant-";

/// How they end, behind the number.
const SUFFIX: &str = ".kvfleet";

/// What no other name may begin with: it was to be a tenant's.
const RESERVED: &str = "tenant";

/// Longest part of a name that an error repeats, in characters: four of a name of DNS fill a line.
const SHOWN_CHARS_MAX: usize = 80;

/// Why nobody can tell for whom a certificate's holder acts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamesError {
    /// The names cannot be read.
    #[error("its names cannot be read")]
    Unreadable,
    /// A name is like one that says something, and says nothing.
    #[error(
        "its name {0:?} is neither {SERVER_NAME:?} nor a tenant's, which is tenant-NUMBER.kvfleet with a number from 0 to \
         4294967295; other names may not begin with \"tenant\" or end in \".kvfleet\""
    )]
    Malformed(String),
    /// Names of tenants stand beside one of the cluster's own processes.
    #[error("it names tenants and {0:?}, with which its holder could pose as a node or router")]
    Both(&'static str),
    /// Neither the cluster nor a tenant is named.
    #[error("it names neither {SERVER_NAME:?} nor a tenant")]
    Nobody,
}

/// The name by which certificates name a tenant: `tenant-3.kvfleet`. A certificate may carry several.
#[must_use]
pub fn tenant_name(tenant: TenantId) -> String {
    format!("{PREFIX}{}{SUFFIX}", tenant.0)
}

/// For which tenants the holder of a certificate (its DER, verified before) acts. Nothing: it is one of the cluster's own
/// ([`SERVER_NAME`]), and may name all of them.
///
/// # Errors
/// When that cannot be told. Such a holder is to be refused.
pub fn tenants_of(leaf: &[u8]) -> Result<Option<BTreeSet<TenantId>>, NamesError> {
    let names = dns_names(leaf).ok_or(NamesError::Unreadable)?;
    let mut tenants = BTreeSet::new();
    for name in &names {
        tenants.extend(tenant_of(name)?);
    }
    let own = [SERVER_NAME, ROUTER_NAME].into_iter().find(|own| names.iter().any(|name| is_same(name, own)));
    match (tenants.is_empty(), own) {
        (true, Some(SERVER_NAME)) => Ok(None),
        (true, _) => Err(NamesError::Nobody),
        (false, None) => Ok(Some(tenants)),
        (false, Some(own)) => Err(NamesError::Both(own)),
    }
}

/// As DNS has it: whatever the case.
fn is_same(name: &[u8], own: &str) -> bool {
    name.eq_ignore_ascii_case(own.as_bytes())
}

/// The tenant of this name. All that is nearly a tenant's name is an error: who wrote it meant to set limits. So is one of the
/// cluster's own with the root's point, which no verifier takes.
fn tenant_of(name: &[u8]) -> Result<Option<TenantId>, NamesError> {
    if !is_reserved(name) {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(name);
    let digits = text.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
    let number = digits.and_then(|digits| digits.parse().ok()).map(TenantId);
    // One spelling: no sign, no zeros in front, no capitals.
    match number.filter(|tenant| tenant_name(*tenant) == text) {
        Some(tenant) => Ok(Some(tenant)),
        None => Err(NamesError::Malformed(text.chars().take(SHOWN_CHARS_MAX).collect())),
    }
}

/// Whether a name may only be a tenant's.
fn is_reserved(name: &[u8]) -> bool {
    let lower = name.to_ascii_lowercase();
    let relative = lower.strip_suffix(b".");
    let is_absolute_own = [SERVER_NAME, ROUTER_NAME].iter().any(|own| relative == Some(own.as_bytes()));
    is_absolute_own
        || lower.starts_with(RESERVED.as_bytes())
        || relative.unwrap_or(&lower).ends_with(SUFFIX.as_bytes())
}

const SEQUENCE: u8 = 0x30;
const OBJECT_IDENTIFIER: u8 = 0x06;
const OCTETS: u8 = 0x04;
/// The part of a certificate that holds its extensions.
const EXTENSIONS: u8 = 0xA3;
/// A name of DNS among alternative names.
const DNS_NAME: u8 = 0x82;
/// Object identifier 2.5.29.17, "subject alternative name".
const ALTERNATIVE_NAMES: &[u8] = &[0x55, 0x1D, 0x11];

/// All names of DNS among the alternative names of a certificate, as they are written; nothing if it is not DER.
fn dns_names(leaf: &[u8]) -> Option<Vec<&[u8]>> {
    let mut names = Vec::new();
    let certificate = only(leaf, SEQUENCE)?;
    let (tag, to_be_signed, _) = element(certificate)?;
    if tag != SEQUENCE {
        return None;
    }
    for part in elements(to_be_signed) {
        let (tag, extensions) = part?;
        if tag != EXTENSIONS {
            continue;
        }
        for extension in elements(only(extensions, SEQUENCE)?) {
            let (SEQUENCE, extension) = extension? else { return None };
            if let Some(alternatives) = alternatives(extension)? {
                for name in elements(alternatives) {
                    let (tag, name) = name?;
                    names.extend((tag == DNS_NAME).then_some(name));
                }
            }
        }
    }
    Some(names)
}

/// What lies in an extension if it is the one of alternative names; the outer nothing if it cannot be read.
fn alternatives(extension: &[u8]) -> Option<Option<&[u8]>> {
    let (OBJECT_IDENTIFIER, which, _) = element(extension)? else { return None };
    if which != ALTERNATIVE_NAMES {
        return Some(None);
    }
    // Whether it is critical may stand between.
    let (tag, value) = elements(extension).last()??;
    if tag != OCTETS {
        return None;
    }
    only(value, SEQUENCE).map(Some)
}

/// What lies in the one element that the bytes are.
fn only(bytes: &[u8], tag: u8) -> Option<&[u8]> {
    let (found, value, rest) = element(bytes)?;
    (found == tag && rest.is_empty()).then_some(value)
}

/// All elements of which the bytes consist; nothing in place of what cannot be read, behind which there is no more.
fn elements(bytes: &[u8]) -> impl Iterator<Item = Option<(u8, &[u8])>> {
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

/// The first element: its tag, what lies in it, and what comes behind it.
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, short], rest) = bytes.split_first_chunk()?;
    // Tags of more than one byte are none of X.509.
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

#[cfg(test)]
#[path = "names_tests.rs"]
mod tests;
