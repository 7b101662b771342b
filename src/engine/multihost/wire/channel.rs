//! Transfers one group's messages, mail and bodies; peers are named by rank.
//!
//! A short message of a lane is sent immediately if the receiver has consumed enough of the earlier ones (`peer`). The
//! receiver keeps it until a receive is posted. A longer message is a body: when its receive is posted, the receiver
//! sends Want. A long body is sent when its Want has come, so it is never stored on the way; if the receive is posted
//! ahead, no latency is added. A shorter body is sent before its Want (`peer`). Bodies of the program's messages have no
//! Want, because ranks ask for them by mail.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::connection::Connection;
use super::driving::Driving;
use super::frame::{Frame, Kind};
use super::memory::Memory;
use super::peer::{Peer, SHORT, Waiting};
use super::receiver::{Origin, Receiver};
use super::transfer::{End, Event, Events, Outgoing, Slot, Target};
use super::{ProcessId, locked};
use crate::engine::multihost::link::{LONGEST_MAIL, MOST_BODIES, Mailbox};
use crate::error::{Error, Result};
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;

/// Why nothing more arrives from a peer that has left the channel.
const LEFT: &str = "Connection closed by peer";

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
    driving: Arc<Driving>,
    ranks: HashMap<ProcessId, usize>,
    /// Each rank's process as text, for error messages.
    who: Vec<String>,
    state: Mutex<State>,
    this: Weak<Channel>,
}

impl Channel {
    /// Makes the channel of a group whose ranks are these processes. `who` has each process as text.
    pub fn new(driving: &Arc<Driving>, id: u64, me: usize, processes: &[ProcessId], who: Vec<String>) -> Arc<Channel> {
        let ranks = processes.iter().enumerate().map(|(rank, process)| (*process, rank)).collect();
        let peers = processes.iter().map(|process| Peer::new(*process)).collect();
        let state = State { peers, mailbox: None, early_mail: VecDeque::new(), cut: false };
        Arc::new_cyclic(|this| Channel {
            id,
            me,
            driving: Arc::clone(driving),
            ranks,
            who,
            state: Mutex::new(state),
            this: Weak::clone(this),
        })
    }

    /// Returns the process of a peer as text.
    pub fn who(&self, peer: usize) -> String {
        self.who.get(peer).cloned().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
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
        if !peer.connect(connection) {
            return;
        }
        drop(state);
        fault_points::reached(FaultPoint::Joining);
        let mut events = Events::default();
        connection.push(&self.driving, Outgoing::control(self.frame(Kind::Hello, 0)), &mut events);
    }

    /// Records that the peer joined before this rank did and, if `left`, has left again since. The peer's Hello came on
    /// the connection `token`.
    pub fn was_early(&self, peer: ProcessId, token: u64, left: bool) {
        let Some(rank) = self.ranks.get(&peer) else { return };
        let peer = &mut self.lock().peers[*rank];
        if peer.leads_by(token) {
            peer.join();
            if left {
                peer.lose(LEFT);
            }
        }
    }

    /// Returns the peers that have not joined, and for each of them whether a working connection exists.
    pub fn missing(&self) -> Vec<(usize, ProcessId, bool)> {
        let state = self.lock();
        let others = state.peers.iter().enumerate().filter(|(rank, peer)| *rank != self.me && !peer.has_joined());
        others.map(|(rank, peer)| (rank, peer.process(), peer.is_reachable())).collect()
    }

    // ------------------------------------------------------------------------------------------------------ receiving

    fn rank_of(&self, peer: ProcessId) -> std::result::Result<usize, String> {
        self.ranks.get(&peer).copied().ok_or_else(|| "it sent a frame of a group that it is not in".to_string())
    }

    /// Sends a lane's body for which the peer has a receive of `wanted` bytes.
    fn send_wanted(&self, connection: &Connection, number: u64, wanted: u64, one: Waiting, events: &mut Events) {
        if wanted != one.bytes as u64 {
            let text = format!("a message of {} bytes matched a receive of {wanted}", one.bytes);
            return one.end.tell(Err(text), one.memory, events);
        }
        self.push_body(connection, number, one, events);
    }

    fn push_body(&self, connection: &Connection, number: u64, one: Waiting, events: &mut Events) {
        let Waiting { memory, bytes, end, .. } = one;
        let frame = Frame { number, ..self.frame(Kind::Body, bytes) };
        fault_points::reached(FaultPoint::BodyAsked);
        connection.push(&self.driving, Outgoing::new(frame, memory, end), events);
    }

    /// Counts a short message that a receive has consumed. If enough bytes have accumulated, sends Credit to the peer.
    fn take(&self, rank: usize, bytes: usize, events: &mut Events) {
        let mut state = self.lock();
        let peer = &mut state.peers[rank];
        let Some(number) = peer.consume(bytes) else { return };
        let frame = Frame { number, ..self.frame(Kind::Credit, 0) };
        let Some(connection) = peer.connection() else { return };
        drop(state);
        connection.push(&self.driving, Outgoing::control(frame), events);
    }

    /// Records that nothing more arrives from this peer, and fails its transfers. Messages that have arrived can still
    /// be received. Called only as an event, after the mailbox has got the mail that arrived before: a peer mails why
    /// it leaves, and a thread that finds a failed transfer must find that reason.
    fn lose(&self, rank: usize, why: &str) {
        let mut state = self.lock();
        let peer = &mut state.peers[rank];
        if peer.lost().is_some() {
            return;
        }
        peer.lose(why);
        let (all, connection) = (peer.take_all(), peer.connection());
        drop(state);
        let mut events = Events::default();
        // A peer that has left perhaps never reads again. Then its system accepts nothing more, and what was not written
        // completely would never end.
        if let Some(connection) = connection {
            connection.forget(&self.driving, self.id, why, &mut events);
            connection.expected().inspect(|expected| expected.ended(self.id));
        }
        all.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.memory, &mut events));
        events.run();
        self.give_loss(rank, why);
    }

    /// Handles the loss of a connection. A peer that has not joined may connect again. Called only as an event
    /// (`lose`).
    pub fn lose_connection(&self, gone: &Connection, why: &str) {
        let Some(rank) = self.ranks.get(&gone.peer).copied() else { return };
        let mut state = self.lock();
        let peer = &mut state.peers[rank];
        if !peer.leads_by(gone.token) {
            return;
        }
        if peer.has_joined() {
            drop(state);
            return self.lose(rank, why);
        }
        peer.disconnect();
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

    fn give_loss(&self, peer: usize, why: &str) {
        let mailbox = self.lock().mailbox.clone();
        if let Some(mailbox) = mailbox {
            mailbox.lost(peer, why);
        }
    }

    pub fn connections(&self) -> Vec<Arc<Connection>> {
        self.lock().peers.iter().filter_map(Peer::connection).collect()
    }

    // --------------------------------------------------------------------------------------------- calls of this rank

    /// Fails if the peer is lost. The error has the link's text; `names` adds the process.
    fn check_reached(rank: usize, peer: &Peer) -> Result<()> {
        peer.lost().map_or(Ok(()), |why| Err(Error::rank_failed(rank, why)))
    }

    /// Receives a short message. If it has arrived, returns `waiting`'s buffer with the message.
    pub fn receive_short(&self, rank: usize, tag: u32, waiting: Waiting) -> Result<Option<Vec<u8>>> {
        let mut events = Events::default();
        let mut state = self.lock();
        let from = &mut state.peers[rank];
        if let Some(data) = from.take_arrived(tag) {
            let (length, bytes) = (data.len(), waiting.bytes);
            if length > bytes {
                return Err(Error::system(format!(
                    "sagellm: a message of {length} bytes of rank {rank} matched a receive of {bytes}"
                )));
            }
            drop(state);
            let Memory::Owned(mut buffer) = waiting.memory else { unreachable!("given as owned") };
            buffer[..length].copy_from_slice(&data);
            self.take(rank, length, &mut events);
            return Ok(Some(buffer));
        }
        Channel::check_reached(rank, from)?;
        from.post(tag, waiting);
        Ok(None)
    }

    /// Whether a short message has arrived for which no receive is posted.
    pub fn has_unread(&self, rank: usize, tag: u32) -> bool {
        self.lock().peers[rank].has_arrived(tag)
    }

    /// Sends a short message, or queues it until the receiver has consumed enough of the earlier ones.
    pub fn send_short(&self, rank: usize, tag: u32, waiting: Waiting) -> Result<()> {
        let mut events = Events::default();
        let mut state = self.lock();
        let to = &mut state.peers[rank];
        Channel::check_reached(rank, to)?;
        if to.admits(waiting.bytes) {
            let frame = Frame { tag, ..self.frame(Kind::Message, waiting.bytes) };
            // Done under the lock, so that the message is queued before the peer is lost, and then ends with the peer.
            to.connected().push(&self.driving, Outgoing::new(frame, waiting.memory, waiting.end), &mut events);
        } else {
            to.queue(tag, waiting);
        }
        Ok(())
    }

    /// Posts a receive of a body. If it is a lane's, sends Want to the peer; if the body has already arrived, the Want
    /// says that it has been taken.
    pub fn receive_body(&self, rank: usize, number: u64, waiting: Waiting, events: &mut Events) -> Result<()> {
        let mut state = self.lock();
        let from = &mut state.peers[rank];
        let arrived = from.take_body(number);
        if arrived.is_none() {
            Channel::check_reached(rank, from)?;
        }
        fault_points::reached(FaultPoint::BodyWanted);
        let frame = Frame { number, ..self.frame(Kind::Want, waiting.bytes) };
        let connection = Arc::clone(from.connected());
        let Some(body) = arrived else {
            from.want(number, waiting);
            connection.expected().inspect(|expected| expected.expect(self.id));
            if is_of_lane(number) {
                connection.push(&self.driving, Outgoing::control(frame), events);
            }
            return Ok(());
        };
        drop(state);
        connection.push(&self.driving, Outgoing::control(frame), events);
        hand_over(waiting, &body, events);
        Ok(())
    }

    /// Sends a body now if it is not a lane's, if the peer has sent Want for it, or if it may be sent ahead. Otherwise
    /// sends the body when the Want arrives.
    pub fn send_body(&self, rank: usize, number: u64, waiting: Waiting, events: &mut Events) -> Result<()> {
        let mut state = self.lock();
        let to = &mut state.peers[rank];
        Channel::check_reached(rank, to)?;
        if !is_of_lane(number) {
            self.push_body(to.connected(), number, waiting, events);
        } else if let Some((wanted, waiting)) = to.offer(number, waiting, to.connected().keeps_order()) {
            self.send_wanted(to.connected(), number, wanted, waiting, events);
        }
        Ok(())
    }

    /// Whether the peer has asked for all bodies that were sent ahead, or is lost.
    pub fn is_taken(&self, rank: usize) -> bool {
        let state = self.lock();
        let peer = &state.peers[rank];
        peer.is_taken() || peer.lost().is_some()
    }

    /// Gives up the receive of a body that has not arrived.
    pub fn abandon_body(&self, rank: usize, number: u64) {
        let mut state = self.lock();
        let peer = &mut state.peers[rank];
        let (waiting, connection) = (peer.take_want(number), peer.connection());
        drop(state);
        if let (Some(_), Some(expected)) = (&waiting, connection.as_ref().and_then(|one| one.expected())) {
            expected.began(self.id);
        }
    }

    /// Gives up a lane's transfer and stops using its borrowed memory. A peer that has sent Want for the body waits
    /// until it learns that the group has failed on this rank. The group always fails after this call.
    pub fn give_up(&self, rank: usize, slot: &Arc<Slot>) {
        let is_it = |end: &End| matches!(end, End::Slot(one) if Arc::ptr_eq(one, slot));
        let Some(connection) = self.lock().peers[rank].connection() else { return };
        // The last argument is called while the connection's reading side is locked, so the connection starts no
        // transfer of this channel meanwhile.
        connection.give_up(&self.driving, is_it, || self.lock().peers[rank].give_up(is_it));
    }

    /// Passes mail and the losses of peers to `mailbox` from now on, first the mail that has already arrived.
    pub fn open_mailbox(&self, mailbox: Arc<dyn Mailbox>) {
        loop {
            let mut state = self.lock();
            let early = std::mem::take(&mut state.early_mail);
            if early.is_empty() {
                state.mailbox = Some(Arc::clone(&mailbox));
                let peers = state.peers.iter().enumerate();
                let lost: Vec<(usize, String)> =
                    peers.filter_map(|(rank, peer)| Some((rank, peer.lost()?.to_string()))).collect();
                drop(state);
                return lost.into_iter().for_each(|(rank, why)| mailbox.lost(rank, &why));
            }
            drop(state);
            early.into_iter().for_each(|(peer, message)| mailbox.came(peer, message));
        }
    }

    pub fn send_mail(&self, rank: usize, message: Vec<u8>) -> Result<()> {
        let state = self.lock();
        let to = &state.peers[rank];
        Channel::check_reached(rank, to)?;
        let mut events = Events::default();
        let frame = self.frame(Kind::Mail, message.len());
        // Done under the lock, so that mail is sent in the order of the calls.
        let outgoing = Outgoing::new(frame, Memory::Owned(message), End::Nobody);
        to.connected().push(&self.driving, outgoing, &mut events);
        Ok(())
    }

    // -------------------------------------------------------------------------------------------------------- leaving

    /// Leaves the channel: ends its transfers and sends Cut to all peers.
    pub fn leave(&self, why: &str) {
        let mut state = self.lock();
        if std::mem::replace(&mut state.cut, true) {
            return;
        }
        let mut left = Vec::new();
        let mut connections = Vec::new();
        for peer in &mut state.peers {
            left.extend(peer.take_all());
            peer.lose(why);
            connections.extend(peer.connection());
        }
        drop(state);
        fault_points::reached(FaultPoint::Cutting);
        let mut events = Events::default();
        for connection in connections {
            connection.forget(&self.driving, self.id, why, &mut events);
            connection.expected().inspect(|expected| expected.leave(self.id, &self.driving));
            connection.push(&self.driving, Outgoing::control(self.frame(Kind::Cut, 0)), &mut events);
        }
        left.into_iter().for_each(|one| one.end.tell(Err(why.to_string()), one.memory, &mut events));
        events.ended = true;
        self.driving.defer(events);
    }
}

/// Whether a body is a lane's and not a message of the program.
fn is_of_lane(number: u64) -> bool {
    number >= MOST_BODIES
}

/// Copies a body that was received before its receive was posted.
fn hand_over(waiting: Waiting, body: &[u8], events: &mut Events) {
    let Waiting { mut memory, bytes, end, .. } = waiting;
    let fits = body.len() == bytes;
    let outcome =
        if fits { Ok(()) } else { Err(format!("a message of {} bytes matched a receive of {bytes}", body.len())) };
    if fits {
        memory.write(0, body);
    }
    end.tell(outcome, memory, events);
}

impl Receiver for Channel {
    fn control(&self, from: Origin, frame: Frame, events: &mut Events) -> std::result::Result<(), String> {
        let rank = self.rank_of(from.peer)?;
        let mut state = self.lock();
        let peer = &mut state.peers[rank];
        if !peer.leads_by(from.token) {
            return Ok(());
        }
        match frame.kind {
            Kind::Hello => {
                peer.join();
                events.ended = true;
            }
            Kind::Credit => {
                peer.credit(frame.number);
                while let Some((tag, Waiting { memory, bytes, end, .. })) = peer.next_queued() {
                    let frame = Frame { tag, ..Frame::new(Kind::Message, self.id, bytes) };
                    peer.connected().push(&self.driving, Outgoing::new(frame, memory, end), events);
                }
            }
            Kind::Want => {
                if let Some(waiting) = peer.asks(frame.number, frame.bytes) {
                    self.send_wanted(peer.connected(), frame.number, frame.bytes, waiting, events);
                }
                events.ended |= peer.is_taken(); // a thread may wait for that (`is_taken`)
            }
            Kind::Cut => {
                let channel = self.owned();
                events.list.push(Event::Call(Box::new(move || channel.lose(rank, LEFT))));
                events.ended = true;
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
            Kind::Message => peer.take_posted(frame.tag),
            Kind::Body => match peer.take_want(frame.number) {
                None if is_of_lane(frame.number) && peer.keeps(frame.data()) => None,
                None => return Ok(Target::Discard), // the receive was given up
                found => found,
            },
            _ => None,
        };
        let Some(posted) = posted else {
            return Ok(Target::Fresh(vec![0; frame.data()]));
        };
        let bytes = posted.bytes;
        if frame.data() > bytes || (frame.kind == Kind::Body && frame.data() != bytes) {
            // The receive fails when the error below ends the connection.
            match frame.kind {
                Kind::Message => peer.post(frame.tag, posted),
                _ => peer.want(frame.number, posted),
            }
            return Err(format!("a message of {} bytes matched a receive of {bytes}", frame.data()));
        }
        Ok(Target::Posted(posted.memory, posted.end))
    }

    fn finish(&self, from: Origin, frame: &Frame, target: Target, events: &mut Events) {
        let Ok(rank) = self.rank_of(from.peer) else { return };
        match target {
            Target::Discard => (),
            Target::Posted(memory, end) => {
                if frame.kind == Kind::Message {
                    self.take(rank, frame.data(), events);
                }
                end.tell(Ok(()), memory, events);
            }
            Target::Fresh(data) if frame.kind == Kind::Mail => {
                let channel = self.owned();
                events.list.push(Event::Call(Box::new(move || channel.give_mail(rank, data))));
            }
            Target::Fresh(data) if frame.kind == Kind::Body => {
                let mut state = self.lock();
                let peer = &mut state.peers[rank];
                // A receive may have been posted while the data arrived. Nobody gives up that receive meanwhile,
                // because giving up needs the lock of the connection's reading side, which is held here.
                match peer.take_want(frame.number) {
                    Some(waiting) => {
                        drop(state);
                        hand_over(waiting, &data, events);
                    }
                    None => peer.keep_body(frame.number, data),
                }
            }
            Target::Fresh(data) => {
                let mut state = self.lock();
                let peer = &mut state.peers[rank];
                // A receive may have been posted while the data arrived.
                match peer.take_posted(frame.tag) {
                    Some(Waiting { end, .. }) => {
                        drop(state);
                        self.take(rank, frame.data(), events);
                        end.tell(Ok(()), Memory::Owned(data), events);
                    }
                    None => peer.keep(frame.tag, data),
                }
            }
        }
    }
}
