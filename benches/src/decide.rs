//! A whole routing decision in one process: tokens are hashed, the index is asked who has their blocks, an instance is chosen, and its request is let in and counted.
//!
//! Against limits, for no peer of ours does all of it in one process. Not here: calls over a network (`routing.rs`), and the parts (`hash.rs`, `index.rs`, `choose.rs`).

use std::hint::black_box;
use std::time::Instant;

use benches::{Better, Row, side_by_side, sorted, spend, thread_cpu_time};
use kv_core::id::{BlockHash, Category, Epoch, IdentityDigest, NodeId, RequestId, Seq, TenantId, Tier};
use kv_core::index::command::{Announcement, Change, Command, NodeRecord};
use kv_core::index::{Index, IndexLimits};
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kv_core::schedule::{Admission, Counted, Fleet, Offer, RouteRequest, choose};

use crate::Effort;
use crate::choose::{NOW, fleet};

pub(crate) const ABOUT: &str = "a routing decision from tokens to instance on one thread, hashing included: 64 instances with a node each, an index of 10 M \
     entries in chains of which 16 share their first 1,024 tokens; every prompt is held whole, which takes longest, and sixteen tenants take turns. Each call by itself, by \
     the clock on the wall and by the thread's CPU time (which takes a microsecond to read); and the processors that 99 prompts of 100,000 tokens a second need";

/// Entries of the index.
const ENTRIES: u64 = 10_000_000;
/// Tokens of the prompts, and of the long ones.
const PROMPT_TOKENS: u32 = 8_000;
const LONG_TOKENS: u32 = 100_000;
/// Long prompts a second, as published of another router.
const LONG_PER_S: f64 = 99.0;
const BLOCK_TOKENS: u32 = 16;
/// Tokens at the start of a prompt that it shares with others, and with how many.
const SHARED_TOKENS: u32 = 1_024;
const SHARED_BY: u64 = 16;
/// Calls of a run.
const CALLS: u64 = 4_000;
const INSTANCES: u32 = 64;
/// Tenants that have something waiting.
const TENANTS: u64 = 16;
/// Blocks of one announcement.
const RUN_BLOCKS: usize = 16;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let mut rows = each_call(effort)?;
    rows.push(long_prompts(effort)?);
    Ok(rows)
}

fn each_call(effort: &Effort) -> anyhow::Result<Vec<Row>> {
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
            router.end(counted);
            took.as_secs_f64() * 1e6
        };
        let all = sorted((0..calls).map(took).collect::<Vec<_>>().into_iter());
        all[((calls - 1) as f64 * share) as usize]
    };
    let mut row = |name: &str, unit: &str, limit: (&str, f64), (share, on_thread): (f64, bool)| {
        let outcome = side_by_side(effort.runs, || at(share, on_thread), || limit.1);
        Row::new("decide", name, unit, limit.0, Better::Lower, outcome)
    };
    let (p50, p99) = (("limit: 60 µs", 60.0), ("limit: 300 µs", 300.0));
    Ok(vec![
        row("8,000 tokens, p50", "µs", p50, (0.5, false)),
        row("8,000 tokens, p99", "µs", p99, (0.99, false)),
        row("8,000 tokens, p50", "µs CPU", p50, (0.5, true)),
        row("8,000 tokens, p99", "µs CPU", p99, (0.99, true)),
    ])
}

fn long_prompts(effort: &Effort) -> anyhow::Result<Row> {
    let chains = effort.scaled(ENTRIES) * u64::from(BLOCK_TOKENS) / u64::from(LONG_TOKENS);
    let mut router = Router::new(chains, LONG_TOKENS)?;
    let calls = effort.scaled(CALLS / 20);
    let prompts: Vec<_> = (0..calls).map(|number| router.prompt(number)).collect();
    let mut hashes = Vec::new();
    let ours = || {
        let mut one = |tokens: &Vec<u32>| {
            let counted = router.route(tokens, &mut hashes);
            router.end(counted);
        };
        spend(|| prompts.iter().for_each(&mut one)).1.cpu_us_per(calls) * LONG_PER_S / 1e6
    };
    let outcome = side_by_side(effort.runs, ours, || 0.5);
    Ok(Row::new(
        "decide",
        "99 prompts of 100,000 tokens a second",
        "processors",
        "limit: 0.5",
        Better::Lower,
        outcome,
    ))
}

/// What a router has in memory.
struct Router {
    hasher: PrefixHasher,
    index: Index,
    fleet: Fleet,
    admission: Admission,
    chains: u64,
    prompt_tokens: u32,
    /// Requests so far.
    asked: u64,
}

impl Router {
    /// An index of as many prompts; refuses to be measured where it does not find them.
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
        // What waits is theirs, in parts from small to large: of a prompt that is held whole nothing is computed, and nobody would have anything waiting.
        let waiting = fleet.waiting_tokens();
        for tenant in 0..TENANTS {
            let part = waiting * (tenant + 1) / (TENANTS * (TENANTS + 1) / 2);
            admission.sent(TenantId(tenant as u32), u32::try_from(part)?, waiting, NOW);
        }
        let mut router = Router { hasher, index, fleet, admission, chains, prompt_tokens, asked: 0 };
        for number in 0..8 {
            let tokens = router.prompt(number);
            let counted = router.route(&tokens, &mut Vec::new());
            anyhow::ensure!(counted.is_some(), "prompt {number} is turned away");
            router.end(counted);
            let blocks = router.hasher.blocks(&tokens);
            let found =
                router.index.longest_prefix(&blocks).runs.iter().map(|run| run.len_blocks).sum::<u32>();
            let expected = prompt_tokens / BLOCK_TOKENS;
            anyhow::ensure!(
                found == expected,
                "of prompt {number} {found} blocks are found, and not {expected}"
            );
        }
        Ok(router)
    }

    /// The tokens of a prompt that is held whole, far from the one before.
    fn prompt(&self, number: u64) -> Vec<u32> {
        tokens(number.wrapping_mul(7_919) % self.chains.max(1), self.prompt_tokens)
    }

    /// Decides, and counts what was decided; nothing if the request was turned away.
    fn route(&mut self, tokens: &[u32], hashes: &mut Vec<BlockHash>) -> Option<Counted> {
        self.asked += 1;
        let tenant = TenantId((self.asked % TENANTS) as u32);
        self.hasher.blocks_into(black_box(tokens), hashes);
        let matched = self.index.longest_prefix(hashes);
        let request = RouteRequest {
            request: RequestId(self.asked),
            tenant,
            category: Category::default(),
            blocks: hashes.len() as u32,
            first_block: hashes.first().copied(),
            block_tokens: BLOCK_TOKENS,
            input_tokens: tokens.len() as u32,
            output_tokens: 0,
            ttft_max_us: 0,
            tbt_max_us: 0,
            standing: self.admission.standing(tenant, 0, &self.fleet, NOW),
            is_text: false,
        };
        let decision = choose(&request, &matched, &self.fleet, NOW).ok()?;
        self.admission.admit(&Offer::of(&decision, (tenant, 0), None), NOW).ok()?;
        let waiting = self.fleet.waiting_tokens();
        self.fleet.record(&decision, NOW);
        self.admission.sent(tenant, decision.recompute_tokens, waiting, NOW);
        Some(Counted::of(black_box(&decision), NOW))
    }

    /// The request is over: the next one finds the fleet as this one did.
    fn end(&mut self, counted: Option<Counted>) {
        if let Some(counted) = counted {
            self.fleet.take_back(&counted, NOW);
        }
    }
}

/// Tokens that begin as those of others do, and go on as no others.
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
