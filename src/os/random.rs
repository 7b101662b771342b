//! Random bytes.

#![allow(unsafe_code)] // a system call

use crate::error::{Error, Result};

/// Returns random bytes from the kernel.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while filled < N {
        // SAFETY: the pointer and length describe the rest of `bytes`.
        let got = unsafe { libc::getrandom(bytes[filled..].as_mut_ptr().cast(), N - filled, 0) };
        match usize::try_from(got) {
            Ok(got) => filled += got,
            Err(_) => {
                let error = std::io::Error::last_os_error();
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return Err(Error::system(format!("sagellm: getrandom: {error}")));
                }
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random::<16>().unwrap(), random::<16>().unwrap());
    }
}
