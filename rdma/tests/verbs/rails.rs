//! Two rails at each end, over real devices: a fetch over both, and one that loses a rail midway.
//!
//! In the virtual machine the client's first rail is matched with the node's first, which is the
//! other device, so that all bytes cross the wire. On a machine with one device, both rails are on
//! it.

use super::*;
use kvfleet_transport::FetchAnswer;

const BLOCKS: u32 = 24;

/// Opens two rails at each end; the node's are in reverse order. The timeouts detect a dead rail
/// after some seconds, even if answers are slow.
fn two_rails() -> Option<[Vec<Arc<Rdma>>; 2]> {
    devices()?;
    let open = |name: &str| {
        let config = config(address(name));
        let ack_timeout = if is_emulated() { 18 } else { config.tuning.ack_timeout };
        let tuning = RdmaTuning { ack_timeout, retries: 3, ..config.tuning };
        Rdma::open(&RdmaConfig { tuning, large_bytes: 4 << 20, ..config }).unwrap()
    };
    let names = ["RDMA_VM_IP0", "RDMA_VM_IP1"];
    Some([names.map(open).into(), [names[1], names[0]].map(open).into()])
}

/// A node with its blocks in its arena, and a path to it over both rails.
async fn world(nodes: &[Arc<Rdma>], clients: &[Arc<Rdma>], service: &MemoryService) -> SuitePath {
    let authority = VerbsAuthority::new();
    let memory = Arc::new(RdmaMemory::zeroed(64 << 20).unwrap());
    let arena = RdmaBufferPool::new(&memory, 0..memory.len_bytes());
    hold_in_arena(service, &arena, BLOCKS);
    let lending = SharedArenaService { inner: service.clone(), arena: Arc::clone(&arena), may_map: true };
    let offer = RdmaServer::with_rails(nodes, Some(&memory)).unwrap();
    let (any, room) =
        (SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), Capacity::new(1 << 30, 512 << 20, 2 << 20));
    let server =
        TcpServer::bind_offering(&room, any, &authority.member(), &tcp(), offer, Arc::new(lending)).unwrap();
    let dialer = RdmaDialer::with_rails(clients, &authority.member(), tcp()).unwrap();
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    // A link of the second rail is made during the first fetch, and probed with a few bytes.
    let warm = async {
        while read(clients).iter().any(|read| *read < u64::from(3 * MIB)) {
            suite::fetch(path.as_ref(), suite::fetch_request(&suite::hashes(BLOCKS))).await.unwrap();
        }
    };
    tokio::time::timeout(suite::PATIENCE, warm).await.expect("both rails must be used");
    SuitePath { path, keep: Box::new((server, dialer)) }
}

fn read(rails: &[Arc<Rdma>]) -> Vec<u64> {
    rails.iter().map(|rail| rail.stats().read_bytes).collect()
}

fn since(rails: &[Arc<Rdma>], before: &[u64]) -> Vec<u64> {
    read(rails).iter().zip(before).map(|(after, before)| after - before).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_rails_share_a_large_fetch() {
    let Some([nodes, clients]) = two_rails() else { return };
    let service = MemoryService::default();
    let pair = world(&nodes, &clients, &service).await;
    for _ in 0..3 {
        let (before, began) = (read(&clients), Instant::now());
        let whole =
            suite::fetch(pair.path.as_ref(), suite::fetch_request(&suite::hashes(BLOCKS))).await.unwrap();
        let rate = f64::from(BLOCKS * MIB) / began.elapsed().as_secs_f64() / 1e9;
        assert_eq!(whole.tiers().len(), BLOCKS as usize);
        let read = since(&clients, &before);
        println!("{BLOCKS} blocks of 1 MiB over two rails: {rate:.4} GB/s, bytes of each {read:?}");
        assert!(read.iter().all(|read| *read > u64::from(2 * MIB)), "both rails must read a part: {read:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rail_failure_during_a_fetch_loses_no_block() {
    let Some([nodes, clients]) = two_rails() else { return };
    let service = MemoryService::default();
    let pair = world(&nodes, &clients, &service).await;
    for dead in [0, 1] {
        let (before, mut frames) = (read(&clients), Vec::new());
        let mut sink = |frame: Frame| {
            frames.push(frame);
            if frames.len() == 3 {
                probe::kill_rail(&nodes[dead]).unwrap();
            }
        };
        let hashes = suite::hashes(BLOCKS);
        let began = Instant::now();
        let answer = pair.path.fetch(suite::fetch_request(&hashes), &mut sink).await.unwrap();
        let (took, read) = (began.elapsed(), since(&clients, &before));
        let failed = clients[dead].stats().failed;
        println!(
            "rail {dead} died: {BLOCKS} blocks in {took:.1?}, bytes of each {read:?}, {failed} transfers failed"
        );
        assert!(matches!(answer, FetchAnswer::Hit { .. }), "{answer:?}");
        assert_eq!((frames.len(), answer.tiers().len()), (BLOCKS as usize, BLOCKS as usize));
        for (frame, hash) in frames.iter().zip(&hashes) {
            frame.verify(suite::IDENTITY, *hash).unwrap();
        }
        assert!(failed > 0, "the rail must die while it is in use");
        // Its queue pairs are gone but the rail works: a probe detects that, and it is used again.
        let again = async {
            loop {
                let before = self::read(&clients);
                suite::fetch(pair.path.as_ref(), suite::fetch_request(&hashes)).await.unwrap();
                if since(&clients, &before)[dead] > u64::from(2 * MIB) {
                    return;
                }
            }
        };
        tokio::time::timeout(suite::PATIENCE, again).await.expect("the rail must be used again");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rail_failure_during_a_save_loses_no_block() {
    let Some([nodes, clients]) = two_rails() else { return };
    let service = MemoryService::default();
    let pair = world(&nodes, &clients, &service).await;
    let saved: Vec<_> = (100..100 + BLOCKS).map(suite::hash).collect();
    let request = SaveRequest { frame_bytes: 2 << 20, ..suite::save_request(&saved) };
    let killed = std::sync::Once::new();
    // The first rail is chosen when both are idle.
    let source = |position: usize| {
        if position == 5 {
            killed.call_once(|| probe::kill_rail(&nodes[0]).unwrap());
        }
        suite::frame(saved[position], MIB)
    };
    let began = Instant::now();
    let done = suite::done(pair.path.save(request, &source).await.unwrap());
    let written: Vec<u64> = clients.iter().map(|rail| rail.stats().written_bytes).collect();
    println!("saved {BLOCKS} blocks in {:.1?}, bytes of each {written:?}: {done:?}", began.elapsed());
    assert_eq!(done.stored_blocks + done.present_blocks, BLOCKS);
    assert!(saved.iter().all(|hash| service.holds(*hash)));
    assert!(clients[0].stats().failed > 0, "the rail must die while it is in use");
}
