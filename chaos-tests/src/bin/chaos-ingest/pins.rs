//! One client that pins a block and unpins it, one call after the other: the smallest proposal there is.

use std::time::{Duration, Instant};

use chaos_tests::cluster::{Contacts, Trouble};
use kvfleet_proto::pb;

const OWNER: &str = "chaos-ingest";

/// Time before anything counts, for connections and leaders.
const WARM_UP: Duration = Duration::from_secs(1);

/// Microseconds that each call took, ascending.
pub(crate) async fn times(contacts: &Contacts, span: Duration) -> Result<Vec<u64>, Trouble> {
    let leader = contacts.leader().await.ok_or("no router leads the control group")?;
    let mut client = contacts.client(leader);
    let from = Instant::now() + WARM_UP;
    let mut micros = Vec::new();
    for pin in 1.. {
        let pinned = pb::PinRequest { pin, owner: OWNER.into(), blocks: vec![7; 16] };
        let start = Instant::now();
        client.pin(pinned).await?;
        let middle = Instant::now();
        client.unpin(pb::UnpinRequest { pin, owner: OWNER.into() }).await?;
        let end = Instant::now();
        if start >= from {
            let took = [middle - start, end - middle];
            micros.extend(took.map(|took| u64::try_from(took.as_micros()).unwrap_or(u64::MAX)));
        }
        if end >= from + span {
            break;
        }
    }
    micros.sort_unstable();
    Ok(micros)
}
