//! Runs the fuzz targets of the index for a limited time, with any compiler: the driver of `core`
//! with a clock.
//!
//! Not here: targets, mutation and shrinking (`core/src/index/tests/fuzzing`), and libFuzzer
//! (`bin/`).

use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kv_core::index::fuzzing::{FuzzTarget, TARGETS, drive};

/// Executions per seed: a small number, so that a seed ends soon after its time and can be repeated
/// in seconds.
const EXECUTIONS: u64 = 2_000;

const USAGE: &str = "usage: drive [--seconds N] [--seed N] [--case HEX] [commands|codec|snapshot]";

struct Arguments {
    seconds: u64,
    seed: u64,
    case: Option<Vec<u8>>,
    target: Option<String>,
}

fn parse_arguments() -> Option<Arguments> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut wish = Arguments { seconds: 60, seed: now.as_micros() as u64, case: None, target: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--seconds" => wish.seconds = words.next()?.parse().ok()?,
            "--seed" => wish.seed = words.next()?.parse().ok()?,
            "--case" => wish.case = Some(parse_hex(&words.next()?)?),
            name if TARGETS.iter().any(|target| target.name == name) => wish.target = Some(word),
            _ => return None,
        }
    }
    Some(wish)
}

fn parse_hex(hex: &str) -> Option<Vec<u8>> {
    let digits = hex.as_bytes().chunks(2);
    digits.map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()).collect()
}

/// Runs one target for its share of the time.
fn run(target: &FuzzTarget, seed: u64, share: Duration) -> Result<(), String> {
    let (began, mut seeds) = (Instant::now(), 0);
    println!("target {}, from seed {seed}", target.name);
    while began.elapsed() < share || seeds == 0 {
        drive(target, seed.wrapping_add(seeds), EXECUTIONS).map_err(|found| found.to_string())?;
        seeds += 1;
    }
    println!("  {} executions of {seeds} seeds in {:.1?}", seeds * EXECUTIONS, began.elapsed());
    Ok(())
}

fn main() -> ExitCode {
    let Some(wish) = parse_arguments() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let asked = |target: &&FuzzTarget| wish.target.as_deref().is_none_or(|name| name == target.name);
    let targets: Vec<_> = TARGETS.iter().filter(asked).collect();
    let share = Duration::from_secs(wish.seconds) / targets.len().max(1) as u32;
    for target in targets {
        let stood = match &wish.case {
            Some(case) => (target.run)(case).map_err(|wrong| format!("{wrong}\n{}", (target.describe)(case))),
            None => run(target, wish.seed, share),
        };
        if let Err(wrong) = stood {
            eprintln!("target {}: {wrong}", target.name);
            eprintln!("reproduce: cargo xtask fuzz --case HEX {}", target.name);
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
