//! The rooms of one source: slices go in, whole blocks come out in order.
//!
//! Not here: what is asked for, and when (`feed.rs`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::FrameHead;
use kvfleet_transport::{
    AskedLayers, BoxFuture, FetchAnswer, FetchRequest, Path, PathError, Progress, SliceSink,
};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::mpsc::error::SendError;

use super::feed::Order;
use super::{BlockRoom, LayerEvent, RoomBack};
use crate::fetch::{Taking, Tally};
use crate::links::Timed;

/// Blocks that were not handed out, and where they go.
pub(super) struct Rooms<R> {
    /// The first of `slots`.
    first: u32,
    slots: VecDeque<Slot<R>>,
    events: UnboundedSender<LayerEvent<R>>,
    /// Where rooms go once nobody hears of events any more.
    back: UnboundedSender<RoomBack<R>>,
}

/// A block's room.
struct Slot<R> {
    room: R,
    /// Layers before this one are there.
    here: usize,
    /// What its slices must be, once that is known: what comes in two fetches is of one frame.
    head: Option<FrameHead>,
}

impl<R> Slot<R> {
    fn is_whole(&self) -> bool {
        self.head.as_ref().is_some_and(|head| self.here == head.slice_count())
    }

    /// The room, with what is in it.
    fn back(self, block: u32) -> RoomBack<R> {
        let layers = u32::try_from(self.here).unwrap_or(u32::MAX);
        RoomBack { block, room: self.room, layers }
    }
}

impl<R: BlockRoom> Rooms<R> {
    pub(super) fn new(
        first: u32,
        rooms: impl Iterator<Item = R>,
        events: UnboundedSender<LayerEvent<R>>,
        back: UnboundedSender<RoomBack<R>>,
    ) -> Rooms<R> {
        let slots = rooms.map(|room| Slot { room, here: 0, head: None }).collect();
        Rooms { first, slots, events, back }
    }

    pub(super) fn events(&self) -> UnboundedSender<LayerEvent<R>> {
        self.events.clone()
    }

    /// The first block that is not there whole.
    pub(super) fn first(&self) -> u32 {
        self.first
    }

    fn slot(&mut self, block: u32) -> Option<&mut Slot<R>> {
        self.slots.get_mut(block.checked_sub(self.first)? as usize)
    }

    fn hand_out_whole(&mut self) {
        while let Some(slot) = self.slots.pop_front_if(|slot| slot.is_whole()) {
            self.hand_out(self.first, slot);
            self.first += 1;
        }
    }

    fn hand_out(&self, block: u32, slot: Slot<R>) {
        let RoomBack { room, layers, .. } = slot.back(block);
        let arrived = LayerEvent::Arrived { block, room };
        if let Err(SendError(LayerEvent::Arrived { room, .. })) = self.events.send(arrived) {
            self.give_back(RoomBack { block, room, layers });
        }
    }

    /// Whoever does not listen for that either does not want it.
    fn give_back(&self, back: RoomBack<R>) {
        let _ = self.back.send(back);
    }

    /// Nothing more comes: what is whole behind a gap is handed out too, the others are told of by `told` if anybody listens.
    pub(super) fn end(mut self, told: impl FnOnce(Vec<RoomBack<R>>) -> LayerEvent<R>) {
        let mut absent = Vec::new();
        for (block, slot) in (self.first..).zip(std::mem::take(&mut self.slots)) {
            if slot.is_whole() {
                self.hand_out(block, slot);
            } else {
                absent.push(slot.back(block));
            }
        }
        if let Err(SendError(LayerEvent::Ended(end))) = self.events.send(told(absent)) {
            end.absent.into_iter().for_each(|back| self.give_back(back));
        }
    }
}

/// Whyever it is over: nothing is written to a room that came back.
impl<R> Drop for Rooms<R> {
    fn drop(&mut self) {
        for (block, slot) in (self.first..).zip(std::mem::take(&mut self.slots)) {
            let _ = self.back.send(slot.back(block));
        }
    }
}

/// One fetch into the rooms.
pub(super) struct Filling<'a, R> {
    pub(super) rooms: &'a mut Rooms<R>,
    /// The first block that is asked for.
    pub(super) first: u32,
    pub(super) asked: AskedLayers,
    pub(super) identity: IdentityDigest,
    /// Of all blocks of the request.
    pub(super) hashes: &'a [BlockHash],
    pub(super) tally: Tally,
    pub(super) timed: Timed,
    /// Whether anything came.
    pub(super) heard: Arc<AtomicBool>,
    /// Set by a path that moves no slices.
    pub(super) whole: Arc<AtomicBool>,
    pub(super) order: Arc<Order>,
    /// Says over what it goes.
    pub(super) progress: Progress,
}

impl<R: BlockRoom> Filling<'_, R> {
    fn block(&self, position: usize) -> u32 {
        self.first.saturating_add(u32::try_from(position).unwrap_or(u32::MAX))
    }

    /// Whether this is the head of a block's frame, and its slices are those of its room.
    fn fits(&mut self, block: u32, head: &FrameHead) -> bool {
        let is_it =
            self.hashes.get(block as usize).is_some_and(|hash| head.verify(self.identity, *hash).is_ok());
        let Some(slot) = self.rooms.slot(block).filter(|_| is_it) else { return false };
        if let Some(before) = &slot.head {
            // Then it fits too. Its room is not looked at again: somebody may be reading what is there.
            return before == head;
        }
        let fits = |layer| slot.room.slice(layer).map(|slice| slice.len()) == head.slice_bytes(layer);
        // Behind the last layer both have nothing.
        let fits = (0..=head.slice_count()).all(fits);
        slot.head = Some(head.clone()).filter(|_| fits);
        fits
    }
}

impl<R: BlockRoom> Taking for Filling<'_, R> {
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        self.timed = Timed::begin();
        self.progress = request.progress.clone();
        self.whole.fetch_or(!path.moves_slices(), Ordering::Relaxed);
        let asked = self.asked.clone();
        Box::pin(async move {
            let answer = path.fetch_layers(request, asked, self).await?;
            self.tally.proven = answer.tiers().len();
            Ok(answer)
        })
    }

    fn tally(&self) -> Tally {
        self.tally
    }

    fn timed(&self) -> Timed {
        self.timed
    }
}

impl<R: BlockRoom> SliceSink for Filling<'_, R> {
    fn head(&mut self, position: usize, head: &FrameHead) -> bool {
        let fits = self.fits(self.block(position), head);
        self.tally.wrong_blocks += u32::from(!fits);
        fits
    }

    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        let block = self.block(position);
        // What was told of is not written again.
        self.rooms.slot(block).filter(|slot| layer >= slot.here)?.room.slice(layer)
    }

    fn filled(&mut self, position: usize, layers: Range<usize>) {
        let block = self.block(position);
        let is_first = block == self.rooms.first;
        let Some(slot) = self.rooms.slot(block).filter(|slot| slot.here == layers.start) else { return };
        slot.here = layers.end;
        layers.clone().for_each(|layer| slot.room.filled(layer));
        if is_first && slot.is_whole() {
            return self.rooms.hand_out_whole();
        }
        let number = |layer: usize| u32::try_from(layer).unwrap_or(u32::MAX);
        let layers = number(layers.start)..number(layers.end);
        let _ = self.rooms.events.send(LayerEvent::Slices { block, layers });
    }

    fn wrong(&mut self, _: usize) {
        self.tally.wrong_blocks += 1;
        self.order.wrong_blocks.fetch_add(1, Ordering::Relaxed);
    }

    fn received(&mut self, bytes: usize) {
        self.tally.received_bytes += bytes as u64;
        self.order.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.timed.came(bytes);
        self.heard.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::pipeline::Arrive;
    use kvfleet_transport::suite::{IDENTITY, frame_of, hash, hashes};
    use tokio::sync::mpsc::unbounded_channel;

    use super::super::{RoomsLeft, SourceEnd};
    use super::*;

    type Room = Vec<Box<[u8]>>;

    fn room() -> Room {
        vec![vec![0; 10].into(), vec![0; 20].into()]
    }

    /// All layers of the blocks from this one on.
    fn filling<'a, R>(rooms: &'a mut Rooms<R>, hashes: &'a [BlockHash], first: u32) -> Filling<'a, R> {
        Filling {
            rooms,
            first,
            asked: AskedLayers { layers: 0..9, arrive: Arrive::ByLayer },
            identity: IDENTITY,
            hashes,
            tally: Tally::default(),
            timed: Timed::begin(),
            heard: Arc::default(),
            whole: Arc::default(),
            order: Arc::default(),
            progress: Progress::default(),
        }
    }

    /// A room that lets others read what is there, and notes from when on.
    struct Sharing(Room, Arc<std::sync::Mutex<Vec<usize>>>);

    impl BlockRoom for Sharing {
        fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
            assert!(!self.1.lock().unwrap().contains(&layer), "it was let go");
            self.0.slice(layer)
        }

        fn filled(&mut self, layer: usize) {
            self.1.lock().unwrap().push(layer);
        }
    }

    #[test]
    fn a_room_hears_of_each_slice_once_and_is_not_asked_for_it_again() {
        let (sender, _events) = unbounded_channel();
        let filled = Arc::<std::sync::Mutex<Vec<usize>>>::default();
        let mut rooms =
            Rooms::new(0, [Sharing(room(), Arc::clone(&filled))].into_iter(), sender, unbounded_channel().0);
        let (hashes, head) = (hashes(1), frame_of(hash(0), &[10, 20]).head().unwrap());
        let mut first = filling(&mut rooms, &hashes, 0);
        assert!(first.head(0, &head));
        first.filled(0, 0..1);
        first.filled(0, 0..1);
        assert_eq!(*filled.lock().unwrap(), [0]);
        let mut second = filling(&mut rooms, &hashes, 0);
        assert!(second.head(0, &head), "its head is compared, and nothing is asked of its room");
        assert!(second.slice(0, 0).is_none() && second.slice(0, 1).is_some());
        second.filled(0, 1..2);
        assert_eq!(*filled.lock().unwrap(), [0, 1]);
    }

    fn ended(absent: Vec<RoomBack<Room>>) -> LayerEvent<Room> {
        let (miss, lease) = (None, None);
        LayerEvent::Ended(Box::new(SourceEnd {
            source: 0,
            miss,
            absent,
            lease,
            received_bytes: 0,
            wrong_blocks: 0,
        }))
    }

    /// What was told: whole blocks as `[block]`, slices as `[block, first, end]`, the end as nothing.
    fn told(events: &mut tokio::sync::mpsc::UnboundedReceiver<LayerEvent<Room>>) -> Vec<Vec<u32>> {
        std::iter::from_fn(|| events.try_recv().ok())
            .map(|event| match event {
                LayerEvent::Slices { block, layers } => vec![block, layers.start, layers.end],
                LayerEvent::Arrived { block, .. } => vec![block],
                LayerEvent::Short { .. } => unreachable!("told by whoever feeds the rooms"),
                LayerEvent::Ended(_) => vec![],
            })
            .collect()
    }

    #[test]
    fn whole_blocks_come_out_in_order_and_behind_a_gap_at_the_end() {
        let (sender, mut events) = unbounded_channel();
        let mut rooms = Rooms::new(2, (0..4).map(|_| room()), sender, unbounded_channel().0);
        let hashes = hashes(6);
        let mut filling = filling(&mut rooms, &hashes, 2);
        for position in 0..4 {
            let head = frame_of(hash(2 + position), &[10, 20]).head().unwrap();
            assert!(filling.head(position as usize, &head));
        }
        filling.filled(1, 0..2);
        assert_eq!(told(&mut events), [[3, 0, 2]]);
        filling.filled(0, 0..1);
        filling.filled(0, 1..2);
        assert_eq!(told(&mut events), [vec![2, 0, 1], vec![2], vec![3]]);
        assert!(filling.slice(0, 1).is_none() && filling.slice(1, 0).is_none(), "what was handed out");
        filling.filled(3, 0..2);
        filling.filled(2, 0..1);
        assert!(filling.slice(2, 0).is_none(), "what was told of");
        assert_eq!(filling.slice(2, 1).map(|slice| slice.len()), Some(20));
        assert!(filling.slice(4, 0).is_none(), "no block of this source");
        assert_eq!((rooms.first(), told(&mut events)), (4, vec![vec![5, 0, 2], vec![4, 0, 1]]));
        let mut absent = Vec::new();
        rooms.end(|rooms| {
            absent = rooms.iter().map(|back| (back.block, back.layers)).collect();
            ended(rooms)
        });
        assert_eq!((absent, told(&mut events)), (vec![(4, 1)], vec![vec![5], vec![]]));
    }

    #[test]
    fn rooms_that_nobody_hears_of_come_back_however_it_ends() {
        let hashes = hashes(3);
        // At its end, and dropped as with a task that is given up.
        for ends in [true, false] {
            let ((sender, mut events), (back, mut came)) = (unbounded_channel(), unbounded_channel());
            let mut rooms = Rooms::new(0, (0..3).map(|_| room()), sender, back);
            let mut filling = filling(&mut rooms, &hashes, 0);
            for position in 0..3 {
                let head = frame_of(hash(position), &[10, 20]).head().unwrap();
                assert!(filling.head(position as usize, &head));
            }
            filling.filled(1, 0..1);
            filling.filled(2, 0..2);
            assert_eq!(told(&mut events), [[1, 0, 1], [2, 0, 2]]);
            events.close();
            filling.filled(0, 0..2);
            if ends {
                rooms.end(ended);
            } else {
                drop(rooms);
            }
            let mut back: Vec<_> =
                std::iter::from_fn(|| came.try_recv().ok()).map(|back| (back.block, back.layers)).collect();
            back.sort_unstable();
            assert_eq!(back, [(0, 2), (1, 1), (2, 2)]);
        }
    }

    /// Whatever moment it is given up at: on another thread a block may just have been told of, and not be seen yet.
    #[test]
    fn no_room_is_lost_to_who_stops_hearing_while_it_is_told() {
        const BLOCKS: u32 = 8;
        let hashes = hashes(BLOCKS);
        let heads: Vec<_> =
            (0..BLOCKS).map(|block| frame_of(hash(block), &[10, 20]).head().unwrap()).collect();
        for turn in 0..500 {
            let ((sender, mut events), (giver, back)) = (unbounded_channel(), unbounded_channel());
            let mut rooms = Rooms::new(0, (0..BLOCKS).map(|_| room()), sender, giver);
            let mut heard = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut filling = filling(&mut rooms, &hashes, 0);
                    for (position, head) in heads.iter().enumerate() {
                        assert!(filling.head(position, head));
                    }
                    (0..6).for_each(|position| filling.filled(position, 0..2));
                    filling.filled(7, 0..1);
                    if turn % 2 == 0 {
                        rooms.end(ended);
                    } else {
                        drop(rooms);
                    }
                });
                let mut heard = Vec::new();
                while heard.len() < turn % 7 {
                    match events.try_recv() {
                        Ok(LayerEvent::Arrived { block, .. }) => heard.push((block, 2)),
                        _ => std::thread::yield_now(),
                    }
                }
                events.close();
                let mut left = RoomsLeft::of(events, back, 2);
                while !left.is_over() {
                    match left.poll() {
                        Some(back) => heard.push((back.block, back.layers)),
                        None => std::thread::yield_now(),
                    }
                }
                heard
            });
            heard.sort_unstable();
            let all = (0..BLOCKS).map(|block| (block, [2, 0, 1][block.saturating_sub(5) as usize]));
            assert_eq!(heard, all.collect::<Vec<_>>(), "turn {turn}");
        }
    }

    #[test]
    fn a_head_that_is_not_the_blocks_or_does_not_fit_is_wrong() {
        let (sender, _events) = unbounded_channel();
        let mut rooms = Rooms::new(0, [room()].into_iter(), sender, unbounded_channel().0);
        let hashes = hashes(1);
        let mut filling = filling(&mut rooms, &hashes, 0);
        let head = |number, slices: &[u32]| frame_of(hash(number), slices).head().unwrap();
        for wrong in [head(1, &[10, 20]), head(0, &[10]), head(0, &[10, 20, 0]), head(0, &[20, 10])] {
            assert!(!filling.head(0, &wrong), "{wrong:?}");
        }
        assert!(!filling.head(1, &head(1, &[10, 20])), "not asked for");
        assert_eq!(filling.tally.wrong_blocks, 5);
        assert!(filling.head(0, &head(0, &[10, 20])));
        let other = frame_of(hash(9), &[10, 20]);
        let other = kvfleet_proto::frame::Frame { hash: hash(0), ..other };
        assert!(!filling.head(0, &other.head().unwrap()), "not the same as before");
        assert!(filling.head(0, &head(0, &[10, 20])));
    }
}
