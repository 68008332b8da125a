//! Messages between Envoy and an endpoint picker (`envoy.service.ext_proc.v3`), in Envoy's own
//! packages.
//!
//! Holds only the messages and fields that a picker needs, to keep Envoy's many other interfaces
//! out of the build. Not here: the answers (`gateway/src/picker/`).

#![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]

pub use config::core::v3 as base;
pub use extensions::filters::http::ext_proc::v3 as mode;
pub use prost_types as well_known;
pub use service::ext_proc::v3 as ext_proc;
pub use r#type::v3 as status;

// The generated code names types of other packages by their path from here.
pub mod config {
    pub mod core {
        pub mod v3 {
            tonic::include_proto!("envoy.config.core.v3");
        }
    }
}
pub mod r#type {
    pub mod v3 {
        tonic::include_proto!("envoy.r#type.v3");
    }
}
pub mod extensions {
    pub mod filters {
        pub mod http {
            pub mod ext_proc {
                pub mod v3 {
                    tonic::include_proto!("envoy.extensions.filters.http.ext_proc.v3");
                }
            }
        }
    }
}
pub mod service {
    pub mod ext_proc {
        pub mod v3 {
            tonic::include_proto!("envoy.service.ext_proc.v3");
        }
    }
}
