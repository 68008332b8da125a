//! The soft half of the view: instances with their load and links, as reported to this router.
//!
//! Reports are numbered; an older one is ignored, and a new start time means a new process whose numbers
//! begin again. Not here: the choice (`kv_core::schedule`), what instances have in GPU memory (`residency/`) and the
//! replicated half (`published.rs`). Lost on restart; the next report rebuilds it.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{Category, Epoch, InstanceId, NodeId, TenantId, Timestamp};
use kv_core::place::LOAD_BOUND;
use kv_core::schedule::{
    Admission, Counted, Decision, Fleet, Handover, HardwareProfile, Instance, Limits, LiveNode, Load, Offer,
    Paced, Part, Prediction, Rejection, Standing,
};
use parking_lot::RwLock;

use super::links::{LinkRate, Links, Measured, NodeLanes};
use crate::shares::QueueShares;

/// Instances known at once: far above any fleet, so that a reporter gone mad cannot fill the memory.
pub(crate) const INSTANCES_MAX: usize = 4096;

/// Silence after which an instance may be forgotten to make room: far beyond any delay of its reports, so
/// that a late one of a process that ended is still known to be old.
pub(super) const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// One report of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) instance: InstanceId,
    pub(crate) address: String,
    pub(crate) node: Option<NodeId>,
    pub(crate) fetches: bool,
    pub(crate) orders: bool,
    pub(crate) part: Part,
    pub(crate) load: Load,
    pub(crate) sequence: u64,
    pub(crate) started_us: u64,
    pub(crate) leaving: bool,
    pub(crate) links: Vec<Measured>,
}

/// What became of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receipt {
    Accepted,
    /// A newer one was seen before.
    Old,
    /// [`INSTANCES_MAX`] are known already.
    Full,
}

#[derive(Clone, Debug)]
struct Known {
    address: String,
    sequence: u64,
    started_us: u64,
    joined: Timestamp,
    heard: Timestamp,
}

#[derive(Default)]
struct Soft {
    fleet: Fleet,
    known: BTreeMap<InstanceId, Known>,
    links: Links,
    shares: QueueShares,
    admission: Admission,
}

/// Whose request it is, and what is asked for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    /// On whose share of the queues it counts; a member's on none.
    pub(crate) share: Option<TenantId>,
    /// Whose it is.
    pub(crate) tenant: TenantId,
    /// Above 0 before others, below behind them.
    pub(crate) priority: i32,
    /// Until when its first token must be out, if that matters.
    pub(crate) ttft_max_us: Option<u64>,
}

impl Soft {
    fn addresses(&self, decision: &Decision) -> Addresses {
        let of = |instance| self.known.get(&instance).map(|known| known.address.clone()).unwrap_or_default();
        let partner = decision.handover.map(|handover| of(handover.instance)).unwrap_or_default();
        Addresses { instance: of(decision.instance), partner }
    }

    /// Makes room: forgets instances that left or fell silent long ago.
    fn forget_silent(&mut self, now: Timestamp) {
        let Soft { fleet, known, shares, .. } = self;
        known.retain(|instance, one| {
            let stays = now.since(one.heard) < FORGOTTEN_AFTER;
            if !stays {
                fleet.remove_instance(*instance);
                shares.reported(*instance);
            }
            stays
        });
    }
}

/// Where the instances of a decision take requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    /// The one that was chosen.
    pub(crate) instance: String,
    /// The one that goes on; empty where that is the same.
    pub(crate) partner: String,
}

/// Instances and live nodes, as routing sees them.
pub(crate) struct FleetView {
    soft: RwLock<Soft>,
}

/// An instance for a status reply.
#[derive(Clone, Debug)]
pub(crate) struct InstanceStanding {
    pub(crate) instance: Instance,
    pub(crate) address: String,
}

impl FleetView {
    pub(crate) fn new(profile: HardwareProfile, limits: Limits, admission: Admission) -> FleetView {
        let mut fleet = Fleet::new(profile);
        fleet.limits = limits;
        FleetView { soft: RwLock::new(Soft { fleet, admission, ..Soft::default() }) }
    }

    /// Takes a report, unless a newer one was seen.
    pub(crate) fn report(&self, report: Report, now: Timestamp) -> Receipt {
        let mut soft = self.soft.write();
        if soft.known.len() >= INSTANCES_MAX && !soft.known.contains_key(&report.instance) {
            soft.forget_silent(now);
        }
        let count = soft.known.len();
        // One that was heard of is the same as long as its process is.
        let same = soft.known.get(&report.instance).filter(|known| known.started_us == report.started_us);
        let joined = same.map_or(now, |known| known.joined);
        match soft.known.get(&report.instance) {
            Some(known) if (report.started_us, report.sequence) <= (known.started_us, known.sequence) => {
                return Receipt::Old;
            }
            None if count >= INSTANCES_MAX => return Receipt::Full,
            Some(known) if known.started_us < report.started_us => soft.links.forget(report.instance),
            _ => {}
        }
        soft.shares.reported(report.instance);
        if report.leaving {
            soft.fleet.remove_instance(report.instance);
            soft.links.forget(report.instance);
        } else {
            let Report { instance, node, fetches, orders, part, load, .. } = report;
            let joined_at = Some(joined);
            let instance_now =
                Instance { id: instance, node, fetches, orders, load, reported_at: now, joined_at };
            soft.fleet.put_instance(instance_now);
            soft.fleet.set_part(instance, part);
            soft.links.measured((instance, node), &report.links, now);
            let paths = soft.links.paths(instance, now);
            soft.fleet.set_paths(instance, &paths);
        }
        let Report { instance, address, sequence, started_us, .. } = report;
        soft.known.insert(instance, Known { address, sequence, started_us, joined, heard: now });
        Receipt::Accepted
    }

    /// Asks the fleet as it is now.
    pub(crate) fn ask<T>(&self, ask: impl FnOnce(&Fleet) -> T) -> T {
        ask(&self.soft.read().fleet)
    }

    /// Whether an instance fetches from nodes.
    pub(crate) fn fetches(&self, instance: InstanceId) -> bool {
        self.soft.read().fleet.instance(instance).is_none_or(|instance| instance.fetches)
    }

    /// When an instance started, as its last report said.
    pub(crate) fn started(&self, instance: InstanceId) -> Option<u64> {
        self.soft.read().known.get(&instance).map(|known| known.started_us)
    }

    /// How fast instances read from a node under this epoch, where they did lately.
    pub(crate) fn lanes(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> NodeLanes {
        self.soft.read().links.of_node(node, epoch, now)
    }

    /// How fast instances read from each node, by path and tier, where they did lately: for show.
    pub(crate) fn link_rates(&self, now: Timestamp) -> Vec<LinkRate> {
        let soft = self.soft.read();
        soft.links.rates(|node| soft.fleet.live(node).map(|live| live.epoch), now)
    }

    /// Forgets links that nobody used lately.
    pub(crate) fn forget_aged_links(&self, now: Timestamp) {
        self.soft.write().links.forget_aged(now);
    }

    /// Chooses a node for nothing new, until the live nodes are replaced.
    pub(crate) fn stop_saving(&self, node: NodeId) {
        let mut soft = self.soft.write();
        let weighed = |live: &LiveNode| match live.node == node {
            true => LiveNode { weight: 0, ..live.clone() },
            false => live.clone(),
        };
        let nodes = soft.fleet.nodes().iter().map(weighed).collect();
        soft.fleet.set_nodes(nodes);
    }

    /// Nodes that take new blocks, those of a prefix with this head first where they go under bounded load.
    pub(crate) fn places(&self, root: &[u8]) -> Vec<NodeId> {
        let soft = self.soft.read();
        let fleet = &soft.fleet;
        let blocks = |node| fleet.live(node).map_or(0, |live| live.blocks);
        let first = fleet.ring().place(root, blocks, LOAD_BOUND);
        let others = fleet.ring().walk(root).filter(|node| Some(*node) != first);
        first.into_iter().chain(others).collect()
    }

    /// Replaces the live nodes.
    pub(crate) fn set_nodes(&self, nodes: Vec<LiveNode>) {
        self.soft.write().fleet.set_nodes(nodes);
    }

    /// Runs a choice on the fleet, turns it away where others have a better claim, else notes it as far as whoever asked has a share, and adds
    /// the address of the chosen instance.
    pub(crate) fn decide(
        &self,
        claim: Claim,
        now: Timestamp,
        choose: impl FnOnce(&Fleet, Standing) -> Result<Decision, Rejection>,
    ) -> Result<(Decision, Addresses), Rejection> {
        let soft = self.soft.read();
        let standing = soft.admission.standing(claim.tenant, claim.priority, &soft.fleet, now);
        let decision = choose(&soft.fleet, standing)?;
        drop(soft);
        let mut soft = self.soft.write();
        let offer = Offer::of(&decision, (claim.tenant, claim.priority), claim.ttft_max_us);
        soft.admission.admit(&offer, now)?;
        let waiting = soft.fleet.waiting_tokens();
        let tokens = note(&mut soft, claim.share, &decision, now);
        soft.admission.sent(claim.tenant, tokens, waiting, now);
        let addresses = soft.addresses(&decision);
        Ok((decision, addresses))
    }

    /// Runs a choice for a request that runs already: it is let in, and counted where it was sent.
    pub(crate) fn plan(
        &self,
        choose: impl FnOnce(&Fleet, Standing) -> Result<Decision, Rejection>,
    ) -> Result<(Decision, Addresses), Rejection> {
        let soft = self.soft.read();
        let decision = choose(&soft.fleet, Standing::default())?;
        let addresses = soft.addresses(&decision);
        Ok((decision, addresses))
    }

    /// Takes back what was counted of a request that does not run where it was sent.
    pub(crate) fn take_back(&self, counted: &Counted, now: Timestamp) {
        self.soft.write().fleet.take_back(counted, now);
    }

    /// Runs a choice for a request that runs elsewhere than it was sent, and counts it there and where another goes on; nothing where that instance is not known.
    pub(crate) fn moved(
        &self,
        choose: impl FnOnce(&Fleet) -> Result<Decision, Rejection>,
        goes_on: Option<InstanceId>,
        now: Timestamp,
    ) -> Option<Decision> {
        let mut soft = self.soft.write();
        let mut decision = choose(&soft.fleet).ok()?;
        decision.handover = goes_on.map(|instance| {
            let running = soft.fleet.instance(instance).map_or(0, |partner| partner.load.running.into());
            Handover { instance, us: 0, running, others: 0 }
        });
        soft.fleet.record_moved(&decision, now);
        Some(decision)
    }

    /// A first token came from an instance after so long; `parts` is what was predicted of it before what was learnt.
    pub(crate) fn first_token(&self, instance: InstanceId, parts: &Prediction, ttft_us: u64, now: Timestamp) {
        self.soft.write().fleet.first_token(instance, parts, ttft_us, now);
    }

    /// A request of this category ended that said so many tokens, so far apart; `parts` as above.
    pub(crate) fn ended(&self, category: Category, output_tokens: u32, paced: Paced<'_>, now: Timestamp) {
        self.soft.write().fleet.ended(category, output_tokens, paced, now);
    }

    /// How far apart tokens come of a request that begins to decode there now, or with that, why it should not. Where the instance is not known, 0.
    pub(crate) fn may_decode(
        &self,
        (instance, runs_there): (InstanceId, bool),
        limit_us: u64,
        now: Timestamp,
    ) -> Result<u64, (u64, Rejection)> {
        self.soft.read().fleet.may_decode((instance, runs_there), limit_us, now)
    }

    /// How many times as long as predicted tokens are apart, and steps take by themselves and for each request in them.
    pub(crate) fn pace_learnt(&self, now: Timestamp) -> [f64; 3] {
        let fleet = &self.soft.read().fleet;
        let [step, each] = fleet.step_factors(now);
        [fleet.learnt.tbt_factor(now), step, each]
    }

    /// By what factors waiting, transfer, prefill and those who pass turned out to be off, and what the profile says of a prompt's step, its tokens and their context.
    pub(crate) fn learnt(&self) -> [f64; 7] {
        let fleet = &self.soft.read().fleet;
        let ([queue, transfer, prefill, passed], [step, token, context]) =
            (fleet.learnt.factors(), fleet.computing.factors());
        [queue, transfer, prefill, passed, step, token, context]
    }

    /// Every known instance that has not left, by ascending number.
    pub(crate) fn instances(&self) -> Vec<InstanceStanding> {
        let soft = self.soft.read();
        let standing = |instance: &Instance| InstanceStanding {
            instance: *instance,
            address: soft.known.get(&instance.id).map(|known| known.address.clone()).unwrap_or_default(),
        };
        soft.fleet.instances().iter().map(standing).collect()
    }
}

/// Counts a decision into the load of its instance; a tenant's until its share of the queue is taken. How many tokens it counted.
fn note(soft: &mut Soft, share: Option<TenantId>, decision: &Decision, now: Timestamp) -> u32 {
    let Soft { fleet, shares, .. } = soft;
    if fleet.instance(decision.instance).is_none() {
        return 0;
    }
    match share.map(|tenant| shares.take(decision.instance, tenant, decision.recompute_tokens)) {
        None => {
            fleet.record(decision, now);
            decision.recompute_tokens
        }
        Some(None) => 0,
        Some(Some(tokens)) => {
            fleet.record_part(decision, tokens, now);
            tokens.min(decision.recompute_tokens)
        }
    }
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;
    use crate::shares::TENANT_ROUTED_TOKENS_MAX;
    use kv_core::id::{RequestId, Tier};
    use kv_core::index::PrefixMatch;
    use kv_core::schedule::{self, Eligible, LinkKey, LinkPath, LinkSample, Measure, Reader, RouteRequest};

    fn report(sequence: u64, started_us: u64, queue_tokens: u64) -> Report {
        Report {
            instance: InstanceId(1),
            address: "i:1".into(),
            node: None,
            fetches: true,
            orders: false,
            part: Part::default(),
            load: Load::reported(queue_tokens, 0, 0),
            sequence,
            started_us,
            leaving: false,
            links: vec![],
        }
    }

    fn queue(view: &FleetView) -> Vec<u64> {
        view.instances().iter().map(|known| known.instance.load.queue_tokens).collect()
    }

    #[test]
    fn older_reports_are_ignored() {
        let view = FleetView::new(HardwareProfile::default(), Limits::default(), Admission::default());
        assert_eq!(view.report(report(2, 10, 200), Timestamp(1)), Receipt::Accepted);
        assert_eq!(view.report(report(1, 10, 100), Timestamp(2)), Receipt::Old);
        assert_eq!(view.report(report(2, 10, 300), Timestamp(3)), Receipt::Old);
        assert_eq!(queue(&view), [200]);
    }

    #[test]
    fn a_restart_begins_anew() {
        let view = FleetView::new(HardwareProfile::default(), Limits::default(), Admission::default());
        assert_eq!(view.report(report(900, 10, 900), Timestamp(1)), Receipt::Accepted);
        assert_eq!(view.report(report(1, 20, 100), Timestamp(2)), Receipt::Accepted);
        assert_eq!(view.report(report(901, 10, 901), Timestamp(3)), Receipt::Old, "the dead process");
        assert_eq!(queue(&view), [100]);
    }

    #[test]
    fn an_instance_joins_with_each_start_and_with_nothing_else() {
        let view = FleetView::new(HardwareProfile::default(), Limits::default(), Admission::default());
        let joined = || view.instances().iter().map(|one| one.instance.joined_at).collect::<Vec<_>>();
        view.report(report(1, 10, 0), Timestamp(5));
        view.report(report(2, 10, 0), Timestamp(90));
        assert_eq!(joined(), [Some(Timestamp(5))]);
        view.report(report(1, 20, 0), Timestamp(100));
        view.report(report(3, 10, 0), Timestamp(200));
        view.report(report(2, 20, 0), Timestamp(300));
        assert_eq!(
            joined(),
            [Some(Timestamp(100))],
            "its next start, and not what is left of the one before"
        );
    }

    #[test]
    fn a_leaving_instance_stays_away_until_it_starts_again() {
        let view = FleetView::new(HardwareProfile::default(), Limits::default(), Admission::default());
        assert_eq!(view.report(report(1, 10, 1), Timestamp(1)), Receipt::Accepted);
        assert_eq!(
            view.report(Report { leaving: true, ..report(2, 10, 1) }, Timestamp(2)),
            Receipt::Accepted
        );
        assert_eq!(queue(&view), [0u64; 0]);
        assert_eq!(view.report(report(1, 10, 1), Timestamp(3)), Receipt::Old);
        assert_eq!(view.report(report(1, 30, 1), Timestamp(4)), Receipt::Accepted);
        assert_eq!(queue(&view), [1]);
    }

    #[test]
    fn links_come_with_the_load_and_end_with_the_process_that_measured() {
        let view = FleetView::new(HardwareProfile::default(), Limits::default(), Admission::default());
        let (bytes, stream) = (100_000_000, Duration::from_millis(100));
        let sample = LinkSample { fetches: 1, bytes, stream, latency: Duration::ZERO };
        let link = |node, path| {
            let key = LinkKey { path: Some(path), tier: Some(Tier::Dram) };
            Measured { node: NodeId(node), epoch: Epoch(1), sample, key }
        };
        let with = |sequence, started_us| Report {
            node: Some(NodeId(2)),
            links: vec![link(1, LinkPath::Quic), link(2, LinkPath::Quic)],
            ..report(sequence, started_us, 1)
        };
        let price = |node, is_own, path| {
            let NodeLanes { afar, near } = view.lanes(NodeId(node), Epoch(1), Timestamp(1));
            let lanes = if is_own { near } else { afar }?;
            let price =
                lanes.price(Tier::Dram, Reader { is_own, path: Some(path) }, &HardwareProfile::default());
            (price.measure != Measure::Profile).then_some(price.lane.bytes_per_s)
        };
        let rates = |path| [price(1, false, path), price(2, false, path), price(2, true, path)];
        let local = link(1, LinkPath::SharedMemory);
        view.report(Report { node: None, links: vec![local], ..report(1, 5, 1) }, Timestamp(1));
        assert_eq!(rates(LinkPath::Quic), [None; 3], "memory of a host says nothing of the network");
        assert_eq!(rates(LinkPath::SharedMemory)[0], Some(1_000_000_000));
        view.report(with(1, 10), Timestamp(1));
        let expected = [Some(1_000_000_000), None, Some(1_000_000_000)];
        assert_eq!(rates(LinkPath::Quic), expected, "its own node is no network away");
        assert_eq!(rates(LinkPath::SharedMemory), [None; 3], "ended with the process that measured");
        assert_eq!(view.report(with(1, 10), Timestamp(1)), Receipt::Old);
        view.report(report(1, 20, 1), Timestamp(1));
        assert_eq!(rates(LinkPath::Quic), [None; 3]);
        view.report(with(2, 20), Timestamp(1));
        assert_eq!(rates(LinkPath::Quic)[0], Some(1_000_000_000));
        view.report(Report { leaving: true, ..report(3, 20, 1) }, Timestamp(1));
        assert_eq!((rates(LinkPath::Quic)[0], view.started(InstanceId(1))), (None, Some(20)));
    }

    /// Decides on so many tokens to compute, for a member or on a tenant's share.
    fn decide(view: &FleetView, share: Option<u32>, input_tokens: u32) -> Result<(), Rejection> {
        let request = RouteRequest {
            request: RequestId(1),
            tenant: TenantId(3),
            category: Category::default(),
            blocks: 0,
            first_block: None,
            block_tokens: 16,
            input_tokens,
            output_tokens: 0,
            ttft_max_us: 0,
            tbt_max_us: 0,
            standing: Default::default(),
            is_text: false,
        };
        let matched = PrefixMatch::default();
        let choose = |fleet: &Fleet, _: Standing| schedule::choose(&request, &matched, fleet, Timestamp(2));
        let claim = Claim { share: share.map(TenantId), tenant: TenantId(3), priority: 0, ttft_max_us: None };
        view.decide(claim, Timestamp(2), choose).map(drop)
    }

    #[test]
    fn who_is_turned_away_is_told_why_and_fills_no_queue() {
        let view = FleetView::new(HardwareProfile::default(), Limits::default(), Admission::default());
        view.report(report(1, 10, 0), Timestamp(1));
        let decide = |input_tokens, limit_s: u64, among: Option<&[InstanceId]>| {
            let request = RouteRequest {
                request: RequestId(1),
                tenant: TenantId(3),
                category: Category::default(),
                blocks: 0,
                first_block: None,
                block_tokens: 16,
                input_tokens,
                output_tokens: 0,
                ttft_max_us: 0,
                tbt_max_us: 0,
                standing: Default::default(),
                is_text: false,
            };
            let matched = PrefixMatch::default();
            let eligible = Eligible { among, ..Eligible::default() };
            let choose = |fleet: &Fleet, _: Standing| {
                schedule::choose_among(&request, &matched, eligible, fleet, Timestamp(2))
            };
            let ttft_max_us = Some(limit_s * 1_000_000);
            let claim = Claim { share: None, tenant: TenantId(3), priority: 0, ttft_max_us };
            view.decide(claim, Timestamp(2), choose).map(drop).map_err(|error| error.to_string())
        };
        let routed = || view.instances()[0].instance.load.routed;
        let late = decide(5_000, 2, None).expect_err("turned away");
        says("a request that would come too late", &late, &[]);
        says(
            "a request of which no instance may be chosen",
            &decide(1, 2, Some(&[])).expect_err("turned away"),
            &[],
        );
        assert_eq!(routed(), 0);
        for _ in 0..6 {
            decide(1_000, 10, None).expect("let in");
        }
        says("a request that others go before", &decide(1_000, 10, None).expect_err("turned away"), &[]);
        assert_eq!(routed(), 6);
    }

    #[test]
    fn a_tenants_decisions_fill_no_queue_and_a_members_do() {
        let view = FleetView::new(HardwareProfile::default(), Limits::default(), Admission::default());
        let routed = || view.instances()[0].instance.load;
        view.report(report(1, 10, 5), Timestamp(1));
        for round in 2..5 {
            for tenant in [3, 4] {
                for _ in 0..40 {
                    decide(&view, Some(tenant), 4 << 20).expect("there is room");
                    decide(&view, Some(tenant), 0).expect("there is room");
                }
            }
            assert_eq!(routed().routed_tokens, 2 * TENANT_ROUTED_TOKENS_MAX, "one share each");
            assert!(routed().routed <= 4, "{:?}", routed());
            view.report(report(round, 10, 5), Timestamp(1));
            assert_eq!((routed().routed_tokens, routed().routed), (0, 0));
        }
        decide(&view, Some(3), 1_000).expect("there is room");
        assert_eq!((routed().routed_tokens, routed().routed), (1_000, 1), "an honest one counts as it is");
        decide(&view, None, 4 << 20).expect("there is room");
        assert!(decide(&view, None, 1).is_err(), "the queue is full of a member's");
    }

    #[test]
    fn instances_are_bounded() {
        let view = FleetView::new(HardwareProfile::default(), Limits::default(), Admission::default());
        for number in 0..INSTANCES_MAX {
            let instance = InstanceId(u32::try_from(number).expect("a small number"));
            assert_eq!(view.report(Report { instance, ..report(1, 1, 1) }, Timestamp(1)), Receipt::Accepted);
        }
        let one_more = Report { instance: InstanceId(u32::MAX), ..report(1, 1, 1) };
        assert_eq!(view.report(one_more.clone(), Timestamp(1)), Receipt::Full);
        let later = Timestamp(1).after(FORGOTTEN_AFTER);
        assert_eq!(view.report(report(2, 1, 1), later), Receipt::Accepted);
        assert_eq!(view.report(one_more, later), Receipt::Accepted, "the silent ones make room");
        assert_eq!(queue(&view).len(), 2);
    }
}
