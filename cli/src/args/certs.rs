//! Arguments of `kvfleet certs`.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use kv_core::id::{InstanceId, NodeId, RouterId, TenantId};
use kvfleet_net::tls::Role;

use super::durations::parse_duration;

/// `kvfleet certs`.
#[derive(Clone, Debug, Subcommand)]
pub enum CertsCommand {
    /// Make the authority of a fleet, once. Its key signs all certificates: keep it off the machines
    /// of the fleet.
    Init(InitArgs),
    /// Make certificates and keys, each in a directory named after its holder, with the file names
    /// of a Kubernetes Secret. A later one replaces the earlier; processes take it without a restart.
    Issue(IssueArgs),
    /// Revoke certificates: writes the list of all revoked ones, `ca.crl`, beside the authority and
    /// beside each holder's certificate. Processes that find it beside their `ca.crt` refuse these
    /// certificates within ten seconds, and end their connections.
    Revoke(RevokeArgs),
    /// Show all certificates that were made, and how long they are valid.
    List(ListArgs),
}

/// `kvfleet certs init`.
#[derive(Clone, Debug, Args)]
pub struct InitArgs {
    /// Directory of the authority and of all certificates; it is created.
    #[arg(long, value_name = "DIR", default_value = "certificates")]
    pub dir: PathBuf,
    /// How long the authority is valid.
    #[arg(long = "for", value_name = "TIME", value_parser = parse_validity, default_value = "3650d")]
    pub lifetime: Duration,
}

/// `kvfleet certs issue`.
#[derive(Clone, Debug, Args)]
pub struct IssueArgs {
    /// Holders: router-N, node-N, instance-N (without -N for any number), frontend, admin, tenant-N
    /// or tenant-N+tenant-M.
    #[arg(value_name = "HOLDER", value_parser = parse_holder, required = true)]
    pub holders: Vec<Role>,
    /// Directory of the authority.
    #[arg(long, value_name = "DIR", default_value = "certificates")]
    pub dir: PathBuf,
    /// How long the certificates are valid.
    #[arg(long = "for", value_name = "TIME", value_parser = parse_validity, default_value = "90d")]
    pub lifetime: Duration,
}

/// `kvfleet certs revoke`.
#[derive(Clone, Debug, Args)]
pub struct RevokeArgs {
    /// Holders or serial numbers, as `kvfleet certs list` shows them. A holder stands for all
    /// certificates that it has.
    #[arg(value_name = "HOLDER|SERIAL", required = true)]
    pub which: Vec<String>,
    /// Directory of the authority.
    #[arg(long, value_name = "DIR", default_value = "certificates")]
    pub dir: PathBuf,
}

/// `kvfleet certs list`.
#[derive(Clone, Debug, Args)]
pub struct ListArgs {
    /// Directory of the authority.
    #[arg(long, value_name = "DIR", default_value = "certificates")]
    pub dir: PathBuf,
}

/// Longest validity: certificates count years with four digits.
const VALIDITY_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

fn parse_validity(text: &str) -> Result<Duration, String> {
    let validity = parse_duration(text)?;
    if validity <= VALIDITY_MAX {
        return Ok(validity);
    }
    Err(format!("{text:?} is more than a hundred years: write a shorter duration"))
}

/// Parses the name of a holder, in its one spelling.
fn parse_holder(text: &str) -> Result<Role, String> {
    fn number<N: std::str::FromStr>(text: &str, prefix: &str) -> Option<N> {
        text.strip_prefix(prefix)?.parse().ok()
    }
    let tenant = |one: &str| number(one, "tenant-").map(TenantId).filter(|tenant| tenant.to_string() == one);
    let tenants = || text.split('+').map(tenant).collect::<Option<BTreeSet<_>>>().map(Role::Tenants);
    let role = match text {
        "router" => Some(Role::Router(None)),
        "node" => Some(Role::Node(None)),
        "instance" => Some(Role::Instance(None)),
        "frontend" => Some(Role::Frontend),
        "admin" => Some(Role::Admin),
        _ => {
            let router = number(text, "router-").map(|number| Role::Router(Some(RouterId(number))));
            let node = || number(text, "node-").map(|number| Role::Node(Some(NodeId(number))));
            let instance =
                || number(text, "instance-").map(|number| Role::Instance(Some(InstanceId(number))));
            let process = router.or_else(node).or_else(instance);
            process.filter(|role| role.to_string() == text).or_else(tenants)
        }
    };
    role.ok_or_else(|| {
        format!(
            "{text:?} is no holder: write router-N, node-N, instance-N (without -N for any number), frontend, admin, \
             tenant-N or tenant-N+tenant-M"
        )
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn parses_each_kind_of_holder() {
        for (text, role) in [
            ("router", Role::Router(None)),
            ("router-1", Role::Router(Some(RouterId(1)))),
            ("node-4294967295", Role::Node(Some(NodeId(u32::MAX)))),
            ("instance-0", Role::Instance(Some(InstanceId(0)))),
            ("frontend", Role::Frontend),
            ("admin", Role::Admin),
            ("tenant-3", Role::tenant(TenantId(3))),
            ("tenant-3+tenant-5", Role::Tenants(BTreeSet::from([TenantId(3), TenantId(5)]))),
        ] {
            assert_eq!(parse_holder(text), Ok(role), "{text}");
        }
    }

    #[test]
    fn refuses_other_spellings() {
        for text in
            ["", "router-", "router-01", "node-+1", "Node-1", "node-4294967296", "tenant-3+", "tenant", "ca"]
        {
            assert!(parse_holder(text).is_err(), "{text}");
        }
        says("a holder of certificates that is none", &parse_holder("router-01").unwrap_err(), &[]);
        says("a certificate for too long", &parse_validity("36501d").unwrap_err(), &[]);
        assert_eq!(parse_validity("36500d"), Ok(VALIDITY_MAX));
    }
}
