//! Deciders: concurrent callers, each with the real client, including its failover and retries.
//!
//! Half of the queries ask for committed state (`fresh`), about any chain. The other half accept a
//! replica's state, about chains known to every router since before the first fault. Half are
//! lookups, half decisions. Not here: the evaluation of answers (`verdicts.rs`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kv_core::id::{Category, IdentityDigest, RequestId, TenantId};
use kvfleet_client::{Client, ClientConfig, RouteAnswer, RouteCall};
use kvfleet_net::tls::Role;
use kvfleet_proto::{convert, pb};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::load::{CHAINS, NODES, STEADY_CHAINS};
use super::verdicts::{Facts, NamedBlocks, of_decision, of_lookup};
use super::{Experiment, ExperimentState};
use crate::cluster::{Cluster, RouterClients, SuiteError};
use crate::workload::{CHAIN_BLOCKS, chain};

/// Concurrent deciders.
const DECIDERS: u64 = 4;

/// Queries per client. Then the decider creates a new client with another router first, as real
/// frontends come and go; otherwise a restarted router would rarely be asked.
const QUERIES_PER_CLIENT: u32 = 16;

/// Tokens of a block, large enough that computing it always takes longer than moving it.
const BLOCK_TOKENS: u32 = 512;

/// Interval of instance load reports.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// Maximum retries of a decider after a rejection.
const REJECTIONS_MAX: u32 = 8;

/// Running deciders, and the instances they choose from.
pub(crate) struct Deciders {
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Deciders {
    pub(crate) fn start(
        cluster: &Cluster,
        shared: &Arc<ExperimentState>,
        experiment: Experiment,
    ) -> Result<Deciders, SuiteError> {
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let config = ClientConfig::new(cluster.addresses().to_vec(), cluster.identity(&Role::Instance(None)));
        tasks.spawn(report(Client::new(config.clone())?, stop.clone()));
        for number in 1..=DECIDERS {
            let seed = experiment.seed.wrapping_add(number);
            let config = ClientConfig { seed, ..config.clone() };
            let decider = Decider {
                client: Client::new(config.clone())?,
                config,
                random: ChaCha8Rng::seed_from_u64(seed),
                fresh: experiment.fresh,
                shared: Arc::clone(shared),
            };
            tasks.spawn(decider.run(stop.clone()));
        }
        Ok(Deciders { stop, tasks })
    }

    /// Ends when every query in flight has its answer.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.tasks.join_all().await;
    }
}

/// Fake instances, one on each node.
async fn report(client: Client, stop: CancellationToken) {
    for sequence in 1.. {
        let mut sent = JoinSet::new();
        for instance in 1..=NODES {
            let report = pb::ReportRequest {
                instance,
                address: "127.0.0.1:3".into(),
                host: "localhost".into(),
                node: instance,
                has_node: true,
                sequence,
                started_us: 1,
                ..pb::ReportRequest::default()
            };
            let client = client.clone();
            sent.spawn(async move { client.report(&report).await });
        }
        drop(sent.join_all().await);
        if stop.run_until_cancelled(sleep(REPORT_EVERY)).await.is_none() {
            return;
        }
    }
}

/// A query.
#[derive(Clone, Copy, Debug)]
struct Query {
    chain: u32,
    /// Whether it asks about any acknowledged state, or about chains long known to every router.
    is_fresh: bool,
    is_route: bool,
}

struct Decider {
    config: ClientConfig,
    client: Client,
    random: ChaCha8Rng,
    fresh: bool,
    shared: Arc<ExperimentState>,
}

impl Decider {
    async fn run(mut self, stop: CancellationToken) {
        for number in 0u32.. {
            if number.is_multiple_of(QUERIES_PER_CLIENT) {
                self.replace_client();
            }
            let is_new = number.is_multiple_of(2);
            let chains = if is_new { CHAINS } else { STEADY_CHAINS };
            let chain = self.random.random_range(0..chains);
            self.decide(Query { chain, is_fresh: is_new, is_route: number % 4 < 2 }).await;
            if stop.is_cancelled() {
                return;
            }
        }
    }

    fn replace_client(&mut self) {
        let first = self.random.random_range(0..self.config.routers.len());
        self.config.routers.rotate_left(first);
        // The addresses were valid for the first client.
        if let Ok(client) = Client::new(self.config.clone()) {
            self.client = client;
        }
    }

    async fn decide(&self, question: Query) {
        let before = Facts::of(&self.shared.oracle.lock(), question.chain);
        let asked = Instant::now();
        let answer = if question.is_route {
            self.route(question, &before).await
        } else {
            self.lookup(question, &before).await
        };
        let took = asked.elapsed();
        let after = Facts::of(&self.shared.oracle.lock(), question.chain);
        let held = before.held_until(&after);
        if held > 0 {
            self.count(question, &answer, held, took);
        }
    }

    fn count(&self, question: Query, answer: &Result<NamedBlocks, String>, held: u32, took: Duration) {
        let mut row = self.shared.row.lock();
        row.decisions += 1;
        row.slowest = row.slowest.max(took);
        row.unanswered += u64::from(answer.is_err());
        if !answer.as_ref().is_ok_and(|named| named.blocks >= held) {
            row.blind += 1;
            let what = || format!("{question:?} after {took:?}: {held} blocks have a holder; {answer:?}");
            row.first_blind.get_or_insert_with(what);
        }
        // A follower may lag briefly; only a fresh query must exclude ended epochs.
        if question.is_fresh {
            row.stale += answer.as_ref().map_or(0, |named| named.stale);
        }
        drop(row);
        self.shared.decided.fetch_add(1, Ordering::Relaxed);
    }

    async fn lookup(&self, question: Query, facts: &Facts) -> Result<NamedBlocks, String> {
        let hashes = chain(question.chain);
        let answer = self.client.lookup(&hashes, Vec::new(), question.is_fresh && self.fresh).await;
        answer.map(|reply| of_lookup(facts, &reply.runs)).map_err(|error| error.to_string())
    }

    async fn route(&self, question: Query, facts: &Facts) -> Result<NamedBlocks, String> {
        let call = RouteCall {
            request: RequestId(1),
            tenant: TenantId(1),
            category: Category::default(),
            hashes: chain(question.chain),
            block_tokens: BLOCK_TOKENS,
            input_tokens: CHAIN_BLOCKS * BLOCK_TOKENS,
            output_tokens: 0,
            tbt_max_us: 0,
            identity: IdentityDigest([7; 16]),
            after: Vec::new(),
            fresh: question.is_fresh && self.fresh,
        };
        let mut last = String::new();
        for _ in 0..REJECTIONS_MAX {
            match self.client.route(call.clone()).await.map_err(|error| error.to_string())? {
                RouteAnswer::Decided(decision) => return Ok(of_decision(facts, &decision, CHAIN_BLOCKS)),
                RouteAnswer::Rejected { reason, retry_after } => {
                    last = reason;
                    sleep(retry_after).await;
                }
            }
        }
        Err(last)
    }
}

/// Asks every router, after the load has stopped, for holders under ended epochs.
pub(crate) async fn count_stale_everywhere(
    contacts: &RouterClients,
    shared: &ExperimentState,
) -> Result<(), SuiteError> {
    for position in 0..contacts.count() {
        for number in 0..CHAINS {
            let facts = Facts::of(&shared.oracle.lock(), number);
            let hashes = convert::hashes_to_bytes(&chain(number));
            let request = pb::LookupRequest { hashes, fresh: true, ..pb::LookupRequest::default() };
            let reply = contacts.client(position).lookup(request).await?.into_inner();
            shared.row.lock().stale += of_lookup(&facts, &reply.runs).stale;
        }
    }
    Ok(())
}
