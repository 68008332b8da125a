//! `kvfleet pin`, `unpin`, `quota`, `ttl`: writes that are answered after their commit.
//!
//! Only a leader accepts a write; the routers are tried in turn.

use std::time::Duration;

use kv_core::id::BlockHash;
use kvfleet_proto::pb;
use tonic::{Code, Status};

use crate::args::{ConnectArgs, PinArgs, QuotaArgs, TtlArgs, UnpinArgs};
use crate::calls::{RouterCalls, explain};
use crate::connect::Connection;

/// Pins blocks until they are unpinned, or for a duration.
pub async fn pin(args: &PinArgs) -> anyhow::Result<()> {
    let request = pin_request(args)?;
    let done = write_to_leader(&args.connect, async |router| router.pin(request.clone()).await).await?;
    let (how, until) = (if args.soft { "softly holds" } else { "holds" }, duration_suffix(args.span));
    let blocks = args.blocks.len();
    println!("pin {} {how} {blocks} blocks{until} (log position {})", args.pin, done.applied_index);
    Ok(())
}

fn pin_request(args: &PinArgs) -> anyhow::Result<pb::PinRequest> {
    Ok(pb::PinRequest {
        pin: args.pin,
        owner: args.owner.clone(),
        blocks: parse_blocks(&args.blocks)?,
        soft: args.soft,
        for_ms: args.span.map(|span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX)),
    })
}

fn duration_suffix(span: Option<Duration>) -> String {
    span.map(|span| format!(" for {}", format_seconds(span))).unwrap_or_default()
}

/// A duration in seconds, with as many decimals as needed.
pub(crate) fn format_seconds(span: Duration) -> String {
    format!("{} s", span.as_millis() as f64 / 1000.0)
}

/// Ends a pin.
pub async fn unpin(args: &UnpinArgs) -> anyhow::Result<()> {
    let request = pb::UnpinRequest { pin: args.pin, owner: args.owner.clone() };
    let done = write_to_leader(&args.connect, async |router| router.unpin(request.clone()).await).await?;
    let what = if done.changed { "is ended" } else { "did not exist" };
    println!("pin {} {what} (log position {})", args.pin, done.applied_index);
    Ok(())
}

/// Sets or removes a quota.
pub async fn quota(args: &QuotaArgs) -> anyhow::Result<()> {
    let bytes = args.bytes.unwrap_or_default();
    let request = pb::SetQuotaRequest { tenant: args.tenant, bytes, clear: args.lift };
    let done = write_to_leader(&args.connect, async |router| router.set_quota(request).await).await?;
    let what =
        if args.lift { "has no quota".to_owned() } else { format!("may hold {bytes} bytes on each node") };
    println!("tenant {} {what} (log position {})", args.tenant, done.applied_index);
    Ok(())
}

/// Sets or removes a group's time to live.
pub async fn ttl(args: &TtlArgs) -> anyhow::Result<()> {
    let group = group(args)?;
    let ttl_ms = args.seconds.unwrap_or_default().saturating_mul(1000);
    let request = pb::SetTtlRequest { group, ttl_ms, clear: args.lift };
    let done = write_to_leader(&args.connect, async |router| router.set_ttl(request).await).await?;
    let what = match args.seconds {
        Some(seconds) => format!("leaves nodes {seconds} s after its last use"),
        None => "has no time to live".to_owned(),
    };
    println!("group {group} {what} (log position {})", done.applied_index);
    Ok(())
}

/// Group given by its number or by one of its blocks.
fn group(args: &TtlArgs) -> anyhow::Result<u32> {
    match (&args.block, args.group) {
        (Some(block), _) => Ok(parse_block(block)?.ttl_group().0),
        (None, Some(group)) => Ok(group.into()),
        (None, None) => anyhow::bail!("name a group: --group NUMBER, or --block HASH of one of its blocks"),
    }
}

fn parse_block(text: &str) -> anyhow::Result<BlockHash> {
    BlockHash::from_hex(text)
        .ok_or_else(|| anyhow::anyhow!("`{text}` is not a block hash: expected 38 hexadecimal digits"))
}

fn parse_blocks(texts: &[String]) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(16 * texts.len());
    for text in texts {
        bytes.extend(parse_block(text)?.0);
    }
    Ok(bytes)
}

/// Tries the routers until one accepts the write as leader.
pub(crate) async fn write_to_leader(
    connect: &ConnectArgs,
    write: impl AsyncFn(&RouterCalls) -> Result<pb::AdminReply, Status>,
) -> anyhow::Result<pb::AdminReply> {
    let mut refused = vec![];
    for router in Connection::open(connect)?.all()? {
        match write(&router).await {
            Ok(reply) => return Ok(reply),
            // Refusals by the leader are final; other routers only refuse because they do not lead.
            Err(status) if is_final(&status) => anyhow::bail!("{}", status.message()),
            Err(status) => refused.push(explain(&router.address, &status)),
        }
    }
    anyhow::bail!("no router accepted the write:\n  {}", refused.join("\n  "))
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
    use kv_core::id::HASH_BYTES;

    use super::*;

    #[test]
    fn finds_a_group_by_number_or_block() {
        let connect = ConnectArgs { cluster: Vec::new(), tls_dir: None };
        let args = TtlArgs { connect, group: Some(7), block: None, seconds: Some(1), lift: false };
        assert_eq!(group(&args).unwrap(), 7);
        let block = Some(format!("fe{}", "00".repeat(HASH_BYTES - 1)));
        assert_eq!(group(&TtlArgs { group: None, block, ..args.clone() }).unwrap(), 254);
        assert!(group(&TtlArgs { group: None, block: Some("fe".to_owned()), ..args }).is_err());
    }

    #[test]
    fn builds_pin_requests() {
        let connect = ConnectArgs { cluster: Vec::new(), tls_dir: None };
        let (owner, blocks) = ("me".to_owned(), vec!["00".repeat(HASH_BYTES)]);
        let hard = PinArgs { connect, pin: 1, owner, soft: false, span: None, blocks };
        let request = pin_request(&hard).unwrap();
        assert_eq!((request.soft, request.for_ms, request.blocks.len()), (false, None, HASH_BYTES));
        let span = Some(Duration::from_millis(1_500));
        let asked = pin_request(&PinArgs { soft: true, span, ..hard }).unwrap();
        assert_eq!(
            (asked.soft, asked.for_ms, duration_suffix(span).as_str()),
            (true, Some(1_500), " for 1.5 s")
        );
    }

    #[test]
    fn quotes_an_invalid_hash() {
        assert_eq!(parse_blocks(&["00".repeat(HASH_BYTES)]).unwrap(), vec![0; HASH_BYTES]);
        let message = parse_blocks(&["abc".to_owned()]).unwrap_err().to_string();
        assert_eq!(message, "`abc` is not a block hash: expected 38 hexadecimal digits");
    }
}
