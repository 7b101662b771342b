//! Lets a thread sleep in the kernel on words that other processes change. The futexes are of the shared kind, because
//! a peer cannot wake futexes of the private kind, which std uses.

#![allow(unsafe_code)] // a system call without a wrapper in libc

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use once_cell::sync::Lazy;

/// One sleep can watch at most this many words: the kernel's limit for futex_waitv.
pub const MOST: usize = 128;

/// Wakes every thread of any process that sleeps on `word`.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE uses only the address, which is valid, and reads none of our memory.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX, 0, 0, 0);
    }
}

/// Longest sleep if the kernel can watch only the first of several words.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

const SYS_FUTEX_WAITV: libc::c_long = 449;

/// Whether the kernel has futex_waitv (since 5.16) and no seccomp profile denies it. If so, a call without words fails
/// with EINVAL.
static HAS_WAITV: Lazy<bool> = Lazy::new(has_waitv);

fn has_waitv() -> bool {
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: without words it reads nothing.
    let result = unsafe { libc::syscall(SYS_FUTEX_WAITV, nothing, 0, 0, nothing, 0) };
    result < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
}

/// Whether one sleep can watch several words.
pub fn watches_several() -> bool {
    *HAS_WAITV
}

/// Sleeps until a word in `words` differs from its value or is woken, or `timeout` passes. May also return early for no
/// reason. If the kernel can watch only one word, it watches the first, and the sleep ends after a millisecond so that
/// the caller can check the others.
pub fn wait(words: &[(&AtomicU32, u32)], timeout: Duration) {
    match words {
        [] => std::thread::sleep(timeout),
        [(word, value)] => wait_one(word, *value, timeout),
        many if many.len() <= MOST && wait_many(many, timeout) => (),
        [(word, value), ..] => wait_one(word, *value, timeout.min(LOOK_AGAIN)),
    }
}

fn wait_one(word: &AtomicU32, value: u32, timeout: Duration) {
    let time =
        libc::timespec { tv_sec: timeout.as_secs() as libc::time_t, tv_nsec: timeout.subsec_nanos() as libc::c_long };
    // SAFETY: the word and the time are valid for the call. FUTEX_WAIT takes a relative timeout.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const time, 0, 0);
    }
}

/// Sleeps on several words. Returns false if the kernel does not offer futex_waitv.
fn wait_many(words: &[(&AtomicU32, u32)], timeout: Duration) -> bool {
    if !*HAS_WAITV {
        return false;
    }
    #[repr(C)]
    struct Waiter {
        value: u64,
        address: u64,
        flags: u32,
        reserved: u32,
    }
    const SIZE_U32: u32 = 2;
    let waiters: Vec<Waiter> = words
        .iter()
        .map(|(word, value)| Waiter {
            value: u64::from(*value),
            address: word.as_ptr() as u64,
            flags: SIZE_U32,
            reserved: 0,
        })
        .collect();
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is valid for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    let nanoseconds = now.tv_nsec as u64 + u64::from(timeout.subsec_nanos());
    let until = libc::timespec {
        tv_sec: now.tv_sec + timeout.as_secs() as libc::time_t + (nanoseconds / 1_000_000_000) as libc::time_t,
        tv_nsec: (nanoseconds % 1_000_000_000) as libc::c_long,
    };
    // SAFETY: the array, its length and the absolute timeout are valid for the call.
    let result = unsafe {
        libc::syscall(
            SYS_FUTEX_WAITV,
            waiters.as_ptr(),
            waiters.len() as libc::c_uint,
            0,
            &raw const until,
            libc::CLOCK_MONOTONIC,
        )
    };
    let error = std::io::Error::last_os_error().raw_os_error();
    result >= 0 || matches!(error, Some(libc::EAGAIN | libc::EINTR | libc::ETIMEDOUT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    #[test]
    fn a_changed_word_returns_at_once_and_a_timeout_ends_a_sleep() {
        let (a, b) = (AtomicU32::new(1), AtomicU32::new(2));
        let begin = Instant::now();
        wait(&[(&a, 0)], Duration::from_secs(10));
        wait(&[(&a, 1), (&b, 0)], Duration::from_secs(10));
        assert!(begin.elapsed() < Duration::from_secs(5));
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(20) {
            wait(&[(&a, 1), (&b, 2)], Duration::from_millis(20));
        }
    }

    /// Denies one system call to this thread, like a seccomp profile does.
    fn deny(syscall: libc::c_long, error: i32) {
        let filter = [
            libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 }, // load the system call's number
            libc::sock_filter { code: 0x15, jt: 0, jf: 1, k: syscall as u32 },
            libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0x0005_0000 | error as u32 }, // SECCOMP_RET_ERRNO
            libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0x7fff_0000 },                // SECCOMP_RET_ALLOW
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: the program lives for both calls, and affects only this thread.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
        }
    }

    #[test]
    fn a_profile_that_denies_futex_waitv_costs_a_millisecond_and_no_busy_loop() {
        Lazy::force(&HAS_WAITV); // threads of other tests may use it
        std::thread::spawn(|| {
            deny(SYS_FUTEX_WAITV, libc::EPERM);
            assert!(!has_waitv());
            let (a, b) = (AtomicU32::new(1), AtomicU32::new(2));
            let begin = Instant::now();
            (0..20).for_each(|_| wait(&[(&a, 1), (&b, 2)], Duration::from_secs(10)));
            assert!(begin.elapsed() >= Duration::from_millis(10), "20 sleeps took {:?}", begin.elapsed());
            assert!(begin.elapsed() < Duration::from_secs(5), "20 sleeps took {:?}", begin.elapsed());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_wake_ends_a_sleep_on_many_words() {
        let words = [AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0)];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while words[1].load(Ordering::Acquire) == 0 {
                    let list: Vec<_> = words.iter().map(|w| (w, 0)).collect();
                    wait(&list, Duration::from_secs(10));
                }
            });
            std::thread::sleep(Duration::from_millis(10));
            words[1].store(1, Ordering::Release);
            wake_all(&words[1]);
        });
    }
}
