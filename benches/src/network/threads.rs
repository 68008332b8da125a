//! The bare TCP loop with a blocking thread at each end of each connection, in place of a runtime.
//!
//! Not here: encryption, frames, checksums.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread::{JoinHandle, scope, spawn};

use anyhow::{anyhow, ensure};

use crate::transport::raw::{CHUNK_BYTES, connected_pairs};

/// One connection per concurrent fetch.
pub(super) struct ThreadTcp {
    clients: Vec<TcpStream>,
    _servers: Vec<JoinHandle<std::io::Result<()>>>,
}

impl ThreadTcp {
    pub(super) async fn start(connections: usize) -> anyhow::Result<Self> {
        let blocking = |stream: tokio::net::TcpStream| -> anyhow::Result<TcpStream> {
            let stream = stream.into_std()?;
            stream.set_nonblocking(false)?;
            Ok(stream)
        };
        let (mut clients, mut servers) = (Vec::new(), Vec::new());
        for (client, server) in connected_pairs(connections).await? {
            clients.push(blocking(client)?);
            let server = blocking(server)?;
            servers.push(spawn(move || serve(server)));
        }
        Ok(Self { clients, _servers: servers })
    }

    /// Runs `fetches` fetches of `bytes` bytes, distributed over the connections.
    pub(super) fn fetch_all(&self, fetches: u64, bytes: u64) -> anyhow::Result<()> {
        let share = fetches.div_ceil(self.clients.len() as u64);
        scope(|scope| {
            let running: Vec<_> = self
                .clients
                .iter()
                .map(|client| scope.spawn(move || (0..share).try_for_each(|_| fetch(client, bytes))))
                .collect();
            running
                .into_iter()
                .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a reader panicked"))?)
        })
    }
}

fn fetch(mut client: &TcpStream, bytes: u64) -> anyhow::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES.min(bytes as usize)];
    client.write_all(&bytes.to_le_bytes())?;
    let mut left = bytes as usize;
    while left > 0 {
        let room = left.min(buffer.len());
        let got = client.read(&mut buffer[..room])?;
        ensure!(got > 0, "the server closed the connection");
        left -= got;
    }
    Ok(())
}

/// Serves one client until it disconnects.
fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    let piece = vec![0x5a; CHUNK_BYTES];
    loop {
        let mut length = [0; 8];
        stream.read_exact(&mut length)?;
        let mut left = u64::from_le_bytes(length) as usize;
        while left > 0 {
            let part = &piece[..left.min(CHUNK_BYTES)];
            stream.write_all(part)?;
            left -= part.len();
        }
    }
}
