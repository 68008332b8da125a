//! Unused space of frames for common model layouts, with dimensions from their publishers.

use kv_core::prefix::IdentityManifest;
use kvfleet_proto::frame::{PAYLOAD_BYTES_MAX, encoded_len};

use super::*;
use kvfleet_proto::identity::IdentitySection;

use crate::config::NodeConfig;

/// One component group of a model, on one rank.
struct ComponentGroup {
    layers: u32,
    /// Slices of each layer: keys and values, a latent, or recurrent state.
    slices: &'static [SliceSize],
}

/// Bytes of one slice.
enum SliceSize {
    /// Per token.
    Tokens(u32),
    /// Per block: recurrent state at its end.
    State(u32),
}

/// A model: number of layers, and its groups.
struct ModelLayout {
    name: &'static str,
    layers: u32,
    groups: &'static [ComponentGroup],
}

/// Keys or values: heads x dimensions x 16 bits.
const fn heads(heads: u32, dimensions: u32) -> SliceSize {
    SliceSize::Tokens(heads * dimensions * 2)
}

const LAYOUTS: &[ModelLayout] = &[
    // Llama-3-8B: 32 layers, 8 KV heads of 128, bf16.
    ModelLayout {
        name: "Llama-3-8B",
        layers: 32,
        groups: &[ComponentGroup { layers: 32, slices: &[heads(8, 128), heads(8, 128)] }],
    },
    // One rank of eight has one KV head.
    ModelLayout {
        name: "Llama-3-8B, TP 8",
        layers: 32,
        groups: &[ComponentGroup { layers: 32, slices: &[heads(1, 128), heads(1, 128)] }],
    },
    // Llama-3-70B: 80 layers, 8 KV heads of 128, bf16.
    ModelLayout {
        name: "Llama-3-70B",
        layers: 80,
        groups: &[ComponentGroup { layers: 80, slices: &[heads(8, 128), heads(8, 128)] }],
    },
    ModelLayout {
        name: "Llama-3-70B, TP 8",
        layers: 80,
        groups: &[ComponentGroup { layers: 80, slices: &[heads(1, 128), heads(1, 128)] }],
    },
    // Qwen2-7B: 28 layers, 4 KV heads of 128, bf16.
    ModelLayout {
        name: "Qwen2-7B",
        layers: 28,
        groups: &[ComponentGroup { layers: 28, slices: &[heads(4, 128), heads(4, 128)] }],
    },
    // DeepSeek-V3: 61 layers, a latent of 512 and 64 dimensions of rotated keys, bf16 or one byte.
    ModelLayout {
        name: "DeepSeek-V3",
        layers: 61,
        groups: &[ComponentGroup { layers: 61, slices: &[heads(1, 576)] }],
    },
    ModelLayout {
        name: "DeepSeek-V3, fp8",
        layers: 61,
        groups: &[ComponentGroup { layers: 61, slices: &[SliceSize::Tokens(576)] }],
    },
    // Gemma-3-27B: 62 layers, 16 KV heads of 128, bf16; every sixth with full attention, the others with a window.
    ModelLayout {
        name: "Gemma-3-27B",
        layers: 62,
        groups: &[
            ComponentGroup { layers: 10, slices: &[heads(16, 128), heads(16, 128)] },
            ComponentGroup { layers: 52, slices: &[heads(16, 128), heads(16, 128)] },
        ],
    },
    // Jamba-v0.1: 32 layers, every eighth attention with 8 KV heads of 128, the others Mamba with 8192 channels: a
    // convolution over 4 steps and 16 dimensions of state, bf16.
    ModelLayout {
        name: "Jamba-v0.1",
        layers: 32,
        groups: &[
            ComponentGroup { layers: 4, slices: &[heads(8, 128), heads(8, 128)] },
            ComponentGroup {
                layers: 28,
                slices: &[SliceSize::State(8192 * 4 * 2), SliceSize::State(8192 * 16 * 2)],
            },
        ],
    },
];

impl ComponentGroup {
    /// Slice sizes of one block of this many tokens, in bytes.
    fn slices(&self, tokens: u32) -> Vec<u32> {
        let bytes = |slice: &SliceSize| match slice {
            SliceSize::Tokens(bytes) => bytes * tokens,
            SliceSize::State(bytes) => *bytes,
        };
        (0..self.layers).flat_map(|_| self.slices.iter().map(bytes)).collect()
    }
}

/// Node configuration for the layout.
fn config(layout: &ModelLayout, payloads: &[u64]) -> NodeConfig {
    let manifest = IdentityManifest { layers: layout.layers, ..IdentityManifest::default() };
    let identity = IdentitySection::from(&manifest);
    let block_bytes = payloads.iter().copied().max().unwrap();
    let component_bytes = payloads.iter().copied().filter(|bytes| *bytes != block_bytes).collect();
    NodeConfig { identity, block_bytes, component_bytes, ..NodeConfig::default() }
}

#[test]
fn charged_but_unused_bytes_are_below_five_percent() {
    println!("layout             tokens  group  payload      charged      lost");
    for layout in LAYOUTS {
        for tokens in [16, 64] {
            let slices: Vec<Vec<u32>> = layout.groups.iter().map(|group| group.slices(tokens)).collect();
            let payload = |slices: &Vec<u32>| slices.iter().map(|bytes| u64::from(*bytes)).sum::<u64>();
            let payloads: Vec<u64> = slices.iter().map(payload).collect();
            let config = config(layout, &payloads);
            assert_eq!(config.validate(), Ok(()), "{}", layout.name);
            let classes = SizeClasses::new(&config.frame_bytes());
            for (number, (slices, payload)) in slices.iter().zip(&payloads).enumerate() {
                assert!(*payload <= PAYLOAD_BYTES_MAX as u64);
                let charged = classes.share_bytes(encoded_len(slices)) as u64;
                let lost = (charged - payload) as f64 / charged as f64;
                println!(
                    "{:<18} {tokens:<7} {number:<6} {payload:<12} {charged:<12} {:.2} %",
                    layout.name,
                    lost * 100.0
                );
                assert!(lost < 0.05, "{}, {tokens} tokens: {lost}", layout.name);
            }
        }
    }
}

#[test]
fn component_groups_have_their_own_classes() {
    let hybrid = LAYOUTS.iter().find(|layout| layout.name == "Jamba-v0.1").unwrap();
    let slices: Vec<Vec<u32>> = hybrid.groups.iter().map(|group| group.slices(16)).collect();
    let payloads: Vec<u64> = slices.iter().map(|slices| slices.iter().map(|b| u64::from(*b)).sum()).collect();
    assert_eq!(payloads, [262_144, 9_175_040]);
    let classes = SizeClasses::new(&config(hybrid, &payloads).frame_bytes());
    let found: Vec<Option<usize>> = slices.iter().map(|slices| classes.find(encoded_len(slices))).collect();
    assert_eq!(found, [Some(0), Some(1)]);
    assert_eq!(classes.list()[0].slots_per_slab, 34);
}
