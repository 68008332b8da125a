//! All that reads and writes what callers point to, but for the slices they lend (`slices.rs`).
//!
//! What can be refused is refused here: null, misaligned, of another size, too long. That a pointer which passes is
//! valid is the caller's part, as with any C function; each function says what it relies on.
//!
//! Not here: what the fields mean (`calls.rs`).
#![allow(unsafe_code)] // the caller's pointers: docs/adr/0044

use std::ffi::{c_char, c_void};

use crate::status::Failure;

/// Longest text taken, in bytes: an address, a path, a name. Longer ones lack their end.
pub(crate) const TEXT_BYTES_MAX: usize = 4096;

fn check<T>(pointer: *const T, what: &'static str) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::Null { what });
    }
    if !pointer.is_aligned() {
        return Err(Failure::Misaligned { what, align: align_of::<T>() });
    }
    Ok(())
}

/// What a pointer points to.
///
/// # Safety
/// One that is neither null nor misaligned points to a `T` that nobody changes while the result is used.
pub(crate) unsafe fn one<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T, Failure> {
    check(pointer, what)?;
    // SAFETY: not null and aligned by the check; the rest is what the caller promised.
    Ok(unsafe { &*pointer })
}

/// A struct that begins with its size, of which nothing else is read unless it is that of `T`.
///
/// # Safety
/// As with [`one`], of as many bytes as the struct itself says.
pub(crate) unsafe fn sized<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise, handed on.
    unsafe { check_size(pointer, what)? };
    // SAFETY: aligned by the check, and as long as `T` by what it says, which the caller vouches for.
    Ok(unsafe { &*pointer })
}

/// Whether a struct that begins with its size says that of `T`. The rest of it need not be anything yet.
///
/// # Safety
/// As with [`one`], of the four bytes of the size.
pub(crate) unsafe fn check_size<T>(pointer: *const T, what: &'static str) -> Result<(), Failure> {
    check(pointer, what)?;
    let expected = size_of::<T>();
    // SAFETY: every such struct begins with four bytes of size, and is aligned to more than that.
    let got = unsafe { *pointer.cast::<u32>() };
    if got as usize == expected { Ok(()) } else { Err(Failure::Size { what, got: u64::from(got), expected }) }
}

/// Several of them; none when there are 0, whatever the pointer is.
///
/// # Safety
/// One that is neither null nor misaligned points to so many `T` that nobody changes while the result is used.
pub(crate) unsafe fn several<'a, T>(
    pointer: *const T,
    count: usize,
    limit: usize,
    what: &'static str,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > limit {
        return Err(Failure::TooLong { what, got: count as u64, limit });
    }
    check(pointer, what)?;
    // SAFETY: aligned and not null by the check; `count` is within a limit that no address space ends before.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Slices of so many bytes each, null only where that is 0.
///
/// # Safety
/// Those that are not null point to so many bytes that nobody changes while the result is used.
pub(crate) unsafe fn slices<'a>(
    pointers: &[*const c_void],
    bytes: usize,
    what: &'static str,
) -> Result<Vec<&'a [u8]>, Failure> {
    if bytes == 0 {
        return Ok(vec![&[]; pointers.len()]);
    }
    let slice = |pointer: &*const c_void| {
        check(pointer.cast::<u8>(), what)?;
        // SAFETY: not null by the check, and so long by the caller's promise; `bytes` is what one slice of a frame may have.
        Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), bytes) })
    };
    pointers.iter().map(slice).collect()
}

/// A text with a 0 at its end.
///
/// # Safety
/// One that is not null has a 0 within its memory or [`TEXT_BYTES_MAX`] bytes, and nobody changes it meanwhile.
pub(crate) unsafe fn text(pointer: *const c_char, what: &'static str) -> Result<String, Failure> {
    check(pointer, what)?;
    let mut bytes = Vec::new();
    loop {
        // SAFETY: all bytes before this one are not the end, so this one is the text's too.
        let byte = unsafe { *pointer.add(bytes.len()) }.cast_unsigned();
        if byte == 0 {
            return String::from_utf8(bytes).map_err(|_| Failure::Text { what });
        }
        if bytes.len() == TEXT_BYTES_MAX {
            return Err(Failure::TooLong { what, got: TEXT_BYTES_MAX as u64 + 1, limit: TEXT_BYTES_MAX });
        }
        bytes.push(byte);
    }
}

/// The same, or nothing for null.
///
/// # Safety
/// As with [`text`].
pub(crate) unsafe fn text_if_any(
    pointer: *const c_char,
    what: &'static str,
) -> Result<Option<String>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise, handed on.
    unsafe { text(pointer, what) }.map(Some)
}

/// Whether something may be written there.
///
/// # Errors
/// When it may not.
pub(crate) fn writable<T>(pointer: *mut T, what: &'static str) -> Result<(), Failure> {
    check(pointer, what)
}

/// Writes a value over whatever was there.
///
/// # Safety
/// One that is neither null nor misaligned points to memory for a `T` that nobody else uses meanwhile.
pub(crate) unsafe fn put<T>(pointer: *mut T, value: T, what: &'static str) -> Result<(), Failure> {
    check(pointer, what)?;
    // SAFETY: not null and aligned by the check; what was there has nothing to drop, as all of C.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Writes several values, as many as there is room for and more would be a mistake of ours.
///
/// # Safety
/// One that is neither null nor misaligned points to memory for as many `T` that nobody else uses meanwhile.
pub(crate) unsafe fn put_several<T: Copy>(
    pointer: *mut T,
    values: &[T],
    what: &'static str,
) -> Result<(), Failure> {
    if values.is_empty() {
        return Ok(());
    }
    check(pointer, what)?;
    // SAFETY: not null and aligned by the check, of that length by the promise; `values` is ours, so elsewhere.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), pointer, values.len()) };
    Ok(())
}

/// Copies a sentence with a 0 at its end, as much of it as fits, and gives its whole length.
///
/// # Safety
/// One that is not null points to so many bytes that nobody else uses meanwhile.
pub(crate) unsafe fn put_text(sentence: &str, to: *mut c_char, bytes: usize) -> usize {
    if let (false, Some(room)) = (to.is_null(), bytes.checked_sub(1)) {
        let mut end = room.min(sentence.len());
        while !sentence.is_char_boundary(end) {
            end -= 1;
        }
        // SAFETY: `end` is below `bytes`, which is how much room the caller says there is.
        unsafe {
            std::ptr::copy_nonoverlapping(sentence.as_ptr(), to.cast(), end);
            to.add(end).write(0);
        }
    }
    sentence.len()
}

/// A handle for the caller.
pub(crate) fn give<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// A handle that came back; nothing for null.
///
/// # Safety
/// It is null, or one of [`give`] that did not come back before and that nobody uses.
pub(crate) unsafe fn take<T>(handle: *mut T) -> Option<Box<T>> {
    // SAFETY: what `give` made is a box, and it comes back once.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[repr(C)]
    struct Small {
        size: u32,
        value: u64,
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        // SAFETY: all of these are refused before they are read, or are references of ours.
        unsafe {
            assert!(matches!(one::<u64>(std::ptr::null(), "it"), Err(Failure::Null { what: "it" })));
            let bytes = [0u64; 2];
            let odd = bytes.as_ptr().cast::<u8>().add(1).cast::<u64>();
            assert!(matches!(one(odd, "it"), Err(Failure::Misaligned { align: 8, .. })));
            assert!(several(odd, 0, 10, "it").unwrap().is_empty());
            assert!(matches!(several(odd, 1, 10, "it"), Err(Failure::Misaligned { .. })));
            let long = several(bytes.as_ptr(), usize::MAX, 10, "it");
            assert!(matches!(long, Err(Failure::TooLong { limit: 10, .. })));
            for (size, is_read) in [(16, true), (0, false), (8, false), (u32::MAX, false)] {
                let small = Small { size, value: 7 };
                let read = sized(&raw const small, "it").map(|small| small.value);
                assert!(
                    matches!(read, Ok(7) if is_read) || matches!(read, Err(Failure::Size { .. }) if !is_read)
                );
            }
        }
    }

    #[test]
    fn slices_are_there_or_are_refused() {
        let bytes = [1u8, 2, 3];
        let (at, null) = (bytes.as_ptr().cast::<c_void>(), std::ptr::null());
        // SAFETY: what is not null has three bytes.
        unsafe {
            assert_eq!(slices(&[at, at], 3, "it").unwrap(), [&bytes[..], &bytes[..]]);
            assert!(matches!(slices(&[at, null], 3, "it"), Err(Failure::Null { what: "it" })));
            assert_eq!(slices(&[null, at], 0, "it").unwrap(), [&[] as &[u8]; 2]);
            assert!(slices(&[], 3, "it").unwrap().is_empty());
        }
    }

    #[test]
    fn texts_end_or_are_refused() {
        let long = vec![b'a'; TEXT_BYTES_MAX + 1];
        let exact: Vec<u8> = long[1..].iter().copied().chain([0]).collect();
        // SAFETY: each has a 0, or as many bytes as are looked at.
        unsafe {
            assert_eq!(text(c"a b".as_ptr(), "it").unwrap(), "a b");
            assert_eq!(text(exact.as_ptr().cast(), "it").unwrap().len(), TEXT_BYTES_MAX);
            assert!(matches!(text(long.as_ptr().cast(), "it"), Err(Failure::TooLong { .. })));
            assert!(matches!(text(c"\xff".as_ptr(), "it"), Err(Failure::Text { .. })));
            assert!(matches!(text(std::ptr::null(), "it"), Err(Failure::Null { .. })));
            assert_eq!(text_if_any(std::ptr::null(), "it").unwrap(), None);
        }
    }

    #[test]
    fn a_sentence_is_cut_between_characters_and_ended() {
        let written = |bytes: usize| {
            let mut room = [7u8; 8];
            // SAFETY: never more than the room has.
            let length = unsafe { put_text("aé", room.as_mut_ptr().cast(), bytes) };
            assert_eq!(length, 3);
            room
        };
        assert_eq!(written(8), [b'a', 0xC3, 0xA9, 0, 7, 7, 7, 7]);
        assert_eq!(written(3), [b'a', 0, 7, 7, 7, 7, 7, 7]);
        assert_eq!(written(1), [0, 7, 7, 7, 7, 7, 7, 7]);
        assert_eq!(written(0), [7; 8]);
        // SAFETY: nothing is written to null.
        assert_eq!(unsafe { put_text("aé", std::ptr::null_mut(), 8) }, 3);
    }
}
