//! Files and their slots: which are free, which file a size class has, how much may be in use.
//!
//! Not here: contents and I/O.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_core::id::IdentityDigest;
use kv_core::tier::Capacity;

use super::format::{PAGE_BYTES, slot_bytes, superblock};

/// Size classes, each with its file. As for the arena, a model has one or two frame sizes.
pub(crate) const CLASSES_MAX: usize = 8;

/// Slots by which a file grows at once, so that the file system is asked rarely.
const GROW_SLOTS: u64 = 64;

/// A slot of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId {
    pub(crate) class: usize,
    pub(crate) number: u32,
}

/// One file of equal slots.
#[derive(Debug)]
pub(crate) struct ClassFile {
    pub(crate) slot_bytes: usize,
    pub(crate) file: Arc<File>,
    pub(crate) free: Vec<u32>,
    pub(crate) next: u32,
    grown: u64,
}

/// All files of the tier.
#[derive(Debug)]
pub(crate) struct Space {
    dir: PathBuf,
    identity: IdentityDigest,
    direct: bool,
    pub(crate) classes: Vec<ClassFile>,
    capacity: Capacity,
    staging_slots: u64,
    used: u64,
}

impl Space {
    /// Nothing in it yet. `staging_slots` come on top of the capacity, for blocks between two places.
    pub(crate) fn new(
        dir: &Path,
        identity: IdentityDigest,
        direct: bool,
        capacity: Capacity,
        staging_slots: u64,
    ) -> Space {
        Space { dir: dir.to_owned(), identity, direct, classes: Vec::new(), capacity, staging_slots, used: 0 }
    }

    /// Takes over a file found at start, with the numbers of its slots in use.
    pub(crate) fn adopt(&mut self, slot_bytes: usize, file: File, slots: u32, taken: &[bool]) -> usize {
        let free = (0..slots).rev().filter(|&number| !taken[number as usize]).collect();
        let in_use = taken.iter().filter(|taken| **taken).count() as u64;
        self.used += in_use * self.cost(slot_bytes);
        let class =
            ClassFile { slot_bytes, file: Arc::new(file), free, next: slots, grown: u64::from(slots) };
        self.classes.push(class);
        self.classes.len() - 1
    }

    /// A slot for a frame; `Ok(None)` while all that may be used are.
    ///
    /// # Errors
    /// When a new file is needed and cannot be made, or a file cannot grow.
    pub(crate) fn take(&mut self, frame_bytes: usize) -> io::Result<Option<SlotId>> {
        let class = self.class_for(slot_bytes(frame_bytes))?;
        let Some(class) = class else { return Ok(None) };
        let cost = self.cost(self.classes[class].slot_bytes);
        if self.used + cost > self.capacity.amount() + self.staging_slots * cost {
            return Ok(None);
        }
        let number = self.classes[class].take()?;
        self.used += cost;
        Ok(Some(SlotId { class, number }))
    }

    pub(crate) fn give_back(&mut self, slot: SlotId) {
        self.used -= self.cost(self.classes[slot.class].slot_bytes);
        self.classes[slot.class].free.push(slot.number);
    }

    /// Whether a frame of this size would find a slot.
    pub(crate) fn has_room(&self, frame_bytes: usize) -> bool {
        let cost = self.cost(slot_bytes(frame_bytes));
        self.used + cost <= self.capacity.amount() + self.staging_slots * cost
    }

    pub(crate) fn offset(&self, slot: SlotId) -> u64 {
        PAGE_BYTES as u64 + u64::from(slot.number) * self.classes[slot.class].slot_bytes as u64
    }

    fn cost(&self, slot_bytes: usize) -> u64 {
        self.capacity.cost(u32::try_from(slot_bytes).unwrap_or(u32::MAX))
    }

    fn class_for(&mut self, slot_bytes: usize) -> io::Result<Option<usize>> {
        if let Some(found) = self.classes.iter().position(|class| class.slot_bytes == slot_bytes) {
            return Ok(Some(found));
        }
        if self.classes.len() < CLASSES_MAX {
            return self.create(slot_bytes).map(Some);
        }
        let larger = self.classes.iter().enumerate().filter(|(_, class)| class.slot_bytes > slot_bytes);
        Ok(larger.min_by_key(|(_, class)| class.slot_bytes).map(|(position, _)| position))
    }

    fn create(&mut self, slot_bytes: usize) -> io::Result<usize> {
        let path = self.dir.join(file_name(slot_bytes));
        let plain = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
        let slot = u32::try_from(slot_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        plain.write_all_at(&superblock(slot, self.identity), 0)?;
        plain.sync_all()?;
        File::open(&self.dir)?.sync_all()?;
        let file = open(&path, self.direct)?;
        Ok(self.adopt(slot_bytes, file, 0, &[]))
    }
}

impl ClassFile {
    fn take(&mut self) -> io::Result<u32> {
        if let Some(number) = self.free.pop() {
            return Ok(number);
        }
        if u64::from(self.next) == self.grown {
            self.grow()?;
        }
        let number = self.next;
        self.next += 1;
        Ok(number)
    }

    /// Reserves room on the medium, so that a full one is noticed here and not in the middle of a block.
    fn grow(&mut self) -> io::Result<()> {
        let from = PAGE_BYTES as u64 + self.grown * self.slot_bytes as u64;
        let mut slots = GROW_SLOTS;
        loop {
            let bytes = slots * self.slot_bytes as u64;
            match rustix::fs::fallocate(&*self.file, rustix::fs::FallocateFlags::empty(), from, bytes) {
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
}

/// Name of the file of a size class.
pub(crate) fn file_name(slot_bytes: usize) -> String {
    format!("blocks-{slot_bytes}.kvs")
}

/// The size class a file's name stands for.
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
    std::fs::write(&path, [0u8; PAGE_BYTES])?;
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

    #[test]
    fn slots_end_at_the_capacity_and_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut space = Space::new(dir.path(), IdentityDigest([1; 16]), false, Capacity::Blocks(3), 1);
        let slots: Vec<SlotId> = std::iter::from_fn(|| space.take(100).unwrap()).collect();
        assert_eq!(slots.len(), 4);
        assert!(!space.has_room(100));
        space.give_back(slots[2]);
        assert_eq!(space.take(100).unwrap(), Some(slots[2]));
        assert_eq!(space.offset(SlotId { class: 0, number: 2 }), 3 * 4096);
    }

    #[test]
    fn file_names_say_their_slot_size() {
        assert_eq!(slot_bytes_of(&file_name(8192)), Some(8192));
        assert_eq!(slot_bytes_of("blocks-100.kvs"), None);
        assert_eq!(slot_bytes_of("blocks-8192.kvs.quarantined"), None);
    }
}
