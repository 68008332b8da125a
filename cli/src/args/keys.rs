//! Arguments of `kvfleet keys`.

use clap::{Args, Subcommand};

/// `kvfleet keys`.
#[derive(Clone, Debug, Subcommand)]
pub enum KeysCommand {
    /// Make a key, and print it with its table for the file of `gateway.openai.api_keys_file`. The
    /// key is not stored and cannot be shown again.
    New(NewKeyArgs),
}

/// `kvfleet keys new`.
#[derive(Clone, Debug, Args)]
pub struct NewKeyArgs {
    /// Name of the key, for errors and logs.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Tenant of its requests: 0 for requests without a salt, or a number in `engines.tenants`.
    #[arg(long, value_name = "N")]
    pub tenant: u32,
    /// Models that it may use, separated by commas. Without it, all.
    #[arg(long = "model", value_name = "NAME[,NAME]", value_delimiter = ',')]
    pub models: Vec<String>,
    /// Most requests in flight. Without it, no limit of its own.
    #[arg(long, value_name = "N")]
    pub requests_max: Option<u32>,
}
