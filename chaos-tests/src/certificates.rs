//! One certificate for every process of a test: the smallest set that mutual TLS accepts.
//!
//! Not here: certificates of a cluster that outlives a test (the command line creates those).

use std::path::Path;

use kvfleet_net::tls::{ROUTER_NAME, SERVER_NAME, TlsFiles};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

/// Writes an authority and one certificate signed by it into `folder`.
///
/// # Errors
/// If key generation or a file write fails.
pub fn make(folder: &Path) -> Result<TlsFiles, Box<dyn std::error::Error>> {
    let authority_key = KeyPair::generate()?;
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_pem = authority.self_signed(&authority_key)?.pem();
    let issuer = Issuer::new(authority, authority_key);
    let key = KeyPair::generate()?;
    // Routers use it too, and nodes only accept directives from routers.
    let names = vec![SERVER_NAME.to_owned(), ROUTER_NAME.to_owned()];
    let certificate = CertificateParams::new(names)?.signed_by(&key, &issuer)?;
    let files =
        TlsFiles { ca: folder.join("ca.pem"), cert: folder.join("cert.pem"), key: folder.join("key.pem") };
    std::fs::write(&files.ca, authority_pem)?;
    std::fs::write(&files.cert, certificate.pem())?;
    std::fs::write(&files.key, key.serialize_pem())?;
    Ok(files)
}
