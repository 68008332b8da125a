//! Sizes as typed: bytes with suffixes, blocks, shares of a trace, watermarks.

use std::fmt;
use std::str::FromStr;

/// Capacity of one tier of one node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Capacity {
    /// No such tier.
    None,
    /// A number of bytes.
    Bytes(u64),
    /// A number of blocks.
    Blocks(u64),
    /// This share of the trace's unique blocks, in percent, summed over all nodes.
    Share(f64),
    /// Enough for every block of the trace.
    Unbounded,
}

const FORMS: &str = "expected bytes (512MiB, 2GB), blocks (1000b), a share of the trace's unique blocks over \
    all nodes (10%), 0, or unbounded";

impl FromStr for Capacity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("`{text}` is not a capacity: {FORMS}");
        match text.trim() {
            "unbounded" => Ok(Capacity::Unbounded),
            "0" => Ok(Capacity::None),
            other => {
                if let Some(percent) = other.strip_suffix('%') {
                    let share: f64 = percent.trim().parse().map_err(|_| invalid())?;
                    return if share > 0.0 && share <= 1000.0 {
                        Ok(Capacity::Share(share))
                    } else {
                        Err(invalid())
                    };
                }
                match other.strip_suffix('b').map(str::parse::<u64>) {
                    Some(Ok(0)) => Ok(Capacity::None),
                    Some(Ok(blocks)) => Ok(Capacity::Blocks(blocks)),
                    _ => parse_bytes(other).map(Capacity::Bytes).map_err(|_| invalid()),
                }
            }
        }
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Capacity::None => f.write_str("0"),
            Capacity::Bytes(bytes) => write!(f, "{bytes}"),
            Capacity::Blocks(blocks) => write!(f, "{blocks}b"),
            Capacity::Share(percent) => write!(f, "{percent}%"),
            Capacity::Unbounded => f.write_str("unbounded"),
        }
    }
}

impl Capacity {
    /// Blocks per node for a trace of `unique_blocks` over `nodes` nodes with blocks of
    /// `block_bytes` payload. Bytes count payload only, so that a capacity means the same for any
    /// number of layers.
    #[must_use]
    pub fn blocks_per_node(&self, unique_blocks: u64, nodes: u32, block_bytes: u64) -> u64 {
        match *self {
            Capacity::None => 0,
            Capacity::Bytes(bytes) => bytes / block_bytes.max(1),
            Capacity::Blocks(blocks) => blocks,
            Capacity::Unbounded => unique_blocks.max(1),
            Capacity::Share(percent) => share_of(unique_blocks, percent) / u64::from(nodes.max(1)),
        }
    }
}

/// Rounds to the nearest block.
fn share_of(blocks: u64, percent: f64) -> u64 {
    // A trace has far fewer than 2^52 blocks, so both conversions are exact.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let share = (blocks as f64 * percent / 100.0).round() as u64;
    share
}

/// Parses `16384`, `16KiB`, `1.5GB`: suffixes with `i` are binary, others decimal.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let invalid =
        || format!("`{text}` is not a size: expected a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB");
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let scale: u64 = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" | "k" => 1_000,
        "mb" | "m" => 1_000_000,
        "gb" | "g" => 1_000_000_000,
        "tb" | "t" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err(invalid()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(invalid);
    }
    let number: f64 = number.parse().map_err(|_| invalid())?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let bytes = (number * scale as f64) as u64;
    Ok(bytes)
}

/// Fill levels: above `high` a tier is evicted down to `low`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watermarks {
    /// Share of the capacity above which eviction starts.
    pub high: f64,
    /// Share of the capacity at which eviction stops.
    pub low: f64,
}

impl FromStr for Watermarks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || {
            format!(
                "`{text}` is not a pair of watermarks: expected HIGH:LOW with 0 < LOW <= HIGH <= 1, like 0.95:0.90"
            )
        };
        let (high, low) = text.split_once(':').ok_or_else(invalid)?;
        let (high, low): (f64, f64) =
            (high.parse().map_err(|_| invalid())?, low.parse().map_err(|_| invalid())?);
        if 0.0 < low && low <= high && high <= 1.0 { Ok(Self { high, low }) } else { Err(invalid()) }
    }
}

impl fmt::Display for Watermarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.high, self.low)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn parses_every_form_of_capacity() {
        let read = |text: &str| text.parse::<Capacity>().unwrap();
        assert_eq!(read("unbounded"), Capacity::Unbounded);
        assert_eq!(read("0"), Capacity::None);
        assert_eq!(read("10%"), Capacity::Share(10.0));
        assert_eq!(read("0.5%"), Capacity::Share(0.5));
        assert_eq!(read("1000b"), Capacity::Blocks(1000));
        assert_eq!(read("64MiB"), Capacity::Bytes(64 << 20));
        assert_eq!(read("2GB"), Capacity::Bytes(2_000_000_000));
        for text in ["unbounded", "0", "10%", "1000b", "123456"] {
            assert_eq!(read(text).to_string(), text, "the display form parses");
        }
    }

    #[test]
    fn invalid_capacities_list_the_forms() {
        for text in ["", "many", "10x", "-1", "0%", "%", "b", "1e3MB"] {
            let message = text.parse::<Capacity>().unwrap_err();
            assert!(message.contains("expected bytes (512MiB"), "{text}: {message}");
        }
    }

    #[test]
    fn shares_are_over_all_nodes() {
        assert_eq!(Capacity::Share(10.0).blocks_per_node(182_790, 1, 4096), 18_279);
        assert_eq!(Capacity::Share(5.0).blocks_per_node(182_790, 1, 4096), 9_140);
        assert_eq!(Capacity::Share(10.0).blocks_per_node(182_790, 3, 4096), 6_093);
        assert_eq!(Capacity::Bytes(10_000).blocks_per_node(1, 1, 4096), 2);
        assert_eq!(Capacity::Unbounded.blocks_per_node(7, 3, 4096), 7);
    }

    #[test]
    fn oversized_sizes_are_errors() {
        assert!(parse_bytes("99999999999TiB").unwrap_err().contains("is not a size"));
        assert_eq!(parse_bytes("1.5KiB").unwrap(), 1536);
    }

    #[test]
    fn validates_watermarks() {
        assert_eq!("0.95:0.9".parse::<Watermarks>().unwrap(), Watermarks { high: 0.95, low: 0.9 });
        for text in ["1", "0.5:0.6", "1.1:1", "x:y", "1:0"] {
            assert!(text.parse::<Watermarks>().unwrap_err().contains("HIGH:LOW"), "{text}");
        }
    }
}
