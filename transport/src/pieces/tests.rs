//! The order of pieces, and a reader's handling of invalid pieces.
#![allow(clippy::unwrap_used)]

use bytes::BytesMut;
use kvfleet_proto::frame::Frame;

use super::*;
use crate::stream::StreamError;
use crate::suite::{CheckedSlices, frame_of, hash, hashes};

const ALL: Range<usize> = 0..usize::MAX;

fn by_layer(layers: Range<usize>) -> PieceQueue<Bytes> {
    PieceQueue::new(LayerRequest { layers, arrive: ArrivalOrder::ByLayer })
}

fn add(wave: &mut PieceQueue<Bytes>, frame: &Frame) {
    wave.add(frame.head().unwrap(), frame.bytes.clone());
}

fn order(wave: &mut PieceQueue<Bytes>) -> Vec<(usize, Range<usize>)> {
    std::iter::from_fn(|| wave.next_piece()).map(|piece| (piece.position, piece.layers)).collect()
}

#[test]
fn a_layer_of_all_blocks_comes_before_the_next() {
    let mut wave = by_layer(ALL);
    (0..3).for_each(|number| add(&mut wave, &frame_of(hash(number), &[20_000; 2])));
    let expected = [(0, 0..1), (1, 0..1), (2, 0..1), (0, 1..2), (1, 1..2), (2, 1..2)];
    assert_eq!(order(&mut wave), expected);
}

#[test]
fn later_blocks_catch_up() {
    let mut wave = by_layer(ALL);
    add(&mut wave, &frame_of(hash(0), &[20_000; 4]));
    let first: Vec<_> = (0..2).map(|_| wave.next_piece().unwrap().layers).collect();
    assert_eq!(first, [0..1, 1..2]);
    add(&mut wave, &frame_of(hash(1), &[20_000; 4]));
    let expected = [(1, 0..1), (1, 1..2), (0, 2..3), (1, 2..3), (0, 3..4), (1, 3..4)];
    assert_eq!(order(&mut wave), expected);
}

#[test]
fn by_block_each_block_is_sent_whole() {
    let mut wave = PieceQueue::new(LayerRequest { layers: 1..9, arrive: ArrivalOrder::ByBlock });
    (0..3).for_each(|number| add(&mut wave, &frame_of(hash(number), &[20_000; 4])));
    assert_eq!(order(&mut wave), [(0, 1..4), (1, 1..4), (2, 1..4)]);
}

#[test]
fn short_requested_slices_are_sent_together() {
    let mut wave = by_layer(1..90);
    let frame = frame_of(hash(0), &[1000; 40]);
    add(&mut wave, &frame);
    let pieces: Vec<Piece<Bytes>> = std::iter::from_fn(|| wave.next_piece()).collect();
    let layers: Vec<_> = pieces.iter().map(|piece| piece.layers.clone()).collect();
    assert_eq!(layers, [1..18, 18..35, 35..40]);
    let sent: Vec<u8> = pieces.iter().flat_map(|piece| piece.bytes().to_vec()).collect();
    assert_eq!(sent, frame.payload()[1000..]);
    let mut none = by_layer(40..90);
    add(&mut none, &frame);
    assert!(none.next_piece().is_none());
}

/// A source of fixed bytes, followed by the end.
struct RawSource(Vec<u8>);

impl Source for RawSource {
    async fn fill(&mut self, _: &mut BytesMut, _: usize) -> Result<bool, StreamError> {
        unreachable!("pieces are read in place")
    }

    async fn read_into(&mut self, to: &mut [u8], _: usize) -> Result<bool, StreamError> {
        if self.0.len() < to.len() {
            return Ok(false);
        }
        let rest = self.0.split_off(to.len());
        to.copy_from_slice(&self.0);
        self.0 = rest;
        Ok(true)
    }
}

fn head(position: usize, frame: &Frame) -> Vec<u8> {
    [&head_start(position)[..], frame.head().unwrap().bytes()].concat()
}

fn slices(position: usize, layers: Range<usize>, frame: &Frame) -> Vec<u8> {
    let bytes: Vec<u8> = layers.clone().flat_map(|layer| frame.slice(layer).unwrap().to_vec()).collect();
    [&start(position, layers.start, layers.len())[..], &bytes].concat()
}

async fn read(
    parts: &[Vec<u8>],
    layers: Range<usize>,
) -> (Result<Option<Option<MissReason>>, ItemError>, Vec<usize>, usize) {
    let mut rooms = CheckedSlices::new(&hashes(2), layers.clone());
    let mut filling = FetchAssembly::new(&mut rooms, layers);
    let ended = receive(&mut RawSource(parts.concat()), 2, &mut filling).await;
    let whole = filling.complete_blocks();
    rooms.check();
    (ended, rooms.layers_received(), whole)
}

#[tokio::test]
async fn pieces_of_different_blocks_may_interleave() {
    let [a, b] = [0, 1].map(|number| frame_of(hash(number), &[10, 0, 30]));
    let parts = [head(0, &a), slices(0, 0..2, &a), head(1, &b), slices(1, 0..3, &b), slices(0, 2..3, &a)];
    let (ended, there, whole) = read(&parts, ALL).await;
    assert!(matches!(ended, Ok(None)), "{ended:?}");
    assert_eq!((there, whole), (vec![3, 3], 2));
    let (ended, there, whole) =
        read(&[&parts[..3], &[end(Some(MissReason::Busy)).to_vec()]].concat(), ALL).await;
    assert!(matches!(ended, Ok(Some(Some(MissReason::Busy)))), "{ended:?}");
    assert_eq!((there, whole), (vec![2, 0], 0), "received slices must stay valid");
}

#[tokio::test]
async fn invalid_pieces_end_the_fetch() {
    let [a, b] = [0, 1].map(|number| frame_of(hash(number), &[10, 0, 30]));
    let begun = [head(0, &a), slices(0, 0..1, &a)];
    let nonsense: [(&str, Vec<u8>); 8] = [
        ("a layer twice", slices(0, 0..1, &a)),
        ("a layer too early", slices(0, 2..3, &a)),
        ("a layer too many", [&start(0, 1, 3)[..], &[0; 64]].concat()),
        ("a block without its head", slices(1, 0..1, &b)),
        ("a head twice", head(0, &a)),
        ("a head too early", head(2, &b)),
        ("no head", [&head_start(1)[..], b"KVF9 is what it is not"].concat()),
        ("the largest of all", [0xFE; 8].to_vec()),
    ];
    for (what, part) in nonsense {
        let (ended, there, whole) = read(&[&begun[..], &[part]].concat(), ALL).await;
        assert!(ended.as_ref().is_err_and(|error| !error.is_loss()), "{what}: {ended:?}");
        assert_eq!((there, whole), (vec![1], 0), "{what}: received slices must stay valid");
    }
    let extra = [&begun[..], &[slices(0, 1..3, &a), head(1, &b), slices(1, 0..3, &b), head(2, &b)]].concat();
    assert!(matches!(read(&extra, ALL).await.0, Ok(None)), "bytes after the last piece were read");
    let asked_less = [head(0, &a), slices(0, 0..3, &a)];
    assert!(read(&asked_less, 0..2).await.0.is_err(), "an unrequested layer");
    for bytes in 0..begun.concat().len() {
        let (ended, _, whole) = read(&[begun.concat()[..bytes].to_vec()], ALL).await;
        assert!(ended.is_err_and(|error| error.is_loss()) && whole == 0, "cut after {bytes}");
    }
}

#[tokio::test]
async fn a_bad_slice_rejects_its_block_and_all_later_ones() {
    let [a, b] = [0, 1].map(|number| frame_of(hash(number), &[10, 0, 30]));
    let mut wrong = slices(1, 0..3, &b);
    wrong[PIECE_HEAD_BYTES + 3] ^= 1;
    let parts = [head(0, &a), head(1, &b), wrong, slices(0, 0..3, &a)];
    let (ended, there, whole) = read(&parts, ALL).await;
    assert!(matches!(ended, Ok(None)), "{ended:?}");
    assert_eq!((there, whole), (vec![3, 0], 1));
}
