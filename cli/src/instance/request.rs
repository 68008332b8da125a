//! The instance's gRPC service: reads requests, refuses what makes no sense, numbers leases.
//!
//! Not here: serving (`serve.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use kv_core::id::{BlockHash, Category, LeaseId, RequestId, TenantId};
use kvfleet_proto::convert::{category_from_pb, hashes_from_bytes};
use kvfleet_proto::pb;
use kvfleet_proto::pb::instance_server::Instance;
use kvfleet_proto::tls::callers::Caller;
use kvfleet_transport::Carried;
use kvfleet_transport::pick::PathKind;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use super::metrics::Metrics;
use super::serve::Engine;
use super::shares::{Share, Shares};

/// Calls that are for tenants too. All others are for the cluster's own.
pub(super) const FOR_TENANTS: &[&str] = &["/kvfleet.v1.Instance/Run"];

/// Bits of a lease that count; those above name the instance, so that no two instances share one.
const LEASE_COUNTER_BITS: u32 = 44;

/// Hashes of one run: as many as routers take, a million tokens in blocks of sixteen.
const HASHES_MAX: usize = 65_536;

/// Sources of one run of a tenant's certificate. Each may name an address that nobody serves at, and what is known of addresses is
/// everybody's (a client keeps 1024 of them): one run is not to push out all others.
const TENANT_SOURCES_MAX: usize = 64;

/// A request, read and found sensible.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: RequestId,
    pub(super) tenant: TenantId,
    pub(super) category: Category,
    pub(super) hashes: Vec<BlockHash>,
    pub(super) block_tokens: u32,
    pub(super) input_tokens: u32,
    pub(super) resident_blocks: u32,
    pub(super) turn_ms: u64,
    pub(super) sources: Vec<pb::Source>,
    pub(super) save_to: Option<pb::Holder>,
    pub(super) wait_save: bool,
    /// Its part of what a tenant may have under way, until it is saved.
    pub(super) share: Option<Share>,
}

impl Job {
    /// Tokens of its prompt that nothing is fetched of.
    pub(super) fn tokens_to_compute(&self) -> u64 {
        let fetched = self.sources.iter().map(|source| u64::from(source.len_blocks)).sum::<u64>();
        u64::from(self.input_tokens).saturating_sub(fetched.saturating_mul(self.block_tokens.into()))
    }
}

/// Numbers of leases and of requests that come without one.
#[derive(Debug)]
pub(super) struct Numbers(AtomicU64);

impl Numbers {
    pub(super) fn new(instance: u32) -> Numbers {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let counter_mask = (1u64 << LEASE_COUNTER_BITS) - 1;
        // Counting on from the microsecond of the start: an instance that starts again does not meet the
        // leases it had, because it makes far fewer than one a microsecond.
        let first = u64::try_from(started.as_micros()).unwrap_or_default() & counter_mask;
        let instance = u64::from(instance) << LEASE_COUNTER_BITS;
        Numbers(AtomicU64::new(instance.wrapping_add(first)))
    }

    pub(super) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

/// The service.
pub(super) struct Service {
    engine: Arc<Engine>,
    /// For callers with a tenant's certificate. A decision says whose bytes come from which address: what their fetches came to is
    /// not reported as what links are.
    tenants_engine: Arc<Engine>,
    shares: Shares,
    metrics: Metrics,
    numbers: Arc<Numbers>,
}

impl Service {
    pub(super) fn new(engine: Arc<Engine>, numbers: Arc<Numbers>, metrics: Metrics) -> Self {
        let tenants_engine =
            Arc::new(Engine { client: engine.client.with_links_apart(), ..Engine::clone(&engine) });
        Self { engine, tenants_engine, shares: Shares::default(), metrics, numbers }
    }

    /// Who serves a job of this caller, with its part of what is bounded.
    fn engine_for(&self, caller: &Caller, job: &mut Job) -> Result<Arc<Engine>, Status> {
        let Some(tenant) = caller.share() else { return Ok(Arc::clone(&self.engine)) };
        check_tenants(job)?;
        job.share = Some(self.shares.take(tenant, job.input_tokens)?);
        Ok(Arc::clone(&self.tenants_engine))
    }
}

#[tonic::async_trait]
impl Instance for Service {
    async fn run(&self, request: Request<pb::RunRequest>) -> Result<Response<pb::RunReply>, Status> {
        let caller = Caller::of(request.extensions())?;
        caller.may_name(TenantId(request.get_ref().tenant))?;
        let request = request.into_inner();
        let span = tracing::info_span!("run", request = request.request);
        kvfleet_proto::trace_context::set_parent(&span, &request.traceparent);
        let mut job = read(request)?;
        let engine = self.engine_for(&caller, &mut job)?;
        let lease = LeaseId(self.numbers.next());
        // By itself, so that who stops waiting for the answer does not leave leases behind.
        let served = tokio::spawn(engine.serve(job, lease).instrument(span));
        let reply = served.await.map_err(|cause| Status::internal(format!("the request broke: {cause}")))?;
        self.metrics.answered(&reply);
        Ok(Response::new(reply))
    }

    async fn instance_status(
        &self,
        _: Request<pb::InstanceStatusRequest>,
    ) -> Result<Response<pb::InstanceStatusReply>, Status> {
        let now = self.engine.working.snapshot();
        let client = &self.engine.client;
        let bytes = |(kind, carried): (PathKind, Carried)| pb::PathBytes {
            path: kind.name().to_owned(),
            fetched_bytes: carried.received_bytes(),
            saved_bytes: carried.sent_bytes(),
        };
        Ok(Response::new(pb::InstanceStatusReply {
            instance: self.engine.config.instance,
            served: now.served,
            queue_tokens: now.queue_tokens,
            running: now.running,
            paths: client.carried().into_iter().map(bytes).collect(),
            path_reasons: client.path_reports().iter().map(ToString::to_string).collect(),
        }))
    }
}

fn read(request: pb::RunRequest) -> Result<Job, Status> {
    let wrong = |what: String| Status::invalid_argument(what);
    let hashes = hashes_from_bytes("hashes", &request.hashes).map_err(|cause| wrong(cause.to_string()))?;
    let decision =
        request.decision.ok_or_else(|| wrong("decision is missing: route the request first".to_owned()))?;
    Ok(Job {
        request: RequestId(request.request),
        tenant: TenantId(request.tenant),
        category: category_from_pb(request.category.as_ref()),
        hashes,
        block_tokens: request.block_tokens,
        input_tokens: request.input_tokens,
        resident_blocks: decision.resident_blocks,
        turn_ms: decision.turn_ms,
        sources: decision.sources,
        save_to: decision.save_to,
        wait_save: request.wait_save,
        share: None,
    })
}

/// A tenant may have changed what a router decided. What its prompt does not fill, or one run cannot need, is refused.
fn check_tenants(job: &Job) -> Result<(), Status> {
    let wrong = |what: String| Err(Status::invalid_argument(what));
    let (blocks, sources) = (job.hashes.len(), job.sources.len());
    if blocks > HASHES_MAX {
        return wrong(format!("number of hashes is {blocks}, the limit is {HASHES_MAX}: send less"));
    }
    if sources > TENANT_SOURCES_MAX {
        return wrong(format!(
            "number of sources is {sources}, the limit of a tenant's certificate is {TENANT_SOURCES_MAX}: leave the last ones out"
        ));
    }
    if let Some(position) = job.sources.iter().position(|source| source.len_blocks == 0) {
        return wrong(format!("source {position} has no blocks: leave it out"));
    }
    let (block_tokens, input_tokens) = (job.block_tokens, job.input_tokens);
    // The last one need not be full, as traces have it. Blocks of no tokens are as many as one likes.
    if blocks as u64 > u64::from(input_tokens.div_ceil(block_tokens.max(1))) {
        return wrong(format!(
            "{blocks} hashes of blocks of {block_tokens} tokens are more than input_tokens, {input_tokens}: name blocks of \
             the prompt only"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::id::IdentityDigest;
    use kv_core::schedule::HardwareProfile;
    use kvfleet_client::{Client, ClientConfig};
    use kvfleet_proto::frame::KeyForm;
    use kvfleet_proto::tls::TlsFiles;

    use super::super::blocks::BlockShape;
    use super::super::config::InstanceConfig;
    use super::super::prefill::Accelerator;
    use super::*;
    use crate::certificates::Authority;
    use kvfleet_errors_doc::says;

    /// An instance of certificates of its own.
    fn service() -> Service {
        let directory = tempfile::tempdir().unwrap();
        let files = Authority::open(directory.path()).unwrap().issue("instance-1").unwrap();
        let files = TlsFiles { ca: files.ca, cert: files.cert, key: files.key };
        let client = ClientConfig::new(vec!["127.0.0.1:1".to_owned()], files.load().unwrap());
        let digest = IdentityDigest([1; 16]);
        let engine = Engine {
            client: Client::new(client).unwrap(),
            digest,
            blocks: Arc::new(BlockShape::new(digest, KeyForm::default(), 4096, 4).unwrap()),
            profile: HardwareProfile::default(),
            working: Arc::default(),
            accelerator: Arc::new(Accelerator::new(0)),
            config: InstanceConfig::default(),
        };
        let numbers = Arc::new(Numbers::new(1));
        Service::new(Arc::new(engine), numbers, Metrics::register(&prometheus::Registry::new()).unwrap())
    }

    #[tokio::test]
    async fn a_tenants_runs_are_bounded_and_are_not_what_links_are_judged_by() {
        let service = service();
        let job = || read(request(vec![])).unwrap();
        let tenant = Caller::Tenants([3, 5].map(TenantId).into());
        let mut held = Vec::new();
        let refused = loop {
            let mut job = job();
            match service.engine_for(&tenant, &mut job) {
                Ok(engine) => assert!(Arc::ptr_eq(&engine, &service.tenants_engine)),
                Err(refused) => break refused,
            }
            held.push(job);
            assert!(held.len() < 1_000);
        };
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        for _ in 0..1_000 {
            let mut job = job();
            assert!(Arc::ptr_eq(&service.engine_for(&Caller::Member, &mut job).unwrap(), &service.engine));
            held.push(job);
        }
        held.clear();
        assert!(service.engine_for(&tenant, &mut job()).is_ok(), "those have ended");
    }

    fn request(sources: Vec<(u32, u32)>) -> pb::RunRequest {
        let sources = sources
            .into_iter()
            .map(|(start_blocks, len_blocks)| pb::Source {
                start_blocks,
                len_blocks,
                ..pb::Source::default()
            })
            .collect();
        pb::RunRequest {
            hashes: vec![7; 48],
            decision: Some(pb::Decision { sources, ..pb::Decision::default() }),
            block_tokens: 16,
            input_tokens: 33,
            ..pb::RunRequest::default()
        }
    }

    #[test]
    fn a_sensible_request_is_taken() {
        let job = read(request(vec![(0, 1), (1, 2)])).unwrap();
        assert_eq!((job.hashes.len(), job.sources.len()), (3, 2));
        assert!(read(request(vec![])).is_ok(), "nothing to fetch is a normal decision");
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        let refused = |request| read(request).unwrap_err().message().to_owned();
        let mut cut = request(vec![]);
        cut.hashes.pop();
        assert!(read(cut).is_err());
        let undecided = pb::RunRequest { decision: None, ..request(vec![]) };
        assert!(refused(undecided).contains("decision is missing"));
    }

    #[test]
    fn what_a_tenant_may_name_in_one_run_is_bounded_by_its_prompt_and_in_sources() {
        let refused = |request| {
            let refused = check_tenants(&read(request).unwrap()).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
            refused.message().to_owned()
        };
        let blocks = |blocks: usize, sources: Vec<(u32, u32)>| pb::RunRequest {
            hashes: vec![7; blocks * 16],
            input_tokens: u32::try_from(blocks * 16).unwrap(),
            ..request(sources)
        };
        let each = |sources: u32| (0..sources).map(|at| (at, 1)).collect::<Vec<_>>();
        for taken in [request(vec![]), blocks(0, vec![]), blocks(HASHES_MAX, vec![]), blocks(64, each(64))] {
            check_tenants(&read(taken).unwrap()).unwrap();
        }
        let many = refused(blocks(HASHES_MAX + 1, vec![]));
        says("a tenant's run of more blocks than one may have", &many, &[]);
        says("a tenant's run of more sources than one may have", &refused(blocks(65, each(65))), &[]);
        says("a tenant's run with a source of no blocks", &refused(blocks(3, vec![(0, 1), (1, 0)])), &[]);
        let short = pb::RunRequest { input_tokens: 32, ..request(vec![]) };
        says("a tenant's run of more blocks than its prompt has", &refused(short), &[]);
        let free = pb::RunRequest { block_tokens: 0, input_tokens: 2, ..request(vec![]) };
        assert!(refused(free).contains("0 tokens"));
    }
}
