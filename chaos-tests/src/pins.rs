//! Calls that need a leader, made on any router that accepts them, and the pins sent to a joining
//! node.
//!
//! Not here: the properties of pins (`invariants/pins_are_kept.rs`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv_core::id::BlockHash;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use crate::cluster::{CALL_TIMEOUT, Client, RouterClients, SuiteError};
use crate::oracle::Oracle;

/// Node number that is only used to read directives.
pub const PROBE: u32 = 1_000;

/// Time limit for a cluster with a majority.
const PATIENCE: Duration = Duration::from_secs(60);

/// Pause between attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Tries a call on one router after the other until one accepts it.
///
/// # Errors
/// At once if the call is not permitted; otherwise if no router accepts it within a minute.
pub async fn call_any_router<Call, Answer>(contacts: &RouterClients, call: Call) -> Result<(), SuiteError>
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

/// The pins in force, as sent to a joining node. The oracle records the epoch used by this join.
///
/// # Errors
/// If no router answers, or a router sends invalid hashes.
pub async fn announced_pins(
    contacts: &RouterClients,
    oracle: &Mutex<Oracle>,
) -> Result<BTreeMap<u64, Vec<BlockHash>>, SuiteError> {
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
    call_any_router(contacts, |mut client| {
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
