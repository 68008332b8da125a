//! A snapshot on its way: what is not as it was sent is refused, and must be sent again.

use std::sync::Arc;

use bytes::Bytes;
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use tonic::{Code, Status};

use super::super::Cluster;
use super::super::network::{Envelope, parts};
use super::super::service::gather;

/// Two and a half parts.
const BYTES: usize = 5 << 19;

fn sent() -> Vec<pb::SnapshotPart> {
    let envelope = Envelope { cluster: Arc::new(Cluster { name: "test".into(), shards: 2 }), group: 1 };
    let data: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    parts(&envelope, b"head".to_vec(), Bytes::from(data)).collect()
}

async fn received(parts: Vec<pb::SnapshotPart>) -> Result<Bytes, Status> {
    let mut stream = futures_util::stream::iter(parts.into_iter().skip(1).map(Ok));
    gather(&mut stream, BYTES as u64).await
}

#[tokio::test]
async fn a_snapshot_arrives_as_it_was_sent() {
    let parts = sent();
    assert_eq!((parts.len(), parts[0].head.as_slice(), parts[0].shards), (4, &b"head"[..], 2));
    let data = received(parts).await.unwrap();
    assert!(data.len() == BYTES && data.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8));
}

#[tokio::test]
async fn a_flipped_bit_in_any_part_is_refused() {
    for part in 1..4 {
        let mut parts = sent();
        let middle = parts[part].data.len() / 2;
        parts[part].data[middle] ^= 4;
        let status = received(parts).await.unwrap_err();
        assert_eq!(status.code(), Code::DataLoss);
        let is_checksum =
            |word: &&str| word.len() == 8 && word.chars().all(|letter| letter.is_ascii_hexdigit());
        let text = status.message().to_owned();
        let varying: Vec<&str> =
            text.split(|letter: char| !letter.is_alphanumeric()).filter(is_checksum).collect();
        says("a flipped bit in a snapshot on its way", &text, &varying);
    }
}

#[tokio::test]
async fn a_part_too_few_or_too_many_is_refused() {
    let mut few = sent();
    few.pop();
    assert_eq!(received(few).await.unwrap_err().code(), Code::InvalidArgument);
    let mut many = sent();
    many.push(many[3].clone());
    assert_eq!(received(many).await.unwrap_err().code(), Code::InvalidArgument);
}
