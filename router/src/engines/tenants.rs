//! Hash identities of engine prefixes: manifest, adapter and tenant, as events name them.
//!
//! Pure, except for reading the secret files at start. Not here: hashing (`kv_core::prefix`).

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use kv_core::id::TenantId;
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_net::secrets;

use crate::config::{ConfigError, EnginesConfig};

/// Limit on combinations of adapter and salt per engine, because the names come from requests.
const HASHERS_MAX: usize = 1_024;

/// Longest name of an adapter.
const ADAPTER_BYTES_MAX: usize = 256;

/// Length of a tenant's secret in bytes.
const SECRET_BYTES: usize = 32;

/// Number of a tenant that no API key names, and of requests without a salt.
const NO_NUMBER: TenantId = TenantId(0);

/// Hash identities of prefixes, for engine events and for requests of the gateway.
pub struct Tenants {
    /// Manifest of the engines' model, without an adapter.
    pub(crate) manifest: IdentityManifest,
    /// Tenant secrets by the `cache_salt` of requests.
    pub(crate) secrets_by_salt: HashMap<String, [u8; SECRET_BYTES]>,
    /// Salts by the number of their tenant, for tenants with a number.
    pub(crate) salts_by_tenant: HashMap<TenantId, String>,
    /// Secret of requests without a salt.
    pub(crate) default_secret: [u8; SECRET_BYTES],
}

impl fmt::Debug for Tenants {
    /// Omits the secrets, which must not appear in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenants").field("salts", &self.secrets_by_salt.len()).finish_non_exhaustive()
    }
}

impl Tenants {
    /// Reads the secrets.
    ///
    /// # Errors
    /// An unreadable file or invalid secret, or two tenants with one salt, secret or number.
    pub fn load(config: &EnginesConfig) -> Result<Tenants, ConfigError> {
        let without_salt = match config.secret_file.as_os_str().is_empty() {
            true => [0; SECRET_BYTES],
            false => read_secret("engines.secret_file", &config.secret_file)?,
        };
        let mut by_salt = HashMap::new();
        let mut salts = HashMap::new();
        for tenant in &config.tenants {
            let secret = read_secret("engines.tenants", &tenant.secret_file)?;
            if by_salt.contains_key(&tenant.salt) {
                let problem = format!("has the salt {:?} twice; give each tenant its own", tenant.salt);
                return Err(ConfigError { key: "engines.tenants", problem });
            }
            // The engine separates such tenants, and the router could not.
            if secret == without_salt || by_salt.values().any(|other| *other == secret) {
                let problem = format!(
                    "the salt {:?} has the same secret as another tenant; give each its own",
                    tenant.salt
                );
                return Err(ConfigError { key: "engines.tenants", problem });
            }
            by_salt.insert(tenant.salt.clone(), secret);
            let number = TenantId(tenant.tenant);
            if number == NO_NUMBER {
                continue;
            }
            // Engines refuse an empty salt, and without one the tenant would share their cache.
            if tenant.salt.is_empty() {
                let problem = format!("tenant {} has no salt; give it one of its own", number.0);
                return Err(ConfigError { key: "engines.tenants", problem });
            }
            if salts.insert(number, tenant.salt.clone()).is_some() {
                let problem = format!("tenant {} has two salts; give each tenant one", number.0);
                return Err(ConfigError { key: "engines.tenants", problem });
            }
        }
        let mut manifest = config.identity.manifest();
        // Splitting and hashing of blocks must use the same length.
        manifest.block_tokens = manifest.block_tokens.max(1);
        Ok(Tenants {
            manifest,
            secrets_by_salt: by_salt,
            salts_by_tenant: salts,
            default_secret: without_salt,
        })
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.manifest.block_tokens
    }

    /// The `cache_salt` of this tenant; `None` if no tenant with a salt has the number.
    #[must_use]
    pub fn salt(&self, tenant: TenantId) -> Option<&str> {
        self.salts_by_tenant.get(&tenant).map(String::as_str)
    }

    /// Creates a hasher for this adapter and salt. `None` if no tenant has the salt or the adapter's
    /// name is too long.
    #[must_use]
    pub fn hasher(&self, adapter: Option<&str>, salt: Option<&str>) -> Option<PrefixHasher> {
        if adapter.is_some_and(|adapter| adapter.len() > ADAPTER_BYTES_MAX) {
            return None;
        }
        let secret = match salt {
            Some(salt) => self.secrets_by_salt.get(salt)?,
            None => &self.default_secret,
        };
        let mut manifest = self.manifest.clone();
        manifest.adapter = adapter.unwrap_or(&manifest.adapter).to_owned();
        Some(PrefixHasher::new(&manifest, secret))
    }
}

/// Reads a secret of 64 hexadecimal digits from its own file.
fn read_secret(key: &'static str, path: &Path) -> Result<[u8; SECRET_BYTES], ConfigError> {
    let refuse = |problem: String| Err(ConfigError { key, problem });
    let text = match secrets::load(path) {
        Ok(text) => text,
        Err(error) => return refuse(error.to_string()),
    };
    let digits: Option<Vec<u8>> = text.chars().map(|digit| Some(digit.to_digit(16)? as u8)).collect();
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

/// Hashers of one engine by adapter and salt, created on first use.
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

    /// A hasher by the number from [`Hashers::get_or_create`].
    pub(super) fn hasher(&self, number: u16) -> &PrefixHasher {
        &self.list[usize::from(number)]
    }

    /// Forgets all hashers, since a new process uses other adapters and salts.
    pub(super) fn forget(&mut self) {
        self.list.clear();
        self.by_names.clear();
    }

    /// Number of the hasher for this adapter and salt. `None` if no tenant has the salt, the
    /// adapter's name is too long, or there are too many.
    pub(super) fn get_or_create(&mut self, adapter: Option<&str>, salt: Option<&str>) -> Option<u16> {
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
