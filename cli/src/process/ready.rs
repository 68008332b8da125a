//! The line that a process prints on stdout once it serves: role, number and bound addresses.
//!
//! Ports may be configured as 0, so a parent process learns the addresses from this line.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// First word of the line; the rest is JSON.
const PREFIX: &str = "READY ";

/// Content of the line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyLine {
    /// `router`, `node` or `instance`.
    pub role: String,
    /// Number of the router, node or instance.
    pub number: u64,
    /// Process id.
    pub pid: u32,
    /// Bound addresses by purpose: `grpc`, `data`, `control`, `metrics`, `drain`.
    pub addresses: BTreeMap<String, String>,
}

/// Why a line is not a READY line.
#[derive(Debug, thiserror::Error)]
#[error("expected `READY {{…}}`, got {got:?}")]
pub struct ReadyLineError {
    got: String,
}

impl ReadyLine {
    /// The line without its line break.
    #[must_use]
    pub fn to_line(&self) -> String {
        let json = serde_json::to_string(self).unwrap_or_default();
        format!("{PREFIX}{json}")
    }

    /// Parses the line.
    pub fn parse(line: &str) -> Result<Self, ReadyLineError> {
        let json = line.trim_end().strip_prefix(PREFIX);
        json.and_then(|json| serde_json::from_str(json).ok())
            .ok_or_else(|| ReadyLineError { got: line.trim_end().to_owned() })
    }

    /// Address for `purpose`; empty if there is none.
    #[must_use]
    pub fn address(&self, purpose: &str) -> String {
        self.addresses.get(purpose).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_line_round_trips() {
        let ready = ReadyLine {
            role: "node".into(),
            number: 2,
            pid: 41,
            addresses: [("data".to_owned(), "127.0.0.1:7".to_owned())].into(),
        };
        let back = ReadyLine::parse(&format!("{}\n", ready.to_line())).unwrap();
        assert_eq!(back, ready);
        assert_eq!(back.address("data"), "127.0.0.1:7");
        assert_eq!(back.address("other"), "");
    }

    #[test]
    fn quotes_an_invalid_line() {
        let message = ReadyLine::parse("panicked\n").unwrap_err().to_string();
        assert!(message.contains("\"panicked\""), "{message}");
    }
}
