//! The tier on a fake device: the suite for every device, and faults that only a fake one can have.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

pub(crate) mod fake;
mod kernels;
mod suite;
mod thread;

use proptest::prelude::*;

use super::*;
use fake::{FakeDevice, FaultControl, InjectedFaults};
use suite::{TierBench, classes, device_bytes, frame, shape};

fn fake_bench(seed: u64) -> (TierBench<FakeDevice>, FaultControl) {
    let (device, faults) = FakeDevice::new(device_bytes(), seed);
    (TierBench::new(device, shape(12)), faults)
}

#[test]
fn fake_device_passes_the_suite() {
    for seed in 0..50 {
        println!("seed {seed}");
        suite::run(|| FakeDevice::new(device_bytes(), seed).0);
    }
}

#[test]
#[cfg(feature = "gpu")]
fn gpu_passes_the_suite_if_present() {
    let open = || cuda::CudaDevice::open(0).expect("the GPU must be usable or absent");
    match open() {
        Some(device) => {
            println!("on {}", device.name());
            drop(device);
            suite::run(|| open().unwrap());
            suite::run(|| open().unwrap().without_kernels());
        }
        None => println!("SKIPPED on a GPU: no driver or no GPU"),
    }
}

#[test]
#[cfg(not(feature = "gpu"))]
fn a_gpu_passes_the_suite_where_there_is_one() {
    println!("SKIPPED on a GPU: built without the feature gpu");
}

#[test]
fn missing_memory_fails_at_open() {
    let (device, _) = FakeDevice::new(classes().slab_bytes(), 1);
    let refused = GpuTier::open(device, shape(12)).unwrap_err();
    assert!(matches!(refused, DeviceError::NoMemory { what: "device", .. }), "{refused}");
    let (device, faults) = FakeDevice::new(device_bytes(), 1);
    faults.lock().locked_bytes = Some(6000);
    let refused = GpuTier::open(device, shape(12)).unwrap_err();
    assert!(matches!(refused, DeviceError::NoMemory { what: "page-locked", .. }), "{refused}");
}

/// Number of chunks of a large frame.
fn chunks() -> u64 {
    let large = frame(1, true).len();
    assert_eq!(large.div_ceil(5000), 3);
    3
}

#[test]
fn failed_copy_costs_only_its_block() {
    let large = frame(1, true);
    for failing in 0..2 * chunks() {
        let (mut bench, faults) = fake_bench(failing);
        *faults.lock() = InjectedFaults { failing: [failing].into(), ..InjectedFaults::default() };
        let fault = bench.put(1, &large).unwrap_err();
        assert!(matches!(fault, GpuFault::Device(DeviceError::Copy(_))), "copy {failing}: {fault}");
        assert_eq!((bench.tier.used_bytes(), bench.tier.slabs.empty_slabs()), (0, 12));
        let record = bench.put(2, &large).unwrap();
        assert_eq!(bench.get(3, record, large.len()).unwrap(), large);
    }
}

#[test]
fn bit_flip_during_store_is_detected() {
    let large = frame(1, true);
    // First the written chunks, then the chunks that are read back.
    for flipping in 0..2 * chunks() {
        let (mut bench, faults) = fake_bench(flipping);
        *faults.lock() = InjectedFaults { flipping: [flipping].into(), ..InjectedFaults::default() };
        let fault = bench.put(1, &large).unwrap_err();
        assert!(matches!(fault, GpuFault::Corrupt(_)), "copy {flipping}: {fault}");
        assert_eq!(bench.tier.used_bytes(), 0);
    }
}

#[test]
fn corrupted_read_fails_and_can_be_retried() {
    let large = frame(1, true);
    for wrong in 2 * chunks()..3 * chunks() {
        let (mut bench, faults) = fake_bench(wrong);
        let record = bench.put(1, &large).unwrap();
        *faults.lock() = InjectedFaults { flipping: [wrong].into(), ..InjectedFaults::default() };
        let fault = bench.get(2, record, large.len()).unwrap_err();
        assert!(matches!(fault, GpuFault::Corrupt(_)), "{fault}");
        assert_eq!(bench.arena.used_bytes(), 0, "its slot was freed");
        assert_eq!(bench.get(3, record, large.len()).unwrap(), large);
    }
}

#[test]
fn memory_being_read_is_not_reused() {
    let (mut bench, faults) = fake_bench(7);
    let (first, second) = (frame(1, true), frame(2, true));
    let record = bench.put(1, &first).unwrap();
    faults.lock().is_stalled = true;
    let slot = bench.arena.take(first.len(), Purpose::Load).unwrap();
    assert!(bench.tier.get(2, record, slot).unwrap());
    bench.tier.free(record);
    assert_eq!(bench.tier.used_bytes(), first.len(), "still being read");
    assert!(bench.tier.put(3, &second).unwrap());
    faults.lock().is_stalled = false;
    bench.run_to_completion();
    assert_eq!(bench.loaded.remove(&2).unwrap().unwrap(), first);
    assert_eq!(bench.tier.used_bytes(), second.len());
}

#[test]
fn lost_device_ends_every_job() {
    for lost_at in 0..12 {
        let (mut bench, faults) = fake_bench(lost_at);
        faults.lock().lost_at = Some(lost_at);
        for token in 0..4 {
            assert!(bench.tier.put(token, &frame(token, true)).unwrap());
        }
        bench.run_to_completion();
        assert_eq!(bench.stored.len(), 4);
        assert!(bench.stored.values().any(Result::is_err));
        assert!(matches!(bench.tier.lost(), Some(DeviceError::Lost(_))));
        let again = bench.tier.put(9, &frame(9, false));
        assert!(matches!(again, Err(GpuFault::Device(DeviceError::Lost(_)))), "{again:?}");
    }
}

#[test]
fn scatter_to_unmapped_address_loses_the_device() {
    let (mut bench, _) = fake_bench(3);
    let record = bench.put(1, &frame(1, false)).unwrap();
    assert!(bench.tier.scatter(2, record, vec![0x10; 4]).unwrap());
    bench.run_to_completion();
    assert!(matches!(bench.scatters_ended[&2], Err(GpuFault::Device(DeviceError::Lost(_)))));
    assert!(!bench.scattered.contains_key(&2) && bench.tier.lost().is_some());
}

#[test]
fn scatter_into_tier_memory_is_refused() {
    let (mut bench, _) = fake_bench(3);
    let (first, second) = (frame(1, false), frame(2, false));
    let records = [bench.put(1, &first).unwrap(), bench.put(2, &second).unwrap()];
    let engine = bench.tier.device.allocate(1 << 16).unwrap();
    let base = bench.tier.base;
    let end = base + 12 * classes().slab_bytes() as u64;
    // Slices of 700, 1, 900 and 1300 bytes.
    for (layer, own) in [(0, base), (1, end - 1), (2, base - 899), (3, base + 5000), (0, end - 700)] {
        let mut to = vec![engine; 4];
        to[layer] = own;
        assert_eq!(bench.tier.scatter(3, records[0], to), Err(GpuFault::Unknown), "{layer}: {own:#x}");
    }
    assert!(bench.tier.scatter(3, records[0], vec![engine; 4]).unwrap());
    bench.run_to_completion();
    assert_eq!(bench.scatters_ended[&3], Ok(()));
    assert_eq!(bench.get(4, records[1], second.len()).unwrap(), second);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random puts, gets and frees with failing copies and bit flips: each job ends once, stored
    /// frames are unchanged, and all memory is freed.
    #[test]
    fn faults_never_corrupt_reads_or_leak_memory(
        seed in any::<u64>(),
        failing in prop::collection::btree_set(0u64..300, 0..20),
        flipping in prop::collection::btree_set(0u64..300, 0..20),
        calls in prop::collection::vec((0u8..6, any::<u8>()), 1..120),
    ) {
        let (mut bench, faults) = fake_bench(seed);
        *faults.lock() = InjectedFaults { failing, flipping, ..InjectedFaults::default() };
        let (mut putting, mut getting) = (BTreeMap::new(), BTreeMap::new());
        let mut held: Vec<(GpuRecord, Bytes)> = Vec::new();
        for (token, (call, pick)) in (0..).zip(calls) {
            match call {
                0..=1 => {
                    let frame = frame(token, pick % 3 == 0);
                    if bench.tier.put(token, &frame).unwrap() {
                        putting.insert(token, frame);
                    }
                }
                2..=3 if !held.is_empty() => {
                    let (record, frame) = held[usize::from(pick) % held.len()].clone();
                    let slot = bench.arena.take(frame.len(), Purpose::Load).unwrap();
                    if bench.tier.get(token, record, slot).unwrap() {
                        getting.insert(token, frame);
                    }
                }
                4 if !held.is_empty() => {
                    let (record, _) = held.swap_remove(usize::from(pick) % held.len());
                    bench.tier.free(record);
                }
                _ => bench.poll(),
            }
            prop_assert!(bench.tier.jobs() <= 6 && bench.tier.copies.len() <= 3);
            collect_results(&mut bench, &mut putting, &mut getting, &mut held);
        }
        bench.run_to_completion();
        collect_results(&mut bench, &mut putting, &mut getting, &mut held);
        prop_assert!(putting.is_empty() && getting.is_empty(), "every job ended");
        held.into_iter().for_each(|(record, _)| bench.tier.free(record));
        prop_assert_eq!((bench.tier.used_bytes(), bench.tier.slabs.empty_slabs()), (0, 12));
        prop_assert_eq!((bench.tier.staging.len(), bench.arena.used_bytes()), (3, 0));
    }
}

/// Collects results: stored blocks are held from now on, and loaded frames equal stored ones.
fn collect_results(
    bench: &mut TierBench<FakeDevice>,
    putting: &mut BTreeMap<u64, Bytes>,
    getting: &mut BTreeMap<u64, Bytes>,
    held: &mut Vec<(GpuRecord, Bytes)>,
) {
    for (token, result) in std::mem::take(&mut bench.stored) {
        let frame = putting.remove(&token).unwrap();
        held.extend(result.ok().map(|record| (record, frame)));
    }
    for (token, result) in std::mem::take(&mut bench.loaded) {
        let frame = getting.remove(&token).unwrap();
        assert!(result.is_err() || result == Ok(frame));
    }
}
