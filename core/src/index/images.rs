//! What pages, or runs, were when a snapshot began: of those that were written since.
//!
//! The living index is written where it is. Whoever writes a page or a run for the first time since a snapshot began
//! keeps here what it was, and whoever writes the snapshot down reads that instead. A command keeps what it touches and
//! waits for nothing else: nothing here moves when it grows, and nothing large is cleared at once. Not here: who writes
//! (`pages.rs`, `run.rs`) and who reads (`snapshot.rs`).

/// Numbers that share a piece of the table: 1 KiB, made when the first of them is written. Few in tests, so that there
/// are several.
const PIECE_NUMBERS: usize = if cfg!(test) { 4 } else { 256 };
/// Images that are allocated together.
const SLAB_IMAGES: usize = if cfg!(test) { 3 } else { 256 };

/// Images by number, for the numbers there were when the snapshot began.
#[derive(Clone, Debug)]
pub(super) struct Images<T> {
    numbers: u32,
    /// Which image is that of a number, plus one; zero while it was not written.
    places: Vec<Option<Box<[u32; PIECE_NUMBERS]>>>,
    /// All full but the last.
    slabs: Vec<Vec<T>>,
}

impl<T: Clone> Images<T> {
    /// None yet, of so many numbers. Costs a word per 256 numbers.
    pub(super) fn new(numbers: u32) -> Self {
        let places = vec![None; (numbers as usize).div_ceil(PIECE_NUMBERS)];
        // Room for all there can be: 24 bytes for 256 images, which take no memory before they are used.
        let slabs = Vec::with_capacity((numbers as usize).div_ceil(SLAB_IMAGES));
        Self { numbers, places, slabs }
    }

    /// Numbers there were when the snapshot began.
    pub(super) fn numbers(&self) -> u32 {
        self.numbers
    }

    /// Keeps what a number stands for, which is about to be written, unless it was written before, or was none when
    /// the snapshot began.
    #[cold]
    #[inline(never)]
    pub(super) fn keep(&mut self, number: u32, now: &T) {
        if number >= self.numbers {
            return;
        }
        let (piece, nth) = (number as usize / PIECE_NUMBERS, number as usize % PIECE_NUMBERS);
        let place = &mut self.places[piece].get_or_insert_with(|| Box::new([0; PIECE_NUMBERS]))[nth];
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

    /// What a number stood for when the snapshot began, if it was written since.
    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<&T> {
        let piece = self.places.get(number as usize / PIECE_NUMBERS)?.as_deref()?;
        let image = piece[number as usize % PIECE_NUMBERS].checked_sub(1)? as usize;
        Some(&self.slabs[image / SLAB_IMAGES][image % SLAB_IMAGES])
    }
}
