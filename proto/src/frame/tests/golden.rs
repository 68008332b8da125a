//! Frames as version 1 stores them, byte by byte: what lies on SSDs and on the wire between releases.
//!
//! A change that makes these fail makes stored blocks unreadable: it takes a new [`VERSION`], and these bytes stay
//! as those of version 1. Not here: what is refused (the parent module).

use super::*;

const GOLDEN_IDENTITY: IdentityDigest = IdentityDigest(counted(0xa0));
const GOLDEN_HASH: BlockHash = BlockHash(counted(0xb0));

/// Three slices, one of them empty.
const SLICES: [&[u8]; 3] = [b"abc", b"", b"01234"];

/// Each line is a part: start, identity, hash, slice table, checksum of the header, payload.
const RAW: [&str; 6] = [
    "4b56463101004c000000000003000000",
    "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf",
    "b0b1b2b3b4b5b6b7b8b9babbbcbdbebf",
    "03000000b73f4b36000000000000000005000000981da56f",
    "7bce7ea3",
    "6162633031323334",
];

/// The same with keys after rotation: another number, and with it another checksum.
const ROTATED: [&str; 6] = ["4b56463101004c000100000003000000", RAW[1], RAW[2], RAW[3], "792170d7", RAW[5]];

const fn counted(from: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut at = 0;
    while at < bytes.len() {
        bytes[at] = from + at as u8;
        at += 1;
    }
    bytes
}

fn bytes_of(parts: [&str; 6]) -> Bytes {
    let hex = parts.concat();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn stored_frames_of_each_key_form_are_read_as_what_they_were() {
    for (key_form, golden) in [(KeyForm::Raw, bytes_of(RAW)), (KeyForm::Rotated, bytes_of(ROTATED))] {
        let frame = Frame::parse(golden.clone()).unwrap();
        assert_eq!((frame.identity, frame.hash, frame.key_form()), (GOLDEN_IDENTITY, GOLDEN_HASH, key_form));
        assert_eq!(frame.slice_count(), SLICES.len());
        for (layer, slice) in SLICES.iter().enumerate() {
            assert_eq!(frame.slice(layer).unwrap(), *slice, "slice {layer}, {key_form} keys");
        }
        verify(&frame, GOLDEN_IDENTITY, GOLDEN_HASH).unwrap();
        let mut settled = vec![0; golden.len()];
        settle(&golden, GOLDEN_IDENTITY, key_form, GOLDEN_HASH, &mut settled).unwrap();
        assert_eq!(settled, golden);
    }
}

#[test]
fn frames_of_each_key_form_are_written_as_those_that_are_stored() {
    let lengths = SLICES.map(|slice| u32::try_from(slice.len()).unwrap());
    let payload = SLICES.concat();
    for (key_form, golden) in [(KeyForm::Raw, bytes_of(RAW)), (KeyForm::Rotated, bytes_of(ROTATED))] {
        let sealed = seal(GOLDEN_IDENTITY, GOLDEN_HASH, key_form, &lengths, &payload).unwrap();
        assert_eq!(sealed.bytes, golden, "{key_form} keys");
        let mut builder = FrameBuilder::new(GOLDEN_IDENTITY, GOLDEN_HASH, key_form, &lengths).unwrap();
        builder.payload_mut().copy_from_slice(&payload);
        assert_eq!(builder.seal().bytes, golden, "{key_form} keys, in place");
    }
}
