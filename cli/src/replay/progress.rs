//! Progress line of a replay: hit rate, bytes moved, requests per second.
//!
//! It is drawn on stderr and only on a terminal; the report holds the final numbers.

use std::cell::RefCell;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::measure::{RequestSample, ratio};

/// The progress line. It counts even when hidden.
pub(super) struct Progress {
    bar: ProgressBar,
    started_at: Instant,
    totals: RefCell<ProgressTotals>,
}

#[derive(Default)]
struct ProgressTotals {
    requests: u64,
    requested: u64,
    hits: u64,
    moved_bytes: u64,
}

impl Progress {
    /// A line for `requests` requests, hidden if `quiet`.
    pub(super) fn new(requests: usize, quiet: bool) -> Self {
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(requests as u64) };
        let style =
            ProgressStyle::with_template("{bar:32} {pos}/{len} requests  {msg}  {elapsed} (left {eta})");
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
        }
        Self { bar, started_at: Instant::now(), totals: RefCell::default() }
    }

    /// Counts a completed request.
    pub(super) fn ended(&self, sample: &RequestSample) {
        let mut sums = self.totals.borrow_mut();
        sums.requests += 1;
        sums.requested += u64::from(sample.asked_blocks);
        sums.hits += u64::from(sample.hit_blocks.sum());
        sums.moved_bytes += sample.fetched_bytes + sample.saved_bytes;
        self.bar.set_message(self.message(&sums));
        self.bar.inc(1);
    }

    fn message(&self, sums: &ProgressTotals) -> String {
        #[expect(clippy::cast_precision_loss)]
        let (requests, bytes) = (sums.requests as f64, sums.moved_bytes as f64);
        format!(
            "hit rate {:.2} %  {:.2} GB moved  {:.0} requests/s",
            100.0 * ratio(sums.hits, sums.requested),
            bytes / 1e9,
            requests / self.started_at.elapsed().as_secs_f64().max(1e-3),
        )
    }

    /// Removes the line.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
