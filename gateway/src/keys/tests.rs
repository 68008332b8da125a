//! Files of keys: their errors, reloading, and the key of a request.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use axum::http::HeaderValue;
use kvfleet_errors_doc::says;
use kvfleet_router::{EngineTenantConfig, EnginesConfig, Tenants};
use kvfleet_testkit::write_secret;

use super::reload::{KeyChange, KeyReload};
use super::*;

/// Longest body in these tests.
const BODY_BYTES_MAX: usize = 1_000;

/// SHA-256 of the key `a`.
const HASH_OF_A: &str = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb";

/// A folder with a file of keys, and tenant 3.
struct FileFixture {
    folder: tempfile::TempDir,
    tenants: Arc<Tenants>,
}

impl FileFixture {
    fn new() -> FileFixture {
        let folder = tempfile::tempdir().unwrap();
        let secret_file = folder.path().join("secret");
        write_secret(&secret_file, &"0a".repeat(32));
        let tenants = vec![EngineTenantConfig { tenant: 3, salt: "s".into(), secret_file }];
        let config = EnginesConfig { tenants, public_hashes: true, ..EnginesConfig::default() };
        FileFixture { tenants: Arc::new(Tenants::load(&config).unwrap()), folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("keys.toml")
    }

    fn load(&self) -> Result<(Arc<KeyRing>, KeyReload), KeyFileError> {
        let tenants = Arc::clone(&self.tenants);
        KeyRing::load(KeySource { path: self.file(), tenants, body_bytes_max: BODY_BYTES_MAX })
    }

    fn load_text(&self, text: &str) -> Result<(Arc<KeyRing>, KeyReload), KeyFileError> {
        write_secret(&self.file(), text);
        self.load()
    }
}

/// A table of the key `a`, with another line.
fn table(line: &str) -> String {
    format!("[[keys]]\nname = \"a\"\nsha256 = \"{HASH_OF_A}\"\ntenant = 3\n{line}\n")
}

fn with_key(key: &str) -> HeaderMap {
    let value = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
    HeaderMap::from_iter([(AUTHORIZATION, value)])
}

#[test]
fn unusable_files_are_refused() {
    let fixture = FileFixture::new();
    let folder = fixture.folder.path().display().to_string();
    let refused = |text: &str| fixture.load_text(text).expect_err("must be refused").to_string();
    let entry = |from: &str, to: &str| refused(&table("").replace(from, to));
    says("a file of API keys that is no TOML", &refused("kvfleet-0123\n"), &[&folder]);
    says("an API key without a tenant", &entry("tenant = 3", ""), &[&folder]);
    says("an API key with a name of spaces", &entry("\"a\"", "\"a b\""), &[&folder]);
    says("an API key in place of its hash", &entry(HASH_OF_A, "kvfleet-0123"), &[&folder]);
    says("an API key for no model", &refused(&table("models = []")), &[&folder]);
    says("an API key for no request", &refused(&table("requests_max = 0")), &[&folder]);
    says(
        "an API key with less room for bodies than one has",
        &refused(&table("bodies_bytes_max = 999")),
        &[&folder],
    );
    says("two API keys with one name", &refused(&table("").repeat(2)), &[&folder]);
    says(
        "two API keys with one hash",
        &refused(&(table("") + &table("").replace("\"a\"", "\"b\""))),
        &[&folder],
    );
    says("an API key of an unknown tenant", &entry("tenant = 3", "tenant = 4"), &[&folder]);
    assert!(fixture.load_text(&table("")).is_ok());
    std::fs::set_permissions(fixture.file(), std::fs::Permissions::from_mode(0o644)).unwrap();
    says("a file of API keys that all users can read", &fixture.load().unwrap_err(), &[&folder]);
    std::fs::remove_file(fixture.file()).unwrap();
    says("a file of API keys that is not there", &fixture.load().unwrap_err(), &[&folder]);
}

#[test]
fn errors_show_no_text_of_the_file() {
    let fixture = FileFixture::new();
    let secret = "kvfleet-5ec1e7";
    for text in [
        secret.to_owned(),
        format!("key = \"{secret}\""),
        format!("{secret} = 1"),
        format!("[[keys]]\nname = {secret}"),
        table(&format!("\"{secret}\" = 1")),
        table("").replace("tenant = 3", &format!("tenant = \"{secret}\"")),
        table(&format!("requests_max = \"{secret}\"")),
        table(&format!("models = \"{secret}\"")),
        table("").replace(HASH_OF_A, secret),
    ] {
        let error = fixture.load_text(&text).expect_err(&text);
        assert!(!format!("{error} {error:?}").contains("5ec1e7"), "{error}");
    }
}

#[test]
fn a_ring_shows_neither_keys_nor_hashes() {
    let fixture = FileFixture::new();
    let (ring, reload) = fixture.load_text(&table("")).unwrap();
    let shown = format!("{ring:?} {reload:?}");
    assert!(!shown.contains(&HASH_OF_A[..16]), "{shown}");
}

#[test]
fn new_keys_are_random_and_match_their_tables() {
    let fixture = FileFixture::new();
    let entry = KeyEntry {
        name: "team".into(),
        tenant: 3,
        models: Some(vec!["m\"1".into()]),
        requests_max: Some(7),
        ..KeyEntry::default()
    };
    let (one, two) = (NewKey::new(entry.clone()).unwrap(), NewKey::new(entry).unwrap());
    assert_ne!(one.key, two.key);
    assert_eq!(one.key.len(), "kvfleet-".len() + 64);
    assert!(!one.table.contains(&one.key["kvfleet-".len()..]));
    let (ring, _) = fixture.load_text(&one.table).unwrap();
    let key = ring.authenticate(&with_key(&one.key)).unwrap();
    assert_eq!((key.name.as_str(), key.tenant, key.salt.as_deref()), ("team", TenantId(3), Some("s")));
    assert_eq!(key.requests.as_ref().map(|limit| limit.max), Some(7));
    let caller = Caller::Key(key);
    assert!(caller.may_use("m\"1") && !caller.may_use("other") && !caller.may_use(""));
    assert_eq!(ring.authenticate(&with_key(&two.key)).unwrap_err(), AuthError::Unknown);
}

#[test]
fn only_one_bearer_header_is_a_key() {
    let fixture = FileFixture::new();
    let (ring, _) = fixture.load_text(&table("")).unwrap();
    let of = |values: &[&'static str]| {
        let pairs = values.iter().map(|value| (AUTHORIZATION, HeaderValue::from_static(value)));
        let mut headers = HeaderMap::new();
        pairs.for_each(|(name, value)| {
            headers.append(name, value);
        });
        ring.authenticate(&headers).map(drop)
    };
    assert_eq!(of(&[]), Err(AuthError::Missing));
    for valid in ["Bearer a", "bearer a", "BEARER  a "] {
        assert_eq!(of(&[valid]), Ok(()), "{valid}");
    }
    for wrong in ["", "a", "Bearer", "Bearer ", "Basic a", "Bearer a b", "Bearer A", "Bearera"] {
        assert_eq!(of(&[wrong]), Err(AuthError::Unknown), "{wrong}");
    }
    assert_eq!(of(&["Bearer a", "Bearer a"]), Err(AuthError::Unknown));
    assert_eq!(ring.authenticate(&with_key(&"a".repeat(KEY_BYTES_MAX + 1))).unwrap_err(), AuthError::Unknown);
}

#[test]
fn changes_are_used_and_unusable_files_reported_once() {
    let fixture = FileFixture::new();
    let (ring, mut reload) = fixture.load_text(&table("")).unwrap();
    let is_valid = || ring.authenticate(&with_key("a")).is_ok();
    assert!(matches!(reload.check(), KeyChange::Unchanged));
    for unusable in ["keys = 1", "[[keys]]"] {
        write_secret(&fixture.file(), unusable);
        assert!(matches!(reload.check(), KeyChange::Rejected(KeyFileError::Form { .. })), "{unusable}");
        assert!(matches!(reload.check(), KeyChange::Unchanged), "reported twice");
        assert!(is_valid(), "the keys before stay");
    }
    write_secret(&fixture.file(), "");
    assert!(matches!(reload.check(), KeyChange::Reloaded(0)));
    assert!(!is_valid(), "the last key can be removed");
    write_secret(&fixture.file(), &table(""));
    assert!(matches!(reload.check(), KeyChange::Reloaded(1)));
    assert!(is_valid());
    for _ in 0..2 {
        std::fs::remove_file(fixture.file()).unwrap();
        assert!(matches!(reload.check(), KeyChange::Rejected(KeyFileError::File(_))));
        assert!(matches!(reload.check(), KeyChange::Unchanged), "reported twice");
        write_secret(&fixture.file(), &table(""));
        assert!(matches!(reload.check(), KeyChange::Unchanged));
    }
    assert!(is_valid());
}

#[test]
fn a_reload_forgets_no_request_in_flight() {
    let fixture = FileFixture::new();
    let limited = |max: u32| table(&format!("requests_max = {max}"));
    let (ring, mut reload) = fixture.load_text(&limited(1)).unwrap();
    let key = || ring.authenticate(&with_key("a")).unwrap();
    let permit = key().admit().unwrap();
    write_secret(&fixture.file(), &(limited(1) + "# changed\n"));
    assert!(matches!(reload.check(), KeyChange::Reloaded(1)));
    assert!(key().admit().is_err());
    drop(permit);
    assert!(key().admit().is_ok());
    write_secret(&fixture.file(), &limited(2));
    assert!(matches!(reload.check(), KeyChange::Reloaded(1)));
    let both = (key().admit().unwrap(), key().admit().unwrap());
    assert!(both.0.is_some() && both.1.is_some() && key().admit().is_err());
}
