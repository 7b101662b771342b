//! Transfers one group's messages, mail and bodies; peers are named by rank.
//!
//! A short message of a lane is sent at once, if the receiver has consumed enough of the earlier ones (`WINDOW`). The
//! receiver keeps it until a receive is posted. A longer message is a body: when its receive is posted, the receiver
//! sends Want, and then the sender sends the body. So if the receive is posted ahead, no latency is added, and a body
//! is never stored on the way.

#![allow(unsafe_code)] // the caller vouches for the memory of bodies

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::connection::{Connection, Outgoing, Receiver};
use super::frame::{Frame, HEAD, Kind};
use super::memory::Memory;
use super::transfer::{End, Event, Events, Slot, Target};
use super::{Counted, Early, ProcessId, Wire};
use crate::engine::multihost::link::{Broken, Done, LONGEST_MAIL, Link, Mail, Mailbox, Transfer};
use crate::error::{Error, Result};
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;
use crate::types::Span;

/// Longest message of a lane that is sent without a Want from the receiver.
const SHORT: usize = 16 << 10;
/// At most this many bytes of such messages, headers included, may be in flight to one peer.
const WINDOW: usize = 1 << 20;
/// Set in the number of a lane's body; the rest of the number is the tag. Messages of programs do not use this range.
const OF_LANE: u64 = 1 << 63;
/// Why nothing more arrives from a peer that has left the channel.
const LEFT: &str = "Connection closed by peer";

/// A posted receive, or a send that is not sent yet.
struct Waiting {
    memory: Memory,
    bytes: usize,
    end: End,
    /// Set if the wire must be driven for this transfer even while no thread waits.
    _counted: Option<Counted>,
}

/// The messages in flight between this rank and one peer. Each list is first in, first out for its tag or number.
struct Peer {
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

fn push<K: std::hash::Hash + Eq, V>(lists: &mut HashMap<K, VecDeque<V>>, key: K, value: V) {
    lists.entry(key).or_default().push_back(value);
}

/// Removes and returns the first entry. If the list is empty then, it is removed unless `keep` is set, because each
/// number is used only once.
fn pop<K: std::hash::Hash + Eq, V>(lists: &mut HashMap<K, VecDeque<V>>, key: K, keep: bool) -> Option<V> {
    let list = lists.get_mut(&key)?;
    let first = list.pop_front();
    if list.is_empty() && !keep {
        lists.remove(&key);
    }
    first
}

impl Peer {
    fn new(process: ProcessId) -> Peer {
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

    /// Removes and returns all sends and receives of this peer that have not ended.
    fn take_all(&mut self) -> Vec<Waiting> {
        let queued = std::mem::take(&mut self.queued).into_iter().map(|(_, one)| one);
        let posted = std::mem::take(&mut self.posted).into_values().flatten();
        let unwanted = std::mem::take(&mut self.unwanted).into_values().flatten();
        let wants = std::mem::take(&mut self.wants).into_values().flatten();
        queued.chain(posted).chain(unwanted).chain(wants).collect()
    }

    /// Whether `token` belongs to the current connection to the peer, and not to a connection that was replaced.
    fn leads_by(&self, token: u64) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.token == token)
    }
}

struct State {
    /// Indexed by rank; the entry of this rank is unused.
    peers: Vec<Peer>,
    mailbox: Option<Arc<dyn Mailbox>>,
    /// Mail that arrived before the mailbox was opened, with its sender.
    early_mail: VecDeque<(usize, Vec<u8>)>,
    /// Whether this rank has left the channel.
    cut: bool,
}

pub struct Channel {
    pub id: u64,
    me: usize,
    wire: Arc<Wire>,
    ranks: HashMap<ProcessId, usize>,
    /// Each rank's process as text, for error messages.
    who: Vec<String>,
    state: Mutex<State>,
    this: Weak<Channel>,
}

impl Channel {
    /// Makes the channel of a group whose ranks are these processes. `who` has each process as text.
    pub fn new(wire: &Arc<Wire>, id: u64, me: usize, processes: &[ProcessId], who: Vec<String>) -> Arc<Channel> {
        let ranks = processes.iter().enumerate().map(|(rank, process)| (*process, rank)).collect();
        let peers = processes.iter().map(|process| Peer::new(*process)).collect();
        let state = State { peers, mailbox: None, early_mail: VecDeque::new(), cut: false };
        Arc::new_cyclic(|this| Channel {
            id,
            me,
            wire: Arc::clone(wire),
            ranks,
            who,
            state: Mutex::new(state),
            this: Weak::clone(this),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owned(&self) -> Arc<Channel> {
        self.this.upgrade().expect("a channel that is used is alive")
    }

    fn frame(&self, kind: Kind, bytes: usize) -> Frame {
        Frame::new(kind, self.id, bytes)
    }

    // -------------------------------------------------------------------------------------------------------- joining

    /// Uses this connection for its peer, unless the peer has already joined by a different connection. Sends Hello,
    /// which says that this rank has joined.
    pub fn connect(&self, connection: &Arc<Connection>) {
        let Some(rank) = self.ranks.get(&connection.peer) else { return };
        let mut state = self.lock();
        let peer = &mut state.peers[*rank];
        if peer.joined {
            return;
        }
        peer.connection = Some(Arc::clone(connection));
        drop(state);
        fault_points::reached(FaultPoint::Joining);
        let mut events = Events::default();
        connection.push(&self.wire, Outgoing::control(self.frame(Kind::Hello, 0)), &mut events);
    }

    /// Records that the peer had joined before this rank did, and that it has left again if `left` is set.
    pub(super) fn was_early(&self, early: &Early) {
        let Some(rank) = self.ranks.get(&early.peer) else { return };
        let peer = &mut self.lock().peers[*rank];
        if peer.leads_by(early.token) {
            peer.joined = true;
            if early.left {
                peer.lost.get_or_insert_with(|| LEFT.to_string());
            }
        }
    }

    /// The peers that have not joined, and for each of them whether a working connection exists.
    pub fn missing(&self) -> Vec<(usize, ProcessId, bool)> {
        let state = self.lock();
        let others = state.peers.iter().enumerate().filter(|(rank, peer)| *rank != self.me && !peer.joined);
        let lives = |peer: &Peer| peer.connection.as_ref().is_some_and(|one| one.broken().is_none());
        others.map(|(rank, peer)| (rank, peer.process, lives(peer))).collect()
    }

    // ------------------------------------------------------------------------------------------------------ receiving

    fn rank_of(&self, peer: ProcessId) -> std::result::Result<usize, String> {
        self.ranks.get(&peer).copied().ok_or_else(|| "it sent a frame of a group that it is not in".to_string())
    }

    /// Sends a body to a peer that has sent Want for `frame.bytes` bytes.
    fn send_wanted(&self, wire: &Wire, connection: &Connection, frame: Frame, one: Waiting, events: &mut Events) {
        let Waiting { memory, bytes, end, .. } = one;
        if frame.bytes != bytes as u64 {
            let text = format!("a message of {bytes} bytes matched a receive of {}", frame.bytes);
            return end.tell(Err(text), memory, events);
        }
        let frame = Frame { number: frame.number, ..self.frame(Kind::Body, bytes) };
        fault_points::reached(FaultPoint::BodyAsked);
        connection.push(wire, Outgoing::new(frame, memory, end), events);
    }

    /// Counts a short message that a receive has consumed. If enough bytes have accumulated, sends Credit to the peer.
    fn take(&self, wire: &Wire, rank: usize, bytes: usize, events: &mut Events) {
        let mut state = self.lock();
        let peer = &mut state.peers[rank];
        peer.taken += HEAD + bytes;
        if peer.taken < WINDOW / 4 {
            return;
        }
        let frame = Frame { number: std::mem::take(&mut peer.taken) as u64, ..self.frame(Kind::Credit, 0) };
        let Some(connection) = peer.connection.clone() else { return };
        drop(state);
        connection.push(wire, Outgoing::control(frame), events);
    }

    /// Records that nothing more arrives from this peer. Messages that have arrived can still be received.
    pub fn lose(&self, rank: usize, why: &str, events: &mut Events) {
        let mut state = self.lock();
        let peer = &mut state.peers[rank];
        if peer.lost.is_some() {
            return;
        }
        peer.lost = Some(why.to_string());
        let all = peer.take_all();
        drop(state);
        all.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.memory, events));
        events.ended = true;
        let (channel, why) = (self.owned(), why.to_string());
        events.list.push(Event::Call(Box::new(move || channel.give_loss(rank, &why))));
    }

    /// Handles the loss of a connection. A peer that has not joined may connect again.
    pub fn lose_connection(&self, gone: &Connection, why: &str, events: &mut Events) {
        let Some(rank) = self.ranks.get(&gone.peer).copied() else { return };
        let mut state = self.lock();
        let peer = &mut state.peers[rank];
        if !peer.leads_by(gone.token) {
            return;
        }
        if peer.joined {
            drop(state);
            return self.lose(rank, why, events);
        }
        peer.connection = None;
        events.ended = true;
    }

    pub fn give_mail(&self, peer: usize, message: Vec<u8>) {
        let mut state = self.lock();
        match state.mailbox.clone() {
            Some(mailbox) => {
                drop(state);
                mailbox.came(peer, message);
            }
            None => state.early_mail.push_back((peer, message)),
        }
    }

    pub fn give_loss(&self, peer: usize, why: &str) {
        let mailbox = self.lock().mailbox.clone();
        if let Some(mailbox) = mailbox {
            mailbox.lost(peer, why);
        }
    }

    pub fn connections(&self) -> Vec<Arc<Connection>> {
        self.lock().peers.iter().filter_map(|peer| peer.connection.clone()).collect()
    }

    // -------------------------------------------------------------------------------------------------------- leaving

    fn leave(&self, why: &str) {
        let mut state = self.lock();
        if std::mem::replace(&mut state.cut, true) {
            return;
        }
        let mut left = Vec::new();
        let mut connections = Vec::new();
        for peer in &mut state.peers {
            left.extend(peer.take_all());
            peer.lost.get_or_insert_with(|| why.to_string());
            connections.extend(peer.connection.clone());
        }
        drop(state);
        fault_points::reached(FaultPoint::Cutting);
        let mut events = Events::default();
        for connection in connections {
            connection.forget(&self.wire, self.id, why, &mut events);
            connection.push(&self.wire, Outgoing::control(self.frame(Kind::Cut, 0)), &mut events);
        }
        left.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.memory, &mut events));
        events.ended = true;
        self.wire.defer(events);
    }
}

impl Receiver for Channel {
    fn control(
        &self,
        wire: &Wire,
        connection: &Connection,
        frame: Frame,
        events: &mut Events,
    ) -> std::result::Result<(), String> {
        let rank = self.rank_of(connection.peer)?;
        let mut state = self.lock();
        let peer = &mut state.peers[rank];
        if !peer.leads_by(connection.token) {
            return Ok(());
        }
        match frame.kind {
            Kind::Hello => {
                peer.joined = true;
                events.ended = true;
            }
            Kind::Credit => {
                peer.window = peer.window.saturating_add(frame.number as usize).min(WINDOW);
                while let Some((_, next)) = peer.queued.front()
                    && HEAD + next.bytes <= peer.window
                {
                    let (tag, Waiting { memory, bytes, end, .. }) = peer.queued.pop_front().expect("just seen");
                    peer.window -= HEAD + bytes;
                    let frame = Frame { tag, ..Frame::new(Kind::Message, self.id, bytes) };
                    connection.push(wire, Outgoing::new(frame, memory, end), events);
                }
            }
            Kind::Want => match pop(&mut peer.unwanted, frame.number, false) {
                Some(waiting) => self.send_wanted(wire, connection, frame, waiting, events),
                None => push(&mut peer.wanted, frame.number, frame.bytes),
            },
            Kind::Cut => {
                drop(state);
                self.lose(rank, LEFT, events);
            }
            Kind::Message | Kind::Mail | Kind::Body => (),
        }
        Ok(())
    }

    fn begin(&self, peer: ProcessId, frame: &Frame) -> std::result::Result<Target, String> {
        let rank = self.rank_of(peer)?;
        let mut state = self.lock();
        let longest = match frame.kind {
            Kind::Message => SHORT,
            Kind::Mail => LONGEST_MAIL,
            _ => usize::MAX,
        };
        if frame.data() > longest {
            return Err(format!("it sent a message of {} bytes where {longest} are allowed", frame.data()));
        }
        if state.cut {
            return Ok(Target::Discard);
        }
        let peer = &mut state.peers[rank];
        let posted = match frame.kind {
            Kind::Message => pop(&mut peer.posted, frame.tag, true),
            Kind::Body => match pop(&mut peer.wants, frame.number, false) {
                None => return Ok(Target::Discard), // the receive was given up
                found => found,
            },
            _ => None,
        };
        let Some(Waiting { memory, bytes, end, .. }) = posted else {
            return Ok(Target::Fresh(vec![0; frame.data()]));
        };
        if frame.data() > bytes || (frame.kind == Kind::Body && frame.data() != bytes) {
            return Err(format!("a message of {} bytes matched a receive of {bytes}", frame.data()));
        }
        Ok(Target::Posted(memory, end))
    }

    fn finish(&self, wire: &Wire, connection: &Connection, frame: &Frame, target: Target, events: &mut Events) {
        let Ok(rank) = self.rank_of(connection.peer) else { return };
        match target {
            Target::Discard => (),
            Target::Posted(memory, end) => {
                if frame.kind == Kind::Message {
                    self.take(wire, rank, frame.data(), events);
                }
                end.tell(Ok(()), memory, events);
            }
            Target::Fresh(data) if frame.kind == Kind::Mail => {
                let channel = self.owned();
                events.list.push(Event::Call(Box::new(move || channel.give_mail(rank, data))));
            }
            Target::Fresh(data) => {
                let mut state = self.lock();
                let peer = &mut state.peers[rank];
                // A receive may have been posted while the data arrived.
                match pop(&mut peer.posted, frame.tag, true) {
                    Some(Waiting { end, .. }) => {
                        drop(state);
                        self.take(wire, rank, frame.data(), events);
                        end.tell(Ok(()), Memory::Owned(data), events);
                    }
                    None => push(&mut peer.arrived, frame.tag, data),
                }
            }
        }
    }
}

/// A transfer of a lane, whose thread waits for it.
struct Lane {
    channel: Arc<Channel>,
    peer: usize,
    slot: Arc<Slot>,
    /// Whether the transfer uses memory of the caller.
    borrows: bool,
}

impl Transfer for Lane {
    fn wait(self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        if self.slot.has_ended() || self.channel.wire.wait(|| self.slot.has_ended(), timeout) {
            let ended = self.slot.take().expect("it has ended, and one thread waits for it");
            return ended.map_err(Broken::from);
        }
        Err(Broken::late(format!("Timed out after {} ms", timeout.as_millis())))
    }

    fn ends_within(&self, timeout: Duration) -> bool {
        self.slot.has_ended() || self.channel.wire.wait(|| self.slot.has_ended(), timeout)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.borrows && !self.slot.has_ended() {
            self.channel.give_up(self.peer, &self.slot);
        }
    }
}

/// A transfer that has ended before the call that started it returns.
struct Ended(Vec<u8>);

impl Transfer for Ended {
    fn wait(self: Box<Self>, _timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        Ok(self.0)
    }

    fn ends_within(&self, _timeout: Duration) -> bool {
        true
    }
}

/// A receive of a short message into the caller's memory. `wait` copies the message from a buffer.
struct ShortInto {
    received: Box<dyn Transfer>,
    pieces: Vec<Span>,
}

impl Transfer for ShortInto {
    fn wait(self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        let ShortInto { received, pieces } = *self;
        Memory::Borrowed(pieces).write(0, &received.wait(timeout)?);
        Ok(Vec::new())
    }

    fn ends_within(&self, timeout: Duration) -> bool {
        self.received.ends_within(timeout)
    }
}

/// A group's channel as its engine holds it. When this is dropped, the rank leaves the channel.
pub struct WireLink(pub Arc<Channel>);

impl WireLink {
    fn lane(&self, peer: usize, slot: Arc<Slot>, borrows: bool) -> Lane {
        Lane { channel: Arc::clone(&self.0), peer, slot, borrows }
    }

    /// The error of a call for a peer that is lost. It has the link's text; `names` adds the process.
    fn gone(peer: usize, why: &str) -> Error {
        Error::rank_failed(peer, why)
    }
}

impl Link for WireLink {
    fn process(&self, peer: usize) -> String {
        self.0.who.get(peer).cloned().unwrap_or_default()
    }

    fn receive(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>> {
        assert!(bytes <= buffer.len(), "a receive of {bytes} bytes into {}", buffer.len());
        let channel = &self.0;
        let slot = Arc::new(Slot::default());
        let end = End::Slot(Arc::clone(&slot));
        let waiting = Waiting { memory: Memory::Owned(buffer), bytes, end, _counted: None };
        let mut events = Events::default();
        let mut state = channel.lock();
        let from = &mut state.peers[peer];
        if bytes > SHORT {
            if let Some(why) = &from.lost {
                return Err(WireLink::gone(peer, why));
            }
            channel.want(from, OF_LANE | u64::from(tag), waiting, &mut events);
            return Ok(Box::new(self.lane(peer, slot, false)));
        }
        if let Some(data) = pop(&mut from.arrived, tag, true) {
            let length = data.len();
            if length > bytes {
                return Err(Error::system(format!(
                    "sagellm: a message of {length} bytes of rank {peer} matched a receive of {bytes}"
                )));
            }
            drop(state);
            let Memory::Owned(mut buffer) = waiting.memory else { unreachable!("given as owned") };
            buffer[..length].copy_from_slice(&data);
            channel.take(&channel.wire, peer, length, &mut events);
            return Ok(Box::new(Ended(buffer)));
        }
        if let Some(why) = &from.lost {
            return Err(WireLink::gone(peer, why));
        }
        push(&mut from.posted, tag, waiting);
        Ok(Box::new(self.lane(peer, slot, false)))
    }

    fn send(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>> {
        assert!(bytes <= buffer.len(), "a send of {bytes} bytes from {}", buffer.len());
        let channel = &self.0;
        let slot = Arc::new(Slot::default());
        let end = End::Slot(Arc::clone(&slot));
        let counted = Some(Counted::new(&channel.wire));
        let waiting = Waiting { memory: Memory::Owned(buffer), bytes, end, _counted: counted };
        let mut events = Events::default();
        let mut state = channel.lock();
        let to = &mut state.peers[peer];
        if let Some(why) = &to.lost {
            return Err(WireLink::gone(peer, why));
        }
        if bytes > SHORT {
            channel.offer(to, OF_LANE | u64::from(tag), waiting, &mut events);
        } else if to.queued.is_empty() && HEAD + bytes <= to.window {
            to.window -= HEAD + bytes;
            let connection = to.connection.clone().expect("all ranks are connected before a group is used");
            drop(state);
            let frame = Frame { tag, ..channel.frame(Kind::Message, bytes) };
            connection.push(&channel.wire, Outgoing::new(frame, waiting.memory, waiting.end), &mut events);
        } else {
            to.queued.push_back((tag, waiting));
        }
        Ok(Box::new(self.lane(peer, slot, false)))
    }

    unsafe fn receive_into(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        if bytes <= SHORT {
            let received = self.receive(peer, tag, vec![0; bytes], bytes)?;
            return Ok(Box::new(ShortInto { received, pieces }));
        }
        let slot = Arc::new(Slot::default());
        let end = End::Slot(Arc::clone(&slot));
        let waiting = Waiting { memory: Memory::Borrowed(pieces), bytes, end, _counted: None };
        let mut state = self.0.lock();
        let from = &mut state.peers[peer];
        if let Some(why) = &from.lost {
            return Err(WireLink::gone(peer, why));
        }
        self.0.want(from, OF_LANE | u64::from(tag), waiting, &mut Events::default());
        Ok(Box::new(self.lane(peer, slot, true)))
    }

    unsafe fn send_from(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let mut memory = Memory::Borrowed(pieces);
        if bytes <= SHORT {
            memory.own(0);
            let Memory::Owned(buffer) = memory else { unreachable!("just copied") };
            return self.send(peer, tag, buffer, bytes);
        }
        let slot = Arc::new(Slot::default());
        let end = End::Slot(Arc::clone(&slot));
        let waiting = Waiting { memory, bytes, end, _counted: Some(Counted::new(&self.0.wire)) };
        let mut state = self.0.lock();
        let to = &mut state.peers[peer];
        if let Some(why) = &to.lost {
            return Err(WireLink::gone(peer, why));
        }
        self.0.offer(to, OF_LANE | u64::from(tag), waiting, &mut Events::default());
        Ok(Box::new(self.lane(peer, slot, true)))
    }

    fn hand_over(&self) {
        self.0.wire.wake_for_pending();
    }

    fn cut(&self) {
        if !self.0.wire.is_inherited() {
            self.0.leave("the group has ended on this rank");
        }
    }

    fn close(&self) {
        if !self.0.wire.is_inherited() {
            self.cut();
            self.0.wire.close(&self.0);
        }
    }
}

impl Channel {
    /// Posts a receive of a body, and sends Want to the peer.
    fn want(&self, from: &mut Peer, number: u64, waiting: Waiting, events: &mut Events) {
        fault_points::reached(FaultPoint::BodyWanted);
        let frame = Frame { number, ..self.frame(Kind::Want, waiting.bytes) };
        push(&mut from.wants, number, waiting);
        let connection = from.connection.clone().expect("all ranks are connected before a group is used");
        connection.push(&self.wire, Outgoing::control(frame), events);
    }

    /// Gives up a lane's transfer and stops using its borrowed memory. If a peer has sent Want for the body, it waits
    /// until it learns that the group has failed on this rank; this failure always follows.
    fn give_up(&self, peer: usize, slot: &Arc<Slot>) {
        let is_it = |end: &End| matches!(end, End::Slot(one) if Arc::ptr_eq(one, slot));
        let Some(connection) = self.lock().peers[peer].connection.clone() else { return };
        // Runs while the reading side is locked, so the connection starts no transfer of this channel.
        connection.give_up(&self.wire, is_it, || {
            let mut state = self.lock();
            let peer = &mut state.peers[peer];
            for lists in [&mut peer.wants, &mut peer.unwanted] {
                lists.values_mut().for_each(|list| list.retain(|one| !is_it(&one.end)));
                lists.retain(|_, list| !list.is_empty());
            }
        });
    }

    /// Sends a body now if the peer has sent Want for it, otherwise when the Want arrives.
    fn offer(&self, to: &mut Peer, number: u64, waiting: Waiting, events: &mut Events) {
        match pop(&mut to.wanted, number, false) {
            Some(bytes) => {
                let connection = to.connection.clone().expect("all ranks are connected before a group is used");
                let frame = Frame { number, ..self.frame(Kind::Want, bytes as usize) };
                self.send_wanted(&self.wire, &connection, frame, waiting, events);
            }
            None => push(&mut to.unwanted, number, waiting),
        }
    }
}

impl Mail for WireLink {
    fn open_mailbox(&self, mailbox: Arc<dyn Mailbox>) {
        loop {
            let mut state = self.0.lock();
            let early = std::mem::take(&mut state.early_mail);
            if early.is_empty() {
                state.mailbox = Some(Arc::clone(&mailbox));
                let peers = state.peers.iter().enumerate();
                let lost: Vec<(usize, String)> =
                    peers.filter_map(|(rank, peer)| Some((rank, peer.lost.clone()?))).collect();
                drop(state);
                return lost.into_iter().for_each(|(rank, why)| mailbox.lost(rank, &why));
            }
            drop(state);
            early.into_iter().for_each(|(peer, message)| mailbox.came(peer, message));
        }
    }

    fn mail(&self, peer: usize, message: Vec<u8>) -> Result<()> {
        assert!(message.len() <= LONGEST_MAIL, "mail of {} bytes", message.len());
        let channel = &self.0;
        let state = channel.lock();
        let to = &state.peers[peer];
        if let Some(why) = &to.lost {
            return Err(WireLink::gone(peer, why));
        }
        let connection = to.connection.clone().expect("all ranks are connected before a group is used");
        let mut events = Events::default();
        let frame = channel.frame(Kind::Mail, message.len());
        // Done under the lock, so that mail is sent in the order of the calls.
        let outgoing = Outgoing::new(frame, Memory::Owned(message), End::Nobody);
        connection.push(&channel.wire, outgoing, &mut events);
        Ok(())
    }

    unsafe fn send_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let counted = Some(Counted::new(&self.0.wire));
        let waiting = Waiting { memory: Memory::Borrowed(pieces), bytes, end: End::Done(done), _counted: counted };
        let mut events = Events::default();
        let mut state = self.0.lock();
        let to = &mut state.peers[peer];
        if let Some(why) = &to.lost {
            return Err(WireLink::gone(peer, why));
        }
        self.0.offer(to, number, waiting, &mut events);
        drop(state);
        self.0.wire.defer(events);
        self.0.wire.wake_for_pending();
        Ok(())
    }

    unsafe fn receive_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let counted = Some(Counted::new(&self.0.wire));
        let waiting = Waiting { memory: Memory::Borrowed(pieces), bytes, end: End::Done(done), _counted: counted };
        let mut events = Events::default();
        let mut state = self.0.lock();
        let from = &mut state.peers[peer];
        if let Some(why) = &from.lost {
            return Err(WireLink::gone(peer, why));
        }
        self.0.want(from, number, waiting, &mut events);
        drop(state);
        self.0.wire.defer(events);
        self.0.wire.wake_for_pending();
        Ok(())
    }

    fn abandon_body(&self, peer: usize, number: u64) {
        let waiting = pop(&mut self.0.lock().peers[peer].wants, number, false);
        drop(waiting); // without the lock
    }

    fn await_mail(&self) -> Box<dyn Send> {
        let counted = Counted::new(&self.0.wire);
        self.0.wire.wake_for_pending();
        Box::new(counted)
    }

    fn poll(&self, sleep: Duration) -> bool {
        self.0.wire.poll(sleep)
    }
}

impl Drop for WireLink {
    fn drop(&mut self) {
        self.close();
    }
}
