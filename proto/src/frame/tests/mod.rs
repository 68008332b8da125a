//! Frames against truncation, flipped bits and hostile bytes.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};

use super::*;
use kv_core::content;
use kvfleet_cpu::SharedBytes;
use kvfleet_errors_doc::says;
use proptest::prelude::*;

mod golden;

const IDENTITY: IdentityDigest = IdentityDigest([1; 16]);
const HASH: BlockHash = BlockHash([2; _]);

fn frame(slice_bytes: &[u32]) -> Frame {
    let mut builder = FrameBuilder::new(IDENTITY, HASH, KeyForm::Raw, slice_bytes).unwrap();
    content::fill(HASH, builder.payload_mut());
    builder.seal()
}

/// Reads as a stream reader does: requests bytes until the frame is whole.
fn read_stream(bytes: &[u8]) -> Result<usize, FrameError> {
    let mut have = 0;
    loop {
        match parse_header(&bytes[..have])? {
            BytesNeeded::Frame(total) => return Ok(total),
            BytesNeeded::Header(needed) if needed <= bytes.len() => {
                assert!(needed > have, "the reader made no progress after it got the requested bytes");
                have = needed;
            }
            BytesNeeded::Header(needed) => return Err(FrameError::Truncated { got: bytes.len(), needed }),
        }
    }
}

/// Verifies the frame in place, while copied and while streamed. All must agree, and a verified
/// copy equals the frame.
fn verify_every_way(frame: &Frame, identity: IdentityDigest, hash: BlockHash) -> Result<(), FrameError> {
    let mut copy = vec![0xee; frame.bytes.len()];
    let copied = frame.verify_into(identity, hash, &mut copy);
    assert_eq!(copied, frame.verify(identity, hash));
    assert!(copied.is_err() || copy == frame.bytes);
    let mut arriving = StreamingVerifier::default();
    for part in 0..5 {
        let _ = arriving.advance(&frame.bytes[..frame.bytes.len() * part / 5]);
    }
    let parsed = Frame::parse(frame.bytes.clone()).and_then(|frame| frame.verify(identity, hash));
    assert_eq!(arriving.finish(frame.bytes.clone(), identity, hash).map(drop), parsed);
    copied
}

#[test]
fn a_sealed_frame_parses_verifies_and_returns_its_slices() {
    let slices = [10, 0, 7, 4096];
    let sealed = frame(&slices);
    assert_eq!(sealed.bytes.len(), encoded_len(&slices));
    let parsed = Frame::parse(sealed.bytes.clone()).unwrap();
    assert_eq!(parsed, sealed);
    verify_every_way(&parsed, IDENTITY, HASH).unwrap();
    assert_eq!(parsed.key_form(), KeyForm::Raw);
    assert_eq!(parsed.slice_count(), 4);
    assert!(content::matches(HASH, &parsed.payload()));
    let joined: Vec<u8> = (0..4).flat_map(|layer| parsed.slice(layer).unwrap()).collect();
    assert_eq!(joined, parsed.payload());
    assert_eq!(parsed.slice(1).unwrap().len(), 0);
    assert_eq!(parsed.slice(4), None);
    assert_eq!(read_stream(&parsed.bytes), Ok(parsed.bytes.len()));
}

#[test]
fn the_layout_is_the_documented_one() {
    let frame = frame(&[3, 5]);
    assert_eq!(&frame.bytes[..16], b"KVF1\x02\x00\x48\x00\x00\x00\x00\x00\x02\x00\x00\x00");
    assert_eq!(frame.bytes[16..32], IDENTITY.0);
    assert_eq!(frame.bytes[32..51], HASH.0);
    assert_eq!(frame.bytes[51], 0);
    assert_eq!(frame.bytes[52..56], 3u32.to_le_bytes());
    assert_eq!(frame.bytes[56..60], crc32c::crc32c(&frame.bytes[72..75]).to_le_bytes());
    assert_eq!(frame.bytes[68..72], crc32c::crc32c(&frame.bytes[..68]).to_le_bytes());
}

#[test]
fn seal_rejects_invalid_slices() {
    let refused =
        |slices: &[u32], payload: &[u8]| seal(IDENTITY, HASH, KeyForm::Rotated, slices, payload).unwrap_err();
    assert_eq!(refused(&[], &[]), FrameError::SliceCount(0));
    assert_eq!(refused(&[1; SLICES_MAX + 1], &[]), FrameError::SliceCount(SLICES_MAX + 1));
    assert_eq!(refused(&[u32::MAX; 2], &[]), FrameError::TooLarge(2 * u64::from(u32::MAX)));
    assert_eq!(refused(&[2], &[0; 3]), FrameError::Header("payload is not the sum of its slices"));
    let frame = seal(IDENTITY, HASH, KeyForm::Rotated, &[1; SLICES_MAX], &[9; SLICES_MAX]).unwrap();
    assert_eq!(frame.key_form(), KeyForm::Rotated);
    verify_every_way(&Frame::parse(frame.bytes).unwrap(), IDENTITY, HASH).unwrap();
}

#[test]
fn every_truncation_is_refused() {
    let whole = frame(&[33, 5]).bytes;
    for length in 0..whole.len() {
        let error = Frame::parse(whole.slice(..length)).unwrap_err();
        assert!(
            matches!(error, FrameError::Truncated { got, needed } if got == length && needed > got),
            "{error}"
        );
        if length < header_len(2) {
            assert!(read_stream(&whole[..length]).is_err());
        }
    }
}

#[test]
fn bytes_after_a_frame_are_refused() {
    let mut longer = frame(&[3]).bytes.to_vec();
    longer.push(0);
    let needed = longer.len() - 1;
    assert_eq!(Frame::parse(longer.into()), Err(FrameError::Trailing { needed, extra: 1 }));
}

#[test]
fn every_flipped_bit_is_refused_or_fails_to_verify() {
    let whole = frame(&[33, 5]).bytes;
    for bit in 0..whole.len() * 8 {
        let mut bytes = whole.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let trusted = Frame::parse(bytes.into()).and_then(|frame| verify_every_way(&frame, IDENTITY, HASH));
        assert!(trusted.is_err(), "bit {bit} of byte {} was not detected", bit / 8);
    }
}

/// Old bytes of a slot must not become part of a block.
#[test]
fn rejects_a_destination_of_another_length() {
    let frame = frame(&[8]);
    let needed = frame.bytes.len();
    for got in [0, needed - 1] {
        assert_eq!(
            frame.verify_into(IDENTITY, HASH, &mut vec![0; got]),
            Err(FrameError::Truncated { got, needed })
        );
    }
    let mut room = vec![0; needed + 3];
    let refused = Err(FrameError::Trailing { needed, extra: 3 });
    assert_eq!(frame.verify_into(IDENTITY, HASH, &mut room), refused);
    let mut longer = frame.bytes.to_vec();
    longer.extend([1; 3]);
    let longer = Frame { bytes: longer.into(), ..frame };
    assert_eq!(longer.verify_into(IDENTITY, HASH, &mut room), refused);
}

#[test]
fn another_block_or_identity_is_refused() {
    let frame = frame(&[8]);
    let (block, identity) = (BlockHash([9; _]), IdentityDigest([9; 16]));
    assert_eq!(
        verify_every_way(&frame, IDENTITY, block),
        Err(FrameError::BlockMismatch { got: HASH, wanted: block })
    );
    assert_eq!(
        verify_every_way(&frame, identity, HASH),
        Err(FrameError::IdentityMismatch { got: IDENTITY, wanted: identity })
    );
}

/// The public fields must not make other bytes trusted.
#[test]
fn fields_that_contradict_the_bytes_are_refused() {
    let (block, identity) = (BlockHash([9; _]), IdentityDigest([9; 16]));
    let renamed = Frame { hash: block, ..frame(&[8]) };
    assert_eq!(
        verify_every_way(&renamed, IDENTITY, block),
        Err(FrameError::BlockMismatch { got: HASH, wanted: block })
    );
    let moved = Frame { identity, ..frame(&[8]) };
    assert_eq!(
        verify_every_way(&moved, identity, HASH),
        Err(FrameError::IdentityMismatch { got: IDENTITY, wanted: identity })
    );
}

/// A header with a valid checksum and a table that is too large: a hostile peer can compute CRCs.
#[test]
fn an_oversized_table_is_refused_before_memory_is_taken() {
    let mut bytes = frame(&[8]).bytes.to_vec();
    bytes[52..56].copy_from_slice(&u32::MAX.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..60]);
    bytes[60..64].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(parse_header(&bytes), Err(FrameError::TooLarge(u64::from(u32::MAX))));
    says("a frame that claims to be huge", &parse_header(&bytes).unwrap_err(), &[]);
    assert_eq!(Frame::parse(bytes.into()), Err(FrameError::TooLarge(u64::from(u32::MAX))));
}

#[test]
fn other_streams_are_refused_at_their_first_bytes() {
    assert_eq!(parse_header(b""), Ok(BytesNeeded::Header(16)));
    assert_eq!(parse_header(b"KV"), Ok(BytesNeeded::Header(16)));
    assert_eq!(parse_header(b"GET / HTTP/1.1"), Err(FrameError::Magic));
    let mut newer = frame(&[8]).bytes.to_vec();
    newer[4] = 3;
    assert_eq!(parse_header(&newer), Err(FrameError::Version(3)));
    says("bytes that are no frame", &parse_header(b"GET / HTTP/1.1").unwrap_err(), &[]);
    says("a frame of another release", &parse_header(&newer).unwrap_err(), &[]);
}

/// Bytes replaced after parsing must not make the accessors panic.
#[test]
fn accessors_never_panic_on_replaced_bytes() {
    let mut broken = frame(&[8, 8]);
    for length in 0..broken.bytes.len() {
        broken.bytes.truncate(broken.bytes.len() - length.min(1));
        let _ = (broken.slice(0), broken.slice(1), broken.payload(), broken.slice_count());
        let mut copy = vec![0; broken.bytes.len()];
        let _ = (broken.key_form(), broken.verify(IDENTITY, HASH));
        let _ = broken.verify_into(IDENTITY, HASH, &mut copy);
    }
}

/// Memory that changes as soon as it is loaded; it counts the loads.
struct MutatingSource {
    bytes: Vec<AtomicU8>,
    loads: Vec<AtomicU8>,
    /// Mask that each load flips in a byte.
    change: u8,
}

impl MutatingSource {
    fn new(bytes: &[u8], change: u8) -> MutatingSource {
        let atomics = |bytes: &[u8]| bytes.iter().map(|byte| AtomicU8::new(*byte)).collect();
        MutatingSource { bytes: atomics(bytes), loads: atomics(&vec![0; bytes.len()]), change }
    }
}

impl VolatileBytes for MutatingSource {
    fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        copy_batch(to.len(), |copies| self.copy_crc32c(at, to, copies));
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], _: &CopyBatch) -> u32 {
        for (at, to) in (at..).zip(&mut *to) {
            *to = self.bytes[at].fetch_xor(self.change, Relaxed);
            self.loads[at].fetch_add(1, Relaxed);
        }
        crc32c::crc32c(to)
    }
}

/// The verdict of an ordinary reader on constant bytes.
fn parse_and_verify(bytes: &[u8], identity: IdentityDigest, hash: BlockHash) -> Result<(), FrameError> {
    Frame::parse(bytes.to_vec().into())?.verify(identity, hash)
}

#[test]
fn copy_and_verify_loads_each_byte_once() {
    let frame = frame(&[300, 0, 7, 5000]);
    for change in [1, 0x80, 0xff] {
        let from = MutatingSource::new(&frame.bytes, change);
        let mut to = vec![0xee; frame.bytes.len()];
        copy_and_verify(&from, IDENTITY, KeyForm::Raw, HASH, &mut to).unwrap();
        assert_eq!(to, frame.bytes, "the copy is not of the first load");
        assert!(
            from.loads.iter().all(|loads| loads.load(Relaxed) == 1),
            "a byte was not loaded exactly once"
        );
        // The source holds other bytes now, and they must not pass.
        assert!(copy_and_verify(&from, IDENTITY, KeyForm::Raw, HASH, &mut to).is_err());
    }
}

#[test]
fn rejects_other_lengths_before_loading_a_byte() {
    let from = MutatingSource::new(&frame(&[8]).bytes, 0);
    let needed = from.len_bytes();
    let into = |bytes: usize| copy_and_verify(&from, IDENTITY, KeyForm::Raw, HASH, &mut vec![0; bytes]);
    assert_eq!(into(0), Err(FrameError::Truncated { got: 0, needed }));
    assert_eq!(into(needed - 1), Err(FrameError::Truncated { got: needed - 1, needed }));
    assert_eq!(into(needed + 1), Err(FrameError::Trailing { needed, extra: 1 }));
    assert!(from.loads.iter().all(|loads| loads.load(Relaxed) == 0));
}

/// Tampering is detected before a key form mismatch, since the header's checksum is checked first.
#[test]
fn copy_and_verify_checks_the_key_form() {
    let frame = frame(&[300, 7]);
    let mut to = vec![0xee; frame.bytes.len()];
    let (got, wanted) = (KeyForm::Raw, KeyForm::Rotated);
    let refused = copy_and_verify(&frame.bytes, IDENTITY, wanted, HASH, &mut to);
    assert_eq!(refused, Err(FrameError::KeyFormMismatch { got, wanted }));
    let mut changed = frame.bytes.to_vec();
    changed[8] = 1;
    let refused = copy_and_verify(&Bytes::from(changed), IDENTITY, wanted, HASH, &mut to);
    assert_eq!(refused, Err(FrameError::HeaderChecksum));
    copy_and_verify(&frame.bytes, IDENTITY, got, HASH, &mut to).unwrap();
    let rotated = seal(IDENTITY, HASH, wanted, &[3], b"abc").unwrap();
    copy_and_verify(&rotated.bytes, IDENTITY, wanted, HASH, &mut vec![0; rotated.bytes.len()]).unwrap();
}

/// Stops a test's writer thread when dropped, also on a panic: the thread scope waits for the
/// writer.
struct StopOnDrop<'flag>(&'flag AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Real memory that another thread writes, as a hostile client does with its bounce buffer.
struct SharedWords(Vec<AtomicU64>);

impl VolatileBytes for SharedWords {
    fn len_bytes(&self) -> usize {
        size_of_val(&self.0[..])
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        SharedBytes::of_words(&self.0).slice(at, to.len()).copy_to(to);
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &CopyBatch) -> u32 {
        copies.crc32c_shared(to, SharedBytes::of_words(&self.0).slice(at, to.len()))
    }
}

/// The result is the whole frame or an error, never a copy with other bytes.
#[test]
#[cfg(not(miri))]
fn concurrent_writes_never_pass_verification() {
    // Header and payload fill whole words: 56 + 3 * 8 = 80, and 8 + 1000 + 1000.
    let frame = frame(&[8, 1000, 1000]);
    let words: Vec<u64> =
        frame.bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    let shared = SharedWords(words.iter().map(|word| AtomicU64::new(*word)).collect());
    assert_eq!(shared.len_bytes(), frame.bytes.len());
    let is_over = AtomicBool::new(false);
    let mut seen = [0, 0];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Flips one word after another for a moment, through the whole frame.
            for at in (0..words.len()).cycle() {
                if is_over.load(Relaxed) {
                    break;
                }
                shared.0[at].store(!words[at], Relaxed);
                std::hint::spin_loop();
                shared.0[at].store(words[at], Relaxed);
            }
        });
        let _ends = StopOnDrop(&is_over);
        let mut to = vec![0; frame.bytes.len()];
        for round in 0..2_000_000 {
            if round >= 20_000 && seen.iter().all(|seen| *seen > 0) {
                break;
            }
            let settled = copy_and_verify(&shared, IDENTITY, KeyForm::Raw, HASH, &mut to);
            assert_eq!(
                settled,
                parse_and_verify(&to, IDENTITY, HASH).and(settled),
                "verification passed a copy that an ordinary reader rejects"
            );
            assert!(settled.is_err() || to == frame.bytes);
            seen[usize::from(settled.is_ok())] += 1;
        }
    });
    assert!(seen.iter().all(|seen| *seen > 0), "{seen:?}: the writer hit every copy, or none");
}

proptest! {
    #[test]
    fn copy_and_verify_agrees_with_parse_and_verify(
        slices in prop::collection::vec(0u32..700, 1..8),
        cut in 0usize..400,
        at in any::<prop::sample::Index>(),
        noise in prop::option::of(prop::collection::vec(any::<u8>(), 1..30)),
        change in any::<u8>(),
    ) {
        let mut bytes = frame(&slices).bytes.to_vec();
        if let Some(noise) = &noise {
            let at = at.index(bytes.len());
            bytes[at..].iter_mut().zip(noise).for_each(|(byte, noise)| *byte = *noise);
        }
        if cut >= 200 {
            bytes.truncate(bytes.len().saturating_sub(cut - 200));
        }
        let mut to = vec![0; bytes.len()];
        let from = MutatingSource::new(&bytes, change);
        let settled = copy_and_verify(&from, IDENTITY, KeyForm::Raw, HASH, &mut to);
        let plain = parse_and_verify(&bytes, IDENTITY, HASH);
        // If several things are wrong, the two functions may name different ones.
        prop_assert_eq!(settled.is_ok(), plain.is_ok(), "{:?} and {:?}", settled, plain);
        prop_assert!(settled.is_err() || to == bytes);
        prop_assert!(from.loads.iter().all(|loads| loads.load(Relaxed) <= 1));
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Frame::parse(bytes.clone().into()).is_err());
        prop_assert!(read_stream(&bytes).is_err());
    }

    #[test]
    fn frames_with_random_bytes_over_them_are_never_trusted_wrongly(
        slices in prop::collection::vec(0u32..40, 1..8),
        at in any::<prop::sample::Index>(),
        noise in prop::collection::vec(any::<u8>(), 1..30),
    ) {
        let whole = frame(&slices).bytes;
        let mut bytes = whole.to_vec();
        let at = at.index(bytes.len());
        for (byte, noise) in bytes[at..].iter_mut().zip(&noise) {
            *byte = *noise;
        }
        let changed = bytes != whole;
        let trusted = Frame::parse(bytes.into()).and_then(|frame| verify_every_way(&frame, IDENTITY, HASH)).is_ok();
        prop_assert_eq!(trusted, !changed);
    }

    #[test]
    fn any_slices_survive(slices in prop::collection::vec(0u32..2000, 1..40)) {
        let frame = frame(&slices);
        prop_assert_eq!(read_stream(&frame.bytes), Ok(encoded_len(&slices)));
        let parsed = Frame::parse(frame.bytes).unwrap();
        prop_assert!(verify_every_way(&parsed, IDENTITY, HASH).is_ok());
        for (layer, bytes) in slices.iter().enumerate() {
            prop_assert_eq!(parsed.slice(layer).unwrap().len(), *bytes as usize);
        }
    }
}
