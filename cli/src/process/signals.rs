//! When a process should stop: SIGTERM, SIGINT, SIGHUP, or the end of its parent.
//!
//! Not here: what stopping means for a service or a command.

use std::io::{Read, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// How long a service gets from the request to stop until its process ends whatever still holds it up, beside what requests under way may
/// take. Longer than any service takes for itself.
const FORCE_EXIT_AFTER: Duration = Duration::from_secs(10);

/// Exit status of a process that did not stop in time.
const EXIT_FORCED: i32 = 1;

/// Why a stop was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// The terminal is gone.
    HangUp,
    /// The process that started this one is gone.
    ParentGone,
}

/// Requests to stop, heard from the moment this is made, whatever the process is busy with: the first
/// one asks for an orderly end, the second one for an end at once.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    asked: CancellationToken,
    insisted: CancellationToken,
    why: Arc<OnceLock<StopSignal>>,
}

impl Stop {
    /// For a command that a person typed.
    pub fn of_command() -> std::io::Result<Self> {
        let stop = Self::default();
        tokio::spawn(stop.clone().listen(Heard::new(false, FORCE_EXIT_AFTER)?, |_| {
            say("stopping (again to stop at once)");
        }));
        Ok(stop)
    }

    /// For a service: once asked to stop it ends within `FORCE_EXIT_AFTER` and what requests under way may take, by force if need be. With
    /// `follow_parent`, the end of standard input counts as a request: the parent holds the other end of
    /// that pipe and cannot go, however it dies, without closing it.
    pub fn of_service(follow_parent: bool, under_way: Duration) -> std::io::Result<Self> {
        let stop = Self::default();
        let after = FORCE_EXIT_AFTER.saturating_add(under_way);
        tokio::spawn(stop.clone().listen(Heard::new(follow_parent, after)?, move |_| {
            std::thread::spawn(move || force_exit(after));
        }));
        Ok(stop)
    }

    /// Returns at the first request.
    pub async fn requested(&self) -> StopSignal {
        self.asked.cancelled().await;
        self.why.get().copied().unwrap_or(StopSignal::Terminate)
    }

    /// Returns at the second request.
    pub async fn insisted(&self) {
        self.insisted.cancelled().await;
    }

    /// Cancelled at the first request.
    #[must_use]
    pub fn token(&self) -> &CancellationToken {
        &self.asked
    }

    async fn listen(self, mut heard: Heard, at_first: impl Fn(StopSignal)) {
        loop {
            let why = heard.next().await;
            if self.asked.is_cancelled() {
                self.insisted.cancel();
            } else {
                // The only one that sets it.
                let _ = self.why.set(why);
                self.asked.cancel();
                at_first(why);
            }
        }
    }
}

/// The signals, registered.
struct Heard {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    parent: mpsc::Receiver<()>,
}

impl Heard {
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

/// A plain thread, because a read of standard input cannot be cancelled and must not hold up a runtime.
fn watch_parent(follow: bool, after: Duration) -> mpsc::Receiver<()> {
    let (gone, parent) = mpsc::channel(1);
    if follow {
        std::thread::spawn(move || {
            let mut ignored = [0u8; 64];
            while matches!(std::io::stdin().lock().read(&mut ignored), Ok(bytes) if bytes > 0) {}
            // The receiver may be gone already: then the process is stopping for another reason.
            let _ = gone.blocking_send(());
            // From here and not from the listener: nobody is left to kill this process, even if its runtime
            // is too busy to listen.
            force_exit(after);
        });
    }
    parent
}

/// Ends the process after a grace, from a thread that nothing else can hold up.
fn force_exit(after: Duration) {
    std::thread::sleep(after);
    say(&format!("did not stop within {after:?}: ended by force"));
    std::process::exit(EXIT_FORCED);
}

/// Says something to a person who may have hung up.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "kvfleet: {text}");
}
