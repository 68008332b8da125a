//! Which piece leaves next, and what a reader does with pieces that make no sense.
#![allow(clippy::unwrap_used)]

use bytes::BytesMut;
use kvfleet_proto::frame::Frame;

use super::*;
use crate::stream::Loss;
use crate::suite::{Rooms, frame_of, hash, hashes};

const ALL: Range<usize> = 0..usize::MAX;

fn by_layer(layers: Range<usize>) -> Wave<Bytes> {
    Wave::new(AskedLayers { layers, arrive: Arrive::ByLayer })
}

fn add(wave: &mut Wave<Bytes>, frame: &Frame) {
    wave.add(frame.head().unwrap(), frame.bytes.clone());
}

fn order(wave: &mut Wave<Bytes>) -> Vec<(usize, Range<usize>)> {
    std::iter::from_fn(|| wave.next()).map(|piece| (piece.position, piece.layers)).collect()
}

#[test]
fn a_layer_of_all_blocks_comes_before_the_next() {
    let mut wave = by_layer(ALL);
    (0..3).for_each(|number| add(&mut wave, &frame_of(hash(number), &[20_000; 2])));
    let expected = [(0, 0..1), (1, 0..1), (2, 0..1), (0, 1..2), (1, 1..2), (2, 1..2)];
    assert_eq!(order(&mut wave), expected);
}

#[test]
fn a_block_that_comes_later_catches_up() {
    let mut wave = by_layer(ALL);
    add(&mut wave, &frame_of(hash(0), &[20_000; 4]));
    let first: Vec<_> = (0..2).map(|_| wave.next().unwrap().layers).collect();
    assert_eq!(first, [0..1, 1..2]);
    add(&mut wave, &frame_of(hash(1), &[20_000; 4]));
    let expected = [(1, 0..1), (1, 1..2), (0, 2..3), (1, 2..3), (0, 3..4), (1, 3..4)];
    assert_eq!(order(&mut wave), expected);
}

#[test]
fn by_blocks_each_leaves_whole() {
    let mut wave = Wave::new(AskedLayers { layers: 1..9, arrive: Arrive::ByBlock });
    (0..3).for_each(|number| add(&mut wave, &frame_of(hash(number), &[20_000; 4])));
    assert_eq!(order(&mut wave), [(0, 1..4), (1, 1..4), (2, 1..4)]);
}

#[test]
fn short_slices_leave_together_and_only_those_that_were_asked() {
    let mut wave = by_layer(1..90);
    let frame = frame_of(hash(0), &[1000; 40]);
    add(&mut wave, &frame);
    let pieces: Vec<Piece<Bytes>> = std::iter::from_fn(|| wave.next()).collect();
    let layers: Vec<_> = pieces.iter().map(|piece| piece.layers.clone()).collect();
    assert_eq!(layers, [1..18, 18..35, 35..40]);
    let sent: Vec<u8> = pieces.iter().flat_map(|piece| piece.bytes().to_vec()).collect();
    assert_eq!(sent, frame.payload()[1000..]);
    let mut none = by_layer(40..90);
    add(&mut none, &frame);
    assert!(none.next().is_none());
}

/// Bytes that came, and then the end.
struct Lying(Vec<u8>);

impl Source for Lying {
    async fn fill(&mut self, _: &mut BytesMut, _: usize) -> Result<bool, Loss> {
        unreachable!("pieces are read into place")
    }

    async fn read_into(&mut self, to: &mut [u8], _: usize) -> Result<bool, Loss> {
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
    let mut rooms = Rooms::new(&hashes(2), layers.clone());
    let mut filling = Filling::new(&mut rooms, layers);
    let ended = receive(&mut Lying(parts.concat()), 2, &mut filling).await;
    let whole = filling.whole();
    rooms.check();
    (ended, rooms.layers_there(), whole)
}

#[tokio::test]
async fn pieces_come_in_any_order_in_which_each_block_is_in_its_own() {
    let [a, b] = [0, 1].map(|number| frame_of(hash(number), &[10, 0, 30]));
    let parts = [head(0, &a), slices(0, 0..2, &a), head(1, &b), slices(1, 0..3, &b), slices(0, 2..3, &a)];
    let (ended, there, whole) = read(&parts, ALL).await;
    assert!(matches!(ended, Ok(None)), "{ended:?}");
    assert_eq!((there, whole), (vec![3, 3], 2));
    let (ended, there, whole) =
        read(&[&parts[..3], &[end(Some(MissReason::Busy)).to_vec()]].concat(), ALL).await;
    assert!(matches!(ended, Ok(Some(Some(MissReason::Busy)))), "{ended:?}");
    assert_eq!((there, whole), (vec![2, 0], 0), "what came stands");
}

#[tokio::test]
async fn pieces_that_make_no_sense_end_the_fetch() {
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
        assert_eq!((there, whole), (vec![1], 0), "{what}: what came stands");
    }
    let extra = [&begun[..], &[slices(0, 1..3, &a), head(1, &b), slices(1, 0..3, &b), head(2, &b)]].concat();
    assert!(matches!(read(&extra, ALL).await.0, Ok(None)), "what is behind is not looked at");
    let asked_less = [head(0, &a), slices(0, 0..3, &a)];
    assert!(read(&asked_less, 0..2).await.0.is_err(), "a layer that was not asked for");
    for bytes in 0..begun.concat().len() {
        let (ended, _, whole) = read(&[begun.concat()[..bytes].to_vec()], ALL).await;
        assert!(ended.is_err_and(|error| error.is_loss()) && whole == 0, "cut after {bytes}");
    }
}

#[tokio::test]
async fn a_wrong_slice_spoils_its_block_and_those_behind() {
    let [a, b] = [0, 1].map(|number| frame_of(hash(number), &[10, 0, 30]));
    let mut wrong = slices(1, 0..3, &b);
    wrong[PIECE_HEAD_BYTES + 3] ^= 1;
    let parts = [head(0, &a), head(1, &b), wrong, slices(0, 0..3, &a)];
    let (ended, there, whole) = read(&parts, ALL).await;
    assert!(matches!(ended, Ok(None)), "{ended:?}");
    assert_eq!((there, whole), (vec![3, 0], 1));
}
