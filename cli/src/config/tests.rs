//! Tests of configuration layers and of error messages.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use kvfleet_errors_doc::says;

use super::*;

#[derive(Debug, Clone, PartialEq, Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct SampleConfig {
    listen: String,
    queue_blocks_max: u32,
    watermark_high: f64,
    data_dir: Option<String>,
    peers: BTreeMap<String, String>,
    tls: SampleFiles,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct SampleFiles {
    cert: String,
    key: String,
}

impl Default for SampleConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:0".into(),
            queue_blocks_max: 10,
            watermark_high: 0.95,
            data_dir: None,
            peers: BTreeMap::new(),
            tls: SampleFiles::default(),
        }
    }
}

fn read(text: &str, overrides: &[Override]) -> Result<Settings<SampleConfig>, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.toml");
    std::fs::write(&path, text).unwrap();
    load(Some(&path), overrides)
        .map_err(|error| error.to_string().replace(&path.display().to_string(), "node.toml"))
}

#[test]
fn no_layers_give_the_defaults() {
    let settings = load::<SampleConfig>(None, &[]).unwrap();
    assert_eq!(settings.service, SampleConfig::default());
    assert_eq!(settings.process, ProcessConfig::default());
}

#[test]
fn later_layers_win_key_by_key() {
    let environment = environment_overrides([("KVFLEET_LISTEN".to_owned(), "b:1".to_owned())].into_iter());
    let flags = [Override::flag("--set", "tls.key", "flag.pem")];
    let layers: Vec<_> = environment.into_iter().chain(flags).collect();
    let text = "listen = 'a:1'\nqueue_blocks_max = 7\n[tls]\ncert = 'file.pem'\nkey = 'file.key'\n";
    let sample = read(text, &layers).unwrap().service;
    assert_eq!(sample.listen, "b:1", "the environment overrides the file");
    assert_eq!(sample.queue_blocks_max, 7);
    assert_eq!(sample.tls, SampleFiles { cert: "file.pem".into(), key: "flag.pem".into() });
}

#[test]
fn unknown_keys_suggest_the_nearest() {
    let message = read("listne = 'a:1'", &[]).unwrap_err();
    assert_eq!(message, "node.toml: unknown key `listne`; the nearest valid key is `listen`");
    says("an unknown key", &message, &[]);
    let message = read("[tls]\ncrt = 'x'", &[]).unwrap_err();
    assert_eq!(message, "node.toml: unknown key `tls.crt`; the nearest valid key is `tls.cert`");
}

#[test]
fn finds_a_key_at_the_wrong_level() {
    says("a key at the wrong level", &read("cert = 'x'", &[]).unwrap_err(), &[]);
}

#[test]
fn dissimilar_keys_list_the_valid_ones() {
    says("a key like no other", &read("zzzz = 1", &[]).unwrap_err(), &[]);
}

#[test]
fn wrong_types_name_the_expected_one() {
    says("a value of the wrong type", &read("queue_blocks_max = 'many'", &[]).unwrap_err(), &[]);
    let message = read("", &[Override::flag("--set", "queue_blocks_max", "1.5")]).unwrap_err();
    assert!(message.starts_with("flag --set: key `queue_blocks_max` is a float"), "{message}");
}

#[test]
fn unknown_variables_are_errors() {
    let layers = environment_overrides([("KVFLEET_TLS__CRET".to_owned(), "x".to_owned())].into_iter());
    says("an unknown environment variable", &read("", &layers).unwrap_err(), &[]);
}

#[test]
fn reads_options_maps_and_numbers() {
    let sample = read("data_dir = 'd'\nwatermark_high = 1\n[peers]\nany = 'name'", &[]).unwrap().service;
    assert_eq!(sample.data_dir.as_deref(), Some("d"));
    assert_eq!(sample.peers["any"], "name");
}

#[test]
fn out_of_range_values_name_the_file() {
    says("a number that the key cannot hold", &read("queue_blocks_max = -1", &[]).unwrap_err(), &[]);
}

#[test]
fn file_errors_name_the_file() {
    says("a file that is no TOML", &read("listen = 'a:1'\nid = \n", &[]).unwrap_err(), &[]);
    let absent = load::<SampleConfig>(Some(Path::new("/nonexistent/x.toml")), &[]).unwrap_err();
    says("a configuration file that is not there", &absent, &[]);
}

#[test]
fn written_configurations_round_trip() {
    let mut settings = load::<SampleConfig>(None, &[]).unwrap();
    settings.service.data_dir = Some("d".into());
    settings.process.log = "debug".into();
    let back = read(&to_toml(&settings).unwrap(), &[]).unwrap();
    assert_eq!(back.service, settings.service);
    assert_eq!(back.process, settings.process);
}

#[test]
fn set_requires_key_and_value() {
    says("--set without a value", &parse_override("novalue").unwrap_err(), &[]);
    assert_eq!(parse_override("a.b = c").unwrap(), Override::flag("--set", "a.b", "c"));
}

#[test]
fn renamed_keys_name_the_new_key() {
    use crate::process::RouterProcessConfig;

    let schema = |config: Result<serde_json::Value, serde_json::Error>| config.unwrap();
    let configs = [
        schema(serde_json::to_value(kvfleet_node::NodeConfig::default())),
        schema(serde_json::to_value(RouterProcessConfig::default())),
        schema(serde_json::to_value(kvfleet_engine::mock::InstanceConfig::default())),
    ];
    let renamed = [
        (1, "[doors]", "`doors`; it is named `gateway`"),
        (1, "[truth]", "`truth`; it is named `anti_entropy`"),
        (0, "[shm]\ntray_bytes = 1", "`shm.tray_bytes`; it is named `shm.bounce_buffer_bytes`"),
        (0, "[rdma]\ntray_bytes = 1", "`rdma.tray_bytes`; it is named `rdma.bounce_buffer_bytes`"),
        (0, "[shm]\nlent_bytes = 1", "`shm.lent_bytes`; it is named `shm.in_place_bytes`"),
        (2, "asks_to_decode = true", "`asks_to_decode`; it is named `checks_decode_admission`"),
    ];
    for (config, text, expected) in renamed {
        let refused = keys::check(&text.parse().unwrap(), &configs[config]).unwrap_err().to_string();
        assert_eq!(refused, format!("unknown key {expected} now: rename it"));
    }
}
