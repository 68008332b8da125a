//! The soft half of the view: instances and their load, as reported to this router.
//!
//! Reports are numbered; an older one is ignored, and a new start time means a new process whose numbers
//! begin again. Not here: the choice (`kv_core::schedule`) and the replicated half (`published.rs`). Lost
//! on restart; the next report rebuilds it.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{InstanceId, NodeId, Timestamp};
use kv_core::schedule::{Decision, Fleet, HardwareProfile, Instance, LiveNode, Load, record};
use parking_lot::RwLock;

/// Instances known at once: far above any fleet, so that a reporter gone mad cannot fill the memory.
pub(crate) const INSTANCES_MAX: usize = 4096;

/// Silence after which an instance may be forgotten to make room: far beyond any delay of its reports, so
/// that a late one of a process that ended is still known to be old.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// One report of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) instance: InstanceId,
    pub(crate) address: String,
    pub(crate) node: Option<NodeId>,
    pub(crate) load: Load,
    pub(crate) sequence: u64,
    pub(crate) started_us: u64,
    pub(crate) leaving: bool,
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
    heard: Timestamp,
}

#[derive(Default)]
struct Soft {
    fleet: Fleet,
    known: BTreeMap<InstanceId, Known>,
}

impl Soft {
    /// Makes room: forgets instances that left or fell silent long ago.
    fn forget_silent(&mut self, now: Timestamp) {
        let Soft { fleet, known } = self;
        known.retain(|instance, one| {
            let stays = now.since(one.heard) < FORGOTTEN_AFTER;
            if !stays {
                fleet.remove_instance(*instance);
            }
            stays
        });
    }
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
    pub(crate) fn new(profile: HardwareProfile) -> FleetView {
        FleetView { soft: RwLock::new(Soft { fleet: Fleet::new(profile), known: BTreeMap::new() }) }
    }

    /// Takes a report, unless a newer one was seen.
    pub(crate) fn report(&self, report: Report, now: Timestamp) -> Receipt {
        let mut soft = self.soft.write();
        if soft.known.len() >= INSTANCES_MAX && !soft.known.contains_key(&report.instance) {
            soft.forget_silent(now);
        }
        let count = soft.known.len();
        match soft.known.get(&report.instance) {
            Some(known) if (report.started_us, report.sequence) <= (known.started_us, known.sequence) => {
                return Receipt::Old;
            }
            None if count >= INSTANCES_MAX => return Receipt::Full,
            _ => {}
        }
        if report.leaving {
            soft.fleet.remove_instance(report.instance);
        } else {
            let Report { instance, node, load, .. } = report;
            soft.fleet.put_instance(Instance { id: instance, node, load, reported_at: now });
        }
        let Report { instance, address, sequence, started_us, .. } = report;
        soft.known.insert(instance, Known { address, sequence, started_us, heard: now });
        Receipt::Accepted
    }

    /// Replaces the live nodes.
    pub(crate) fn set_nodes(&self, nodes: Vec<LiveNode>) {
        self.soft.write().fleet.set_nodes(nodes);
    }

    /// Runs a choice on the fleet, notes it, and adds the address of the chosen instance.
    pub(crate) fn decide<E>(
        &self,
        choose: impl FnOnce(&Fleet) -> Result<Decision, E>,
    ) -> Result<(Decision, String), E> {
        let decision = choose(&self.soft.read().fleet)?;
        let mut soft = self.soft.write();
        if let Some(load) = soft.fleet.load_mut(decision.instance) {
            record(load, &decision);
        }
        let address = soft.known.get(&decision.instance).map(|known| known.address.clone());
        Ok((decision, address.unwrap_or_default()))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn report(sequence: u64, started_us: u64, queue_tokens: u64) -> Report {
        Report {
            instance: InstanceId(1),
            address: "i:1".into(),
            node: None,
            load: Load::reported(queue_tokens, 0, 0),
            sequence,
            started_us,
            leaving: false,
        }
    }

    fn queue(view: &FleetView) -> Vec<u64> {
        view.instances().iter().map(|known| known.instance.load.queue_tokens).collect()
    }

    #[test]
    fn older_reports_are_ignored() {
        let view = FleetView::new(HardwareProfile::default());
        assert_eq!(view.report(report(2, 10, 200), Timestamp(1)), Receipt::Accepted);
        assert_eq!(view.report(report(1, 10, 100), Timestamp(2)), Receipt::Old);
        assert_eq!(view.report(report(2, 10, 300), Timestamp(3)), Receipt::Old);
        assert_eq!(queue(&view), [200]);
    }

    #[test]
    fn a_restart_begins_anew() {
        let view = FleetView::new(HardwareProfile::default());
        assert_eq!(view.report(report(900, 10, 900), Timestamp(1)), Receipt::Accepted);
        assert_eq!(view.report(report(1, 20, 100), Timestamp(2)), Receipt::Accepted);
        assert_eq!(view.report(report(901, 10, 901), Timestamp(3)), Receipt::Old, "the dead process");
        assert_eq!(queue(&view), [100]);
    }

    #[test]
    fn a_leaving_instance_stays_away_until_it_starts_again() {
        let view = FleetView::new(HardwareProfile::default());
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
    fn instances_are_bounded() {
        let view = FleetView::new(HardwareProfile::default());
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
