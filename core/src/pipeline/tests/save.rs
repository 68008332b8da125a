//! The write buffer against a line of jobs in which every byte is written by itself.

use std::collections::VecDeque;

use super::*;
use proptest::prelude::*;

/// Where one byte is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Buffer,
    Own,
}

/// Bytes in the order in which they were computed, each by itself.
#[derive(Debug, Default)]
struct Naive {
    bytes: VecDeque<At>,
    max: usize,
    is_ended: bool,
}

impl Naive {
    fn move_in(&mut self) -> JobEnd {
        if !self.is_ended {
            return JobEnd::Free;
        }
        let mut room = self.max - self.count(At::Buffer);
        for byte in self.bytes.iter_mut().filter(|byte| **byte == At::Own) {
            if room == 0 {
                break;
            }
            (*byte, room) = (At::Buffer, room - 1);
        }
        match self.count(At::Own) {
            0 => JobEnd::Free,
            over => JobEnd::Full { over_bytes: over as u64 },
        }
    }

    fn count(&self, at: At) -> usize {
        self.bytes.iter().filter(|byte| **byte == at).count()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Computed(u8),
    Written(u8),
    End,
    GiveUp(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u8..20).prop_map(Step::Computed),
        4 => (0u8..20).prop_map(Step::Written),
        2 => Just(Step::End),
        1 => (0u8..9).prop_map(Step::GiveUp),
    ]
}

proptest! {
    #[test]
    fn the_account_is_that_of_single_bytes(
        max in 0usize..40,
        steps in prop::collection::vec(step(), 0..60),
    ) {
        let mut ours = WriteBuffer::new(max as u64);
        let mut naive = Naive { max, ..Naive::default() };
        for step in steps {
            match step {
                // A job that waits computes nothing.
                Step::Computed(bytes) if !naive.is_ended || naive.count(At::Own) == 0 => {
                    ours.computed(bytes.into());
                    naive.is_ended = false;
                    naive.bytes.extend((0..bytes).map(|_| At::Own));
                }
                Step::Computed(_) => {}
                Step::Written(bytes) => {
                    let there = bytes.min(u8::try_from(naive.bytes.len()).unwrap());
                    naive.bytes.drain(..usize::from(there));
                    prop_assert_eq!(ours.written(there.into()), naive.move_in());
                }
                Step::End => {
                    naive.is_ended = true;
                    prop_assert_eq!(ours.end_job(), naive.move_in());
                }
                Step::GiveUp(block) => {
                    let over = if naive.is_ended { naive.count(At::Own) } else { 0 };
                    let block = usize::from(block.max(1));
                    let blocks = over.div_ceil(block);
                    let dropped = (blocks * block).min(naive.bytes.len());
                    naive.bytes.truncate(naive.bytes.len() - dropped);
                    prop_assert_eq!(ours.give_up(block as u64), blocks as u64);
                    prop_assert!(!naive.is_ended || naive.count(At::Own) == 0, "the next job may begin");
                }
            }
            prop_assert!(ours.buffered_bytes() <= max as u64, "never more than it has");
            prop_assert_eq!(ours.buffered_bytes(), naive.count(At::Buffer) as u64);
            prop_assert_eq!(ours.unwritten_bytes(), naive.bytes.len() as u64);
        }
    }

    #[test]
    fn a_buffer_of_the_size_that_is_needed_never_fills_and_one_byte_less_does(
        layers in prop::collection::vec(0u64..500, 1..12),
        layer_ns in 0u64..100,
        bytes_per_ns in 0u64..12,
    ) {
        let needed = write_buffer_bytes(&layers, layer_ns, bytes_per_ns * 1_000_000_000);
        prop_assert!(needed >= *layers.last().unwrap(), "nothing of the last layer can be out");
        prop_assert_eq!(end_of(&layers, layer_ns * bytes_per_ns, needed), JobEnd::Free);
        if needed > 0 {
            let end = end_of(&layers, layer_ns * bytes_per_ns, needed - 1);
            prop_assert_eq!(end, JobEnd::Full { over_bytes: 1 });
        }
    }
}

/// One job whose layers are written as fast as `out` bytes in the time of the next one.
fn end_of(layers: &[u64], out: u64, bytes_max: u64) -> JobEnd {
    let mut buffer = WriteBuffer::new(bytes_max);
    for bytes in layers {
        let written = buffer.unwritten_bytes().min(out);
        assert_eq!(buffer.written(written), JobEnd::Free, "while it computes nobody waits");
        buffer.computed(*bytes);
    }
    buffer.end_job()
}

#[test]
fn a_full_buffer_names_what_is_over_and_the_next_job_begins_once_that_is_out() {
    let mut buffer = WriteBuffer::new(100);
    buffer.computed(80);
    assert_eq!(buffer.end_job(), JobEnd::Free);
    buffer.computed(50);
    assert_eq!(buffer.end_job(), JobEnd::Full { over_bytes: 30 });
    assert_eq!(buffer.written(29), JobEnd::Full { over_bytes: 1 });
    assert_eq!(buffer.written(1), JobEnd::Free);
    assert_eq!((buffer.buffered_bytes(), buffer.unwritten_bytes()), (100, 100));
}

#[test]
fn what_is_given_up_is_whole_blocks() {
    let mut buffer = WriteBuffer::new(100);
    buffer.computed(130);
    assert_eq!(buffer.end_job(), JobEnd::Full { over_bytes: 30 });
    assert_eq!(buffer.give_up(20), 2, "of the second, ten bytes had moved in");
    assert_eq!((buffer.buffered_bytes(), buffer.unwritten_bytes()), (90, 90));
    assert_eq!(buffer.give_up(20), 0);
}
