//! gRPC service of the instance: parses and validates requests, and numbers leases.
//!
//! Not here: serving (`serve.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use kv_core::id::{BlockHash, Category, LeaseId, RequestId, TenantId};
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::convert::{category_from_pb, hashes_from_bytes};
use kvfleet_proto::pb;
use kvfleet_proto::pb::instance_server::Instance;
use kvfleet_transport::TrafficCounters;
use kvfleet_transport::pick::PathKind;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use super::metrics::Metrics;
use super::serve::MockEngine;
use super::tenant_limits::{TenantLimits, TenantPermit};

/// Counter bits of a lease id; the higher bits hold the instance, so that ids are unique in the
/// cluster.
const LEASE_COUNTER_BITS: u32 = 44;

/// Most hashes of one run, as many as routers accept: a million tokens in blocks of sixteen.
const HASHES_MAX: usize = 65_536;

/// Most sources of one run by a tenant. Each may name an unused address, and the client remembers a
/// limited number of addresses for all tenants, so one run must not evict the others.
const TENANT_SOURCES_MAX: usize = 64;

/// A valid request.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: RequestId,
    pub(super) tenant: TenantId,
    pub(super) category: Category,
    pub(super) hashes: Vec<BlockHash>,
    pub(super) block_tokens: u32,
    pub(super) input_tokens: u32,
    pub(super) resident_blocks: u32,
    pub(super) priority_deadline_ms: u64,
    pub(super) sources: Vec<pb::Source>,
    pub(super) save_to: Option<pb::Holder>,
    pub(super) wait_save: bool,
    /// Permit of the tenant's limits, held until the save ends.
    pub(super) permit: Option<TenantPermit>,
}

impl Job {
    /// Prompt tokens that are not fetched.
    pub(super) fn tokens_to_compute(&self) -> u64 {
        let fetched = self.sources.iter().map(|source| u64::from(source.len_blocks)).sum::<u64>();
        u64::from(self.input_tokens).saturating_sub(fetched.saturating_mul(self.block_tokens.into()))
    }
}

/// Source of lease ids, and of request numbers that clients do not give.
#[derive(Debug)]
pub(super) struct IdCounter(AtomicU64);

impl IdCounter {
    pub(super) fn new(instance: u32) -> IdCounter {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let counter_mask = (1u64 << LEASE_COUNTER_BITS) - 1;
        // Starts at the current microsecond, so that a restarted instance does not reuse leases:
        // far fewer than one lease per microsecond is created.
        let first = u64::try_from(started.as_micros()).unwrap_or_default() & counter_mask;
        let instance = u64::from(instance) << LEASE_COUNTER_BITS;
        IdCounter(AtomicU64::new(instance.wrapping_add(first)))
    }

    pub(super) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

/// The service.
pub(super) struct InstanceService {
    engine: Arc<MockEngine>,
    /// Engine for calls with a tenant's certificate. Their decisions may name any address, so their
    /// fetches do not count as link measurements.
    tenants_engine: Arc<MockEngine>,
    limits: TenantLimits,
    metrics: Metrics,
    numbers: Arc<IdCounter>,
}

impl InstanceService {
    pub(super) fn new(engine: Arc<MockEngine>, numbers: Arc<IdCounter>, metrics: Metrics) -> Self {
        let tenants_engine = Arc::new(MockEngine {
            client: engine.client.with_separate_link_stats(),
            ..MockEngine::clone(&engine)
        });
        Self { engine, tenants_engine, limits: TenantLimits::default(), metrics, numbers }
    }

    /// Engine for a job of this caller, after applying the tenant's limits.
    fn engine_for(&self, caller: &Caller, job: &mut Job) -> Result<Arc<MockEngine>, Status> {
        let Some(tenant) = caller.share_tenant() else { return Ok(Arc::clone(&self.engine)) };
        check_tenant_limits(job)?;
        job.permit = Some(self.limits.acquire(tenant, job.input_tokens)?);
        Ok(Arc::clone(&self.tenants_engine))
    }
}

#[tonic::async_trait]
impl Instance for InstanceService {
    async fn run(&self, request: Request<pb::RunRequest>) -> Result<Response<pb::RunReply>, Status> {
        let caller = Caller::from_extensions(request.extensions())?;
        caller.require_tenant(TenantId(request.get_ref().tenant))?;
        let request = request.into_inner();
        let span = tracing::info_span!("run", request = request.request);
        kvfleet_net::trace_context::set_parent(&span, &request.traceparent);
        let mut job = parse_request(request)?;
        let engine = self.engine_for(&caller, &mut job)?;
        let lease = LeaseId(self.numbers.next());
        // In a task, so that a disconnecting caller leaves no leases behind.
        let served = tokio::spawn(engine.serve(job, lease).instrument(span));
        let reply = served.await.map_err(|cause| Status::internal(format!("the request failed: {cause}")))?;
        self.metrics.count_reply(&reply);
        Ok(Response::new(reply))
    }

    async fn instance_status(
        &self,
        _: Request<pb::InstanceStatusRequest>,
    ) -> Result<Response<pb::InstanceStatusReply>, Status> {
        let now = self.engine.counters.snapshot();
        let client = &self.engine.client;
        let bytes = |(kind, carried): (PathKind, TrafficCounters)| pb::PathBytes {
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

fn parse_request(request: pb::RunRequest) -> Result<Job, Status> {
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
        priority_deadline_ms: decision.priority_deadline_ms,
        sources: decision.sources,
        save_to: decision.save_to,
        wait_save: request.wait_save,
        permit: None,
    })
}

/// Validates a tenant's run, since a tenant may have changed the router's decision. Refuses blocks
/// beyond the prompt, and more than one run can need.
fn check_tenant_limits(job: &Job) -> Result<(), Status> {
    let wrong = |what: String| Err(Status::invalid_argument(what));
    let (blocks, sources) = (job.hashes.len(), job.sources.len());
    if blocks > HASHES_MAX {
        return wrong(format!("number of hashes is {blocks}, the limit is {HASHES_MAX}: send less"));
    }
    if sources > TENANT_SOURCES_MAX {
        return wrong(format!(
            "number of sources is {sources}, the limit of a tenant's certificate is {TENANT_SOURCES_MAX}: \
             omit the last ones"
        ));
    }
    if let Some(position) = job.sources.iter().position(|source| source.len_blocks == 0) {
        return wrong(format!("source {position} has no blocks: leave it out"));
    }
    let (block_tokens, input_tokens) = (job.block_tokens, job.input_tokens);
    // The last block may be partial, as in traces. Blocks of zero tokens are refused too.
    if blocks as u64 > u64::from(input_tokens.div_ceil(block_tokens.max(1))) {
        return wrong(format!(
            "{blocks} hashes of blocks of {block_tokens} tokens are more than input_tokens, {input_tokens}: \
             name blocks of the prompt only"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::id::{HASH_BYTES, IdentityDigest, InstanceId};
    use kv_core::schedule::HardwareProfile;
    use kvfleet_client::{Client, ClientConfig};
    use kvfleet_net::tls::{Role, TlsFiles};
    use kvfleet_proto::frame::KeyForm;

    use super::super::blocks::BlockShape;
    use super::super::config::InstanceConfig;
    use super::super::prefill::Accelerator;
    use super::*;
    use kvfleet_errors_doc::says;
    use kvfleet_net::certificates::Authority;

    /// A service with its own certificates.
    fn service() -> InstanceService {
        let directory = tempfile::tempdir().unwrap();
        let files =
            Authority::open(directory.path()).unwrap().issue(&Role::Instance(Some(InstanceId(1)))).unwrap();
        let files = TlsFiles { ca: files.ca, cert: files.cert, key: files.key };
        let client = ClientConfig::new(vec!["127.0.0.1:1".to_owned()], files.load().unwrap());
        let digest = IdentityDigest([1; 16]);
        let engine = MockEngine {
            client: Client::new(client).unwrap(),
            digest,
            blocks: Arc::new(BlockShape::new(digest, KeyForm::default(), 4096, 4).unwrap()),
            profile: HardwareProfile::default(),
            counters: Arc::default(),
            accelerator: Arc::new(Accelerator::new(0)),
            config: InstanceConfig::default(),
        };
        let numbers = Arc::new(IdCounter::new(1));
        InstanceService::new(
            Arc::new(engine),
            numbers,
            Metrics::register(&prometheus::Registry::new()).unwrap(),
        )
    }

    #[tokio::test]
    async fn tenant_runs_are_bounded_and_do_not_affect_link_stats() {
        let service = service();
        let job = || parse_request(request(vec![])).unwrap();
        let tenant = Caller::new(Role::Tenants([3, 5].map(TenantId).into()));
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
            assert!(Arc::ptr_eq(
                &service.engine_for(&Caller::new(Role::Frontend), &mut job).unwrap(),
                &service.engine
            ));
            held.push(job);
        }
        held.clear();
        assert!(service.engine_for(&tenant, &mut job()).is_ok(), "the earlier runs have ended");
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
            hashes: vec![7; 3 * HASH_BYTES],
            decision: Some(pb::Decision { sources, ..pb::Decision::default() }),
            block_tokens: 16,
            input_tokens: 33,
            ..pb::RunRequest::default()
        }
    }

    #[test]
    fn accepts_valid_requests() {
        let job = parse_request(request(vec![(0, 1), (1, 2)])).unwrap();
        assert_eq!((job.hashes.len(), job.sources.len()), (3, 2));
        assert!(parse_request(request(vec![])).is_ok(), "an empty fetch plan is valid");
    }

    #[test]
    fn refuses_invalid_requests() {
        let refused = |request| parse_request(request).unwrap_err().message().to_owned();
        let mut cut = request(vec![]);
        cut.hashes.pop();
        assert!(parse_request(cut).is_err());
        let undecided = pb::RunRequest { decision: None, ..request(vec![]) };
        assert!(refused(undecided).contains("decision is missing"));
    }

    #[test]
    fn bounds_blocks_and_sources_of_tenant_runs() {
        let refused = |request| {
            let refused = check_tenant_limits(&parse_request(request).unwrap()).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
            refused.message().to_owned()
        };
        let blocks = |blocks: usize, sources: Vec<(u32, u32)>| pb::RunRequest {
            hashes: vec![7; blocks * HASH_BYTES],
            input_tokens: u32::try_from(blocks * 16).unwrap(),
            ..request(sources)
        };
        let each = |sources: u32| (0..sources).map(|at| (at, 1)).collect::<Vec<_>>();
        for taken in [request(vec![]), blocks(0, vec![]), blocks(HASHES_MAX, vec![]), blocks(64, each(64))] {
            check_tenant_limits(&parse_request(taken).unwrap()).unwrap();
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
