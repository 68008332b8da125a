//! The memory that callers lend: by address, for as long as an operation is in flight.
//!
//! The promise is made once, where a table of addresses is made, and kept by `kvfleet-client`: it tells the end of an
//! operation when nothing has its rooms or its frame source any more.
//!
//! Not here: how the table is read (`calls.rs`).
#![allow(unsafe_code)] // the caller's pointers: docs/adr/0044

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_client::{BlockRoom, FrameSource};
use kvfleet_proto::frame::{Frame, FrameBuilder, KeyForm};

/// Where one layer's slice of one block is.
#[derive(Clone, Copy, Debug)]
struct Address(*mut u8);

// SAFETY: an address may go to any thread; who reads and writes there, and when, is said at `Table::new`.
unsafe impl Send for Address {}
// SAFETY: the same.
unsafe impl Sync for Address {}

/// The slices of an operation: all layers of the first block, then of the second.
#[derive(Debug)]
pub(crate) struct Table {
    addresses: Vec<Address>,
    slice_bytes: Vec<u32>,
    /// Whoever waits for the other end hears when the table is dropped.
    _gone: Option<Sender<Infallible>>,
}

/// Hears when nothing refers to the slices of a table any more: nothing is ever received but the end.
pub(crate) type Gone = Receiver<Infallible>;

impl Table {
    /// # Safety
    /// There is one address for each layer of each block, none of them null unless its slice is empty. While the table
    /// lives each slice is as long as `slice_bytes` says. If rooms are made of it, no slice overlaps another one, nobody else
    /// writes them, and nobody else reads one before it was told of as filled; if it is read, nobody writes them.
    pub(crate) unsafe fn new(addresses: impl Iterator<Item = *mut u8>, slice_bytes: &[u32]) -> Arc<Table> {
        let addresses = addresses.map(Address).collect();
        Arc::new(Table { addresses, slice_bytes: slice_bytes.to_vec(), _gone: None })
    }

    /// The same, one room for each block, and who hears when the last of the rooms is dropped.
    ///
    /// # Safety
    /// As [`Table::new`].
    pub(crate) unsafe fn lent(
        addresses: impl Iterator<Item = *mut u8>,
        slice_bytes: &[u32],
    ) -> (Vec<Room>, Gone) {
        let (sender, gone) = channel();
        let addresses = addresses.map(Address).collect();
        let table = Table { addresses, slice_bytes: slice_bytes.to_vec(), _gone: Some(sender) };
        (Table::rooms(&Arc::new(table)), gone)
    }

    /// One room for each block.
    pub(crate) fn rooms(table: &Arc<Table>) -> Vec<Room> {
        let blocks = table.addresses.len() / table.slice_bytes.len().max(1);
        (0..blocks).map(|block| Room { table: Arc::clone(table), block }).collect()
    }

    /// The frames of its blocks, each made when it is asked for.
    pub(crate) fn frames(
        table: Arc<Table>,
        identity: IdentityDigest,
        hashes: Vec<BlockHash>,
        key_form: KeyForm,
    ) -> FrameSource {
        Arc::new(move |block| {
            let hash = hashes.get(block).copied().unwrap_or_default();
            let Ok(mut builder) = FrameBuilder::new(identity, hash, key_form, &table.slice_bytes) else {
                // Its slices were found good when it was submitted; what is no frame is refused by the node.
                return Frame { bytes: Bytes::new(), identity, hash };
            };
            let mut payload = builder.payload_mut();
            for layer in 0..table.slice_bytes.len() {
                let slice = table.read(block, layer).unwrap_or_default();
                let (to, rest) = payload.split_at_mut(slice.len());
                to.copy_from_slice(slice);
                payload = rest;
            }
            builder.seal()
        })
    }

    fn place(&self, block: usize, layer: usize) -> Option<(*mut u8, usize)> {
        let bytes = *self.slice_bytes.get(layer)?;
        let Address(at) = *self.addresses.get(block * self.slice_bytes.len() + layer)?;
        // A slice of nothing may be anywhere, and a reference to it may not be null.
        let at = if bytes == 0 { std::ptr::NonNull::dangling().as_ptr() } else { at };
        Some((at, bytes as usize))
    }

    fn read(&self, block: usize, layer: usize) -> Option<&[u8]> {
        let (at, bytes) = self.place(block, layer)?;
        // SAFETY: the slice lives as long as the table and nobody writes it, as whoever made the table promised.
        Some(unsafe { std::slice::from_raw_parts(at, bytes) })
    }
}

/// Room for one block in memory of the caller.
#[derive(Debug)]
pub(crate) struct Room {
    table: Arc<Table>,
    block: usize,
}

impl BlockRoom for Room {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        let (at, bytes) = self.table.place(self.block, layer)?;
        // SAFETY: the slice lives as long as the table and nobody else uses it, as whoever made the table promised, and
        // it is not asked for any more once it was filled; there is one room for each block, and it is borrowed meanwhile.
        Some(unsafe { std::slice::from_raw_parts_mut(at, bytes) })
    }
}

/// Rooms of so many blocks in memory that is never freed, and who hears when the last is dropped.
#[cfg(test)]
pub(crate) fn leaked(blocks: usize, slice_bytes: &[u32]) -> (Vec<Room>, Gone) {
    let slice = |bytes: &u32| Box::leak(vec![0; *bytes as usize].into_boxed_slice()).as_mut_ptr();
    let addresses: Vec<_> = (0..blocks).flat_map(|_| slice_bytes.iter().map(slice)).collect();
    // SAFETY: each is memory of its own that lives for ever and that nobody else knows.
    unsafe { Table::lent(addresses.into_iter(), slice_bytes) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Slices of 3, 0 and 2 bytes of two blocks, behind one another.
    fn table(memory: &mut [u8; 10]) -> Arc<Table> {
        let base = memory.as_mut_ptr();
        let null = std::ptr::null_mut();
        let addresses = [base, null, base.wrapping_add(3), base.wrapping_add(5), null, base.wrapping_add(8)];
        // SAFETY: they are parts of an array that outlives the table, which each test uses alone.
        unsafe { Table::new(addresses.into_iter(), &[3, 0, 2]) }
    }

    #[test]
    fn rooms_are_the_slices_of_their_block() {
        let mut memory = [0; 10];
        let table = table(&mut memory);
        let mut rooms = Table::rooms(&table);
        assert_eq!(rooms.len(), 2);
        for (number, room) in (1..).zip(&mut rooms) {
            for (layer, bytes) in [3, 0, 2].into_iter().enumerate() {
                let slice = room.slice(layer).unwrap();
                assert_eq!(slice.len(), bytes);
                slice.fill(number * 10 + u8::try_from(layer).unwrap());
            }
            assert!(room.slice(3).is_none());
        }
        assert_eq!(memory, [10, 10, 10, 12, 12, 20, 20, 20, 22, 22]);
    }

    #[test]
    fn memory_is_lent_until_its_last_room_is_dropped() {
        use std::sync::mpsc::TryRecvError;
        let mut memory = [0u8; 4];
        let addresses = [memory.as_mut_ptr(), memory.as_mut_ptr().wrapping_add(2)];
        // SAFETY: they are parts of an array that outlives the rooms, which this test uses alone.
        let (mut rooms, gone) = unsafe { Table::lent(addresses.into_iter(), &[2]) };
        assert_eq!((rooms.len(), gone.try_recv()), (2, Err(TryRecvError::Empty)));
        drop(rooms.pop());
        assert_eq!(gone.try_recv(), Err(TryRecvError::Empty));
        drop(rooms.pop());
        assert_eq!(gone.try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn frames_are_what_the_slices_hold_when_they_are_asked_for() {
        let mut memory = std::array::from_fn(|at| u8::try_from(at).unwrap());
        let table = table(&mut memory);
        let (identity, hash) = (IdentityDigest([1; 16]), BlockHash([2; 16]));
        let frames = Table::frames(table, identity, vec![BlockHash::default(), hash], KeyForm::Rotated);
        let frame = frames(1);
        frame.verify(identity, hash).unwrap();
        assert_eq!(&frame.payload()[..], [5, 6, 7, 8, 9]);
        assert_eq!((frame.slice_count(), frame.slice(1).unwrap().len()), (3, 0));
    }
}
