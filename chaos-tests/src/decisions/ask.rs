//! Who asks: deciders with a client each, as frontends have it, so with its failover and its patience.
//!
//! Half of the questions want what is committed now (`fresh`), about any chain; the other half take what the
//! router has, about chains that every router has known since before the first strike. Half are lookups, half
//! decisions. Not here: what an answer counts as (`judge.rs`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kv_core::id::{Category, IdentityDigest, RequestId, TenantId};
use kvfleet_client::{Client, ClientConfig, RouteAnswer, RouteCall};
use kvfleet_proto::{convert, pb};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::judge::{Facts, Named, of_decision, of_lookup};
use super::load::{CHAINS, NODES, STEADY_CHAINS};
use super::{Experiment, Shared};
use crate::cluster::{Cluster, Contacts, Trouble};
use crate::workload::{CHAIN_BLOCKS, chain};

/// Deciders at once.
const DECIDERS: u64 = 4;

/// Questions of one client. Then the decider starts anew with another router first in its list, as frontends come
/// and go; otherwise a router that has just restarted would hardly be asked while others answer.
const QUESTIONS_PER_CLIENT: u32 = 16;

/// Tokens of a block: so many that computing one always takes longer than moving it.
const BLOCK_TOKENS: u32 = 512;

/// Instances report their load five times a second.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// Times that a decider asks again when told that no instance can take the request.
const REJECTIONS_MAX: u32 = 8;

/// Running deciders, and the instances that they choose from.
pub(crate) struct Deciders {
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Deciders {
    pub(crate) fn start(
        cluster: &Cluster,
        shared: &Arc<Shared>,
        experiment: Experiment,
    ) -> Result<Deciders, Trouble> {
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let config = ClientConfig::new(cluster.addresses().to_vec(), cluster.identity()?);
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

    /// Ends when every question under way has its answer.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.tasks.join_all().await;
    }
}

/// Stand-in instances, one on each node.
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

/// A question.
#[derive(Clone, Copy, Debug)]
struct Question {
    chain: u32,
    /// About anything acknowledged, or about what every router has long known.
    is_new: bool,
    is_route: bool,
}

struct Decider {
    config: ClientConfig,
    client: Client,
    random: ChaCha8Rng,
    fresh: bool,
    shared: Arc<Shared>,
}

impl Decider {
    async fn run(mut self, stop: CancellationToken) {
        for number in 0u32.. {
            if number.is_multiple_of(QUESTIONS_PER_CLIENT) {
                self.start_anew();
            }
            let is_new = number.is_multiple_of(2);
            let chains = if is_new { CHAINS } else { STEADY_CHAINS };
            let chain = self.random.random_range(0..chains);
            self.decide(Question { chain, is_new, is_route: number % 4 < 2 }).await;
            if stop.is_cancelled() {
                return;
            }
        }
    }

    fn start_anew(&mut self) {
        let first = self.random.random_range(0..self.config.routers.len());
        self.config.routers.rotate_left(first);
        // The addresses are those that the first client was made with.
        if let Ok(client) = Client::new(self.config.clone()) {
            self.client = client;
        }
    }

    async fn decide(&self, question: Question) {
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

    fn count(&self, question: Question, answer: &Result<Named, String>, held: u32, took: Duration) {
        let mut row = self.shared.row.lock();
        row.decisions += 1;
        row.slowest = row.slowest.max(took);
        row.unanswered += u64::from(answer.is_err());
        if !answer.as_ref().is_ok_and(|named| named.blocks >= held) {
            row.blind += 1;
            let what = || format!("{question:?} after {took:?}: {held} blocks have a holder; {answer:?}");
            row.first_blind.get_or_insert_with(what);
        }
        // A follower may lag by a moment; who wants to know what is over by now asks for that.
        if question.is_new {
            row.stale += answer.as_ref().map_or(0, |named| named.stale);
        }
        drop(row);
        self.shared.decided.fetch_add(1, Ordering::Relaxed);
    }

    async fn lookup(&self, question: Question, facts: &Facts) -> Result<Named, String> {
        let hashes = chain(question.chain);
        let answer = self.client.lookup(&hashes, Vec::new(), question.is_new && self.fresh).await;
        answer.map(|reply| of_lookup(facts, &reply.runs)).map_err(|error| error.to_string())
    }

    async fn route(&self, question: Question, facts: &Facts) -> Result<Named, String> {
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
            fresh: question.is_new && self.fresh,
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

/// Asks every router, when all is quiet, for holders under epochs that are over.
pub(crate) async fn count_stale_everywhere(contacts: &Contacts, shared: &Shared) -> Result<(), Trouble> {
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
