//! Secrets in files: readable by their owner only, mostly one line, made at the first start.
//!
//! Not here: their use (hash keys: `kvfleet_router::Tenants`; the admin API:
//! `kvfleet_gateway::AdminConfig`; API keys: `gateway/src/keys/`), and the keys of certificates
//! (`certificates.rs`).

use std::fmt::Write as _;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rand::TryRngCore;
use rand::rngs::OsRng;

/// Bytes of a new secret.
const SECRET_BYTES: usize = 32;

/// Longest file of a secret in bytes.
const FILE_BYTES_MAX: u64 = 8_192;

/// Permission bits for users that are neither the owner nor in the file's group.
const OTHERS: u32 = 0o007;

/// Why a secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file cannot be read or created.
    #[error(
        "{}: {cause}; name a file that this process may read, or a directory in which it may make one",
        path.display()
    )]
    File {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// Every local user can read or change it.
    #[error(
        "{} is open to all users of this host (mode {mode:04o}); run: chmod o-rwx {}",
        path.display(), path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It is longer than a file of its kind.
    #[error("{} has more than {bytes_max} bytes, the limit of such a file; name the right file", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Limit in bytes.
        bytes_max: u64,
    },
    /// No random bytes.
    #[error("the operating system gives no random bytes: {0}")]
    Random(rand::rand_core::OsError),
}

/// Reads the line of a secret.
///
/// # Errors
/// [`SecretError`]: an unreadable or too long file, or one that all local users can read.
pub fn load(path: &Path) -> Result<String, SecretError> {
    Ok(load_text(path, FILE_BYTES_MAX)?.trim().to_owned())
}

/// Reads a private file of at most `bytes_max` bytes.
///
/// # Errors
/// As [`load`].
pub fn load_text(path: &Path, bytes_max: u64) -> Result<String, SecretError> {
    let file_error = |cause| SecretError::File { path: path.to_owned(), cause };
    let file = std::fs::File::open(path).map_err(file_error)?;
    let mode = file.metadata().map_err(file_error)?.mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(SecretError::Open { path: path.to_owned(), mode });
    }
    let mut text = String::new();
    let read = file.take(bytes_max + 1).read_to_string(&mut text).map_err(file_error)?;
    if read as u64 > bytes_max {
        return Err(SecretError::TooLong { path: path.to_owned(), bytes_max });
    }
    Ok(text)
}

/// A new secret: 64 random hexadecimal digits.
///
/// # Errors
/// [`SecretError::Random`].
pub fn random_hex() -> Result<String, SecretError> {
    let mut bytes = [0; SECRET_BYTES];
    OsRng.try_fill_bytes(&mut bytes).map_err(SecretError::Random)?;
    Ok(hex(&bytes))
}

/// The bytes in hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The bytes that an even number of hexadecimal digits stand for; `None` for any other text.
#[must_use]
pub fn from_hex(digits: &str) -> Option<Vec<u8>> {
    let is_hex = digits.len().is_multiple_of(2) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).ok();
    if is_hex { (0..digits.len()).step_by(2).map(byte).collect() } else { None }
}

/// SHA-256 of a secret, from the cryptography provider of TLS.
#[must_use]
pub fn sha256(secret: &[u8]) -> [u8; 32] {
    let suite = rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
    let suite = suite.tls13().expect("a suite of TLS 1.3");
    suite.common.hash_provider.hash(secret).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// Reads the line of a secret; without a file, makes one with 64 random hexadecimal digits and mode
/// 0600. If several processes start at once, they all read the same one.
///
/// # Errors
/// [`SecretError`]: as [`load`], or the file cannot be made.
pub fn load_or_create(path: &Path) -> Result<String, SecretError> {
    let file_error = |cause| SecretError::File { path: path.to_owned(), cause };
    match load(path) {
        Err(SecretError::File { cause, .. }) if cause.kind() == ErrorKind::NotFound => {}
        loaded => return loaded,
    }
    let number = OsRng.try_next_u64().map_err(SecretError::Random)?;
    let text = random_hex()? + "\n";
    // Under another name first: a process that starts at the same time never reads half a secret.
    let own = path.with_extension(format!("{number:016x}.new"));
    let written = || {
        let mut file =
            std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&own)?;
        std::io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_all()?;
        match std::fs::hard_link(&own, path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    };
    let written = written();
    let _ = std::fs::remove_file(&own);
    written.map_err(file_error)?;
    load(path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt;

    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn a_secret_is_made_once_and_is_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hash.secret");
        let made: Vec<_> = std::thread::scope(|scope| {
            let made: Vec<_> = (0..8).map(|_| scope.spawn(|| load_or_create(&path).unwrap())).collect();
            made.into_iter().map(|made| made.join().unwrap()).collect()
        });
        assert!(made.iter().all(|secret| *secret == made[0] && secret.len() == 64), "{made:?}");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "no other file is left");
        let other = load_or_create(&directory.path().join("other")).unwrap();
        assert_ne!(other, made[0]);
    }

    #[test]
    fn secrets_for_everyone_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (path, shown) = (directory.path().join("token"), directory.path().display().to_string());
        says("a secret that is not there", &load(&path).unwrap_err(), &[&shown]);
        std::fs::write(&path, "a secret\n").unwrap();
        let set = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        for mode in [0o644, 0o602, 0o601] {
            set(mode);
            assert!(matches!(load(&path), Err(SecretError::Open { .. })));
            assert!(matches!(load_or_create(&path), Err(SecretError::Open { .. })));
        }
        set(0o644);
        says("a secret that all users can read", &load(&path).unwrap_err(), &[&shown]);
        for mode in [0o600, 0o440, 0o400] {
            set(mode);
            assert_eq!(load(&path).unwrap(), "a secret");
        }
        set(0o600);
        let most = FILE_BYTES_MAX as usize;
        std::fs::write(&path, "x".repeat(most)).unwrap();
        assert_eq!(load(&path).unwrap().len(), most);
        std::fs::write(&path, "x".repeat(most + 1)).unwrap();
        says("a secret that is too long", &load(&path).unwrap_err(), &[&shown]);
        let nowhere = directory.path().join("none/token");
        says("a secret that cannot be made", &load_or_create(&nowhere).unwrap_err(), &[&shown]);
    }

    #[test]
    fn hashes_are_those_of_sha256() {
        // FIPS 180-2, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&sha256(b"abc")), expected);
        assert_eq!(from_hex(expected).unwrap(), sha256(b"abc"));
        for none in ["0", "0g", "+1", "é"] {
            assert_eq!(from_hex(none), None, "{none}");
        }
        assert_ne!(random_hex().unwrap(), random_hex().unwrap());
        assert_eq!(random_hex().unwrap().len(), 2 * SECRET_BYTES);
    }
}
