//! Reasons for missing blocks, each provoked in a cluster of real processes and explained by
//! `kvfleet why`.
//!
//! Not here: that routers explain every reason (`router/tests/cluster/why.rs`), and the texts
//! against the document (`cli/src/why.rs`). Changed weights are in `weights.rs`, and gateways with
//! another identity in `gateway.rs`. Engines that fetch no blocks are not tested here either.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use kv_core::id::{BlockHash, Category, NodeId, RequestId, TenantId};
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet::calls::{RouterCalls, channel, run_on_instance};
use kvfleet::cluster::{ClusterShape, LocalCluster, NodeCapacity};
use kvfleet::process::Role;
use kvfleet_client::{Client, ClientConfig, RouteAnswer, RouteCall, Transport};
use kvfleet_net::certificates::Authority;
use kvfleet_net::tls;
use kvfleet_proto::pb;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{CommandOutput, Workspace, shape};

const BLOCK_TOKENS: u32 = 512;

/// Default number of blocks in a prompt.
const BLOCKS: u32 = 6;

/// Block hashes of a prompt that shares no prefix with other seeds.
fn prompt(seed: u64, blocks: u32) -> Vec<BlockHash> {
    let ids: Vec<u64> = (0..u64::from(blocks)).map(|at| seed << 32 | at).collect();
    PrefixHasher::new(&IdentityManifest::default(), &[0; 32]).chain_ids(&ids)
}

/// A cluster and a client.
struct WhyFixture {
    place: Workspace,
    cluster: LocalCluster,
    client: Client,
    routers: Vec<RouterCalls>,
    requests: Cell<u64>,
}

impl WhyFixture {
    /// Starts one router, one node and one instance.
    async fn start(capacity: NodeCapacity, change: impl FnOnce(&mut ClusterShape)) -> WhyFixture {
        let place = Workspace::new();
        let mut shape = ClusterShape { routers: 1, nodes: 1, instances: 1, ..shape(&place, capacity) };
        change(&mut shape);
        let cluster = LocalCluster::start(shape).await.unwrap();
        let (addresses, identity) = (cluster.router_addresses(), cluster.identity().unwrap());
        let client = Client::new(ClientConfig::new(addresses.clone(), identity.clone())).unwrap();
        let routers = RouterCalls::all(&addresses, &identity).unwrap();
        WhyFixture { place, cluster, client, routers, requests: Cell::new(0) }
    }

    fn run(&self, words: &[&str]) -> CommandOutput {
        let (routers, tls) = (self.cluster.router_addresses().join(","), self.cluster.certificates());
        let reach = ["--cluster", &routers, "--tls-dir", tls.to_str().unwrap()];
        tokio::task::block_in_place(|| self.place.run(&[words, &reach[..]].concat()))
    }

    /// A routing call for this prompt with a new request number.
    fn call(&self, tenant: u32, hashes: &[BlockHash]) -> RouteCall {
        let request = self.requests.get() + 1;
        self.requests.set(request);
        RouteCall {
            request: RequestId(request),
            tenant: TenantId(tenant),
            category: Category::default(),
            hashes: hashes.to_vec(),
            block_tokens: BLOCK_TOKENS,
            input_tokens: u32::try_from(hashes.len()).unwrap() * BLOCK_TOKENS,
            output_tokens: 1,
            tbt_max_us: 0,
            identity: self.cluster.shape().manifest().digest(),
            after: Vec::new(),
            fresh: true,
        }
    }

    /// Routes a request for this prompt.
    async fn route(&self, tenant: u32, hashes: &[BlockHash]) -> (u64, pb::Decision) {
        let call = self.call(tenant, hashes);
        let request = call.request.0;
        match self.client.route(call).await.unwrap() {
            RouteAnswer::Decided(decision) => (request, decision),
            other => panic!("{other:?}"),
        }
    }

    /// Runs a decided request on its instance, and saves the computed blocks as decided.
    async fn serve(&self, of: (u64, u32), hashes: &[BlockHash], decision: pb::Decision) -> pb::RunReply {
        let identity = self.cluster.identity().unwrap();
        let channel = channel(&decision.instance_address, &identity, tls::Role::Instance(None)).unwrap();
        run_on_instance(channel, run_request(of, hashes, decision)).await.unwrap()
    }

    /// Computes and saves a prompt, then waits until the index lists all its blocks.
    async fn save_prompt(&self, tenant: u32, hashes: &[BlockHash]) {
        let (request, decision) = self.route(tenant, hashes).await;
        let ran = self.serve((request, tenant), hashes, decision).await;
        assert_eq!(ran.saved_blocks as usize, hashes.len(), "{ran:?}");
        self.until_listed("the saved blocks", hashes, |listed| listed == hashes.len()).await;
    }

    /// The live node's epoch.
    async fn epoch(&self) -> Option<u64> {
        let status = self.routers[0].status().await.ok()?;
        status.nodes.iter().find(|node| node.live).map(|node| node.epoch)
    }

    /// Leading blocks of a prompt in the index, as of the latest commit.
    async fn listed(&self, hashes: &[BlockHash]) -> Option<usize> {
        let reply = self.client.lookup(hashes, Vec::new(), true).await.ok()?;
        Some(reply.runs.iter().map(|run| run.len_blocks as usize).sum())
    }

    async fn until_listed(&self, what: &str, hashes: &[BlockHash], is_so: impl Fn(usize) -> bool) {
        until(what, async || self.listed(hashes).await.filter(|listed| is_so(*listed)).map(|_| ())).await;
    }

    /// Expires the time to live of a prompt's blocks.
    fn expire(&self, hashes: &[BlockHash]) {
        let first: String = hashes[0].0.iter().map(|byte| format!("{byte:02x}")).collect();
        self.run(&["ttl", "--block", &first, "--seconds", "0"]).ok();
    }

    /// Runs a request that was decided before its promised blocks changed, and asserts its
    /// explanation.
    async fn assert_missed(
        &self,
        (request, decision): (u64, pb::Decision),
        hashes: &[BlockHash],
        (miss, reason, text): (&str, &str, &str),
    ) {
        assert_eq!(decision.fetch_blocks as usize, hashes.len(), "not all blocks were promised");
        let ran = self.serve((request, 0), hashes, decision).await;
        assert_eq!((ran.hit_blocks, &ran.misses[..]), (0, &[miss.to_owned()][..]));
        // The outcome comes with the instance's next report.
        let told = until(reason, async || self.missing_line(request, reason)).await;
        assert_eq!(told, format!("{text} ({reason})"));
    }

    /// Routes and runs a request for this prompt without saving. Returns its number and its misses.
    async fn fetch_misses(&self, hashes: &[BlockHash]) -> (u64, Vec<String>) {
        let (request, decision) = self.route(0, hashes).await;
        let ran = self.serve((request, 0), hashes, pb::Decision { save_to: None, ..decision }).await;
        assert_eq!(ran.wrong_bytes, 0, "a node served unverified bytes");
        (request, ran.misses)
    }

    /// The line of `kvfleet why` with this reason, without the block numbers.
    fn missing_line(&self, request: u64, reason: &str) -> Option<String> {
        let said = self.run(&["why", &request.to_string()]).ok();
        let line = said.lines().find(|line| line.ends_with(&format!("({reason})")))?;
        println!("{}", line.trim());
        assert!(line.starts_with("  missing  blocks "), "{said}");
        Some(line.split_once(": ").unwrap().1.to_owned())
    }

    /// Routes a request for this prompt and asserts the start of the explanation for its missing
    /// blocks.
    async fn assert_explained(&self, tenant: u32, hashes: &[BlockHash], reason: &str, text: &str) {
        let (request, _) = self.route(tenant, hashes).await;
        let told = self.missing_line(request, reason).unwrap_or_else(|| {
            let all = self.run(&["why", &request.to_string()]).all();
            panic!("{reason} is not explained: {all}")
        });
        assert!(told.starts_with(text), "{told}");
    }
}

fn run_request(
    (request, tenant): (u64, u32),
    hashes: &[BlockHash],
    decision: pb::Decision,
) -> pb::RunRequest {
    pb::RunRequest {
        request,
        tenant,
        category: None,
        hashes: hashes.iter().flat_map(|hash| hash.0).collect(),
        block_tokens: BLOCK_TOKENS,
        input_tokens: u32::try_from(hashes.len()).unwrap() * BLOCK_TOKENS,
        output_tokens: 1,
        decision: Some(decision),
        wait_save: true,
        traceparent: String::new(),
    }
}

async fn until<T>(what: &str, mut test: impl AsyncFnMut() -> Option<T>) -> T {
    let tries = async {
        loop {
            if let Some(value) = test().await {
                break value;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), tries)
        .await
        .unwrap_or_else(|_| panic!("timed out waiting: {what}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_evicted_and_slow_blocks() {
    let capacity = NodeCapacity { dram_blocks: 48, ssd_blocks: 0 };
    // Computing takes no time here, so fetches always complete. The router assumes a thousandth of
    // real compute time, 16 µs per block. Fetching 64 KiB over QUIC takes longer than that.
    let scene = WhyFixture::start(capacity, |shape| {
        shape.block_bytes = 64 << 10;
        let overrides = ["router.price_links=true", "router.time_scale=0.001"];
        shape.overrides = overrides.map(str::to_owned).to_vec();
    })
    .await;
    scene.assert_explained(0, &prompt(16, BLOCKS), "never_seen", "never seen here").await;

    let held = prompt(17, BLOCKS);
    scene.save_prompt(0, &held).await;
    // The instance reports the node's read rate after the first fetch.
    let slower = until("known links", async || {
        let (request, decision) = scene.route(0, &held).await;
        scene.serve((request, 0), &held, decision).await;
        scene.missing_line(request, "slower_than_recompute")
    })
    .await;
    assert_eq!(slower, "held, and faster to compute than to fetch (slower_than_recompute)");

    // Further prompts fill the node; the policy evicts the least recently used blocks.
    for seed in 1.. {
        assert!(seed < 50, "no block was evicted");
        scene.save_prompt(0, &prompt(1_000 + seed, BLOCKS)).await;
        if scene.listed(&held).await.is_some_and(|listed| listed < held.len()) {
            break;
        }
    }
    scene
        .assert_explained(0, &held, "evicted_room", "node-1 dropped the first of them for want of room, ")
        .await;

    let tenants = prompt(19, BLOCKS);
    scene.save_prompt(3, &tenants).await;
    scene.run(&["quota", "--tenant", "3", "--bytes", "128KiB"]).ok();
    scene.until_listed("the quota to take effect", &tenants, |listed| listed < tenants.len()).await;
    scene
        .assert_explained(
            3,
            &tenants,
            "evicted_quota",
            "node-1 dropped the first of them for its tenant's quota, ",
        )
        .await;

    let ended = prompt(20, BLOCKS);
    scene.save_prompt(0, &ended).await;
    scene.expire(&ended);
    scene.until_listed("the expiry of a time to live", &ended, |listed| listed == 0).await;
    let text = "node-1 dropped the first of them as its group's time to live was over, ";
    scene.assert_explained(0, &ended, "evicted_ttl", text).await;
    scene.cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_corrupt_blocks() {
    let capacity = NodeCapacity { dram_blocks: 8, ssd_blocks: 256 };
    let scene = WhyFixture::start(capacity, |_| {}).await;
    let all = prompt(32, 24);
    scene.save_prompt(0, &all).await;
    let file = scene.cluster.directory().join("node-1").join("segments.kvs");
    let corrupt = until("corrupt bytes from the disk", async || {
        // Blocks still in DRAM are intact, and blocks not yet written reach the disk later.
        corrupt_file(&file);
        let (request, misses) = scene.fetch_misses(&all).await;
        misses.contains(&"corrupt".to_owned()).then_some(request)
    })
    .await;
    // The outcome comes with the instance's next report.
    let told = until("the reason", async || scene.missing_line(corrupt, "corrupt")).await;
    assert!(told.starts_with("node-1 gave bytes that are not these blocks"), "{told}");
    scene.until_listed("the removal of corrupt blocks", &all, |listed| listed < all.len()).await;
    let text = "node-1 dropped the first of them as its bytes could not be read or written, ";
    scene.assert_explained(0, &all, "evicted_failed", text).await;
    scene.cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_busy_slow_and_failed_nodes() {
    let scene = WhyFixture::start(NodeCapacity { dram_blocks: 8, ssd_blocks: 256 }, |shape| {
        // Over TCP only the node itself reads its blocks.
        (shape.transport, shape.block_bytes) = (Transport::Tcp, 64 << 10);
        // An instance waits no longer than computing takes.
        (shape.fetch_floor_ms, shape.profile) = (20, "h100-8b".to_owned());
        // At most three or four blocks may be in flight.
        shape.overrides = vec!["node.fetch_inflight_bytes=262144".to_owned()];
    })
    .await;
    let prompts = [64, 65, 66, 67].map(|seed| prompt(seed, 24));
    for prompt in &prompts {
        scene.save_prompt(0, prompt).await;
    }
    let [a, b, c, d] = prompts.each_ref();
    // Four requests at once are too large for a future on the stack.
    let busy = Box::pin(until("a busy node", async || {
        let all: [_; 4] = tokio::join!(
            scene.fetch_misses(a),
            scene.fetch_misses(b),
            scene.fetch_misses(c),
            scene.fetch_misses(d)
        )
        .into();
        all.into_iter().find_map(|(request, misses)| misses.contains(&"busy".to_owned()).then_some(request))
    }))
    .await;
    let told = until("busy", async || scene.missing_line(busy, "busy")).await;
    assert_eq!(told, "node-1 was busy (busy)");

    // Computing two blocks takes much less time than declaring a silent node dead.
    let short = &prompts[0][..2];
    let (request, decision) = scene.route(0, short).await;
    let node = Pid::from_raw(scene.place.pid_of("node-1").unwrap()).unwrap();
    kill_process(node, Signal::STOP).unwrap();
    until("the node to be stopped", async || is_stopped(node).then_some(())).await;
    let ran = scene.serve((request, 0), short, pb::Decision { save_to: None, ..decision }).await;
    kill_process(node, Signal::CONT).unwrap();
    assert_eq!((ran.hit_blocks, &ran.misses[..]), (0, &["too_late".to_owned()][..]));
    let told = until("too_late", async || scene.missing_line(request, "too_late")).await;
    assert_eq!(told, "node-1 would have given them later than computing them takes (too_late)");

    let file = scene.cluster.directory().join("node-1").join("segments.kvs");
    let mut seeds = 68..;
    let failed = until("an unreadable disk", async || {
        // A new prompt each time: later writes extend the file again, so truncated blocks read as
        // corrupt and are dropped.
        let cut = prompt(seeds.next().unwrap(), 24);
        let (request, decision) = scene.route(0, &cut).await;
        scene.serve((request, 0), &cut, decision).await;
        std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(0).unwrap();
        let (request, misses) = scene.fetch_misses(&cut).await;
        misses.contains(&"medium_failed".to_owned()).then_some(request)
    })
    .await;
    let told = until("medium_failed", async || scene.missing_line(failed, "medium_failed")).await;
    assert_eq!(told, "node-1 could not read them from its medium (medium_failed)");
    scene.cluster.stop().await;
}

/// Whether every thread of a signalled process has stopped; threads stop one by one.
fn is_stopped(process: Pid) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero())).unwrap();
    let is_still = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The state follows the name, which is in parentheses.
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
    };
    tasks.flatten().all(is_still)
}

/// Overwrites a whole file and keeps its length.
fn corrupt_file(file: &std::path::Path) {
    let bytes = std::fs::metadata(file).unwrap().len();
    let mut file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    let page = [0xa5; 64 << 10];
    for at in (0..bytes).step_by(page.len()) {
        let left = usize::try_from(bytes - at).unwrap().min(page.len());
        file.write_all(&page[..left]).unwrap();
    }
    // Fails if the node bypassed the page cache at the same time; the caller repeats it.
    let _ = file.sync_all();
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_stale_and_lost_nodes() {
    let capacity = NodeCapacity { dram_blocks: 8_192, ssd_blocks: 0 };
    // Over TCP a connection to a dead process ends at once.
    let mut scene = WhyFixture::start(capacity, |shape| shape.transport = Transport::Tcp).await;
    let dropped = prompt(32, BLOCKS);
    scene.save_prompt(0, &dropped).await;
    let promised = scene.route(0, &dropped).await;
    scene.expire(&dropped);
    scene.until_listed("the expiry of a time to live", &dropped, |listed| listed == 0).await;
    let stale = "node-1 does not hold them any more: the index was stale";
    scene.assert_missed(promised, &dropped, ("not_held", "not_held", stale)).await;

    let before = prompt(33, BLOCKS);
    scene.save_prompt(0, &before).await;
    let promised = scene.route(0, &before).await;
    let epoch = scene.epoch().await.unwrap();
    // The node is stopped until the router declares it dead, then continues.
    let node = Pid::from_raw(scene.place.pid_of("node-1").unwrap()).unwrap();
    kill_process(node, Signal::STOP).unwrap();
    until("the node to be fenced", async || scene.epoch().await.is_none().then_some(())).await;
    kill_process(node, Signal::CONT).unwrap();
    until("the node to join again", async || scene.epoch().await.filter(|now| *now > epoch)).await;
    // Old connections may be closed; a successful save proves new ones.
    let again = prompt(34, BLOCKS);
    until("the node to accept blocks again", async || {
        let (request, decision) = scene.route(0, &again).await;
        let ran = scene.serve((request, 0), &again, decision).await;
        (ran.saved_blocks > 0).then_some(())
    })
    .await;
    let stale = "node-1 has joined again since: the index was stale";
    scene.assert_missed(promised, &before, ("stale_epoch", "stale_epoch", stale)).await;

    // A dead node's blocks are swept a thousand at a time, so some are still explained by the
    // node's loss.
    let prompts: Vec<_> = (0..6).map(|seed| prompt(seed, 1_000)).collect();
    for prompt in &prompts {
        scene.save_prompt(0, prompt).await;
    }
    let held = &prompts[0][..BLOCKS as usize];
    let promised = scene.route(0, held).await;
    scene.cluster.kill((Role::Node, 1)).await.unwrap();
    // The requester finds the node lost; routers may not know it yet.
    scene.assert_missed(promised, held, ("node_lost", "unreachable", "node-1 could not be reached")).await;
    let request = until("the loss of a node", async || {
        for prompt in &prompts {
            let (request, _) = scene.route(0, &prompt[..BLOCKS as usize]).await;
            let story = scene.routers[0].why(request).await.ok()?;
            if story.missing.iter().any(|missing| missing.reason == "node_lost") {
                return Some(request);
            }
        }
        None
    })
    .await;
    let told = scene.missing_line(request, "node_lost").unwrap();
    assert_eq!(told, "node-1, which had them, is not live (node_lost)");
    scene.cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_identity_differences() {
    let capacity = NodeCapacity { dram_blocks: 64, ssd_blocks: 0 };
    let mut scene = WhyFixture::start(capacity, |_| {}).await;
    let held = prompt(80, BLOCKS);
    scene.save_prompt(0, &held).await;
    // An instance with another element type replaces it.
    scene.cluster.kill((Role::Instance, 1)).await.unwrap();
    let other = IdentityManifest { dtype: "fp8".to_owned(), ..scene.cluster.shape().manifest() };
    let config = scene.cluster.directory().join("config").join("instance-1.toml");
    let identity = format!("identity={}", other.digest());
    let words = ["instance", "--config", config.to_str().unwrap(), "--follow-parent"];
    let changed = ["--set", &identity, "--set", "openai.manifest.dtype=fp8"];
    let mut command = scene.place.command(&[words, changed].concat());
    // The process stops when its standard input closes, also if this test fails.
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let ran = until("an instance of another identity", async || {
        let (request, decision) = scene.route(0, &held).await;
        if decision.fetch_blocks == 0 {
            return None;
        }
        let identity = scene.cluster.identity().unwrap();
        let channel = channel(&decision.instance_address, &identity, tls::Role::Instance(None)).unwrap();
        let ran = run_on_instance(channel, run_request((request, 0), &held, decision)).await.ok()?;
        Some((request, ran))
    });
    let (request, ran) = ran.await;
    assert_eq!((ran.hit_blocks, &ran.misses[..]), (0, &["identity_differs".to_owned()][..]));
    // The outcome comes with the instance's next report. A node that did not answer at once is
    // asked again after two seconds.
    let told = until("the differing fields", async || {
        scene.missing_line(request, "identity_differs").filter(|told| told.contains("it differs in"))
    });
    let told = told.await;
    let fields = r#"it differs in dtype ("bf16" and not "fp8")"#;
    assert_eq!(told, format!("node-1 serves another identity than instance-1: {fields} (identity_differs)"));

    // A node with another identity is refused.
    let node = scene.cluster.directory().join("config").join("node-1.toml");
    let data = format!("data_dir={}", scene.place.path("node-2").display());
    let words =
        ["node", "--config", node.to_str().unwrap(), "--follow-parent", "--set", "id=2", "--set", &data];
    let authority = Authority::open(&scene.cluster.certificates()).unwrap();
    let files = authority.issue(&tls::Role::Node(Some(NodeId(2)))).unwrap();
    let cert = format!("tls.cert={}", files.cert.display());
    let key = format!("tls.key={}", files.key.display());
    let mut command = scene
        .place
        .command(&[&words[..], &["--set", "identity.dtype=fp8", "--set", &cert, "--set", &key]].concat());
    let log = File::create(scene.place.path("node-2.log")).unwrap();
    let mut refused = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
    let line = until("a node of another identity to be refused", async || {
        let log = std::fs::read_to_string(scene.place.path("node-2.log")).unwrap();
        let is_it =
            |line: &&str| line.contains("the routers refuse this node") && line.contains("it differs in");
        log.lines().find(is_it).map(str::to_owned)
    });
    let line = line.await;
    assert!(line.contains("in dtype") && line.contains("fp8") && line.contains("bf16"), "{line}");
    refused.kill().unwrap();
    refused.wait().unwrap();

    // A client with another identity is told at once.
    let asked = RouteCall { identity: other.digest(), ..scene.call(0, &held) };
    let refused = scene.client.route(asked).await.unwrap_err().to_string();
    assert!(refused.contains(r#" in dtype ("fp8" and not "bf16"): use the model manifest"#), "{refused}");
    child.kill().unwrap();
    child.wait().unwrap();
    scene.cluster.stop().await;
}
