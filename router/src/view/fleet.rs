//! Ephemeral part of the view: instances with their load and links, as reported to this router.
//!
//! Reports are numbered and older ones are ignored. A new start time means a new process with new
//! numbers. Not here: the choice (`kv_core::schedule`), GPU residency (`residency/`) and the
//! replicated part (`published.rs`). Lost on restart; the next reports rebuild it.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{Category, Epoch, InstanceId, NodeId, TenantId, Timestamp};
use kv_core::place::LOAD_BOUND;
use kv_core::schedule::{
    Admission, AdmissionRequest, Decision, DecodeObservation, Fleet, Handover, HardwareProfile, Instance,
    LiveNode, Load, Placement, Prediction, QueuePriority, Rejection, RouteLimits, RouteRecord,
};
use parking_lot::RwLock;

use super::links::{LinkMeasurement, LinkRate, LinkTable, NodeLinkStats};
use crate::tenant_shares::QueueShares;

/// Limit on known instances, far above any fleet, so that a faulty reporter cannot fill memory.
pub(crate) const INSTANCES_MAX: usize = 4096;

/// Silence after which an instance may be forgotten at the limit. It exceeds any delay of reports,
/// so that a late report of an ended process is still recognised as old.
pub(super) const FORGET_AFTER: Duration = Duration::from_secs(600);

/// One report of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadReport {
    pub(crate) instance: InstanceId,
    pub(crate) address: String,
    pub(crate) node: Option<NodeId>,
    pub(crate) fetches: bool,
    pub(crate) orders_queue: bool,
    pub(crate) part: Placement,
    pub(crate) load: Load,
    pub(crate) sequence: u64,
    pub(crate) started_us: u64,
    pub(crate) leaving: bool,
    pub(crate) links: Vec<LinkMeasurement>,
}

/// How a report was handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receipt {
    Accepted,
    /// A newer one was received before.
    Stale,
    /// [`INSTANCES_MAX`] instances are known already.
    Full,
}

#[derive(Clone, Debug)]
struct ReportedInstance {
    address: String,
    sequence: u64,
    started_us: u64,
    joined_at: Timestamp,
    last_report: Timestamp,
}

#[derive(Default)]
struct EphemeralState {
    fleet: Fleet,
    known: BTreeMap<InstanceId, ReportedInstance>,
    links: LinkTable,
    shares: QueueShares,
    admission: Admission,
}

/// Tenant, priority and limit of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    /// Tenant that is charged for the queue share; `None` for a member.
    pub(crate) share: Option<TenantId>,
    /// Tenant of the request.
    pub(crate) tenant: TenantId,
    /// Above 0 before other requests, below 0 behind them.
    pub(crate) priority: i32,
    /// TTFT limit in microseconds, if any.
    pub(crate) ttft_max_us: Option<u64>,
}

impl EphemeralState {
    fn addresses(&self, decision: &Decision) -> DecisionAddresses {
        let of = |instance| self.known.get(&instance).map(|known| known.address.clone()).unwrap_or_default();
        let decode_address = decision.handover.map(|handover| of(handover.instance)).unwrap_or_default();
        DecisionAddresses { instance: of(decision.instance), decode_instance: decode_address }
    }

    /// Forgets instances that left or have been silent for long.
    fn forget_silent(&mut self, now: Timestamp) {
        let EphemeralState { fleet, known, shares, .. } = self;
        known.retain(|instance, one| {
            let stays = now.since(one.last_report) < FORGET_AFTER;
            if !stays {
                fleet.remove_instance(*instance);
                shares.reset(*instance);
            }
            stays
        });
    }
}

/// Addresses of a decision's instances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DecisionAddresses {
    /// The chosen instance.
    pub(crate) instance: String,
    /// The instance that decodes; empty if it is the same.
    pub(crate) decode_instance: String,
}

/// Instances and live nodes, as routing sees them.
pub(crate) struct FleetView {
    state: RwLock<EphemeralState>,
}

/// An instance in a status reply.
#[derive(Clone, Debug)]
pub(crate) struct InstanceStatus {
    pub(crate) instance: Instance,
    pub(crate) address: String,
}

impl FleetView {
    pub(crate) fn new(profile: HardwareProfile, limits: RouteLimits, admission: Admission) -> FleetView {
        let mut fleet = Fleet::new(profile);
        fleet.limits = limits;
        FleetView { state: RwLock::new(EphemeralState { fleet, admission, ..EphemeralState::default() }) }
    }

    /// Takes a report unless a newer one was received.
    pub(crate) fn report(&self, report: LoadReport, now: Timestamp) -> Receipt {
        let mut soft = self.state.write();
        if soft.known.len() >= INSTANCES_MAX && !soft.known.contains_key(&report.instance) {
            soft.forget_silent(now);
        }
        let count = soft.known.len();
        // An instance keeps its join time while its process lives.
        let same = soft.known.get(&report.instance).filter(|known| known.started_us == report.started_us);
        let joined = same.map_or(now, |known| known.joined_at);
        match soft.known.get(&report.instance) {
            Some(known) if (report.started_us, report.sequence) <= (known.started_us, known.sequence) => {
                return Receipt::Stale;
            }
            None if count >= INSTANCES_MAX => return Receipt::Full,
            Some(known) if known.started_us < report.started_us => soft.links.forget(report.instance),
            _ => {}
        }
        soft.shares.reset(report.instance);
        if report.leaving {
            soft.fleet.remove_instance(report.instance);
            soft.links.forget(report.instance);
        } else {
            let LoadReport { instance, node, fetches, orders_queue: orders, part, load, .. } = report;
            let joined_at = Some(joined);
            let instance_now = Instance {
                id: instance,
                node,
                can_fetch: fetches,
                orders_by_deadline: orders,
                load,
                reported_at: now,
                joined_at,
            };
            soft.fleet.put_instance(instance_now);
            soft.fleet.set_placement(instance, part);
            soft.links.record(instance, node, &report.links, now);
            let paths = soft.links.paths(instance, now);
            soft.fleet.set_paths(instance, &paths);
        }
        let LoadReport { instance, address, sequence, started_us, .. } = report;
        soft.known.insert(
            instance,
            ReportedInstance { address, sequence, started_us, joined_at: joined, last_report: now },
        );
        Receipt::Accepted
    }

    /// Reads the current fleet.
    pub(crate) fn with_fleet<T>(&self, ask: impl FnOnce(&Fleet) -> T) -> T {
        ask(&self.state.read().fleet)
    }

    /// Whether an instance fetches from nodes.
    pub(crate) fn fetches(&self, instance: InstanceId) -> bool {
        self.state.read().fleet.instance(instance).is_none_or(|instance| instance.can_fetch)
    }

    /// Start time of an instance, from its last report.
    pub(crate) fn started_us(&self, instance: InstanceId) -> Option<u64> {
        self.state.read().known.get(&instance).map(|known| known.started_us)
    }

    /// Recent read rates from a node under this epoch.
    pub(crate) fn link_stats(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> NodeLinkStats {
        self.state.read().links.node_stats(node, epoch, now)
    }

    /// Recent read rates from each node, by path and tier, for display.
    pub(crate) fn link_rates(&self, now: Timestamp) -> Vec<LinkRate> {
        let soft = self.state.read();
        soft.links.rates(|node| soft.fleet.live(node).map(|live| live.epoch), now)
    }

    /// Forgets links without recent reads.
    pub(crate) fn forget_aged_links(&self, now: Timestamp) {
        self.state.write().links.forget_aged(now);
    }

    /// Excludes a node from new saves until the live nodes are replaced.
    pub(crate) fn exclude_from_placement(&self, node: NodeId) {
        let mut soft = self.state.write();
        let weighed = |live: &LiveNode| match live.node == node {
            true => LiveNode { weight: 0, ..live.clone() },
            false => live.clone(),
        };
        let nodes = soft.fleet.nodes().iter().map(weighed).collect();
        soft.fleet.set_nodes(nodes);
    }

    /// Nodes that take new blocks, in placement order for a prefix with this root. The first
    /// follows bounded load.
    pub(crate) fn save_targets(&self, root: &[u8]) -> Vec<NodeId> {
        let soft = self.state.read();
        let fleet = &soft.fleet;
        let blocks = |node| fleet.live(node).map_or(0, |live| live.blocks);
        let first = fleet.ring().place(root, blocks, LOAD_BOUND);
        let others = fleet.ring().walk(root).filter(|node| Some(*node) != first);
        first.into_iter().chain(others).collect()
    }

    /// Replaces the live nodes.
    pub(crate) fn set_nodes(&self, nodes: Vec<LiveNode>) {
        self.state.write().fleet.set_nodes(nodes);
    }

    /// Chooses an instance, unless admission rejects the request in favour of others. Counts the
    /// decision within the caller's share, and returns it with the instances' addresses.
    pub(crate) fn decide(
        &self,
        claim: Claim,
        now: Timestamp,
        choose: impl FnOnce(&Fleet, QueuePriority) -> Result<Decision, Rejection>,
    ) -> Result<(Decision, DecisionAddresses), Rejection> {
        let soft = self.state.read();
        let status = soft.admission.queue_priority(claim.tenant, claim.priority, &soft.fleet, now);
        let decision = choose(&soft.fleet, status)?;
        drop(soft);
        let mut soft = self.state.write();
        let offer = AdmissionRequest::of(&decision, claim.tenant, claim.priority, claim.ttft_max_us);
        soft.admission.admit(&offer, now)?;
        let waiting = soft.fleet.waiting_tokens();
        let tokens = count_decision(&mut soft, claim.share, &decision, now);
        soft.admission.record(claim.tenant, tokens, waiting, now);
        let addresses = soft.addresses(&decision);
        Ok((decision, addresses))
    }

    /// Chooses for a request that runs already: it is always admitted, and is counted where it was
    /// sent.
    pub(crate) fn decide_running(
        &self,
        choose: impl FnOnce(&Fleet, QueuePriority) -> Result<Decision, Rejection>,
    ) -> Result<(Decision, DecisionAddresses), Rejection> {
        let soft = self.state.read();
        let decision = choose(&soft.fleet, QueuePriority::default())?;
        let addresses = soft.addresses(&decision);
        Ok((decision, addresses))
    }

    /// Removes the counted load of a request that does not run where it was sent.
    pub(crate) fn uncount(&self, counted: &RouteRecord, now: Timestamp) {
        self.state.write().fleet.retract(counted, now);
    }

    /// Counts a moved request on its actual instance and on the instance that decodes. `None` if
    /// that instance is unknown.
    pub(crate) fn record_move(
        &self,
        choose: impl FnOnce(&Fleet) -> Result<Decision, Rejection>,
        goes_on: Option<InstanceId>,
        now: Timestamp,
    ) -> Option<Decision> {
        let mut soft = self.state.write();
        let mut decision = choose(&soft.fleet).ok()?;
        decision.handover = goes_on.map(|instance| {
            let running =
                soft.fleet.instance(instance).map_or(0, |decode_address| decode_address.load.running.into());
            Handover { instance, handover_us: 0, running, others: 0 }
        });
        soft.fleet.record_reassigned(&decision, now);
        Some(decision)
    }

    /// Learns from a first token; `parts` is the prediction before learned corrections.
    pub(crate) fn record_first_token(
        &self,
        instance: InstanceId,
        parts: &Prediction,
        ttft_us: u64,
        now: Timestamp,
    ) {
        self.state.write().fleet.observe_first_token(instance, parts, ttft_us, now);
    }

    /// Learns from the end of a request: its output length and time between tokens. `parts` as
    /// above.
    pub(crate) fn record_end(
        &self,
        category: Category,
        output_tokens: u32,
        paced: DecodeObservation<'_>,
        now: Timestamp,
    ) {
        self.state.write().fleet.observe_completion(category, output_tokens, paced, now);
    }

    /// Predicted time between tokens, microseconds, of a request that starts to decode there now;
    /// with a rejection if it exceeds the limit. 0 if the instance is unknown.
    pub(crate) fn admit_decode(
        &self,
        instance: InstanceId,
        pinned_instance: bool,
        limit_us: u64,
        now: Timestamp,
    ) -> Result<u64, (u64, Rejection)> {
        self.state.read().fleet.admit_decode(instance, pinned_instance, limit_us, now)
    }

    /// Learned factors on the time between tokens, on a step, and on each request in it.
    pub(crate) fn tbt_factors(&self, now: Timestamp) -> [f64; 3] {
        let fleet = &self.state.read().fleet;
        let [step, each] = fleet.step_factors(now);
        [fleet.ttft_bias.tbt_factor(now), step, each]
    }

    /// Learned factors on queueing, transfer, prefill and overtaking, and on the profile's times
    /// per step, token and context.
    pub(crate) fn ttft_factors(&self) -> [f64; 7] {
        let fleet = &self.state.read().fleet;
        let ([queue, transfer, prefill, passed], [step, token, context]) =
            (fleet.ttft_bias.factors(), fleet.prefill_model.factors());
        [queue, transfer, prefill, passed, step, token, context]
    }

    /// Every known instance that has not left, in ascending order.
    pub(crate) fn instances(&self) -> Vec<InstanceStatus> {
        let soft = self.state.read();
        let status = |instance: &Instance| InstanceStatus {
            instance: *instance,
            address: soft.known.get(&instance.id).map(|known| known.address.clone()).unwrap_or_default(),
        };
        soft.fleet.instances().iter().map(status).collect()
    }
}

/// Counts a decision into the load of its instance, for a tenant only within its share. Returns the
/// counted tokens.
fn count_decision(
    soft: &mut EphemeralState,
    share: Option<TenantId>,
    decision: &Decision,
    now: Timestamp,
) -> u32 {
    let EphemeralState { fleet, shares, .. } = soft;
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
            fleet.record_partial(decision, tokens, now);
            tokens.min(decision.recompute_tokens)
        }
    }
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;
    use crate::tenant_shares::TENANT_ROUTED_TOKENS_MAX;
    use kv_core::id::{RequestId, Tier};
    use kv_core::index::PrefixMatch;
    use kv_core::schedule::{
        self, InstanceFilter, LinkKey, LinkPath, LinkSample, PriceBasis, ReadPath, RouteRequest,
    };

    fn report(sequence: u64, started_us: u64, queue_tokens: u64) -> LoadReport {
        LoadReport {
            instance: InstanceId(1),
            address: "i:1".into(),
            node: None,
            fetches: true,
            orders_queue: false,
            part: Placement::default(),
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
        let view = FleetView::new(HardwareProfile::default(), RouteLimits::default(), Admission::default());
        assert_eq!(view.report(report(2, 10, 200), Timestamp(1)), Receipt::Accepted);
        assert_eq!(view.report(report(1, 10, 100), Timestamp(2)), Receipt::Stale);
        assert_eq!(view.report(report(2, 10, 300), Timestamp(3)), Receipt::Stale);
        assert_eq!(queue(&view), [200]);
    }

    #[test]
    fn a_restart_resets_the_sequence() {
        let view = FleetView::new(HardwareProfile::default(), RouteLimits::default(), Admission::default());
        assert_eq!(view.report(report(900, 10, 900), Timestamp(1)), Receipt::Accepted);
        assert_eq!(view.report(report(1, 20, 100), Timestamp(2)), Receipt::Accepted);
        assert_eq!(view.report(report(901, 10, 901), Timestamp(3)), Receipt::Stale, "the old process");
        assert_eq!(queue(&view), [100]);
    }

    #[test]
    fn only_a_new_start_sets_the_join_time() {
        let view = FleetView::new(HardwareProfile::default(), RouteLimits::default(), Admission::default());
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
            "the new start, unaffected by late reports of the old process"
        );
    }

    #[test]
    fn a_leaving_instance_stays_away_until_it_starts_again() {
        let view = FleetView::new(HardwareProfile::default(), RouteLimits::default(), Admission::default());
        assert_eq!(view.report(report(1, 10, 1), Timestamp(1)), Receipt::Accepted);
        assert_eq!(
            view.report(LoadReport { leaving: true, ..report(2, 10, 1) }, Timestamp(2)),
            Receipt::Accepted
        );
        assert_eq!(queue(&view), [0u64; 0]);
        assert_eq!(view.report(report(1, 10, 1), Timestamp(3)), Receipt::Stale);
        assert_eq!(view.report(report(1, 30, 1), Timestamp(4)), Receipt::Accepted);
        assert_eq!(queue(&view), [1]);
    }

    #[test]
    fn link_measurements_end_with_their_process() {
        let view = FleetView::new(HardwareProfile::default(), RouteLimits::default(), Admission::default());
        let (bytes, stream) = (100_000_000, Duration::from_millis(100));
        let sample = LinkSample { fetches: 1, bytes, stream, latency: Duration::ZERO };
        let link = |node, path| {
            let key = LinkKey { path: Some(path), tier: Some(Tier::Dram) };
            LinkMeasurement { node: NodeId(node), epoch: Epoch(1), sample, key }
        };
        let with = |sequence, started_us| LoadReport {
            node: Some(NodeId(2)),
            links: vec![link(1, LinkPath::Quic), link(2, LinkPath::Quic)],
            ..report(sequence, started_us, 1)
        };
        let price = |node, is_own, path| {
            let NodeLinkStats { remote: afar, local: near } =
                view.link_stats(NodeId(node), Epoch(1), Timestamp(1));
            let stats = if is_own { near } else { afar }?;
            let price = stats.price(
                Tier::Dram,
                ReadPath { is_local: is_own, path: Some(path) },
                &HardwareProfile::default(),
            );
            (price.basis != PriceBasis::Profile).then_some(price.speed.bytes_per_s)
        };
        let rates = |path| [price(1, false, path), price(2, false, path), price(2, true, path)];
        let local = link(1, LinkPath::SharedMemory);
        view.report(LoadReport { node: None, links: vec![local], ..report(1, 5, 1) }, Timestamp(1));
        assert_eq!(rates(LinkPath::Quic), [None; 3], "shared memory does not predict the network");
        assert_eq!(rates(LinkPath::SharedMemory)[0], Some(1_000_000_000));
        view.report(with(1, 10), Timestamp(1));
        let expected = [Some(1_000_000_000), None, Some(1_000_000_000)];
        assert_eq!(rates(LinkPath::Quic), expected, "an instance's own node is not measured as remote");
        assert_eq!(rates(LinkPath::SharedMemory), [None; 3], "ended with the process that measured");
        assert_eq!(view.report(with(1, 10), Timestamp(1)), Receipt::Stale);
        view.report(report(1, 20, 1), Timestamp(1));
        assert_eq!(rates(LinkPath::Quic), [None; 3]);
        view.report(with(2, 20), Timestamp(1));
        assert_eq!(rates(LinkPath::Quic)[0], Some(1_000_000_000));
        view.report(LoadReport { leaving: true, ..report(3, 20, 1) }, Timestamp(1));
        assert_eq!((rates(LinkPath::Quic)[0], view.started_us(InstanceId(1))), (None, Some(20)));
    }

    /// Decides on this many prefill tokens, for a member or on a tenant's share.
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
            queue_priority: Default::default(),
            is_untokenized: false,
        };
        let matched = PrefixMatch::default();
        let choose =
            |fleet: &Fleet, _: QueuePriority| schedule::choose(&request, &matched, fleet, Timestamp(2));
        let claim = Claim { share: share.map(TenantId), tenant: TenantId(3), priority: 0, ttft_max_us: None };
        view.decide(claim, Timestamp(2), choose).map(drop)
    }

    #[test]
    fn a_rejected_request_gets_a_reason_and_is_not_counted() {
        let view = FleetView::new(HardwareProfile::default(), RouteLimits::default(), Admission::default());
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
                queue_priority: Default::default(),
                is_untokenized: false,
            };
            let matched = PrefixMatch::default();
            let eligible = InstanceFilter { candidates: among, ..InstanceFilter::default() };
            let choose = |fleet: &Fleet, _: QueuePriority| {
                schedule::choose_filtered(&request, &matched, eligible, fleet, Timestamp(2))
            };
            let ttft_max_us = Some(limit_s * 1_000_000);
            let claim = Claim { share: None, tenant: TenantId(3), priority: 0, ttft_max_us };
            view.decide(claim, Timestamp(2), choose).map(drop).map_err(|error| error.to_string())
        };
        let routed = || view.instances()[0].instance.load.routed;
        let late = decide(5_000, 2, None).expect_err("rejected");
        says("a request that would come too late", &late, &[]);
        says("a request without an eligible instance", &decide(1, 2, Some(&[])).expect_err("rejected"), &[]);
        assert_eq!(routed(), 0);
        for _ in 0..6 {
            decide(1_000, 10, None).expect("admitted");
        }
        says("a request that others go before", &decide(1_000, 10, None).expect_err("rejected"), &[]);
        assert_eq!(routed(), 6);
    }

    #[test]
    fn only_members_can_fill_a_queue() {
        let view = FleetView::new(HardwareProfile::default(), RouteLimits::default(), Admission::default());
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
        assert_eq!(
            (routed().routed_tokens, routed().routed),
            (1_000, 1),
            "within the share it counts in full"
        );
        decide(&view, None, 4 << 20).expect("there is room");
        assert!(decide(&view, None, 1).is_err(), "a member's decisions fill the queue");
    }

    #[test]
    fn instances_are_bounded() {
        let view = FleetView::new(HardwareProfile::default(), RouteLimits::default(), Admission::default());
        for number in 0..INSTANCES_MAX {
            let instance = InstanceId(u32::try_from(number).expect("a small number"));
            assert_eq!(
                view.report(LoadReport { instance, ..report(1, 1, 1) }, Timestamp(1)),
                Receipt::Accepted
            );
        }
        let one_more = LoadReport { instance: InstanceId(u32::MAX), ..report(1, 1, 1) };
        assert_eq!(view.report(one_more.clone(), Timestamp(1)), Receipt::Full);
        let later = Timestamp(1).after(FORGET_AFTER);
        assert_eq!(view.report(report(2, 1, 1), later), Receipt::Accepted);
        assert_eq!(view.report(one_more, later), Receipt::Accepted, "silent instances are forgotten");
        assert_eq!(queue(&view).len(), 2);
    }
}
