//! Divides a replay into equal time spans.

use std::time::Duration;

use crate::replay::{FaultMark, ReplayMeasurements, ratio};

/// Number of spans: enough to show a dip of a second in a minute, few enough to read.
const SPAN_COUNT: usize = 80;

/// Events of one span.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Span {
    /// Middle of the span, seconds.
    pub(super) at_s: f64,
    /// Requests that ended.
    pub(super) ended: u64,
    /// Blocks requested.
    pub(super) requested: u64,
    /// Blocks from DRAM (and GPU memory).
    pub(super) dram: u64,
    /// Blocks from SSD.
    pub(super) ssd: u64,
    /// Bytes fetched.
    pub(super) fetched_bytes: u64,
    /// The part of `fetched_bytes` from SSD, estimated by share of blocks.
    pub(super) fetched_ssd_bytes: u64,
    /// Bytes saved.
    pub(super) saved_bytes: u64,
    /// Bytes of recomputed blocks, saved or not.
    pub(super) computed_bytes: u64,
    /// Largest request duration, microseconds.
    pub(super) slowest_us: u64,
}

/// All spans and faults.
pub(super) struct Timeline {
    pub(super) spans: Vec<Span>,
    pub(super) end_s: f64,
    pub(super) faults: Vec<FaultMark>,
}

impl Timeline {
    pub(super) fn new(measured: &ReplayMeasurements, block_bytes: u64) -> Self {
        let last = measured.samples.iter().map(|sample| sample.at).max().unwrap_or_default();
        let end = last.max(measured.faults.iter().map(|fault| fault.at).max().unwrap_or_default());
        let end = end.max(Duration::from_millis(1));
        let width = end.as_secs_f64() / f64::from(u32::try_from(SPAN_COUNT).unwrap_or(u32::MAX));
        let mut spans = vec![Span::default(); SPAN_COUNT];
        for (number, span) in (0u32..).zip(&mut spans) {
            span.at_s = (f64::from(number) + 0.5) * width;
        }
        for sample in &measured.samples {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let position = ((sample.at.as_secs_f64() / width) as usize).min(SPAN_COUNT - 1);
            let span = &mut spans[position];
            let hits = sample.hit_blocks;
            span.ended += 1;
            span.requested += u64::from(sample.asked_blocks);
            span.dram += u64::from(hits.dram + hits.gpu);
            span.ssd += u64::from(hits.ssd);
            span.fetched_bytes += sample.fetched_bytes;
            span.fetched_ssd_bytes +=
                sample.fetched_bytes * u64::from(hits.ssd) / u64::from(hits.sum().max(1));
            span.saved_bytes += sample.saved_bytes;
            span.computed_bytes +=
                u64::from(sample.asked_blocks - hits.sum().min(sample.asked_blocks)) * block_bytes;
            span.slowest_us = span.slowest_us.max(sample.total_us);
        }
        Self { spans, end_s: end.as_secs_f64(), faults: measured.faults.clone() }
    }

    /// Width of one span in seconds.
    pub(super) fn width_s(&self) -> f64 {
        self.end_s / f64::from(u32::try_from(self.spans.len()).unwrap_or(u32::MAX))
    }

    /// Running sums of `of` over the spans.
    pub(super) fn running_sum(&self, of: impl Fn(&Span) -> u64) -> Vec<u64> {
        let sums = self.spans.iter().scan(0, |sum, span| {
            *sum += of(span);
            Some(*sum)
        });
        sums.collect()
    }

    /// Hit rate from the start to each span, in percent.
    pub(super) fn running_hit_rate(&self) -> Vec<(f64, f64)> {
        let hits = self.running_sum(|span| span.dram + span.ssd);
        let asked = self.running_sum(|span| span.requested);
        let points = self.spans.iter().zip(hits.into_iter().zip(asked));
        points.map(|(span, (hits, asked))| (span.at_s, 100.0 * ratio(hits, asked))).collect()
    }
}
