//! In which fields identities differ: instances say what they make, nodes what they keep, and a router has in its configuration under what it hashes.
//!
//! Not here: refusing another identity (`server`), and manifests themselves (`kv_core::prefix`). Nobody has to say anything
//! of his manifest: digests are what is compared, and all that is told where no more is known.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{IdentityDigest, InstanceId, Timestamp};
use kv_core::prefix::{Difference, IdentityManifest};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tonic::Request;

use crate::clock::Clock;
use crate::groups::Groups;
use crate::raft::network::Peers;
use crate::view::fleet::INSTANCES_MAX;

/// Longest that nodes are waited for.
const ANSWER_MAX: Duration = Duration::from_millis(500);

/// Nodes that are asked, all at once: they keep the same, and one may be silent.
const ASKED_MAX: usize = 3;

/// Where none of them told, none is asked again for as long: who is refused may ask a thousand times a second.
const ASK_EVERY: Duration = Duration::from_secs(2);

/// What is told of fields in one answer, in bytes: headers have a limit, and a text that passes it is an answer that does not come.
const TOLD_BYTES_MAX: usize = 1_024;

/// A manifest and its digest.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    digest: IdentityDigest,
    manifest: IdentityManifest,
}

impl Known {
    fn new(manifest: IdentityManifest) -> Known {
        Known { digest: manifest.digest(), manifest }
    }
}

/// What the nodes keep, as far as they told.
#[derive(Default)]
struct Nodes {
    known: Option<Known>,
    asked: Option<Timestamp>,
}

impl Nodes {
    fn known(&self, identity: IdentityDigest) -> Option<IdentityManifest> {
        self.known.as_ref().filter(|known| known.digest == identity).map(|known| known.manifest.clone())
    }

    /// Whether some may be asked now, which is taken for done.
    fn may_ask(&mut self, now: Timestamp) -> bool {
        let may = self.asked.is_none_or(|asked| now.since(asked) >= ASK_EVERY);
        if may {
            self.asked = Some(now);
        }
        may
    }
}

/// Whose manifests are known here.
pub(crate) struct Manifests {
    /// That of the configuration.
    engines: Known,
    instances: Mutex<BTreeMap<InstanceId, Known>>,
    nodes: Mutex<Nodes>,
    /// Of which identity of the nodes it was said that what is hashed here is of another.
    warned: Mutex<Option<IdentityDigest>>,
    groups: Groups,
    peers: Peers,
    clock: Clock,
}

impl Manifests {
    pub(crate) fn new(engines: IdentityManifest, groups: Groups, peers: Peers, clock: Clock) -> Arc<Self> {
        let (instances, nodes, warned) = Default::default();
        Arc::new(Self { engines: Known::new(engines), instances, nodes, warned, groups, peers, clock })
    }

    /// Takes what an instance says that it makes. One that says nothing of it any more may make something else.
    pub(crate) fn reported(&self, instance: InstanceId, manifest: Option<IdentityManifest>) {
        told_by(&mut self.instances.lock(), instance, manifest);
    }

    /// Takes what a node says that it keeps, which was let in under this identity.
    pub(crate) fn joined(&self, identity: IdentityDigest, manifest: Option<&pb::Manifest>) {
        if let Some(known) = manifest.and_then(read).filter(|known| known.digest == identity) {
            self.nodes.lock().known = Some(known);
        }
    }

    /// Whether none of the identities under which prompts are hashed here is the nodes'. Said in the log once for each that they have.
    pub(crate) fn are_foreign(&self, hashed_under: &[IdentityDigest], nodes: IdentityDigest) -> bool {
        if !are_others(hashed_under, nodes) {
            return false;
        }
        if self.warned.lock().replace(nodes) != Some(nodes) {
            tracing::warn!(
                own = %self.engines.digest,
                %nodes,
                "prompts are hashed under another identity than the nodes', and by these hashes nothing is found in them: write engines.identity as the nodes' identity; `kvfleet why` of a request says what differs"
            );
        }
        true
    }

    /// The fields in which an identity that a caller named differs from the nodes', if both manifests are known: its own first.
    pub(crate) async fn differing(self: &Arc<Self>, identity: IdentityDigest) -> Option<String> {
        let manifest = with(&self.instances.lock(), &self.engines, identity)?;
        told(&manifest.differences(&self.of_nodes().await?))
    }

    /// The same of a node that says whose digest that is.
    pub(crate) async fn differing_as_told(
        self: &Arc<Self>,
        identity: IdentityDigest,
        manifest: Option<&pb::Manifest>,
    ) -> Option<String> {
        let theirs = read(manifest?).filter(|known| known.digest == identity)?;
        told(&theirs.manifest.differences(&self.of_nodes().await?))
    }

    /// The fields in which the nodes' identity differs from an instance's: the nodes' own first.
    pub(crate) async fn of_nodes_and(self: &Arc<Self>, instance: InstanceId) -> Option<String> {
        let theirs = self.instances.lock().get(&instance)?.manifest.clone();
        told(&self.of_nodes().await?.differences(&theirs))
    }

    /// The fields in which the configuration's identity differs from the nodes': its own first.
    pub(crate) async fn of_engines_and_nodes(self: &Arc<Self>) -> Option<String> {
        told(&self.engines.manifest.differences(&self.of_nodes().await?))
    }

    /// What nodes keep: some are asked when somebody first has to be told.
    async fn of_nodes(self: &Arc<Self>) -> Option<IdentityManifest> {
        let (identity, addresses) = self.live_nodes()?;
        if let Some(known) = self.nodes.lock().known(identity) {
            return Some(known);
        }
        if addresses.is_empty() || !self.nodes.lock().may_ask(self.clock.now()) {
            return None;
        }
        // In a task of its own: a caller that gives up takes nothing from others.
        let own = Arc::clone(self);
        tokio::spawn(async move { own.ask(identity, addresses).await }).await.ok()?
    }

    /// The identity that nodes have, and where some of them answer.
    fn live_nodes(&self) -> Option<(IdentityDigest, Vec<String>)> {
        let control = self.groups.control().published.read();
        let live = control.index.nodes().filter(|state| state.live).take(ASKED_MAX);
        let addresses = live.map(|state| state.record.control_address.clone()).collect();
        Some((control.index.identity()?, addresses))
    }

    async fn ask(&self, identity: IdentityDigest, addresses: Vec<String>) -> Option<IdentityManifest> {
        let mut asked = JoinSet::new();
        for address in addresses {
            let Ok(channel) = self.peers.channel(&address) else { continue };
            asked.spawn(async move {
                let mut request = Request::new(pb::NodeStatusRequest {});
                request.set_timeout(ANSWER_MAX);
                let reply = NodeControlClient::new(channel).node_status(request).await.ok()?;
                read(&reply.into_inner().manifest?)
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
        let known = tokio::time::timeout(ANSWER_MAX, first).await.ok()??;
        self.nodes.lock().known = Some(known.clone());
        Some(known.manifest)
    }
}

/// A manifest that somebody tells: one that cannot be read is none.
fn read(manifest: &pb::Manifest) -> Option<Known> {
    convert::manifest_from_pb(manifest.clone()).ok().map(Known::new)
}

fn told_by(
    instances: &mut BTreeMap<InstanceId, Known>,
    instance: InstanceId,
    manifest: Option<IdentityManifest>,
) {
    let Some(manifest) = manifest else {
        instances.remove(&instance);
        return;
    };
    // It says so with every report.
    if instances.get(&instance).is_some_and(|known| known.manifest == manifest) {
        return;
    }
    // Those that have gone are not worth a rule for which goes first.
    if instances.len() >= INSTANCES_MAX && !instances.contains_key(&instance) {
        instances.clear();
    }
    instances.insert(instance, Known::new(manifest));
}

/// The manifest of an identity under any weights, if an instance or the configuration has it.
fn with(
    instances: &BTreeMap<InstanceId, Known>,
    engines: &Known,
    identity: IdentityDigest,
) -> Option<IdentityManifest> {
    let mut all = instances.values().chain([engines]);
    let known = all.find(|known| identity.generation_over(known.digest).is_some())?;
    Some(known.manifest.clone())
}

fn are_others(all: &[IdentityDigest], nodes: IdentityDigest) -> bool {
    !all.is_empty() && all.iter().all(|one| one.generation_over(nodes).is_none())
}

fn told(differences: &[Difference]) -> Option<String> {
    let mut text = String::new();
    for difference in differences {
        let field = difference.to_string();
        if text.len() + field.len() > TOLD_BYTES_MAX {
            // The name alone tells more than nothing.
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
    fn a_manifest_is_found_by_its_digest_under_any_weights_and_as_it_was_told_last() {
        let (bf16, fp8, fp4) = (of_dtype("bf16"), of_dtype("fp8"), of_dtype("fp4"));
        let (engines, mut instances) = (Known::new(bf16.clone()), BTreeMap::new());
        assert_eq!(with(&instances, &engines, fp8.digest()), None);
        told_by(&mut instances, InstanceId(1), Some(fp8.clone()));
        let digest = fp8.digest().of_generation(Generation(3));
        assert_eq!(with(&instances, &engines, digest), Some(fp8.clone()));
        assert_eq!(with(&instances, &engines, bf16.digest()), Some(bf16), "the configuration's");
        told_by(&mut instances, InstanceId(1), Some(fp4.clone()));
        assert_eq!(with(&instances, &engines, fp8.digest()), None);
        assert_eq!(instances[&InstanceId(1)].manifest, fp4);
        told_by(&mut instances, InstanceId(1), None);
        assert_eq!(instances, BTreeMap::new(), "who says nothing of it any more may make something else");
    }

    #[test]
    fn instances_without_end_are_not_all_remembered() {
        let mut instances = BTreeMap::new();
        for instance in 0..3 * INSTANCES_MAX as u32 {
            told_by(&mut instances, InstanceId(instance), Some(of_dtype("fp8")));
            assert!(instances.len() <= INSTANCES_MAX && instances.contains_key(&InstanceId(instance)));
        }
    }

    #[test]
    fn nodes_are_asked_now_and_then_until_they_told_and_again_when_they_are_others() {
        let (bf16, fp8) = (of_dtype("bf16"), of_dtype("fp8"));
        let (mut nodes, at) = (Nodes::default(), |ms: u64| Timestamp(1_000 * ms));
        let asked = [5, 2_004, 2_005, 2_006, 9_000].map(|ms| nodes.may_ask(at(ms)));
        assert_eq!(asked, [true, false, true, false, true]);
        assert_eq!(nodes.known(bf16.digest()), None);
        nodes.known = Some(Known::new(bf16.clone()));
        assert_eq!((nodes.known(bf16.digest()), nodes.known(fp8.digest())), (Some(bf16), None));
    }

    #[test]
    fn prompts_are_of_another_identity_where_none_of_those_they_are_hashed_under_is_the_nodes() {
        let [bf16, fp8, fp4] = ["bf16", "fp8", "fp4"].map(|dtype| of_dtype(dtype).digest());
        assert!(!are_others(&[], bf16), "nothing is known");
        assert!(!are_others(&[bf16], bf16) && !are_others(&[fp8, bf16], bf16));
        assert!(!are_others(&[bf16.of_generation(Generation(3))], bf16), "other weights of it");
        assert!(are_others(&[fp8], bf16) && are_others(&[fp8, fp4], bf16));
    }

    #[test]
    fn fields_that_differ_are_told_and_manifests_that_are_equal_tell_nothing() {
        let (bf16, fp8) = (of_dtype("bf16"), IdentityManifest { tp: 2, ..of_dtype("fp8") });
        assert_eq!(
            told(&fp8.differences(&bf16)).unwrap(),
            r#"dtype ("fp8" and not "bf16"), tp (2 and not 1)"#
        );
        assert_eq!(told(&bf16.differences(&bf16)), None);
    }

    #[test]
    fn of_texts_that_would_fill_an_answer_the_fields_alone_are_told() {
        let long = || "x".repeat(700);
        let other = IdentityManifest { model: long(), rope: long(), tp: 2, ..IdentityManifest::default() };
        let text = told(&other.differences(&IdentityManifest::default())).unwrap();
        assert!(text.starts_with("model (\"xxx") && text.ends_with(", tp (2 and not 1), rope"), "{text}");
        assert!(text.len() < TOLD_BYTES_MAX);
    }
}
