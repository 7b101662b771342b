//! The messages of programs in a group over several hosts. `Messages` is state under the lock of `queue::State`. Its
//! functions queue errands, which `post` runs without that lock.
//!
//! A message of up to `EAGER` bytes is sent as a letter, and its send ends immediately. A message of up to
//! `LONGEST_EAGER` bytes is sent in the same way if few bytes of such messages wait for a receive on that peer
//! (`Window`). A letter takes one exchange instead of a body's three, but one more copy on each side.
//!
//! A longer message is sent as a body, directly from the memory of one tensor to the memory of the other. If its
//! receive was posted before, the receiver has passed the memory to the link and told the sender so (`ready`), and the
//! body is sent immediately. Otherwise a letter announces the message, which stays at its sender until the receiver has
//! matched it. Then the receiver posts a receive of the body under the announced number, and grants the number by a
//! letter. When the letter arrives, the sender sends the body. Until the grant, the sender may replace the memory of
//! the message by a copy (rule 4).
//!
//! Letters of one rank arrive in order and are matched when they arrive (`matching`), so no message blocks another one.

#![allow(unsafe_code)] // copies messages between caller memory and letters

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::letters::{EAGER, LONGEST_EAGER, Letter, WINDOW};
use super::link::MOST_BODIES;
use super::matching::{Content, Matching, Message, Receive};
use super::names::Names;
use super::ready::{Ready, Receives};
use crate::engine::Ended;
use crate::engine::pieces::Pieces;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::op::pending::key;
use crate::op::words::{not_taken, wrong_size};
use crate::types::{ANY_RANK, Kind};

/// A call of the link that this rank still has to make. Errands run in the order of the queue.
pub(super) enum Errand {
    /// Mails a letter to this peer.
    Mail(usize, Vec<u8>),
    /// Passes the memory of a body to the link. The operation is in `Messages::bodies`.
    Body(Body),
    /// Takes back the memory of a receive from the link, and ends the receive with this error: its message has another
    /// size.
    Abandon(Body, Error),
}

/// Identifies a body that the link transfers now or soon: whether this rank sends it, the peer, and the number.
pub(super) type Body = (bool, usize, u64);

/// Why nothing more arrives from a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Gone {
    /// The rank has said goodbye.
    Left,
    /// The rank was lost. The text comes from the link.
    Lost(String),
}

/// Bodies have numbers from here upwards if their receives were posted before the messages arrived. Other bodies have
/// the number of their message (`Letter::Large`).
const POSTED_EARLY: u64 = MOST_BODIES / 2;

/// Counts the bytes that letters have carried between this rank and one peer. Only messages longer than `EAGER` count.
#[derive(Default)]
struct Window {
    sent: u64,
    /// How many of the `sent` bytes the peer's receives had taken when the peer wrote its last letter.
    taken_by_peer: u64,
    /// How many bytes of the peer's letters this rank's receives have taken.
    taken: u64,
}

#[derive(Default)]
pub(super) struct Messages {
    me: usize,
    names: Arc<Names>,
    longest_early: usize,
    matching: Matching,
    /// Large sends that the peer has not granted yet, by peer and number.
    announced: HashMap<(usize, u64), Arc<Op>>,
    /// `pending::key` of the sends in `announced`.
    unsent: HashSet<usize>,
    /// Operations whose memory the link uses or is about to use. `end_body` removes them, and `abandon` after the link
    /// has given up the body.
    pub bodies: HashMap<Body, Arc<Op>>,
    /// The announced sends that a Ready letter has granted, by peer and number, until their Granted letter arrives.
    granted_early: HashSet<(usize, u64)>,
    windows: HashMap<usize, Window>,
    /// For each rank: how many of its messages have arrived here.
    seen: HashMap<usize, u64>,
    /// For each rank: the receives that it has posted before their messages arrived.
    receives: HashMap<usize, Receives>,
    /// Number of receives that this rank has posted before their messages arrived.
    posted_early: u64,
    gone: Vec<Option<Gone>>,
    /// Ranks that must read letters from this rank before this rank may leave.
    pub wrote: HashSet<usize>,
    pub errands: VecDeque<Errand>,
    /// Operations that have ended here. `post` still has to store back their results.
    pub over: Ended,
    /// The first fault of the group that the code in this file found.
    pub failure: Option<Error>,
}

impl Messages {
    /// Returns the initial state for a group of `ranks` ranks. Only receives of up to `longest_early` bytes are passed
    /// to the link before their messages arrive.
    pub fn new(ranks: usize, names: Arc<Names>, longest_early: usize) -> Messages {
        Messages { me: names.me, names, longest_early, gone: vec![None; ranks], ..Messages::default() }
    }

    pub fn mail(&mut self, peer: usize, letter: &Letter) {
        self.errands.push_back(Errand::Mail(peer, letter.encode()));
    }

    pub fn mail_all(&mut self, letter: &Letter) {
        self.present().into_iter().for_each(|peer| self.mail(peer, letter));
    }

    /// Records that all present ranks must read this rank's letters before this rank may leave.
    pub fn expect_to_be_read(&mut self) {
        self.wrote.extend(self.present());
    }

    /// Returns the other ranks that have neither left nor been lost.
    pub fn present(&self) -> Vec<usize> {
        (0..self.gone.len()).filter(|rank| *rank != self.me && self.gone[*rank].is_none()).collect()
    }

    fn end(&mut self, op: Arc<Op>, outcome: Result<()>) {
        self.over.push((op, outcome));
    }

    /// Ends an operation that needs a rank that is gone, and fails the group.
    fn fail(&mut self, op: Arc<Op>, peer: usize) {
        let error = self.departed(peer, &op);
        self.failure.get_or_insert_with(|| error.clone());
        self.end(op, Err(error));
    }

    /// Starts a send or a receive that no longer has to wait for an earlier operation.
    pub fn issue(&mut self, op: Arc<Op>) {
        op.prepare();
        match op.request.kind {
            Kind::Send => self.issue_send(op),
            _ => self.issue_receive(op),
        }
    }

    fn issue_send(&mut self, op: Arc<Op>) {
        let (peer, tag) = (op.request.root as usize, op.request.tag);
        let inputs = Pieces(op.sent());
        let bytes = inputs.bytes();
        match &self.gone[peer] {
            // The send succeeds, like on one host, where a message to a rank that has left stays in shared memory.
            Some(Gone::Left) if bytes <= EAGER => {
                op.release();
                return self.end(op, Ok(()));
            }
            Some(_) => return self.fail(op, peer),
            None => (),
        }
        let (number, posted) = self.receives.entry(peer).or_default().send(tag, bytes as u64);
        if self.is_eager(peer, bytes) {
            let mut letter = Letter::eager_head(tag, self.taken(peer), bytes);
            let head = letter.len();
            // SAFETY: the inputs belong to the caller and live until the send ends. `eager_head` reserved `bytes` bytes
            // behind the head, and `read` writes all of them.
            unsafe {
                inputs.read(0, letter.as_mut_ptr().add(head), bytes);
                letter.set_len(head + bytes);
            }
            op.release();
            self.errands.push_back(Errand::Mail(peer, letter));
            self.wrote.insert(peer);
            return self.end(op, Ok(()));
        }
        if let Some(body) = posted {
            return self.start_body((true, peer, body), op);
        }
        self.unsent.insert(key(&op));
        self.announced.insert((peer, number), op);
        self.mail(peer, &Letter::Large { tag, taken: self.taken(peer), bytes: bytes as u64, number });
    }

    /// Whether a message to `peer` is sent inside its letter. If it is, and if it is longer than `EAGER`, counts its
    /// bytes in the window.
    fn is_eager(&mut self, peer: usize, bytes: usize) -> bool {
        if bytes <= EAGER || bytes > LONGEST_EAGER {
            return bytes <= EAGER;
        }
        let window = self.windows.entry(peer).or_default();
        let fits = window.sent + bytes as u64 <= window.taken_by_peer + WINDOW;
        if fits {
            window.sent += bytes as u64;
        }
        fits
    }

    /// Returns the `taken` (`Letter::Eager`) of a letter to `peer`.
    fn taken(&self, peer: usize) -> u64 {
        self.windows.get(&peer).map_or(0, |window| window.taken)
    }

    /// Stores a number from a letter of `peer`: how many bytes of this rank's messages the receives of `peer` have
    /// taken.
    fn note_taken(&mut self, peer: usize, taken: u64) {
        if taken > 0 {
            self.windows.entry(peer).or_default().taken_by_peer = taken;
        }
    }

    fn issue_receive(&mut self, op: Arc<Op>) {
        let (root, tag) = (op.request.root, op.request.tag);
        if let Some((source, message)) = self.matching.take_arrived(root, tag) {
            return self.deliver(source, op, message);
        }
        match self.last_gone(root) {
            Some(gone) => self.fail(op, gone),
            None => {
                let receive = self.post_early(op);
                self.matching.post(root, tag, receive);
            }
        }
    }

    /// If a receive is long and it is certain which message it will take, passes its memory to the link and tells the
    /// sender. Otherwise returns the receive unchanged. A receive with `ANY_RANK` for this tag makes it uncertain which
    /// receive takes a message.
    fn post_early(&mut self, op: Arc<Op>) -> Receive {
        let (root, tag) = (op.request.root, op.request.tag);
        let bytes = Pieces(op.request.outputs()).bytes();
        let is_early = bytes > LONGEST_EAGER && bytes <= self.longest_early;
        if !is_early || root == ANY_RANK || self.matching.count_posted(ANY_RANK, tag) > 0 {
            return Receive::Waits(op);
        }
        let peer = root as usize;
        self.posted_early += 1;
        let ready = Ready {
            tag,
            bytes: bytes as u64,
            seen: self.seen.get(&peer).copied().unwrap_or(0),
            ahead: self.matching.count_posted(root, tag) as u64,
            body: POSTED_EARLY | self.posted_early,
        };
        self.start_body((false, peer, ready.body), op);
        self.mail(peer, &Letter::Ready(ready));
        Receive::Ready(ready.body, bytes)
    }

    /// Queues the errand that makes the link send or receive a body.
    fn start_body(&mut self, body: Body, op: Arc<Op>) {
        self.bodies.insert(body, op);
        self.errands.push_back(Errand::Body(body));
    }

    /// If all ranks that could send to a receive from `root` are gone, returns the rank that the error must name.
    fn last_gone(&self, root: u32) -> Option<usize> {
        if root != ANY_RANK {
            return self.gone[root as usize].is_some().then_some(root as usize);
        }
        let others = || (0..self.gone.len()).filter(|rank| *rank != self.me);
        if others().any(|rank| self.gone[rank].is_none()) {
            return None;
        }
        // A rank that was lost is the cause rather than a rank that left.
        others().find(|rank| matches!(self.gone[*rank], Some(Gone::Lost(_)))).or_else(|| others().next())
    }

    fn arrive(&mut self, source: usize, message: Message<'_>) {
        let tag = message.tag;
        *self.seen.entry(source).or_default() += 1;
        match self.matching.take_posted(source, tag) {
            Some(Receive::Waits(op)) => self.deliver(source, op, message),
            Some(Receive::Ready(number, room)) => self.grant_posted(source, (number, room), message),
            None => self.matching.keep(source, message),
        }
    }

    /// Passes a matched message to its receive. Data in a letter is copied; a body is received by the link.
    fn deliver(&mut self, from: usize, op: Arc<Op>, message: Message<'_>) {
        let outputs = Pieces(op.request.outputs());
        let room = outputs.bytes();
        op.set_source(from);
        self.count_taken(from, &message);
        if message.bytes != room {
            let error = self.refuse(from, room, &message);
            return self.end(op, Err(error));
        }
        match message.content {
            Content::Data(data) => {
                // SAFETY: the outputs have `room` bytes, which is the size of the message.
                unsafe { outputs.write(0, data.as_ptr(), room) };
                self.end(op, Ok(()));
            }
            Content::Number(_) if self.gone[from].is_some() => self.fail(op, from),
            Content::Number(number) => {
                self.start_body((false, from, number), op);
                self.mail(from, &Letter::Granted { number, taken: self.taken(from), body: number });
            }
        }
    }

    /// Grants a message that was announced before its sender knew that the receive was posted. The link already has the
    /// receive's memory.
    fn grant_posted(&mut self, from: usize, (body, room): (u64, usize), message: Message<'_>) {
        self.count_taken(from, &message);
        match message.content {
            Content::Number(number) if message.bytes == room => {
                self.mail(from, &Letter::Granted { number, taken: self.taken(from), body });
            }
            _ => {
                let error = self.refuse(from, room, &message);
                self.errands.push_back(Errand::Abandon((false, from, body), error));
            }
        }
    }

    fn count_taken(&mut self, from: usize, message: &Message<'_>) {
        if matches!(message.content, Content::Data(_)) && message.bytes > EAGER {
            self.windows.entry(from).or_default().taken += message.bytes as u64;
        }
    }

    /// Returns the error of a receive of `room` bytes whose message has a different size. Also tells the sender if the
    /// sender waits for an answer.
    fn refuse(&mut self, from: usize, room: usize, message: &Message<'_>) -> Error {
        if let Content::Number(number) = message.content {
            self.mail(from, &Letter::Refused { number });
        }
        wrong_size(self.me, from, message.tag, room, message.bytes)
    }

    /// Handles a letter that belongs to a message of the program. An error means that `peer` broke the protocol, and
    /// fails the group.
    pub fn take(&mut self, peer: usize, letter: &Letter) -> Result<()> {
        match *letter {
            Letter::Eager { tag, taken, data } => {
                self.note_taken(peer, taken);
                self.arrive(peer, Message { tag, bytes: data.len(), content: Content::Data(data.into()) });
            }
            Letter::Large { tag, taken, bytes, number } => {
                self.note_taken(peer, taken);
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                self.arrive(peer, Message { tag, bytes, content: Content::Number(number) });
            }
            Letter::Granted { number, taken, body } => {
                self.note_taken(peer, taken);
                if !self.granted_early.remove(&(peer, number)) {
                    let op = self.answered(peer, number)?;
                    self.start_body((true, peer, body), op);
                }
            }
            Letter::Ready(ready) => self.take_ready(peer, ready),
            Letter::Refused { number } => {
                let op = self.answered(peer, number)?;
                let error = not_taken(self.me, peer, op.request.tag, Pieces(op.sent()).bytes());
                self.end(op, Err(error));
            }
            _ => (),
        }
        Ok(())
    }

    /// Handles a Ready letter: `peer` has posted a receive. If this rank has already announced the message for this
    /// receive, and the sizes agree, starts to send the body.
    fn take_ready(&mut self, peer: usize, ready: Ready) {
        let Some(number) = self.receives.entry(peer).or_default().add(ready) else { return };
        let fits = |op: &Arc<Op>| Pieces(op.sent()).bytes() as u64 == ready.bytes;
        if self.announced.get(&(peer, number)).is_some_and(fits)
            && let Ok(op) = self.answered(peer, number)
        {
            self.granted_early.insert((peer, number));
            self.start_body((true, peer, ready.body), op);
        }
    }

    fn answered(&mut self, peer: usize, number: u64) -> Result<Arc<Op>> {
        let op = self.announced.remove(&(peer, number)).ok_or_else(|| {
            Error::system(format!(
                "sagellm: rank {peer} answers message {number} of rank {}, which does not wait for an answer",
                self.me
            ))
        })?;
        self.unsent.remove(&key(&op));
        Ok(op)
    }

    /// Called when the link no longer uses the memory of a body. An error is the link's text. If the group has failed,
    /// the group's fault becomes the operation's error.
    pub fn end_body(&mut self, body: Body, outcome: std::result::Result<(), String>, fault: Option<&Error>) {
        let Some(op) = self.bodies.remove(&body) else { return };
        let (sends, peer, number) = body;
        if !sends {
            op.set_source(peer);
            // If the receive is still in `matching`, its message came without a letter.
            if self.matching.unpost(peer, op.request.tag, number) && outcome.is_ok() {
                *self.seen.entry(peer).or_default() += 1;
            }
        }
        match (outcome, fault) {
            (Ok(()), _) => self.end(op, Ok(())),
            (Err(_), Some(fault)) => self.end(op, Err(fault.clone())),
            (Err(text), None) => {
                self.gone[peer].get_or_insert(Gone::Lost(text));
                self.fail(op, peer);
            }
        }
    }

    /// Ends the receive of a body that the link has given up.
    pub fn abandon(&mut self, body: Body, error: Error) {
        if let Some(op) = self.bodies.remove(&body) {
            op.set_source(body.1);
            self.end(op, Err(error));
        }
    }

    /// Records that nothing more arrives from `peer`. Fails the operations that need `peer` (rule 21), unless this rank
    /// is leaving (`leaves`), because then this rank itself ends the operations.
    pub fn lose(&mut self, peer: usize, how: Gone, leaves: bool) {
        if self.gone[peer].is_some() {
            return;
        }
        self.gone[peer] = Some(how);
        if leaves {
            return;
        }
        let announced: Vec<_> = self.announced.keys().filter(|(to, _)| *to == peer).copied().collect();
        for place in announced {
            if let Some(op) = self.announced.remove(&place) {
                self.unsent.remove(&key(&op));
                self.fail(op, peer);
            }
        }
        for root in [peer as u32, ANY_RANK] {
            let Some(gone) = self.last_gone(root) else { continue };
            // The link ends receives whose memory it has, because it has lost the peer too.
            self.matching.take_posted_from(root).into_iter().for_each(|op| self.fail(op, gone));
        }
    }

    pub fn gone(&self, peer: usize) -> Option<&Gone> {
        self.gone.get(peer)?.as_ref()
    }

    /// Returns the error of an operation that needs a rank that is gone.
    fn departed(&self, peer: usize, op: &Op) -> Error {
        self.why_gone(peer, &format!("is in {}", op.what()))
    }

    /// Returns the error that a rank is gone while this rank `does` something.
    pub fn why_gone(&self, peer: usize, does: &str) -> Error {
        match self.gone(peer) {
            Some(Gone::Left) => self.names.left(peer, does),
            Some(Gone::Lost(words)) => self.names.lost(peer, does, words),
            None => self.names.lost(peer, does, ""),
        }
    }

    /// Whether `op` is a send whose memory the link does not use yet, so that a copy may replace it.
    pub fn may_copy(&self, op: &Op) -> bool {
        self.unsent.contains(&key(op))
    }

    /// Returns the operations that have not ended, and those whose end was not reported yet.
    pub fn pending(&self) -> impl Iterator<Item = &Arc<Op>> {
        let over = self.over.iter().map(|(op, _)| op);
        self.matching.waiting().chain(self.announced.values()).chain(self.bodies.values()).chain(over)
    }

    pub fn has_pending(&self) -> bool {
        self.matching.has_posted() || !self.announced.is_empty() || !self.bodies.is_empty()
    }

    /// Called when the group ends. Removes and returns the operations whose memory the link does not use. The others
    /// end with `end_body`.
    pub fn take_idle(&mut self) -> Vec<Arc<Op>> {
        self.unsent.clear();
        let announced = self.announced.drain().map(|(_, op)| op);
        let over = self.over.drain(..).map(|(op, _)| op);
        self.matching.take_all().into_iter().chain(announced).chain(over).collect()
    }
}
