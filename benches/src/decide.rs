//! A whole routing decision in one process: hash the tokens, look up their blocks, choose an
//! instance, admit and count the request.
//!
//! Compared with limits, because no peer does all of it in one process. Not here: network calls
//! (`routing.rs`), and the parts (`hash.rs`, `index.rs`, `choose.rs`).

use std::hint::black_box;
use std::time::Instant;

use benches::{BenchRow, Better, measure_time, side_by_side, sorted, thread_cpu_time};
use kv_core::id::{BlockHash, Category, Epoch, IdentityDigest, NodeId, RequestId, Seq, TenantId, Tier};
use kv_core::index::command::{Announcement, Change, Command, NodeRecord};
use kv_core::index::{Index, IndexLimits};
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kv_core::schedule::{Admission, AdmissionRequest, Fleet, RouteRecord, RouteRequest, choose};

use crate::Effort;
use crate::choose::{NOW, fleet};

pub(crate) const ABOUT: &str = "a routing decision from tokens to instance on one thread, hashing included: \
    64 instances with a node each, an index of 10 M entries in chains, where 16 chains share their first \
    1,024 tokens; every prompt is fully held, the slowest case, and sixteen tenants take turns. Single \
    calls, by wall time and by the thread's CPU time (reading it takes a microsecond); and the processors \
    that 99 prompts of 100,000 tokens per second need";

/// Entries of the index.
const ENTRIES: u64 = 10_000_000;
/// Tokens of the prompts, and of the long ones.
const PROMPT_TOKENS: u32 = 8_000;
const LONG_TOKENS: u32 = 100_000;
/// Long prompts per second, as published for another router.
const LONG_PER_S: f64 = 99.0;
const BLOCK_TOKENS: u32 = 16;
/// Shared tokens at the start of a prompt, and the number of prompts that share them.
const SHARED_TOKENS: u32 = 1_024;
const SHARED_BY: u64 = 16;
/// Calls per run.
const CALLS: u64 = 4_000;
const INSTANCES: u32 = 64;
/// Tenants with queued tokens.
const TENANTS: u64 = 16;
/// Blocks per announcement.
const RUN_BLOCKS: usize = 16;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let mut rows = single_prompts(effort)?;
    rows.push(long_prompts(effort)?);
    Ok(rows)
}

fn single_prompts(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let mut router = Router::new(
        effort.scaled(ENTRIES) * u64::from(BLOCK_TOKENS) / u64::from(PROMPT_TOKENS),
        PROMPT_TOKENS,
    )?;
    let calls = effort.scaled(CALLS);
    let mut hashes = Vec::new();
    let mut at = |share: f64, on_thread: bool| {
        let took = |number: u64| {
            let tokens = router.prompt(number);
            let (took, counted) = if on_thread {
                let begun = thread_cpu_time();
                let counted = router.route(&tokens, &mut hashes);
                (thread_cpu_time() - begun, counted)
            } else {
                let begun = Instant::now();
                let counted = router.route(&tokens, &mut hashes);
                (begun.elapsed(), counted)
            };
            router.finish(counted);
            took.as_secs_f64() * 1e6
        };
        let all = sorted((0..calls).map(took).collect::<Vec<_>>().into_iter());
        all[((calls - 1) as f64 * share) as usize]
    };
    let mut row = |name: &str, unit: &str, limit: (&str, f64), (share, on_thread): (f64, bool)| {
        let outcome = side_by_side(effort.runs, || at(share, on_thread), || limit.1);
        BenchRow::new("decide", name, unit, limit.0, Better::Lower, outcome)
    };
    let (p50, p99) = (("limit: 60 µs", 60.0), ("limit: 300 µs", 300.0));
    Ok(vec![
        row("8,000 tokens, p50", "µs", p50, (0.5, false)),
        row("8,000 tokens, p99", "µs", p99, (0.99, false)),
        row("8,000 tokens, p50", "µs CPU", p50, (0.5, true)),
        row("8,000 tokens, p99", "µs CPU", p99, (0.99, true)),
    ])
}

fn long_prompts(effort: &Effort) -> anyhow::Result<BenchRow> {
    let chains = effort.scaled(ENTRIES) * u64::from(BLOCK_TOKENS) / u64::from(LONG_TOKENS);
    let mut router = Router::new(chains, LONG_TOKENS)?;
    let calls = effort.scaled(CALLS / 20);
    let prompts: Vec<_> = (0..calls).map(|number| router.prompt(number)).collect();
    let mut hashes = Vec::new();
    let ours = || {
        let mut one = |tokens: &Vec<u32>| {
            let counted = router.route(tokens, &mut hashes);
            router.finish(counted);
        };
        measure_time(|| prompts.iter().for_each(&mut one)).1.cpu_us_per(calls) * LONG_PER_S / 1e6
    };
    let outcome = side_by_side(effort.runs, ours, || 0.5);
    Ok(BenchRow::new(
        "decide",
        "99 prompts of 100,000 tokens per second",
        "processors",
        "limit: 0.5",
        Better::Lower,
        outcome,
    ))
}

/// A router's in-memory state.
struct Router {
    hasher: PrefixHasher,
    index: Index,
    fleet: Fleet,
    admission: Admission,
    chains: u64,
    prompt_tokens: u32,
    /// Requests so far.
    requests: u64,
}

impl Router {
    /// Builds an index of `chains` prompts; an error if lookups do not find them.
    fn new(chains: u64, prompt_tokens: u32) -> anyhow::Result<Router> {
        let manifest = IdentityManifest { block_tokens: BLOCK_TOKENS, ..IdentityManifest::default() };
        let hasher = PrefixHasher::new(&manifest, &[7; 32]);
        let mut index = Index::new(IndexLimits::default());
        for node in 0..INSTANCES {
            index.apply(&Command::Join(record(node)));
        }
        let mut seqs = vec![0; INSTANCES as usize];
        for number in 0..chains {
            let node = (number % u64::from(INSTANCES)) as u32;
            let blocks = hasher.blocks(&tokens(number, prompt_tokens));
            let seq = &mut seqs[node as usize];
            let announce = |run: &[BlockHash]| {
                *seq += 1;
                let changes = vec![Change::Stored { parent: None, blocks: run.to_vec(), tier: Tier::Dram }];
                Announcement { node: NodeId(node), epoch: Epoch(1), seq: Seq(*seq), changes }
            };
            index.apply(&Command::Announce(blocks.chunks(RUN_BLOCKS).map(announce).collect()));
        }
        let (fleet, mut admission) = (fleet(INSTANCES), Admission::default());
        // The tenants own all queued tokens, in shares from small to large. A fully held prompt has
        // no tokens to compute, so no request here would queue any.
        let waiting = fleet.waiting_tokens();
        for tenant in 0..TENANTS {
            let part = waiting * (tenant + 1) / (TENANTS * (TENANTS + 1) / 2);
            admission.record(TenantId(tenant as u32), u32::try_from(part)?, waiting, NOW);
        }
        let mut router = Router { hasher, index, fleet, admission, chains, prompt_tokens, requests: 0 };
        for number in 0..8 {
            let tokens = router.prompt(number);
            let counted = router.route(&tokens, &mut Vec::new());
            anyhow::ensure!(counted.is_some(), "prompt {number} is rejected");
            router.finish(counted);
            let blocks = router.hasher.blocks(&tokens);
            let found =
                router.index.longest_prefix(&blocks).runs.iter().map(|run| run.len_blocks).sum::<u32>();
            let expected = prompt_tokens / BLOCK_TOKENS;
            anyhow::ensure!(found == expected, "prompt {number}: found {found} blocks, expected {expected}");
        }
        Ok(router)
    }

    /// The tokens of a fully held prompt, far from the previous one.
    fn prompt(&self, number: u64) -> Vec<u32> {
        tokens(number.wrapping_mul(7_919) % self.chains.max(1), self.prompt_tokens)
    }

    /// Decides a request and counts it; `None` if rejected.
    fn route(&mut self, tokens: &[u32], hashes: &mut Vec<BlockHash>) -> Option<RouteRecord> {
        self.requests += 1;
        let tenant = TenantId((self.requests % TENANTS) as u32);
        self.hasher.blocks_into(black_box(tokens), hashes);
        let matched = self.index.longest_prefix(hashes);
        let request = RouteRequest {
            request: RequestId(self.requests),
            tenant,
            category: Category::default(),
            blocks: hashes.len() as u32,
            first_block: hashes.first().copied(),
            block_tokens: BLOCK_TOKENS,
            input_tokens: tokens.len() as u32,
            output_tokens: 0,
            ttft_max_us: 0,
            tbt_max_us: 0,
            queue_priority: self.admission.queue_priority(tenant, 0, &self.fleet, NOW),
            is_untokenized: false,
        };
        let decision = choose(&request, &matched, &self.fleet, NOW).ok()?;
        self.admission.admit(&AdmissionRequest::of(&decision, tenant, 0, None), NOW).ok()?;
        let waiting = self.fleet.waiting_tokens();
        self.fleet.record(&decision, NOW);
        self.admission.record(tenant, decision.recompute_tokens, waiting, NOW);
        Some(RouteRecord::of(black_box(&decision), NOW))
    }

    /// Ends the request, so that the next one finds the fleet unchanged.
    fn finish(&mut self, counted: Option<RouteRecord>) {
        if let Some(counted) = counted {
            self.fleet.retract(&counted, NOW);
        }
    }
}

/// Tokens with a shared start and a unique rest.
fn tokens(chain: u64, count: u32) -> Vec<u32> {
    let token = |of: u64, at: u32| {
        let mixed = ((of << 20) ^ u64::from(at)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) as u32 >> 15
    };
    let shared = (chain / SHARED_BY) | 1 << 40;
    (0..count).map(|at| token(if at < SHARED_TOKENS { shared } else { chain }, at)).collect()
}

fn record(node: u32) -> NodeRecord {
    NodeRecord {
        node: NodeId(node),
        data_address: String::new(),
        control_address: String::new(),
        host: String::new(),
        instance: None,
        identity: IdentityDigest::default(),
        block_bytes: 1,
    }
}
