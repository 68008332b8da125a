//! Arithmetic in the field of 2^128 elements, with constant-time integer operations.
//!
//! Bit i of a `u128` is the coefficient of x^i; the modulus is x^128 + x^7 + x^2 + x + 1. No
//! tables, because their timing would leak the key. Not here: the same arithmetic in one
//! instruction (`cpu/src/block_hash/x86.rs`).

/// Every fifth bit of 128. At most thirteen such bits add up in a column of a product, and the
/// carries stay in the four bits between.
const EVERY_FIFTH_BIT: u128 = 0x2108_4210_8421_0842_1084_2108_4210_8421;

/// Product of two elements.
pub(super) fn multiply(left: u128, right: u128) -> u128 {
    let mut sum = ProductSum::default();
    sum.add(left, right);
    sum.reduce()
}

/// A sum of products that is reduced below x^128 only once, at the end.
#[derive(Clone, Copy, Default)]
pub(super) struct ProductSum {
    low: u128,
    high: u128,
    /// Products of the folded factors: low, high and middle parts combined (Karatsuba).
    folded: u128,
}

impl ProductSum {
    /// Adds `left * right`.
    pub(super) fn add(&mut self, left: u128, right: u128) {
        let (left_low, left_high) = halves(left);
        let (right_low, right_high) = halves(right);
        self.low ^= carryless(left_low, right_low);
        self.high ^= carryless(left_high, right_high);
        self.folded ^= carryless(left_low ^ left_high, right_low ^ right_high);
    }

    /// The sum as an element of the field.
    pub(super) fn reduce(self) -> u128 {
        let (_, top) = halves(self.high);
        let middle = self.folded ^ self.low ^ self.high ^ times_tail(top);
        let over = self.high ^ (middle >> 64);
        self.low ^ (middle << 64) ^ times_tail(halves(over).0)
    }
}

/// Low and high half.
fn halves(element: u128) -> (u64, u64) {
    (element as u64, (element >> 64) as u64)
}

/// `factor * (x^7 + x^2 + x + 1)`.
fn times_tail(factor: u64) -> u128 {
    let factor = u128::from(factor);
    factor ^ factor << 1 ^ factor << 2 ^ factor << 7
}

/// Product of two polynomials below x^64, from integer products of bits five places apart.
fn carryless(left: u64, right: u64) -> u128 {
    let spread = |factor: u64| -> [u64; 5] {
        std::array::from_fn(|residue| factor & (EVERY_FIFTH_BIT << residue) as u64)
    };
    let (left, right) = (spread(left), spread(right));
    let mut product = 0;
    for residue in 0..5 {
        let mut column = 0;
        for (place, &part) in left.iter().enumerate() {
            let other = right[(5 + residue - place) % 5];
            column ^= u128::from(part) * u128::from(other);
        }
        product ^= column & (EVERY_FIFTH_BIT << residue);
    }
    product
}
