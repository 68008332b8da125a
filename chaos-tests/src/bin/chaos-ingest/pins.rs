//! One client that pins and unpins a block sequentially: the smallest proposal.

use std::time::{Duration, Instant};

use chaos_tests::cluster::{Client, RouterClients, SuiteError};
use kv_core::id::HASH_BYTES;
use kvfleet_proto::pb;
use tonic::Status;

const OWNER: &str = "chaos-ingest";

/// Time before counting starts, for connections and leaders.
const WARM_UP: Duration = Duration::from_secs(1);

/// Pause before the leader is looked up again.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Duration of each call in microseconds, ascending.
pub(crate) async fn call_times(contacts: RouterClients, span: Duration) -> Result<Vec<u64>, SuiteError> {
    let from = Instant::now() + WARM_UP;
    let mut micros = Vec::new();
    let mut pin = 0;
    while Instant::now() < from + span {
        // Leadership moves once after a start; meanwhile there is no leader.
        let Some(leader) = contacts.leader().await else {
            tokio::time::sleep(RETRY_PAUSE).await;
            continue;
        };
        let mut client = contacts.client(leader);
        while let Ok(took) = pin_and_unpin(&mut client, pin).await
            && Instant::now() < from + span
        {
            pin += 1;
            if Instant::now() >= from + (took[0] + took[1]) {
                micros.extend(took.map(|took| u64::try_from(took.as_micros()).unwrap_or(u64::MAX)));
            }
        }
        pin += 1;
    }
    if micros.is_empty() {
        return Err("no pin was answered: no router led the control group".into());
    }
    micros.sort_unstable();
    Ok(micros)
}

async fn pin_and_unpin(client: &mut Client, pin: u64) -> Result<[Duration; 2], Status> {
    let pinned =
        pb::PinRequest { pin, owner: OWNER.into(), blocks: vec![7; HASH_BYTES], ..pb::PinRequest::default() };
    let start = Instant::now();
    client.pin(pinned).await?;
    let middle = Instant::now();
    client.unpin(pb::UnpinRequest { pin, owner: OWNER.into() }).await?;
    Ok([middle - start, middle.elapsed()])
}
