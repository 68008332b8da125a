//! Prefetches into the caches.
//!
//! The index is larger than any cache, and an index change spends most of its time on memory
//! latency. A plain load stalls once the out-of-order window is full; a prefetch waits at most for
//! its page to be found (docs/adr/0018). Not here: which places are prefetched, and when
//! (`core/src/index/`).
#![allow(unsafe_code)]

/// Starts to load the cache line at the start of `place`. A hint without any visible effect.
#[inline(always)]
pub fn prefetch<T>(place: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch neither reads nor writes anything that the program can see, and it never
    // faults. The address is also that of a live reference.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast());
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    let _ = place;
}

/// Same as [`prefetch`], for a value that may begin in one cache line and end in the next.
#[inline(always)]
pub fn prefetch_whole<T>(place: &T) {
    const { assert!(size_of::<T>() <= 64) };
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as above; the last byte also belongs to the live reference.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let first = std::ptr::from_ref(place).cast::<i8>();
        _mm_prefetch::<_MM_HINT_T0>(first);
        _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(size_of::<T>().saturating_sub(1)));
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    let _ = place;
}
