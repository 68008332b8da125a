//! The role that a certificate's names give its holder: a router, a node, an instance, a frontend,
//! an administrator, or a client of some tenants.
//!
//! Unreadable names are refused, and so is a certificate without a role or with two. Not here: the
//! verification of certificates (the handshakes), and permissions (`access/`).

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use kv_core::id::{InstanceId, NodeId, RouterId, TenantId};

use super::SERVER_NAME;
use super::der::{OBJECT_IDENTIFIER, OCTETS, SEQUENCE, element, elements, only_element};

/// Prefix of tenant names.
const PREFIX: &str = "tenant-";

/// Suffix of tenant names, after the number.
const SUFFIX: &str = ".kvfleet";

/// Prefix reserved for tenant names: any other name with it is a misspelt one.
const RESERVED: &str = "tenant";

/// Prefix of role names. Other names without a dot may not begin like this.
const ROLE_PREFIX: &str = "kvfleet-";

/// Most characters of a name that an error repeats; a DNS name may be four times longer.
const SHOWN_CHARS_MAX: usize = 80;

/// The role of a certificate's holder. A number that is `None` means any number of that kind, for
/// processes that share one certificate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A router.
    Router(Option<RouterId>),
    /// A storage node.
    Node(Option<NodeId>),
    /// An instance of a model.
    Instance(Option<InstanceId>),
    /// A gateway or another process that routes requests of others.
    Frontend,
    /// An administrator.
    Admin,
    /// A client that acts for these tenants, at least one.
    Tenants(BTreeSet<TenantId>),
}

/// A [`Role`] without its number or tenants: a column of the access table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RoleKind {
    /// Routers.
    Router,
    /// Storage nodes.
    Node,
    /// Instances of a model.
    Instance,
    /// Gateways.
    Frontend,
    /// Administrators.
    Admin,
    /// Clients of tenants.
    Tenant,
}

impl RoleKind {
    /// Every kind, in the order of the access table's columns.
    pub const ALL: [RoleKind; 6] = [
        RoleKind::Router,
        RoleKind::Node,
        RoleKind::Instance,
        RoleKind::Frontend,
        RoleKind::Admin,
        RoleKind::Tenant,
    ];

    /// Lower-case name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RoleKind::Router => "router",
            RoleKind::Node => "node",
            RoleKind::Instance => "instance",
            RoleKind::Frontend => "frontend",
            RoleKind::Admin => "admin",
            RoleKind::Tenant => "tenant",
        }
    }
}

impl Role {
    /// The role of the client of one tenant.
    #[must_use]
    pub fn tenant(tenant: TenantId) -> Role {
        Role::Tenants(BTreeSet::from([tenant]))
    }

    /// The role without its number.
    #[must_use]
    pub fn kind(&self) -> RoleKind {
        match self {
            Role::Router(_) => RoleKind::Router,
            Role::Node(_) => RoleKind::Node,
            Role::Instance(_) => RoleKind::Instance,
            Role::Frontend => RoleKind::Frontend,
            Role::Admin => RoleKind::Admin,
            Role::Tenants(_) => RoleKind::Tenant,
        }
    }

    /// The DNS names of a certificate for this role. Only those of tenants lack [`SERVER_NAME`],
    /// which would let their holder pose as a server.
    #[must_use]
    pub fn dns_names(&self) -> Vec<String> {
        match self {
            Role::Tenants(tenants) => tenants.iter().map(|tenant| tenant_name(*tenant)).collect(),
            role => vec![SERVER_NAME.to_owned(), format!("{ROLE_PREFIX}{role}")],
        }
    }

    /// The DNS name that gives this role; of tenants, the first one's.
    #[must_use]
    pub fn name(&self) -> String {
        self.dns_names().pop().unwrap_or_default()
    }

    /// Whether a holder of this role may pass as `wanted`: the kinds are equal, and so are the
    /// numbers where both have one.
    #[must_use]
    pub fn may_be(&self, wanted: &Role) -> bool {
        fn agree<T: Copy + PartialEq>(have: Option<T>, want: Option<T>) -> bool {
            have.is_none() || want.is_none() || have == want
        }
        match (self, wanted) {
            (Role::Router(have), Role::Router(want)) => agree(*have, *want),
            (Role::Node(have), Role::Node(want)) => agree(*have, *want),
            (Role::Instance(have), Role::Instance(want)) => agree(*have, *want),
            (have, want) => have == want,
        }
    }
}

impl fmt::Display for Role {
    /// `router-3`, or `router` without a number; at most eight tenants.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN_TENANTS_MAX: usize = 8;
        match self {
            Role::Router(Some(router)) => router.fmt(f),
            Role::Node(Some(node)) => node.fmt(f),
            Role::Instance(Some(instance)) => instance.fmt(f),
            Role::Tenants(tenants) => {
                let shown: Vec<String> =
                    tenants.iter().take(SHOWN_TENANTS_MAX).map(ToString::to_string).collect();
                let more = if tenants.len() > SHOWN_TENANTS_MAX { ", …" } else { "" };
                write!(f, "{}{more}", shown.join(", "))
            }
            role => f.write_str(role.kind().name()),
        }
    }
}

/// Why a certificate gives its holder no clear role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamesError {
    /// The names cannot be read.
    #[error("its names cannot be read")]
    Unreadable,
    /// A name resembles a tenant's or the cluster's, but is none.
    #[error(
        "its name {0:?} is neither {SERVER_NAME:?} nor a tenant's, which is tenant-NUMBER.kvfleet with a \
         number from 0 to 4294967295; other names may not begin with \"tenant\" or end in \".kvfleet\""
    )]
    Malformed(String),
    /// A name resembles a role's, but is none.
    #[error(
        "its name {0:?} is no role's: roles are kvfleet-router-N, kvfleet-node-N, kvfleet-instance-N (each also \
         without -N, for any number), kvfleet-frontend and kvfleet-admin; other names without a dot may not begin \
         with \"kvfleet-\""
    )]
    MalformedRole(String),
    /// The certificate names tenants and one of the cluster's own processes.
    #[error("it names tenants and {0:?}, with which its holder could pose as a node or router")]
    TenantAndMember(String),
    /// The certificate has two role names.
    #[error("it names the two roles {0:?} and {1:?}: a certificate has one")]
    TwoRoles(String, String),
    /// The certificate has a role name but not the cluster's.
    #[error("it names the role {0:?} and lacks the name {SERVER_NAME:?}, which clients require of servers")]
    NoCluster(String),
    /// The certificate has the cluster's name and no role name.
    #[error(
        "it names {SERVER_NAME:?} and no role: it lacks one of the names kvfleet-router-N, kvfleet-node-N, \
         kvfleet-instance-N, kvfleet-frontend and kvfleet-admin"
    )]
    NoRole,
    /// The certificate names neither the cluster nor a tenant.
    #[error("it names neither {SERVER_NAME:?} nor a tenant")]
    NoName,
}

/// The name for a tenant in certificates: `tenant-3.kvfleet`. A certificate may carry several.
#[must_use]
pub fn tenant_name(tenant: TenantId) -> String {
    format!("{PREFIX}{}{SUFFIX}", tenant.0)
}

/// The role of a certificate's holder. `leaf` is its DER, verified before.
///
/// # Errors
/// When the names give no clear role. Refuse such a holder.
pub fn role_of(leaf: &[u8]) -> Result<Role, NamesError> {
    let names = dns_names(leaf).ok_or(NamesError::Unreadable)?;
    let (mut tenants, mut roles, mut is_member) = (BTreeSet::new(), Vec::new(), false);
    for name in &names {
        is_member |= name.eq_ignore_ascii_case(SERVER_NAME.as_bytes());
        tenants.extend(tenant_of(name)?);
        roles.extend(role_named(name)?);
    }
    roles.dedup();
    if let [first, second, ..] = &roles[..] {
        return Err(NamesError::TwoRoles(first.name(), second.name()));
    }
    match (tenants.is_empty(), roles.pop(), is_member) {
        (true, Some(role), true) => Ok(role),
        (true, Some(role), false) => Err(NamesError::NoCluster(role.name())),
        (true, None, true) => Err(NamesError::NoRole),
        (true, None, false) => Err(NamesError::NoName),
        (false, None, false) => Ok(Role::Tenants(tenants)),
        (false, None, true) => Err(NamesError::TenantAndMember(SERVER_NAME.to_owned())),
        (false, Some(role), _) => Err(NamesError::TenantAndMember(role.name())),
    }
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
        None => Err(NamesError::Malformed(shown(&text))),
    }
}

/// Whether a name is reserved for tenants, or is the cluster's with the root's dot.
fn is_reserved(name: &[u8]) -> bool {
    let lower = name.to_ascii_lowercase();
    let relative = lower.strip_suffix(b".");
    relative == Some(SERVER_NAME.as_bytes())
        || lower.starts_with(RESERVED.as_bytes())
        || relative.unwrap_or(&lower).ends_with(SUFFIX.as_bytes())
}

/// The role of this name; `None` for unrelated names. A misspelt role name is an error.
fn role_named(name: &[u8]) -> Result<Option<Role>, NamesError> {
    let lower = name.to_ascii_lowercase();
    // A host name such as kvfleet-router.example may stand beside the role.
    let is_host = lower.strip_suffix(b".").unwrap_or(&lower).contains(&b'.');
    if is_host || !lower.starts_with(ROLE_PREFIX.as_bytes()) {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(name);
    let role = text.strip_prefix(ROLE_PREFIX).and_then(parse_role);
    // Only one spelling is valid, as for tenants.
    match role.filter(|role| role.name() == text) {
        Some(role) => Ok(Some(role)),
        None => Err(NamesError::MalformedRole(shown(&text))),
    }
}

/// Parses `router-3`, `node`, `admin` and so on, in any spelling of the number.
fn parse_role(text: &str) -> Option<Role> {
    fn number<T: FromStr>(digits: &str) -> Option<T> {
        digits.parse().ok()
    }
    match text.split_once('-') {
        None if text == RoleKind::Router.name() => Some(Role::Router(None)),
        None if text == RoleKind::Node.name() => Some(Role::Node(None)),
        None if text == RoleKind::Instance.name() => Some(Role::Instance(None)),
        None if text == RoleKind::Frontend.name() => Some(Role::Frontend),
        None if text == RoleKind::Admin.name() => Some(Role::Admin),
        Some(("router", digits)) => Some(Role::Router(Some(RouterId(number(digits)?)))),
        Some(("node", digits)) => Some(Role::Node(Some(NodeId(number(digits)?)))),
        Some(("instance", digits)) => Some(Role::Instance(Some(InstanceId(number(digits)?)))),
        _ => None,
    }
}

/// The beginning of a name, for an error.
fn shown(name: &str) -> String {
    name.chars().take(SHOWN_CHARS_MAX).collect()
}

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

#[cfg(test)]
mod tests;
