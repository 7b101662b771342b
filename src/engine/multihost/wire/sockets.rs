//! System calls that connections need and that std does not provide.

#![allow(unsafe_code)] // the callers vouch for the memory

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::types::Span;

/// One call accepts at most this many pieces.
pub const MOST: usize = 32;

/// Readiness of one descriptor.
#[derive(Clone, Copy)]
pub struct Ready {
    pub token: u64,
    pub readable: bool,
    pub writable: bool,
}

pub struct Epoll(OwnedFd);

impl Epoll {
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: makes a new descriptor, which nothing else owns.
        let fd = checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: as above.
        Ok(Epoll(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub fn add(&self, fd: RawFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, false)
    }

    /// Sets whether epoll also reports the descriptor when it is writable.
    pub fn watch_output(&self, fd: RawFd, token: u64, watch: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, watch)
    }

    pub fn remove(&self, fd: RawFd) {
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, false);
    }

    fn control(&self, what: libc::c_int, fd: RawFd, token: u64, output: bool) -> io::Result<()> {
        let events = libc::EPOLLIN | if output { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: the event is valid for the call.
        checked(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), what, fd, &raw mut event) })?;
        Ok(())
    }

    /// Fills `found` with the ready descriptors, after at most `timeout_ms`; 0 does not wait.
    pub fn wait(&self, timeout_ms: i32, found: &mut Vec<Ready>) {
        const AT_ONCE: usize = 64;
        found.clear();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
        // SAFETY: the array has room for `AT_ONCE` events.
        let count =
            unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), AT_ONCE as libc::c_int, timeout_ms) };
        for event in events.iter().take(usize::try_from(count).unwrap_or(0)) {
            let (bits, token) = (event.events, event.u64);
            let is = |wanted: libc::c_int| bits & wanted as u32 != 0;
            // An error counts as readable, because the read reports it.
            let readable = is(libc::EPOLLIN) || is(libc::EPOLLHUP) || is(libc::EPOLLERR);
            found.push(Ready { token, readable, writable: is(libc::EPOLLOUT) });
        }
    }
}

/// Wakes a thread that waits in an `Epoll`.
pub struct Kick(OwnedFd);

impl Kick {
    pub fn new() -> io::Result<Kick> {
        // SAFETY: makes a new descriptor, which nothing else owns.
        let fd = checked(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: as above.
        Ok(Kick(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub fn kick(&self) {
        let one = 1u64;
        // SAFETY: eight bytes are read from `one`.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    pub fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: eight bytes are written to `count`.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl AsRawFd for Kick {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Sends the pieces in order, without blocking. Returns the bytes that the system accepted, 0 if it would block.
///
/// # Safety
/// The pieces must be readable.
pub unsafe fn send(fd: RawFd, pieces: &[Span]) -> io::Result<usize> {
    let mut list = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MOST];
    // SAFETY: all zeros are a valid header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.as_mut_ptr();
    message.msg_iovlen = fill(&mut list, pieces) as _;
    // SAFETY: the list describes the pieces, for which the caller vouches.
    result(unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) })
}

/// Receives into the pieces in order, without blocking. Returns the bytes received: None if there are none now, 0 at
/// the end of the connection.
///
/// # Safety
/// The pieces must be writable, and no other thread may use them.
pub unsafe fn receive(fd: RawFd, pieces: &[Span]) -> io::Result<Option<usize>> {
    let mut list = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MOST];
    // SAFETY: all zeros are a valid header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.as_mut_ptr();
    message.msg_iovlen = fill(&mut list, pieces) as _;
    // SAFETY: the list describes the pieces, for which the caller vouches.
    let got = unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) };
    if got >= 0 {
        return Ok(Some(got as usize));
    }
    result(got).map(|_| None)
}

fn fill(list: &mut [libc::iovec; MOST], pieces: &[Span]) -> usize {
    for (at, piece) in list.iter_mut().zip(pieces) {
        *at = libc::iovec { iov_base: piece.addr as *mut libc::c_void, iov_len: piece.bytes };
    }
    pieces.len().min(MOST)
}

/// Converts the result of a send or receive. Returns the bytes moved, 0 if the call would block or was interrupted.
fn result(moved: isize) -> io::Result<usize> {
    if moved >= 0 {
        return Ok(moved as usize);
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
        _ => Err(error),
    }
}

/// Enables detection of silent peers (keepalive), and sends small frames without delay.
pub fn set_up(fd: RawFd) {
    let set = |level: libc::c_int, name: libc::c_int, value: libc::c_int| {
        // SAFETY: the value is valid for the call. A failure is ignored: the connection works without the option.
        unsafe {
            libc::setsockopt(fd, level, name, (&raw const value).cast(), size_of::<libc::c_int>() as libc::socklen_t)
        };
    };
    set(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 30);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 10);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3);
}

/// Limits how many bytes the kernel accepts before it sends them.
pub fn limit_unsent(fd: RawFd, bytes: usize) {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value is valid for the call. A failure is ignored: the connection works without the option.
    unsafe {
        libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, (&raw const bytes).cast(), length);
    }
}

/// Returns how many bytes this system has accepted and the peer's system has not acknowledged.
pub fn backlog(fd: RawFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the value is valid for the call.
    unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) }; // SIOCOUTQ has this number
    usize::try_from(bytes).unwrap_or(0)
}

/// What the system says about a connection's sending side.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    /// Total number of bytes that the peer's system has acknowledged.
    pub acked: u64,
    /// Packets that the peer's system has not acknowledged.
    pub in_flight: u32,
    /// Bytes for which the peer's system has room. `None` if this kernel does not report it.
    pub room: Option<u32>,
    pub round_trip: Duration,
}

pub fn sent(fd: RawFd) -> Sent {
    // Offsets in the kernel's `struct tcp_info`. They are stable, because the kernel only adds fields at its end.
    const UNACKED: usize = 24;
    const ROUND_TRIP: usize = 68;
    const ACKED: usize = 120;
    const ROOM: usize = 228;
    let mut info = [0u8; 256];
    let mut length = info.len() as libc::socklen_t;
    // SAFETY: the buffer and its length are valid for the call.
    let rc =
        unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut length) };
    if rc != 0 {
        return Sent::default();
    }
    let word = |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().expect("four bytes"));
    Sent {
        acked: u64::from_ne_bytes(info[ACKED..ACKED + 8].try_into().expect("eight bytes")),
        in_flight: word(UNACKED),
        room: (length as usize >= ROOM + 4).then(|| word(ROOM)),
        round_trip: Duration::from_micros(u64::from(word(ROUND_TRIP))),
    }
}

/// Returns the two addresses of a connection, for the log.
pub fn ends(fd: &OwnedFd) -> String {
    let stream = fd.try_clone().map(std::net::TcpStream::from);
    let shown = |address: io::Result<SocketAddr>| address.map_or("?".to_string(), |address| address.to_string());
    match stream {
        Ok(stream) => format!("from {} to {}", shown(stream.local_addr()), shown(stream.peer_addr())),
        Err(_) => String::new(),
    }
}

/// Shuts down the sending side of a connection.
pub fn shut(fd: RawFd) {
    // SAFETY: a call on a descriptor, which uses no memory.
    unsafe { libc::shutdown(fd, libc::SHUT_WR) };
}

/// Starts a connection, from the local address `from` if it is set. The connection is established when the socket
/// becomes writable.
pub fn connect(from: Option<&SocketAddr>, to: &SocketAddr) -> io::Result<OwnedFd> {
    let (family, address, length) = raw(to);
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: makes a new descriptor, which nothing else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(checked(libc::socket(family, kind, 0))?) };
    if let Some(from) = from {
        let (_, own, length) = raw(from);
        // SAFETY: the address has this length and is valid for the call.
        checked(unsafe { libc::bind(fd.as_raw_fd(), (&raw const own).cast(), length) })?;
    }
    // SAFETY: as above.
    match checked(unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length) }) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(fd),
    }
}

fn raw(to: &SocketAddr) -> (libc::c_int, libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all zeros are a valid address of unspecified family.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    match to {
        SocketAddr::V4(to) => {
            let address = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: to.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(to.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage has the size and alignment for every address.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(address) };
            (libc::AF_INET, storage, size_of::<libc::sockaddr_in>() as libc::socklen_t)
        }
        SocketAddr::V6(to) => {
            let address = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: to.port().to_be(),
                sin6_flowinfo: to.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: to.ip().octets() },
                sin6_scope_id: to.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(address) };
            (libc::AF_INET6, storage, size_of::<libc::sockaddr_in6>() as libc::socklen_t)
        }
    }
}

/// Whether a connection that was started is established. An error if it failed.
pub fn is_connected(fd: RawFd) -> io::Result<bool> {
    let mut error: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value and its length are valid for the call.
    checked(unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut error).cast(), &raw mut length)
    })?;
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    Ok(wait(&[(fd, libc::POLLOUT)], Duration::ZERO)[0])
}

/// Waits until one of these descriptors is ready for its events, for at most `timeout`. Returns which ones are ready.
pub fn wait(asked: &[(RawFd, i16)], timeout: Duration) -> Vec<bool> {
    let mut list: Vec<libc::pollfd> =
        asked.iter().map(|(fd, events)| libc::pollfd { fd: *fd, events: *events, revents: 0 }).collect();
    // SAFETY: the list has this many entries.
    unsafe {
        libc::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, timeout.as_micros().div_ceil(1000) as libc::c_int)
    };
    list.iter().map(|one| one.revents != 0).collect()
}

/// Returns the index of a network interface.
pub fn interface(name: &str) -> Option<u32> {
    let name = std::ffi::CString::new(name).ok()?;
    // SAFETY: the name ends with a zero.
    Some(unsafe { libc::if_nametoindex(name.as_ptr()) }).filter(|number| *number != 0)
}

/// Only descriptors below this number are closed in forked children.
const KNOWN: usize = 1 << 16;

/// Descriptors of connections, one bit each. Threads that open and close connections set and clear bits. A forked
/// child, which has no other thread, reads them (relaxed).
static OPEN: [AtomicU64; KNOWN / 64] = [const { AtomicU64::new(0) }; KNOWN / 64];
static INSTALLED: Once = Once::new();

/// If `open`, every child that is forked from now on closes this descriptor; otherwise children no longer close it.
/// Peers detect the end of this process by the end of its connections, and a child with copies of the descriptors would
/// keep the connections open.
pub fn close_in_children(fd: RawFd, open: bool) {
    INSTALLED.call_once(|| {
        // SAFETY: the handler is a plain function, which is never unloaded and uses only atomics and `close`.
        let rc = unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
        if rc != 0 {
            log::warn!("pthread_atfork failed ({rc}); other hosts may learn late that this process ended");
        }
    });
    let Ok(at) = usize::try_from(fd) else { return };
    let Some(word) = OPEN.get(at / 64) else { return };
    if open {
        word.fetch_or(1 << (at % 64), Ordering::Relaxed);
    } else {
        word.fetch_and(!(1 << (at % 64)), Ordering::Relaxed);
    }
}

extern "C" fn in_forked_child() {
    for (at, word) in OPEN.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            // SAFETY: closes this child's copy of the descriptor, which nothing in the child uses (rule 26).
            unsafe { libc::close((at * 64) as libc::c_int + bits.trailing_zeros() as libc::c_int) };
            bits &= bits - 1;
        }
    }
}

/// Parses an address, with the interface of a link-local one.
pub fn socket_address(text: &str, port: u16) -> Option<SocketAddr> {
    let (address, scope) = text.split_once('%').map_or((text, None), |(address, name)| (address, Some(name)));
    match address.parse().ok()? {
        IpAddr::V4(address) => Some(SocketAddr::new(IpAddr::V4(address), port)),
        IpAddr::V6(address) => {
            let scope = scope.and_then(interface).unwrap_or(0);
            Some(SocketAddr::V6(SocketAddrV6::new(address, port, 0, scope)))
        }
    }
}
