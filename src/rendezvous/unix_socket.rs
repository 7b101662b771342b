//! Unix sockets that keep message boundaries and pass descriptors. They are bound to random names in the abstract
//! namespace, so there is no file, the name cannot be guessed, and the socket disappears with its process.

#![allow(unsafe_code)] // system calls that pass descriptors

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// The kernel accepts at most this many descriptors in one message (SCM_MAX_FD).
pub const MAX_DESCRIPTORS: usize = 253;
/// Longest message. Reading a longer one fails, because its rest would be lost.
const MAX_MESSAGE: usize = 192 << 10;

fn descriptor(rc: i32) -> io::Result<OwnedFd> {
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(rc) })
}

/// Repeats a system call as long as signals interrupt it.
fn retried(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(value) => return Ok(value),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

fn new_socket(kind: i32) -> io::Result<OwnedFd> {
    let kind = kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: plain numbers in, a descriptor or -1 out.
    descriptor(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })
}

fn bound(kind: i32, name: &[u8]) -> io::Result<OwnedFd> {
    let socket = new_socket(kind)?;
    let (address, length) = abstract_address(name)?;
    // SAFETY: the address and its length belong together and outlive the call.
    retried(|| unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) as isize })?;
    Ok(socket)
}

fn connected(kind: i32, name: &[u8]) -> io::Result<OwnedFd> {
    let socket = new_socket(kind)?;
    let (address, length) = abstract_address(name)?;
    // SAFETY: as in `bound`.
    retried(|| unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) as isize })?;
    Ok(socket)
}

/// Returns an address in the abstract namespace: a zero byte, then the name.
fn abstract_address(name: &[u8]) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all zero bytes are a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= address.sun_path.len() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path[1..].iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((address, length as libc::socklen_t))
}

pub fn listen(name: &[u8], backlog: usize) -> io::Result<OwnedFd> {
    let socket = bound(libc::SOCK_SEQPACKET, name)?;
    // SAFETY: plain numbers on our own descriptor.
    retried(|| unsafe { libc::listen(socket.as_raw_fd(), backlog.clamp(16, 4096) as i32) as isize })?;
    Ok(socket)
}

/// Connects to a listener. Fails with `WouldBlock` while the listener's queue is full.
pub fn connect(name: &[u8]) -> io::Result<OwnedFd> {
    connected(libc::SOCK_SEQPACKET, name)
}

/// Makes a socket that receives messages, without a connection, from any process of this host that knows the socket's
/// name.
pub fn mailbox(name: &[u8]) -> io::Result<OwnedFd> {
    bound(libc::SOCK_DGRAM, name)
}

/// Sends a message to a mailbox. Fails with `WouldBlock` while the mailbox is full.
pub fn post(name: &[u8], message: &[u8]) -> io::Result<()> {
    send(&connected(libc::SOCK_DGRAM, name)?, message, &[])
}

/// Accepts the next connection. `None` if there is none now.
pub fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let accepted = retried(|| {
        // SAFETY: null pointers mean that the peer's address is not requested.
        unsafe { libc::accept4(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags) as isize }
    });
    match accepted {
        Ok(fd) => descriptor(fd as i32).map(Some),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        // The peer closed the connection before it was accepted.
        Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the user and pid of the process at the other end, which has connected or listens. The pid is 0 if that
/// process is in a pid namespace that this process cannot see.
pub fn peer(socket: &OwnedFd) -> io::Result<(u32, i32)> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = std::mem::size_of::<libc::ucred>() as libc::socklen_t;
    retried(|| {
        // SAFETY: `found` and `length` outlive the call, and `length` is the size of `found`.
        unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut length,
            ) as isize
        }
    })?;
    Ok((found.uid, found.pid))
}

pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers in, a descriptor (always close-on-exec) or -1 out.
    descriptor(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32)
}

/// Buffer for a control message with `MAX_DESCRIPTORS` descriptors, aligned for the message's header.
#[repr(align(8))]
struct Control([u8; 64 + MAX_DESCRIPTORS * 4]);

/// Sends one message. Fails with `WouldBlock` if the peer has not read enough yet, or if too many descriptors are in
/// flight.
pub fn send(socket: &OwnedFd, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    assert!(descriptors.len() <= MAX_DESCRIPTORS, "{} descriptors in one message", descriptors.len());
    let mut piece = libc::iovec { iov_base: message.as_ptr().cast_mut().cast(), iov_len: message.len() };
    let mut control = Control([0; 64 + MAX_DESCRIPTORS * 4]);
    let bytes = std::mem::size_of_val(descriptors) as u32;
    // SAFETY: an all-zero msghdr is valid. Every pointer set below is to something that outlives the call. The control
    // buffer has room for a header and MAX_DESCRIPTORS descriptors and is aligned for the header. CMSG_FIRSTHDR is not
    // null, because the length is at least one header.
    let result = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut piece;
        header.msg_iovlen = 1;
        if !descriptors.is_empty() {
            header.msg_control = control.0.as_mut_ptr().cast();
            header.msg_controllen = libc::CMSG_SPACE(bytes) as _;
            let first = libc::CMSG_FIRSTHDR(&header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(bytes) as _;
            for (at, fd) in descriptors.iter().enumerate() {
                libc::CMSG_DATA(first).cast::<i32>().add(at).write_unaligned(fd.as_raw_fd());
            }
        }
        retried(|| libc::sendmsg(socket.as_raw_fd(), &header, libc::MSG_NOSIGNAL))
    };
    match result {
        Ok(_) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) => Err(io::ErrorKind::WouldBlock.into()),
        Err(error) => Err(error),
    }
}

/// Returns the length of the next message, which stays in the queue.
fn next_length(socket: &OwnedFd) -> io::Result<usize> {
    let flags = libc::MSG_PEEK | libc::MSG_TRUNC;
    // SAFETY: nothing is written to a buffer of length 0.
    retried(|| unsafe { libc::recv(socket.as_raw_fd(), std::ptr::null_mut(), 0, flags) })
}

/// A message and the descriptors that came with it.
pub type Message = (Vec<u8>, Vec<OwnedFd>);

/// The kernel has cut a message, because there was no room for its descriptors.
#[derive(Debug)]
struct CutShort;

impl fmt::Display for CutShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message came cut short (the limit of open files is reached?)")
    }
}

impl std::error::Error for CutShort {}

/// Whether a call failed because this process, or its host, has no descriptor left.
pub fn is_out_of_files(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
        || error.get_ref().is_some_and(|inner| inner.is::<CutShort>())
}

/// Receives one message and its descriptors. An empty message means that the peer has closed the connection. Fails with
/// `WouldBlock` if there is no message now.
pub fn receive(socket: &OwnedFd) -> io::Result<Message> {
    let mut message = vec![0u8; next_length(socket)?.min(MAX_MESSAGE)];
    let mut piece = libc::iovec { iov_base: message.as_mut_ptr().cast(), iov_len: message.len() };
    let mut control = Control([0; 64 + MAX_DESCRIPTORS * 4]);
    let mut descriptors = Vec::new();
    // SAFETY: an all-zero msghdr is valid. Every pointer is to something that outlives the call, with its true length.
    // The kernel then filled the control buffer, and the CMSG macros stay within msg_controllen. Each descriptor in an
    // SCM_RIGHTS message was installed for this process, which is its only owner.
    let (length, flags) = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut piece;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = control.0.len() as _;
        let length = retried(|| libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC))?;
        let mut next = libc::CMSG_FIRSTHDR(&header);
        while !next.is_null() {
            if (*next).cmsg_level == libc::SOL_SOCKET && (*next).cmsg_type == libc::SCM_RIGHTS {
                #[allow(clippy::unnecessary_cast)] // its width differs between C libraries
                let bytes = ((*next).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                for at in 0..bytes / 4 {
                    let fd = libc::CMSG_DATA(next).cast::<i32>().add(at).read_unaligned();
                    descriptors.push(OwnedFd::from_raw_fd(fd));
                }
            }
            next = libc::CMSG_NXTHDR(&header, next);
        }
        (length, header.msg_flags)
    };
    if flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return Err(io::Error::other(CutShort));
    }
    message.truncate(length);
    Ok((message, descriptors))
}

/// Waits until a descriptor is readable or its peer has closed it, or until the time is over. A signal ends the wait
/// early.
pub fn wait_readable<'a>(sockets: impl Iterator<Item = &'a OwnedFd>, time: Duration) {
    let mut polled: Vec<libc::pollfd> =
        sockets.map(|socket| libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 }).collect();
    let time = libc::timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos() as _ };
    // SAFETY: the pointer and count describe `polled`. `time` outlives the call. There is no signal mask.
    unsafe { libc::ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, &time, std::ptr::null()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn pair(name: &[u8]) -> (OwnedFd, OwnedFd) {
        let listener = listen(name, 1).unwrap();
        let one = connect(name).unwrap();
        let other = accept(&listener).unwrap().unwrap();
        (one, other)
    }

    #[test]
    fn messages_and_descriptors_arrive_whole() {
        let name = format!("sagellm-socket-test-{}", std::process::id());
        let (one, other) = pair(name.as_bytes());
        let fds: Vec<_> = (0..3).map(|_| one.as_fd()).collect();
        send(&one, b"first", &fds).unwrap();
        send(&one, b"second", &[]).unwrap();
        wait_readable([&other].into_iter(), Duration::from_secs(1));
        let (message, descriptors) = receive(&other).unwrap();
        assert_eq!((message.as_slice(), descriptors.len()), (b"first".as_slice(), 3));
        assert_eq!(receive(&other).unwrap().0, b"second");
        assert_eq!(receive(&other).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(descriptors);
        drop(one);
        assert!(receive(&other).unwrap().0.is_empty());
    }

    #[test]
    fn a_mailbox_takes_messages_until_it_is_full() {
        let name = format!("sagellm-mailbox-test-{}", std::process::id());
        let mailbox = mailbox(name.as_bytes()).unwrap();
        assert_eq!(receive(&mailbox).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        post(name.as_bytes(), b"one").unwrap();
        post(name.as_bytes(), &[7; 5000]).unwrap();
        assert_eq!(receive(&mailbox).unwrap().0, b"one");
        assert_eq!(receive(&mailbox).unwrap().0, [7; 5000]);
        let full = (0..1_000_000).find_map(|_| post(name.as_bytes(), &[0; 1000]).err()).unwrap();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        drop(mailbox);
        assert_eq!(post(name.as_bytes(), b"two").unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn the_peer_is_this_process() {
        let name = format!("sagellm-peer-test-{}", std::process::id());
        let (one, _other) = pair(name.as_bytes());
        assert_eq!(peer(&one).unwrap(), (crate::os::topology::uid(), std::process::id() as i32));
        assert_eq!(connect(b"sagellm no such socket").unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}
