//! `kvfleet probe` and `kvfleet drain`: asks a process of this machine whether it lives or is ready, and to let go of its work.
//!
//! For whoever runs processes and can run a command beside them: an image needs neither a shell nor an HTTP client for it. Not here:
//! what is answered (`crate::process`).

use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::args::{DrainArgs, ProbeArgs};

/// Exit status where the process answered that it is not so.
const EXIT_NOT_SO: u8 = 2;

/// Longest answer that is read.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// How long a process may take to say that its time for draining is over.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Asks once; prints what was answered.
///
/// # Errors
/// No answer in time, or none that is one.
pub async fn probe(args: &ProbeArgs) -> anyhow::Result<ExitCode> {
    let answered = ask(&args.address, "GET", args.what.path(), args.timeout).await?;
    Ok(told(&answered))
}

/// Asks to drain, waits until that is done, and in any case for as long as others may take to notice.
///
/// # Errors
/// No answer in time, or none that is one.
pub async fn drain(args: &DrainArgs) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let path = format!("/drain?within_ms={}", args.within.as_millis());
    let answered = ask(&args.address, "POST", &path, args.within + ANSWER_WITHIN).await?;
    tokio::time::sleep(args.linger.unwrap_or_default().saturating_sub(begun.elapsed())).await;
    Ok(told(&answered))
}

fn told(answered: &Answered) -> ExitCode {
    let line = answered.text.trim_end();
    if answered.is_good {
        println!("{line}");
        return ExitCode::SUCCESS;
    }
    eprintln!("kvfleet: {line}");
    ExitCode::from(EXIT_NOT_SO)
}

/// What a process said.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answered {
    pub(crate) is_good: bool,
    pub(crate) text: String,
}

/// Asks a process of this machine over HTTP.
pub(crate) async fn ask(address: &str, verb: &str, path: &str, within: Duration) -> anyhow::Result<Answered> {
    let asking = async {
        let mut stream = TcpStream::connect(address).await?;
        // HTTP/1.0: the answer ends with the connection.
        let request = format!("{verb} {path} HTTP/1.0\r\nhost: {address}\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = vec![];
        stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let hint = "give --address as process.metrics_listen (probe) or process.drain_listen (drain) has it";
    let answer = tokio::time::timeout(within, asking)
        .await
        .map_err(|_| anyhow::anyhow!("{address} did not answer within {within:?}; {hint}"))?
        .map_err(|cause| anyhow::anyhow!("cannot ask {address}: {cause}; {hint}"))?;
    read(&answer).ok_or_else(|| anyhow::anyhow!("{address} answered {path} with no HTTP of ours; {hint}"))
}

/// Success and refusal are answers; whoever knows no such path is somebody else.
fn read(answer: &[u8]) -> Option<Answered> {
    let answer = String::from_utf8_lossy(answer);
    let (head, text) = answer.split_once("\r\n\r\n")?;
    let mut words = head.split(' ');
    let is_http = words.next()?.starts_with("HTTP/1.");
    let status = words.next().filter(|_| is_http)?;
    let is_good = match status {
        "200" => true,
        "503" | "400" => false,
        _ => return None,
    };
    Some(Answered { is_good, text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn answers_are_good_or_not_or_none() {
        let good = read(b"HTTP/1.0 200 OK\r\nx: y\r\n\r\nready\n").unwrap();
        assert_eq!(good, Answered { is_good: true, text: "ready\n".to_owned() });
        assert!(!read(b"HTTP/1.1 503 Service Unavailable\r\n\r\nno").unwrap().is_good);
        for none in [
            &b""[..],
            b"HTTP/1.0 200",
            b"HTTP/1.0 404 Not Found\r\n\r\n",
            b"SSH-2.0-x\r\n\r\n",
            b"\xff\xff\r\n\r\n",
        ] {
            assert_eq!(read(none), None, "{none:?}");
        }
    }
}
