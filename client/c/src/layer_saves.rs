//! `kvf_layer_save`: a save that accepts layers as they are computed.
//!
//! No address is kept: each layer is copied during its call. Not here: reading the addresses
//! (`raw.rs`), and sending the frames (`kvfleet_client::LayerSave`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvfleet_client::{LayerSave, LayerSaveCall, LayerSaveError};

use crate::handles::ClientRuntime;
use crate::status::Failure;

/// `kvf_layer_save`.
#[derive(Debug)]
pub struct LayerSaveHandle {
    state: Mutex<LayerSaveState>,
    blocks: usize,
    slice_bytes: Vec<u32>,
    client_runtime: Arc<ClientRuntime>,
}

#[derive(Debug)]
struct LayerSaveState {
    /// `None` once it was finished.
    save: Option<LayerSave>,
    /// Number of layers put.
    layers: usize,
}

/// Required shape of the next layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerShape {
    /// Number of slices, one for each block.
    pub(crate) slices: usize,
    /// Bytes of each slice.
    pub(crate) bytes: usize,
}

impl LayerSaveHandle {
    /// Reserves space for all of its frames.
    pub(crate) fn begin(
        threads: &Arc<ClientRuntime>,
        call: LayerSaveCall,
    ) -> Result<LayerSaveHandle, Failure> {
        let (client, runtime) = threads.for_owner()?;
        // It may start on the client's threads at once; the caller's thread is not one of them.
        let _inside = runtime.enter();
        let (blocks, slice_bytes) = (call.hashes.len(), call.slice_bytes.clone());
        let state = Mutex::new(LayerSaveState { save: Some(client.save_layers(call)?), layers: 0 });
        Ok(LayerSaveHandle { state, blocks, slice_bytes, client_runtime: Arc::clone(threads) })
    }

    fn lock(&self) -> MutexGuard<'_, LayerSaveState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the next layer, returned by `read` for the required shape. Concurrent calls run one
    /// after the other.
    pub(crate) fn put<'a>(
        &self,
        read: impl FnOnce(LayerShape) -> Result<Vec<&'a [u8]>, Failure>,
    ) -> Result<(), Failure> {
        self.client_runtime.for_owner()?;
        let mut state = self.lock();
        let LayerSaveState { save, layers } = &mut *state;
        let save = save.as_mut().ok_or(Failure::SaveFinished)?;
        let expected = self.slice_bytes.len();
        let more = LayerSaveError::Layers { expected, got: *layers + 1 };
        let bytes = *self.slice_bytes.get(*layers).ok_or(more)?;
        save.put(&read(LayerShape { slices: self.blocks, bytes: bytes as usize })?)?;
        *layers += 1;
        Ok(())
    }

    /// Sends the layers in the background. If layers are missing, the save stays unchanged.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        let (_, runtime) = self.client_runtime.for_owner()?;
        let mut state = self.lock();
        let (expected, got) = (self.slice_bytes.len(), state.layers);
        if state.save.is_some() && got != expected {
            return Err(LayerSaveError::Layers { expected, got }.into());
        }
        let save = state.save.take().ok_or(Failure::SaveFinished)?;
        let _inside = runtime.enter();
        save.finish()?;
        Ok(())
    }

    /// Abandons it; in a forked process leaks it instead.
    pub(crate) fn free(self) {
        if self.client_runtime.for_owner().is_err() {
            std::mem::forget(self);
        }
    }
}

/// C uses this handle from any thread.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<LayerSaveHandle>();
};
