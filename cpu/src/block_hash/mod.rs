//! The block hash with vector instructions: keys, blocks and images.
//!
//! An image is the encrypted state of a chain after a block. The caller turns it into a block hash.
//! Not here: the definition of the result, the derivation of keys, the portable code and the tests
//! that compare both (`core/src/prefix/`, docs/adr/0016).

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx512, Pclmul};

/// Tokens of a line: 64 bytes, one vector register or cache line.
pub const LINE_TOKENS: usize = 16;

/// Lines of a segment, 512 tokens: the number of line keys, and the largest block.
pub const SEGMENT_LINES: usize = 32;

/// x^128 modulo the polynomial of the field: x^7 + x^2 + x + 1.
pub const TAIL_OF_MODULUS: u64 = 0x87;

/// Sixteen tokens; a partly filled last line is padded with zeros.
pub type TokenLine = [u32; LINE_TOKENS];

/// Keys of the lines of a segment.
#[derive(Clone)]
#[repr(align(64))]
pub struct LineKeys {
    /// For each line, keys of its first two words (a word is four tokens).
    pub first: [[u128; 2]; SEGMENT_LINES],
    /// For each line, keys of its last two words.
    pub second: [[u128; 2]; SEGMENT_LINES],
}

/// Consecutive blocks in one segment, all with the same number of lines.
#[derive(Clone, Copy)]
pub struct BlockBatch<'lines> {
    /// Index of the first line's keys.
    pub slot: usize,
    /// Lines of each block, at least one.
    pub lines_per_block: usize,
    /// The lines of all blocks.
    pub lines: &'lines [TokenLine],
}

impl<'lines> BlockBatch<'lines> {
    /// Each block, with the key index of its first line.
    #[inline]
    pub fn slots(self) -> impl Iterator<Item = (usize, &'lines [TokenLine])> {
        let Self { slot, lines_per_block: lines_each, lines } = self;
        lines
            .chunks_exact(lines_each)
            .enumerate()
            .map(move |(number, block)| (slot + number * lines_each, block))
    }

    /// The first `count` blocks, and the rest.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn split_at(self, count: usize) -> (Self, Self) {
        let (lines, rest) = self.lines.split_at(count * self.lines_per_block);
        (Self { lines, ..self }, Self { lines: rest, slot: self.slot + lines.len(), ..self })
    }
}

/// Receives the images of blocks in chain order.
pub trait ImageSink: Sized {
    /// Moves the sink into a local variable of a kernel, so that it stays in registers. The kernel
    /// assigns it back.
    fn detach(&mut self) -> Self;

    /// Blocks until the sink can receive four images at a time.
    fn blocks_before_fours(&self) -> usize;

    /// Receives the images of the next blocks: one, or four at a time.
    fn receive<const BLOCKS: usize>(&mut self, images: [[u8; 16]; BLOCKS]);
}
