//! A snapshot in transit: changed data is refused at the first wrong chunk, and must be sent again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use tempfile::TempDir;
use tonic::{Code, Status};

use super::super::ClusterIdentity;
use super::super::intake::ReceivedSnapshot;
use super::super::network::Envelope;
use super::super::service::receive;
use super::super::snapshot_file::SnapshotFile;
use super::super::snapshot_sender::parts;
use super::intake;
use super::snapshots::{GROUP, filled, stored};

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(600);

/// Three chunks of runs.
const BLOCKS: u64 = 14_000;

async fn sent(stored: &Arc<SnapshotFile>) -> Vec<pb::SnapshotPart> {
    let envelope =
        Envelope { cluster: Arc::new(ClusterIdentity { name: "test".into(), shards: 2 }), group: GROUP };
    parts(&envelope, b"head".to_vec(), Arc::clone(stored)).collect().await
}

/// A snapshot and its parts.
async fn made(directory: &TempDir) -> (Arc<SnapshotFile>, Vec<pb::SnapshotPart>) {
    let (machine, _) = filled(directory.path(), BLOCKS).await;
    let stored = stored(machine.build().unwrap());
    let parts = sent(&stored).await;
    (stored, parts)
}

async fn received(stored: &SnapshotFile, parts: Vec<pb::SnapshotPart>) -> Result<ReceivedSnapshot, Status> {
    let directory = TempDir::new().unwrap();
    let mut stream = futures_util::stream::iter(parts.into_iter().skip(1).map(Ok));
    let intake = intake(directory.path(), GROUP);
    let received = receive(&intake, stored.meta.clone(), stored.bytes, &mut stream, NEVER).await;
    if received.is_err() {
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "no part of it remains");
    }
    received
}

#[tokio::test]
async fn a_snapshot_arrives_as_it_was_sent() {
    let directory = TempDir::new().unwrap();
    let (machine, _) = filled(directory.path(), BLOCKS).await;
    let stored = stored(machine.build().unwrap());
    let parts = sent(&stored).await;
    assert_eq!((parts.len(), parts[0].head.as_slice(), parts[0].shards), (6, &b"head"[..], 2));
    let received = received(&stored, parts).await.unwrap();
    assert_eq!(received.index.digest(), machine.published().read().index.digest());
    assert_eq!((received.file.stored.bytes, &received.file.stored.meta), (stored.bytes, &stored.meta));
}

#[tokio::test]
async fn a_flipped_bit_is_refused_at_its_chunk() {
    let directory = TempDir::new().unwrap();
    let (stored, sound) = made(&directory).await;
    for part in 1..sound.len() {
        let mut parts = sound.clone();
        let middle = parts[part].data.len() / 2;
        parts[part].data[middle] ^= 4;
        let status = received(&stored, parts).await.unwrap_err();
        assert_eq!(status.code(), Code::DataLoss);
        let chunk = part as u64 - 1;
        assert!(status.message().contains(&format!("refused at chunk {chunk}:")), "{status}");
        if part == 2 {
            says("a flipped bit in a snapshot on its way", &status.message(), &[]);
        }
    }
    // A wrong length misaligns all later chunks.
    let mut parts = sound.clone();
    parts[2].data[3] ^= 0x80;
    assert_eq!(received(&stored, parts).await.unwrap_err().code(), Code::DataLoss);
}

#[tokio::test]
async fn a_wrong_chunk_ends_the_stream_early() {
    let directory = TempDir::new().unwrap();
    let (stored, mut parts) = made(&directory).await;
    parts[2].data[100] ^= 4;
    let there = parts.into_iter().skip(1).take(2).map(Ok);
    // The rest never comes: a receiver that waited for it would hang.
    let mut stream = futures_util::stream::iter(there).chain(futures_util::stream::pending());
    let intake = intake(directory.path(), GROUP);
    let refused = receive(&intake, stored.meta.clone(), stored.bytes, &mut stream, NEVER).await;
    assert!(refused.unwrap_err().message().contains("refused at chunk 1:"));
}

#[tokio::test]
async fn a_part_too_few_or_too_many_is_refused() {
    let directory = TempDir::new().unwrap();
    let (stored, sound) = made(&directory).await;
    let mut few = sound.clone();
    few.pop();
    let status = received(&stored, few).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let mut many = sound.clone();
    many.push(many[3].clone());
    let status = received(&stored, many).await.unwrap_err();
    assert!(matches!(status.code(), Code::InvalidArgument | Code::DataLoss), "{status}");
}

#[tokio::test]
async fn a_silent_sender_times_out() {
    let directory = TempDir::new().unwrap();
    let (stored, parts) = made(&directory).await;
    let there = parts.into_iter().skip(1).take(1).map(Ok);
    let mut stream = futures_util::stream::iter(there).chain(futures_util::stream::pending());
    let intake = intake(directory.path(), GROUP);
    let soon = Duration::from_millis(20);
    let status = receive(&intake, stored.meta.clone(), stored.bytes, &mut stream, soon).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
}

#[tokio::test]
async fn damage_on_the_senders_disk_is_detected_before_sending() {
    let directory = TempDir::new().unwrap();
    let (stored, sound) = made(&directory).await;
    let path = super::super::snapshot_file::path_of(directory.path(), GROUP);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&path, bytes).unwrap();
    let parts = sent(&stored).await;
    assert!(parts.len() < sound.len() && stored.is_damaged());
    assert_eq!(received(&stored, parts).await.unwrap_err().code(), Code::InvalidArgument);
}
