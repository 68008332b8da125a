//! Generates Rust code from `proto/*.proto` with protox, so that no protoc has to be installed.

use std::error::Error;

/// The files to compile; their imports are found beside them.
const FILES: [&str; 6] =
    ["router.proto", "node.proto", "instance.proto", "data.proto", "ext_proc.proto", "health.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    tonic_prost_build::configure()
        .emit_rerun_if_changed(false)
        .codec_path("crate::codec::SizedCodec")
        // Log commands go from the wire to the disk without a copy.
        .bytes(".kvfleet.v1.RaftFrame")
        // Request bodies go back to Envoy without a copy.
        .bytes(".envoy.service.ext_proc.v3")
        .compile_fds(descriptors)?;
    Ok(())
}
