//! Faults of a replay as typed: `node:2@30%`, `router-leader@50%`.

use std::fmt;
use std::str::FromStr;

/// Target process of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The node with this number.
    Node(u32),
    /// The router with this number.
    Router(u64),
    /// The current leader; for a restart, the leader killed last.
    RouterLeader,
    /// The instance with this number.
    Instance(u32),
}

/// Kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// SIGKILL.
    Kill,
    /// Start it again with the same configuration and data.
    Restart,
}

impl FaultKind {
    /// As typed, without the dashes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FaultKind::Kill => "kill",
            FaultKind::Restart => "restart",
        }
    }
}

/// A fault: its target and time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultSpec {
    /// Target process.
    pub target: Target,
    /// Time, in percent of the trace's requests.
    pub at_percent: f64,
}

impl FaultSpec {
    /// Number of started requests at which the fault occurs.
    #[must_use]
    pub fn at_request(&self, requests: usize) -> usize {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let at = (requests as f64 * self.at_percent / 100.0).ceil() as usize;
        at.min(requests)
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("`{text}` is not a process: expected node:N, router:N, router-leader or instance:N");
        if text == "router-leader" {
            return Ok(Target::RouterLeader);
        }
        let (kind, number) = text.split_once(':').ok_or_else(wrong)?;
        let number: u32 = number.parse().map_err(|_| wrong())?;
        match kind {
            "node" => Ok(Target::Node(number)),
            "router" => Ok(Target::Router(number.into())),
            "instance" => Ok(Target::Instance(number)),
            _ => Err(wrong()),
        }
    }
}

impl FromStr for FaultSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("`{text}` is not a fault: expected PROCESS@PERCENT, like node:2@30% or router-leader@50%")
        };
        let (target, at) = text.split_once('@').ok_or_else(wrong)?;
        let at_percent: f64 = at.strip_suffix('%').and_then(|at| at.parse().ok()).ok_or_else(wrong)?;
        if !(0.0..=100.0).contains(&at_percent) {
            return Err(wrong());
        }
        Ok(Self { target: target.parse()?, at_percent })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Node(number) => write!(f, "node:{number}"),
            Target::Router(number) => write!(f, "router:{number}"),
            Target::RouterLeader => f.write_str("router-leader"),
            Target::Instance(number) => write!(f, "instance:{number}"),
        }
    }
}

impl fmt::Display for FaultSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}%", self.target, self.at_percent)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn parses_and_formats_targets() {
        for text in ["node:2@30%", "router-leader@50%", "router:1@0%", "instance:3@12.5%"] {
            assert_eq!(text.parse::<FaultSpec>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn invalid_faults_show_a_valid_one() {
        for text in ["node:2", "node:2@30", "node:2@130%", "node@3%", "disk:1@3%", "node:x@3%"] {
            assert!(text.parse::<FaultSpec>().unwrap_err().contains("expected"), "{text}");
        }
        says("a fault without its moment", &"node:2".parse::<FaultSpec>().unwrap_err(), &[]);
        says("a fault of no known process", &"disk:1@3%".parse::<FaultSpec>().unwrap_err(), &[]);
    }

    #[test]
    fn percent_maps_to_a_request_number() {
        let at = |text: &str| text.parse::<FaultSpec>().unwrap().at_request(1000);
        assert_eq!((at("node:1@0%"), at("node:1@30%"), at("node:1@100%")), (0, 300, 1000));
    }
}
