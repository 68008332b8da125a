//! Structs and constants of `infiniband/verbs.h` that are used here: the stable ABI of
//! libibverbs.so.1.
//!
//! Only fields that this crate reads or writes have names; the gaps are words of the same length. A
//! test compares sizes and offsets with the header if a C compiler and the header are present. Not
//! here: calls (`verbs.rs`).

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Types that only the library looks into.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $($(#[$doc])*
        #[repr(C)]
        pub(super) struct $name { _private: [u8; 0] })*
    };
}

opaque!(
    /// A device that can be opened.
    Device,
    /// A protection domain.
    Pd,
    /// An open device's event channel; not used.
    CompletionChannel,
);

/// An open device.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut Device,
    pub(super) ops: ContextOps,
}

/// Functions of a device's driver that are called without the library.
#[repr(C)]
pub(super) struct ContextOps {
    _before_poll: [*const c_void; 11],
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    _between: [*const c_void; 13],
    pub(super) post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    _after: [*const c_void; 6],
}

/// A completion queue; further fields follow.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
}

/// A queue pair; further fields follow.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    _before: [*const c_void; 5],
    _handle: u32,
    pub(super) qp_num: u32,
}

/// Registered memory.
#[repr(C)]
pub(super) struct Mr {
    _before: [*const c_void; 2],
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    _handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// A piece of local memory.
#[repr(C)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// A transfer request. The header has unions here; these are the members for one-sided transfers.
#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    pub(super) imm_data: u32,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    /// The rest of the unions.
    pub(super) _rest: [u64; 9],
}

/// Completion of a transfer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    pub(super) opcode: c_uint,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    pub(super) _rest: [u32; 6],
}

impl Wc {
    pub(super) const NONE: Wc =
        Wc { wr_id: 0, status: 0, opcode: 0, vendor_err: 0, byte_len: 0, _rest: [0; 6] };
}

/// Capacity of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// Attributes of a new queue pair.
#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) cap: QpCap,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
}

/// Destination of packets.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AhAttr {
    pub(super) dgid: [u64; 2],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

/// Changes to a queue pair; a mask selects the fields that count.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_uint,
    pub(super) cur_qp_state: c_uint,
    pub(super) path_mtu: c_uint,
    pub(super) path_mig_state: c_uint,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// A port's attributes as the exported `ibv_query_port` fills them; later headers append to it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PortAttr {
    pub(super) state: c_uint,
    pub(super) max_mtu: c_uint,
    pub(super) active_mtu: c_uint,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    pub(super) bad_pkey_cntr: u32,
    pub(super) qkey_viol_cntr: u32,
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) lmc: u8,
    pub(super) max_vl_num: u8,
    pub(super) sm_sl: u8,
    pub(super) subnet_timeout: u8,
    pub(super) init_type_reply: u8,
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    pub(super) phys_state: u8,
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    pub(super) port_cap_flags2: u16,
    /// Space for fields that a later library may append.
    pub(super) _later: [u32; 4],
}

pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub(super) const ACCESS_REMOTE_READ: c_int = 1 << 2;

pub(super) const QPT_RC: c_uint = 2;
pub(super) const QPS_INIT: c_uint = 1;
pub(super) const QPS_RTR: c_uint = 2;
pub(super) const QPS_RTS: c_uint = 3;

pub(super) const QP_STATE: c_int = 1;
pub(super) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(super) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(super) const QP_PORT: c_int = 1 << 5;
pub(super) const QP_AV: c_int = 1 << 7;
pub(super) const QP_PATH_MTU: c_int = 1 << 8;
/// Mask bit of the acknowledgement timeout, not the timeout itself.
pub(super) const QP_TIMEOUT: c_int = 1 << 9;
pub(super) const QP_RETRY_CNT: c_int = 1 << 10;
pub(super) const QP_RNR_RETRY: c_int = 1 << 11;
pub(super) const QP_RQ_PSN: c_int = 1 << 12;
pub(super) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(super) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(super) const QP_SQ_PSN: c_int = 1 << 16;
pub(super) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(super) const QP_DEST_QPN: c_int = 1 << 20;

pub(super) const WR_RDMA_WRITE: c_uint = 0;
pub(super) const WR_RDMA_READ: c_uint = 4;
pub(super) const SEND_SIGNALED: c_uint = 1 << 1;

/// Result of [`IsForkInitialized`] if the kernel copies pinned pages for children.
pub(super) const FORK_UNNEEDED: c_int = 2;

pub(super) type GetDeviceList = unsafe extern "C" fn(*mut c_int) -> *mut *mut Device;
pub(super) type FreeDeviceList = unsafe extern "C" fn(*mut *mut Device);
pub(super) type GetDeviceName = unsafe extern "C" fn(*mut Device) -> *const c_char;
pub(super) type OpenDevice = unsafe extern "C" fn(*mut Device) -> *mut Context;
pub(super) type CloseDevice = unsafe extern "C" fn(*mut Context) -> c_int;
pub(super) type QueryPort = unsafe extern "C" fn(*mut Context, u8, *mut PortAttr) -> c_int;
pub(super) type AllocPd = unsafe extern "C" fn(*mut Context) -> *mut Pd;
pub(super) type DeallocPd = unsafe extern "C" fn(*mut Pd) -> c_int;
pub(super) type RegMr = unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
/// In libraries from 2021 on.
pub(super) type RegDmabufMr = unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;
pub(super) type DeregMr = unsafe extern "C" fn(*mut Mr) -> c_int;
pub(super) type CreateCq =
    unsafe extern "C" fn(*mut Context, c_int, *mut c_void, *mut CompletionChannel, c_int) -> *mut Cq;
pub(super) type DestroyCq = unsafe extern "C" fn(*mut Cq) -> c_int;
pub(super) type CreateQp = unsafe extern "C" fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
pub(super) type ModifyQp = unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
pub(super) type IsForkInitialized = unsafe extern "C" fn() -> c_int;
pub(super) type ForkInit = unsafe extern "C" fn() -> c_int;
pub(super) type DestroyQp = unsafe extern "C" fn(*mut Qp) -> c_int;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::mem::{offset_of, size_of};
    use std::process::Command;

    use super::*;

    /// One entry per size, offset or constant, by the header's own names.
    fn own_layouts() -> Vec<(&'static str, usize)> {
        vec![
            ("sizeof(struct ibv_wc)", size_of::<Wc>()),
            ("offsetof(struct ibv_wc, status)", offset_of!(Wc, status)),
            ("offsetof(struct ibv_wc, wr_id)", offset_of!(Wc, wr_id)),
            ("offsetof(struct ibv_wc, byte_len)", offset_of!(Wc, byte_len)),
            ("sizeof(struct ibv_sge)", size_of::<Sge>()),
            ("offsetof(struct ibv_sge, length)", offset_of!(Sge, length)),
            ("offsetof(struct ibv_sge, lkey)", offset_of!(Sge, lkey)),
            ("sizeof(struct ibv_send_wr)", size_of::<SendWr>()),
            ("offsetof(struct ibv_send_wr, wr_id)", offset_of!(SendWr, wr_id)),
            ("offsetof(struct ibv_send_wr, next)", offset_of!(SendWr, next)),
            ("offsetof(struct ibv_send_wr, num_sge)", offset_of!(SendWr, num_sge)),
            ("offsetof(struct ibv_send_wr, sg_list)", offset_of!(SendWr, sg_list)),
            ("offsetof(struct ibv_send_wr, opcode)", offset_of!(SendWr, opcode)),
            ("offsetof(struct ibv_send_wr, send_flags)", offset_of!(SendWr, send_flags)),
            ("offsetof(struct ibv_send_wr, wr.rdma.remote_addr)", offset_of!(SendWr, remote_addr)),
            ("offsetof(struct ibv_send_wr, wr.rdma.rkey)", offset_of!(SendWr, rkey)),
            ("sizeof(struct ibv_qp_init_attr)", size_of::<QpInitAttr>()),
            ("offsetof(struct ibv_qp_init_attr, send_cq)", offset_of!(QpInitAttr, send_cq)),
            ("offsetof(struct ibv_qp_init_attr, recv_cq)", offset_of!(QpInitAttr, recv_cq)),
            ("offsetof(struct ibv_qp_init_attr, sq_sig_all)", offset_of!(QpInitAttr, sq_sig_all)),
            ("sizeof(struct ibv_qp_cap)", size_of::<QpCap>()),
            ("offsetof(struct ibv_qp_cap, max_send_wr)", offset_of!(QpCap, max_send_wr)),
            ("offsetof(struct ibv_qp_cap, max_send_sge)", offset_of!(QpCap, max_send_sge)),
            ("offsetof(struct ibv_qp_init_attr, cap)", offset_of!(QpInitAttr, cap)),
            ("offsetof(struct ibv_qp_init_attr, qp_type)", offset_of!(QpInitAttr, qp_type)),
            ("sizeof(struct ibv_ah_attr)", size_of::<AhAttr>()),
            ("offsetof(struct ibv_ah_attr, grh.sgid_index)", offset_of!(AhAttr, sgid_index)),
            ("offsetof(struct ibv_ah_attr, grh.hop_limit)", offset_of!(AhAttr, hop_limit)),
            ("offsetof(struct ibv_ah_attr, grh.dgid)", offset_of!(AhAttr, dgid)),
            ("offsetof(struct ibv_ah_attr, grh.traffic_class)", offset_of!(AhAttr, traffic_class)),
            ("offsetof(struct ibv_ah_attr, dlid)", offset_of!(AhAttr, dlid)),
            ("offsetof(struct ibv_ah_attr, is_global)", offset_of!(AhAttr, is_global)),
            ("offsetof(struct ibv_ah_attr, port_num)", offset_of!(AhAttr, port_num)),
            ("sizeof(struct ibv_qp_attr)", size_of::<QpAttr>()),
            ("offsetof(struct ibv_qp_attr, path_mtu)", offset_of!(QpAttr, path_mtu)),
            ("offsetof(struct ibv_qp_attr, qp_state)", offset_of!(QpAttr, qp_state)),
            ("offsetof(struct ibv_qp_attr, sq_psn)", offset_of!(QpAttr, sq_psn)),
            ("offsetof(struct ibv_qp_attr, pkey_index)", offset_of!(QpAttr, pkey_index)),
            ("offsetof(struct ibv_qp_attr, max_dest_rd_atomic)", offset_of!(QpAttr, max_dest_rd_atomic)),
            ("offsetof(struct ibv_qp_attr, min_rnr_timer)", offset_of!(QpAttr, min_rnr_timer)),
            ("offsetof(struct ibv_qp_attr, timeout)", offset_of!(QpAttr, timeout)),
            ("offsetof(struct ibv_qp_attr, retry_cnt)", offset_of!(QpAttr, retry_cnt)),
            ("offsetof(struct ibv_qp_attr, rq_psn)", offset_of!(QpAttr, rq_psn)),
            ("offsetof(struct ibv_qp_attr, dest_qp_num)", offset_of!(QpAttr, dest_qp_num)),
            ("offsetof(struct ibv_qp_attr, qp_access_flags)", offset_of!(QpAttr, qp_access_flags)),
            ("offsetof(struct ibv_qp_attr, ah_attr)", offset_of!(QpAttr, ah_attr)),
            ("offsetof(struct ibv_qp_attr, max_rd_atomic)", offset_of!(QpAttr, max_rd_atomic)),
            ("offsetof(struct ibv_qp_attr, port_num)", offset_of!(QpAttr, port_num)),
            ("offsetof(struct ibv_qp_attr, rnr_retry)", offset_of!(QpAttr, rnr_retry)),
            ("offsetof(struct ibv_context, ops)", offset_of!(Context, ops)),
            ("sizeof(struct ibv_context_ops)", size_of::<ContextOps>()),
            ("offsetof(struct ibv_context_ops, poll_cq)", offset_of!(ContextOps, poll_cq)),
            ("offsetof(struct ibv_context_ops, post_send)", offset_of!(ContextOps, post_send)),
            ("offsetof(struct ibv_cq, context)", offset_of!(Cq, context)),
            ("offsetof(struct ibv_qp, context)", offset_of!(Qp, context)),
            ("offsetof(struct ibv_qp, qp_num)", offset_of!(Qp, qp_num)),
            ("offsetof(struct ibv_mr, addr)", offset_of!(Mr, addr)),
            ("offsetof(struct ibv_mr, length)", offset_of!(Mr, length)),
            ("offsetof(struct ibv_mr, lkey)", offset_of!(Mr, lkey)),
            ("offsetof(struct ibv_mr, rkey)", offset_of!(Mr, rkey)),
            ("offsetof(struct ibv_port_attr, active_mtu)", offset_of!(PortAttr, active_mtu)),
            ("offsetof(struct ibv_port_attr, lid)", offset_of!(PortAttr, lid)),
            ("offsetof(struct ibv_port_attr, link_layer)", offset_of!(PortAttr, link_layer)),
            ("IBV_ACCESS_REMOTE_READ", ACCESS_REMOTE_READ as usize),
            ("IBV_ACCESS_REMOTE_WRITE", ACCESS_REMOTE_WRITE as usize),
            ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE as usize),
            ("IBV_QPT_RC", QPT_RC as usize),
            ("IBV_QPS_INIT", QPS_INIT as usize),
            ("IBV_QPS_RTR", QPS_RTR as usize),
            ("IBV_QPS_RTS", QPS_RTS as usize),
            ("IBV_QP_STATE", QP_STATE as usize),
            ("IBV_QP_ACCESS_FLAGS", QP_ACCESS_FLAGS as usize),
            ("IBV_QP_PKEY_INDEX", QP_PKEY_INDEX as usize),
            ("IBV_QP_PORT", QP_PORT as usize),
            ("IBV_QP_AV", QP_AV as usize),
            ("IBV_QP_PATH_MTU", QP_PATH_MTU as usize),
            ("IBV_QP_TIMEOUT", QP_TIMEOUT as usize),
            ("IBV_QP_RETRY_CNT", QP_RETRY_CNT as usize),
            ("IBV_QP_RNR_RETRY", QP_RNR_RETRY as usize),
            ("IBV_QP_RQ_PSN", QP_RQ_PSN as usize),
            ("IBV_QP_DEST_QPN", QP_DEST_QPN as usize),
            ("IBV_QP_MAX_QP_RD_ATOMIC", QP_MAX_QP_RD_ATOMIC as usize),
            ("IBV_QP_MAX_DEST_RD_ATOMIC", QP_MAX_DEST_RD_ATOMIC as usize),
            ("IBV_QP_MIN_RNR_TIMER", QP_MIN_RNR_TIMER as usize),
            ("IBV_QP_SQ_PSN", QP_SQ_PSN as usize),
            ("IBV_WR_RDMA_WRITE", WR_RDMA_WRITE as usize),
            ("IBV_WR_RDMA_READ", WR_RDMA_READ as usize),
            ("IBV_SEND_SIGNALED", SEND_SIGNALED as usize),
        ]
    }

    #[test]
    fn layouts_match_the_header() {
        let facts: String =
            own_layouts().iter().map(|(name, _)| format!("printf(\"%zu\\n\", (size_t)({name}));")).collect();
        let program = format!(
            "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void){{{facts}return 0;}}"
        );
        let folder = tempfile::tempdir().unwrap();
        let (source, binary) = (folder.path().join("facts.c"), folder.path().join("facts"));
        std::fs::write(&source, program).unwrap();
        let header = "/usr/include/infiniband/verbs.h";
        if !std::path::Path::new(header).exists() {
            return println!("skipped: {header} is not there (package libibverbs-dev)");
        }
        let Ok(compiled) = Command::new("cc").arg(&source).arg("-o").arg(&binary).status() else {
            return println!("skipped: no C compiler");
        };
        assert!(compiled.success(), "the header must still have all these names");
        let said = String::from_utf8(Command::new(&binary).output().unwrap().stdout).unwrap();
        let theirs: Vec<usize> = said.lines().map(|line| line.parse().unwrap()).collect();
        for ((name, ours), theirs) in own_layouts().into_iter().zip(&theirs) {
            assert_eq!(ours, *theirs, "{name}");
        }
        assert_eq!(theirs.len(), own_layouts().len());
    }
}
