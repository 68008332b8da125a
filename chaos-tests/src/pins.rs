//! Calls that need a leader, made on whichever router takes them, and the pins that a joining node is told.
//!
//! Not here: what must hold of pins (`invariants/pins_kept.rs`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv_core::id::BlockHash;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use crate::cluster::{CALL_TIMEOUT, Client, Contacts, Trouble};
use crate::oracle::Oracle;

/// Node number that only asks for directives.
pub const PROBE: u32 = 1_000;

/// How long a cluster with a majority may take to do what it must.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(20);

/// Tries a call on one router after the other until one takes it.
///
/// # Errors
/// At once when the call is not permitted, whoever is asked; otherwise when none takes it for a minute.
pub async fn until_one_does<Call, Answer>(contacts: &Contacts, call: Call) -> Result<(), Trouble>
where
    Call: Fn(Client) -> Answer,
    Answer: Future<Output = Result<(), tonic::Status>>,
{
    let deadline = Instant::now() + PATIENCE;
    for position in 0.. {
        match timeout(CALL_TIMEOUT, call(contacts.client(position))).await {
            Ok(Ok(())) => break,
            Ok(Err(status)) if status.code() == tonic::Code::PermissionDenied => return Err(status.into()),
            _ if Instant::now() > deadline => {
                return Err(format!("no router takes the call after {PATIENCE:?}").into());
            }
            _ => sleep(PAUSE).await,
        }
    }
    Ok(())
}

/// The pins in force, as a node that joins is told them. The epoch it costs goes to the oracle.
///
/// # Errors
/// When no router answers, or one tells of blocks that are none.
pub async fn told(
    contacts: &Contacts,
    oracle: &Mutex<Oracle>,
) -> Result<BTreeMap<u64, Vec<BlockHash>>, Trouble> {
    let request = pb::JoinRequest {
        node: PROBE,
        data_address: "127.0.0.1:1".into(),
        control_address: "127.0.0.1:2".into(),
        host: "localhost".into(),
        identity: vec![7; 16],
        block_bytes: 4096,
        ..pb::JoinRequest::default()
    };
    let told = Mutex::new(None);
    until_one_does(contacts, |mut client| {
        let (request, told) = (request.clone(), &told);
        async move {
            let reply = client.join(request).await?.into_inner();
            *told.lock() = Some(reply);
            Ok(())
        }
    })
    .await?;
    let reply = told.into_inner().ok_or("no router answered the probe")?;
    oracle.lock().epochs.entry(PROBE).or_default().push(reply.epoch);
    let pins = reply.directives.unwrap_or_default().pins.into_iter();
    pins.map(|pin| Ok((pin.pin, convert::hashes_from_bytes("blocks", &pin.blocks)?))).collect()
}
