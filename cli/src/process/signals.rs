//! Requests to stop a process: SIGTERM, SIGINT, SIGHUP, or the end of its parent.
//!
//! Not here: how a service or a command stops.

use std::io::{Read, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Time from a stop request to a forced exit, in addition to the time for requests in flight.
/// Longer than any service needs.
const FORCE_EXIT_AFTER: Duration = Duration::from_secs(10);

/// Exit status after a forced exit.
const EXIT_FORCED: i32 = 1;

/// Reason of a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// The terminal closed.
    HangUp,
    /// The parent process ended.
    ParentGone,
}

/// Stop requests, received from construction on. The first one asks for a clean stop, the second
/// one for an immediate stop.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    requested: CancellationToken,
    forced: CancellationToken,
    first: Arc<OnceLock<StopSignal>>,
}

impl Stop {
    /// Stop requests for an interactive command.
    pub fn for_command() -> std::io::Result<Self> {
        let stop = Self::default();
        tokio::spawn(stop.clone().listen(StopSources::new(false, FORCE_EXIT_AFTER)?, |_| {
            print_line("stopping (again to stop at once)");
        }));
        Ok(stop)
    }

    /// Stop requests for a service. After the first request, the process exits within
    /// `FORCE_EXIT_AFTER` plus `drain_time`, by force if needed. With `follow_parent`, the end of
    /// standard input is a request too: the parent holds the other end of that pipe, and its end
    /// closes the pipe in any case.
    pub fn for_service(follow_parent: bool, drain_time: Duration) -> std::io::Result<Self> {
        let stop = Self::default();
        let after = FORCE_EXIT_AFTER.saturating_add(drain_time);
        tokio::spawn(stop.clone().listen(StopSources::new(follow_parent, after)?, move |_| {
            std::thread::spawn(move || force_exit(after));
        }));
        Ok(stop)
    }

    /// Returns at the first request.
    pub async fn requested(&self) -> StopSignal {
        self.requested.cancelled().await;
        self.first.get().copied().unwrap_or(StopSignal::Terminate)
    }

    /// Returns at the second request.
    pub async fn forced(&self) {
        self.forced.cancelled().await;
    }

    /// Cancelled at the first request.
    #[must_use]
    pub fn token(&self) -> &CancellationToken {
        &self.requested
    }

    async fn listen(self, mut sources: StopSources, at_first: impl Fn(StopSignal)) {
        loop {
            let why = sources.next().await;
            if self.requested.is_cancelled() {
                self.forced.cancel();
            } else {
                // This is the only place that sets it.
                let _ = self.first.set(why);
                self.requested.cancel();
                at_first(why);
            }
        }
    }
}

/// The registered signal handlers.
struct StopSources {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    parent: mpsc::Receiver<()>,
}

impl StopSources {
    fn new(follow_parent: bool, after: Duration) -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            parent: watch_parent(follow_parent, after),
        })
    }

    async fn next(&mut self) -> StopSignal {
        tokio::select! {
            _ = self.terminate.recv() => StopSignal::Terminate,
            _ = self.interrupt.recv() => StopSignal::Interrupt,
            _ = self.hang_up.recv() => StopSignal::HangUp,
            Some(()) = self.parent.recv() => StopSignal::ParentGone,
        }
    }
}

/// A thread, because reading standard input cannot be cancelled and must not block the runtime.
fn watch_parent(follow: bool, after: Duration) -> mpsc::Receiver<()> {
    let (gone, parent) = mpsc::channel(1);
    if follow {
        std::thread::spawn(move || {
            let mut ignored = [0u8; 64];
            while matches!(std::io::stdin().lock().read(&mut ignored), Ok(bytes) if bytes > 0) {}
            // The receiver is gone if the process already stops for another reason.
            let _ = gone.blocking_send(());
            // Force the exit from this thread: without the parent, no other process would kill this
            // one if its runtime hangs.
            force_exit(after);
        });
    }
    parent
}

/// Exits after the grace time, on a thread that nothing else blocks.
fn force_exit(after: Duration) {
    std::thread::sleep(after);
    print_line(&format!("did not stop within {after:?}: ended by force"));
    std::process::exit(EXIT_FORCED);
}

/// Writes to standard error, which may be closed.
fn print_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "kvfleet: {text}");
}
