//! The production scheduler itself, as routers run it.
//!
//! Not here: the scheduler (`kv_core::schedule`).

use kv_core::schedule::choose;

use super::{PRODUCTION, Route, Router};
use crate::fleet::{Ask, View};

/// See the file.
pub(super) struct Production;

impl Router for Production {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        choose(&ask.request, ask.held(), &view.fleet, ask.now).map_or(Route::Reject, Route::To)
    }
}
