//! `kvfleet access`: prints which roles of certificates may make which call.
//!
//! Not here: the table and its enforcement (`kvfleet_net::tls::access`).

use std::fmt::Write as _;

use kvfleet_net::tls::RoleKind;
use kvfleet_net::tls::access::{CallRule, Guard, TABLE};

/// Explains the words of the table.
const LEGEND: &str = "\
yes      any message
own      messages that name the number, the tenants or the requests of the certificate
limited  any message, with a reduced answer
-        refused
port     every caller of that port, which needs no certificate of the cluster
";

/// Prints the table.
pub fn run() {
    print!("{}", table());
}

/// The table, a line for each call.
fn table() -> String {
    let width = TABLE.iter().map(|rule| name(rule).len()).max().unwrap_or_default();
    let mut text = format!("{:width$}", "call");
    for kind in RoleKind::ALL {
        let _ = write!(text, "  {:8}", kind.name()); // a string takes any text
    }
    let mut lines = vec![text.trim_end().to_owned()];
    for rule in TABLE {
        let mut line = format!("{:width$}", name(rule));
        for kind in RoleKind::ALL {
            let _ = write!(line, "  {:8}", cell(rule, kind));
        }
        lines.push(line.trim_end().to_owned());
    }
    format!("{}\n\n{LEGEND}", lines.join("\n"))
}

/// Service and call: `Router/Route`.
fn name(rule: &CallRule) -> &'static str {
    rule.path.rsplit_once('.').map_or(rule.path, |(_, name)| name)
}

fn cell(rule: &CallRule, kind: RoleKind) -> &'static str {
    match (rule.guard, rule.access(kind)) {
        (Guard::Port, _) => "port",
        (Guard::Roles(_), access) => access.name(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_has_a_line() {
        let text = table();
        assert_eq!(text.lines().take_while(|line| !line.is_empty()).count(), TABLE.len() + 1);
        let of = |call: &str| {
            let line = text.lines().find(|line| line.starts_with(call)).unwrap_or_default();
            line.split_whitespace().skip(1).collect::<Vec<_>>()
        };
        assert_eq!(of("Router/SetQuota"), ["-", "-", "-", "-", "yes", "-"]);
        assert_eq!(of("Raft/Vote"), ["own", "-", "-", "-", "-", "-"]);
        assert_eq!(of("Health/Check"), ["port"; 6]);
    }
}
