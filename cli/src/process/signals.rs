//! When a process should stop: SIGTERM, SIGINT, or the end of its parent.
//!
//! Not here: what stopping means for a service.

use std::io::Read;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Why a stop was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// The process that started this one is gone.
    ParentGone,
}

/// Returns at the first request to stop. With `follow_parent`, the end of standard input counts as
/// one: the parent holds the other end of that pipe and cannot go, however it dies, without closing it.
pub async fn stop_requested(follow_parent: bool) -> std::io::Result<StopSignal> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut parent = watch_parent(follow_parent);
    Ok(tokio::select! {
        _ = terminate.recv() => StopSignal::Terminate,
        _ = interrupt.recv() => StopSignal::Interrupt,
        Some(()) = parent.recv() => StopSignal::ParentGone,
    })
}

/// A plain thread, because a read of standard input cannot be cancelled and must not hold up a runtime.
fn watch_parent(follow: bool) -> mpsc::Receiver<()> {
    let (gone, parent) = mpsc::channel(1);
    if follow {
        std::thread::spawn(move || {
            let mut ignored = [0u8; 64];
            while matches!(std::io::stdin().lock().read(&mut ignored), Ok(bytes) if bytes > 0) {}
            // The receiver may be gone already: then the process is stopping for another reason.
            let _ = gone.blocking_send(());
        });
    }
    parent
}
