//! Explains identity mismatches: which fields differ between instances, nodes and the identity
//! under which this router hashes.
//!
//! Not here: refusing another identity (`server`), and manifests themselves (`kv_core::prefix`).
//! Sending a manifest is optional: digests are compared, and only they are shown if no manifest is
//! known.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{IdentityDigest, InstanceId, Timestamp};
use kv_core::prefix::{IdentityManifest, ManifestDifference};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tonic::Request;

use crate::clock::Clock;
use crate::groups::Groups;
use crate::raft::network::Peers;
use crate::view::fleet::INSTANCES_MAX;

/// Longest wait for nodes' answers.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Nodes asked at once: all keep the same identity, and one may not answer.
const ASKED_MAX: usize = 3;

/// Pause before nodes are asked again after none answered, since a refused caller may retry a
/// thousand times a second.
const ASK_INTERVAL: Duration = Duration::from_secs(2);

/// Limit on the description in one answer, bytes: it travels in headers, which have a limit of
/// their own.
const DESCRIPTION_BYTES_MAX: usize = 1_024;

/// A manifest and its digest.
#[derive(Clone, Debug, PartialEq)]
struct KnownManifest {
    digest: IdentityDigest,
    manifest: IdentityManifest,
}

impl KnownManifest {
    fn new(manifest: IdentityManifest) -> KnownManifest {
        KnownManifest { digest: manifest.digest(), manifest }
    }
}

/// The nodes' manifest, if known.
#[derive(Default)]
struct NodeManifest {
    known: Option<KnownManifest>,
    asked: Option<Timestamp>,
}

impl NodeManifest {
    fn known(&self, identity: IdentityDigest) -> Option<IdentityManifest> {
        self.known.as_ref().filter(|known| known.digest == identity).map(|known| known.manifest.clone())
    }

    /// Returns whether nodes may be asked now; if so, records that they are.
    fn may_ask(&mut self, now: Timestamp) -> bool {
        let may = self.asked.is_none_or(|asked| now.since(asked) >= ASK_INTERVAL);
        if may {
            self.asked = Some(now);
        }
        may
    }
}

/// Known manifests.
pub(crate) struct Manifests {
    /// The identity of `engines.identity`.
    engines: KnownManifest,
    instances: Mutex<BTreeMap<InstanceId, KnownManifest>>,
    nodes: Mutex<NodeManifest>,
    /// Nodes' identity of the last logged mismatch warning.
    warned: Mutex<Option<IdentityDigest>>,
    groups: Groups,
    peers: Peers,
    clock: Clock,
}

impl Manifests {
    pub(crate) fn new(engines: IdentityManifest, groups: Groups, peers: Peers, clock: Clock) -> Arc<Self> {
        let (instances, nodes, warned) = Default::default();
        Arc::new(Self {
            engines: KnownManifest::new(engines),
            instances,
            nodes,
            warned,
            groups,
            peers,
            clock,
        })
    }

    /// Records the manifest of an instance. `None` forgets an earlier one, since the instance may
    /// have changed.
    pub(crate) fn record_instance(&self, instance: InstanceId, manifest: Option<IdentityManifest>) {
        record_report(&mut self.instances.lock(), instance, manifest);
    }

    /// Records the manifest of a node that was admitted under this identity.
    pub(crate) fn record_node(&self, identity: IdentityDigest, manifest: Option<&pb::Manifest>) {
        if let Some(known) = manifest.and_then(parse).filter(|known| known.digest == identity) {
            self.nodes.lock().known = Some(known);
        }
    }

    /// Whether none of the identities that prompts are hashed under is the nodes'. Logs a warning
    /// once per identity of the nodes.
    pub(crate) fn are_foreign_hashes(&self, hashed_under: &[IdentityDigest], nodes: IdentityDigest) -> bool {
        if !are_all_foreign(hashed_under, nodes) {
            return false;
        }
        if self.warned.lock().replace(nodes) != Some(nodes) {
            tracing::warn!(
                own = %self.engines.digest,
                %nodes,
                "prompts are hashed under another identity than the nodes', so nodes hold no block with \
                 these hashes: set engines.identity to the nodes' identity; `kvfleet why` of a request shows \
                 the differences"
            );
        }
        true
    }

    /// Describes how a caller's identity differs from the nodes', the caller's value first. `None`
    /// unless both manifests are known.
    pub(crate) async fn differences_from_nodes(self: &Arc<Self>, identity: IdentityDigest) -> Option<String> {
        let manifest = manifest_of(&self.instances.lock(), &self.engines, identity)?;
        describe(&manifest.differences(&self.node_manifest().await?))
    }

    /// As [`Manifests::differences_from_nodes`], with the manifest that the caller sent for its
    /// digest.
    pub(crate) async fn reported_differences_from_nodes(
        self: &Arc<Self>,
        identity: IdentityDigest,
        manifest: Option<&pb::Manifest>,
    ) -> Option<String> {
        let theirs = parse(manifest?).filter(|known| known.digest == identity)?;
        describe(&theirs.manifest.differences(&self.node_manifest().await?))
    }

    /// Describes how the nodes' identity differs from an instance's, the nodes' value first.
    pub(crate) async fn differences_from_instance(self: &Arc<Self>, instance: InstanceId) -> Option<String> {
        let theirs = self.instances.lock().get(&instance)?.manifest.clone();
        describe(&self.node_manifest().await?.differences(&theirs))
    }

    /// Describes how the configured identity differs from the nodes', the configured value first.
    pub(crate) async fn engine_differences_from_nodes(self: &Arc<Self>) -> Option<String> {
        describe(&self.engines.manifest.differences(&self.node_manifest().await?))
    }

    /// The nodes' manifest; asks some nodes if it is unknown.
    async fn node_manifest(self: &Arc<Self>) -> Option<IdentityManifest> {
        let (identity, addresses) = self.live_nodes()?;
        if let Some(known) = self.nodes.lock().known(identity) {
            return Some(known);
        }
        if addresses.is_empty() || !self.nodes.lock().may_ask(self.clock.now()) {
            return None;
        }
        // In its own task, so that a caller that gives up does not cancel the answer for others.
        let own = Arc::clone(self);
        tokio::spawn(async move { own.ask(identity, addresses).await }).await.ok()?
    }

    /// The nodes' identity, and control addresses of some live nodes.
    fn live_nodes(&self) -> Option<(IdentityDigest, Vec<String>)> {
        let control = self.groups.control().published.read();
        let live = control.index.nodes().filter(|state| state.live).take(ASKED_MAX);
        let addresses = live.map(|state| state.record.control_address.clone()).collect();
        Some((control.index.identity()?, addresses))
    }

    async fn ask(&self, identity: IdentityDigest, addresses: Vec<String>) -> Option<IdentityManifest> {
        let mut asked = JoinSet::new();
        for address in addresses {
            let Ok(channel) = self.peers.node_channel(&address) else { continue };
            asked.spawn(async move {
                let mut request = Request::new(pb::NodeStatusRequest {});
                request.set_timeout(ANSWER_TIMEOUT);
                let reply = NodeControlClient::new(channel).node_status(request).await.ok()?;
                parse(&reply.into_inner().manifest?)
            });
        }
        let first = async {
            while let Some(answer) = asked.join_next().await {
                if let Some(known) = answer.ok().flatten().filter(|known| known.digest == identity) {
                    return Some(known);
                }
            }
            None
        };
        let known = tokio::time::timeout(ANSWER_TIMEOUT, first).await.ok()??;
        self.nodes.lock().known = Some(known.clone());
        Some(known.manifest)
    }
}

/// Parses a received manifest; `None` if it is invalid.
fn parse(manifest: &pb::Manifest) -> Option<KnownManifest> {
    convert::manifest_from_pb(manifest.clone()).ok().map(KnownManifest::new)
}

fn record_report(
    instances: &mut BTreeMap<InstanceId, KnownManifest>,
    instance: InstanceId,
    manifest: Option<IdentityManifest>,
) {
    let Some(manifest) = manifest else {
        instances.remove(&instance);
        return;
    };
    // Instances repeat it in every report.
    if instances.get(&instance).is_some_and(|known| known.manifest == manifest) {
        return;
    }
    // At the limit all are dropped: departed instances do not justify an eviction order.
    if instances.len() >= INSTANCES_MAX && !instances.contains_key(&instance) {
        instances.clear();
    }
    instances.insert(instance, KnownManifest::new(manifest));
}

/// The manifest of an identity under any weights, if an instance or the configuration has it.
fn manifest_of(
    instances: &BTreeMap<InstanceId, KnownManifest>,
    engines: &KnownManifest,
    identity: IdentityDigest,
) -> Option<IdentityManifest> {
    let mut all = instances.values().chain([engines]);
    let known = all.find(|known| identity.generation_relative_to(known.digest).is_some())?;
    Some(known.manifest.clone())
}

fn are_all_foreign(all: &[IdentityDigest], nodes: IdentityDigest) -> bool {
    !all.is_empty() && all.iter().all(|one| one.generation_relative_to(nodes).is_none())
}

fn describe(differences: &[ManifestDifference]) -> Option<String> {
    let mut text = String::new();
    for difference in differences {
        let field = difference.to_string();
        if text.len() + field.len() > DESCRIPTION_BYTES_MAX {
            // The name alone is still useful.
            text.push_str(if text.is_empty() { "" } else { ", " });
            text.push_str(difference.field);
            continue;
        }
        text.push_str(if text.is_empty() { "" } else { ", " });
        text.push_str(&field);
    }
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::id::Generation;

    use super::*;

    fn of_dtype(dtype: &str) -> IdentityManifest {
        IdentityManifest { dtype: dtype.to_owned(), ..IdentityManifest::default() }
    }

    #[test]
    fn manifests_are_found_by_digest_under_any_weights() {
        let (bf16, fp8, fp4) = (of_dtype("bf16"), of_dtype("fp8"), of_dtype("fp4"));
        let (engines, mut instances) = (KnownManifest::new(bf16.clone()), BTreeMap::new());
        assert_eq!(manifest_of(&instances, &engines, fp8.digest()), None);
        record_report(&mut instances, InstanceId(1), Some(fp8.clone()));
        let digest = fp8.digest().with_generation(Generation(3));
        assert_eq!(manifest_of(&instances, &engines, digest), Some(fp8.clone()));
        assert_eq!(manifest_of(&instances, &engines, bf16.digest()), Some(bf16), "from the configuration");
        record_report(&mut instances, InstanceId(1), Some(fp4.clone()));
        assert_eq!(manifest_of(&instances, &engines, fp8.digest()), None);
        assert_eq!(instances[&InstanceId(1)].manifest, fp4);
        record_report(&mut instances, InstanceId(1), None);
        assert_eq!(instances, BTreeMap::new(), "an instance without a manifest may have changed");
    }

    #[test]
    fn remembered_instances_are_bounded() {
        let mut instances = BTreeMap::new();
        for instance in 0..3 * INSTANCES_MAX as u32 {
            record_report(&mut instances, InstanceId(instance), Some(of_dtype("fp8")));
            assert!(instances.len() <= INSTANCES_MAX && instances.contains_key(&InstanceId(instance)));
        }
    }

    #[test]
    fn nodes_are_asked_with_a_pause_until_known() {
        let (bf16, fp8) = (of_dtype("bf16"), of_dtype("fp8"));
        let (mut nodes, at) = (NodeManifest::default(), |ms: u64| Timestamp(1_000 * ms));
        let asked = [5, 2_004, 2_005, 2_006, 9_000].map(|ms| nodes.may_ask(at(ms)));
        assert_eq!(asked, [true, false, true, false, true]);
        assert_eq!(nodes.known(bf16.digest()), None);
        nodes.known = Some(KnownManifest::new(bf16.clone()));
        assert_eq!((nodes.known(bf16.digest()), nodes.known(fp8.digest())), (Some(bf16), None));
    }

    #[test]
    fn hashes_are_foreign_if_no_identity_matches_the_nodes() {
        let [bf16, fp8, fp4] = ["bf16", "fp8", "fp4"].map(|dtype| of_dtype(dtype).digest());
        assert!(!are_all_foreign(&[], bf16), "no identity is known");
        assert!(!are_all_foreign(&[bf16], bf16) && !are_all_foreign(&[fp8, bf16], bf16));
        assert!(
            !are_all_foreign(&[bf16.with_generation(Generation(3))], bf16),
            "other weights of the same model"
        );
        assert!(are_all_foreign(&[fp8], bf16) && are_all_foreign(&[fp8, fp4], bf16));
    }

    #[test]
    fn differing_fields_are_described() {
        let (bf16, fp8) = (of_dtype("bf16"), IdentityManifest { tp: 2, ..of_dtype("fp8") });
        assert_eq!(
            describe(&fp8.differences(&bf16)).unwrap(),
            r#"dtype ("fp8" and not "bf16"), tp (2 and not 1)"#
        );
        assert_eq!(describe(&bf16.differences(&bf16)), None);
    }

    #[test]
    fn long_values_are_described_by_field_name_only() {
        let long = || "x".repeat(700);
        let other = IdentityManifest { model: long(), rope: long(), tp: 2, ..IdentityManifest::default() };
        let text = describe(&other.differences(&IdentityManifest::default())).unwrap();
        assert!(text.starts_with("model (\"xxx") && text.ends_with(", tp (2 and not 1), rope"), "{text}");
        assert!(text.len() < DESCRIPTION_BYTES_MAX);
    }
}
