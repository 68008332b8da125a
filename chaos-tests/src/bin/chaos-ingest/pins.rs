//! One client that pins a block and unpins it, one call after the other: the smallest proposal there is.

use std::time::{Duration, Instant};

use chaos_tests::cluster::{Client, Contacts, Trouble};
use kvfleet_proto::pb;
use tonic::Status;

const OWNER: &str = "chaos-ingest";

/// Time before anything counts, for connections and leaders.
const WARM_UP: Duration = Duration::from_secs(1);

/// Pause before the leader is asked for again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Microseconds that each call took, ascending.
pub(crate) async fn times(contacts: Contacts, span: Duration) -> Result<Vec<u64>, Trouble> {
    let from = Instant::now() + WARM_UP;
    let mut micros = Vec::new();
    let mut pin = 0;
    while Instant::now() < from + span {
        // Leadership moves once after a start; meanwhile nobody leads.
        let Some(leader) = contacts.leader().await else {
            tokio::time::sleep(LOOK_AGAIN).await;
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
        pb::PinRequest { pin, owner: OWNER.into(), blocks: vec![7; 16], ..pb::PinRequest::default() };
    let start = Instant::now();
    client.pin(pinned).await?;
    let middle = Instant::now();
    client.unpin(pb::UnpinRequest { pin, owner: OWNER.into() }).await?;
    Ok([middle - start, middle.elapsed()])
}
