//! Configuration of the OpenAI-compatible API: keys, defaults and validation.
//!
//! Not here: models and engines, which all listeners share (`crate::config`).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, refuse};

/// Longest configurable time: one day.
const TIME_MS_MAX: u64 = 86_400_000;

/// Upper limit of `body_bytes_max`.
const BODY_BYTES_MAX: usize = 1 << 30;

/// Upper limit of `retry.attempts`; each attempt uses another engine.
const ATTEMPTS_MAX: u32 = 32;

/// OpenAI-compatible API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OpenAiConfig {
    /// Listening address, `ip:port`; empty disables the API.
    pub listen: String,
    /// File with the API keys of callers, as `kvfleet keys new` prints them. If set, each request
    /// needs one, and the key decides its tenant, models and limits.
    pub api_keys_file: PathBuf,
    /// Whether callers of other hosts need no key. Without it, a listener without `api_keys_file`
    /// has a loopback address. Enable it only if a proxy in front authenticates callers.
    pub open: bool,
    /// TLS of the listener.
    pub tls: ListenerTlsConfig,
    /// Interval of checks whether the files of API keys and of `tls` changed, in milliseconds.
    pub reload_ms: u64,
    /// Longest body of a request, in bytes.
    pub body_bytes_max: usize,
    /// Most bytes of the bodies of all requests in flight.
    pub bodies_bytes_max: usize,
    /// Most requests in flight; requests beyond are answered with 503.
    pub requests_max: usize,
    /// Most client connections.
    pub connections_max: usize,
    /// Longest time to connect to an engine, in milliseconds.
    pub connect_ms: u64,
    /// Longest time until the first byte of an engine's answer, in milliseconds.
    pub first_byte_ms: u64,
    /// Longest time to receive the body of a request, in milliseconds.
    pub body_ms: u64,
    /// Longest pause in an answer, in the body of a request, or in a client's reading, in
    /// milliseconds.
    pub idle_ms: u64,
    /// On shutdown, how long `/readyz` fails before the listener closes, in milliseconds.
    pub drain_notice_ms: u64,
    /// On shutdown, time for requests in flight after that, in milliseconds.
    pub drain_ms: u64,
    /// Whether callers may set an objective and a fairness id, and fields that steer an engine:
    /// `priority`, `kv_transfer_params` and others. Enable it only if a trusted proxy is the sole
    /// client.
    pub trusts_callers: bool,
    /// Retries on other engines if one fails before its answer begins.
    pub retry: RetryConfig,
    /// Circuit breaker of each engine.
    pub breaker: BreakerConfig,
}

impl Default for OpenAiConfig {
    fn default() -> Self {
        OpenAiConfig {
            listen: String::new(),
            api_keys_file: PathBuf::new(),
            open: false,
            tls: ListenerTlsConfig::default(),
            reload_ms: 10_000,
            body_bytes_max: 32 << 20,
            bodies_bytes_max: 1 << 30,
            requests_max: 4_096,
            connections_max: 16_384,
            connect_ms: 2_000,
            first_byte_ms: 600_000,
            body_ms: 300_000,
            idle_ms: 300_000,
            drain_notice_ms: 0,
            drain_ms: 30_000,
            trusts_callers: false,
            retry: RetryConfig::default(),
            breaker: BreakerConfig::default(),
        }
    }
}

/// TLS of a listener for callers outside the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ListenerTlsConfig {
    /// PEM file of the certificate, followed by those of intermediate CAs; empty for plain HTTP.
    pub cert: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
}

impl ListenerTlsConfig {
    /// Whether the listener has TLS.
    pub(super) fn is_enabled(&self) -> bool {
        !self.cert.as_os_str().is_empty()
    }

    fn check(&self) -> Result<(), ConfigError> {
        if self.is_enabled() == self.key.as_os_str().is_empty() {
            return refuse("openai.tls", "has one of cert and key; set both for TLS, or none for plain HTTP");
        }
        Ok(())
    }
}

/// Attempts of one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetryConfig {
    /// Most engines that are tried, including the first.
    pub attempts: u32,
    /// Delay before the second attempt, in milliseconds.
    pub first_ms: u64,
    /// Factor between two successive delays.
    pub factor: f64,
    /// Longest delay, in milliseconds.
    pub max_ms: u64,
}

impl Default for RetryConfig {
    fn default() -> Self {
        RetryConfig { attempts: 5, first_ms: 50, factor: 1.5, max_ms: 30_000 }
    }
}

/// Circuit breaker of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BreakerConfig {
    /// Failures in a row that open it.
    pub failures: u32,
    /// Successful trials in a row that close it.
    pub successes: u32,
    /// How long it stays open before a trial, in milliseconds.
    pub open_ms: u64,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        BreakerConfig { failures: 10, successes: 3, open_ms: 60_000 }
    }
}

impl OpenAiConfig {
    /// Whether the API is enabled.
    pub(crate) fn is_enabled(&self) -> bool {
        !self.listen.is_empty()
    }

    /// Checks the address, and that strangers need a key.
    fn check_listen(&self) -> Result<(), ConfigError> {
        if !self.is_enabled() {
            return Ok(());
        }
        let Ok(address) = self.listen.parse::<SocketAddr>() else {
            let text = format!(
                "{:?} is not ip:port; write for example \"0.0.0.0:8000\", or \"\" to disable the API",
                self.listen
            );
            return refuse("openai.listen", text);
        };
        let has_keys = !self.api_keys_file.as_os_str().is_empty();
        if has_keys && self.open {
            let text = "and api_keys_file are both set; remove open, since callers need a key";
            return refuse("openai.open", text);
        }
        if !has_keys && !self.open && !address.ip().to_canonical().is_loopback() {
            let text = format!(
                "{address} can be reached from other hosts, and callers need no key; listen on 127.0.0.1, set \
                 gateway.openai.api_keys_file (`kvfleet keys new` makes keys), or set gateway.openai.open = true if a \
                 proxy in front authenticates callers"
            );
            return refuse("openai.listen", text);
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.check_listen()?;
        self.tls.check()?;
        if !(1..=BODY_BYTES_MAX).contains(&self.body_bytes_max) {
            return refuse(
                "openai.body_bytes_max",
                format!("is {}; 1 to {BODY_BYTES_MAX} are allowed", self.body_bytes_max),
            );
        }
        if self.bodies_bytes_max < self.body_bytes_max {
            let text = format!(
                "is {}, less than the limit of one body ({}); set at least that",
                self.bodies_bytes_max, self.body_bytes_max
            );
            return refuse("openai.bodies_bytes_max", text);
        }
        if self.requests_max == 0 || self.connections_max == 0 {
            return refuse(
                "openai.requests_max",
                "and connections_max must be at least 1; set listen to \"\" to disable the API",
            );
        }
        let times = [
            ("openai.reload_ms", self.reload_ms, 1),
            ("openai.connect_ms", self.connect_ms, 1),
            ("openai.first_byte_ms", self.first_byte_ms, 1),
            ("openai.body_ms", self.body_ms, 1),
            ("openai.idle_ms", self.idle_ms, 1),
            ("openai.drain_notice_ms", self.drain_notice_ms, 0),
            ("openai.drain_ms", self.drain_ms, 0),
            ("openai.retry.first_ms", self.retry.first_ms, 0),
            ("openai.retry.max_ms", self.retry.max_ms, 0),
            ("openai.breaker.open_ms", self.breaker.open_ms, 1),
        ];
        for (key, time, least) in times {
            if !(least..=TIME_MS_MAX).contains(&time) {
                return refuse(key, format!("is {time}; {least} to {TIME_MS_MAX} milliseconds are allowed"));
            }
        }
        self.check_counts()
    }

    fn check_counts(&self) -> Result<(), ConfigError> {
        if !(1..=ATTEMPTS_MAX).contains(&self.retry.attempts) {
            return refuse(
                "openai.retry.attempts",
                format!("is {}; 1 (no retry) to {ATTEMPTS_MAX} are allowed", self.retry.attempts),
            );
        }
        if !(1.0..=10.0).contains(&self.retry.factor) {
            return refuse("openai.retry.factor", format!("is {}; 1 to 10 are allowed", self.retry.factor));
        }
        if self.breaker.failures == 0 || self.breaker.successes == 0 {
            return refuse("openai.breaker", "has failures or successes of 0; set each to at least 1");
        }
        Ok(())
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_ms)
    }

    /// Interval of checks of files.
    pub(super) fn reload_interval(&self) -> Duration {
        Duration::from_millis(self.reload_ms)
    }

    pub(super) fn first_byte_timeout(&self) -> Duration {
        Duration::from_millis(self.first_byte_ms)
    }

    pub(super) fn idle_timeout(&self) -> Duration {
        Duration::from_millis(self.idle_ms)
    }
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    fn refused(change: impl FnOnce(&mut OpenAiConfig)) -> String {
        let mut config = OpenAiConfig { listen: "127.0.0.1:0".into(), ..OpenAiConfig::default() };
        assert_eq!(config.check(), Ok(()));
        change(&mut config);
        config.check().expect_err("must be refused").to_string()
    }

    #[test]
    fn refuses_invalid_values_with_their_key() {
        says("an OpenAI-compatible API at no address", &refused(|config| config.listen = "8000".into()), &[]);
        let address = |listen: &'static str| move |config: &mut OpenAiConfig| config.listen = listen.into();
        says("an OpenAI-compatible API without keys for all hosts", &refused(address("0.0.0.0:8000")), &[]);
        for reachable in ["192.0.2.1:8000", "[::]:8000", "[::ffff:192.0.2.1]:8000"] {
            assert!(refused(address(reachable)).contains("can be reached"), "{reachable}");
        }
        let both = |config: &mut OpenAiConfig| {
            (config.open, config.api_keys_file) = (true, "keys.toml".into());
        };
        says("an OpenAI-compatible API that is open and has keys", &refused(both), &[]);
        let half = |config: &mut OpenAiConfig| config.tls.cert = "tls.crt".into();
        says("a certificate of the OpenAI-compatible API without its key", &refused(half), &[]);
        says("bodies of no length", &refused(|config| config.body_bytes_max = 0), &[]);
        says("less room for bodies than one has", &refused(|config| config.bodies_bytes_max = 1), &[]);
        says("an OpenAI-compatible API for no request", &refused(|config| config.requests_max = 0), &[]);
        says("no time to connect", &refused(|config| config.connect_ms = 0), &[]);
        says("no attempt", &refused(|config| config.retry.attempts = 0), &[]);
        says("waits that get shorter", &refused(|config| config.retry.factor = f64::NAN), &[]);
        says("a breaker that is always open", &refused(|config| config.breaker.failures = 0), &[]);
    }

    #[test]
    fn listens_on_all_addresses_with_keys_or_when_open() {
        let with = |listen: &str, open, keys: &str| {
            let (listen, api_keys_file) = (listen.to_owned(), keys.into());
            OpenAiConfig { listen, open, api_keys_file, ..OpenAiConfig::default() }.check()
        };
        assert_eq!(with("0.0.0.0:8000", true, ""), Ok(()));
        assert_eq!(with("0.0.0.0:8000", false, "keys.toml"), Ok(()));
        for local in ["127.0.0.1:8000", "127.8.0.1:8000", "[::1]:8000", "[::ffff:127.0.0.1]:8000"] {
            assert_eq!(with(local, false, ""), Ok(()), "{local}");
        }
    }
}
