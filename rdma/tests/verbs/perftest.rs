//! Compares a fetch with the common benchmark (`ib_read_bw` of perftest) and with a bare loop of
//! reads, alternating on the same ports. It only prints figures and asserts none. If the tool is
//! missing, it says so.

use std::process::{Child, Command, Stdio};

use super::*;

/// Reads of the bare loop and of the tool in flight at once.
const DEPTH: usize = 8;

/// TCP port at which the tool's two ends connect.
const PORT: &str = "7473";

/// One end of the tool; the end with a peer address reads from there.
fn start_tool(device: &str, peer: Option<&str>, reads: usize) -> std::io::Result<Child> {
    let [bytes, depth, reads] = [MIB as usize, DEPTH, reads].map(|number| number.to_string());
    let mut command = Command::new("ib_read_bw");
    command.args(["-F", "-d", device, "-p", PORT, "-s", &bytes, "-n", &reads, "-t", &depth, "-o", &depth]);
    command.args(peer).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
}

/// The average rate in the tool's output, in GB/s; the tool counts mebibytes.
fn parse_rate(said: &str) -> Option<f64> {
    let row = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = row.filter(|row| row.len() >= 4).find(|row| row[0] == MIB.to_string())?;
    Some(row[3].parse::<f64>().ok()? * f64::from(MIB) / 1e9)
}

/// Rates of the three sides in each round, in GB/s.
#[derive(Default)]
struct Rates {
    fetch: Vec<f64>,
    bare: Vec<f64>,
    tool: Vec<f64>,
}

/// Median ratio of one side to another, with the least and the greatest of all rounds.
fn ratio(ours: &[f64], theirs: &[f64]) -> String {
    let mut ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
    ratios.sort_by(f64::total_cmp);
    match (ratios.get(ratios.len() / 2), ratios.first(), ratios.last()) {
        (Some(median), Some(least), Some(most)) => format!("{median:.2} ({least:.2} to {most:.2})"),
        _ => "nothing".to_owned(),
    }
}

/// Measures with the tool; `None` if it is missing or fails.
async fn measure_with_tool((node, client): (&str, &str), peer: &str, reads: usize) -> Option<f64> {
    let mut server = start_tool(node, None, reads).ok()?;
    // It does not report when it listens, and the other end does not retry.
    let mut said = String::new();
    for _ in 0..20 {
        let output = start_tool(client, Some(peer), reads).ok()?.wait_with_output().ok()?;
        said = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let _ = server.kill(); // already ended on success
    server.wait().ok()?;
    parse_rate(&said)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compares_a_fetch_with_perftest_and_a_bare_loop() {
    const BLOCKS: u32 = 32;
    let Some(devices) = devices() else { return };
    let device = |name: &str| std::env::var(name).or_else(|_| std::env::var("KVFLEET_RDMA_DEVICE"));
    let (Ok(node), Ok(client)) = (device("RDMA_VM_DEV0"), device("RDMA_VM_DEV1")) else {
        return println!("skipped: no device is configured (scripts/rdma --device NAME)");
    };
    let peer = std::env::var("RDMA_VM_IP0").unwrap_or_else(|_| "127.0.0.1".to_owned());
    let (service, authority) = (MemoryService::default(), VerbsAuthority::new());
    let here = Ipv4Addr::LOCALHOST.into();
    let (server, arena) = serve(&devices.node, here, &authority.member(), &service, true);
    hold_in_arena(&service, &arena, BLOCKS);
    let dialer = RdmaDialer::new(&devices.client, &authority.member(), tcp()).unwrap();
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let hashes = suite::hashes(BLOCKS);
    suite::fetch(path.as_ref(), suite::fetch_request(&hashes)).await.unwrap();
    let probe = Probe::new(&devices.client, &devices.node, 16 << 20).unwrap();
    let moved = |took: Duration| f64::from(BLOCKS) * f64::from(MIB) / took.as_secs_f64() / 1e9;
    let mut rates = Rates::default();
    for _ in 0..5 {
        let began = Instant::now();
        path.fetch(suite::fetch_request(&hashes), &mut |_| {}).await.unwrap();
        rates.fetch.push(moved(began.elapsed()));
        rates.bare.push(moved(probe.read_many(MIB, DEPTH, BLOCKS as usize).await.unwrap()));
        match measure_with_tool((&node, &client), &peer, BLOCKS as usize).await {
            Some(rate) => rates.tool.push(rate),
            None => println!("skipped: no ib_read_bw (package perftest), or its output is unusable"),
        }
    }
    let Rates { fetch, bare, tool } = &rates;
    println!(
        "{BLOCKS} blocks of 1 MiB in turn, GB/s: fetch {fetch:.4?}, bare {bare:.4?}, ib_read_bw {tool:.4?}"
    );
    println!("fetch over a bare loop: {}; over ib_read_bw: {}", ratio(fetch, bare), ratio(fetch, tool));
}
