//! The tool that people know (`ib_read_bw` of perftest) beside our bare loop, on the same ports. A figure and no judgement: nothing is
//! asserted of it, and where the tool is not there a word says so.

use std::process::{Child, Command, Stdio};

use super::*;

/// Bytes of a read, and how many are under way at once.
const DEPTH: usize = 8;

/// Where the tool's two ends meet.
const PORT: &str = "7473";

/// One end of it; the one that is given an address reads from the one there.
fn tool(device: &str, peer: Option<&str>, reads: usize) -> std::io::Result<Child> {
    let [bytes, depth, reads] = [MIB as usize, DEPTH, reads].map(|number| number.to_string());
    let mut command = Command::new("ib_read_bw");
    command.args(["-F", "-d", device, "-p", PORT, "-s", &bytes, "-n", &reads, "-t", &depth, "-o", &depth]);
    command.args(peer).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
}

/// The average that it says, in GB/s; it counts mebibytes.
fn rate(said: &str) -> Option<f64> {
    let row = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = row.filter(|row| row.len() >= 4).find(|row| row[0] == MIB.to_string())?;
    Some(row[3].parse::<f64>().ok()? * f64::from(MIB) / 1e9)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_usual_tool_beside_the_bare_loop() {
    const READS: usize = 32;
    let Some(devices) = devices() else { return };
    let device = |name: &str| std::env::var(name).or_else(|_| std::env::var("KVFLEET_RDMA_DEVICE"));
    let (Ok(node), Ok(client)) = (device("RDMA_VM_DEV0"), device("RDMA_VM_DEV1")) else {
        return println!("skipped: which device is not said (scripts/rdma --device NAME)");
    };
    let peer = std::env::var("RDMA_VM_IP0").unwrap_or_else(|_| "127.0.0.1".to_owned());
    let probe = Probe::new(&devices.client, &devices.node, 16 << 20).unwrap();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let took = probe.read_many(MIB, DEPTH, READS).await.unwrap();
        ours.push(READS as f64 * f64::from(MIB) / took.as_secs_f64() / 1e9);
        let Ok(mut server) = tool(&node, None, READS) else {
            return println!("skipped: no ib_read_bw (package perftest)");
        };
        // It does not say when it listens, and the other end does not ask twice.
        let mut said = String::new();
        for _ in 0..20 {
            let output = tool(&client, Some(&peer), READS).unwrap().wait_with_output().unwrap();
            said = String::from_utf8_lossy(&output.stdout).into_owned();
            if output.status.success() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let _ = server.kill(); // it ended by itself if all went well
        server.wait().unwrap();
        match rate(&said) {
            Some(rate) => theirs.push(rate),
            None => println!("ib_read_bw says nothing of use: {said}"),
        }
    }
    println!("READ of 1 MiB, {DEPTH} at once, in turn, GB/s: ours {ours:.4?}, ib_read_bw {theirs:.4?}");
}
