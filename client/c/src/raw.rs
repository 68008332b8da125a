//! Reads and writes memory that callers point to, except lent slices (`slices.rs`).
//!
//! Everything that can be checked is checked here: null, misalignment, size, length. The caller
//! guarantees that other pointers are valid, as for any C function; each function states its
//! requirements.
//!
//! Not here: the meaning of fields (`calls.rs`).
#![allow(unsafe_code)] // the caller's pointers: docs/adr/0044

use std::ffi::{c_char, c_void};

use crate::status::Failure;

/// Longest accepted text in bytes: an address, a path, a name. A longer one probably lacks its
/// terminator.
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

/// The value behind a pointer.
///
/// # Safety
/// A pointer that is neither null nor misaligned points to a `T` that is not changed while the
/// result is used.
pub(crate) unsafe fn reference<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T, Failure> {
    check(pointer, what)?;
    // SAFETY: not null and aligned by the check; the rest is the caller's promise.
    Ok(unsafe { &*pointer })
}

/// A struct that begins with its size; the rest is read only if that size is the one of `T`.
///
/// # Safety
/// As for [`reference`], for as many bytes as the struct itself states.
pub(crate) unsafe fn sized_struct<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise, passed on.
    unsafe { check_size(pointer, what)? };
    // SAFETY: aligned by the check, and as long as `T` by its own size field, which the caller
    // guarantees.
    Ok(unsafe { &*pointer })
}

/// Checks that a struct which begins with its size states the size of `T`. The rest may be
/// uninitialized.
///
/// # Safety
/// As for [`reference`], for the four bytes of the size.
pub(crate) unsafe fn check_size<T>(pointer: *const T, what: &'static str) -> Result<(), Failure> {
    check(pointer, what)?;
    let expected = size_of::<T>();
    // SAFETY: every such struct begins with a size of four bytes, and its alignment is at least
    // that of the size.
    let got = unsafe { *pointer.cast::<u32>() };
    if got as usize == expected { Ok(()) } else { Err(Failure::Size { what, got: u64::from(got), expected }) }
}

/// An array; empty if `count` is 0, for any pointer.
///
/// # Safety
/// A pointer that is neither null nor misaligned points to `count` values that are not changed
/// while the result is used.
pub(crate) unsafe fn array<'a, T>(
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
    // SAFETY: aligned and not null by the check; `count` is below a limit that fits any address
    // space.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Slices of `bytes` bytes each; a pointer may be null only if that is 0.
///
/// # Safety
/// Those that are not null point to `bytes` bytes that are not changed while the result is used.
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
        // SAFETY: not null by the check, and long enough by the caller's promise; `bytes` is a
        // valid slice length of a frame.
        Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), bytes) })
    };
    pointers.iter().map(slice).collect()
}

/// A text that ends with a 0.
///
/// # Safety
/// A pointer that is not null has a 0 within its memory or [`TEXT_BYTES_MAX`] bytes, and the text
/// is not changed meanwhile.
pub(crate) unsafe fn text(pointer: *const c_char, what: &'static str) -> Result<String, Failure> {
    check(pointer, what)?;
    let mut bytes = Vec::new();
    loop {
        // SAFETY: no byte before this one is the terminator, so this one belongs to the text too.
        let byte = unsafe { *pointer.add(bytes.len()) }.cast_unsigned();
        if byte == 0 {
            return String::from_utf8(bytes).map_err(|_| Failure::NotUtf8 { what });
        }
        if bytes.len() == TEXT_BYTES_MAX {
            return Err(Failure::TooLong { what, got: TEXT_BYTES_MAX as u64 + 1, limit: TEXT_BYTES_MAX });
        }
        bytes.push(byte);
    }
}

/// The same, or `None` for null.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn optional_text(
    pointer: *const c_char,
    what: &'static str,
) -> Result<Option<String>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise, passed on.
    unsafe { text(pointer, what) }.map(Some)
}

/// Checks that a value may be written to this pointer.
///
/// # Errors
/// If it may not.
pub(crate) fn check_writable<T>(pointer: *mut T, what: &'static str) -> Result<(), Failure> {
    check(pointer, what)
}

/// Writes a value over the previous content.
///
/// # Safety
/// A pointer that is neither null nor misaligned points to memory for a `T` that is not used
/// otherwise meanwhile.
pub(crate) unsafe fn write<T>(pointer: *mut T, value: T, what: &'static str) -> Result<(), Failure> {
    check(pointer, what)?;
    // SAFETY: not null and aligned by the check; the previous C value needs no drop.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Writes several values; the caller of this function must have checked that they fit.
///
/// # Safety
/// A pointer that is neither null nor misaligned points to memory for that many `T` that is not
/// used otherwise meanwhile.
pub(crate) unsafe fn write_array<T: Copy>(
    pointer: *mut T,
    values: &[T],
    what: &'static str,
) -> Result<(), Failure> {
    if values.is_empty() {
        return Ok(());
    }
    check(pointer, what)?;
    // SAFETY: not null and aligned by the check, long enough by the promise; `values` is Rust
    // memory and cannot overlap.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), pointer, values.len()) };
    Ok(())
}

/// Copies as much of a message as fits, terminated by a 0, and returns its whole length.
///
/// # Safety
/// A pointer that is not null points to that many bytes, which are not used otherwise meanwhile.
pub(crate) unsafe fn write_text(sentence: &str, to: *mut c_char, bytes: usize) -> usize {
    if let (false, Some(room)) = (to.is_null(), bytes.checked_sub(1)) {
        let mut end = room.min(sentence.len());
        while !sentence.is_char_boundary(end) {
            end -= 1;
        }
        // SAFETY: `end` is below `bytes`, the caller's length of the memory.
        unsafe {
            std::ptr::copy_nonoverlapping(sentence.as_ptr(), to.cast(), end);
            to.add(end).write(0);
        }
    }
    sentence.len()
}

/// Turns a value into a handle for the caller.
pub(crate) fn into_handle<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Takes a handle back; `None` for null.
///
/// # Safety
/// It is null, or a result of [`into_handle`] that was not taken back before and is not in use.
pub(crate) unsafe fn from_handle<T>(handle: *mut T) -> Option<Box<T>> {
    // SAFETY: `into_handle` made it from a box, and it is taken back once.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[repr(C)]
    struct SizedStruct {
        size: u32,
        value: u64,
    }

    #[test]
    fn unreadable_pointers_are_refused() {
        // SAFETY: all of these are refused before they are read, or are references of this test.
        unsafe {
            assert!(matches!(reference::<u64>(std::ptr::null(), "it"), Err(Failure::Null { what: "it" })));
            let bytes = [0u64; 2];
            let odd = bytes.as_ptr().cast::<u8>().add(1).cast::<u64>();
            assert!(matches!(reference(odd, "it"), Err(Failure::Misaligned { align: 8, .. })));
            assert!(array(odd, 0, 10, "it").unwrap().is_empty());
            assert!(matches!(array(odd, 1, 10, "it"), Err(Failure::Misaligned { .. })));
            let long = array(bytes.as_ptr(), usize::MAX, 10, "it");
            assert!(matches!(long, Err(Failure::TooLong { limit: 10, .. })));
            for (size, is_read) in [(16, true), (0, false), (8, false), (u32::MAX, false)] {
                let small = SizedStruct { size, value: 7 };
                let read = sized_struct(&raw const small, "it").map(|small| small.value);
                assert!(
                    matches!(read, Ok(7) if is_read) || matches!(read, Err(Failure::Size { .. }) if !is_read)
                );
            }
        }
    }

    #[test]
    fn null_slices_are_refused() {
        let bytes = [1u8, 2, 3];
        let (at, null) = (bytes.as_ptr().cast::<c_void>(), std::ptr::null());
        // SAFETY: pointers that are not null have three bytes.
        unsafe {
            assert_eq!(slices(&[at, at], 3, "it").unwrap(), [&bytes[..], &bytes[..]]);
            assert!(matches!(slices(&[at, null], 3, "it"), Err(Failure::Null { what: "it" })));
            assert_eq!(slices(&[null, at], 0, "it").unwrap(), [&[] as &[u8]; 2]);
            assert!(slices(&[], 3, "it").unwrap().is_empty());
        }
    }

    #[test]
    fn unterminated_texts_are_refused() {
        let long = vec![b'a'; TEXT_BYTES_MAX + 1];
        let exact: Vec<u8> = long[1..].iter().copied().chain([0]).collect();
        // SAFETY: each has a 0, or as many bytes as are read.
        unsafe {
            assert_eq!(text(c"a b".as_ptr(), "it").unwrap(), "a b");
            assert_eq!(text(exact.as_ptr().cast(), "it").unwrap().len(), TEXT_BYTES_MAX);
            assert!(matches!(text(long.as_ptr().cast(), "it"), Err(Failure::TooLong { .. })));
            assert!(matches!(text(c"\xff".as_ptr(), "it"), Err(Failure::NotUtf8 { .. })));
            assert!(matches!(text(std::ptr::null(), "it"), Err(Failure::Null { .. })));
            assert_eq!(optional_text(std::ptr::null(), "it").unwrap(), None);
        }
    }

    #[test]
    fn text_is_cut_between_characters_and_terminated() {
        let written = |bytes: usize| {
            let mut room = [7u8; 8];
            // SAFETY: never longer than the array.
            let length = unsafe { write_text("aé", room.as_mut_ptr().cast(), bytes) };
            assert_eq!(length, 3);
            room
        };
        assert_eq!(written(8), [b'a', 0xC3, 0xA9, 0, 7, 7, 7, 7]);
        assert_eq!(written(3), [b'a', 0, 7, 7, 7, 7, 7, 7]);
        assert_eq!(written(1), [0, 7, 7, 7, 7, 7, 7, 7]);
        assert_eq!(written(0), [7; 8]);
        // SAFETY: null is not written.
        assert_eq!(unsafe { write_text("aé", std::ptr::null_mut(), 8) }, 3);
    }
}
