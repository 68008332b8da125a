//! The one line a process prints on stdout when it serves: role, number and bound addresses.
//!
//! Ports may be configured as 0, so whoever starts a process reads its addresses here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// First word of the line; what follows is JSON.
const WORD: &str = "READY ";

/// What a process says when it serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// `router`, `node` or `instance`.
    pub role: String,
    /// Number of the router, node or instance.
    pub number: u64,
    /// Process number of the system.
    pub pid: u32,
    /// Bound addresses by purpose: `grpc`, `data`, `control`, `metrics`, `drain`.
    pub addresses: BTreeMap<String, String>,
}

/// Why a line is not a READY line.
#[derive(Debug, thiserror::Error)]
#[error("expected `READY {{…}}`, got {got:?}")]
pub struct ReadyError {
    got: String,
}

impl Ready {
    /// The line without its line end.
    #[must_use]
    pub fn to_line(&self) -> String {
        let json = serde_json::to_string(self).unwrap_or_default();
        format!("{WORD}{json}")
    }

    /// Reads the line back.
    pub fn parse(line: &str) -> Result<Self, ReadyError> {
        let json = line.trim_end().strip_prefix(WORD);
        json.and_then(|json| serde_json::from_str(json).ok())
            .ok_or_else(|| ReadyError { got: line.trim_end().to_owned() })
    }

    /// The address bound for `purpose`; empty when there is none.
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
    fn the_line_survives_a_round_trip() {
        let ready = Ready {
            role: "node".into(),
            number: 2,
            pid: 41,
            addresses: [("data".to_owned(), "127.0.0.1:7".to_owned())].into(),
        };
        let back = Ready::parse(&format!("{}\n", ready.to_line())).unwrap();
        assert_eq!(back, ready);
        assert_eq!(back.address("data"), "127.0.0.1:7");
        assert_eq!(back.address("other"), "");
    }

    #[test]
    fn another_line_is_quoted() {
        let message = Ready::parse("panicked\n").unwrap_err().to_string();
        assert!(message.contains("\"panicked\""), "{message}");
    }
}
