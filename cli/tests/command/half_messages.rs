//! A tenant that sends many half messages to a router: its memory stays bounded, and others are
//! served.

use std::convert::Infallible;
use std::path::Path;
use std::pin::Pin;
use std::process::Stdio;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use kv_core::id::TenantId;
use kvfleet_net::certificates::Authority;
use kvfleet_net::channel::{connect_lazily, endpoint};
use kvfleet_net::tls::access::BYTES_IN_FLIGHT_MAX;
use kvfleet_net::tls::{Identity, Role, TlsFiles};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;
use tonic::codegen::{Service, http};
use tonic::transport::Channel;

use crate::support::{Workspace, read_first_line};

/// The longest message of a control call.
const MESSAGE_BYTES: usize = 8 << 20;

/// Calls of the tenant, on a few connections.
const CALLS: usize = 60;
const CONNECTIONS: usize = 3;

/// Memory that they may take.
const MEMORY_MAX: usize = 128 << 20;

const TIMEOUT: Duration = Duration::from_secs(60);

/// The body of a call with a message of which the last byte never comes.
struct HalfMessage(Option<Bytes>);

impl HalfMessage {
    fn new() -> HalfMessage {
        let head = u32::try_from(MESSAGE_BYTES).unwrap().to_be_bytes();
        HalfMessage(Some([&[0][..], &head, &vec![7; MESSAGE_BYTES - 1]].concat().into()))
    }
}

impl Body for HalfMessage {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.take().map_or(Poll::Pending, |bytes| Poll::Ready(Some(Ok(Frame::data(bytes)))))
    }
}

/// Sends half a message. Returns the status of the answer, if there is one.
async fn send_half(mut channel: Channel) -> String {
    let request = http::Request::post("/kvfleet.v1.Router/Route")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(tonic::body::Body::new(HalfMessage::new()))
        .unwrap();
    std::future::poll_fn(|context| channel.poll_ready(context)).await.unwrap();
    let answer = channel.call(request).await.unwrap();
    answer.headers().get("grpc-status").unwrap().to_str().unwrap().to_owned()
}

fn resident_bytes(pid: i32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

fn tenant(tls: &Path) -> Identity {
    let files = Authority::open(tls).unwrap().issue(&Role::tenant(TenantId(3))).unwrap();
    TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load().unwrap()
}

#[test]
fn half_messages_of_a_tenant_take_bounded_memory() {
    let place = Workspace::new();
    let words = ["up", "--json", "--nodes", "1", "--instances", "1", "--dram", "8MiB", "--ssd", "8MiB"];
    let mut child = place.command(&words).stdout(Stdio::piped()).spawn().unwrap();
    let said = read_first_line(&mut child);
    let (router, tls) = (said["routers"][0].as_str().unwrap(), said["tls_dir"].as_str().unwrap());
    let identity = tenant(Path::new(tls));
    let pid = place.pid_of("router-1").unwrap();
    let before = resident_bytes(pid);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let channels: Vec<Channel> = (0..CONNECTIONS)
            .map(|_| connect_lazily(&endpoint(router).unwrap(), &identity, Role::Router(None)))
            .collect();
        let mut calls: JoinSet<_> =
            (0..CALLS).map(|call| send_half(channels[call % CONNECTIONS].clone())).collect();
        // All but those within the limit are refused at once.
        for _ in 0..CALLS - BYTES_IN_FLIGHT_MAX / MESSAGE_BYTES {
            let answer = tokio::time::timeout(TIMEOUT, calls.join_next()).await.expect("a call hangs");
            assert_eq!(answer.unwrap().unwrap(), "8", "resource exhausted");
        }
        // The calls that are held keep the memory of their messages.
        let status = ["status", "--cluster", router, "--tls-dir", tls];
        let status = tokio::task::block_in_place(|| place.run(&status).ok());
        assert!(status.contains("leads"), "{status}");
        let taken = resident_bytes(pid).saturating_sub(before);
        println!("{CALLS} half messages took {} MiB", taken >> 20);
        assert!(taken < MEMORY_MAX, "{CALLS} half messages took {} MiB", taken >> 20);
    });
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
}
