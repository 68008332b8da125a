//! Files and their slots: which are free, which file new blocks go to, how much may be in use.
//!
//! New blocks go to one file whose slots hold the largest frame of this node, for the reason told at
//! [`crate::arena`]. Files of other slot sizes (from a time with another `block_bytes`) are only read; what
//! leaves them, and what leaves a slot beyond a capacity that shrank, goes back to the file system at once.
//! So the disk holds the capacity and the staging slots, and not more. Not here: contents and I/O.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_core::id::IdentityDigest;
use kv_core::tier::Capacity;
use rustix::fs::FallocateFlags;

use super::format::{PAGE_BYTES, slot_bytes, superblock};

/// Slots by which a file grows at once, so that the file system is asked rarely.
const GROW_SLOTS: u64 = 64;

/// A slot of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId {
    pub(crate) file: usize,
    pub(crate) number: u32,
}

/// What a slot of a file found at start is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// It may be given out.
    Free,
    /// It holds a block.
    Block,
    /// It cannot be read; another one takes its turn.
    Lost,
}

/// One file of equal slots.
#[derive(Debug)]
pub(crate) struct SlotFile {
    pub(crate) slot_bytes: usize,
    pub(crate) file: Arc<File>,
    /// Slots that may be given out again; those from `next` on were never given out.
    free: Vec<u32>,
    next: u32,
    grown: u64,
    /// Slots below this number may be given out; none of a file that is only read.
    limit: u64,
}

/// All files of the tier.
#[derive(Debug)]
pub(crate) struct Space {
    dir: PathBuf,
    identity: IdentityDigest,
    direct: bool,
    pub(crate) frame_bytes_max: usize,
    pub(crate) files: Vec<SlotFile>,
    slots_max: u64,
    used: u64,
}

impl Space {
    /// Nothing in it yet. `staging_slots` come on top of the capacity, for blocks between two places.
    pub(crate) fn new(
        dir: &Path,
        identity: IdentityDigest,
        direct: bool,
        frame_bytes_max: usize,
        capacity: Capacity,
        staging_slots: u64,
    ) -> Space {
        let cost = u32::try_from(slot_bytes(frame_bytes_max)).unwrap_or(u32::MAX);
        let slots_max = capacity.amount() / capacity.cost(cost) + staging_slots;
        let (dir, files) = (dir.to_owned(), Vec::new());
        Space { dir, identity, direct, frame_bytes_max, files, slots_max, used: 0 }
    }

    /// Takes over a file found at start, with a mark per slot.
    pub(crate) fn adopt(&mut self, slot_bytes: usize, file: File, marks: &[Mark]) {
        let slots = u32::try_from(marks.len()).unwrap_or(u32::MAX);
        let count = |mark: Mark| marks.iter().filter(|other| **other == mark).count() as u64;
        let ours = slot_bytes == self.slot_bytes();
        let limit = if ours { self.slots_max + count(Mark::Lost) } else { 0 };
        let (file, grown) = (Arc::new(file), u64::from(slots));
        let mut found = SlotFile { slot_bytes, file, free: Vec::new(), next: slots, grown, limit };
        let free = (0..slots).rev().filter(|&number| marks[number as usize] == Mark::Free);
        let (free, beyond): (Vec<u32>, Vec<u32>) = free.partition(|&number| u64::from(number) < limit);
        found.free = free;
        found.punch_all(&beyond);
        self.used += count(Mark::Block);
        self.files.push(found);
    }

    /// A slot for a frame; `Ok(None)` while all that may be used are.
    ///
    /// # Errors
    /// When the file is needed and cannot be made or cannot grow, or no frame may be so long.
    pub(crate) fn take(&mut self, frame_bytes: usize) -> io::Result<Option<SlotId>> {
        if frame_bytes > self.frame_bytes_max {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if !self.has_room() {
            return Ok(None);
        }
        let file = match self.files.iter().position(|file| file.slot_bytes == self.slot_bytes()) {
            Some(found) => found,
            None => self.create()?,
        };
        let number = self.files[file].take()?;
        self.used += 1;
        Ok(Some(SlotId { file, number }))
    }

    pub(crate) fn give_back(&mut self, slot: SlotId) {
        self.used -= 1;
        let file = &mut self.files[slot.file];
        if u64::from(slot.number) < file.limit {
            file.free.push(slot.number);
        } else {
            file.punch_all(&[slot.number]);
        }
    }

    /// Whether [`Self::take`] would find a slot now.
    pub(crate) fn has_room(&self) -> bool {
        self.used < self.slots_max
    }

    /// Slot size of new blocks.
    pub(crate) fn slot_bytes(&self) -> usize {
        slot_bytes(self.frame_bytes_max)
    }

    pub(crate) fn offset(&self, slot: SlotId) -> u64 {
        self.files[slot.file].offset(slot.number)
    }

    fn create(&mut self) -> io::Result<usize> {
        let slot_bytes = self.slot_bytes();
        let path = self.dir.join(file_name(slot_bytes));
        let plain = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
        let slot = u32::try_from(slot_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        plain.write_all_at(&superblock(slot, self.identity), 0)?;
        plain.sync_all()?;
        File::open(&self.dir)?.sync_all()?;
        self.adopt(slot_bytes, open(&path, self.direct)?, &[]);
        Ok(self.files.len() - 1)
    }
}

impl SlotFile {
    fn offset(&self, number: u32) -> u64 {
        PAGE_BYTES as u64 + u64::from(number) * self.slot_bytes as u64
    }

    /// A slot below the limit. There is one as long as fewer slots than `slots_max` are in use.
    fn take(&mut self) -> io::Result<u32> {
        if let Some(number) = self.free.pop() {
            return Ok(number);
        }
        if u64::from(self.next) >= self.grown {
            self.grow()?;
        }
        let number = self.next;
        self.next += 1;
        Ok(number)
    }

    /// Reserves room on the medium, so that a full one is noticed here and not in the middle of a block.
    fn grow(&mut self) -> io::Result<()> {
        let from = PAGE_BYTES as u64 + self.grown * self.slot_bytes as u64;
        let mut slots = GROW_SLOTS.min(self.limit.saturating_sub(self.grown)).max(1);
        loop {
            let bytes = slots * self.slot_bytes as u64;
            match rustix::fs::fallocate(&*self.file, FallocateFlags::empty(), from, bytes) {
                Ok(()) => break,
                Err(rustix::io::Errno::OPNOTSUPP) => {
                    self.file.set_len(from + bytes)?;
                    break;
                }
                Err(rustix::io::Errno::NOSPC) if slots > 1 => slots /= 2,
                Err(cause) => return Err(cause.into()),
            }
        }
        self.grown += slots;
        Ok(())
    }

    /// Gives the room of slots back to the file system; they read as never written afterwards.
    fn punch_all(&self, numbers: &[u32]) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for &number in numbers {
            let punched =
                rustix::fs::fallocate(&*self.file, flags, self.offset(number), self.slot_bytes as u64);
            if let Err(cause) = punched {
                // The block is forgotten all the same; only its room stays taken.
                tracing::warn!(%cause, slot = number, "a slot that is no longer used keeps its room on the SSD");
                return;
            }
        }
    }
}

/// Name of the file with slots of this size.
pub(crate) fn file_name(slot_bytes: usize) -> String {
    format!("blocks-{slot_bytes}.kvs")
}

/// The slot size a file's name stands for.
pub(crate) fn slot_bytes_of(name: &str) -> Option<usize> {
    let number: usize = name.strip_prefix("blocks-")?.strip_suffix(".kvs")?.parse().ok()?;
    (number > 0 && number.is_multiple_of(PAGE_BYTES) && u32::try_from(number).is_ok()).then_some(number)
}

/// Opens a slot file for reading and writing.
pub(crate) fn open(path: &Path, direct: bool) -> io::Result<File> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

/// Whether files of this directory can be opened for direct I/O.
///
/// # Errors
/// When a file cannot be made there at all.
pub(crate) fn direct_io_works(dir: &Path) -> io::Result<bool> {
    let path = dir.join(".probe");
    if let Err(cause) = std::fs::write(&path, [0u8; PAGE_BYTES]) {
        // Of a write to a full medium the empty file stays; whether it can be removed changes nothing.
        let _ = std::fs::remove_file(&path);
        return Err(cause);
    }
    let direct = open(&path, true).is_ok_and(|file| {
        let mut page = super::buffer::PageBuffer::new(PAGE_BYTES);
        file.read_exact_at(&mut page, 0).is_ok()
    });
    std::fs::remove_file(&path)?;
    Ok(direct)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn space(dir: &Path, frame_bytes_max: usize, capacity: Capacity) -> Space {
        Space::new(dir, IdentityDigest([1; 16]), false, frame_bytes_max, capacity, 1)
    }

    #[test]
    fn slots_end_at_the_capacity_and_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut space = space(dir.path(), 100, Capacity::Blocks(3));
        let slots: Vec<SlotId> = std::iter::from_fn(|| space.take(100).unwrap()).collect();
        assert_eq!(slots.len(), 4);
        assert!(!space.has_room());
        space.give_back(slots[2]);
        assert!(space.has_room());
        assert_eq!(space.take(100).unwrap(), Some(slots[2]));
        assert_eq!(space.offset(SlotId { file: 0, number: 2 }), 3 * 4096);
    }

    #[test]
    fn every_slot_can_be_had_and_the_disk_holds_the_capacity_whatever_lengths_came_before() {
        for capacity in [Capacity::Blocks(3), Capacity::Bytes(3 * 20_480 + 4096)] {
            let dir = tempfile::tempdir().unwrap();
            let mut space = space(dir.path(), 20_000, capacity);
            for len in (1..=20_000).step_by(1_900).chain([20_000]) {
                let slots: Vec<SlotId> = std::iter::from_fn(|| space.take(len).unwrap()).collect();
                assert_eq!(slots.len(), 4, "frames of {len} bytes");
                slots.into_iter().for_each(|slot| space.give_back(slot));
            }
            assert!(space.take(20_001).is_err(), "no frame is so long");
            let disk: u64 = std::fs::read_dir(dir.path())
                .unwrap()
                .map(|file| file.unwrap().metadata().unwrap().len())
                .sum();
            assert!(disk <= 4096 + 4 * 20_480, "{disk} bytes");
        }
    }

    #[test]
    fn a_file_of_another_slot_size_is_only_read_and_gives_its_room_back() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let mut old = space(dir.path(), 3900, Capacity::Blocks(3));
        for _ in 0..3 {
            let slot = old.take(3900).unwrap().unwrap();
            let page = [7u8; PAGE_BYTES];
            old.files[0].file.write_all_at(&page, old.offset(slot)).unwrap();
        }
        let path = dir.path().join(file_name(8192));
        assert!(!path.exists());
        let mut space = space(dir.path(), 8000, Capacity::Blocks(3));
        let file = dir.path().join(file_name(old.slot_bytes()));
        space.adopt(old.slot_bytes(), open(&file, false).unwrap(), &[Mark::Block, Mark::Free, Mark::Block]);
        let before = file.metadata().unwrap().blocks();
        space.give_back(SlotId { file: 0, number: 0 });
        assert!(file.metadata().unwrap().blocks() < before, "the room goes back to the file system");
        let fresh: Vec<SlotId> = std::iter::from_fn(|| space.take(100).unwrap()).collect();
        assert_eq!(fresh.len(), 3, "the block that is left counts");
        assert!(fresh.iter().all(|slot| slot.file == 1) && path.exists());
    }

    #[test]
    fn slots_beyond_a_capacity_that_shrank_are_not_given_out_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut large = space(dir.path(), 100, Capacity::Blocks(9));
        while large.take(100).unwrap().is_some() {}
        let mut small = space(dir.path(), 100, Capacity::Blocks(2));
        let mut marks = [Mark::Free; 10];
        (marks[0], marks[8]) = (Mark::Block, Mark::Block);
        small.adopt(4096, open(&dir.path().join(file_name(4096)), false).unwrap(), &marks);
        let mut numbers: Vec<u32> =
            std::iter::from_fn(|| small.take(100).unwrap()).map(|slot| slot.number).collect();
        assert_eq!(numbers, [1]);
        small.give_back(SlotId { file: 0, number: 8 });
        numbers.extend(small.take(100).unwrap().map(|slot| slot.number));
        assert_eq!(numbers, [1, 2]);
    }

    #[test]
    fn file_names_say_their_slot_size() {
        assert_eq!(slot_bytes_of(&file_name(8192)), Some(8192));
        assert_eq!(slot_bytes_of("blocks-100.kvs"), None);
        assert_eq!(slot_bytes_of("blocks-8192.kvs.quarantined"), None);
    }
}
