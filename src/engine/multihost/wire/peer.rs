//! The messages in flight between one rank of a channel and one peer, and the connection to that peer. A window limits
//! the short messages. A receiver asks for each body of a lane with a Want. The body is sent before its Want has come,
//! which saves a latency, as long as the bodies sent so have at most `WINDOW` bytes together. Otherwise, and always with
//! UCX, it waits for its Want. So a rank that runs ahead of its peer can fill that window, but nothing waits for room in
//! the window.

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
/// At most this many bytes of short messages, headers included, may be in flight to one peer, and at most as many bytes
/// of bodies for which the peer has not asked yet.
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
    /// Bodies by number. A receiver asks for a lane's body with a `Want` frame. `wanted`: sizes of the bodies that the
    /// peer has asked for so and this rank has not sent yet. `unwanted`: this rank's sends for lanes that the peer has
    /// not asked for yet. `wants`: all of this rank's posted receives whose body has not arrived.
    wanted: HashMap<u64, VecDeque<u64>>,
    unwanted: HashMap<u64, VecDeque<Waiting>>,
    wants: HashMap<u64, VecDeque<Waiting>>,
    /// Bodies that this rank has sent and whose Want has not come: how many by number, and their bytes.
    sent_ahead: HashMap<u64, usize>,
    ahead: usize,
    /// Bodies that have arrived and have no posted receive, and their bytes.
    early: HashMap<u64, VecDeque<Vec<u8>>>,
    kept: usize,
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
            sent_ahead: HashMap::new(),
            ahead: 0,
            early: HashMap::new(),
            kept: 0,
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

    /// Returns the peer's connection. The group must be in use.
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

    /// Handles the peer's request for a body of `bytes` bytes. Returns the send if it waits for this request. If the
    /// body was sent ahead, only counts the request. If the send was not offered yet, remembers the request.
    pub fn asks(&mut self, number: u64, bytes: u64) -> Option<Waiting> {
        if let Some(count) = self.sent_ahead.get_mut(&number) {
            *count -= 1;
            if *count == 0 {
                self.sent_ahead.remove(&number);
            }
            self.ahead = self.ahead.saturating_sub(bytes as usize);
            return None;
        }
        let send = pop(&mut self.unwanted, number, false);
        if send.is_none() {
            push(&mut self.wanted, number, bytes);
        }
        send
    }

    /// Adds the send of a body. If the send may begin now, returns it with the size that the peer has asked for, or
    /// with its own size if it is sent ahead of the peer's request. Otherwise the send waits for `asks`.
    pub fn offer(&mut self, number: u64, send: Waiting, may_go_ahead: bool) -> Option<(u64, Waiting)> {
        if let Some(bytes) = pop(&mut self.wanted, number, false) {
            return Some((bytes, send));
        }
        let is_next = !self.unwanted.contains_key(&number);
        if may_go_ahead && is_next && self.ahead + send.bytes <= WINDOW {
            self.ahead += send.bytes;
            *self.sent_ahead.entry(number).or_default() += 1;
            return Some((send.bytes as u64, send));
        }
        push(&mut self.unwanted, number, send);
        None
    }

    /// Whether the peer has asked for all bodies that were sent ahead.
    pub fn is_taken(&self) -> bool {
        self.sent_ahead.is_empty()
    }

    /// Whether a body that has no posted receive is kept for a later one. What exceeds the window can only belong to
    /// receives that were given up.
    pub fn keeps(&self, bytes: usize) -> bool {
        self.kept + bytes <= WINDOW
    }

    /// Keeps a body that has no posted receive.
    pub fn keep_body(&mut self, number: u64, body: Vec<u8>) {
        self.kept += body.len();
        push(&mut self.early, number, body);
    }

    pub fn take_body(&mut self, number: u64) -> Option<Vec<u8>> {
        let body = pop(&mut self.early, number, false)?;
        self.kept -= body.len();
        Some(body)
    }

    /// Removes the bodies that `is_it` selects.
    pub fn give_up(&mut self, is_it: impl Fn(&End) -> bool) {
        for lists in [&mut self.wants, &mut self.unwanted] {
            lists.values_mut().for_each(|list| list.retain(|one| !is_it(&one.end)));
            lists.retain(|_, list| !list.is_empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUARTER: usize = WINDOW / 4;

    fn peer() -> Peer {
        Peer::new(ProcessId::default())
    }

    fn body(bytes: usize) -> Waiting {
        Waiting { memory: Memory::Owned(Vec::new()), bytes, end: End::Nobody, counted: None }
    }

    #[test]
    fn bodies_go_ahead_while_they_fit_into_the_window() {
        let mut peer = peer();
        let began = (0..6).map(|_| peer.offer(7, body(QUARTER), true).is_some()).collect::<Vec<_>>();
        assert_eq!(began, [true, true, true, true, false, false]);
        assert!(peer.offer(8, body(1), true).is_none(), "the window is full for every number");
        assert!(peer.offer(9, body(QUARTER), false).is_none());
        // Each Want counts for the oldest body of its number. The first four were sent.
        assert!((0..4).all(|_| peer.asks(7, QUARTER as u64).is_none()));
        assert!(peer.offer(7, body(1), true).is_none(), "two earlier bodies of this number wait for their Want");
        assert!(peer.offer(8, body(1), true).is_none(), "an earlier one waits");
        assert!((0..3).all(|_| peer.asks(7, QUARTER as u64).is_some()));
        assert!(peer.offer(7, body(WINDOW), true).is_some(), "the window is empty again");
    }

    #[test]
    fn a_body_that_was_asked_for_does_not_count_as_sent_ahead() {
        let mut peer = peer();
        for _ in 0..100 {
            assert!(peer.asks(7, 5).is_none());
            assert_eq!(peer.offer(7, body(QUARTER), true).map(|(bytes, _)| bytes), Some(5), "what the peer asked for");
        }
        assert!(peer.offer(8, body(WINDOW + 1), true).is_none(), "a longer body waits");
        assert_eq!((peer.ahead, peer.sent_ahead.len()), (0, 0));
    }

    #[test]
    fn no_more_is_kept_than_a_peer_may_send_ahead() {
        let mut peer = peer();
        assert!(peer.keeps(WINDOW) && !peer.keeps(WINDOW + 1));
        (0..4).for_each(|at| peer.keep_body(at % 2, vec![at as u8; QUARTER]));
        assert!(!peer.keeps(1));
        assert_eq!(peer.take_body(1).map(|body| body[0]), Some(1));
        assert!(peer.keeps(QUARTER) && peer.take_body(1).map(|body| body[0]) == Some(3) && peer.take_body(1).is_none());
    }
}
