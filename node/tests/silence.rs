//! A node with a router that goes silent without closing: it must switch to another router soon.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::world::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Far below TCP's own timeout of a quarter of an hour, far above the link's limits.
const SOON: Duration = Duration::from_secs(20);

/// A relay that keeps its connections open and, once frozen, forwards no bytes.
async fn relay(target: String, frozen: Arc<AtomicBool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        loop {
            let (near, _) = listener.accept().await.unwrap();
            let far = TcpStream::connect(&target).await.unwrap();
            let (near_in, near_out) = near.into_split();
            let (far_in, far_out) = far.into_split();
            tokio::spawn(pass(near_in, far_out, Arc::clone(&frozen)));
            tokio::spawn(pass(far_in, near_out, Arc::clone(&frozen)));
        }
    });
    address
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    frozen: Arc<AtomicBool>,
) {
    let mut buffer = vec![0u8; 16 << 10];
    while let Ok(got @ 1..) = from.read(&mut buffer).await {
        if frozen.load(Ordering::Relaxed) {
            // Dropped silently for both ends.
            continue;
        }
        if to.write_all(&buffer[..got]).await.is_err() {
            break;
        }
    }
    if frozen.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
}

#[tokio::test]
async fn silent_leader_is_replaced_by_another_router() {
    let world = TestCluster::new();
    let (silent, other) = (FakeRouter::default(), FakeRouter::default());
    let frozen = Arc::new(AtomicBool::new(false));
    let first = relay(silent.serve(&world.router).await, Arc::clone(&frozen)).await;
    let second = other.serve(&world.router).await;
    let node = start(&world.config(&[first, second])).await;
    silent.joined().await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..2).await;
    silent.wait_for("the first router hears", |state| state.blocks.len() == 2).await;
    assert_eq!(other.state.lock().epoch, 0);
    frozen.store(true, Ordering::Relaxed);
    let asked = Instant::now();
    other.wait_for("the second router hears everything", |state| state.blocks.len() == 2).await;
    assert!(asked.elapsed() < SOON, "it took {:?}", asked.elapsed());
}
