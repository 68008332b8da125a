//! Reads a trace and hashes its blocks.
//!
//! `kvfleet_sim::trace` parses the formats; `kv_core::prefix` defines what a hash covers.

use std::collections::HashSet;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;

use kv_core::id::{BlockHash, Category};
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_sim::trace::Skipped;

use crate::args::TraceFormat;
use crate::trace::{open_trace, skipped_text};

/// One request of a trace with its block hashes.
#[derive(Clone, Debug)]
pub struct PreparedRequest {
    /// Arrival time since the first request.
    pub arrival_us: u64,
    /// Block hashes in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Generated tokens.
    pub output_tokens: u32,
    /// Request category.
    pub category: Category,
}

/// A whole trace.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    /// Requests in arrival order. Shared because a trace may take most of the memory.
    pub requests: Arc<Vec<PreparedRequest>>,
    /// Number of distinct blocks in all requests.
    pub unique_blocks: u64,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Lines skipped by lenient reading, by reason.
    pub skipped: Skipped,
}

/// A trace file and how to read it.
#[derive(Clone, Debug)]
pub struct TraceSource<'a> {
    /// The trace file.
    pub path: &'a Path,
    /// The format of the file.
    pub format: TraceFormat,
    /// Whether malformed lines are skipped and counted.
    pub lenient: bool,
    /// Maximum number of requests; all if absent.
    pub limit: Option<usize>,
    /// Tokens per block, if different from the format's.
    pub block_tokens: Option<u32>,
    /// Tenant whose salt goes into the hashes.
    pub tenant: u32,
    /// Layers per block; part of the identity.
    pub layers: u32,
}

/// The salt of a tenant of a local cluster. In production, salts are secret; in a replay they are
/// not.
#[must_use]
pub fn tenant_salt(tenant: u32) -> [u8; 32] {
    let mut salt = [0; 32];
    salt[..4].copy_from_slice(&tenant.to_le_bytes());
    salt
}

/// Reads and hashes a trace.
pub fn load_workload(source: &TraceSource<'_>) -> anyhow::Result<Workload> {
    let file = File::open(source.path).map_err(|cause| {
        anyhow::anyhow!("cannot read {}: {cause}; give the path of a trace", source.path.display())
    })?;
    let mut requests = open_trace(BufReader::new(file), source.format, source.lenient);
    let mut workload = Workload::default();
    let mut prepared = vec![];
    let mut unique = HashSet::new();
    let mut hasher = None;
    while source.limit.is_none_or(|limit| prepared.len() < limit) {
        let Some(request) = requests.next() else { break };
        let request = request.map_err(|error| anyhow::anyhow!("{}: {error}", source.path.display()))?;
        if workload.block_tokens == 0 {
            workload.block_tokens = source.block_tokens.unwrap_or(request.block_tokens);
        }
        let hasher = hasher.get_or_insert_with(|| hasher_for(source, workload.block_tokens));
        let hashes = hasher.chain_ids(&request.blocks);
        unique.extend(hashes.iter().copied());
        prepared.push(PreparedRequest {
            arrival_us: request.arrival_us,
            hashes,
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            category: request.category,
        });
    }
    workload.unique_blocks = unique.len() as u64;
    workload.skipped = requests.skipped().clone();
    if prepared.is_empty() {
        anyhow::bail!(
            "{}: no request to serve, skipped lines: {}; give a trace, and its format with --format",
            source.path.display(),
            skipped_text(&workload.skipped)
        );
    }
    start_at_zero(&mut prepared);
    workload.requests = Arc::new(prepared);
    Ok(workload)
}

fn hasher_for(source: &TraceSource<'_>, block_tokens: u32) -> PrefixHasher {
    let manifest = IdentityManifest { block_tokens, layers: source.layers, ..IdentityManifest::default() };
    PrefixHasher::new(&manifest, &tenant_salt(source.tenant))
}

fn start_at_zero(requests: &mut [PreparedRequest]) {
    let first = requests.first().map_or(0, |request| request.arrival_us);
    for request in requests {
        request.arrival_us = request.arrival_us.saturating_sub(first);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;
    use kvfleet_sim::trace::Reason;

    use super::*;

    fn source(path: &Path) -> TraceSource<'_> {
        TraceSource {
            path,
            format: TraceFormat::Auto,
            lenient: false,
            limit: None,
            block_tokens: None,
            tenant: 0,
            layers: 32,
        }
    }

    const TWO: &str = concat!(
        r#"{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}"#,
        "\n",
        r#"{"timestamp": 2500, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]}"#,
        "\n",
    );

    #[test]
    fn equal_prefixes_have_equal_hashes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        std::fs::write(&path, TWO).unwrap();
        let workload = load_workload(&source(&path)).unwrap();
        assert_eq!(workload.unique_blocks, 3);
        assert_eq!(workload.block_tokens, 512);
        assert_eq!(workload.requests[0].hashes, workload.requests[1].hashes[..2]);
        assert_eq!(workload.requests[1].arrival_us, 1_500_000, "time starts with the first request");
    }

    #[test]
    fn tenants_do_not_share_hashes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        std::fs::write(&path, TWO).unwrap();
        let ours = load_workload(&source(&path)).unwrap();
        let theirs = load_workload(&TraceSource { tenant: 1, ..source(&path) }).unwrap();
        assert_ne!(ours.requests[0].hashes[0], theirs.requests[0].hashes[0]);
    }

    #[test]
    fn malformed_lines_are_reported_or_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        std::fs::write(&path, format!("{TWO}not json\n")).unwrap();
        let here = dir.path().display().to_string();
        says("a bad line, with its file", &load_workload(&source(&path)).unwrap_err(), &[&here]);
        let workload = load_workload(&TraceSource { lenient: true, ..source(&path) }).unwrap();
        assert_eq!((workload.requests.len(), workload.skipped), (2, [(Reason::Malformed, 1)].into()));
        std::fs::write(&path, "not json\n").unwrap();
        let error = load_workload(&TraceSource { lenient: true, ..source(&path) }).unwrap_err();
        says("nothing but bad lines, with --lenient", &error, &[&here]);
    }

    #[test]
    fn empty_and_absent_traces_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        let here = dir.path().display().to_string();
        says("a trace that is not there", &load_workload(&source(&path)).unwrap_err(), &[&here]);
        says("a directory in place of a trace", &load_workload(&source(dir.path())).unwrap_err(), &[&here]);
        std::fs::write(&path, "").unwrap();
        assert!(
            load_workload(&source(&path)).unwrap_err().to_string().contains("expected at least one request")
        );
    }
}
