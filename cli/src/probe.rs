//! `kvfleet probe` and `kvfleet drain`: asks a local process whether it is live or ready, and asks
//! it to drain.
//!
//! Made for process supervisors that can run a command, so that an image needs neither a shell nor
//! an HTTP client. Not here: the answers (`crate::process`).

use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::args::{DrainArgs, ProbeArgs};

/// Exit status of a negative answer.
const EXIT_REFUSED: u8 = 2;

/// Longest answer in bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Time for a process to answer after its time for draining has passed.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends one probe and prints the answer.
///
/// # Errors
/// No answer in time, or an invalid one.
pub async fn probe(args: &ProbeArgs) -> anyhow::Result<ExitCode> {
    let answered = http_request(&args.address, "GET", args.what.path(), None, args.timeout).await?;
    Ok(print_answer(&answered))
}

/// Asks the process to drain and waits for the end, and at least for the linger time.
///
/// # Errors
/// No answer in time, or an invalid one.
pub async fn drain(args: &DrainArgs) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let path = format!("/drain?within_ms={}", args.within.as_millis());
    let answered = http_request(&args.address, "POST", &path, None, args.within + ANSWER_TIMEOUT).await?;
    tokio::time::sleep(args.linger.unwrap_or_default().saturating_sub(begun.elapsed())).await;
    Ok(print_answer(&answered))
}

fn print_answer(answered: &ProbeAnswer) -> ExitCode {
    let line = answered.text.trim_end();
    if answered.is_success {
        println!("{line}");
        return ExitCode::SUCCESS;
    }
    eprintln!("kvfleet: {line}");
    ExitCode::from(EXIT_REFUSED)
}

/// Answer of a process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProbeAnswer {
    pub(crate) is_success: bool,
    pub(crate) text: String,
}

/// Sends an HTTP request to a local process, with its secret if it needs one.
pub(crate) async fn http_request(
    address: &str,
    verb: &str,
    path: &str,
    secret: Option<&str>,
    within: Duration,
) -> anyhow::Result<ProbeAnswer> {
    let asking = async {
        let mut stream = TcpStream::connect(address).await?;
        // HTTP/1.0, so that the answer ends with the connection.
        let secret = secret.map(|secret| format!("authorization: Bearer {secret}\r\n")).unwrap_or_default();
        let request =
            format!("{verb} {path} HTTP/1.0\r\nhost: {address}\r\n{secret}content-length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = vec![];
        stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let hint = "set --address to the value of process.metrics_listen (probe) or process.drain_listen (drain)";
    let answer = tokio::time::timeout(within, asking)
        .await
        .map_err(|_| anyhow::anyhow!("{address} did not answer within {within:?}; {hint}"))?
        .map_err(|cause| anyhow::anyhow!("cannot ask {address}: {cause}; {hint}"))?;
    parse_answer(&answer)
        .ok_or_else(|| anyhow::anyhow!("{address} gave an unexpected answer to {path}; {hint}"))
}

/// Parses success and refusal; any other status comes from another kind of server.
fn parse_answer(answer: &[u8]) -> Option<ProbeAnswer> {
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
    Some(ProbeAnswer { is_success: is_good, text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn parses_answers() {
        let good = parse_answer(b"HTTP/1.0 200 OK\r\nx: y\r\n\r\nready\n").unwrap();
        assert_eq!(good, ProbeAnswer { is_success: true, text: "ready\n".to_owned() });
        assert!(!parse_answer(b"HTTP/1.1 503 Service Unavailable\r\n\r\nno").unwrap().is_success);
        for none in [
            &b""[..],
            b"HTTP/1.0 200",
            b"HTTP/1.0 404 Not Found\r\n\r\n",
            b"SSH-2.0-x\r\n\r\n",
            b"\xff\xff\r\n\r\n",
        ] {
            assert_eq!(parse_answer(none), None, "{none:?}");
        }
    }
}
