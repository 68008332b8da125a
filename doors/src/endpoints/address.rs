//! Where an engine takes requests: which URLs are that, and which addresses their hosts have.
//!
//! Not here: dialing.

use std::net::{Ipv6Addr, SocketAddr};

/// Longest URL: a host has 253 characters at most.
const BYTES_MAX: usize = 280;

/// Addresses of one host that are kept.
const ADDRESSES_MAX: usize = 16;

/// Characters of a wrong URL that are shown.
const SHOWN_MAX: usize = 80;

/// A URL that is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{url:?} {problem}; write http://host:port")]
pub struct UrlError {
    url: String,
    problem: &'static str,
}

/// `host:port` of `http://host:port`.
///
/// # Errors
/// [`UrlError`] for everything else: another scheme, a path, a host that is none, no port.
pub(crate) fn authority(url: &str) -> Result<String, UrlError> {
    parsed(url).map_err(|problem| UrlError { url: url.chars().take(SHOWN_MAX).collect(), problem })
}

fn parsed(url: &str) -> Result<String, &'static str> {
    if url.len() > BYTES_MAX {
        return Err("is longer than any host's");
    }
    let Some(rest) = url.strip_prefix("http://") else {
        return Err(match url.starts_with("https://") {
            true => "asks for TLS, and only http is spoken",
            false => "does not begin with http://",
        });
    };
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if rest.contains(['/', '?', '#']) {
        return Err("has a path, and engines are called by the paths of their own");
    }
    if rest.contains('@') {
        return Err("has a name or a password");
    }
    let (host, port) = rest.rsplit_once(':').ok_or("has no port")?;
    match port.parse::<u16>() {
        Ok(1..) if port.bytes().all(|digit| digit.is_ascii_digit()) => {}
        _ => return Err("has no port from 1 to 65535"),
    }
    if is_host(host) { Ok(rest.to_owned()) } else { Err("has no host that can be") }
}

fn is_host(host: &str) -> bool {
    if let Some(inner) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return inner.parse::<Ipv6Addr>().is_ok();
    }
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    let host = host.strip_suffix('.').unwrap_or(host);
    host.len() <= 253 && host.split('.').all(is_label)
}

/// Asks for the addresses of an authority.
///
/// # Errors
/// A line for a person.
pub(crate) async fn resolve(authority: &str) -> Result<Vec<SocketAddr>, String> {
    if let Ok(address) = authority.parse() {
        return Ok(vec![address]);
    }
    let found = tokio::net::lookup_host(authority).await;
    let found = found.map_err(|error| format!("{authority} has no address: {error}"))?;
    let addresses: Vec<_> = found.take(ADDRESSES_MAX).collect();
    if addresses.is_empty() { Err(format!("{authority} has no address")) } else { Ok(addresses) }
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn only_a_host_and_a_port_are_taken() {
        for (url, expected) in [
            ("http://10.0.0.1:8000", "10.0.0.1:8000"),
            ("http://engine-0.engines.default.svc:8000/", "engine-0.engines.default.svc:8000"),
            ("http://[::1]:80", "[::1]:80"),
            ("http://a_b.:65535", "a_b.:65535"),
        ] {
            assert_eq!(authority(url).as_deref(), Ok(expected), "{url}");
        }
        for url in [
            "",
            "http://",
            "http://:80",
            "http://a",
            "http://a:",
            "http://a:0",
            "http://a:65536",
            "http://a:+80",
            "http://a:80//",
            "http://a:80?b",
            "http://a b:80",
            "http://a..b:80",
            "http://[::1:80",
            "http://[a]:80",
            "http://::1:80",
            "HTTP://a:80",
            "ftp://a:80",
            "http://a\u{e9}:80",
            "http://a\n:80",
            "http://-\0:80",
        ] {
            assert!(authority(url).is_err(), "{url}");
        }
        assert!(authority(&format!("http://{}:80", "a.".repeat(1_000_000))).is_err());
    }

    #[test]
    fn what_is_wrong_with_a_url_is_said() {
        let said = |url: &str| authority(url).expect_err("is refused").to_string();
        says("an engine's URL with TLS", &said("https://engine-0:8000"), &[]);
        says("an engine's URL without a port", &said("http://engine-0"), &[]);
        says("an engine's URL with a path", &said("http://engine-0:8000/v1"), &[]);
    }

    #[tokio::test]
    async fn numbers_are_addresses_already_and_names_are_asked_for() {
        assert_eq!(resolve("127.0.0.1:9").await, Ok(vec!["127.0.0.1:9".parse().expect("an address")]));
        let local = resolve("localhost:9").await.expect("every host has it");
        assert!(local.iter().all(|address| address.ip().is_loopback() && address.port() == 9), "{local:?}");
        assert!(resolve("no-such-host.invalid:9").await.is_err());
    }
}
