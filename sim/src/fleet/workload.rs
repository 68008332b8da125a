//! The requests that a fleet serves: a hashed trace, at a given rate, in as many copies as the
//! fleet needs.
//!
//! Not here: reading traces (`crate::trace`).

use std::sync::Arc;

use kv_core::id::{BlockHash, Category, TenantId};
use kv_core::prefix::{IdentityManifest, PrefixHasher};

use crate::trace::Request;

/// Copies of a trace start evenly within this share of its duration. So copies do not act in step,
/// and yet all of them run for nearly all of the time. Larger offsets would raise the load while
/// all run well above the average.
const COPY_OFFSET_SHARE: f64 = 0.03;

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct WorkloadRequest {
    pub(crate) arrival_ns: u64,
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
    pub(crate) category: Category,
    pub(crate) tenant: TenantId,
    /// Blocks of its prompt, including a partly filled last one.
    pub(crate) blocks: u32,
}

/// A request with hashed blocks, as a real fleet receives it.
#[derive(Clone, Debug)]
pub struct HashedRequest {
    /// Arrival, relative to the first.
    pub arrival_ns: u64,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Output tokens.
    pub output_tokens: u32,
    /// Category of the request.
    pub category: Category,
    /// Block hashes in prefix order, with a partly filled last block if it has a hash.
    pub hashes: Vec<BlockHash>,
}

/// Requests by arrival.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Tokens per block.
    pub block_tokens: u32,
    pub(crate) requests: Vec<WorkloadRequest>,
    /// Hashes of each request's whole blocks.
    prompts: Arc<[Arc<[BlockHash]>]>,
}

impl Workload {
    /// `copies` of a trace with distinct blocks, each starting a little after the previous one.
    #[must_use]
    pub fn new(trace: &[Request], copies: u64) -> Workload {
        let block_tokens = trace.first().map_or(512, |request| request.block_tokens).max(1);
        let hasher = PrefixHasher::new(&IdentityManifest::default(), &[0; 32]);
        let mut all = Vec::with_capacity(trace.len() * copies as usize);
        let span_us = match (trace.first(), trace.last()) {
            (Some(first), Some(last)) => last.arrival_us.saturating_sub(first.arrival_us),
            _ => 0,
        };
        for copy in 0..copies {
            let offset_ns = (span_us as f64 * 1e3 * COPY_OFFSET_SHARE * copy as f64 / copies as f64) as u64;
            for request in trace {
                let whole = (request.input_tokens / block_tokens) as usize;
                let ids: Vec<u64> = request.blocks.iter().take(whole).map(|id| id * copies + copy).collect();
                let item = WorkloadRequest {
                    arrival_ns: request.arrival_us * 1_000 + offset_ns,
                    input_tokens: request.input_tokens.max(1),
                    output_tokens: request.output_tokens.max(1),
                    category: request.category,
                    tenant: TenantId(0),
                    blocks: request.input_tokens.max(1).div_ceil(block_tokens),
                };
                all.push((item, Arc::<[BlockHash]>::from(hasher.chain_ids(&ids))));
            }
        }
        all.sort_by_key(|(item, _)| item.arrival_ns);
        let (requests, prompts): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        Workload { block_tokens, requests, prompts: prompts.into() }
    }

    /// Requests in order of arrival, with blocks of `block_tokens` tokens.
    #[must_use]
    pub fn from_hashed(block_tokens: u32, requests: impl IntoIterator<Item = HashedRequest>) -> Workload {
        let item = |hashed: HashedRequest| {
            let item = WorkloadRequest {
                arrival_ns: hashed.arrival_ns,
                input_tokens: hashed.input_tokens.max(1),
                output_tokens: hashed.output_tokens.max(1),
                category: hashed.category,
                tenant: TenantId(0),
                blocks: hashed.hashes.len() as u32,
            };
            (item, Arc::<[BlockHash]>::from(hashed.hashes))
        };
        let (requests, prompts): (Vec<_>, Vec<_>) = requests.into_iter().map(item).unzip();
        Workload { block_tokens: block_tokens.max(1), requests, prompts: prompts.into() }
    }

    /// The same requests with the tenants that `whose` returns by index; otherwise all belong to
    /// tenant 0.
    #[must_use]
    pub fn with_tenants(&self, whose: impl Fn(usize) -> TenantId) -> Workload {
        let mut told = self.clone();
        (0..).zip(&mut told.requests).for_each(|(nth, request)| request.tenant = whose(nth));
        told
    }

    /// The same requests with arrival times multiplied by `factor`; 0 means all at once.
    #[must_use]
    pub fn with_pace(&self, factor: f64) -> Workload {
        let mut paced = self.clone();
        for request in &mut paced.requests {
            request.arrival_ns = (request.arrival_ns as f64 * factor) as u64;
        }
        paced
    }

    /// The same requests at an average rate of `per_s` per second.
    #[must_use]
    pub fn at_rate(&self, per_s: f64) -> Workload {
        let wanted_span_s = self.len() as f64 / per_s.max(f64::MIN_POSITIVE);
        self.with_pace(wanted_span_s * 1e9 / self.span_ns().max(1) as f64)
    }

    /// Indices of the share of requests with the longest prompts, ascending.
    #[must_use]
    pub fn longest(&self, share: f64) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.len()).collect();
        all.sort_by_key(|nth| (std::cmp::Reverse(self.requests[*nth].input_tokens), *nth));
        all.truncate((self.len() as f64 * share) as usize);
        all.sort_unstable();
        all
    }

    /// Prompt length of each request.
    pub fn input_tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.requests.iter().map(|request| request.input_tokens)
    }

    /// Number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are no requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Time from the first arrival to the last.
    #[must_use]
    pub fn span_ns(&self) -> u64 {
        match (self.requests.first(), self.requests.last()) {
            (Some(first), Some(last)) => last.arrival_ns - first.arrival_ns,
            _ => 0,
        }
    }

    /// Time of the last arrival.
    #[must_use]
    pub fn last_ns(&self) -> u64 {
        self.requests.last().map_or(0, |last| last.arrival_ns)
    }

    pub(super) fn prompts(&self) -> Arc<[Arc<[BlockHash]>]> {
        Arc::clone(&self.prompts)
    }

    pub(super) fn prompt(&self, nth: usize) -> &[BlockHash] {
        &self.prompts[nth]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{TraceGenerator, TraceSpec, TrafficKind};

    #[test]
    fn many_copies_arrive_as_evenly_as_one() {
        let spec = TraceSpec { block_tokens: 64, ..TraceSpec::new(TrafficKind::Business, 1, 1_000) };
        let trace: Vec<Request> = TraceGenerator::new(spec).collect();
        let one = Workload::new(&trace, 1).at_rate(1.0);
        let many = Workload::new(&trace, 16).at_rate(16.0);
        assert_eq!(one.len() * 16, many.len());
        // At the times when each tenth of the single copy has arrived.
        for tenth in 1..10 {
            let at_ns = one.requests[one.len() * tenth / 10].arrival_ns;
            let came = many.requests.iter().filter(|item| item.arrival_ns < at_ns).count();
            let share = came as f64 / many.len() as f64 - tenth as f64 / 10.0;
            assert!(share.abs() < 0.03, "{tenth} tenths and {share}");
        }
        let together = many.requests.windows(2).filter(|pair| pair[0].arrival_ns == pair[1].arrival_ns);
        assert!(together.count() < many.len() / 100, "the copies must not arrive in step");
    }
}
