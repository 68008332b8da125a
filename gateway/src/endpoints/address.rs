//! URLs of engines: validation and name lookup.
//!
//! Not here: dialing.

use std::net::{Ipv6Addr, SocketAddr};

/// Longest URL; a host name has at most 253 characters.
const BYTES_MAX: usize = 280;

/// Most addresses that are kept per host.
const ADDRESSES_MAX: usize = 16;

/// Most characters of an invalid URL in an error.
const SHOWN_MAX: usize = 80;

/// An invalid endpoint URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{url:?} {problem}; write {form}")]
pub struct UrlError {
    url: String,
    problem: &'static str,
    form: &'static str,
}

/// URL of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EngineUrl {
    /// `host:port`.
    pub(crate) authority: String,
    /// Whether it begins with `https`.
    pub(crate) is_tls: bool,
}

impl EngineUrl {
    /// Parses `http://host:port` or `https://host:port`.
    ///
    /// # Errors
    /// As [`authority`].
    pub(crate) fn parse(url: &str) -> Result<EngineUrl, UrlError> {
        parse(url).map_err(|problem| error(url, problem, "http://host:port or https://host:port"))
    }
}

fn error(url: &str, problem: &'static str, form: &'static str) -> UrlError {
    UrlError { url: url.chars().take(SHOWN_MAX).collect(), problem, form }
}

/// `host:port` of `http://host:port`, for addresses that are called without TLS.
///
/// # Errors
/// [`UrlError`] for anything else: another scheme, a path, an invalid host, a missing port.
pub(crate) fn authority(url: &str) -> Result<String, UrlError> {
    let plain = match parse(url) {
        Ok(EngineUrl { authority, is_tls: false }) => Ok(authority),
        Ok(_) => Err("asks for TLS, but only http is supported"),
        Err(problem) => Err(problem),
    };
    plain.map_err(|problem| error(url, problem, "http://host:port"))
}

fn parse(url: &str) -> Result<EngineUrl, &'static str> {
    if url.len() > BYTES_MAX {
        return Err("is longer than any host name");
    }
    let (rest, is_tls) = match (url.strip_prefix("http://"), url.strip_prefix("https://")) {
        (Some(rest), _) => (rest, false),
        (None, Some(rest)) => (rest, true),
        (None, None) => return Err("does not begin with http:// or https://"),
    };
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if rest.contains(['/', '?', '#']) {
        return Err("has a path, but engines are called by fixed paths");
    }
    if rest.contains('@') {
        return Err("has a user name or a password");
    }
    let (host, port) = rest.rsplit_once(':').ok_or("has no port")?;
    match port.parse::<u16>() {
        Ok(1..) if port.bytes().all(|digit| digit.is_ascii_digit()) => {}
        _ => return Err("has no port from 1 to 65535"),
    }
    if is_host(host) {
        Ok(EngineUrl { authority: rest.to_owned(), is_tls })
    } else {
        Err("has no valid host")
    }
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

/// Looks up the addresses of an authority.
///
/// # Errors
/// One line for the operator.
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
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn accepts_only_host_and_port() {
        for (url, expected) in [
            ("http://10.0.0.1:8000", "10.0.0.1:8000"),
            ("http://engine-0.engines.default.svc:8000/", "engine-0.engines.default.svc:8000"),
            ("http://[::1]:80", "[::1]:80"),
            ("http://a_b.:65535", "a_b.:65535"),
        ] {
            assert_eq!(authority(url).as_deref(), Ok(expected), "{url}");
            let parsed = EngineUrl::parse(url).unwrap();
            assert_eq!((parsed.authority.as_str(), parsed.is_tls), (expected, false), "{url}");
            let parsed = EngineUrl::parse(&url.replace("http:", "https:")).unwrap();
            assert_eq!((parsed.authority.as_str(), parsed.is_tls), (expected, true), "{url}");
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
            assert!(authority(url).is_err() && EngineUrl::parse(url).is_err(), "{url}");
        }
        assert!(authority(&format!("http://{}:80", "a.".repeat(1_000_000))).is_err());
    }

    #[test]
    fn explains_invalid_urls() {
        let plain = authority("https://engine-0:8000").expect_err("must be refused");
        says("a URL with TLS where only http is supported", &plain, &[]);
        let said = |url: &str| EngineUrl::parse(url).expect_err("must be refused").to_string();
        says("an engine's URL with another scheme", &said("ftp://engine-0:8000"), &[]);
        says("an engine's URL without a port", &said("http://engine-0"), &[]);
        says("an engine's URL with a path", &said("http://engine-0:8000/v1"), &[]);
    }

    #[tokio::test]
    async fn resolves_names_only() {
        assert_eq!(resolve("127.0.0.1:9").await, Ok(vec!["127.0.0.1:9".parse().expect("an address")]));
        let local = resolve("localhost:9").await.expect("every host has this name");
        assert!(local.iter().all(|address| address.ip().is_loopback() && address.port() == 9), "{local:?}");
        assert!(resolve("no-such-host.invalid:9").await.is_err());
    }
}
