//! The caller of a control call, by the role in its certificate.
//!
//! The access table says which roles may make a call (`access/`). The methods here compare the
//! number or tenant that a message names with the certificate's: handlers use them for calls that
//! the table marks as own. Not here: authorisation on the block path (`node/src/block_service.rs`).

use kv_core::id::{InstanceId, NodeId, RouterId, TenantId};
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use tonic::{Extensions, Status};

use super::{Role, RoleKind, role_of};

/// The caller of a control call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    role: Role,
}

/// What the limits of one caller count together: the calls of one process, of all processes that
/// share a certificate, or of one tenant, whatever certificates it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallerShare {
    kind: RoleKind,
    number: Option<u64>,
}

impl Caller {
    /// A caller with this role; for calls inside a process.
    #[must_use]
    pub fn new(role: Role) -> Caller {
        Caller { role }
    }

    /// Its role.
    #[must_use]
    pub fn role(&self) -> &Role {
        &self.role
    }

    /// The caller of this call, as the access check found it.
    ///
    /// # Errors
    /// `PermissionDenied` if the service has no access check, so that a missing check is no
    /// permission.
    pub fn from_extensions(extensions: &Extensions) -> Result<Caller, Status> {
        let caller = extensions.get::<Caller>().cloned();
        caller.ok_or_else(|| {
            Status::permission_denied("this service does not check access: report this defect")
        })
    }

    /// The caller of this call, by the certificate that the handshake verified.
    ///
    /// # Errors
    /// `PermissionDenied` for a caller without a certificate, or with invalid names in it.
    pub(super) fn from_connection(extensions: &Extensions) -> Result<Caller, Status> {
        let chain = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().and_then(TlsConnectInfo::peer_certs);
        let leaf = chain.as_ref().and_then(|chain| chain.first());
        let leaf =
            leaf.ok_or_else(|| Status::permission_denied("this call needs a certificate of the cluster"))?;
        let role = role_of(leaf).map_err(|error| {
            Status::permission_denied(format!("this certificate is not accepted: {error}; issue a new one"))
        })?;
        Ok(Caller { role })
    }

    /// Requires that a node may act as this one. Roles without node numbers pass: the access table
    /// admitted them.
    ///
    /// # Errors
    /// `PermissionDenied` for another node.
    pub fn require_node(&self, node: NodeId) -> Result<(), Status> {
        self.require(&Role::Node(Some(node)))
    }

    /// Requires that an instance may act as this one. Roles without instance numbers pass.
    ///
    /// # Errors
    /// `PermissionDenied` for another instance.
    pub fn require_instance(&self, instance: InstanceId) -> Result<(), Status> {
        self.require(&Role::Instance(Some(instance)))
    }

    /// Requires that a router may act as this one. Roles without router numbers pass.
    ///
    /// # Errors
    /// `PermissionDenied` for another router.
    pub fn require_router(&self, router: RouterId) -> Result<(), Status> {
        self.require(&Role::Router(Some(router)))
    }

    fn require(&self, named: &Role) -> Result<(), Status> {
        if self.role.kind() != named.kind() || self.role.may_be(named) {
            return Ok(());
        }
        Err(Status::permission_denied(format!(
            "the call names {named}, and this certificate is one of {}: name the certificate's own number, or use a \
             certificate with the name {:?}",
            self.role,
            named.name()
        )))
    }

    /// Requires permission to act for this tenant.
    ///
    /// # Errors
    /// `PermissionDenied` without it.
    pub fn require_tenant(&self, tenant: TenantId) -> Result<(), Status> {
        match &self.role {
            Role::Tenants(tenants) if !tenants.contains(&tenant) => Err(Status::permission_denied(format!(
                "the call names {tenant}, and this certificate is one of {}: name another tenant, or use \
                 that one's certificate",
                self.role
            ))),
            _ => Ok(()),
        }
    }

    /// The share that this caller's calls count towards.
    #[must_use]
    pub fn share(&self) -> CallerShare {
        let number = match &self.role {
            Role::Router(router) => router.map(|router| router.0),
            Role::Node(node) => node.map(|node| node.0.into()),
            Role::Instance(instance) => instance.map(|instance| instance.0.into()),
            Role::Frontend | Role::Admin => None,
            Role::Tenants(_) => self.share_tenant().map(|tenant| tenant.0.into()),
        };
        CallerShare { kind: self.role.kind(), number }
    }

    /// The tenant that this call is charged to: the lowest in the certificate, so that more names
    /// or more certificates give no larger share. `None` for the cluster's own processes.
    #[must_use]
    pub fn share_tenant(&self) -> Option<TenantId> {
        match &self.role {
            Role::Tenants(tenants) => tenants.first().copied(),
            _ => None,
        }
    }
}
