//! The block hash with the carry-less multiplication and AES instructions of x86-64.
//!
//! [`Pclmul`] and [`Avx512`] exist only on machines with their instructions, which makes calling
//! them sound. The only unsafe steps are those calls and the loads and stores of whole registers,
//! each through a pointer made from a reference to the same bytes. Not here: the definition of the
//! result (`core/src/prefix/portable.rs`; the tests of `core/src/prefix/` compare both).
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{BlockBatch, ImageSink, LineKeys, TAIL_OF_MODULUS, TokenLine};

/// Key schedule of AES-128.
type RoundKeys = [u128; 11];

/// Proof that the machine has PCLMULQDQ, AES-NI and AVX, with the cipher's keys.
#[derive(Clone)]
pub struct Pclmul {
    round_keys: RoundKeys,
}

impl Pclmul {
    /// The hasher with this cipher key, if the machine has the instructions.
    #[must_use]
    pub fn detect(cipher_key: &[u8; 16]) -> Option<Self> {
        let is_there = is_x86_feature_detected!("avx")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("aes");
        // SAFETY: the closure runs only if the instructions were detected.
        is_there.then(|| Self { round_keys: unsafe { expand_key(u128::from_le_bytes(*cipher_key)) } })
    }

    /// Advances the state over the blocks and sends the image after each to `images`.
    #[inline]
    pub fn absorb(
        &self,
        keys: &LineKeys,
        blocks: BlockBatch<'_>,
        state: &mut [u8; 16],
        images: &mut impl ImageSink,
    ) {
        // SAFETY: `detect` found the instructions on this machine.
        unsafe { absorb_sequential(keys, &self.round_keys, blocks, state, images) }
    }

    /// Product of two elements of the field.
    #[inline]
    #[must_use]
    pub fn multiply(&self, left: u128, right: u128) -> u128 {
        // SAFETY: `detect` found the instructions on this machine.
        unsafe { multiply(left, right) }
    }
}

/// Proof that the machine has the same instructions on 512-bit registers.
#[derive(Clone)]
pub struct Avx512 {
    narrow: Pclmul,
    /// The keys of `narrow`, once per lane.
    round_keys: [[u128; 4]; 11],
}

impl Avx512 {
    /// The hasher with this cipher key, if the machine has the instructions.
    #[must_use]
    pub fn detect(cipher_key: &[u8; 16]) -> Option<Self> {
        let is_wide = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("vaes");
        let narrow = Pclmul::detect(cipher_key).filter(|_| is_wide)?;
        let round_keys = narrow.round_keys.map(|key| [key; 4]);
        Some(Self { narrow, round_keys })
    }

    /// Advances the state over the blocks and sends the image after each to `images`.
    #[inline]
    pub fn absorb(
        &self,
        keys: &LineKeys,
        blocks: BlockBatch<'_>,
        state: &mut [u8; 16],
        images: &mut impl ImageSink,
    ) {
        if blocks.lines_per_block > 1 {
            // SAFETY: `detect` found the instructions on this machine.
            return unsafe { absorb_long(keys, &self.narrow.round_keys, blocks, state, images) };
        }
        let ahead = blocks.lines.len().min(images.blocks_before_fours());
        let (to_fours, blocks) = blocks.split_at(ahead);
        if ahead > 0 {
            self.narrow.absorb(keys, to_fours, state, images);
        }
        let (in_fours, left_over) = blocks.split_at(blocks.lines.len() & !3);
        // SAFETY: `detect` found the instructions on this machine.
        unsafe { absorb_fours(keys, &self.round_keys, in_fours, state, images) };
        if !left_over.lines.is_empty() {
            self.narrow.absorb(keys, left_over, state, images);
        }
    }

    /// Product of two elements of the field.
    #[inline]
    #[must_use]
    pub fn multiply(&self, left: u128, right: u128) -> u128 {
        self.narrow.multiply(left, right)
    }
}

#[inline]
#[target_feature(enable = "avx")]
fn load_word(tokens: &[u32; 4]) -> __m128i {
    // SAFETY: reads the sixteen bytes of the array, at any alignment.
    unsafe { _mm_loadu_si128(tokens.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
fn load(element: &u128) -> __m128i {
    // SAFETY: reads the sixteen bytes of the element, at any alignment.
    unsafe { _mm_loadu_si128(std::ptr::from_ref(element).cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
fn load_state(state: &[u8; 16]) -> __m128i {
    load(&u128::from_le_bytes(*state))
}

#[inline]
#[target_feature(enable = "avx")]
fn bytes(value: __m128i) -> [u8; 16] {
    let mut bytes = [0; 16];
    // SAFETY: writes the sixteen bytes of the array, at any alignment.
    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), value) };
    bytes
}

#[inline]
#[target_feature(enable = "avx")]
fn element(value: __m128i) -> u128 {
    u128::from_le_bytes(bytes(value))
}

/// A sum of products that is reduced below x^128 only once, at the end.
struct PclmulProductSum {
    low: __m128i,
    middle: __m128i,
    high: __m128i,
}

impl PclmulProductSum {
    #[inline]
    #[target_feature(enable = "avx")]
    fn zero() -> Self {
        let zero = _mm_setzero_si128();
        Self { low: zero, middle: zero, high: zero }
    }

    #[inline]
    #[target_feature(enable = "avx,pclmulqdq")]
    fn add(&mut self, left: __m128i, right: __m128i) {
        let cross = _mm_xor_si128(
            _mm_clmulepi64_si128::<0x10>(left, right),
            _mm_clmulepi64_si128::<0x01>(left, right),
        );
        self.low = _mm_xor_si128(self.low, _mm_clmulepi64_si128::<0x00>(left, right));
        self.middle = _mm_xor_si128(self.middle, cross);
        self.high = _mm_xor_si128(self.high, _mm_clmulepi64_si128::<0x11>(left, right));
    }

    /// The reduction of `core/src/prefix/field.rs`, one multiplication by the tail of the modulus for each upper
    /// quarter.
    #[inline]
    #[target_feature(enable = "avx,pclmulqdq")]
    fn reduce(self) -> __m128i {
        let tail = _mm_set_epi64x(0, TAIL_OF_MODULUS as i64);
        let middle = _mm_xor_si128(self.middle, _mm_clmulepi64_si128::<0x01>(self.high, tail));
        let over = _mm_xor_si128(self.high, _mm_srli_si128::<8>(middle));
        let below = _mm_xor_si128(self.low, _mm_slli_si128::<8>(middle));
        _mm_xor_si128(below, _mm_clmulepi64_si128::<0x00>(over, tail))
    }
}

#[target_feature(enable = "avx,pclmulqdq")]
fn multiply(left: u128, right: u128) -> u128 {
    let mut sum = PclmulProductSum::zero();
    sum.add(load(&left), load(&right));
    element(sum.reduce())
}

/// Sum of the lines of a block; `slot` is the key index of its first line.
#[inline]
#[target_feature(enable = "avx,pclmulqdq")]
fn sum(keys: &LineKeys, slot: usize, block: &[TokenLine]) -> __m128i {
    let keys = keys.first[slot..].iter().zip(&keys.second[slot..]);
    let mut products = PclmulProductSum::zero();
    for (line, (first, second)) in block.iter().zip(keys) {
        let (words, _) = line.as_chunks::<4>();
        let keyed = |word: usize, key: &u128| _mm_xor_si128(load_word(&words[word]), load(key));
        products.add(keyed(0, &first[0]), keyed(2, &second[0]));
        products.add(keyed(1, &first[1]), keyed(3, &second[1]));
    }
    products.reduce()
}

#[inline]
#[target_feature(enable = "avx,aes")]
fn encipher(round_keys: &RoundKeys, state: __m128i) -> __m128i {
    let [whitening, middle @ .., last] = round_keys;
    let mut image = _mm_xor_si128(state, load(whitening));
    for key in middle {
        image = _mm_aesenc_si128(image, load(key));
    }
    _mm_aesenclast_si128(image, load(last))
}

/// One block after the other. The encryption of one overlaps the multiplication of the next.
#[target_feature(enable = "avx,pclmulqdq,aes")]
fn absorb_sequential(
    keys: &LineKeys,
    round_keys: &RoundKeys,
    blocks: BlockBatch<'_>,
    state: &mut [u8; 16],
    images: &mut impl ImageSink,
) {
    let mut sink = images.detach();
    let mut now = load_state(state);
    for (slot, block) in blocks.slots() {
        now = _mm_xor_si128(now, sum(keys, slot, block));
        sink.receive([bytes(encipher(round_keys, now))]);
    }
    *images = sink;
    *state = bytes(now);
}

/// The key schedule of FIPS 197 for 128-bit keys.
#[target_feature(enable = "avx,aes")]
fn expand_key(key: u128) -> RoundKeys {
    let mut last = load(&key);
    let mut round_keys = [key; 11];
    macro_rules! rounds {
        ($($round:literal $constant:literal),*) => {
            $(
                last = next_round_key(last, _mm_aeskeygenassist_si128::<$constant>(last));
                round_keys[$round] = element(last);
            )*
        };
    }
    rounds!(1 0x01, 2 0x02, 3 0x04, 4 0x08, 5 0x10, 6 0x20, 7 0x40, 8 0x80, 9 0x1b, 10 0x36);
    round_keys
}

/// Each of the four words becomes the sum of all words up to it and the last of `assisted`.
#[target_feature(enable = "avx")]
fn next_round_key(last: __m128i, assisted: __m128i) -> __m128i {
    let two = _mm_xor_si128(last, _mm_slli_si128::<4>(last));
    let four = _mm_xor_si128(two, _mm_slli_si128::<8>(two));
    _mm_xor_si128(four, _mm_shuffle_epi32::<0xff>(assisted))
}

/// A register with the same half of two lines: two words of each.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_halves<const HALF: usize>(lower: &TokenLine, upper: &TokenLine) -> __m512i {
    let (lower, upper) = (lower.as_chunks::<8>().0[HALF].as_ptr(), upper.as_chunks::<8>().0[HALF].as_ptr());
    // SAFETY: reads the thirty-two bytes of each array, at any alignment.
    let (lower, upper) = unsafe { (_mm256_loadu_si256(lower.cast()), _mm256_loadu_si256(upper.cast())) };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lower), upper)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_four(elements: &[u128; 4]) -> __m512i {
    // SAFETY: reads the sixty-four bytes of the array, at any alignment.
    unsafe { _mm512_loadu_si512(elements.as_ptr().cast()) }
}

/// Keys of the same half of two consecutive lines, the first two of `keys`.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_two_keys(keys: &[[u128; 2]]) -> __m512i {
    let two = keys[..2].as_ptr();
    // SAFETY: reads the sixty-four bytes of the slice of two, at any alignment.
    unsafe { _mm512_loadu_si512(two.cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn bytes_of_four(value: __m512i) -> [[u8; 16]; 4] {
    let mut bytes = [[0; 16]; 4];
    // SAFETY: writes the sixty-four bytes of the array, at any alignment.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), value) };
    bytes
}

/// [`PclmulProductSum`] in each of four lanes.
struct WideProductSum {
    low: __m512i,
    middle: __m512i,
    high: __m512i,
}

/// `a ^ b ^ c`, in the numbering of `vpternlog`.
const XOR3: i32 = 0x96;
/// `a ^ (b & c)`.
const XOR_OF_AND: i32 = 0x78;

impl WideProductSum {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn zero() -> Self {
        let zero = _mm512_setzero_si512();
        Self { low: zero, middle: zero, high: zero }
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add(&mut self, left: __m512i, right: __m512i) {
        self.low = _mm512_xor_si512(self.low, _mm512_clmulepi64_epi128::<0x00>(left, right));
        self.middle = _mm512_ternarylogic_epi64::<XOR3>(
            self.middle,
            _mm512_clmulepi64_epi128::<0x10>(left, right),
            _mm512_clmulepi64_epi128::<0x01>(left, right),
        );
        self.high = _mm512_xor_si512(self.high, _mm512_clmulepi64_epi128::<0x11>(left, right));
    }

    /// Adds the products of one line of each of four blocks. The arguments hold the first words of
    /// two blocks, then of the other two, then the partners of both.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add_words(&mut self, left: __m512i, right: __m512i, left_partner: __m512i, right_partner: __m512i) {
        // From words of one block side by side to words of four blocks side by side.
        self.add(
            _mm512_shuffle_i64x2::<0x88>(left, right),
            _mm512_shuffle_i64x2::<0x88>(left_partner, right_partner),
        );
        self.add(
            _mm512_shuffle_i64x2::<0xdd>(left, right),
            _mm512_shuffle_i64x2::<0xdd>(left_partner, right_partner),
        );
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn reduce(self) -> __m512i {
        let tail = _mm512_set1_epi64(TAIL_OF_MODULUS as i64);
        let middle = _mm512_xor_si512(self.middle, _mm512_clmulepi64_epi128::<0x01>(self.high, tail));
        // Swaps its halves: the upper one is added to the low part, the lower one to the high part.
        let middle = _mm512_shuffle_epi32::<0x4e>(middle);
        let over = _mm512_clmulepi64_epi128::<0x00>(_mm512_xor_si512(self.high, middle), tail);
        let upper = _mm512_set4_epi64(-1, 0, -1, 0);
        let below = _mm512_ternarylogic_epi64::<XOR_OF_AND>(self.low, middle, upper);
        _mm512_xor_si512(below, over)
    }
}

/// Sums of four blocks of one line each, with consecutive keys.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn sum_four_lines(keys: &LineKeys, slot: usize, lines: &[TokenLine; 4]) -> __m512i {
    let [a, b, c, d] = lines;
    let (first, second) = (&keys.first[slot..slot + 4], &keys.second[slot..slot + 4]);
    let mut products = WideProductSum::zero();
    products.add_words(
        _mm512_xor_si512(load_halves::<0>(a, b), load_two_keys(first)),
        _mm512_xor_si512(load_halves::<0>(c, d), load_two_keys(&first[2..])),
        _mm512_xor_si512(load_halves::<1>(a, b), load_two_keys(second)),
        _mm512_xor_si512(load_halves::<1>(c, d), load_two_keys(&second[2..])),
    );
    products.reduce()
}

/// Blocks of one line, four at a time, one per lane. The encryption of four overlaps the
/// multiplication of the next four.
#[target_feature(enable = "avx512f,vpclmulqdq,vaes")]
fn absorb_fours(
    keys: &LineKeys,
    round_keys: &[[u128; 4]; 11],
    blocks: BlockBatch<'_>,
    state: &mut [u8; 16],
    images: &mut impl ImageSink,
) {
    let mut sink = images.detach();
    let zero = _mm512_setzero_si512();
    let [whitening, middle @ .., last] = round_keys;
    // The state after the last block, in every lane.
    let mut now = _mm512_broadcast_i32x4(load_state(state));
    for (slot, lines) in (blocks.slot..).step_by(4).zip(blocks.lines.as_chunks::<4>().0) {
        // Prefix sum over the lanes: shifted by one lane, then by two.
        let sums = sum_four_lines(keys, slot, lines);
        let sums = _mm512_xor_si512(sums, _mm512_alignr_epi64::<6>(sums, zero));
        let sums = _mm512_xor_si512(sums, _mm512_alignr_epi64::<4>(sums, zero));
        let states = _mm512_xor_si512(now, sums);
        now = _mm512_shuffle_i64x2::<0xff>(states, states);
        let mut image = _mm512_xor_si512(states, load_four(whitening));
        for key in middle {
            image = _mm512_aesenc_epi128(image, load_four(key));
        }
        sink.receive(bytes_of_four(_mm512_aesenclast_epi128(image, load_four(last))));
    }
    *images = sink;
    *state = bytes(_mm512_castsi512_si128(now));
}

/// Blocks of several lines, two lines at a time, one product per lane.
#[target_feature(enable = "avx512f,vpclmulqdq,avx,pclmulqdq,aes")]
fn absorb_long(
    keys: &LineKeys,
    round_keys: &RoundKeys,
    blocks: BlockBatch<'_>,
    state: &mut [u8; 16],
    images: &mut impl ImageSink,
) {
    let mut sink = images.detach();
    let mut now = load_state(state);
    for (slot, block) in blocks.slots() {
        let (twos, odd) = block.as_chunks::<2>();
        let mut products = WideProductSum::zero();
        for (slot, [lower, upper]) in (slot..).step_by(2).zip(twos) {
            let (first, second) = (&keys.first[slot..], &keys.second[slot..]);
            products.add(
                _mm512_xor_si512(load_halves::<0>(lower, upper), load_two_keys(first)),
                _mm512_xor_si512(load_halves::<1>(lower, upper), load_two_keys(second)),
            );
        }
        now = _mm_xor_si128(now, sum_of_lanes(products.reduce()));
        if !odd.is_empty() {
            now = _mm_xor_si128(now, sum(keys, slot + 2 * twos.len(), odd));
        }
        sink.receive([bytes(encipher(round_keys, now))]);
    }
    *images = sink;
    *state = bytes(now);
}

#[inline]
#[target_feature(enable = "avx512f")]
fn sum_of_lanes(lanes: __m512i) -> __m128i {
    let two = _mm512_xor_si512(lanes, _mm512_shuffle_i64x2::<0x4e>(lanes, lanes));
    let one = _mm512_xor_si512(two, _mm512_shuffle_i64x2::<0xb1>(two, two));
    _mm512_castsi512_si128(one)
}
