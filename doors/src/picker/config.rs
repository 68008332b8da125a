//! What an operator can set for the door of Envoy.
//!
//! Not here: who may be picked (`doors.endpoints`).

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, refuse};

/// Where Envoy asks to which engine a request goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PickerConfig {
    /// Address to listen on, `ip:port`; empty for none.
    pub listen: String,
    /// Whether callers must speak TLS; they are shown the router's certificate, and asked for none.
    pub tls: bool,
    /// Endpoints that an answer names: the best, and where else Envoy may try. 1 for a cluster of type `ORIGINAL_DST`, which reads no list.
    pub endpoints_max: usize,
    /// Longest body of a request. Longer ones are refused with 413.
    pub body_bytes_max: usize,
    /// Bodies that are held at once, all requests taken together. Requests beyond are refused with 503.
    pub held_bytes_max: usize,
    /// Requests under way at once, answers included. Streams beyond are refused.
    pub streams_max: usize,
    /// Longest that the request itself may take to arrive, milliseconds.
    pub arrival_ms: u64,
    /// Whether a request may name the endpoints that it goes to, as the conformance tests of the Gateway API do. Never in production.
    pub conformance: bool,
}

impl Default for PickerConfig {
    fn default() -> Self {
        PickerConfig {
            listen: String::new(),
            tls: false,
            endpoints_max: 4,
            body_bytes_max: 16 << 20,
            held_bytes_max: 1 << 30,
            streams_max: 16_384,
            arrival_ms: 60_000,
            conformance: false,
        }
    }
}

/// Largest message that is taken, so that a body which Envoy sends in one piece fits.
const BODY_BYTES_LIMIT: usize = 256 << 20;

/// So that the header stays short.
const ENDPOINTS_LIMIT: usize = 16;

impl PickerConfig {
    /// Whether there is such a door.
    pub(crate) fn is_open(&self) -> bool {
        !self.listen.is_empty()
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        if !self.listen.is_empty() && self.listen.parse::<std::net::SocketAddr>().is_err() {
            return refuse(
                "picker.listen",
                format!("{:?} is no address; write ip:port, or \"\" for no such door", self.listen),
            );
        }
        if !(1..=BODY_BYTES_LIMIT).contains(&self.body_bytes_max) {
            let got = self.body_bytes_max;
            return refuse("picker.body_bytes_max", format!("is {got}, expected 1 to {BODY_BYTES_LIMIT}"));
        }
        if self.held_bytes_max < self.body_bytes_max {
            return refuse(
                "picker.held_bytes_max",
                format!("is {}, less than one body may have ({})", self.held_bytes_max, self.body_bytes_max),
            );
        }
        if self.streams_max == 0 || u32::try_from(self.streams_max).is_err() {
            return refuse("picker.streams_max", format!("is {}, expected 1 or more", self.streams_max));
        }
        if !(1..=ENDPOINTS_LIMIT).contains(&self.endpoints_max) {
            let got = self.endpoints_max;
            return refuse("picker.endpoints_max", format!("is {got}, expected 1 to {ENDPOINTS_LIMIT}"));
        }
        if self.arrival_ms == 0 {
            return refuse(
                "picker.arrival_ms",
                "is 0; give requests some time, 60000 unless you know better",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    fn refused(change: impl FnOnce(&mut PickerConfig)) -> ConfigError {
        let mut config = PickerConfig::default();
        assert_eq!(config.validate(), Ok(()));
        change(&mut config);
        config.validate().expect_err("it is taken")
    }

    #[test]
    fn what_is_wrong_with_the_door_of_envoy_is_said_with_its_key() {
        says("a picker at a name", &refused(|config| config.listen = "envoy:9002".into()), &[]);
        says("a picker that takes no body", &refused(|config| config.body_bytes_max = 0), &[]);
        says(
            "a picker that holds less than one body",
            &refused(|config| config.held_bytes_max = 1 << 20),
            &[],
        );
        says("a picker without streams", &refused(|config| config.streams_max = 0), &[]);
        says("a picker that names no endpoint", &refused(|config| config.endpoints_max = 0), &[]);
        says("a picker that gives requests no time", &refused(|config| config.arrival_ms = 0), &[]);
    }
}
