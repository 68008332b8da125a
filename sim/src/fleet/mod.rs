//! A fleet in virtual time: instances with continuous batching under a named hardware profile,
//! nodes with tiers and links, and a router with delayed knowledge. The production scheduler and
//! all others run on the same fleet.
//!
//! Equal arguments give equal reports, byte for byte. Not here: the routers (`crate::routers`),
//! traces (`crate::trace`), and a real fleet (`kvfleet replay`).

mod engine;
mod lookahead;
mod memory;
mod oracle;
mod report;
mod store;
mod view;
mod workload;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kv_core::id::{InstanceId, NodeId, RequestId, Timestamp};
use kv_core::index::command::Change;
use kv_core::schedule::{
    Decision, DecodeObservation, DecodeReport, HardwareProfile, Load, Prediction, RouteRequest, Source,
};

pub use engine::BatchLimits;
pub use report::{FleetReport, LatencySummary, ServedRequest};
pub use view::{InstanceUse, RouteQuery, RouterView};
pub use workload::{HashedRequest, Workload};

use crate::routers::{FetchScope, Route, Router};
use engine::{Engine, EngineEvent, EngineJob, TokenIntervals};
use memory::GpuMemory;
use oracle::Oracle;
use store::{FetchResult, NodeStore, SkippedBlocks};

/// Kind of the instances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// Model engines: continuous batching, and a prefix cache in GPU memory that routers are told
    /// of. First tokens are observed at once. Blocks computed or in GPU memory are offered to a
    /// node, which stores the missing ones; fetched blocks too if the router wants it
    /// ([`Router::keeps_fetched`]).
    #[default]
    Batching,
    /// Mock engines as in `kvfleet replay`: one prompt at a time in one step, no output after the
    /// first token, no blocks kept in GPU memory. Only computed blocks are saved, and first tokens
    /// are reported with the next load report.
    Mock {
        /// Whether computing takes the profile's time; otherwise it takes none, and first tokens
        /// are not reported.
        takes_time: bool,
    },
}

/// Configuration of the fleet. Node n is the own node of instance n.
#[derive(Clone, Debug)]
pub struct FleetSetup {
    /// Kind of the instances.
    pub engine_kind: EngineKind,
    /// Number of the first instance, and of the first node.
    pub first: u32,
    /// Number of nodes; if it is below the number of instances, the last instances have no own
    /// node.
    pub nodes: u32,
    /// High and low watermark of each tier of a node.
    pub watermarks: (f64, f64),
    /// Minimum probability of reuse on SSD for a block to be written to it.
    pub ssd_reuse_min: f64,
    /// Number of instances.
    pub instances: u32,
    /// Hardware profile that routers assume.
    pub profile: HardwareProfile,
    /// Actual hardware profile.
    pub actual: HardwareProfile,
    /// Instances that compute slower, each with its factor.
    pub slower: Vec<(u32, f64)>,
    /// Batch limits of each instance.
    pub batch: BatchLimits,
    /// KV blocks in GPU memory of each instance.
    pub gpu_blocks: usize,
    /// Blocks in DRAM and on SSD of each node.
    pub node_blocks: (u64, u64),
    /// Name of the nodes' eviction policy.
    pub policy: String,
    /// Nodes that instances may fetch from under routers other than the production scheduler.
    pub fetch_scope: FetchScope,
    /// Whether instances start waiting requests by the production scheduler's priority deadline.
    /// Other routers set none, so their order is that of arrival.
    pub uses_priority_deadlines: bool,
    /// Interval of an instance's load reports; 0 means that each decision reads current loads.
    pub report_every_ns: u64,
    /// Delay from a decision until its request is at the instance; TTFT counts from then. A report
    /// sent meanwhile does not include the request, but routers assume that it does.
    pub delivery_ns: u64,
    /// Times of each instance's reports, by instance number, ascending; later reports follow at the
    /// usual interval. Without entries the first reports are spread evenly over one interval.
    pub reports_ns: Vec<Vec<u64>>,
    /// Instances that join later, and when.
    pub joins: Vec<(u32, u64)>,
    /// Delay until routers know of a change at a node; 0 for none.
    pub announce_ns: u64,
    /// Delay until routers know of a change in GPU memory; 0 for none.
    pub events_ns: u64,
}

impl FleetSetup {
    /// A deployment of this profile for a model of eight billion parameters: 48 GiB of KV in GPU
    /// memory, 256 GiB in DRAM and 1 TiB on SSD of each node, five load reports a second, and
    /// default node settings.
    #[must_use]
    pub fn new(instances: u32, profile: HardwareProfile, block_tokens: u32) -> FleetSetup {
        let block_bytes = profile.kv_bytes_per_token * u64::from(block_tokens);
        let blocks = |gib: u64| (gib << 30) / block_bytes.max(1);
        FleetSetup {
            engine_kind: EngineKind::default(),
            first: 0,
            nodes: instances,
            watermarks: (0.95, 0.90),
            ssd_reuse_min: 0.02,
            instances,
            profile,
            actual: profile,
            slower: Vec::new(),
            batch: BatchLimits { requests_max: 256, chunk_tokens: 4_096 },
            gpu_blocks: blocks(48) as usize,
            node_blocks: (blocks(256), blocks(1_024)),
            policy: kv_core::evict::DEFAULT.to_owned(),
            fetch_scope: FetchScope::default(),
            uses_priority_deadlines: true,
            report_every_ns: 200_000_000,
            delivery_ns: 0,
            reports_ns: Vec::new(),
            joins: Vec::new(),
            announce_ns: 20_000_000,
            events_ns: 5_000_000,
        }
    }

    /// Mock engines under this profile, with these blocks in DRAM and on SSD of each node.
    #[must_use]
    pub fn mock_engines(
        instances: u32,
        nodes: u32,
        profile: HardwareProfile,
        takes_time: bool,
        dram_blocks: u64,
        ssd_blocks: u64,
    ) -> FleetSetup {
        FleetSetup {
            engine_kind: EngineKind::Mock { takes_time },
            actual: if takes_time { profile } else { profile.timeless() },
            nodes,
            batch: BatchLimits { requests_max: usize::MAX, chunk_tokens: u32::MAX },
            gpu_blocks: usize::MAX,
            node_blocks: (dram_blocks, ssd_blocks),
            // If computing takes no time, no request waits.
            uses_priority_deadlines: takes_time,
            ..FleetSetup::new(instances, profile, 1)
        }
    }

    /// Numbers of all instances.
    fn instance_ids(&self) -> std::ops::Range<u32> {
        self.first..self.first + self.instances
    }

    /// Actual hardware profile of an instance.
    fn actual_of(&self, instance: u32) -> HardwareProfile {
        let slower = self.slower.iter().find(|(slow, _)| *slow == instance);
        slower.map_or(self.actual, |(_, times)| self.actual.scaled(*times))
    }

    /// Whether instances are model engines.
    fn is_batching(&self) -> bool {
        self.engine_kind == EngineKind::Batching
    }

    /// When a late instance joins; `None` if it exists from the start.
    fn join_ns(&self, instance: u32) -> Option<u64> {
        self.joins.iter().find(|(late, _)| *late == instance).map(|(_, at_ns)| *at_ns)
    }

    /// Time of the next configured report of an instance from `from_ns` on, if any.
    fn next_report_ns(&self, instance: u32, from_ns: u64) -> Option<u64> {
        let all = self.reports_ns.get((instance - self.first) as usize)?;
        all.get(all.partition_point(|at_ns| *at_ns < from_ns)).copied()
    }

    /// The same fleet without delays in the router's knowledge.
    #[must_use]
    pub fn with_fresh_state(self) -> FleetSetup {
        FleetSetup { report_every_ns: 0, announce_ns: 0, events_ns: 0, ..self }
    }
}

/// Chooses the instance of each request.
enum Decider<'a> {
    Router(&'a mut dyn Router),
    Oracle(Oracle),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum FleetEvent {
    Arrival(usize),
    /// A request is at its instance.
    Delivery(usize),
    StepEnd(u32),
    /// Fetched blocks that an instance waits for have arrived.
    Wake(u32),
    LoadReport(u32),
    NodeChanges(NodeId, Vec<Change>),
    MemoryChanges(InstanceId, Vec<Change>),
}

/// An event at its time; events of equal time run in the order of creation.
struct ScheduledEvent {
    at_ns: u64,
    order: u64,
    event: FleetEvent,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &ScheduledEvent) -> bool {
        (self.at_ns, self.order) == (other.at_ns, other.order)
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &ScheduledEvent) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ScheduledEvent {
    fn cmp(&self, other: &ScheduledEvent) -> std::cmp::Ordering {
        (self.at_ns, self.order).cmp(&(other.at_ns, other.order))
    }
}

/// A request that was sent to an instance.
struct SentRequest {
    instance: u32,
    save_to: Option<NodeId>,
    /// Result of its fetch, once it is at its instance.
    fetched: FetchResult,
    plan: InstancePlan,
    /// Sources to fetch from.
    sources: Vec<Source>,
    predicted_ns: u64,
    parts: Prediction,
    /// Whether fetched blocks are saved as well.
    keeps_fetched: bool,
}

/// Instructions for an instance besides the sources.
#[derive(Clone, Copy)]
struct InstancePlan {
    resident_blocks: u32,
    priority_deadline: Timestamp,
}

impl InstancePlan {
    fn of(decision: &Decision) -> InstancePlan {
        InstancePlan {
            resident_blocks: decision.resident_blocks,
            priority_deadline: decision.priority_deadline,
        }
    }
}

fn nodes_of(sources: &[Source]) -> Vec<NodeId> {
    sources.iter().map(|source| source.node).collect()
}

struct SimFleet<'a> {
    setup: &'a FleetSetup,
    workload: &'a Workload,
    engines: Vec<Engine>,
    store: NodeStore,
    view: RouterView,
    events: BinaryHeap<Reverse<ScheduledEvent>>,
    events_made: u64,
    sent: Vec<Option<SentRequest>>,
    /// First tokens for the next report of each instance.
    unreported_first_tokens: Vec<Vec<(Prediction, u64)>>,
    /// Token intervals in the last report of each instance.
    reported_intervals: Vec<TokenIntervals>,
    /// Decode prediction of each sent request: inter-token latency in nanoseconds, the prediction
    /// before factors, and the limit in microseconds.
    predicted_pacing: Vec<(u64, Prediction, u64)>,
    /// Requests that have neither ended nor been rejected.
    open_requests: usize,
    report: FleetReport,
}

/// Serves a workload.
#[must_use]
pub fn run(workload: &Workload, setup: &FleetSetup, router: &mut dyn Router) -> FleetReport {
    run_fleet(workload, setup, &mut Decider::Router(router))
}

/// Serves a workload with an oracle. It chooses among the production scheduler's plans by
/// simulating the engines with all present requests and the next `window` ones, which it knows. Its
/// knowledge has no delay.
#[must_use]
pub fn run_with_oracle(workload: &Workload, setup: &FleetSetup, window: usize) -> FleetReport {
    let setup = setup.clone().with_fresh_state();
    run_fleet(workload, &setup, &mut Decider::Oracle(Oracle::new(workload, setup.instances, window)))
}

fn run_fleet(workload: &Workload, setup: &FleetSetup, decider: &mut Decider<'_>) -> FleetReport {
    let mut fleet = SimFleet::new(workload, setup);
    while let Some(Reverse(ScheduledEvent { at_ns, event, .. })) = fleet.events.pop() {
        match event {
            FleetEvent::Arrival(nth) => fleet.on_arrival(nth, at_ns, decider),
            FleetEvent::Delivery(nth) => fleet.on_delivery(nth, at_ns),
            FleetEvent::StepEnd(instance) => fleet.on_step_end(instance, at_ns),
            FleetEvent::Wake(instance) => fleet.advance_engine(instance, at_ns),
            FleetEvent::LoadReport(instance) => fleet.on_load_report(instance, at_ns),
            FleetEvent::NodeChanges(node, changes) => fleet.view.apply_node_changes(node, changes),
            FleetEvent::MemoryChanges(instance, changes) => {
                fleet.view.apply_memory_changes(instance, changes);
            }
        }
    }
    fleet.finish()
}

impl<'a> SimFleet<'a> {
    fn new(workload: &'a Workload, setup: &'a FleetSetup) -> SimFleet<'a> {
        let memory = || {
            let memory = GpuMemory::new(workload.block_tokens, setup.gpu_blocks, workload.prompts());
            if setup.is_batching() { memory } else { memory.without_prefix_cache() }
        };
        let engine = |instance| Engine::new(setup.actual_of(instance), setup.batch, memory());
        // Slots below the first number stay unused.
        let places = setup.instance_ids().end;
        let mut fleet = SimFleet {
            setup,
            workload,
            engines: (0..places).map(engine).collect(),
            store: NodeStore::new(setup),
            view: RouterView::new(setup),
            events: BinaryHeap::new(),
            events_made: 0,
            sent: workload.requests.iter().map(|_| None).collect(),
            unreported_first_tokens: vec![Vec::new(); places as usize],
            reported_intervals: vec![TokenIntervals::default(); places as usize],
            predicted_pacing: vec![(0, Prediction::default(), 0); workload.requests.len()],
            open_requests: workload.requests.len(),
            report: FleetReport::default(),
        };
        for (nth, request) in workload.requests.iter().enumerate() {
            fleet.schedule(request.arrival_ns, FleetEvent::Arrival(nth));
        }
        for instance in setup.instance_ids().filter(|_| setup.report_every_ns > 0) {
            // First reports are staggered.
            let nth = instance - setup.first;
            let even = setup.report_every_ns * u64::from(nth) / u64::from(setup.instances);
            let first = setup.next_report_ns(instance, 0).unwrap_or(even);
            fleet.schedule(setup.join_ns(instance).unwrap_or(first), FleetEvent::LoadReport(instance));
        }
        fleet
    }

    fn schedule(&mut self, at_ns: u64, event: FleetEvent) {
        self.events_made += 1;
        self.events.push(Reverse(ScheduledEvent { at_ns, order: self.events_made, event }));
    }

    fn on_arrival(&mut self, nth: usize, now_ns: u64, decider: &mut Decider<'_>) {
        if self.setup.report_every_ns == 0 {
            let there = |instance: &u32| self.setup.join_ns(*instance).is_none_or(|at_ns| at_ns <= now_ns);
            self.setup.instance_ids().filter(there).for_each(|instance| self.report_load(instance, now_ns));
        }
        let request = &self.workload.requests[nth];
        let prompt = self.workload.prompt(nth);
        let (matched, resident) = self.view.look_up(prompt);
        let asked = RouteRequest {
            request: RequestId(nth as u64),
            tenant: request.tenant,
            category: request.category,
            blocks: request.blocks,
            first_block: prompt.first().copied(),
            block_tokens: self.workload.block_tokens,
            input_tokens: request.input_tokens,
            // The output length is not known in advance.
            output_tokens: 0,
            ttft_max_us: 0,
            tbt_max_us: 0,
            queue_priority: Default::default(),
            is_untokenized: false,
        };
        let now = Timestamp(now_ns / 1_000);
        let coming = self.view.in_flight_prefixes(&asked, prompt, now);
        let ask = RouteQuery {
            request: asked,
            matched: &matched,
            resident: &resident,
            in_flight_prefixes: &coming,
            now,
        };
        let (route, keeps_fetched) = match decider {
            Decider::Router(router) => (router.route(&ask, &self.view), router.keeps_fetched()),
            Decider::Oracle(oracle) => (oracle.route(nth, &ask, self, now_ns), false),
        };
        match route {
            Route::To(decision) => self.send(nth, &asked, &decision, keeps_fetched, now_ns),
            Route::Reject => {
                self.open_requests -= 1;
                self.report.rejected += 1;
            }
        }
    }

    fn send(
        &mut self,
        nth: usize,
        asked: &RouteRequest,
        decision: &Decision,
        keeps_fetched: bool,
        now_ns: u64,
    ) {
        self.view.record_sent(asked, self.workload.prompt(nth), decision, Timestamp(now_ns / 1_000));
        self.sent[nth] = Some(SentRequest {
            instance: decision.instance.0,
            save_to: decision.save_to.as_ref().map(|holder| holder.node),
            fetched: FetchResult::default(),
            plan: InstancePlan::of(decision),
            sources: decision.sources.clone(),
            predicted_ns: decision.predicted.ttft_us() * 1_000,
            parts: decision.uncorrected,
            keeps_fetched,
        });
        self.predicted_pacing[nth] =
            (decision.predicted.tbt_us * 1_000, decision.uncorrected, decision.decode.limit_us);
        match self.setup.delivery_ns {
            0 => self.on_delivery(nth, now_ns),
            later => self.schedule(now_ns + later, FleetEvent::Delivery(nth)),
        }
    }

    /// Delivers a request to its instance, which starts to fetch.
    fn on_delivery(&mut self, nth: usize, now_ns: u64) {
        let Some(sent) = &mut self.sent[nth] else { return };
        let instance = sent.instance;
        let (own, category) = (NodeId(instance), self.workload.requests[nth].category);
        let (prompt, block_tokens) = (self.workload.prompt(nth), self.workload.block_tokens);
        let fetched = self.store.fetch(&sent.sources, prompt, own, block_tokens, category, now_ns);
        sent.fetched = fetched;
        let (plan, nodes) = (sent.plan, nodes_of(&sent.sources));
        nodes.into_iter().for_each(|node| self.announce_node_changes(node, now_ns));
        let job = self.job(nth, plan, fetched);
        self.report.fetched_blocks += u64::from(fetched.blocks);
        self.engines[instance as usize].enqueue(job);
        if job.ready_ns > now_ns {
            self.schedule(job.ready_ns, FleetEvent::Wake(instance));
        }
        self.advance_engine(instance, now_ns);
    }

    /// The engine's job for a request, given its fetch.
    fn job(&self, nth: usize, plan: InstancePlan, fetched: FetchResult) -> EngineJob {
        let request = &self.workload.requests[nth];
        let tokens = |blocks: u32| (blocks * self.workload.block_tokens).min(request.input_tokens);
        EngineJob {
            nth,
            input_tokens: request.input_tokens,
            output_tokens: if self.setup.is_batching() { request.output_tokens } else { 1 },
            fetched_tokens: tokens(plan.resident_blocks + fetched.blocks),
            resident_tokens: tokens(plan.resident_blocks),
            ready_ns: fetched.ready_ns,
            priority_deadline: plan.priority_deadline,
        }
    }

    /// Lets an instance start its next step, if possible.
    fn advance_engine(&mut self, instance: u32, now_ns: u64) {
        let engine = &mut self.engines[instance as usize];
        if let Some(end_ns) = engine.cut_decode_run(now_ns).or_else(|| engine.start_step(now_ns)) {
            self.schedule(end_ns, FleetEvent::StepEnd(instance));
        }
        self.announce_memory_changes(instance, now_ns);
    }

    fn on_step_end(&mut self, instance: u32, now_ns: u64) {
        let mut ended = Vec::new();
        self.engines[instance as usize].end_step(now_ns, &mut ended);
        for one in ended {
            match one {
                EngineEvent::FirstToken { nth, computed_tokens } => {
                    self.on_first_token(nth, computed_tokens, now_ns);
                }
                EngineEvent::LastToken { nth, intervals: between } => {
                    self.open_requests -= 1;
                    let tbt_ns = between.ns.checked_div(between.tokens).unwrap_or_default();
                    self.report.ended.push((nth, tbt_ns));
                    self.report.ended_ns = now_ns;
                    let request = &self.workload.requests[nth];
                    self.view.record_end(InstanceId(instance), request.input_tokens.into());
                    let (predicted_ns, parts, limit_us) = &self.predicted_pacing[nth];
                    if self.setup.engine_kind == EngineKind::Batching {
                        let (category, tokens) = (request.category, request.output_tokens);
                        let paced = DecodeObservation {
                            uncorrected: parts,
                            predicted_us: predicted_ns / 1_000,
                            tokens,
                            tbt_us: tbt_ns / 1_000,
                            limit_us: *limit_us,
                        };
                        self.view.record_output(category, tokens, paced, Timestamp(now_ns / 1_000));
                    }
                    self.report.paced.push((*predicted_ns, tbt_ns));
                }
            }
        }
        self.advance_engine(instance, now_ns);
    }

    fn on_first_token(&mut self, nth: usize, computed_tokens: u32, now_ns: u64) {
        let request = &self.workload.requests[nth];
        let Some(sent) = self.sent[nth].take() else { return };
        let SentRequest { instance, save_to, fetched, plan, sources, predicted_ns, parts, keeps_fetched } =
            sent;
        let ttft_ns = now_ns - request.arrival_ns - self.setup.delivery_ns;
        match self.setup.engine_kind {
            EngineKind::Batching => self.view.record_first_token(instance, &parts, ttft_ns, now_ns),
            EngineKind::Mock { takes_time: true } => {
                self.unreported_first_tokens[instance as usize].push((parts, ttft_ns));
            }
            EngineKind::Mock { takes_time: false } => {}
        }
        self.report.served.push(ServedRequest {
            nth,
            instance,
            ttft_ns,
            predicted_ns,
            fetched: fetched.blocks_by_tier,
            input_tokens: request.input_tokens,
            computed_tokens,
        });
        let held = !self.setup.is_batching();
        let leaves = if held {
            SkippedBlocks::Held(&fetched)
        } else if keeps_fetched {
            SkippedBlocks::Resident
        } else {
            SkippedBlocks::Fetched(plan.resident_blocks, fetched.blocks)
        };
        if let Some(node) = save_to {
            self.store.save(node, self.workload.prompt(nth), leaves, request.category, now_ns);
            self.announce_node_changes(node, now_ns);
        }
        if held {
            let nodes = nodes_of(&sources);
            self.store.release(&fetched, nodes.iter().copied(), now_ns);
            nodes.into_iter().for_each(|node| self.announce_node_changes(node, now_ns));
        }
    }

    fn on_load_report(&mut self, instance: u32, now_ns: u64) {
        if self.open_requests == 0 {
            return;
        }
        self.report_load(instance, now_ns);
        let next_ns = self.setup.next_report_ns(instance, now_ns + 1);
        self.schedule(
            next_ns.unwrap_or(now_ns + self.setup.report_every_ns),
            FleetEvent::LoadReport(instance),
        );
    }

    /// Reports an instance's load; the first instance also triggers the report of the nodes' block
    /// counts.
    fn report_load(&mut self, instance: u32, now_ns: u64) {
        let engine = &self.engines[instance as usize];
        let (waiting, running) = engine.requests();
        let between = engine.intervals_by(now_ns);
        let told = std::mem::replace(&mut self.reported_intervals[instance as usize], between);
        let apart_ns = (between.ns - told.ns).checked_div(between.tokens - told.tokens).unwrap_or_default();
        let (kv_tokens_max, kv_tokens) = engine.memory.tokens();
        let decoding = DecodeReport {
            kv_tokens_max,
            kv_tokens,
            tbt_us: u32::try_from(apart_ns / 1_000).unwrap_or(u32::MAX),
            chunk_tokens: self.setup.batch.chunk_tokens,
        };
        // Mock engines have no GPU memory to report.
        let decoding = match self.setup.engine_kind {
            EngineKind::Batching => decoding,
            _ => DecodeReport { chunk_tokens: decoding.chunk_tokens, ..DecodeReport::default() },
        };
        let load = Load::reported(engine.queue_tokens(), running, waiting).with_decode_report(decoding);
        let in_use = engine.memory.used_share();
        self.view.apply_load(InstanceId(instance), load, in_use, Timestamp(now_ns / 1_000));
        for (parts, ttft_ns) in std::mem::take(&mut self.unreported_first_tokens[instance as usize]) {
            self.view.record_first_token(instance, &parts, ttft_ns, now_ns);
        }
        if instance == self.setup.first {
            let SimFleet { view, store, .. } = self;
            view.apply_block_counts(|node| store.blocks(node));
        }
    }

    fn announce_node_changes(&mut self, node: NodeId, now_ns: u64) {
        let changes = self.store.take_changes(node);
        match self.setup.announce_ns {
            _ if changes.is_empty() => {}
            0 => self.view.apply_node_changes(node, changes),
            later => self.schedule(now_ns + later, FleetEvent::NodeChanges(node, changes)),
        }
    }

    fn announce_memory_changes(&mut self, instance: u32, now_ns: u64) {
        let changes = self.engines[instance as usize].memory.take_changes();
        match self.setup.events_ns {
            _ if changes.is_empty() => {}
            0 => self.view.apply_memory_changes(InstanceId(instance), changes),
            later => self.schedule(now_ns + later, FleetEvent::MemoryChanges(InstanceId(instance), changes)),
        }
    }

    fn finish(mut self) -> FleetReport {
        self.report.busy_ns = self.engines.iter().map(|engine| engine.busy_ns).collect();
        for engine in &self.engines {
            self.report.between_tokens += engine.intervals.tokens;
            self.report.between_ns += engine.intervals.ns;
        }
        self.report
    }
}

#[cfg(test)]
mod tests;
