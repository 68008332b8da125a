//! A world in which a race is run: an engine that does what is said and takes the time it costs, a path that
//! brings slices when it likes, and a ledger that knows of every cell whether it may be computed.

use super::*;

/// What the engine is doing while the path brings something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    Computing,
    Waiting,
}

/// The first `layers` slices of a block are there at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) at_ns: u64,
    pub(super) block: u32,
    pub(super) layers: u32,
}

/// Brings slices. It may look at what the engine does and for how long: the worst path there can be.
pub(super) trait Path {
    /// The next arrival after `now_ns` and not after `until_ns`; nothing if there is none.
    fn next(&mut self, doing: Doing, race: &Race, now_ns: u64, until_ns: u64) -> Option<Arrival>;
}

/// Arrivals that were fixed before.
#[derive(Clone, Debug)]
pub(super) struct Trace(std::iter::Peekable<std::vec::IntoIter<Arrival>>);

impl Trace {
    pub(super) fn new(mut arrivals: Vec<Arrival>) -> Trace {
        arrivals.sort_by_key(|arrival| arrival.at_ns);
        Trace(arrivals.into_iter().peekable())
    }
}

impl Path for Trace {
    fn next(&mut self, _: Doing, _: &Race, _: u64, until_ns: u64) -> Option<Arrival> {
        self.0.next_if(|arrival| arrival.at_ns <= until_ns)
    }
}

/// Sends one slice after the other at an even rate: those that are awaited first, in their order, then those of
/// blocks that are computed meanwhile.
#[derive(Clone, Debug)]
pub(super) struct Source {
    left: Vec<(u32, u32)>,
    slice_ns: f64,
    /// What is on its way, and when it is there.
    sending: Option<(u32, u32)>,
    there_ns: f64,
    slow: Option<(f64, f64)>,
    silence: Option<(f64, f64)>,
}

impl Source {
    /// All of it in `load_ns`, if nothing is left out.
    pub(super) fn new(order: Vec<(u32, u32)>, load_ns: u64) -> Source {
        let slice_ns = load_ns as f64 / order.len() as f64;
        Source { left: order, slice_ns, sending: None, there_ns: 0.0, slow: None, silence: None }
    }

    /// From this moment on, nothing for so long.
    pub(super) fn fall_silent(&mut self, at_ns: u64, for_ns: u64) {
        self.silence = Some((at_ns as f64, for_ns as f64));
    }

    /// From this moment on, each slice takes so many times as long.
    pub(super) fn slow_down(&mut self, at_ns: u64, times: u32) {
        self.slow = Some((at_ns as f64, f64::from(times)));
    }
}

impl Path for Source {
    fn next(&mut self, _: Doing, race: &Race, _: u64, until_ns: u64) -> Option<Arrival> {
        if self.sending.is_none() && !self.left.is_empty() {
            let wanted = self.left.iter().position(|(block, _)| race.is_awaited(*block)).unwrap_or(0);
            self.sending = Some(self.left.remove(wanted));
            let times =
                self.slow.filter(|(at_ns, _)| self.there_ns >= *at_ns).map_or(1.0, |(_, times)| times);
            self.there_ns += self.slice_ns * times;
            let silence = self.silence.take_if(|(at_ns, _)| self.there_ns >= *at_ns);
            self.there_ns += silence.map_or(0.0, |(_, for_ns)| for_ns);
        }
        let at_ns = self.there_ns.ceil() as u64;
        let (block, layers) = self.sending.take_if(|_| at_ns <= until_ns)?;
        Some(Arrival { at_ns, block, layers })
    }
}

/// A job as tests write it: even blocks, unless said otherwise.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) costs: Costs,
    pub(super) slice_bytes: Vec<u32>,
    pub(super) arrive: Arrive,
    /// What the race believes at first.
    pub(super) bytes_per_s: u64,
    /// What each decision takes.
    pub(super) decision_ns: u64,
    /// By how much the engine oversleeps.
    pub(super) late_ns: u64,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) total_ns: u64,
    pub(super) idle_ns: u64,
    /// Blocks of which a cell was computed.
    pub(super) computed_blocks: usize,
}

impl Job {
    pub(super) fn blocks(&self) -> u32 {
        u32::try_from(self.costs.block_layer_ns.len()).unwrap()
    }

    /// All cells, added up one by one.
    pub(super) fn recompute_ns(&self) -> u64 {
        let layer: u64 = self.costs.block_layer_ns.iter().sum::<u64>() + self.costs.new_layer_ns;
        (0..self.costs.layers).map(|_| layer).sum()
    }

    pub(super) fn race(&self) -> Race {
        let mut race = Race::new(self.costs.clone(), &self.slice_bytes, self.arrive, self.bytes_per_s, 0);
        race.begin(0);
        race
    }

    /// Runs it to the end.
    pub(super) fn run(&self, path: &mut impl Path) -> Outcome {
        self.run_from(self.race(), 0, path)
    }

    /// The same with a race whose turn is at `turn_ns`.
    pub(super) fn run_from(&self, race: Race, turn_ns: u64, path: &mut impl Path) -> Outcome {
        let blocks = self.blocks() as usize;
        let mut world = World {
            job: self,
            race,
            now_ns: turn_ns,
            idle_ns: 0,
            computed_ns: 0,
            layer: 0,
            here: vec![0; blocks],
            computed: vec![0; blocks],
        };
        while let Some(arrival) = path.next(Doing::Waiting, &world.race, 0, turn_ns) {
            world.take(arrival);
        }
        world.run(turn_ns, path)
    }

    /// What must hold whatever came: 2 % more than recomputing, and no more.
    pub(super) fn check(&self, outcome: Outcome) -> Outcome {
        let recompute_ns = self.recompute_ns();
        assert_eq!(self.costs.recompute_ns(), recompute_ns);
        let share = outcome.total_ns as f64 / recompute_ns as f64;
        assert!(outcome.total_ns * 50 <= recompute_ns * 51, "{share} of recomputing: {self:?} {outcome:?}");
        outcome
    }
}

struct World<'a> {
    job: &'a Job,
    race: Race,
    now_ns: u64,
    idle_ns: u64,
    computed_ns: u64,
    /// The ledger: the next layer of the pass, and of each block how many leading slices came and how many were
    /// computed.
    layer: u32,
    here: Vec<u32>,
    computed: Vec<u32>,
}

impl World<'_> {
    fn run(mut self, turn_ns: u64, path: &mut impl Path) -> Outcome {
        loop {
            let said = self.race.next(self.now_ns);
            self.race.assert_adds_up();
            self.now_ns += self.job.decision_ns;
            match said {
                Next::Layer { layer } => {
                    let cost_ns = self.layer(layer);
                    self.compute(cost_ns, path);
                }
                Next::CatchUp { blocks, layers } => {
                    let cost_ns = self.catch_up(&blocks, layers);
                    self.compute(cost_ns, path);
                }
                Next::Wait { until_ns } => self.wait(until_ns, path),
                Next::Done => break,
            }
        }
        assert_eq!(self.layer, self.job.costs.layers, "all layers are computed");
        let whole = |(here, computed): (&u32, &u32)| (*here).max(*computed) == self.layer;
        assert!(self.here.iter().zip(&self.computed).all(whole), "each block has all its layers");
        assert!(self.race.idle_ns() >= self.idle_ns, "what was idle is counted");
        let cells_ns = self.computed_ns + self.race.saved_ns();
        assert_eq!(cells_ns, self.job.recompute_ns(), "each cell is computed once or saved");
        Outcome {
            total_ns: self.now_ns - turn_ns,
            idle_ns: self.idle_ns,
            computed_blocks: self.computed.iter().filter(|layers| **layers > 0).count(),
        }
    }

    /// The pass may run a layer when every other block has its slice; each of its blocks was computed so far
    /// and no further.
    fn layer(&mut self, layer: u32) -> u64 {
        assert_eq!(layer, self.layer, "layers are computed in order");
        let pass: Vec<u32> = self.race.pass().collect();
        let mut cost_ns = self.job.costs.new_layer_ns;
        for block in 0..self.job.blocks() {
            let at = block as usize;
            if pass.contains(&block) {
                assert_eq!(self.computed[at], layer, "block {block} is with the pass");
                self.computed[at] += 1;
                cost_ns += self.job.costs.block_layer_ns[at];
            } else {
                assert!(self.here[at] > layer, "slice {layer} of block {block} is here");
            }
        }
        self.layer += 1;
        cost_ns
    }

    /// A block may catch up once, and when every slice below the pass of all blocks before it is here or computed.
    fn catch_up(&mut self, blocks: &[u32], layers: u32) -> u64 {
        assert!(layers == self.layer && layers > 0 && !blocks.is_empty());
        assert!(blocks.is_sorted());
        let mut cost_ns = 0;
        for &block in blocks {
            let at = block as usize;
            assert_eq!(self.computed[at], 0, "nothing is computed twice");
            let has = |before: usize| self.here[before].max(self.computed[before]) >= layers;
            assert!((0..at).all(has), "what block {block} looks back on is there");
            self.computed[at] = layers;
            cost_ns += self.job.costs.block_layer_ns[at] * u64::from(layers);
        }
        cost_ns
    }

    fn compute(&mut self, cost_ns: u64, path: &mut impl Path) {
        let until_ns = self.now_ns + cost_ns;
        self.computed_ns += cost_ns;
        while let Some(arrival) = path.next(Doing::Computing, &self.race, self.now_ns, until_ns) {
            self.take(arrival);
        }
        self.now_ns = until_ns;
    }

    fn wait(&mut self, until_ns: u64, path: &mut impl Path) {
        let begun_ns = self.now_ns;
        let until_ns = until_ns.max(self.now_ns);
        self.now_ns = match path.next(Doing::Waiting, &self.race, self.now_ns, until_ns) {
            Some(arrival) => {
                let at_ns = arrival.at_ns.max(self.now_ns);
                self.take(arrival);
                at_ns
            }
            None => until_ns,
        } + self.job.late_ns;
        self.idle_ns += self.now_ns - begun_ns;
    }

    fn take(&mut self, arrival: Arrival) {
        let at = arrival.block as usize;
        self.here[at] = self.here[at].max(arrival.layers);
        self.race.arrived(arrival.block, arrival.layers, arrival.at_ns.max(self.now_ns));
    }
}

/// Slices in the order in which a path brings them: the block, and how many of its leading slices are there then.
pub(super) fn order(arrive: Arrive, blocks: u32, layers: u32) -> Vec<(u32, u32)> {
    let by_layer = (1..=layers).flat_map(|layer| (0..blocks).map(move |block| (block, layer)));
    let by_block = (0..blocks).flat_map(|block| (1..=layers).map(move |layer| (block, layer)));
    match arrive {
        Arrive::ByLayer => by_layer.collect(),
        Arrive::ByBlock => by_block.collect(),
    }
}
