//! Generates the Rust of `proto/*.proto` with protox, so that no protoc has to be installed.

use std::error::Error;

/// Everything that is compiled; imports are found beside them.
const FILES: [&str; 6] =
    ["router.proto", "node.proto", "instance.proto", "data.proto", "ext_proc.proto", "health.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    tonic_prost_build::configure()
        .emit_rerun_if_changed(false)
        .codec_path("crate::codec::SizedCodec")
        // Commands of the log go from the wire to the disk as they came.
        .bytes(".kvfleet.v1.RaftFrame")
        // Bodies of requests go back to Envoy as they came.
        .bytes(".envoy.service.ext_proc.v3")
        .compile_fds(descriptors)?;
    Ok(())
}
