//! Makes the connections from this process to others, all at the same time.

use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::doors::{ANSWER, MAGIC, MAGIC_OF_SEVERAL, read_up_to};
use super::meet::{Calling, Other, failed};
use super::path::Socket;
use super::receiver::Origin;
use super::sockets::socket_address;
use super::{ProcessId, Wire, sockets};
use crate::error::Result;
use crate::os::random;

/// After the first of several connections is made, a process waits this long for the rest.
const LATE_PATHS: Duration = Duration::from_secs(2);

/// A connection to another rank, not complete yet.
struct Call {
    rank: usize,
    fd: OwnedFd,
    state: CallState,
    /// Set if this is one of several connections.
    path: Option<CalledPath>,
}

struct CalledPath {
    /// The number of the connection to which this path belongs, and the path's place in that connection.
    connection: u64,
    number: usize,
    /// The connection, which was made with its first path. None for the first path.
    made: Option<Arc<Connection>>,
    since: Instant,
}

enum CallState {
    Connecting,
    Answering(Vec<u8>),
}

impl Wire {
    /// Connects to these ranks, all at the same time. Returns when all connections are made, when one was refused, or
    /// when the timeout has passed. `paths` are the addresses for several connections to one process.
    pub(super) fn call(
        self: &Arc<Wire>,
        mut calling: Calling,
        paths: &[String],
        others: &[Other],
        timeout: Duration,
    ) -> Result<()> {
        let begin = Instant::now();
        let refused =
            |rank: usize, error: &io::Error| failed(&format!("rank {rank} at {}: {error}", others[rank].address));
        let mut calls = Vec::new();
        for &(rank, _) in &calling.left {
            let mut path = None;
            if paths.len().min(others[rank].paths.len()) > 1 {
                let connection = u64::from_le_bytes(random()?);
                path = Some(CalledPath { connection, number: 0, made: None, since: begin });
            }
            calls.push(Call::new(rank, path, paths, others).map_err(|error| refused(rank, &error))?);
        }
        while !calls.is_empty() {
            if begin.elapsed() >= timeout {
                return Ok(()); // the caller's deadline reports which rank is missing
            }
            let asked: Vec<(RawFd, i16)> = calls
                .iter()
                .map(|call| match call.state {
                    CallState::Connecting => (call.fd.as_raw_fd(), libc::POLLOUT),
                    CallState::Answering(_) => (call.fd.as_raw_fd(), libc::POLLIN),
                })
                .collect();
            let ready = sockets::wait(&asked, Duration::from_millis(20));
            let mut left = Vec::new();
            for (mut call, ready) in calls.into_iter().zip(ready) {
                let (rank, other) = (call.rank, &others[call.rank]);
                let made = match ready {
                    true => call.step(self.id, other.process),
                    false if call.is_late() => Err(io::ErrorKind::TimedOut.into()),
                    false => Ok(false),
                };
                match made {
                    Ok(false) => left.push(call),
                    Ok(true) => {
                        let more = self.called(call, other).map_err(|error| refused(rank, &error))?;
                        calling.made(rank);
                        let Some((connection, made)) = more else { continue };
                        for number in 1..paths.len().min(other.paths.len()) {
                            let since = Instant::now();
                            let path = CalledPath { connection, number, made: Some(Arc::clone(&made)), since };
                            match Call::new(rank, Some(path), paths, others) {
                                Ok(call) => left.push(call),
                                Err(error) => left_out(number, paths, other, &error),
                            }
                        }
                    }
                    Err(error) => match &call.path {
                        Some(path) if path.made.is_some() => left_out(path.number, paths, other, &error),
                        _ => return Err(refused(rank, &error)),
                    },
                }
            }
            calls = left;
        }
        Ok(())
    }

    /// Adds the connection or path that was made. If the connection's other paths must be made now, returns the
    /// connection and its number.
    fn called(self: &Arc<Wire>, call: Call, other: &Other) -> io::Result<Option<(u64, Arc<Connection>)>> {
        sockets::set_up(call.fd.as_raw_fd());
        let token = self.token();
        let Some(path) = call.path else {
            self.add_connection(self.connection(Origin { peer: other.process, token }, call.fd, true))?;
            return Ok(None);
        };
        let socket = Socket::new(token, call.fd);
        if let Some(made) = &path.made {
            let _ = self.add_path(made, path.number, &socket); // else the connection has ended meanwhile
            return Ok(None);
        }
        let made = Arc::new(Connection::of_several(self.driving(), other.process, path.connection, &socket));
        self.add_connection(Arc::clone(&made))?;
        Ok(Some((path.connection, made)))
    }
}

/// Warns that one of several connections could not be made.
fn left_out(number: usize, paths: &[String], other: &Other, error: &io::Error) {
    let (own, far) = (&paths[number], other.paths[number].ip());
    log::warn!("no connection from {own} to {far} ({error}): others between the two processes carry its data");
}

impl Call {
    /// Starts the connection to this rank or, with `path`, one of several.
    fn new(rank: usize, path: Option<CalledPath>, paths: &[String], others: &[Other]) -> io::Result<Call> {
        let fd = match &path {
            None => sockets::connect(None, &others[rank].address)?,
            Some(CalledPath { number, .. }) => {
                let own = socket_address(&paths[*number], 0).ok_or_else(|| io::Error::other("this is no address"))?;
                sockets::connect(Some(&own), &others[rank].paths[*number])?
            }
        };
        Ok(Call { rank, fd, state: CallState::Connecting, path })
    }

    /// Whether this path is so late that its connection continues without it.
    fn is_late(&self) -> bool {
        self.path.as_ref().is_some_and(|path| path.made.is_some() && path.since.elapsed() >= LATE_PATHS)
    }

    /// Advances the connection when its socket is ready. Returns true when the other process has answered.
    fn step(&mut self, me: ProcessId, other: ProcessId) -> io::Result<bool> {
        let fd = self.fd.as_raw_fd();
        match &mut self.state {
            CallState::Connecting => {
                if !sockets::is_connected(fd)? {
                    return Ok(false);
                }
                let mut call = if self.path.is_some() { MAGIC_OF_SEVERAL } else { MAGIC }.to_vec();
                call.extend(other.to_le_bytes());
                call.extend(me.to_le_bytes());
                if let Some(path) = &self.path {
                    call.extend(path.connection.to_le_bytes());
                    call.extend((path.number as u64).to_le_bytes());
                }
                let mut stream = TcpStream::from(self.fd.try_clone()?);
                stream.write_all(&call)?; // a fresh connection has room for it
                self.state = CallState::Answering(Vec::new());
                Ok(false)
            }
            CallState::Answering(answer) => {
                let mut stream = TcpStream::from(self.fd.try_clone()?);
                if !read_up_to(&mut stream, answer, ANSWER)? {
                    return Ok(false);
                }
                let who = u128::from_le_bytes(answer[8..].try_into().expect("sixteen bytes"));
                if &answer[..8] != MAGIC || who != other {
                    return Err(io::Error::other("another process answers there"));
                }
                Ok(true)
            }
        }
    }
}
