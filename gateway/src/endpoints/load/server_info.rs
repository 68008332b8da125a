//! Parses `kv_events` of SGLang's `/server_info`: where the engine publishes its KV events.
//!
//! Pure. Not here: following the events (`kvfleet_router`). vLLM has no such answer.

use kv_core::id::InstanceId;
use kvfleet_router::{DialectConfig, EngineConfig};
use serde::Deserialize;

/// Hosts that stand for the engine's own host.
const WILDCARD_HOSTS: [&str; 5] = ["*", "0.0.0.0", "::", "[::]", ""];

/// Why the events' address is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ServerInfoError {
    /// The answer is not valid.
    #[error("the event settings of {authority} cannot be read: {problem}")]
    Json {
        /// Address of the engine.
        authority: String,
        /// Error of the parser.
        problem: String,
    },
    /// The publisher is not supported.
    #[error("{authority} publishes its events by {publisher:?}, but only zmq is supported")]
    Publisher {
        /// Address of the engine.
        authority: String,
        /// Name of the publisher.
        publisher: String,
    },
}

#[derive(Deserialize)]
struct ServerInfo {
    #[serde(default)]
    kv_events: Option<KvEvents>,
}

#[derive(Deserialize)]
struct KvEvents {
    publisher: String,
    endpoint_host: String,
    endpoint_port_base: u16,
    #[serde(default)]
    topic: Option<String>,
    #[serde(default)]
    dp_size: Option<u16>,
    #[serde(default)]
    replay_endpoint_port_base: Option<u16>,
}

/// Event settings of an engine; `None` if it publishes none.
pub(super) fn parse_events(
    body: &[u8],
    instance: InstanceId,
    authority: &str,
) -> Result<Option<EngineConfig>, ServerInfoError> {
    let owned_authority = || authority.to_owned();
    let info: ServerInfo = serde_json::from_slice(body).map_err(|error| ServerInfoError::Json {
        authority: owned_authority(),
        problem: error.to_string(),
    })?;
    let Some(kv_events) = info.kv_events else { return Ok(None) };
    match kv_events.publisher.as_str() {
        "zmq" => {}
        "null" => return Ok(None),
        other => {
            let publisher = other.chars().take(40).collect();
            return Err(ServerInfoError::Publisher { authority: owned_authority(), publisher });
        }
    }
    let own = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let host = if WILDCARD_HOSTS.contains(&kv_events.endpoint_host.as_str()) {
        own
    } else {
        &kv_events.endpoint_host
    };
    let at = |port: u16| format!("tcp://{host}:{port}");
    Ok(Some(EngineConfig {
        instance: instance.0,
        ranks: kv_events.dp_size.unwrap_or(1).max(1),
        dialect: DialectConfig::Sglang,
        events: at(kv_events.endpoint_port_base),
        replay: kv_events.replay_endpoint_port_base.map(at).unwrap_or_default(),
        topic: kv_events.topic.unwrap_or_default(),
        ..EngineConfig::default()
    }))
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    fn read(body: &str) -> Result<Option<EngineConfig>, ServerInfoError> {
        parse_events(body.as_bytes(), InstanceId(4), "10.0.0.4:30000")
    }

    #[test]
    fn wildcard_hosts_mean_the_engine() {
        let body = r#"{"version": "0.5.23", "kv_events": {"publisher": "zmq", "endpoint_host": "*",
             "endpoint_port_base": 5557,
            "topic": "kv", "block_size": 64, "dp_size": 2, "replay_endpoint_port_base": 5657,
             "load_endpoint_port_base": null}}"#;
        let engine = read(body).expect("is read").expect("publishes");
        assert_eq!(
            [engine.events.as_str(), &engine.replay, &engine.topic],
            ["tcp://10.0.0.4:5557", "tcp://10.0.0.4:5657", "kv"]
        );
        assert_eq!((engine.instance, engine.ranks, engine.dialect), (4, 2, DialectConfig::Sglang));
        let named = read(&body.replace('*', "engine-4")).expect("is read").expect("publishes");
        assert_eq!(named.events, "tcp://engine-4:5557");
    }

    #[test]
    fn engines_without_events_are_not_followed() {
        for body in [
            "{}",
            r#"{"kv_events": null}"#,
            r#"{"kv_events": {"publisher": "null", "endpoint_host": "", "endpoint_port_base": 1}}"#,
        ] {
            assert_eq!(read(body), Ok(None), "{body}");
        }
    }

    #[test]
    fn explains_invalid_answers() {
        let refused = |body: &str| read(body).expect_err("must be refused").to_string();
        says(
            "an SGLang whose events have no port",
            &refused(r#"{"kv_events": {"publisher": "zmq", "endpoint_host": "*"}}"#),
            &[],
        );
        let nats = r#"{"kv_events": {"publisher": "nats", "endpoint_host": "*", "endpoint_port_base": 1}}"#;
        says("an SGLang with another publisher", &refused(nats), &[]);
        for body in [
            "",
            "<html>",
            "[",
            "\u{0}",
            &"[".repeat(10_000),
            r#"{"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 99999}}"#,
        ] {
            refused(body);
        }
    }
}
