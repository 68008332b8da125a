//! Page-aligned memory for direct I/O. Not here: what is in it.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::format::PAGE_BYTES;

/// A zeroed buffer of whole pages, aligned to one.
#[derive(Debug)]
pub(crate) struct PageBuffer {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory, owned by this value alone.
unsafe impl Send for PageBuffer {}

impl PageBuffer {
    pub(crate) fn new(bytes: usize) -> PageBuffer {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let layout = Layout::from_size_align(bytes, PAGE_BYTES)
            .expect("slot sizes are far below isize::MAX and a page is a power of two");
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        PageBuffer { base, layout }
    }
}

impl Drop for PageBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `size` initialised bytes, owned by self.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.layout.size()) }
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_whole_aligned_zero_pages() {
        let buffer = PageBuffer::new(5000);
        assert_eq!(buffer.len(), 8192);
        assert_eq!(buffer.as_ptr() as usize % PAGE_BYTES, 0);
        assert!(buffer.iter().all(|byte| *byte == 0));
    }
}
