//! The access table: every call of every service, with the roles that may make it and its deadline.
//!
//! A call without a row is refused. A test compares the rows with the protocol files, and another
//! makes every call with every role. A call with a new name changes its protocol file and this
//! table in one commit. Not here: enforcement (`mod.rs`), and the numbers that `Own` compares
//! (`callers.rs`, and each handler).

use super::{Access, CallRule, Deadline, Guard};

use Access::{Allow as YES, Deny as NO, Limited as PART, Own as OWN};

/// A call that must be answered within the common deadline. The roles are those of
/// [`RoleKind::ALL`](super::RoleKind::ALL): router, node, instance, frontend, admin, tenant.
const fn call(path: &'static str, roles: [Access; 6]) -> CallRule {
    CallRule { path, guard: Guard::Roles(roles), deadline: Deadline::Common }
}

/// A call with limits of its own: it moves blocks or snapshots, or waits for others.
const fn long_call(path: &'static str, roles: [Access; 6]) -> CallRule {
    CallRule { path, guard: Guard::Roles(roles), deadline: Deadline::OfHandler }
}

/// A call at a port where callers need no certificate of the cluster.
const fn port_call(path: &'static str) -> CallRule {
    CallRule { path, guard: Guard::Port, deadline: Deadline::OfHandler }
}

/// All calls.
#[rustfmt::skip]
pub const TABLE: &[CallRule] = &[
    //                                                     router node instance frontend admin tenant
    call("/kvfleet.v1.Router/Route",                       [NO,   NO,   YES,  YES,  YES,  OWN]),
    call("/kvfleet.v1.Router/RouteStream",                 [NO,   NO,   YES,  YES,  YES,  OWN]),
    call("/kvfleet.v1.Router/Lookup",                      [NO,   NO,   YES,  YES,  YES,  YES]),
    call("/kvfleet.v1.Router/Report",                      [NO,   NO,   OWN,  NO,   NO,   NO]),
    call("/kvfleet.v1.Router/ReportResidency",             [NO,   NO,   OWN,  NO,   NO,   NO]),
    call("/kvfleet.v1.Router/AdmitDecode",                 [NO,   NO,   OWN,  YES,  NO,   NO]),
    call("/kvfleet.v1.Router/Why",                         [NO,   NO,   NO,   OWN,  YES,  NO]),
    call("/kvfleet.v1.Router/Status",                      [NO,   PART, PART, PART, YES,  NO]),
    call("/kvfleet.v1.Router/Join",                        [NO,   OWN,  NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.Router/Announce",                    [NO,   OWN,  NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.Router/Pin",                         [NO,   NO,   NO,   NO,   YES,  NO]),
    call("/kvfleet.v1.Router/Unpin",                       [NO,   NO,   NO,   NO,   YES,  NO]),
    call("/kvfleet.v1.Router/SetQuota",                    [NO,   NO,   NO,   NO,   YES,  NO]),
    call("/kvfleet.v1.Router/SetTtl",                      [NO,   NO,   NO,   NO,   YES,  NO]),
    call("/kvfleet.v1.Router/SetGeneration",               [NO,   NO,   NO,   NO,   YES,  NO]),
    call("/kvfleet.v1.Router/Leave",                       [NO,   OWN,  NO,   NO,   YES,  NO]),
    long_call("/kvfleet.v1.Router/Drain",                  [NO,   OWN,  NO,   NO,   NO,   NO]),
    long_call("/kvfleet.v1.Router/ChangeMember",           [NO,   NO,   NO,   NO,   YES,  NO]),
    long_call("/kvfleet.v1.Router/TransferLead",           [NO,   NO,   NO,   NO,   YES,  NO]),

    call("/kvfleet.v1.Raft/Handshake",                     [YES,  NO,   NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.Raft/ReadIndex",                     [YES,  NO,   NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.Raft/Append",                        [OWN,  NO,   NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.Raft/AppendStream",                  [OWN,  NO,   NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.Raft/Vote",                          [OWN,  NO,   NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.Raft/PreVote",                       [OWN,  NO,   NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.Raft/TransferLeader",                [OWN,  NO,   NO,   NO,   NO,   NO]),
    long_call("/kvfleet.v1.Raft/Snapshot",                 [OWN,  NO,   NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.Raft/Compare",                       [OWN,  NO,   NO,   NO,   NO,   NO]),
    long_call("/kvfleet.v1.Raft/State",                    [YES,  NO,   NO,   NO,   NO,   NO]),

    call("/kvfleet.v1.NodeControl/NodeStatus",             [YES,  NO,   NO,   NO,   YES,  NO]),
    long_call("/kvfleet.v1.NodeControl/Flush",             [NO,   NO,   NO,   NO,   YES,  NO]),
    call("/kvfleet.v1.NodeControl/Audit",                  [YES,  NO,   NO,   NO,   NO,   NO]),
    call("/kvfleet.v1.NodeControl/SetWindow",              [OWN,  NO,   NO,   NO,   NO,   NO]),
    long_call("/kvfleet.v1.NodeControl/CopyBlocks",        [YES,  NO,   NO,   NO,   NO,   NO]),

    long_call("/kvfleet.v1.Instance/Run",                  [NO,   NO,   NO,   YES,  YES,  OWN]),
    call("/kvfleet.v1.Instance/InstanceStatus",            [NO,   NO,   NO,   NO,   YES,  NO]),

    long_call("data/Fetch",                                [NO,   YES,  YES,  NO,   NO,   OWN]),
    long_call("data/Release",                              [NO,   YES,  YES,  NO,   NO,   OWN]),
    long_call("data/Save",                                 [NO,   NO,   YES,  NO,   NO,   OWN]),
    long_call("data/Ping",                                 [YES,  YES,  YES,  YES,  YES,  YES]),
    long_call("data/Attach",                               [NO,   YES,  YES,  NO,   NO,   PART]),

    port_call("/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    port_call("/grpc.health.v1.Health/Check"),
    port_call("/grpc.health.v1.Health/Watch"),
];
