//! Configuration of the endpoint picker.
//!
//! Not here: the endpoints (`gateway.endpoints`).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, refuse};

/// Endpoint picker for Envoy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PickerConfig {
    /// Listening address, `ip:port`; empty disables the picker.
    pub listen: String,
    /// Whether clients must use TLS. The picker presents the router's certificate.
    pub tls: bool,
    /// PEM file with the CAs of clients, which then need a certificate; empty if they need none.
    pub client_ca: PathBuf,
    /// Most endpoints in an answer: the best one and alternatives for Envoy's retries. Use 1 for a
    /// cluster of type `ORIGINAL_DST`, which reads no list.
    pub endpoints_max: usize,
    /// Longest body of a request, in bytes; longer ones are refused with 413.
    pub body_bytes_max: usize,
    /// Bytes of bodies held by all requests; requests beyond are refused with 503.
    pub held_bytes_max: usize,
    /// Most requests in flight, including their answers; streams beyond are refused.
    pub streams_max: usize,
    /// Longest time for a request to arrive, in milliseconds.
    pub arrival_ms: u64,
    /// Whether a request may select its endpoints, as the conformance tests of the Gateway API do.
    /// Never enable it in production.
    pub conformance: bool,
}

impl Default for PickerConfig {
    fn default() -> Self {
        PickerConfig {
            listen: String::new(),
            tls: false,
            client_ca: PathBuf::new(),
            endpoints_max: 4,
            body_bytes_max: 16 << 20,
            held_bytes_max: 1 << 30,
            streams_max: 16_384,
            arrival_ms: 60_000,
            conformance: false,
        }
    }
}

/// Upper limit of `body_bytes_max`, so that a buffered body fits into one message.
const BODY_BYTES_LIMIT: usize = 256 << 20;

/// Upper limit of `endpoints_max`, to keep the header short.
const ENDPOINTS_LIMIT: usize = 16;

impl PickerConfig {
    /// Whether the picker is enabled.
    pub(crate) fn is_open(&self) -> bool {
        !self.listen.is_empty()
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        if !self.listen.is_empty() && self.listen.parse::<std::net::SocketAddr>().is_err() {
            return refuse(
                "picker.listen",
                format!("{:?} is not an address; write ip:port, or \"\" to disable the picker", self.listen),
            );
        }
        if !self.tls && !self.client_ca.as_os_str().is_empty() {
            return refuse(
                "picker.client_ca",
                "is set, but certificates need TLS; set picker.tls = true too",
            );
        }
        if !(1..=BODY_BYTES_LIMIT).contains(&self.body_bytes_max) {
            let got = self.body_bytes_max;
            return refuse("picker.body_bytes_max", format!("is {got}, expected 1 to {BODY_BYTES_LIMIT}"));
        }
        if self.held_bytes_max < self.body_bytes_max {
            return refuse(
                "picker.held_bytes_max",
                format!(
                    "is {}, less than the limit of one body ({})",
                    self.held_bytes_max, self.body_bytes_max
                ),
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
            return refuse("picker.arrival_ms", "is 0; requests need some time to arrive, 60000 is usual");
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
        config.validate().expect_err("accepted an invalid value")
    }

    #[test]
    fn refuses_invalid_values_with_their_key() {
        says("a picker at a name", &refused(|config| config.listen = "envoy:9002".into()), &[]);
        let plain = refused(|config| config.client_ca = "ca.pem".into());
        says("a picker with certificates of clients and without TLS", &plain, &[]);
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
