//! Captures log output, for tests that compare a line with `docs/reference/errors.md`.
//!
//! Not here: times, which differ in each run, and lines below a warning.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::Level;
use tracing::subscriber::DefaultGuard;

/// Lines logged by this thread during its lifetime.
pub struct Log {
    text: Arc<Mutex<Vec<u8>>>,
    _guard: DefaultGuard,
}

impl Log {
    /// Starts capturing.
    pub fn start() -> Log {
        let text = Arc::<Mutex<Vec<u8>>>::default();
        let writer = Arc::clone(&text);
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::WARN)
            .with_ansi(false)
            .without_time()
            .with_writer(move || Sink(Arc::clone(&writer)))
            .finish();
        Log { text, _guard: tracing::subscriber::set_default(subscriber) }
    }

    /// Number of lines so far that contain `part`.
    #[allow(dead_code)] // not used by every test
    pub fn count(&self, part: &str) -> usize {
        String::from_utf8_lossy(&self.text.lock()).lines().filter(|line| line.contains(part)).count()
    }

    /// The first line so far that contains `part`; panics if there is none.
    pub fn line(&self, part: &str) -> String {
        let bytes = self.text.lock();
        let text = String::from_utf8_lossy(&bytes);
        let line = text.lines().find(|line| line.contains(part));
        line.unwrap_or_else(|| panic!("{part:?} was not logged: {text}")).to_owned()
    }
}

struct Sink(Arc<Mutex<Vec<u8>>>);

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
