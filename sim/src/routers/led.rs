//! The production scheduler with what it decided written down, led by another fleet where that is asked for.
//!
//! Two fleets that decide once otherwise hold other blocks from then on, and each later difference may be of that alone. A fleet that is led sends every
//! request where the other one did and says where it would have sent it: what then differs is of this decision. Not here: the other fleet.

use kv_core::id::InstanceId;
use kv_core::schedule::{Decision, Eligible, choose, choose_among};

use super::{PRODUCTION, Route, Router};
use crate::fleet::{Ask, View};

/// See the file.
#[derive(Debug, Default)]
pub struct Led {
    /// Where the other fleet sent each request; nothing where it goes its own way.
    to: Vec<Option<InstanceId>>,
    /// What it decided of each, by number; nothing where nobody could take it.
    pub decided: Vec<Option<Decision>>,
}

impl Led {
    /// The scheduler alone.
    #[must_use]
    pub fn alone() -> Led {
        Led::default()
    }

    /// Led to these instances, by number of the request.
    #[must_use]
    pub fn to(to: Vec<Option<InstanceId>>) -> Led {
        Led { to, decided: Vec::new() }
    }
}

impl Router for Led {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let own = choose(&ask.request, ask.held(), &view.fleet, ask.now).ok();
        let nth = usize::try_from(ask.request.request.0).unwrap_or(usize::MAX);
        if self.decided.len() <= nth {
            self.decided.resize_with(nth + 1, || None);
        }
        self.decided[nth].clone_from(&own);
        let led = self.to.get(nth).copied().flatten();
        let Some(there) = led.filter(|there| own.as_ref().is_none_or(|own| own.instance != *there)) else {
            return own.map_or(Route::Reject, Route::To);
        };
        // It runs there, whatever is thought of that.
        let among = [there];
        let eligible = Eligible { among: Some(&among), runs_there: true, ..Eligible::default() };
        choose_among(&ask.request, ask.held(), eligible, &view.fleet, ask.now)
            .map_or(Route::Reject, Route::To)
    }
}
