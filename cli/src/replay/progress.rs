//! The progress line of a replay: hit rate, bytes moved, requests per second.
//!
//! Drawn on stderr and only on a terminal; what must be kept is in the report.

use std::cell::RefCell;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::measure::{Sample, ratio};

/// The line. Counting does not depend on whether it is shown.
pub(super) struct Progress {
    bar: ProgressBar,
    begun: Instant,
    sums: RefCell<Sums>,
}

#[derive(Default)]
struct Sums {
    requests: u64,
    asked: u64,
    hits: u64,
    moved_bytes: u64,
}

impl Progress {
    /// A line for so many requests; hidden when `quiet`.
    pub(super) fn new(requests: usize, quiet: bool) -> Self {
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(requests as u64) };
        let style =
            ProgressStyle::with_template("{bar:32} {pos}/{len} requests  {msg}  {elapsed} (left {eta})");
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
        }
        Self { bar, begun: Instant::now(), sums: RefCell::default() }
    }

    /// A request ended.
    pub(super) fn ended(&self, sample: &Sample) {
        let mut sums = self.sums.borrow_mut();
        sums.requests += 1;
        sums.asked += u64::from(sample.asked_blocks);
        sums.hits += u64::from(sample.hit_blocks.sum());
        sums.moved_bytes += sample.fetched_bytes + sample.saved_bytes;
        self.bar.set_message(self.text(&sums));
        self.bar.inc(1);
    }

    fn text(&self, sums: &Sums) -> String {
        #[expect(clippy::cast_precision_loss)]
        let (requests, bytes) = (sums.requests as f64, sums.moved_bytes as f64);
        format!(
            "hit rate {:.2} %  {:.2} GB moved  {:.0} requests/s",
            100.0 * ratio(sums.hits, sums.asked),
            bytes / 1e9,
            requests / self.begun.elapsed().as_secs_f64().max(1e-3),
        )
    }

    /// Removes the line.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
