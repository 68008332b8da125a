//! The objects behind the handles: a client with its threads, a queue, a hasher.
//!
//! Not here: creating and freeing handles (`entry.rs`), and results (`results.rs`).

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kv_core::id::IdentityDigest;
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_client::{
    Client, ClientConfig, CompletionQueue, LayerSaveCall, LinkReader, PrefillCall, QueueLimits,
    ReporterConfig,
};
use kvfleet_net::tls::{Renewal, TlsFiles};
use kvfleet_transport::renew::{RENEW_INTERVAL, keep_renewed};
use tokio::runtime::{Builder, Runtime};

use crate::abi;
use crate::layer_saves::LayerSaveHandle;
use crate::prefills::PrefillHandle;
use crate::reports::{PathsHandle, ReporterHandle, link};
use crate::slices::{CallerBuffer, ReleaseSignal};
use crate::status::Failure;

/// Timeout of one attempt to close a queue that is freed; its value has no effect on the outcome.
const CLOSE_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(600);

/// The process that opened a handle. A forked process has the handle's memory but not its threads,
/// and shares its sockets, so it must neither use nor drop the handle.
#[derive(Clone, Copy, Debug)]
struct OwnerProcess(u32);

impl OwnerProcess {
    fn current() -> OwnerProcess {
        OwnerProcess(std::process::id())
    }

    fn check(self) -> Result<(), Failure> {
        if self.0 == std::process::id() { Ok(()) } else { Err(Failure::Forked) }
    }
}

/// A client and its threads, which run until its last queue is freed and its saves have ended.
#[derive(Debug)]
pub(crate) struct ClientRuntime {
    client: Client,
    runtime: Option<Runtime>,
    owner: OwnerProcess,
}

impl ClientRuntime {
    /// The client and its runtime; an error in another process than the one that opened it.
    pub(crate) fn for_owner(&self) -> Result<(&Client, &Runtime), Failure> {
        self.owner.check()?;
        Ok((&self.client, self.runtime.as_ref().ok_or(Failure::NotFound { what: "client" })?))
    }
}

#[cfg(test)]
impl ClientRuntime {
    /// A client over test paths, on a thread of its own.
    pub(crate) fn with_dialer(dialer: Arc<dyn kvfleet_transport::Dialer>) -> Arc<ClientRuntime> {
        let place = tempfile::tempdir().expect("a directory");
        let identity = tests::files(place.path()).load().expect("certificates");
        let config = ClientConfig::new(vec!["127.0.0.1:9".to_owned()], identity);
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("threads");
        let client = {
            let _inside = runtime.enter();
            Client::with_dialer(config, dialer).expect("a client")
        };
        Arc::new(ClientRuntime { client, runtime: Some(runtime), owner: OwnerProcess::current() })
    }
}

impl Drop for ClientRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// `kvf_client`.
#[derive(Debug)]
pub struct ClientHandle {
    client_runtime: Arc<ClientRuntime>,
    /// Reader of the link measurements that the caller has not yet taken.
    links: Mutex<LinkReader>,
}

impl ClientHandle {
    /// A client on `threads` threads of its own, with certificates that are reloaded periodically.
    pub(crate) fn open(
        threads: usize,
        files: TlsFiles,
        config: impl FnOnce(kvfleet_net::tls::Identity) -> ClientConfig,
    ) -> Result<ClientHandle, Failure> {
        let failed = |error: &dyn std::fmt::Display| Failure::Failed(error.to_string());
        let identity = files.load().map_err(|error| failed(&error))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("kvfleet")
            .enable_all()
            .build()
            .map_err(|error| failed(&error))?;
        let client = {
            let _inside = runtime.enter();
            Client::new(config(identity.clone())).map_err(|error| failed(&error))?
        };
        runtime.spawn(keep_renewed(Renewal::new(identity, files), RENEW_INTERVAL));
        let links = Mutex::new(client.link_reader());
        let opened =
            Arc::new(ClientRuntime { client, runtime: Some(runtime), owner: OwnerProcess::current() });
        Ok(ClientHandle { client_runtime: opened, links })
    }

    /// Frees the client; in a forked process leaks it instead. Its threads end after the finished
    /// layer-wise saves, which have no other owner.
    pub(crate) fn free(self) {
        let Ok((client, runtime)) = self.client_runtime.for_owner() else { return std::mem::forget(self) };
        // Done here and not at each finish, because waiting for all saves blocks new ones.
        let (client, kept) = (client.clone(), Arc::clone(&self.client_runtime));
        runtime.spawn(async move {
            client.wait_for_saves().await;
            drop(kept);
        });
    }

    /// A queue on the client's threads.
    pub(crate) fn queue(&self, limits: QueueLimits) -> Result<QueueHandle, Failure> {
        let (client, runtime) = self.client_runtime.for_owner()?;
        let queue = CompletionQueue::new(client.clone(), limits, runtime.handle().clone());
        Ok(QueueHandle { queue, client_runtime: Arc::clone(&self.client_runtime) })
    }

    /// The current paths of the client.
    pub(crate) fn paths(&self) -> Result<PathsHandle, Failure> {
        Ok(PathsHandle::of(self.client_runtime.for_owner()?.0))
    }

    /// Link measurements since the last call, at most `most` samples.
    pub(crate) fn links(&self, most: usize) -> Result<Vec<abi::Link>, Failure> {
        self.client_runtime.for_owner()?;
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(links.take_at_most(most).iter().map(link).collect())
    }

    /// Starts reports on its threads; a load is repeated for at most `silent_after`.
    pub(crate) fn reporter(
        &self,
        config: &ReporterConfig,
        silent_after: Duration,
    ) -> Result<ReporterHandle, Failure> {
        ReporterHandle::open(&self.client_runtime, config, silent_after)
    }

    /// Starts a layer-wise save.
    pub(crate) fn save_layers(&self, call: LayerSaveCall) -> Result<LayerSaveHandle, Failure> {
        LayerSaveHandle::begin(&self.client_runtime, call)
    }

    /// Starts to load the history of a prefill.
    pub(crate) fn prefill(
        &self,
        call: PrefillCall,
        buffers: Vec<CallerBuffer>,
        released: ReleaseSignal,
    ) -> Result<PrefillHandle, Failure> {
        PrefillHandle::begin(&self.client_runtime, call, buffers, released)
    }
}

/// `kvf_queue`.
#[derive(Debug)]
pub struct QueueHandle {
    queue: CompletionQueue<CallerBuffer>,
    client_runtime: Arc<ClientRuntime>,
}

impl QueueHandle {
    /// The queue; an error in another process than the one that opened it.
    pub(crate) fn queue(&self) -> Result<&CompletionQueue<CallerBuffer>, Failure> {
        self.client_runtime.owner.check()?;
        Ok(&self.queue)
    }

    /// Closes and waits until no slice is in use. In a forked process it leaks the queue and
    /// returns at once.
    pub(crate) fn close_and_wait(self) {
        if self.client_runtime.owner.check().is_err() {
            return std::mem::forget(self);
        }
        while !self.queue.close(CLOSE_ATTEMPT_TIMEOUT) {}
    }
}

/// `kvf_hasher`.
#[derive(Debug)]
pub struct HasherHandle {
    pub(crate) hasher: PrefixHasher,
    pub(crate) identity: IdentityDigest,
}

impl HasherHandle {
    pub(crate) fn open(model: &IdentityManifest, tenant_salt: &[u8; 32]) -> Result<HasherHandle, Failure> {
        model.validate().map_err(|error| Failure::Failed(error.to_string()))?;
        Ok(HasherHandle { hasher: PrefixHasher::new(model, tenant_salt), identity: model.digest() })
    }
}

/// Certificate files of a process.
pub(crate) fn tls_files(ca: String, cert: String, key: String) -> TlsFiles {
    TlsFiles { ca: PathBuf::from(ca), cert: PathBuf::from(cert), key: PathBuf::from(key) }
}

/// C uses these handles from any thread.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<ClientHandle>();
    is_shared::<QueueHandle>();
    is_shared::<HasherHandle>();
    is_shared::<crate::ResultHandle>();
};

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::{TcpListener, UdpSocket};
    use std::path::Path;
    use std::time::Instant;

    use kv_core::id::{BlockHash, Category, Epoch, LeaseId, RequestId, RequestKind, TenantId};
    use kvfleet_client::RequestContext;
    use kvfleet_net::tls::Role;
    use kvfleet_proto::frame::KeyForm;

    use super::*;

    /// Certificate files of a new authority.
    pub(super) fn files(place: &Path) -> TlsFiles {
        let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = rcgen::KeyPair::generate().unwrap();
        let authority = rcgen::CertifiedIssuer::self_signed(params, authority).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(Role::Instance(None).dns_names()).unwrap();
        let cert = params.signed_by(&key, &authority).unwrap();
        let file = |name: &str, text: String| {
            let path = place.join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        tls_files(
            file("ca.pem", authority.pem()),
            file("cert.pem", cert.pem()),
            file("key.pem", key.serialize_pem()),
        )
    }

    fn open_client(place: &Path) -> ClientHandle {
        ClientHandle::open(1, files(place), |identity| {
            ClientConfig::new(vec!["127.0.0.1:9".to_owned()], identity)
        })
        .unwrap()
    }

    /// A save of one block of eight bytes.
    fn call(address: String) -> LayerSaveCall {
        let asker = RequestContext {
            lease: LeaseId(1),
            request: RequestId(1),
            tenant: TenantId(0),
            category: Category { kind: RequestKind::Text, conversation_turn: 1 },
            identity: IdentityDigest([0; 16]),
            traceparent: String::new(),
            class: None,
        };
        LayerSaveCall {
            asker,
            address,
            epoch: Epoch(1),
            parent: None,
            first_offset_blocks: 0,
            hashes: vec![BlockHash([1; _])],
            key_form: KeyForm::Rotated,
            slice_bytes: vec![8],
            then_release: Vec::new(),
            deadline: kvfleet_client::SAVE_DEADLINE,
        }
    }

    #[test]
    fn threads_of_a_freed_client_end_after_its_finished_saves() {
        let place = tempfile::tempdir().unwrap();
        // Accepts connections, and never answers.
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let _udp = UdpSocket::bind(tcp.local_addr().unwrap()).unwrap();
        let client = open_client(place.path());
        let save = client.save_layers(call(tcp.local_addr().unwrap().to_string())).unwrap();
        save.put(|_| Ok(vec![&[7; 8]])).unwrap();
        save.finish().unwrap();
        let threads = Arc::downgrade(&client.client_runtime);
        save.free();
        client.free();
        assert!(threads.upgrade().is_some(), "the save is still running");
        // Without a save the threads end at once.
        let client = open_client(place.path());
        let threads = Arc::downgrade(&client.client_runtime);
        client.free();
        let began = Instant::now();
        while threads.strong_count() > 0 {
            assert!(began.elapsed() < Duration::from_secs(30), "no save is running");
            std::thread::yield_now();
        }
    }

    #[test]
    fn handle_of_another_process_is_refused() {
        assert!(OwnerProcess::current().check().is_ok());
        let refused = OwnerProcess(std::process::id() + 1).check().unwrap_err();
        kvfleet_errors_doc::says("C: a handle from before a fork", &refused, &[]);
    }
}
