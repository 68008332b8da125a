//! Copy-on-write images of pages and runs that changed since a snapshot began.
//!
//! The live index is changed in place. The first write to a page or run after a snapshot begins
//! stores its old contents here, and the snapshot writer reads them instead. A command copies only
//! the pages and runs that it changes. The table never moves when it grows and never clears large
//! memory at once. Not here: the writers (`pages.rs`, `run.rs`) and the reader (`snapshot.rs`).

/// Numbers per chunk of the lookup table: 1 KiB, allocated at the first write in the chunk. Few in
/// tests, so that there are several chunks.
const INDEX_CHUNK: usize = if cfg!(test) { 4 } else { 256 };
/// Images that are allocated together.
const SLAB_IMAGES: usize = if cfg!(test) { 3 } else { 256 };

/// Images by page or run number, for the numbers that existed when the snapshot began.
#[derive(Clone, Debug)]
pub(super) struct Images<T> {
    count: u32,
    /// Index of a number's image plus one; zero if it was not written.
    index: Vec<Option<Box<[u32; INDEX_CHUNK]>>>,
    /// Slabs of images; all full but the last.
    slabs: Vec<Vec<T>>,
}

impl<T: Clone> Images<T> {
    /// An empty table for `numbers` numbers. Costs one word per 256 numbers.
    pub(super) fn new(count: u32) -> Self {
        let index = vec![None; (count as usize).div_ceil(INDEX_CHUNK)];
        // Reserves for the maximum: 24 bytes per 256 images, untouched until used.
        let slabs = Vec::with_capacity((count as usize).div_ceil(SLAB_IMAGES));
        Self { count, index, slabs }
    }

    /// Numbers that existed when the snapshot began.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Saves `now` before its first write since the snapshot began. Ignores later writes and newer
    /// numbers.
    #[cold]
    #[inline(never)]
    pub(super) fn preserve(&mut self, number: u32, now: &T) {
        if number >= self.count {
            return;
        }
        let (piece, nth) = (number as usize / INDEX_CHUNK, number as usize % INDEX_CHUNK);
        let place = &mut self.index[piece].get_or_insert_with(|| Box::new([0; INDEX_CHUNK]))[nth];
        if *place > 0 {
            return;
        }
        if self.slabs.last().is_none_or(|slab| slab.len() == SLAB_IMAGES) {
            self.slabs.push(Vec::with_capacity(SLAB_IMAGES));
        }
        let full = (self.slabs.len() - 1) * SLAB_IMAGES;
        if let Some(slab) = self.slabs.last_mut() {
            slab.push(now.clone());
            *place = (full + slab.len()) as u32;
        }
    }

    /// The image from when the snapshot began, if the number was written since.
    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<&T> {
        let piece = self.index.get(number as usize / INDEX_CHUNK)?.as_deref()?;
        let image = piece[number as usize % INDEX_CHUNK].checked_sub(1)? as usize;
        Some(&self.slabs[image / SLAB_IMAGES][image % SLAB_IMAGES])
    }
}
