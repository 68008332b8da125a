//! Hardware profiles: prefill times and transfer speeds in numbers. Predictions are made under one
//! named profile, so that a report can name it.
//!
//! Not here: measurements at run time (`fleet.rs` takes link estimates) and the sum to a TTFT
//! (`cost.rs`).
//!
//! The numbers are estimates from public data sheets and papers, not our own measurements: values
//! computed from them are *modelled*.

use crate::id::Tier;

/// Speed of a path: latency to the first byte, and bandwidth after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathSpeed {
    /// Latency to the first byte, in nanoseconds.
    pub latency_ns: u64,
    /// Bandwidth in bytes a second; 0 if the path transfers nothing.
    pub bytes_per_s: u64,
}

impl PathSpeed {
    /// The speed of both paths in sequence: latencies add up, the narrower one sets the bandwidth
    /// (bytes are streamed, not stored in between).
    #[must_use]
    pub fn through(self, next: PathSpeed) -> PathSpeed {
        PathSpeed {
            latency_ns: self.latency_ns.saturating_add(next.latency_ns),
            bytes_per_s: self.bytes_per_s.min(next.bytes_per_s),
        }
    }

    /// Time to stream this many bytes without latency, in nanoseconds.
    pub(in crate::schedule) fn stream_ns(self, bytes: u128) -> u64 {
        if self.bytes_per_s == 0 {
            return if bytes == 0 { 0 } else { u64::MAX };
        }
        clamp(bytes.saturating_mul(1_000_000_000).div_ceil(u128::from(self.bytes_per_s)))
    }
}

/// Speeds of one kind of instance and the nodes around it, for one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HardwareProfile {
    /// Name in configuration and reports.
    pub name: &'static str,
    /// Prefill time of one token without context, in nanoseconds (the linear layers).
    pub prefill_ns_per_token: u64,
    /// Added prefill time of one token per token before it, in picoseconds (attention). This is the
    /// quadratic term: over a whole prompt it grows with the square of its length.
    pub prefill_ps_per_token_context: u64,
    /// Fixed time per prompt, in nanoseconds: a forward step regardless of the number of tokens,
    /// which is also the cost of a full hit.
    pub prompt_step_ns: u64,
    /// Base time of a decode step, in nanoseconds.
    pub step_ns: u64,
    /// Time that each running request adds to a step, in nanoseconds.
    pub step_ns_per_running: u64,
    /// KV of one token over all layers, in bytes.
    pub kv_bytes_per_token: u64,
    /// From GPU memory of a node into its DRAM; all reads of GPU blocks go through DRAM.
    pub gpu: PathSpeed,
    /// From DRAM of a node into the instance on the same node.
    pub dram: PathSpeed,
    /// From SSD of a node.
    pub ssd: PathSpeed,
    /// From one node to another.
    pub network: PathSpeed,
}

const fn path_speed(latency_us: u64, megabytes_per_s: u64) -> PathSpeed {
    PathSpeed { latency_ns: latency_us * 1_000, bytes_per_s: megabytes_per_s * 1_000_000 }
}

/// Every named profile. The KV size is that of Llama-3-8B: 32 layers, K and V, 8 KV heads of 128
/// values of 2 bytes = 131,072 bytes a token.
pub const PROFILES: &[HardwareProfile] = &[
    // 8 G parameters are 16 GFLOP a token; 40 % of 989 TFLOPS (dense BF16) gives 40 µs. Attention of one
    // token over one token of context: 32 layers x 4 x 4096 = 0.52 MFLOP, at the same rate 1.3 ns. PCIe
    // Gen5 x16 55 GB/s, four Gen4 drives 24 GB/s, 400 Gb/s RDMA at 90 % 45 GB/s.
    HardwareProfile {
        name: "h100-8b",
        prefill_ns_per_token: 40_000,
        prefill_ps_per_token_context: 1_300,
        prompt_step_ns: 8_000_000,
        step_ns: 8_000_000,
        step_ns_per_running: 60_000,
        kv_bytes_per_token: 131_072,
        gpu: path_speed(5, 1_000_000),
        dram: path_speed(15, 55_000),
        ssd: path_speed(100, 24_000),
        network: path_speed(15, 45_000),
    },
    // 312 TFLOPS (dense BF16) at 45 %: 115 µs and 3.7 ns. PCIe Gen4 x16 25 GB/s, four Gen3 drives
    // 12 GB/s, 200 Gb/s RDMA at 90 % 22 GB/s.
    HardwareProfile {
        name: "a100-8b",
        prefill_ns_per_token: 115_000,
        prefill_ps_per_token_context: 3_700,
        prompt_step_ns: 12_000_000,
        step_ns: 12_000_000,
        step_ns_per_running: 100_000,
        kv_bytes_per_token: 131_072,
        gpu: path_speed(5, 700_000),
        dram: path_speed(20, 25_000),
        ssd: path_speed(120, 12_000),
        network: path_speed(20, 22_000),
    },
    // Mock engines on one machine that account for compute instead of doing it: about a thousand
    // tokens a second, as of a small model on a few cores, with loopback as the network. Prefill of
    // a single token takes longer than every latency here, so a held block is always worth
    // fetching: replays under this profile count cache hits, not savings.
    HardwareProfile {
        name: "laptop-emulated",
        prefill_ns_per_token: 1_000_000,
        prefill_ps_per_token_context: 10_000,
        prompt_step_ns: 20_000_000,
        step_ns: 20_000_000,
        step_ns_per_running: 500_000,
        kv_bytes_per_token: 8_192,
        gpu: path_speed(10, 5_000),
        dram: path_speed(50, 2_500),
        ssd: path_speed(300, 700),
        network: path_speed(200, 300),
    },
];

impl HardwareProfile {
    /// The profile with this name, one of [`PROFILES`].
    #[must_use]
    pub fn by_name(name: &str) -> Option<HardwareProfile> {
        PROFILES.iter().find(|profile| profile.name == name).copied()
    }

    /// The speed of reading from a tier, before any network. A node copies GPU blocks to DRAM
    /// first, so GPU memory is never faster than DRAM.
    #[must_use]
    pub fn tier(&self, tier: Tier) -> PathSpeed {
        match tier {
            Tier::Gpu => self.gpu.through(self.dram),
            Tier::Dram => self.dram,
            Tier::Ssd => self.ssd,
        }
    }

    /// The same machines with all times multiplied by `factor` and all bandwidths divided by it,
    /// for mock engines that run at a multiple of real speed. A working path keeps a bandwidth of
    /// at least one byte a second.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    pub fn scaled(&self, factor: f64) -> HardwareProfile {
        // Casts to integers saturate.
        let time = |value: u64| (value as f64 * factor).round() as u64;
        let lane = |lane: PathSpeed| PathSpeed {
            latency_ns: time(lane.latency_ns),
            bytes_per_s: ((lane.bytes_per_s as f64 / factor).round() as u64).max(lane.bytes_per_s.min(1)),
        };
        HardwareProfile {
            prefill_ns_per_token: time(self.prefill_ns_per_token),
            prefill_ps_per_token_context: time(self.prefill_ps_per_token_context),
            prompt_step_ns: time(self.prompt_step_ns),
            step_ns: time(self.step_ns),
            step_ns_per_running: time(self.step_ns_per_running),
            gpu: lane(self.gpu),
            dram: lane(self.dram),
            ssd: lane(self.ssd),
            network: lane(self.network),
            ..*self
        }
    }

    /// Machines that take no time at all, for mock engines that only account for it.
    #[must_use]
    pub fn timeless(&self) -> HardwareProfile {
        let lane = PathSpeed { latency_ns: 0, bytes_per_s: u64::MAX };
        HardwareProfile {
            prefill_ns_per_token: 0,
            prefill_ps_per_token_context: 0,
            prompt_step_ns: 0,
            step_ns: 0,
            step_ns_per_running: 0,
            kv_bytes_per_token: 0,
            gpu: lane,
            dram: lane,
            ssd: lane,
            network: lane,
            ..*self
        }
    }

    /// The same machines with learned factors on the three parts of a prompt's time
    /// ([`HardwareProfile::prompt_ns`]).
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    pub fn with_prefill_factors(&self, [step, token, context]: [f64; 3]) -> HardwareProfile {
        // Casts to integers saturate.
        let time = |value: u64, times: f64| (value as f64 * times).round() as u64;
        HardwareProfile {
            prompt_step_ns: time(self.prompt_step_ns, step),
            prefill_ns_per_token: time(self.prefill_ns_per_token, token),
            prefill_ps_per_token_context: time(self.prefill_ps_per_token_context, context),
            ..*self
        }
    }

    /// Time of a prompt's `new_tokens` after `context_tokens` cached ones, in nanoseconds, by part:
    /// the fixed step, the linear layers a·n, and attention b·(c·n + n²/2).
    #[must_use]
    pub fn prompt_ns(&self, context_tokens: u64, new_tokens: u64) -> [u64; 3] {
        let (context, new) = (u128::from(context_tokens), u128::from(new_tokens));
        let linear = u128::from(self.prefill_ns_per_token) * new;
        // Twice the number of token pairs, so that an odd n loses no half pair.
        let pairs_doubled = (2 * context + new).saturating_mul(new);
        let attention = pairs_doubled.saturating_mul(self.prefill_ps_per_token_context.into()) / 2_000;
        [self.prompt_step_ns, clamp(linear), clamp(attention)]
    }

    /// The sum without the fixed step: a·n + b·(c·n + n²/2).
    #[must_use]
    pub fn prefill_ns(&self, context_tokens: u64, new_tokens: u64) -> u64 {
        let [_, linear, attention] = self.prompt_ns(context_tokens, new_tokens);
        linear.saturating_add(attention)
    }

    /// Time to stream the KV of `tokens` at this speed without latency, in nanoseconds.
    #[must_use]
    pub fn stream_ns(&self, lane: PathSpeed, tokens: u64) -> u64 {
        lane.stream_ns(u128::from(self.kv_bytes_per_token) * u128::from(tokens))
    }
}

impl Default for HardwareProfile {
    /// The profile of a cluster on one machine.
    fn default() -> Self {
        PROFILES[2]
    }
}

fn clamp(ns: u128) -> u64 {
    u64::try_from(ns).unwrap_or(u64::MAX)
}
