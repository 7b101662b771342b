//! Where other processes connect: the listening sockets, accepted connections that have not identified themselves, and
//! which processes this one is connecting to.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::sockets::{Epoll, socket_address};
use super::{ProcessId, locked, sockets};

pub const MAGIC: &[u8; 8] = b"sagewir1";
/// Length of what a connecting process sends: the magic number, the number of the process to which it wants to connect,
/// its own number.
const CALL: usize = 8 + 16 + 16;
/// The magic number of a process that opens several connections. Such a process sends two more numbers of eight bytes:
/// the number of the connection between the processes, and the place of this TCP connection in it.
pub const MAGIC_OF_SEVERAL: &[u8; 8] = b"sagewirn";
const CALL_OF_SEVERAL: usize = CALL + 8 + 8;
/// Length of the answer: the magic number, the number of the answering process.
pub const ANSWER: usize = 8 + 16;
/// How long an accepted process may take to identify itself.
const PATIENCE: Duration = Duration::from_secs(10);
/// At most this many accepted connections may be unidentified. If there are more, the oldest is closed.
const MOST: usize = 1024;

#[derive(Default)]
pub struct Doors {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    listening: Vec<(String, u64, TcpListener)>,
    strangers: HashMap<u64, Stranger>,
    /// Number of groups that this process is joining.
    joining: usize,
    /// The processes to which a thread is connecting.
    called: HashSet<ProcessId>,
}

impl Doors {
    /// Listens at this address unless the process already does. Returns the port. `token` makes a token for `epoll`.
    pub fn listen(&self, epoll: &Epoll, token: impl FnOnce() -> u64, address: &str) -> io::Result<u16> {
        let mut doors = locked(&self.state);
        if let Some((_, _, listener)) = doors.listening.iter().find(|(known, ..)| known == address) {
            return Ok(listener.local_addr()?.port());
        }
        let at = socket_address(address, 0).ok_or_else(|| io::Error::other("this is no address"))?;
        let listener = TcpListener::bind(at)?;
        listener.set_nonblocking(true)?;
        let (token, port) = (token(), listener.local_addr()?.port());
        sockets::close_in_children(listener.as_raw_fd(), true);
        epoll.add(listener.as_raw_fd(), token)?;
        doors.listening.push((address.to_string(), token, listener));
        Ok(port)
    }

    /// Records that this process is joining a group, until `end_joining`.
    pub fn begin_joining(&self) {
        locked(&self.state).joining += 1;
    }

    pub fn end_joining(&self) {
        locked(&self.state).joining -= 1;
    }

    pub fn is_joining(&self) -> bool {
        locked(&self.state).joining > 0
    }

    /// Calls `of` with the processes to which a thread is connecting, under their lock.
    pub fn with_called<T>(&self, of: impl FnOnce(&HashSet<ProcessId>) -> T) -> T {
        of(&locked(&self.state).called)
    }

    /// Returns the processes that `choose` selects; the caller must connect to them. `choose` gets the processes to
    /// which a thread is already connecting. Until `end_calls`, no other thread connects to the selected processes.
    pub fn begin_calls(
        &self,
        choose: impl FnOnce(&HashSet<ProcessId>) -> Vec<(usize, ProcessId)>,
    ) -> Vec<(usize, ProcessId)> {
        let mut doors = locked(&self.state);
        let chosen = choose(&doors.called);
        doors.called.extend(chosen.iter().map(|(_, process)| process));
        chosen
    }

    pub fn end_calls(&self, ended: impl Iterator<Item = ProcessId>) {
        let mut doors = locked(&self.state);
        for process in ended {
            doors.called.remove(&process);
        }
    }

    /// Closes the listening sockets and the accepted connections that have not identified themselves, if there is no
    /// group left that needs a process to connect.
    pub fn close(&self, epoll: &Epoll, no_group_is_left: impl FnOnce() -> bool) {
        let mut doors = locked(&self.state);
        if doors.joining > 0 || !no_group_is_left() {
            return;
        }
        for (_, _, listener) in doors.listening.drain(..) {
            epoll.remove(listener.as_raw_fd());
            sockets::close_in_children(listener.as_raw_fd(), false);
        }
        for (_, stranger) in doors.strangers.drain() {
            epoll.remove(stranger.stream.as_raw_fd());
        }
    }

    /// Accepts a connection, or reads what an accepted process has sent. `welcome` is called without the lock for a
    /// process that has sent everything. Returns true if something advanced.
    pub fn arrived(
        &self,
        epoll: &Epoll,
        token: u64,
        new_token: impl FnOnce() -> u64,
        welcome: impl FnOnce(Stranger) -> io::Result<()>,
    ) -> bool {
        let mut doors = locked(&self.state);
        if let Some((_, _, listener)) = doors.listening.iter().find(|(_, known, _)| *known == token) {
            let Ok((stream, from)) = listener.accept() else { return false };
            log::debug!("a connection from {from}");
            return doors.let_in(epoll, new_token, stream).is_ok();
        }
        let Some(mut stranger) = doors.strangers.remove(&token) else { return false };
        drop(doors);
        match stranger.listen() {
            Ok(false) => {
                let mut doors = locked(&self.state);
                if doors.listening.is_empty() {
                    epoll.remove(stranger.stream.as_raw_fd()); // the doors were closed meanwhile
                } else {
                    doors.strangers.insert(token, stranger);
                }
            }
            Ok(true) => {
                if let Err(error) = welcome(stranger) {
                    log::debug!("a connection was turned away: {error}");
                }
            }
            Err(error) => {
                epoll.remove(stranger.stream.as_raw_fd());
                log::debug!("a connection was turned away: {error}");
            }
        }
        true
    }
}

impl State {
    fn let_in(&mut self, epoll: &Epoll, token: impl FnOnce() -> u64, stream: TcpStream) -> io::Result<()> {
        self.strangers.retain(|_, stranger| stranger.since.elapsed() < PATIENCE);
        if self.strangers.len() >= MOST
            && let Some(oldest) = self.strangers.iter().min_by_key(|(_, one)| one.since).map(|(token, _)| *token)
        {
            self.strangers.remove(&oldest);
        }
        stream.set_nonblocking(true)?;
        let token = token();
        epoll.add(stream.as_raw_fd(), token)?;
        self.strangers.insert(token, Stranger { stream, said: Vec::new(), since: Instant::now() });
        Ok(())
    }
}

/// An accepted connection whose process is not known yet.
pub struct Stranger {
    stream: TcpStream,
    said: Vec<u8>,
    since: Instant,
}

/// What a connecting process has sent.
pub struct Introduction {
    pub is_ours: bool,
    /// The process to which the sender wants to connect.
    pub wanted: ProcessId,
    pub who: ProcessId,
    /// Set if this is one of several connections: the number that they share, and the place of this one.
    pub path: Option<(u64, u64)>,
}

impl Stranger {
    pub fn fd(&self) -> i32 {
        self.stream.as_raw_fd()
    }

    /// Reads what has arrived. Returns true when the process has sent everything.
    fn listen(&mut self) -> io::Result<bool> {
        let said = read_up_to(&mut self.stream, &mut self.said, CALL)?;
        if said && self.is_of_several() {
            return read_up_to(&mut self.stream, &mut self.said, CALL_OF_SEVERAL);
        }
        Ok(said)
    }

    /// Whether the bytes received so far say that this is one of several connections.
    fn is_of_several(&self) -> bool {
        self.said.starts_with(MAGIC_OF_SEVERAL)
    }

    pub fn introduction(&self) -> Introduction {
        let number = |at: usize| u128::from_le_bytes(self.said[at..at + 16].try_into().expect("sixteen bytes"));
        let short = |at: usize| u64::from_le_bytes(self.said[at..at + 8].try_into().expect("eight bytes"));
        let path = self.is_of_several().then(|| (short(CALL), short(CALL + 8)));
        let is_ours = path.is_some() || &self.said[..8] == MAGIC;
        Introduction { is_ours, wanted: number(8), who: number(24), path }
    }

    /// Answers that this is process `me`. Returns the connection.
    pub fn answer(mut self, me: ProcessId) -> io::Result<TcpStream> {
        let mut answer = MAGIC.to_vec();
        answer.extend(me.to_le_bytes());
        self.stream.write_all(&answer)?; // a fresh connection has room for it
        sockets::set_up(self.fd());
        Ok(self.stream)
    }
}

/// Reads what has arrived, until `said` has this length. Returns true when it has.
pub fn read_up_to(stream: &mut TcpStream, said: &mut Vec<u8>, length: usize) -> io::Result<bool> {
    let mut buffer = [0; 64];
    while said.len() < length {
        match stream.read(&mut buffer[..length - said.len()]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => said.extend_from_slice(&buffer[..got]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}
