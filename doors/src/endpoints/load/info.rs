//! What an SGLang says of where its events are: the part `kv_events` of its `/server_info`.
//!
//! Pure. Not here: following them (`kvfleet_router`); a vLLM says nothing of the kind.

use kv_core::id::InstanceId;
use kvfleet_router::{DialectConfig, EngineConfig};
use serde::Deserialize;

/// Hosts that mean the engine's own.
const ANY: [&str; 5] = ["*", "0.0.0.0", "::", "[::]", ""];

/// Why it is not known where events are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InfoError {
    /// It is something else.
    #[error("what {authority} says of its events cannot be read: {problem}")]
    Json {
        /// Who.
        authority: String,
        /// What is wrong.
        problem: String,
    },
    /// Nobody here speaks that.
    #[error("{authority} publishes its events by {publisher:?}, and only zmq is heard")]
    Publisher {
        /// Who.
        authority: String,
        /// How.
        publisher: String,
    },
}

#[derive(Deserialize)]
struct Info {
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

/// Where the events of an instance are; none where it publishes none.
pub(super) fn events(
    body: &[u8],
    instance: InstanceId,
    authority: &str,
) -> Result<Option<EngineConfig>, InfoError> {
    let whose = || authority.to_owned();
    let info: Info = serde_json::from_slice(body)
        .map_err(|error| InfoError::Json { authority: whose(), problem: error.to_string() })?;
    let Some(said) = info.kv_events else { return Ok(None) };
    match said.publisher.as_str() {
        "zmq" => {}
        "null" => return Ok(None),
        other => {
            let publisher = other.chars().take(40).collect();
            return Err(InfoError::Publisher { authority: whose(), publisher });
        }
    }
    let own = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let host = if ANY.contains(&said.endpoint_host.as_str()) { own } else { &said.endpoint_host };
    let at = |port: u16| format!("tcp://{host}:{port}");
    Ok(Some(EngineConfig {
        instance: instance.0,
        ranks: said.dp_size.unwrap_or(1).max(1),
        dialect: DialectConfig::Sglang,
        events: at(said.endpoint_port_base),
        replay: said.replay_endpoint_port_base.map(at).unwrap_or_default(),
        topic: said.topic.unwrap_or_default(),
        ..EngineConfig::default()
    }))
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    fn read(body: &str) -> Result<Option<EngineConfig>, InfoError> {
        events(body.as_bytes(), InstanceId(4), "10.0.0.4:30000")
    }

    #[test]
    fn a_wildcard_is_the_engines_own_host() {
        let body = r#"{"version": "0.5.23", "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557,
            "topic": "kv", "block_size": 64, "dp_size": 2, "replay_endpoint_port_base": 5657, "load_endpoint_port_base": null}}"#;
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
    fn who_publishes_nothing_is_not_followed() {
        for body in [
            "{}",
            r#"{"kv_events": null}"#,
            r#"{"kv_events": {"publisher": "null", "endpoint_host": "", "endpoint_port_base": 1}}"#,
        ] {
            assert_eq!(read(body), Ok(None), "{body}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let refused = |body: &str| read(body).expect_err("is refused").to_string();
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
