//! `kvf_layer_save`: a save that takes layers as they are computed.
//!
//! Nothing here keeps an address: each layer is copied while its call lasts. Not here: reading the addresses (`raw.rs`), and where
//! the frames go (`kvfleet_client::LayerSave`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvfleet_client::{LayerSave, LayerSaveCall, LayerSaveError};

use crate::handles::Opened;
use crate::status::Failure;

/// `kvf_layer_save`.
#[derive(Debug)]
pub struct LayerSaveHandle {
    state: Mutex<State>,
    blocks: usize,
    slice_bytes: Vec<u32>,
    threads: Arc<Opened>,
}

#[derive(Debug)]
struct State {
    /// Nothing once it was finished.
    save: Option<LayerSave>,
    /// Layers that were put.
    layers: usize,
}

/// What the next layer must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Slices, one for each block.
    pub(crate) slices: usize,
    /// Bytes of each.
    pub(crate) bytes: usize,
}

impl LayerSaveHandle {
    /// Takes room for all of its frames.
    pub(crate) fn begin(threads: &Arc<Opened>, call: LayerSaveCall) -> Result<LayerSaveHandle, Failure> {
        let (client, runtime) = threads.here()?;
        // It may begin on the client's threads at once; the caller's thread is none of them.
        let _inside = runtime.enter();
        let (blocks, slice_bytes) = (call.hashes.len(), call.slice_bytes.clone());
        let state = Mutex::new(State { save: Some(client.save_layers(call)?), layers: 0 });
        Ok(LayerSaveHandle { state, blocks, slice_bytes, threads: Arc::clone(threads) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the next layer, which `read` gives once it is known what it must be. Two layers at once come one after the other.
    pub(crate) fn put<'a>(
        &self,
        read: impl FnOnce(Wanted) -> Result<Vec<&'a [u8]>, Failure>,
    ) -> Result<(), Failure> {
        self.threads.here()?;
        let mut state = self.state();
        let State { save, layers } = &mut *state;
        let save = save.as_mut().ok_or(Failure::Finished)?;
        let expected = self.slice_bytes.len();
        let more = LayerSaveError::Layers { expected, got: *layers + 1 };
        let bytes = *self.slice_bytes.get(*layers).ok_or(more)?;
        save.put(&read(Wanted { slices: self.blocks, bytes: bytes as usize })?)?;
        *layers += 1;
        Ok(())
    }

    /// What was put goes out in the background. With layers missing it stays as it was.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        let (_, runtime) = self.threads.here()?;
        let mut state = self.state();
        let (expected, got) = (self.slice_bytes.len(), state.layers);
        if state.save.is_some() && got != expected {
            return Err(LayerSaveError::Layers { expected, got }.into());
        }
        let save = state.save.take().ok_or(Failure::Finished)?;
        let _inside = runtime.enter();
        save.finish()?;
        Ok(())
    }

    /// Gives it up, in a forked process by leaving it alone.
    pub(crate) fn free(self) {
        if self.threads.here().is_err() {
            std::mem::forget(self);
        }
    }
}

/// C uses it from any thread.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<LayerSaveHandle>();
};
