//! The role that a certificate's names give its holder: one of the cluster's own processes, or a
//! client of some tenants.
//!
//! Unreadable names are refused, and so is a certificate without a role. Not here: the verification
//! of certificates (the handshakes), and permissions (nodes and routers).

use std::collections::BTreeSet;

use kv_core::id::TenantId;

use super::{ROUTER_NAME, SERVER_NAME};

/// Prefix of tenant names.
const PREFIX: &str = "tenant-";

/// Suffix of tenant names, after the number.
const SUFFIX: &str = ".kvfleet";

/// Prefix reserved for tenant names: any other name with it is a misspelt one.
const RESERVED: &str = "tenant";

/// Most characters of a name that an error repeats; a DNS name may be four times longer.
const SHOWN_CHARS_MAX: usize = 80;

/// Why a certificate gives its holder no clear role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamesError {
    /// The names cannot be read.
    #[error("its names cannot be read")]
    Unreadable,
    /// A name resembles a role name but is none.
    #[error(
        "its name {0:?} is neither {SERVER_NAME:?} nor a tenant's, which is tenant-NUMBER.kvfleet with a \
         number from 0 to 4294967295; other names may not begin with \"tenant\" or end in \".kvfleet\""
    )]
    Malformed(String),
    /// The certificate names tenants and one of the cluster's own processes.
    #[error("it names tenants and {0:?}, with which its holder could pose as a node or router")]
    TenantAndMember(&'static str),
    /// The certificate names neither the cluster nor a tenant.
    #[error("it names neither {SERVER_NAME:?} nor a tenant")]
    NoRole,
}

/// The name for a tenant in certificates: `tenant-3.kvfleet`. A certificate may carry several.
#[must_use]
pub fn tenant_name(tenant: TenantId) -> String {
    format!("{PREFIX}{}{SUFFIX}", tenant.0)
}

/// The tenants that a certificate's holder acts for. `leaf` is its DER, verified before. `None`:
/// one of the cluster's own processes ([`SERVER_NAME`]), which may act for any tenant.
///
/// # Errors
/// When the names give no clear role. Refuse such a holder.
pub fn tenants_of(leaf: &[u8]) -> Result<Option<BTreeSet<TenantId>>, NamesError> {
    let names = dns_names(leaf).ok_or(NamesError::Unreadable)?;
    let mut tenants = BTreeSet::new();
    for name in &names {
        tenants.extend(tenant_of(name)?);
    }
    let own = [SERVER_NAME, ROUTER_NAME]
        .into_iter()
        .find(|own| names.iter().any(|name| equals_dns_name(name, own)));
    match (tenants.is_empty(), own) {
        (true, Some(SERVER_NAME)) => Ok(None),
        (true, _) => Err(NamesError::NoRole),
        (false, None) => Ok(Some(tenants)),
        (false, Some(own)) => Err(NamesError::TenantAndMember(own)),
    }
}

/// Whether a verified certificate names a router of the cluster.
#[must_use]
pub(crate) fn names_router(leaf: &[u8]) -> bool {
    dns_names(leaf).is_some_and(|names| names.iter().any(|name| equals_dns_name(name, ROUTER_NAME)))
}

/// DNS names are case-insensitive.
fn equals_dns_name(name: &[u8], own: &str) -> bool {
    name.eq_ignore_ascii_case(own.as_bytes())
}

/// The tenant of this name; `None` for unrelated names. A misspelt tenant name is an error, because
/// its author meant to set limits. So is one of the cluster's own names with the root's dot, which
/// no verifier accepts.
fn tenant_of(name: &[u8]) -> Result<Option<TenantId>, NamesError> {
    if !is_reserved(name) {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(name);
    let digits = text.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
    let number = digits.and_then(|digits| digits.parse().ok()).map(TenantId);
    // Only one spelling is valid: no sign, no leading zeros, no capitals.
    match number.filter(|tenant| tenant_name(*tenant) == text) {
        Some(tenant) => Ok(Some(tenant)),
        None => Err(NamesError::Malformed(text.chars().take(SHOWN_CHARS_MAX).collect())),
    }
}

/// Whether a name is reserved for tenants.
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

/// All DNS names among the alternative names of a certificate, as written; `None` if it is not DER.
fn dns_names(leaf: &[u8]) -> Option<Vec<&[u8]>> {
    let mut names = Vec::new();
    let certificate = only_element(leaf, SEQUENCE)?;
    let (tag, to_be_signed, _) = element(certificate)?;
    if tag != SEQUENCE {
        return None;
    }
    for part in elements(to_be_signed) {
        let (tag, extensions) = part?;
        if tag != EXTENSIONS {
            continue;
        }
        for extension in elements(only_element(extensions, SEQUENCE)?) {
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

/// Content of an extension if it holds the alternative names. The outer `None` means malformed.
fn alternatives(extension: &[u8]) -> Option<Option<&[u8]>> {
    let (OBJECT_IDENTIFIER, which, _) = element(extension)? else { return None };
    if which != ALTERNATIVE_NAMES {
        return Some(None);
    }
    // The criticality flag may stand between.
    let (tag, value) = elements(extension).last()??;
    if tag != OCTETS {
        return None;
    }
    only_element(value, SEQUENCE).map(Some)
}

/// Content of the single element that makes up `bytes`.
fn only_element(bytes: &[u8], tag: u8) -> Option<&[u8]> {
    let (found, value, rest) = element(bytes)?;
    (found == tag && rest.is_empty()).then_some(value)
}

/// All elements of `bytes`. A malformed element yields `None` and ends the iteration.
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

/// The first element: its tag, its content, and the bytes after it.
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
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

#[cfg(test)]
mod tests;
