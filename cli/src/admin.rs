//! `kvfleet pin`, `unpin`, `quota`: writes that are answered after commit.
//!
//! A write goes to whichever router leads; the others refuse it and the next one is tried.

use kv_core::id::BlockHash;
use kvfleet_proto::pb;
use tonic::{Code, Status};

use crate::args::{ConnectArgs, PinArgs, QuotaArgs, UnpinArgs};
use crate::calls::{RouterCalls, explain};
use crate::connect::Connection;

/// Keeps blocks until unpinned.
pub async fn pin(args: &PinArgs) -> anyhow::Result<()> {
    let request =
        pb::PinRequest { pin: args.pin, owner: args.owner.clone(), blocks: parse_blocks(&args.blocks)? };
    let done = at_leader(&args.connect, async |router| router.pin(request.clone()).await).await?;
    println!("pin {} holds {} blocks (log position {})", args.pin, args.blocks.len(), done.applied_index);
    Ok(())
}

/// Ends a pin.
pub async fn unpin(args: &UnpinArgs) -> anyhow::Result<()> {
    let request = pb::UnpinRequest { pin: args.pin, owner: args.owner.clone() };
    let done = at_leader(&args.connect, async |router| router.unpin(request.clone()).await).await?;
    let what = if done.changed { "is ended" } else { "did not exist" };
    println!("pin {} {what} (log position {})", args.pin, done.applied_index);
    Ok(())
}

/// Sets or lifts a quota.
pub async fn quota(args: &QuotaArgs) -> anyhow::Result<()> {
    let bytes = args.bytes.unwrap_or_default();
    let request = pb::SetQuotaRequest { tenant: args.tenant, bytes, lift: args.lift };
    let done = at_leader(&args.connect, async |router| router.set_quota(request).await).await?;
    let what =
        if args.lift { "has no quota".to_owned() } else { format!("may hold {bytes} bytes on each node") };
    println!("tenant {} {what} (log position {})", args.tenant, done.applied_index);
    Ok(())
}

fn parse_blocks(texts: &[String]) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(16 * texts.len());
    for text in texts {
        let hash = BlockHash::from_hex(text)
            .ok_or_else(|| anyhow::anyhow!("`{text}` is no block hash: expected 32 hexadecimal digits"))?;
        bytes.extend(hash.0);
    }
    Ok(bytes)
}

/// Tries the named routers until one takes the write as leader.
async fn at_leader(
    connect: &ConnectArgs,
    write: impl AsyncFn(&RouterCalls) -> Result<pb::AdminReply, Status>,
) -> anyhow::Result<pb::AdminReply> {
    let mut refused = vec![];
    for router in Connection::open(connect)?.all()? {
        match write(&router).await {
            Ok(reply) => return Ok(reply),
            // Refusals of the leader itself are final; the others only say that they do not lead.
            Err(status) if is_final(&status) => anyhow::bail!("{}", status.message()),
            Err(status) => refused.push(explain(&router.address, &status)),
        }
    }
    anyhow::bail!("no router took the write:\n  {}", refused.join("\n  "))
}

fn is_final(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument
            | Code::PermissionDenied
            | Code::AlreadyExists
            | Code::NotFound
            | Code::ResourceExhausted
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_wrong_hash_is_quoted() {
        assert_eq!(parse_blocks(&["00".repeat(16)]).unwrap(), vec![0; 16]);
        let message = parse_blocks(&["abc".to_owned()]).unwrap_err().to_string();
        assert_eq!(message, "`abc` is no block hash: expected 32 hexadecimal digits");
    }
}
