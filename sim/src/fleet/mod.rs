//! A fleet in virtual time: instances with continuous batching under a named hardware profile, nodes with tiers and lanes, and a router
//! that knows what has reached it. The production scheduler and any other run on the same fleet.
//!
//! Equal arguments give equal reports, byte for byte. Not here: the routers (`crate::routers`), traces (`crate::trace`), and a real fleet
//! (`kvfleet replay`).

mod ahead;
mod engine;
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
use kv_core::schedule::{Decision, Decoding, HardwareProfile, Load, Paced, Prediction, RouteRequest, Source};

pub use engine::Batch;
pub use report::{Report, Served, Spread};
pub use view::{Ask, Seen, View};
pub use workload::{Hashed, Workload};

use crate::routers::{Plane, Route, Router};
use engine::{Between, Ended, Engine, Job};
use memory::Memory;
use oracle::Oracle;
use store::{Fetched, Leaves, Store};

/// What instances are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engines {
    /// Engines of a model: continuous batching, and a prefix cache in GPU memory of which routers hear. First tokens are seen as they pass. What was
    /// computed or was in GPU memory is offered to a node, which keeps what it has not, and what was fetched where a router has it so ([`Router::keeps_fetched`]).
    #[default]
    Batching,
    /// Stand-ins as `kvfleet replay` runs them: one prompt at a time and in one step, nothing behind the first token, nothing kept in GPU memory. What was
    /// computed is saved and no more, and of first tokens they tell with their next report.
    StandIns {
        /// Whether computing takes the profile's time; else it takes none, and of no first token is told.
        takes_time: bool,
    },
}

/// What the fleet is made of. Node n is the own node of instance n.
#[derive(Clone, Debug)]
pub struct Setup {
    /// What they are.
    pub engines: Engines,
    /// Number of the first instance, and of the first node.
    pub first: u32,
    /// How many nodes; the last instances have none of their own if these are fewer.
    pub nodes: u32,
    /// High and low fill level of each tier of a node.
    pub watermarks: (f64, f64),
    /// Least chance that a block is used before it would leave an SSD at which it is written to one.
    pub ssd_reuse_min: f64,
    /// How many instances.
    pub instances: u32,
    /// Their speeds, as routers know them.
    pub profile: HardwareProfile,
    /// The same as they are.
    pub actual: HardwareProfile,
    /// Instances that take so many times as long for all that they compute.
    pub slower: Vec<(u32, f64)>,
    /// Of each instance.
    pub batch: Batch,
    /// KV blocks in GPU memory of each.
    pub gpu_blocks: usize,
    /// Blocks in DRAM and on SSD of each node.
    pub node_blocks: (u64, u64),
    /// Which policy evicts from nodes.
    pub policy: String,
    /// From where instances may fetch under a router that is not the production scheduler.
    pub plane: Plane,
    /// Whether instances begin what waits in the order of the production scheduler's turns. The others have none, and theirs is that of coming.
    pub orders: bool,
    /// Between two load reports of an instance; 0 where each decision reads the loads as they are.
    pub report_every_ns: u64,
    /// From a decision until its request is at the instance; TTFT counts from there. A report that leaves meanwhile says nothing of it, and routers take it for
    /// one that does.
    pub delivery_ns: u64,
    /// When reports of each instance come, by number and ascending; behind the last of these they are as far apart as usual. Where nothing is said, the first
    /// ones are spread evenly over the time between two.
    pub reports_ns: Vec<Vec<u64>>,
    /// Instances that are not there at first, and when they join.
    pub joins: Vec<(u32, u64)>,
    /// From a change at a node until routers know of it; 0 where they know at once.
    pub announce_ns: u64,
    /// The same of GPU memory.
    pub events_ns: u64,
}

impl Setup {
    /// Instances of this profile as they are deployed for a model of eight billion parameters: 48 GiB of KV in GPU memory, 256 GiB in DRAM of
    /// each node and 1 TiB on SSD, reports five times a second; nodes are configured as they are by default.
    #[must_use]
    pub fn new(instances: u32, profile: HardwareProfile, block_tokens: u32) -> Setup {
        let block_bytes = profile.kv_bytes_per_token * u64::from(block_tokens);
        let blocks = |gib: u64| (gib << 30) / block_bytes.max(1);
        Setup {
            engines: Engines::default(),
            first: 0,
            nodes: instances,
            watermarks: (0.95, 0.90),
            ssd_reuse_min: 0.02,
            instances,
            profile,
            actual: profile,
            slower: Vec::new(),
            batch: Batch { requests_max: 256, chunk_tokens: 4_096 },
            gpu_blocks: blocks(48) as usize,
            node_blocks: (blocks(256), blocks(1_024)),
            policy: kv_core::evict::DEFAULT.to_owned(),
            plane: Plane::default(),
            orders: true,
            report_every_ns: 200_000_000,
            delivery_ns: 0,
            reports_ns: Vec::new(),
            joins: Vec::new(),
            announce_ns: 20_000_000,
            events_ns: 5_000_000,
        }
    }

    /// Stand-ins under this profile, each node with so many blocks in DRAM and on SSD.
    #[must_use]
    pub fn stand_ins(
        (instances, nodes): (u32, u32),
        profile: HardwareProfile,
        takes_time: bool,
        node_blocks: (u64, u64),
    ) -> Setup {
        Setup {
            engines: Engines::StandIns { takes_time },
            actual: if takes_time { profile } else { profile.timeless() },
            nodes,
            batch: Batch { requests_max: usize::MAX, chunk_tokens: u32::MAX },
            gpu_blocks: usize::MAX,
            node_blocks,
            // Where compute takes no time nobody waits.
            orders: takes_time,
            ..Setup::new(instances, profile, 1)
        }
    }

    /// The numbers of all instances.
    fn numbers(&self) -> std::ops::Range<u32> {
        self.first..self.first + self.instances
    }

    /// The speeds of an instance as they are.
    fn actual_of(&self, instance: u32) -> HardwareProfile {
        let slower = self.slower.iter().find(|(slow, _)| *slow == instance);
        slower.map_or(self.actual, |(_, times)| self.actual.scaled(*times))
    }

    /// Whether instances are engines of a model.
    fn is_batching(&self) -> bool {
        self.engines == Engines::Batching
    }

    /// When an instance joins that is not there at first.
    fn joins_ns(&self, instance: u32) -> Option<u64> {
        self.joins.iter().find(|(late, _)| *late == instance).map(|(_, at_ns)| *at_ns)
    }

    /// When the next report of an instance comes from some time on, if that is said.
    fn report_from(&self, instance: u32, from_ns: u64) -> Option<u64> {
        let all = self.reports_ns.get((instance - self.first) as usize)?;
        all.get(all.partition_point(|at_ns| *at_ns < from_ns)).copied()
    }

    /// The same where nothing that a router knows is old.
    #[must_use]
    pub fn fresh(self) -> Setup {
        Setup { report_every_ns: 0, announce_ns: 0, events_ns: 0, ..self }
    }
}

/// Who decides where requests go.
enum Decider<'a> {
    Router(&'a mut dyn Router),
    Oracle(Oracle),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Event {
    Arrives(usize),
    /// A request is at the instance that it was sent to.
    Comes(usize),
    StepEnds(u32),
    /// Something that an instance waits for has come.
    Wakes(u32),
    Reports(u32),
    Announced(NodeId, Vec<Change>),
    Told(InstanceId, Vec<Change>),
}

/// An event at its time; events of one time are in the order in which they were made.
struct Due {
    at_ns: u64,
    nth: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        (self.at_ns, self.nth) == (other.at_ns, other.nth)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Due) -> std::cmp::Ordering {
        (self.at_ns, self.nth).cmp(&(other.at_ns, other.nth))
    }
}

/// A request that was sent.
struct Sent {
    instance: u32,
    save_to: Option<NodeId>,
    /// What it fetched, once it is at its instance.
    fetched: Fetched,
    plan: Plan,
    /// From where it is to fetch.
    sources: Vec<Source>,
    predicted_ns: u64,
    parts: Prediction,
    /// Whether that is saved as well.
    keeps_fetched: bool,
}

/// What an instance is told of a request beside its sources.
#[derive(Clone, Copy)]
struct Plan {
    resident_blocks: u32,
    turn: Timestamp,
}

impl Plan {
    fn of(decision: &Decision) -> Plan {
        Plan { resident_blocks: decision.resident_blocks, turn: decision.turn }
    }
}

fn nodes_of(sources: &[Source]) -> Vec<NodeId> {
    sources.iter().map(|source| source.node).collect()
}

struct Fleet<'a> {
    setup: &'a Setup,
    workload: &'a Workload,
    engines: Vec<Engine>,
    store: Store,
    view: View,
    due: BinaryHeap<Reverse<Due>>,
    made: u64,
    sent: Vec<Option<Sent>>,
    /// First tokens of which an instance tells with its next report, by instance.
    to_tell: Vec<Vec<(Prediction, u64)>>,
    /// Of each instance, what its last report told of times between tokens.
    told: Vec<Between>,
    /// Of each request that was sent, what was predicted of its decoding: time between tokens in nanoseconds, all of it before factors, and its limit between tokens in microseconds.
    paced: Vec<(u64, Prediction, u64)>,
    /// Requests that have neither ended nor been rejected.
    open: usize,
    report: Report,
}

/// Serves a workload.
#[must_use]
pub fn run(workload: &Workload, setup: &Setup, router: &mut dyn Router) -> Report {
    serve(workload, setup, &mut Decider::Router(router))
}

/// Serves a workload by plans of the production scheduler, each at the instance where the engines themselves say that it is best for all
/// requests that are there, and for the next `window` ones, which it knows. Nothing that it knows is old.
#[must_use]
pub fn run_knowing(workload: &Workload, setup: &Setup, window: usize) -> Report {
    let setup = setup.clone().fresh();
    serve(workload, &setup, &mut Decider::Oracle(Oracle::new(workload, setup.instances, window)))
}

fn serve(workload: &Workload, setup: &Setup, decider: &mut Decider<'_>) -> Report {
    let mut fleet = Fleet::new(workload, setup);
    while let Some(Reverse(Due { at_ns, event, .. })) = fleet.due.pop() {
        match event {
            Event::Arrives(nth) => fleet.arrives(nth, at_ns, decider),
            Event::Comes(nth) => fleet.comes(nth, at_ns),
            Event::StepEnds(instance) => fleet.step_ends(instance, at_ns),
            Event::Wakes(instance) => fleet.poke(instance, at_ns),
            Event::Reports(instance) => fleet.reports(instance, at_ns),
            Event::Announced(node, changes) => fleet.view.announced(node, changes),
            Event::Told(instance, changes) => fleet.view.told(instance, changes),
        }
    }
    fleet.finish()
}

impl<'a> Fleet<'a> {
    fn new(workload: &'a Workload, setup: &'a Setup) -> Fleet<'a> {
        let memory = || {
            let memory = Memory::new(workload.block_tokens, setup.gpu_blocks, workload.prompts());
            if setup.is_batching() { memory } else { memory.keeping_nothing() }
        };
        let engine = |instance| Engine::new(setup.actual_of(instance), setup.batch, memory());
        // None has a number below the first.
        let places = setup.numbers().end;
        let mut fleet = Fleet {
            setup,
            workload,
            engines: (0..places).map(engine).collect(),
            store: Store::new(setup),
            view: View::new(setup),
            due: BinaryHeap::new(),
            made: 0,
            sent: workload.requests.iter().map(|_| None).collect(),
            to_tell: vec![Vec::new(); places as usize],
            told: vec![Between::default(); places as usize],
            paced: vec![(0, Prediction::default(), 0); workload.requests.len()],
            open: workload.requests.len(),
            report: Report::default(),
        };
        for (nth, request) in workload.requests.iter().enumerate() {
            fleet.at(request.arrival_ns, Event::Arrives(nth));
        }
        for instance in setup.numbers().filter(|_| setup.report_every_ns > 0) {
            // They do not all speak at once.
            let nth = instance - setup.first;
            let even = setup.report_every_ns * u64::from(nth) / u64::from(setup.instances);
            let first = setup.report_from(instance, 0).unwrap_or(even);
            fleet.at(setup.joins_ns(instance).unwrap_or(first), Event::Reports(instance));
        }
        fleet
    }

    fn at(&mut self, at_ns: u64, event: Event) {
        self.made += 1;
        self.due.push(Reverse(Due { at_ns, nth: self.made, event }));
    }

    fn arrives(&mut self, nth: usize, now_ns: u64, decider: &mut Decider<'_>) {
        if self.setup.report_every_ns == 0 {
            let there = |instance: &u32| self.setup.joins_ns(*instance).is_none_or(|at_ns| at_ns <= now_ns);
            self.setup.numbers().filter(there).for_each(|instance| self.tell_load(instance, now_ns));
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
            // Nobody knows beforehand how much a model will say.
            output_tokens: 0,
            ttft_max_us: 0,
            tbt_max_us: 0,
            standing: Default::default(),
            is_text: false,
        };
        let now = Timestamp(now_ns / 1_000);
        let coming = self.view.coming(&asked, prompt, now);
        let ask = Ask { request: asked, matched: &matched, resident: &resident, coming: &coming, now };
        let (route, keeps_fetched) = match decider {
            Decider::Router(router) => (router.route(&ask, &self.view), router.keeps_fetched()),
            Decider::Oracle(oracle) => (oracle.route(nth, &ask, self, now_ns), false),
        };
        match route {
            Route::To(decision) => self.send(nth, &asked, (&decision, keeps_fetched), now_ns),
            Route::Reject => {
                self.open -= 1;
                self.report.rejected += 1;
            }
        }
    }

    fn send(
        &mut self,
        nth: usize,
        asked: &RouteRequest,
        (decision, keeps_fetched): (&Decision, bool),
        now_ns: u64,
    ) {
        self.view.sent((asked, self.workload.prompt(nth)), decision, Timestamp(now_ns / 1_000));
        self.sent[nth] = Some(Sent {
            instance: decision.instance.0,
            save_to: decision.save_to.as_ref().map(|holder| holder.node),
            fetched: Fetched::default(),
            plan: Plan::of(decision),
            sources: decision.sources.clone(),
            predicted_ns: decision.predicted.ttft_us() * 1_000,
            parts: decision.parts,
            keeps_fetched,
        });
        self.paced[nth] = (decision.predicted.tbt_us * 1_000, decision.parts, decision.pacing.limit_us);
        match self.setup.delivery_ns {
            0 => self.comes(nth, now_ns),
            later => self.at(now_ns + later, Event::Comes(nth)),
        }
    }

    /// A request is at its instance, which fetches what it was told to.
    fn comes(&mut self, nth: usize, now_ns: u64) {
        let Some(sent) = &mut self.sent[nth] else { return };
        let instance = sent.instance;
        let whose = (NodeId(instance), self.workload.block_tokens, self.workload.requests[nth].category);
        let fetched = self.store.fetch(&sent.sources, self.workload.prompt(nth), whose, now_ns);
        sent.fetched = fetched;
        let (plan, nodes) = (sent.plan, nodes_of(&sent.sources));
        nodes.into_iter().for_each(|node| self.node_changed(node, now_ns));
        let job = self.job(nth, plan, fetched);
        self.report.fetched_blocks += u64::from(fetched.blocks);
        self.engines[instance as usize].put(job);
        if job.ready_ns > now_ns {
            self.at(job.ready_ns, Event::Wakes(instance));
        }
        self.poke(instance, now_ns);
    }

    /// A request as it comes to the instance of a decision, whose blocks come so.
    fn job(&self, nth: usize, plan: Plan, fetched: Fetched) -> Job {
        let request = &self.workload.requests[nth];
        let tokens = |blocks: u32| (blocks * self.workload.block_tokens).min(request.input_tokens);
        Job {
            nth,
            input_tokens: request.input_tokens,
            output_tokens: if self.setup.is_batching() { request.output_tokens } else { 1 },
            fetched_tokens: tokens(plan.resident_blocks + fetched.blocks),
            resident_tokens: tokens(plan.resident_blocks),
            ready_ns: fetched.ready_ns,
            turn: plan.turn,
        }
    }

    /// Lets an instance begin what it can.
    fn poke(&mut self, instance: u32, now_ns: u64) {
        let engine = &mut self.engines[instance as usize];
        if let Some(end_ns) = engine.interrupt(now_ns).or_else(|| engine.begin(now_ns)) {
            self.at(end_ns, Event::StepEnds(instance));
        }
        self.memory_changed(instance, now_ns);
    }

    fn step_ends(&mut self, instance: u32, now_ns: u64) {
        let mut ended = Vec::new();
        self.engines[instance as usize].end(now_ns, &mut ended);
        for one in ended {
            match one {
                Ended::First { nth, computed_tokens } => self.first_token(nth, computed_tokens, now_ns),
                Ended::Last { nth, between } => {
                    self.open -= 1;
                    let tbt_ns = between.ns.checked_div(between.tokens).unwrap_or_default();
                    self.report.ended.push((nth, tbt_ns));
                    self.report.ended_ns = now_ns;
                    let request = &self.workload.requests[nth];
                    self.view.ended(InstanceId(instance), request.input_tokens.into());
                    let (predicted_ns, parts, limit_us) = &self.paced[nth];
                    if self.setup.engines == Engines::Batching {
                        let (said, now) =
                            ((request.category, request.output_tokens), Timestamp(now_ns / 1_000));
                        let paced = Paced {
                            parts,
                            predicted_us: predicted_ns / 1_000,
                            tokens: request.output_tokens,
                            tbt_us: tbt_ns / 1_000,
                            limit_us: *limit_us,
                        };
                        self.view.said(said, paced, now);
                    }
                    self.report.paced.push((*predicted_ns, tbt_ns));
                }
            }
        }
        self.poke(instance, now_ns);
    }

    fn first_token(&mut self, nth: usize, computed_tokens: u32, now_ns: u64) {
        let request = &self.workload.requests[nth];
        let Some(sent) = self.sent[nth].take() else { return };
        let Sent { instance, save_to, fetched, plan, sources, predicted_ns, parts, keeps_fetched } = sent;
        let ttft_ns = now_ns - request.arrival_ns - self.setup.delivery_ns;
        match self.setup.engines {
            Engines::Batching => self.view.first_token(instance, &parts, ttft_ns, now_ns),
            Engines::StandIns { takes_time: true } => self.to_tell[instance as usize].push((parts, ttft_ns)),
            Engines::StandIns { takes_time: false } => {}
        }
        self.report.served.push(Served {
            nth,
            instance,
            ttft_ns,
            predicted_ns,
            fetched: fetched.from,
            input_tokens: request.input_tokens,
            computed_tokens,
        });
        let held = !self.setup.is_batching();
        let leaves = if held {
            Leaves::Held(&fetched)
        } else if keeps_fetched {
            Leaves::Known
        } else {
            Leaves::Fetched(plan.resident_blocks, fetched.blocks)
        };
        if let Some(node) = save_to {
            self.store.save(node, (self.workload.prompt(nth), leaves), request.category, now_ns);
            self.node_changed(node, now_ns);
        }
        if held {
            let nodes = nodes_of(&sources);
            self.store.give_back(&fetched, nodes.iter().copied(), now_ns);
            nodes.into_iter().for_each(|node| self.node_changed(node, now_ns));
        }
    }

    fn reports(&mut self, instance: u32, now_ns: u64) {
        if self.open == 0 {
            return;
        }
        self.tell_load(instance, now_ns);
        let next_ns = self.setup.report_from(instance, now_ns + 1);
        self.at(next_ns.unwrap_or(now_ns + self.setup.report_every_ns), Event::Reports(instance));
    }

    /// Word of an instance's load, and with that of the first of how much nodes have.
    fn tell_load(&mut self, instance: u32, now_ns: u64) {
        let engine = &self.engines[instance as usize];
        let (waiting, running) = engine.requests();
        let between = engine.between_by(now_ns);
        let told = std::mem::replace(&mut self.told[instance as usize], between);
        let apart_ns = (between.ns - told.ns).checked_div(between.tokens - told.tokens).unwrap_or_default();
        let (kv_tokens_max, kv_tokens) = engine.memory.tokens();
        let decoding = Decoding {
            kv_tokens_max,
            kv_tokens,
            tbt_us: u32::try_from(apart_ns / 1_000).unwrap_or(u32::MAX),
            chunk_tokens: self.setup.batch.chunk_tokens,
        };
        // Stand-ins without a GPU memory tell nothing of one.
        let decoding = match self.setup.engines {
            Engines::Batching => decoding,
            _ => Decoding { chunk_tokens: decoding.chunk_tokens, ..Decoding::default() },
        };
        let load = Load::reported(engine.queue_tokens(), running, waiting).with_decoding(decoding);
        let in_use = engine.memory.in_use();
        self.view.reported(InstanceId(instance), load, in_use, Timestamp(now_ns / 1_000));
        for (parts, ttft_ns) in std::mem::take(&mut self.to_tell[instance as usize]) {
            self.view.first_token(instance, &parts, ttft_ns, now_ns);
        }
        if instance == self.setup.first {
            let Fleet { view, store, .. } = self;
            view.counted(|node| store.blocks(node));
        }
    }

    fn node_changed(&mut self, node: NodeId, now_ns: u64) {
        let changes = self.store.take_changes(node);
        match self.setup.announce_ns {
            _ if changes.is_empty() => {}
            0 => self.view.announced(node, changes),
            later => self.at(now_ns + later, Event::Announced(node, changes)),
        }
    }

    fn memory_changed(&mut self, instance: u32, now_ns: u64) {
        let changes = self.engines[instance as usize].memory.take_changes();
        match self.setup.events_ns {
            _ if changes.is_empty() => {}
            0 => self.view.told(InstanceId(instance), changes),
            later => self.at(now_ns + later, Event::Told(InstanceId(instance), changes)),
        }
    }

    fn finish(mut self) -> Report {
        self.report.busy_ns = self.engines.iter().map(|engine| engine.busy_ns).collect();
        for engine in &self.engines {
            self.report.between_tokens += engine.between.tokens;
            self.report.between_ns += engine.between.ns;
        }
        self.report
    }
}

#[cfg(test)]
mod tests;
