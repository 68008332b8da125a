//! What the handles are: a client with its threads, a queue, a hasher.
//!
//! Not here: how they are given out and come back (`entry.rs`), and results (`results.rs`).

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kv_core::id::IdentityDigest;
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_client::{
    Client, ClientConfig, CompletionQueue, LayerSaveCall, LinkReader, PrefillCall, QueueLimits,
    ReporterConfig,
};
use kvfleet_proto::tls::{Renewal, TlsFiles};
use kvfleet_transport::renew::{RENEW_EVERY, keep_renewed};
use tokio::runtime::{Builder, Runtime};

use crate::abi;
use crate::layer_saves::LayerSaveHandle;
use crate::prefills::PrefillHandle;
use crate::reports::{PathsHandle, ReporterHandle, link};
use crate::slices::{Gone, Room};
use crate::status::Failure;

/// Time between two looks at whether a queue that is freed has ended; nothing depends on it.
const CLOSE_STEP: Duration = Duration::from_secs(600);

/// The process that opened a handle. A forked one has the handle's memory but none of its threads, and shares its
/// sockets: there nothing of it is used or even dropped.
#[derive(Clone, Copy, Debug)]
struct Home(u32);

impl Home {
    fn here() -> Home {
        Home(std::process::id())
    }

    fn check(self) -> Result<(), Failure> {
        if self.0 == std::process::id() { Ok(()) } else { Err(Failure::Forked) }
    }
}

/// A client, and the threads on which it works until its last queue is gone and its saves have ended.
#[derive(Debug)]
pub(crate) struct Opened {
    client: Client,
    runtime: Option<Runtime>,
    home: Home,
}

impl Opened {
    /// The client and its threads, for the process that opened it.
    pub(crate) fn here(&self) -> Result<(&Client, &Runtime), Failure> {
        self.home.check()?;
        Ok((&self.client, self.runtime.as_ref().ok_or(Failure::NotFound { what: "client" })?))
    }
}

#[cfg(test)]
impl Opened {
    /// A client over paths of a test, on a thread of its own.
    pub(crate) fn over(dialer: Arc<dyn kvfleet_transport::Dialer>) -> Arc<Opened> {
        let place = tempfile::tempdir().expect("a directory");
        let identity = tests::files(place.path()).load().expect("certificates");
        let config = ClientConfig::new(vec!["127.0.0.1:9".to_owned()], identity);
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("threads");
        let client = {
            let _inside = runtime.enter();
            Client::with_dialer(config, dialer).expect("a client")
        };
        Arc::new(Opened { client, runtime: Some(runtime), home: Home::here() })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// `kvf_client`.
#[derive(Debug)]
pub struct ClientHandle {
    opened: Arc<Opened>,
    /// What the caller did not take yet of what fetches came to.
    links: Mutex<LinkReader>,
}

impl ClientHandle {
    /// A client on so many threads of its own, whose certificates are looked at again now and then.
    pub(crate) fn open(
        threads: usize,
        files: TlsFiles,
        config: impl FnOnce(kvfleet_proto::tls::Identity) -> ClientConfig,
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
        runtime.spawn(keep_renewed(Renewal::new(identity, files), RENEW_EVERY));
        let links = Mutex::new(client.link_reader());
        let opened = Arc::new(Opened { client, runtime: Some(runtime), home: Home::here() });
        Ok(ClientHandle { opened, links })
    }

    /// Gives the client up, in a forked process by leaving it alone. Its threads end behind the saves by layers that were
    /// finished: nothing else is left to keep them.
    pub(crate) fn free(self) {
        let Ok((client, runtime)) = self.opened.here() else { return std::mem::forget(self) };
        // Not at each finish: who waits for all saves lets none in meanwhile.
        let (client, kept) = (client.clone(), Arc::clone(&self.opened));
        runtime.spawn(async move {
            client.saves_ended().await;
            drop(kept);
        });
    }

    /// A queue on the client's threads.
    pub(crate) fn queue(&self, limits: QueueLimits) -> Result<QueueHandle, Failure> {
        let (client, runtime) = self.opened.here()?;
        let queue = CompletionQueue::new(client.clone(), limits, runtime.handle().clone());
        Ok(QueueHandle { queue, threads: Arc::clone(&self.opened) })
    }

    /// What is known of its paths.
    pub(crate) fn paths(&self) -> Result<PathsHandle, Failure> {
        Ok(PathsHandle::of(self.opened.here()?.0))
    }

    /// What its fetches came to since this was asked last, so many samples at most.
    pub(crate) fn links(&self, most: usize) -> Result<Vec<abi::Link>, Failure> {
        self.opened.here()?;
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(links.take_most(most).iter().map(link).collect())
    }

    /// Reports on its threads, each load for so long at most.
    pub(crate) fn reporter(
        &self,
        config: &ReporterConfig,
        silent_after: Duration,
    ) -> Result<ReporterHandle, Failure> {
        ReporterHandle::open(&self.opened, config, silent_after)
    }

    /// Begins to save layer by layer.
    pub(crate) fn save_layers(&self, call: LayerSaveCall) -> Result<LayerSaveHandle, Failure> {
        LayerSaveHandle::begin(&self.opened, call)
    }

    /// Begins to load the history of a prefill.
    pub(crate) fn prefill(&self, call: (PrefillCall, Vec<Room>, Gone)) -> Result<PrefillHandle, Failure> {
        PrefillHandle::begin(&self.opened, call)
    }
}

/// `kvf_queue`.
#[derive(Debug)]
pub struct QueueHandle {
    queue: CompletionQueue<Room>,
    threads: Arc<Opened>,
}

impl QueueHandle {
    /// The queue, for the process that opened it.
    pub(crate) fn queue(&self) -> Result<&CompletionQueue<Room>, Failure> {
        self.threads.home.check()?;
        Ok(&self.queue)
    }

    /// Ends when no slice is in use any more; in a forked process at once, and nothing is given back.
    pub(crate) fn close_for_good(self) {
        if self.threads.home.check().is_err() {
            return std::mem::forget(self);
        }
        while !self.queue.close(CLOSE_STEP) {}
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

/// The files of a process.
pub(crate) fn tls_files(ca: String, cert: String, key: String) -> TlsFiles {
    TlsFiles { ca: PathBuf::from(ca), cert: PathBuf::from(cert), key: PathBuf::from(key) }
}

/// C uses them from any thread.
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
    use kvfleet_client::Asker;
    use kvfleet_proto::frame::KeyForm;

    use super::*;

    /// Files of an authority and one certificate.
    pub(super) fn files(place: &Path) -> TlsFiles {
        let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = rcgen::KeyPair::generate().unwrap();
        let authority = rcgen::CertifiedIssuer::self_signed(params, authority).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["kvfleet".to_owned()]).unwrap();
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

    fn opened(place: &Path) -> ClientHandle {
        ClientHandle::open(1, files(place), |identity| {
            ClientConfig::new(vec!["127.0.0.1:9".to_owned()], identity)
        })
        .unwrap()
    }

    /// A save of one block of eight bytes.
    fn call(address: String) -> LayerSaveCall {
        let asker = Asker {
            lease: LeaseId(1),
            request: RequestId(1),
            tenant: TenantId(0),
            category: Category { kind: RequestKind::Text, turn: 1 },
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
            hashes: vec![BlockHash([1; 16])],
            key_form: KeyForm::Rotated,
            slice_bytes: vec![8],
            then_release: Vec::new(),
            deadline: kvfleet_client::SAVE_DEADLINE,
        }
    }

    #[test]
    fn threads_of_a_client_that_was_freed_end_behind_the_saves_that_were_finished() {
        let place = tempfile::tempdir().unwrap();
        // Takes connections, and says nothing.
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let _udp = UdpSocket::bind(tcp.local_addr().unwrap()).unwrap();
        let client = opened(place.path());
        let save = client.save_layers(call(tcp.local_addr().unwrap().to_string())).unwrap();
        save.put(|_| Ok(vec![&[7; 8]])).unwrap();
        save.finish().unwrap();
        let threads = Arc::downgrade(&client.opened);
        save.free();
        client.free();
        assert!(threads.upgrade().is_some(), "the save is under way");
        // Without one they end at once.
        let client = opened(place.path());
        let threads = Arc::downgrade(&client.opened);
        client.free();
        let began = Instant::now();
        while threads.strong_count() > 0 {
            assert!(began.elapsed() < Duration::from_secs(30), "nothing is under way");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_handle_of_another_process_is_refused() {
        assert!(Home::here().check().is_ok());
        let refused = Home(std::process::id() + 1).check().unwrap_err();
        kvfleet_errors_doc::says("C: a handle from before a fork", &refused, &[]);
    }
}
