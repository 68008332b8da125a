//! A simulated world. An engine performs the actions and takes their time, and a path delivers
//! slices at any time. A ledger checks whether each layer task may be computed.

use super::*;

/// The engine's activity while the path delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineActivity {
    Computing,
    Waiting,
}

/// The first `layers` slices of a block are available from this time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SliceArrival {
    pub(super) at_ns: u64,
    pub(super) block: u32,
    pub(super) layers: u32,
}

/// Delivers slices. It may look at the engine's activity and its duration, which allows the worst
/// possible path.
pub(super) trait SlicePath {
    /// The next arrival after `now_ns` and not after `until_ns`; `None` if there is none.
    fn next(
        &mut self,
        doing: EngineActivity,
        race: &LoadComputeOverlap,
        now_ns: u64,
        until_ns: u64,
    ) -> Option<SliceArrival>;
}

/// Arrivals fixed in advance.
#[derive(Clone, Debug)]
pub(super) struct TracePath(std::iter::Peekable<std::vec::IntoIter<SliceArrival>>);

impl TracePath {
    pub(super) fn new(mut arrivals: Vec<SliceArrival>) -> TracePath {
        arrivals.sort_by_key(|arrival| arrival.at_ns);
        TracePath(arrivals.into_iter().peekable())
    }
}

impl SlicePath for TracePath {
    fn next(
        &mut self,
        _: EngineActivity,
        _: &LoadComputeOverlap,
        _: u64,
        until_ns: u64,
    ) -> Option<SliceArrival> {
        self.0.next_if(|arrival| arrival.at_ns <= until_ns)
    }
}

/// Sends one slice after the other at an even rate: awaited ones first, in order, then those of
/// blocks that are computed meanwhile.
#[derive(Clone, Debug)]
pub(super) struct SourcePath {
    remaining: Vec<(u32, u32)>,
    slice_ns: f64,
    /// The slice in flight, and its arrival time.
    sending: Option<(u32, u32)>,
    arrival_ns: f64,
    slow: Option<(f64, f64)>,
    silence: Option<(f64, f64)>,
}

impl SourcePath {
    /// Takes `load_ns` in all, if no slice is skipped.
    pub(super) fn new(order: Vec<(u32, u32)>, load_ns: u64) -> SourcePath {
        let slice_ns = load_ns as f64 / order.len() as f64;
        SourcePath { remaining: order, slice_ns, sending: None, arrival_ns: 0.0, slow: None, silence: None }
    }

    /// Pauses for `for_ns` from this time.
    pub(super) fn fall_silent(&mut self, at_ns: u64, for_ns: u64) {
        self.silence = Some((at_ns as f64, for_ns as f64));
    }

    /// From this time on, each slice takes `times` as long.
    pub(super) fn slow_down(&mut self, at_ns: u64, times: u32) {
        self.slow = Some((at_ns as f64, f64::from(times)));
    }
}

impl SlicePath for SourcePath {
    fn next(
        &mut self,
        _: EngineActivity,
        race: &LoadComputeOverlap,
        _: u64,
        until_ns: u64,
    ) -> Option<SliceArrival> {
        if self.sending.is_none() && !self.remaining.is_empty() {
            let wanted = self.remaining.iter().position(|(block, _)| race.is_awaited(*block)).unwrap_or(0);
            self.sending = Some(self.remaining.remove(wanted));
            let times =
                self.slow.filter(|(at_ns, _)| self.arrival_ns >= *at_ns).map_or(1.0, |(_, times)| times);
            self.arrival_ns += self.slice_ns * times;
            let silence = self.silence.take_if(|(at_ns, _)| self.arrival_ns >= *at_ns);
            self.arrival_ns += silence.map_or(0.0, |(_, for_ns)| for_ns);
        }
        let at_ns = self.arrival_ns.ceil() as u64;
        let (block, layers) = self.sending.take_if(|_| at_ns <= until_ns)?;
        Some(SliceArrival { at_ns, block, layers })
    }
}

/// A job as tests describe it.
#[derive(Clone, Debug)]
pub(super) struct TestJob {
    pub(super) costs: ComputeCosts,
    pub(super) slice_bytes: Vec<u32>,
    pub(super) arrival_order: ArrivalOrder,
    /// Initial rate estimate.
    pub(super) bytes_per_s: u64,
    /// Time of each decision.
    pub(super) decision_ns: u64,
    /// Wake-up delay of the engine.
    pub(super) late_ns: u64,
}

/// Result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct JobOutcome {
    pub(super) total_ns: u64,
    pub(super) idle_ns: u64,
    /// Blocks with a computed layer task.
    pub(super) computed_blocks: usize,
}

impl TestJob {
    pub(super) fn blocks(&self) -> u32 {
        u32::try_from(self.costs.block_layer_ns.len()).unwrap()
    }

    /// The sum of all layer tasks, added one by one.
    pub(super) fn recompute_ns(&self) -> u64 {
        let layer: u64 = self.costs.block_layer_ns.iter().sum::<u64>() + self.costs.new_layer_ns;
        (0..self.costs.layers).map(|_| layer).sum()
    }

    pub(super) fn overlap(&self) -> LoadComputeOverlap {
        let mut race = LoadComputeOverlap::new(
            self.costs.clone(),
            &self.slice_bytes,
            self.arrival_order,
            self.bytes_per_s,
            0,
        );
        race.begin(0);
        race
    }

    /// Runs it to the end.
    pub(super) fn run(&self, path: &mut impl SlicePath) -> JobOutcome {
        self.run_from(self.overlap(), 0, path)
    }

    /// Same, with a race that starts at `turn_ns`.
    pub(super) fn run_from(
        &self,
        overlap: LoadComputeOverlap,
        turn_ns: u64,
        path: &mut impl SlicePath,
    ) -> JobOutcome {
        let blocks = self.blocks() as usize;
        let mut world = PipelineWorld {
            job: self,
            race: overlap,
            now_ns: turn_ns,
            idle_ns: 0,
            computed_ns: 0,
            layer: 0,
            arrived: vec![0; blocks],
            computed: vec![0; blocks],
        };
        while let Some(arrival) = path.next(EngineActivity::Waiting, &world.race, 0, turn_ns) {
            world.receive(arrival);
        }
        world.run(turn_ns, path)
    }

    /// The invariant for every run: at most 2 % more than recomputing.
    pub(super) fn check(&self, outcome: JobOutcome) -> JobOutcome {
        let recompute_ns = self.recompute_ns();
        assert_eq!(self.costs.recompute_ns(), recompute_ns);
        let share = outcome.total_ns as f64 / recompute_ns as f64;
        assert!(outcome.total_ns * 50 <= recompute_ns * 51, "{share} of recomputing: {self:?} {outcome:?}");
        outcome
    }
}

struct PipelineWorld<'a> {
    job: &'a TestJob,
    race: LoadComputeOverlap,
    now_ns: u64,
    idle_ns: u64,
    computed_ns: u64,
    /// The ledger: the next layer of the wave, and for each block its arrived and computed leading
    /// slices.
    layer: u32,
    arrived: Vec<u32>,
    computed: Vec<u32>,
}

impl PipelineWorld<'_> {
    fn run(mut self, turn_ns: u64, path: &mut impl SlicePath) -> JobOutcome {
        loop {
            let said = self.race.next(self.now_ns);
            self.race.assert_adds_up();
            self.now_ns += self.job.decision_ns;
            match said {
                NextAction::Layer { layer } => {
                    let cost_ns = self.layer(layer);
                    self.compute(cost_ns, path);
                }
                NextAction::CatchUp { blocks, layers } => {
                    let cost_ns = self.catch_up(&blocks, layers);
                    self.compute(cost_ns, path);
                }
                NextAction::Wait { until_ns } => self.wait(until_ns, path),
                NextAction::Done => break,
            }
        }
        assert_eq!(self.layer, self.job.costs.layers, "all layers are computed");
        let whole = |(here, computed): (&u32, &u32)| (*here).max(*computed) == self.layer;
        assert!(self.arrived.iter().zip(&self.computed).all(whole), "each block has all its layers");
        assert!(self.race.idle_ns() >= self.idle_ns, "idle time is counted");
        let cells_ns = self.computed_ns + self.race.saved_ns();
        assert_eq!(cells_ns, self.job.recompute_ns(), "each layer task is computed once or saved");
        JobOutcome {
            total_ns: self.now_ns - turn_ns,
            idle_ns: self.idle_ns,
            computed_blocks: self.computed.iter().filter(|layers| **layers > 0).count(),
        }
    }

    /// The wave may run a layer if every other block has its slice; each of its blocks must be
    /// computed exactly up to that layer.
    fn layer(&mut self, layer: u32) -> u64 {
        assert_eq!(layer, self.layer, "layers are computed in order");
        let pass: Vec<u32> = self.race.wave().collect();
        let mut cost_ns = self.job.costs.new_layer_ns;
        for block in 0..self.job.blocks() {
            let at = block as usize;
            if pass.contains(&block) {
                assert_eq!(self.computed[at], layer, "block {block} is in the wave");
                self.computed[at] += 1;
                cost_ns += self.job.costs.block_layer_ns[at];
            } else {
                assert!(self.arrived[at] > layer, "slice {layer} of block {block} has arrived");
            }
        }
        self.layer += 1;
        cost_ns
    }

    /// A block may catch up once, and only if every slice below the wave of all earlier blocks has
    /// arrived or is computed.
    fn catch_up(&mut self, blocks: &[u32], layers: u32) -> u64 {
        assert!(layers == self.layer && layers > 0 && !blocks.is_empty());
        assert!(blocks.is_sorted());
        let mut cost_ns = 0;
        for &block in blocks {
            let at = block as usize;
            assert_eq!(self.computed[at], 0, "no block is computed twice");
            let has = |before: usize| self.arrived[before].max(self.computed[before]) >= layers;
            assert!((0..at).all(has), "the context of block {block} is available");
            self.computed[at] = layers;
            cost_ns += self.job.costs.block_layer_ns[at] * u64::from(layers);
        }
        cost_ns
    }

    fn compute(&mut self, cost_ns: u64, path: &mut impl SlicePath) {
        let until_ns = self.now_ns + cost_ns;
        self.computed_ns += cost_ns;
        while let Some(arrival) = path.next(EngineActivity::Computing, &self.race, self.now_ns, until_ns) {
            self.receive(arrival);
        }
        self.now_ns = until_ns;
    }

    fn wait(&mut self, until_ns: u64, path: &mut impl SlicePath) {
        let begun_ns = self.now_ns;
        let until_ns = until_ns.max(self.now_ns);
        self.now_ns = match path.next(EngineActivity::Waiting, &self.race, self.now_ns, until_ns) {
            Some(arrival) => {
                let at_ns = arrival.at_ns.max(self.now_ns);
                self.receive(arrival);
                at_ns
            }
            None => until_ns,
        } + self.job.late_ns;
        self.idle_ns += self.now_ns - begun_ns;
    }

    fn receive(&mut self, arrival: SliceArrival) {
        let at = arrival.block as usize;
        self.arrived[at] = self.arrived[at].max(arrival.layers);
        self.race.slices_arrived(arrival.block, arrival.layers, arrival.at_ns.max(self.now_ns));
    }
}

/// Slices in arrival order: the block, and its number of leading slices that have arrived then.
pub(super) fn arrival_sequence(arrive: ArrivalOrder, blocks: u32, layers: u32) -> Vec<(u32, u32)> {
    let by_layer = (1..=layers).flat_map(|layer| (0..blocks).map(move |block| (block, layer)));
    let by_block = (0..blocks).flat_map(|block| (1..=layers).map(move |layer| (block, layer)));
    match arrive {
        ArrivalOrder::ByLayer => by_layer.collect(),
        ArrivalOrder::ByBlock => by_block.collect(),
    }
}
