//! Memory that callers lend by address while an operation is in flight.
//!
//! The caller makes its promise once, where the table of addresses is created. `kvfleet-client`
//! keeps the library's side: it reports an operation's end only after the last reference to its
//! buffers or frame source is dropped.
//!
//! Not here: reading the table from a call (`calls.rs`).
#![allow(unsafe_code)] // the caller's pointers: docs/adr/0044

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_client::{FrameSource, SliceBuffer};
use kvfleet_proto::frame::{Frame, FrameBuilder, KeyForm};

/// Address of one layer's slice of one block.
#[derive(Clone, Copy, Debug)]
struct SliceAddress(*mut u8);

// SAFETY: an address may move to any thread; `SliceTable::new` states the rules of reading and
// writing there.
unsafe impl Send for SliceAddress {}
// SAFETY: the same.
unsafe impl Sync for SliceAddress {}

/// The slices of an operation: all layers of the first block, then of the second, and so on.
#[derive(Debug)]
pub(crate) struct SliceTable {
    addresses: Vec<SliceAddress>,
    slice_bytes: Vec<u32>,
    /// Dropped with the table, which disconnects the receiver.
    _release_sender: Option<Sender<Infallible>>,
}

/// Disconnects when the last reference to the slices of a table is dropped; never receives a value.
pub(crate) type ReleaseSignal = Receiver<Infallible>;

impl SliceTable {
    /// # Safety
    /// There is one address for each layer of each block, and it is null only if its slice is
    /// empty. While the table lives, each slice is as long as `slice_bytes` says.
    ///
    /// If buffers are made of it, its slices do not overlap and the caller does not write them. The
    /// caller then reads a slice only after it was reported as filled. If the table is read
    /// instead, its slices are not written.
    pub(crate) unsafe fn new(
        addresses: impl Iterator<Item = *mut u8>,
        slice_bytes: &[u32],
    ) -> Arc<SliceTable> {
        let addresses = addresses.map(SliceAddress).collect();
        Arc::new(SliceTable { addresses, slice_bytes: slice_bytes.to_vec(), _release_sender: None })
    }

    /// The same as one buffer for each block, with a signal of the last buffer's drop.
    ///
    /// # Safety
    /// As [`SliceTable::new`].
    pub(crate) unsafe fn buffers_with_signal(
        addresses: impl Iterator<Item = *mut u8>,
        slice_bytes: &[u32],
    ) -> (Vec<CallerBuffer>, ReleaseSignal) {
        let (sender, gone) = channel();
        let addresses = addresses.map(SliceAddress).collect();
        let table =
            SliceTable { addresses, slice_bytes: slice_bytes.to_vec(), _release_sender: Some(sender) };
        (SliceTable::buffers(&Arc::new(table)), gone)
    }

    /// One buffer for each block.
    pub(crate) fn buffers(table: &Arc<SliceTable>) -> Vec<CallerBuffer> {
        let blocks = table.addresses.len() / table.slice_bytes.len().max(1);
        (0..blocks).map(|block| CallerBuffer { table: Arc::clone(table), block }).collect()
    }

    /// The frames of its blocks, each built when requested.
    pub(crate) fn frames(
        table: Arc<SliceTable>,
        identity: IdentityDigest,
        hashes: Vec<BlockHash>,
        key_form: KeyForm,
    ) -> FrameSource {
        Arc::new(move |block| {
            let hash = hashes.get(block).copied().unwrap_or_default();
            let Ok(mut builder) = FrameBuilder::new(identity, hash, key_form, &table.slice_bytes) else {
                // Its slices were validated at submission; the node refuses an invalid frame.
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

    fn locate(&self, block: usize, layer: usize) -> Option<(*mut u8, usize)> {
        let bytes = *self.slice_bytes.get(layer)?;
        let SliceAddress(at) = *self.addresses.get(block * self.slice_bytes.len() + layer)?;
        // An empty slice may have any address, but a reference must not be null.
        let at = if bytes == 0 { std::ptr::NonNull::dangling().as_ptr() } else { at };
        Some((at, bytes as usize))
    }

    fn read(&self, block: usize, layer: usize) -> Option<&[u8]> {
        let (at, bytes) = self.locate(block, layer)?;
        // SAFETY: by the promise made for the table, the slice lives as long as the table and is
        // not written.
        Some(unsafe { std::slice::from_raw_parts(at, bytes) })
    }
}

/// A buffer for one block in the caller's memory.
#[derive(Debug)]
pub(crate) struct CallerBuffer {
    table: Arc<SliceTable>,
    block: usize,
}

impl SliceBuffer for CallerBuffer {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        let (at, bytes) = self.table.locate(self.block, layer)?;
        // SAFETY: by the promise made for the table, the slice lives as long as the table and has
        // no other user. It is not requested again after it was filled. There is one buffer for
        // each block, and it is borrowed meanwhile.
        Some(unsafe { std::slice::from_raw_parts_mut(at, bytes) })
    }
}

/// Buffers in memory that is never freed, with a signal of the last buffer's drop.
#[cfg(test)]
pub(crate) fn leaked_buffers(blocks: usize, slice_bytes: &[u32]) -> (Vec<CallerBuffer>, ReleaseSignal) {
    let slice = |bytes: &u32| Box::leak(vec![0; *bytes as usize].into_boxed_slice()).as_mut_ptr();
    let addresses: Vec<_> = (0..blocks).flat_map(|_| slice_bytes.iter().map(slice)).collect();
    // SAFETY: each is separate memory that lives forever and has no other user.
    unsafe { SliceTable::buffers_with_signal(addresses.into_iter(), slice_bytes) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Slices of 3, 0 and 2 bytes of two blocks, one after the other.
    fn table(memory: &mut [u8; 10]) -> Arc<SliceTable> {
        let base = memory.as_mut_ptr();
        let null = std::ptr::null_mut();
        let addresses = [base, null, base.wrapping_add(3), base.wrapping_add(5), null, base.wrapping_add(8)];
        // SAFETY: they are parts of an array that outlives the table and that only this test uses.
        unsafe { SliceTable::new(addresses.into_iter(), &[3, 0, 2]) }
    }

    #[test]
    fn buffers_expose_the_slices_of_their_block() {
        let mut memory = [0; 10];
        let table = table(&mut memory);
        let mut rooms = SliceTable::buffers(&table);
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
    fn memory_is_released_when_the_last_buffer_is_dropped() {
        use std::sync::mpsc::TryRecvError;
        let mut memory = [0u8; 4];
        let addresses = [memory.as_mut_ptr(), memory.as_mut_ptr().wrapping_add(2)];
        // SAFETY: they are parts of an array that outlives the buffers and that only this test
        // uses.
        let (mut rooms, gone) = unsafe { SliceTable::buffers_with_signal(addresses.into_iter(), &[2]) };
        assert_eq!((rooms.len(), gone.try_recv()), (2, Err(TryRecvError::Empty)));
        drop(rooms.pop());
        assert_eq!(gone.try_recv(), Err(TryRecvError::Empty));
        drop(rooms.pop());
        assert_eq!(gone.try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn frames_read_the_slices_when_requested() {
        let mut memory = std::array::from_fn(|at| u8::try_from(at).unwrap());
        let table = table(&mut memory);
        let (identity, hash) = (IdentityDigest([1; 16]), BlockHash([2; _]));
        let frames = SliceTable::frames(table, identity, vec![BlockHash::default(), hash], KeyForm::Rotated);
        let frame = frames(1);
        frame.verify(identity, hash).unwrap();
        assert_eq!(&frame.payload()[..], [5, 6, 7, 8, 9]);
        assert_eq!((frame.slice_count(), frame.slice(1).unwrap().len()), (3, 0));
    }
}
