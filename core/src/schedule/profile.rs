//! What the machines can do, in numbers: how long prefill takes and how fast KV moves. Predictions are
//! made under one named profile, so that a report can say under which.
//!
//! Not here: what is measured at run time (`fleet.rs` takes link estimates) and how the numbers add up
//! to a TTFT (`cost.rs`).
//!
//! The numbers are estimates from public data sheets and papers, not measurements of ours: whatever is
//! computed from them is *modelled*.

use crate::id::Tier;

/// A way for bytes: how long until the first one, and how many a second after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Time to the first byte, in nanoseconds.
    pub latency_ns: u64,
    /// Bytes a second once they flow. 0 means that nothing comes through.
    pub bytes_per_s: u64,
}

impl Lane {
    /// The lane through both: latencies add up, the narrower one sets the rate (bytes are streamed, not
    /// stored in between).
    #[must_use]
    pub fn through(self, next: Lane) -> Lane {
        Lane {
            latency_ns: self.latency_ns.saturating_add(next.latency_ns),
            bytes_per_s: self.bytes_per_s.min(next.bytes_per_s),
        }
    }

    /// Time for so many bytes without the latency, in nanoseconds.
    pub(super) fn stream_ns(self, bytes: u128) -> u64 {
        if self.bytes_per_s == 0 {
            return if bytes == 0 { 0 } else { u64::MAX };
        }
        clamp(bytes.saturating_mul(1_000_000_000).div_ceil(u128::from(self.bytes_per_s)))
    }
}

/// Speeds of one kind of instance and the nodes around it, for one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HardwareProfile {
    /// Name by which configuration and reports call it.
    pub name: &'static str,
    /// Prefill time of one token without context, in nanoseconds (the linear layers).
    pub prefill_ns_per_token: u64,
    /// Added prefill time of one token per token before it, in picoseconds (attention). This is the
    /// quadratic term: over a whole prompt it grows with the square of its length.
    pub prefill_ps_per_token_context: u64,
    /// What each prompt takes besides, in nanoseconds: a forward step however few tokens it has, which is also what a full hit costs.
    pub prompt_step_ns: u64,
    /// One forward step of requests that decode, by itself, in nanoseconds.
    pub step_ns: u64,
    /// What one running request adds to each step of its neighbours, in nanoseconds.
    pub step_ns_per_running: u64,
    /// KV of one token over all layers, in bytes.
    pub kv_bytes_per_token: u64,
    /// From GPU memory of a node into its DRAM, by way of which all of it is read.
    pub gpu: Lane,
    /// From DRAM of a node into the instance on the same node.
    pub dram: Lane,
    /// From SSD of a node.
    pub ssd: Lane,
    /// From one node to another.
    pub network: Lane,
}

const fn lane(latency_us: u64, megabytes_per_s: u64) -> Lane {
    Lane { latency_ns: latency_us * 1_000, bytes_per_s: megabytes_per_s * 1_000_000 }
}

/// Every profile that has a name. The KV size is that of Llama-3-8B: 32 layers, K and V, 8 KV heads of
/// 128 values of 2 bytes = 131,072 bytes a token.
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
        gpu: lane(5, 1_000_000),
        dram: lane(15, 55_000),
        ssd: lane(100, 24_000),
        network: lane(15, 45_000),
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
        gpu: lane(5, 700_000),
        dram: lane(20, 25_000),
        ssd: lane(120, 12_000),
        network: lane(20, 22_000),
    },
    // Stand-in instances on one machine that account compute instead of doing it: about a thousand tokens
    // a second, which is what a small model does on a few cores, and loopback for a network. Prefill of a
    // single token outlasts every latency here, so a held block is always worth fetching: replays under
    // this profile count cache hits, never economies.
    HardwareProfile {
        name: "laptop-emulated",
        prefill_ns_per_token: 1_000_000,
        prefill_ps_per_token_context: 10_000,
        prompt_step_ns: 20_000_000,
        step_ns: 20_000_000,
        step_ns_per_running: 500_000,
        kv_bytes_per_token: 8_192,
        gpu: lane(10, 5_000),
        dram: lane(50, 2_500),
        ssd: lane(300, 700),
        network: lane(200, 300),
    },
];

impl HardwareProfile {
    /// The profile of this name, one of [`PROFILES`].
    #[must_use]
    pub fn by_name(name: &str) -> Option<HardwareProfile> {
        PROFILES.iter().find(|profile| profile.name == name).copied()
    }

    /// The lane out of a tier, before any network. A node copies what its GPU has to DRAM first, so a GPU is never nearer
    /// than DRAM, however fast it is itself.
    #[must_use]
    pub fn tier(&self, tier: Tier) -> Lane {
        match tier {
            Tier::Gpu => self.gpu.through(self.dram),
            Tier::Dram => self.dram,
            Tier::Ssd => self.ssd,
        }
    }

    /// The same machines with `times` as much time for all that they do, and as many times fewer bytes a second: for stand-ins that take a
    /// share of the time that the profile says. A lane through which something comes never comes to stand still.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    pub fn scaled(&self, times: f64) -> HardwareProfile {
        // Casts to integers saturate.
        let time = |value: u64| (value as f64 * times).round() as u64;
        let lane = |lane: Lane| Lane {
            latency_ns: time(lane.latency_ns),
            bytes_per_s: ((lane.bytes_per_s as f64 / times).round() as u64).max(lane.bytes_per_s.min(1)),
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

    /// Machines that take no time for anything: stand-ins that account for what they would take.
    #[must_use]
    pub fn timeless(&self) -> HardwareProfile {
        let lane = Lane { latency_ns: 0, bytes_per_s: u64::MAX };
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

    /// The same machines, of which prompts take these times as long in each of their parts ([`HardwareProfile::prompt_ns`]): what was learnt of them.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    pub fn with_prompts(&self, [step, token, context]: [f64; 3]) -> HardwareProfile {
        // Casts to integers saturate.
        let time = |value: u64, times: f64| (value as f64 * times).round() as u64;
        HardwareProfile {
            prompt_step_ns: time(self.prompt_step_ns, step),
            prefill_ns_per_token: time(self.prefill_ns_per_token, token),
            prefill_ps_per_token_context: time(self.prefill_ps_per_token_context, context),
            ..*self
        }
    }

    /// Time of a prompt's `new_tokens` behind `context_tokens` that are there already, in nanoseconds, in its parts: its step, the linear layers a·n, and
    /// attention b·(c·n + n²/2).
    #[must_use]
    pub fn prompt_ns(&self, context_tokens: u64, new_tokens: u64) -> [u64; 3] {
        let (context, new) = (u128::from(context_tokens), u128::from(new_tokens));
        let linear = u128::from(self.prefill_ns_per_token) * new;
        // Twice the pairs of a new token and one before it, so that an odd n loses nothing.
        let pairs_doubled = (2 * context + new).saturating_mul(new);
        let attention = pairs_doubled.saturating_mul(self.prefill_ps_per_token_context.into()) / 2_000;
        [self.prompt_step_ns, clamp(linear), clamp(attention)]
    }

    /// The same in all, with the step left out: a·n + b·(c·n + n²/2).
    #[must_use]
    pub fn prefill_ns(&self, context_tokens: u64, new_tokens: u64) -> u64 {
        let [_, linear, attention] = self.prompt_ns(context_tokens, new_tokens);
        linear.saturating_add(attention)
    }

    /// Time for the KV of `tokens` through `lane` without its latency, in nanoseconds.
    #[must_use]
    pub fn stream_ns(&self, lane: Lane, tokens: u64) -> u64 {
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
