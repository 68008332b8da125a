//! Memory that others may write while this process reads it.
//!
//! Not here: copies with a checksum (`mod.rs`).
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// Bytes that other processes, devices, or threads with atomic stores may write during a read. The
/// only way to read them is a copy that loads each byte once.
#[derive(Clone, Copy, Debug)]
pub struct SharedBytes<'memory> {
    start: *const u8,
    len: usize,
    _memory: PhantomData<&'memory [AtomicU8]>,
}

impl<'memory> SharedBytes<'memory> {
    /// The `len` bytes at `start`.
    ///
    /// # Safety
    /// They must be readable as long as `'memory` lasts. Concurrent writers must be devices, other
    /// processes, or threads of this process that use atomic stores.
    #[inline]
    #[must_use]
    pub unsafe fn new(start: *const u8, len: usize) -> Self {
        Self { start, len, _memory: PhantomData }
    }

    /// The bytes of these words.
    #[inline]
    #[must_use]
    pub fn of_words(words: &'memory [AtomicU64]) -> Self {
        Self { start: words.as_ptr().cast(), len: size_of_val(words), _memory: PhantomData }
    }

    /// Number of bytes.
    #[inline]
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[inline]
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The `len` bytes from `at` on.
    ///
    /// # Panics
    /// When they exceed the bytes.
    #[inline]
    #[must_use]
    pub fn slice(self, at: usize, len: usize) -> Self {
        let is_inside = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "{len} bytes at {at} of {}", self.len);
        // SAFETY: inside the bytes, as was just checked.
        Self { start: unsafe { self.start.add(at) }, len, ..self }
    }

    #[inline]
    pub(super) fn as_ptr(self) -> *const u8 {
        self.start
    }

    /// A copy without a checksum, for short data that is read next: it stays in the caches. The
    /// compiler neither repeats nor splits the loads.
    ///
    /// # Panics
    /// When `to` has another length.
    pub fn copy_to(self, to: &mut [u8]) {
        /// The longest load that every processor does atomically.
        const WORD_BYTES: usize = 8;
        super::check_lengths(to.len(), self.len);
        let from = self.start;
        let head = from.align_offset(WORD_BYTES).min(to.len());
        let (to_head, to) = to.split_at_mut(head);
        let (to_words, to_tail) = to.as_chunks_mut::<WORD_BYTES>();
        let tail = head + to_words.len() * WORD_BYTES;
        // SAFETY: all accesses lie within the bytes, which are as many as `to` has. An atomic load
        // does not race with atomic stores, and devices and other processes are outside the memory
        // model. The words are aligned, because they begin after the head.
        unsafe {
            for (at, byte) in to_head.iter_mut().enumerate() {
                *byte = (*from.add(at).cast::<AtomicU8>()).load(Relaxed);
            }
            for (at, word) in to_words.iter_mut().enumerate() {
                let from = from.add(head + at * WORD_BYTES).cast::<AtomicU64>();
                *word = (*from).load(Relaxed).to_ne_bytes();
            }
            for (at, byte) in to_tail.iter_mut().enumerate() {
                *byte = (*from.add(tail + at).cast::<AtomicU8>()).load(Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic = "3 bytes at 6 of 8"]
    fn refuses_a_range_outside_the_bytes() {
        let _ = SharedBytes::of_words(&[AtomicU64::new(0)]).slice(6, 3);
    }

    #[test]
    #[should_panic = "needs buffers of equal length"]
    fn refuses_a_destination_of_another_length() {
        SharedBytes::of_words(&[AtomicU64::new(0)]).copy_to(&mut [0; 9]);
    }
}
