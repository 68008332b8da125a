//! The requests that a fleet serves: a trace with hashes, at a pace, in as many copies as the fleet is large.
//!
//! Not here: reading traces (`crate::trace`).

use std::sync::Arc;

use kv_core::id::{BlockHash, Category, TenantId};
use kv_core::prefix::{IdentityManifest, PrefixHasher};

use crate::trace::Request;

/// Copies of a trace begin within this share of its time, evenly. So they do not do the same at the same moment; and yet all of them run for nearly all of the time. With offsets
/// that add up to a third of it a load of 80 % would be one of 107 % where all run.
const COPY_SHARE: f64 = 0.03;

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) arrival_ns: u64,
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
    pub(crate) category: Category,
    pub(crate) tenant: TenantId,
    /// Blocks of its prompt, a partly filled last one counted.
    pub(crate) blocks: u32,
}

/// A request whose blocks are hashed already: what a real fleet is asked, too.
#[derive(Clone, Debug)]
pub struct Hashed {
    /// When it comes, since the first.
    pub arrival_ns: u64,
    /// Tokens of its prompt.
    pub input_tokens: u32,
    /// Tokens that it generates.
    pub output_tokens: u32,
    /// Its category.
    pub category: Category,
    /// Its blocks, in prefix order; a partly filled last one counts where it has a hash.
    pub hashes: Vec<BlockHash>,
}

/// Requests by arrival.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Tokens of a block.
    pub block_tokens: u32,
    pub(crate) requests: Vec<Item>,
    /// Hashes of the whole blocks of each.
    prompts: Arc<[Arc<[BlockHash]>]>,
}

impl Workload {
    /// `copies` of a trace whose blocks have nothing in common, each a little after the one before.
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
            let offset_ns = (span_us as f64 * 1e3 * COPY_SHARE * copy as f64 / copies as f64) as u64;
            for request in trace {
                let whole = (request.input_tokens / block_tokens) as usize;
                let ids: Vec<u64> = request.blocks.iter().take(whole).map(|id| id * copies + copy).collect();
                let item = Item {
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

    /// Requests in the order in which they come, with blocks of so many tokens.
    #[must_use]
    pub fn hashed(block_tokens: u32, requests: impl IntoIterator<Item = Hashed>) -> Workload {
        let item = |hashed: Hashed| {
            let item = Item {
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

    /// The same requests, each of the tenant that `whose` names by its number; all are of tenant 0 otherwise.
    #[must_use]
    pub fn of_tenants(&self, whose: impl Fn(usize) -> TenantId) -> Workload {
        let mut told = self.clone();
        (0..).zip(&mut told.requests).for_each(|(nth, request)| request.tenant = whose(nth));
        told
    }

    /// The same requests, so many times as far apart; 0 for all at once.
    #[must_use]
    pub fn paced(&self, factor: f64) -> Workload {
        let mut paced = self.clone();
        for request in &mut paced.requests {
            request.arrival_ns = (request.arrival_ns as f64 * factor) as u64;
        }
        paced
    }

    /// The same requests, so many a second on average.
    #[must_use]
    pub fn at_rate(&self, per_s: f64) -> Workload {
        let wanted_span_s = self.len() as f64 / per_s.max(f64::MIN_POSITIVE);
        self.paced(wanted_span_s * 1e9 / self.span_ns().max(1) as f64)
    }

    /// This share of the requests: those with the longest prompts, in ascending order.
    #[must_use]
    pub fn longest(&self, share: f64) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.len()).collect();
        all.sort_by_key(|nth| (std::cmp::Reverse(self.requests[*nth].input_tokens), *nth));
        all.truncate((self.len() as f64 * share) as usize);
        all.sort_unstable();
        all
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// From the first arrival to the last.
    #[must_use]
    pub fn span_ns(&self) -> u64 {
        match (self.requests.first(), self.requests.last()) {
            (Some(first), Some(last)) => last.arrival_ns - first.arrival_ns,
            _ => 0,
        }
    }

    /// When the last one arrives.
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
    use crate::generate::{Generator, Kind, Spec};

    #[test]
    fn as_much_comes_of_many_copies_at_any_time_as_of_one() {
        let spec = Spec { block_tokens: 64, ..Spec::new(Kind::Business, 1, 1_000) };
        let trace: Vec<Request> = Generator::new(spec).collect();
        let one = Workload::new(&trace, 1).at_rate(1.0);
        let many = Workload::new(&trace, 16).at_rate(16.0);
        assert_eq!(one.len() * 16, many.len());
        // By the time at which a tenth of the one came, and so on.
        for tenth in 1..10 {
            let at_ns = one.requests[one.len() * tenth / 10].arrival_ns;
            let came = many.requests.iter().filter(|item| item.arrival_ns < at_ns).count();
            let share = came as f64 / many.len() as f64 - tenth as f64 / 10.0;
            assert!(share.abs() < 0.03, "{tenth} tenths and {share}");
        }
        let together = many.requests.windows(2).filter(|pair| pair[0].arrival_ns == pair[1].arrival_ns);
        assert!(together.count() < many.len() / 100, "they do not come in step");
    }
}
