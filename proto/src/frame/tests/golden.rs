//! Frames of version 2, byte by byte: the bytes on SSDs and on the wire between releases.
//!
//! A change that makes these tests fail makes stored blocks unreadable. It needs a new [`VERSION`],
//! and these bytes stay as those of version 2. Version 1 was in no release. Not here: rejected frames
//! (the parent module).

use super::*;

const GOLDEN_IDENTITY: IdentityDigest = IdentityDigest(counting(0xa0));
const GOLDEN_HASH: BlockHash = BlockHash(counting(0xb0));

/// Three slices, one of them empty.
const SLICES: [&[u8]; 3] = [b"abc", b"", b"01234"];

/// One part per line: start, identity, hash and a zero, slice table, header checksum, payload.
const RAW: [&str; 6] = [
    "4b564631020050000000000003000000",
    "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf",
    "b0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c200",
    "03000000b73f4b36000000000000000005000000981da56f",
    "40bbe059",
    "6162633031323334",
];

/// The same frame with rotated keys: another key form number, and therefore another checksum.
const ROTATED: [&str; 6] = ["4b564631020050000100000003000000", RAW[1], RAW[2], RAW[3], "7b9ff945", RAW[5]];

const fn counting<const BYTES: usize>(from: u8) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
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
fn reads_stored_frames_of_each_key_form() {
    for (key_form, golden) in [(KeyForm::Raw, bytes_of(RAW)), (KeyForm::Rotated, bytes_of(ROTATED))] {
        let frame = Frame::parse(golden.clone()).unwrap();
        assert_eq!((frame.identity, frame.hash, frame.key_form()), (GOLDEN_IDENTITY, GOLDEN_HASH, key_form));
        assert_eq!(frame.slice_count(), SLICES.len());
        for (layer, slice) in SLICES.iter().enumerate() {
            assert_eq!(frame.slice(layer).unwrap(), *slice, "slice {layer}, {key_form} keys");
        }
        verify_every_way(&frame, GOLDEN_IDENTITY, GOLDEN_HASH).unwrap();
        let mut settled = vec![0; golden.len()];
        copy_and_verify(&golden, GOLDEN_IDENTITY, key_form, GOLDEN_HASH, &mut settled).unwrap();
        assert_eq!(settled, golden);
    }
}

#[test]
fn writes_frames_equal_to_the_stored_ones() {
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
