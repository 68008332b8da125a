//! Reuse classes: blocks that are judged together. A class has a role; classes of session blocks
//! are finer.
//!
//! Every class has one queue, one set of hazards and one table, so the number of classes bounds the
//! cost of a victim. Not here: the statistics of a class ([`super::hazard`]) and the inference of a
//! block's role ([`super`]).

use crate::evict::reuse_stats::CategoryRole;
use crate::id::RequestKind;

/// Number of classes, used or not. A victim search compares the heads of all.
pub(super) const CLASSES: usize = 64;
/// Turn buckets: first, second, third and fourth, later.
pub(super) const TURNS: usize = 4;
/// Pace buckets of shared blocks.
const SHARED_PACES: usize = 8;
pub(super) const KINDS: usize = RequestKind::ALL.len();
/// Finer classes of one kind and turn.
const FINER: usize = 6;
/// First class of session blocks by kind and turn, of finer classes made on demand, and of shared
/// blocks.
const SESSIONS_AT: usize = 2;
const FINER_AT: usize = SESSIONS_AT + KINDS * TURNS;
/// Last, so that shared blocks stay among equals.
pub(super) const SHARED_AT: usize = CLASSES - SHARED_PACES;
/// A step of [`log_span`] and [`log_count`]: an eighth of an octave.
const OCTAVE: i32 = 8;

/// Number of a class, below [`CLASSES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReuseClass(pub(super) u8);

impl ReuseClass {
    /// Partly filled tails: only a repetition of the same prompt uses one.
    pub(super) const PARTIAL: ReuseClass = ReuseClass(0);
    /// Blocks of a request in progress.
    pub(super) const ARRIVING: ReuseClass = ReuseClass(1);

    pub(super) fn index(self) -> usize {
        usize::from(self.0) % CLASSES
    }
}

/// Logarithm to base 2 of a span of time, in eighths of an octave above 1.024 ms: the unit of a
/// pace.
pub(super) fn log_span(span_us: u64) -> u8 {
    log_count(u32::try_from(span_us >> 10).unwrap_or(u32::MAX))
}

/// Logarithm to base 2 in eighths; that of 0 is 0.
fn log_count(count: u32) -> u8 {
    let octave = count.checked_ilog2().unwrap_or(0);
    let eighth = (u64::from(count) << 3 >> octave & 7) as u32;
    (octave * 8 + eighth) as u8
}

/// Meaning of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClassMeaning {
    /// [`Class::PARTIAL`].
    Partial,
    /// [`Class::ARRIVING`].
    Arriving,
    /// Kind, turn bucket, and the finer class if there is one.
    Session(usize, usize, Option<usize>),
    /// Pace bucket.
    Shared(usize),
}

impl ClassMeaning {
    /// Its category role, equal on every node; `None` for arriving blocks.
    pub(super) fn role(self) -> Option<CategoryRole> {
        match self {
            ClassMeaning::Partial => Some(CategoryRole::Partial),
            ClassMeaning::Arriving => None,
            ClassMeaning::Shared(pace) => Some(CategoryRole::Shared(pace as u8)),
            ClassMeaning::Session(kind, turn, finer) => {
                let kind = *RequestKind::ALL.get(kind)?;
                Some(CategoryRole::Session(kind, turn as u8, finer.map(|finer| finer as u8)))
            }
        }
    }

    /// The meaning of a category role; `None` for the paper's categories.
    pub(super) fn from_role(role: CategoryRole) -> Option<ClassMeaning> {
        match role {
            CategoryRole::Partial => Some(ClassMeaning::Partial),
            CategoryRole::Shared(pace) => Some(ClassMeaning::Shared(usize::from(pace))),
            CategoryRole::Session(kind, turn, finer) => {
                Some(ClassMeaning::Session(kind as usize, usize::from(turn), finer.map(usize::from)))
            }
            CategoryRole::Paper(..) => None,
        }
    }
}

/// What a request reveals about its session.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConversationTurn {
    pub(super) kind: RequestKind,
    /// Counted from 1.
    pub(super) turn: u8,
    /// Blocks of the request; `new_blocks` counts those that no earlier request had.
    pub(super) blocks: u32,
    pub(super) new_blocks: u32,
    /// Mean logarithm of the times between the session's turns.
    pub(super) pace: Option<u8>,
    /// The request diverges from an earlier one with the same blocks: sessions share them.
    pub(super) forks: bool,
}

/// A running mean, in 1/256 of an eighth of an octave.
#[derive(Clone, Copy, Debug, Default)]
struct RunningMean(Option<i32>);

impl RunningMean {
    /// Difference of a value from the mean so far, in eighths of an octave; then updates the mean.
    fn deviation(&mut self, value: u8) -> i32 {
        let value = i32::from(value) << 8;
        let mean = self.0.get_or_insert(value);
        let above = value - *mean;
        *mean += above / 64;
        above >> 8
    }
}

/// Assigns classes. Finer ones are created at first use, while any remain.
#[derive(Clone, Debug)]
pub(super) struct ReuseClasses {
    finer: [[[u8; FINER]; TURNS]; KINDS],
    meanings: Vec<ClassMeaning>,
    mean_size: [RunningMean; KINDS],
    mean_pace: [RunningMean; KINDS],
}

impl Default for ReuseClasses {
    fn default() -> Self {
        let mut meanings = vec![ClassMeaning::Partial, ClassMeaning::Arriving];
        for kind in 0..KINDS {
            meanings.extend((0..TURNS).map(|turn| ClassMeaning::Session(kind, turn, None)));
        }
        debug_assert_eq!(meanings.len(), FINER_AT);
        ReuseClasses {
            finer: [[[0; FINER]; TURNS]; KINDS],
            meanings,
            mean_size: [RunningMean::default(); KINDS],
            mean_pace: [RunningMean::default(); KINDS],
        }
    }
}

impl ReuseClasses {
    /// The class of shared blocks with this pace.
    pub(super) fn shared(pace: u8) -> ReuseClass {
        let bucket = (usize::from(pace >> 3).saturating_sub(6) / 2).min(SHARED_PACES - 1);
        ReuseClass((SHARED_AT + bucket) as u8)
    }

    /// The class by kind and turn.
    pub(super) fn coarse(kind: RequestKind, turn: u8) -> ReuseClass {
        ReuseClass((SESSIONS_AT + kind as usize * TURNS + bucket(turn)) as u8)
    }

    /// The class of a session's own blocks.
    pub(super) fn session(&mut self, turn: &ConversationTurn) -> ReuseClass {
        let (kind, bucket) = (turn.kind as usize, bucket(turn.turn));
        let coarse = Self::coarse(turn.kind, turn.turn);
        let finer = self.finer_class(turn, bucket);
        let class = &mut self.finer[kind][bucket][finer];
        if *class == 0 {
            if self.meanings.len() == SHARED_AT {
                return coarse;
            }
            *class = self.meanings.len() as u8;
            self.meanings.push(ClassMeaning::Session(kind, bucket, Some(finer)));
        }
        ReuseClass(*class)
    }

    /// Distinguishes first turns by length, later ones by the share of new blocks and by pace.
    fn finer_class(&mut self, turn: &ConversationTurn, bucket: usize) -> usize {
        if bucket == 0 {
            let above = self.mean_size[turn.kind as usize].deviation(log_count(turn.new_blocks));
            return match above {
                ..-12 => 0,
                -12..0 => 1,
                0..12 => 2,
                12.. => 3,
            };
        }
        let is_fast = match turn.pace {
            Some(pace) => self.mean_pace[turn.kind as usize].deviation(pace) < -OCTAVE,
            None => false,
        };
        let share = match (turn.new_blocks, turn.blocks) {
            (new, blocks) if new * 8 < blocks => 0,
            (new, blocks) if new * 4 < blocks => 1,
            _ => 2,
        };
        share * 2 + usize::from(is_fast)
    }

    /// Number of assigned classes, without the shared ones.
    pub(super) fn assigned(&self) -> usize {
        self.meanings.len()
    }

    /// The meaning of each class.
    pub(super) fn meanings(&self) -> [ClassMeaning; CLASSES] {
        std::array::from_fn(|class| match class.checked_sub(SHARED_AT) {
            Some(pace) => ClassMeaning::Shared(pace),
            None => self.meanings.get(class).copied().unwrap_or(ClassMeaning::Arriving),
        })
    }
}

fn bucket(turn: u8) -> usize {
    match turn {
        0 | 1 => 0,
        2 => 1,
        3 | 4 => 2,
        _ => 3,
    }
}
