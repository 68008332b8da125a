//! `kvfleet certs`: makes and revokes the certificates of a fleet.
//!
//! Not here: the authority (`kvfleet_net::fleet_certificates`), and certificates of a cluster on
//! one machine, which `kvfleet up` makes.

use std::time::{SystemTime, UNIX_EPOCH};

use kvfleet_net::fleet_certificates::{FleetAuthority, IssueTerms, IssuedCertificate};

use crate::args::CertsCommand;

const DAY_S: u64 = 24 * 60 * 60;

/// Carries out the command.
///
/// # Errors
/// If there is no authority, or a file cannot be read or written.
pub fn run(command: &CertsCommand) -> anyhow::Result<()> {
    match command {
        CertsCommand::Init(args) => {
            FleetAuthority::create(&args.dir, IssueTerms::from_now(args.lifetime)?)?;
            println!(
                "made an authority in {0}; keep {0}/ca.key off the machines of the fleet",
                args.dir.display()
            );
        }
        CertsCommand::Issue(args) => {
            let authority = FleetAuthority::open(&args.dir)?;
            for holder in &args.holders {
                let files = authority.issue(holder, IssueTerms::from_now(args.lifetime)?)?;
                println!(
                    "{holder}: {}, {}, {}",
                    files.ca.display(),
                    files.cert.display(),
                    files.key.display()
                );
            }
        }
        CertsCommand::Revoke(args) => {
            let authority = FleetAuthority::open(&args.dir)?;
            for which in &args.which {
                let revoked = authority.revoke(which, SystemTime::now())?;
                revoked.iter().for_each(|one| println!("{}: revoked {}", one.holder, one.serial));
                if revoked.is_empty() {
                    println!("{which}: was revoked before");
                }
            }
            println!("copy {}/ca.crl beside ca.crt of every process", args.dir.display());
        }
        CertsCommand::List(args) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            print!("{}", table(&FleetAuthority::open(&args.dir)?.issued()?, now));
        }
    }
    Ok(())
}

/// A line for each certificate. One is current unless its holder has a later one.
fn table(issued: &[IssuedCertificate], now_s: u64) -> String {
    let mut text = format!("{:20}  {:32}  state\n", "holder", "serial");
    for (at, one) in issued.iter().enumerate() {
        let is_replaced = issued[at + 1..].iter().any(|later| later.holder == one.holder);
        let state = match one.ends_s.checked_sub(now_s).filter(|left_s| *left_s > 0) {
            _ if one.is_revoked => "revoked".to_owned(),
            None => "expired".to_owned(),
            Some(_) if is_replaced => "replaced".to_owned(),
            Some(left_s) => format!("{} days left", left_s / DAY_S),
        };
        text += &format!("{:20}  {:32}  {state}\n", one.holder, one.serial);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_the_state_of_each() {
        let one = |holder: &str, ends_s| IssuedCertificate {
            serial: "40".repeat(16),
            holder: holder.to_owned(),
            ends_s,
            is_revoked: false,
        };
        let issued = [
            one("admin", 5),
            one("admin", 20 * DAY_S),
            one("node-1", 90 * DAY_S),
            IssuedCertificate { is_revoked: true, ..one("node-2", 90 * DAY_S) },
            one("admin", 91 * DAY_S),
        ];
        let text = table(&issued, 10);
        let states: Vec<&str> = text.lines().skip(1).filter_map(|line| line.rsplit("  ").next()).collect();
        assert_eq!(states, ["expired", "replaced", "89 days left", "revoked", "90 days left"]);
    }
}
