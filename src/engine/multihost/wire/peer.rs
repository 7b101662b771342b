//! The messages in flight between one rank of a channel and one peer, and the connection to that peer. A window limits
//! the short messages; a body is sent only after the receiver has asked for it.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;

use super::ProcessId;
use super::connection::Connection;
use super::driving::Counted;
use super::frame::HEAD;
use super::memory::Memory;
use super::transfer::End;

/// Longest message of a lane that is sent without a Want from the receiver.
pub const SHORT: usize = 16 << 10;
/// At most this many bytes of such messages, headers included, may be in flight to one peer.
const WINDOW: usize = 1 << 20;

/// A posted receive, or a send that is not sent yet.
pub struct Waiting {
    pub memory: Memory,
    pub bytes: usize,
    pub end: End,
    /// Set if the wire must be driven for this transfer even while no thread waits.
    pub counted: Option<Counted>,
}

/// Each list is first in, first out for its tag or number.
pub struct Peer {
    process: ProcessId,
    connection: Option<Arc<Connection>>,
    /// Whether the peer has joined the channel.
    joined: bool,
    /// Why nothing more will arrive from the peer. None while the peer is connected or may still connect.
    lost: Option<String>,
    /// `window`: bytes of short messages that this rank may still send. `queued`: messages, each with its tag, that
    /// wait until the window is large enough.
    window: usize,
    queued: VecDeque<(u32, Waiting)>,
    /// Bytes of the peer's short messages that receives have consumed, but for which this rank has not sent Credit yet.
    taken: usize,
    posted: HashMap<u32, VecDeque<Waiting>>,
    arrived: HashMap<u32, VecDeque<Vec<u8>>>,
    /// Bodies by number. A receiver asks for a body with a `Want` frame. `wanted`: sizes of the bodies that the peer
    /// has asked for and this rank has not sent yet. `unwanted`: this rank's sends that the peer has not asked for yet.
    /// `wants`: this rank's posted receives whose body has not arrived.
    wanted: HashMap<u64, VecDeque<u64>>,
    unwanted: HashMap<u64, VecDeque<Waiting>>,
    wants: HashMap<u64, VecDeque<Waiting>>,
}

fn push<K: Hash + Eq, V>(lists: &mut HashMap<K, VecDeque<V>>, key: K, value: V) {
    lists.entry(key).or_default().push_back(value);
}

/// Removes and returns the first entry. If the list is then empty, it stays only with `keep`: tags are used again, but
/// numbers of bodies are not.
fn pop<K: Hash + Eq, V>(lists: &mut HashMap<K, VecDeque<V>>, key: K, keep: bool) -> Option<V> {
    let list = lists.get_mut(&key)?;
    let first = list.pop_front();
    if list.is_empty() && !keep {
        lists.remove(&key);
    }
    first
}

impl Peer {
    pub fn new(process: ProcessId) -> Peer {
        Peer {
            process,
            connection: None,
            joined: false,
            lost: None,
            window: WINDOW,
            queued: VecDeque::new(),
            taken: 0,
            posted: HashMap::new(),
            arrived: HashMap::new(),
            wanted: HashMap::new(),
            unwanted: HashMap::new(),
            wants: HashMap::new(),
        }
    }

    pub fn process(&self) -> ProcessId {
        self.process
    }

    // ----------------------------------------------------------------------------------------------------- connection

    /// Uses this connection, unless the peer has already joined by a different one. Returns whether it is used.
    pub fn connect(&mut self, connection: &Arc<Connection>) -> bool {
        if self.joined {
            return false;
        }
        self.connection = Some(Arc::clone(connection));
        true
    }

    pub fn connection(&self) -> Option<Arc<Connection>> {
        self.connection.clone()
    }

    /// The connection of a peer of a group that is in use.
    pub fn connected(&self) -> &Arc<Connection> {
        self.connection.as_ref().expect("all ranks are connected before a group is used")
    }

    /// Whether `token` belongs to the current connection to the peer, and not to a connection that was replaced.
    pub fn leads_by(&self, token: u64) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.token == token)
    }

    /// Whether there is a connection that works.
    pub fn is_reachable(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.broken().is_none())
    }

    /// Called when the connection is gone and the peer has not joined. The peer may connect again.
    pub fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Records that the peer has joined the channel.
    pub fn join(&mut self) {
        self.joined = true;
    }

    pub fn has_joined(&self) -> bool {
        self.joined
    }

    pub fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Records that nothing more will arrive from the peer. The first reason is kept.
    pub fn lose(&mut self, why: &str) {
        self.lost.get_or_insert_with(|| why.to_string());
    }

    /// Removes and returns all sends and receives of this peer that have not ended.
    pub fn take_all(&mut self) -> Vec<Waiting> {
        let queued = std::mem::take(&mut self.queued).into_iter().map(|(_, one)| one);
        let posted = std::mem::take(&mut self.posted).into_values().flatten();
        let unwanted = std::mem::take(&mut self.unwanted).into_values().flatten();
        let wants = std::mem::take(&mut self.wants).into_values().flatten();
        queued.chain(posted).chain(unwanted).chain(wants).collect()
    }

    // ------------------------------------------------------------------------------------------------- short messages

    /// Whether a message of `bytes` bytes may be sent now. If so, it is counted.
    pub fn admits(&mut self, bytes: usize) -> bool {
        let admits = self.queued.is_empty() && HEAD + bytes <= self.window;
        if admits {
            self.window -= HEAD + bytes;
        }
        admits
    }

    /// Queues a message until the window is large enough.
    pub fn queue(&mut self, tag: u32, waiting: Waiting) {
        self.queued.push_back((tag, waiting));
    }

    /// Called when the peer has consumed `bytes` bytes of messages.
    pub fn credit(&mut self, bytes: u64) {
        self.window = self.window.saturating_add(bytes as usize).min(WINDOW);
    }

    /// Removes, counts and returns the next queued message if the window is large enough.
    pub fn next_queued(&mut self) -> Option<(u32, Waiting)> {
        let bytes = self.queued.front()?.1.bytes;
        if HEAD + bytes > self.window {
            return None;
        }
        self.window -= HEAD + bytes;
        self.queued.pop_front()
    }

    /// Counts a message that a receive has consumed. Returns the bytes for which Credit is due, if there are enough.
    pub fn consume(&mut self, bytes: usize) -> Option<u64> {
        self.taken += HEAD + bytes;
        (self.taken >= WINDOW / 4).then(|| std::mem::take(&mut self.taken) as u64)
    }

    pub fn post(&mut self, tag: u32, receive: Waiting) {
        push(&mut self.posted, tag, receive);
    }

    pub fn take_posted(&mut self, tag: u32) -> Option<Waiting> {
        pop(&mut self.posted, tag, true)
    }

    /// Keeps a message for which no receive is posted.
    pub fn keep(&mut self, tag: u32, message: Vec<u8>) {
        push(&mut self.arrived, tag, message);
    }

    pub fn has_arrived(&self, tag: u32) -> bool {
        self.arrived.get(&tag).is_some_and(|messages| !messages.is_empty())
    }

    pub fn take_arrived(&mut self, tag: u32) -> Option<Vec<u8>> {
        pop(&mut self.arrived, tag, true)
    }

    // --------------------------------------------------------------------------------------------------------- bodies

    /// Posts a receive of a body.
    pub fn want(&mut self, number: u64, receive: Waiting) {
        push(&mut self.wants, number, receive);
    }

    pub fn take_want(&mut self, number: u64) -> Option<Waiting> {
        pop(&mut self.wants, number, false)
    }

    /// The peer asks for a body of `bytes` bytes. Returns the send if it has begun; otherwise it is remembered.
    pub fn asks(&mut self, number: u64, bytes: u64) -> Option<Waiting> {
        let send = pop(&mut self.unwanted, number, false);
        if send.is_none() {
            push(&mut self.wanted, number, bytes);
        }
        send
    }

    /// Adds the send of a body. Returns the send, and the size that the peer has asked for, if the peer has asked.
    pub fn offer(&mut self, number: u64, send: Waiting) -> Option<(u64, Waiting)> {
        match pop(&mut self.wanted, number, false) {
            Some(bytes) => Some((bytes, send)),
            None => {
                push(&mut self.unwanted, number, send);
                None
            }
        }
    }

    /// Removes the bodies that `is_it` selects.
    pub fn give_up(&mut self, is_it: impl Fn(&End) -> bool) {
        for lists in [&mut self.wants, &mut self.unwanted] {
            lists.values_mut().for_each(|list| list.retain(|one| !is_it(&one.end)));
            lists.retain(|_, list| !list.is_empty());
        }
    }
}
