//! Which blocks are judged together: a class is a role, and for blocks of one session what is known of it.
//!
//! Every class has one queue, one set of hazards and one table, so their number bounds the cost of a victim.
//! Not here: what is known of a class ([`super::hazard`]) and who finds out a block's role ([`super`]).

use crate::evict::statistics::Role;
use crate::id::RequestKind;

/// Number of classes, used or not. A victim compares the heads of all.
pub(super) const CLASSES: usize = 64;
/// Turns told apart: first, second, third and fourth, later.
pub(super) const TURNS: usize = 4;
/// Paces of shared blocks told apart.
const SHARED_PACES: usize = 8;
pub(super) const KINDS: usize = RequestKind::ALL.len();
/// Finer classes of one kind and turn.
const FINER: usize = 6;
/// First class of blocks of one session by kind and turn, of shared blocks, and of those that are made on demand.
const SESSIONS_AT: usize = 2;
const FINER_AT: usize = SESSIONS_AT + KINDS * TURNS;
/// Last, so that of equals what sessions share stays.
pub(super) const SHARED_AT: usize = CLASSES - SHARED_PACES;
/// A step of [`log_span`] and [`log_count`]: an eighth of an octave.
const OCTAVE: i32 = 8;

/// Number of a class, below [`CLASSES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Class(pub(super) u8);

impl Class {
    /// Partly filled tails: only the same prompt again uses one.
    pub(super) const PARTIAL: Class = Class(0);
    /// Blocks whose request has not ended yet.
    pub(super) const ARRIVING: Class = Class(1);

    pub(super) fn at(self) -> usize {
        usize::from(self.0) % CLASSES
    }
}

/// Logarithm to base 2 of a span, in eighths of an octave of 1.024 ms: what a pace is written in.
pub(super) fn log_span(span_us: u64) -> u8 {
    log_count(u32::try_from(span_us >> 10).unwrap_or(u32::MAX))
}

/// Logarithm to base 2 in eighths; that of 0 is 0.
fn log_count(count: u32) -> u8 {
    let octave = count.checked_ilog2().unwrap_or(0);
    let eighth = (u64::from(count) << 3 >> octave & 7) as u32;
    (octave * 8 + eighth) as u8
}

/// What a class stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// [`Class::PARTIAL`].
    Partial,
    /// [`Class::ARRIVING`].
    Arriving,
    /// Kind and turn bucket, and the number of the finer class where there is one.
    Session(usize, usize, Option<usize>),
    /// Pace bucket.
    Shared(usize),
}

impl Meaning {
    /// What it is called on every node; nothing for what has no meaning of its own.
    pub(super) fn role(self) -> Option<Role> {
        match self {
            Meaning::Partial => Some(Role::Partial),
            Meaning::Arriving => None,
            Meaning::Shared(pace) => Some(Role::Shared(pace as u8)),
            Meaning::Session(kind, turn, finer) => {
                let kind = *RequestKind::ALL.get(kind)?;
                Some(Role::Session(kind, turn as u8, finer.map(|finer| finer as u8)))
            }
        }
    }

    /// What a role of the fleet is here.
    pub(super) fn of(role: Role) -> Option<Meaning> {
        match role {
            Role::Partial => Some(Meaning::Partial),
            Role::Shared(pace) => Some(Meaning::Shared(usize::from(pace))),
            Role::Session(kind, turn, finer) => {
                Some(Meaning::Session(kind as usize, usize::from(turn), finer.map(usize::from)))
            }
            Role::Paper(..) => None,
        }
    }
}

/// What a request says of the session it belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) kind: RequestKind,
    /// From 1.
    pub(super) turn: u8,
    /// Blocks of the request, and how many of them no request before had.
    pub(super) blocks: u32,
    pub(super) new: u32,
    /// Mean logarithm of the times between the session's turns.
    pub(super) pace: Option<u8>,
    /// It goes another way than the request before that used the same blocks: sessions share them.
    pub(super) forks: bool,
}

/// A running mean, in 1/256 of an eighth of an octave: what is usual.
#[derive(Clone, Copy, Debug, Default)]
struct Usual(Option<i32>);

impl Usual {
    /// Eighths of octaves by which a value is above what was usual until now.
    fn above(&mut self, value: u8) -> i32 {
        let value = i32::from(value) << 8;
        let mean = self.0.get_or_insert(value);
        let above = value - *mean;
        *mean += above / 64;
        above >> 8
    }
}

/// Gives out classes. Finer ones are made when first seen, as long as there are any left.
#[derive(Clone, Debug)]
pub(super) struct Classes {
    finer: [[[u8; FINER]; TURNS]; KINDS],
    meanings: Vec<Meaning>,
    usual_size: [Usual; KINDS],
    usual_pace: [Usual; KINDS],
}

impl Default for Classes {
    fn default() -> Self {
        let mut meanings = vec![Meaning::Partial, Meaning::Arriving];
        for kind in 0..KINDS {
            meanings.extend((0..TURNS).map(|turn| Meaning::Session(kind, turn, None)));
        }
        debug_assert_eq!(meanings.len(), FINER_AT);
        Classes {
            finer: [[[0; FINER]; TURNS]; KINDS],
            meanings,
            usual_size: [Usual::default(); KINDS],
            usual_pace: [Usual::default(); KINDS],
        }
    }
}

impl Classes {
    /// The class of blocks shared by sessions and used at this pace.
    pub(super) fn shared(pace: u8) -> Class {
        let bucket = (usize::from(pace >> 3).saturating_sub(6) / 2).min(SHARED_PACES - 1);
        Class((SHARED_AT + bucket) as u8)
    }

    /// The class by kind and turn.
    pub(super) fn coarse(kind: RequestKind, turn: u8) -> Class {
        Class((SESSIONS_AT + kind as usize * TURNS + bucket(turn)) as u8)
    }

    /// The class of the blocks a session has for itself.
    pub(super) fn session(&mut self, turn: &Turn) -> Class {
        let (kind, bucket) = (turn.kind as usize, bucket(turn.turn));
        let coarse = Self::coarse(turn.kind, turn.turn);
        let finer = self.finer_of(turn, bucket);
        let class = &mut self.finer[kind][bucket][finer];
        if *class == 0 {
            if self.meanings.len() == SHARED_AT {
                return coarse;
            }
            *class = self.meanings.len() as u8;
            self.meanings.push(Meaning::Session(kind, bucket, Some(finer)));
        }
        Class(*class)
    }

    /// First turns are told apart by how long they are, later ones by how much is new and how fast they came.
    fn finer_of(&mut self, turn: &Turn, bucket: usize) -> usize {
        if bucket == 0 {
            let above = self.usual_size[turn.kind as usize].above(log_count(turn.new));
            return match above {
                ..-12 => 0,
                -12..0 => 1,
                0..12 => 2,
                12.. => 3,
            };
        }
        let is_fast = match turn.pace {
            Some(pace) => self.usual_pace[turn.kind as usize].above(pace) < -OCTAVE,
            None => false,
        };
        let share = match (turn.new, turn.blocks) {
            (new, blocks) if new * 8 < blocks => 0,
            (new, blocks) if new * 4 < blocks => 1,
            _ => 2,
        };
        share * 2 + usize::from(is_fast)
    }

    /// Classes given out so far, without the shared ones.
    pub(super) fn given_out(&self) -> usize {
        self.meanings.len()
    }

    /// What each class stands for.
    pub(super) fn meanings(&self) -> [Meaning; CLASSES] {
        std::array::from_fn(|class| match class.checked_sub(SHARED_AT) {
            Some(pace) => Meaning::Shared(pace),
            None => self.meanings.get(class).copied().unwrap_or(Meaning::Arriving),
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
