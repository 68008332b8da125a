//! Whose hashes the prefixes of engines have: manifest, adapter and tenant, by what events tell of them.
//!
//! Pure, but for the files that hold secrets, which are read at start. Not here: hashing (`kv_core::prefix`).

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use kv_core::prefix::{IdentityManifest, PrefixHasher};

use crate::config::{ConfigError, EnginesConfig};

/// Adapters and salts, taken together, that one engine has prefixes of. Each costs a table of keys, and names come from requests.
const HASHERS_MAX: usize = 1_024;

/// Longest name of an adapter.
const ADAPTER_BYTES_MAX: usize = 256;

/// Bytes of a tenant's secret.
const SECRET_BYTES: usize = 32;

/// Whose hashes the prefixes of engines have: of events, and of requests that come by the doors.
pub struct Tenants {
    /// The model that the engines run, without an adapter.
    pub(crate) manifest: IdentityManifest,
    /// What a request's `cache_salt` stands for: the secret of its tenant.
    pub(crate) by_salt: HashMap<String, [u8; SECRET_BYTES]>,
    /// Whose requests without one are.
    pub(crate) without_salt: [u8; SECRET_BYTES],
}

impl fmt::Debug for Tenants {
    /// Leaves the secrets out: logs are no place for them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenants").field("salts", &self.by_salt.len()).finish_non_exhaustive()
    }
}

impl Tenants {
    /// Reads the secrets.
    ///
    /// # Errors
    /// A file that cannot be read or holds no secret, and two tenants of one salt or one secret.
    pub fn load(config: &EnginesConfig) -> Result<Tenants, ConfigError> {
        let without_salt = match config.secret_file.as_os_str().is_empty() {
            true => [0; SECRET_BYTES],
            false => secret("engines.secret_file", &config.secret_file)?,
        };
        let mut by_salt = HashMap::new();
        for tenant in &config.tenants {
            let secret = secret("engines.tenants", &tenant.secret_file)?;
            if by_salt.contains_key(&tenant.salt) {
                let problem = format!("has the salt {:?} twice; give each tenant its own", tenant.salt);
                return Err(ConfigError { key: "engines.tenants", problem });
            }
            // The engine keeps their prefixes apart, and we would not.
            if secret == without_salt || by_salt.values().any(|other| *other == secret) {
                let problem =
                    format!("the secret of the salt {:?} is another's too; give each its own", tenant.salt);
                return Err(ConfigError { key: "engines.tenants", problem });
            }
            by_salt.insert(tenant.salt.clone(), secret);
        }
        let mut manifest = config.identity.manifest();
        // Whoever cuts blocks and whoever hashes them must mean the same length.
        manifest.block_tokens = manifest.block_tokens.max(1);
        Ok(Tenants { manifest, by_salt, without_salt })
    }

    /// Tokens of a block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.manifest.block_tokens
    }

    /// Who hashes prefixes of this adapter and salt; making one costs a table of keys. Nobody where no tenant has the salt, or the adapter's
    /// name is none.
    #[must_use]
    pub fn hasher(&self, adapter: Option<&str>, salt: Option<&str>) -> Option<PrefixHasher> {
        if adapter.is_some_and(|adapter| adapter.len() > ADAPTER_BYTES_MAX) {
            return None;
        }
        let secret = match salt {
            Some(salt) => self.by_salt.get(salt)?,
            None => &self.without_salt,
        };
        let mut manifest = self.manifest.clone();
        manifest.adapter = adapter.unwrap_or(&manifest.adapter).to_owned();
        Some(PrefixHasher::new(&manifest, secret))
    }
}

/// A secret, as 64 hexadecimal digits in a file of its own.
fn secret(key: &'static str, path: &Path) -> Result<[u8; SECRET_BYTES], ConfigError> {
    let refuse = |problem: String| Err(ConfigError { key, problem });
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            return refuse(format!(
                "cannot read {}: {error}; name a file that this process may read",
                path.display()
            ));
        }
    };
    let digits: Option<Vec<u8>> = text.trim().chars().map(|digit| Some(digit.to_digit(16)? as u8)).collect();
    let digits = digits.filter(|digits| digits.len() == 2 * SECRET_BYTES);
    let Some(digits) = digits else {
        return refuse(format!(
            "{} does not hold {} hexadecimal digits; make one with: openssl rand -hex {SECRET_BYTES}",
            path.display(),
            2 * SECRET_BYTES
        ));
    };
    Ok(std::array::from_fn(|at| digits[2 * at] << 4 | digits[2 * at + 1]))
}

/// Who hashes prefixes of one engine, by adapter and salt; made when one is first heard of.
#[derive(Debug)]
pub(super) struct Hashers {
    tenants: Arc<Tenants>,
    list: Vec<PrefixHasher>,
    by_names: HashMap<(Option<String>, Option<String>), u16>,
}

impl Hashers {
    pub(super) fn new(tenants: Arc<Tenants>) -> Hashers {
        Hashers { tenants, list: Vec::new(), by_names: HashMap::new() }
    }

    /// Tokens of one of our blocks.
    pub(super) fn block_tokens(&self) -> usize {
        self.tenants.block_tokens() as usize
    }

    /// One that [`Hashers::of`] named.
    pub(super) fn hasher(&self, number: u16) -> &PrefixHasher {
        &self.list[usize::from(number)]
    }

    /// It is another process: it has prefixes of other adapters and salts.
    pub(super) fn forget(&mut self) {
        self.list.clear();
        self.by_names.clear();
    }

    /// Who hashes prefixes of this adapter and salt; nobody where no tenant has the salt, the adapter's name is none, or there are too many.
    pub(super) fn of(&mut self, adapter: Option<&str>, salt: Option<&str>) -> Option<u16> {
        let names = (adapter.map(str::to_owned), salt.map(str::to_owned));
        if let Some(number) = self.by_names.get(&names) {
            return Some(*number);
        }
        if self.list.len() >= HASHERS_MAX {
            return None;
        }
        self.list.push(self.tenants.hasher(adapter, salt)?);
        let number = self.list.len() as u16 - 1;
        self.by_names.insert(names, number);
        Some(number)
    }
}
