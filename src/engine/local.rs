//! Lets tests run ranks as threads of one process, without several processes or a network. Makes areas on anonymous
//! memory for `shm`, and links that copy messages for `multihost`. This file runs no schedule, and its links have no
//! realistic timing, so `simulate --check` has its own executor (`torch_ext/torch_sagellm/cli/measure.py`).

#![allow(unsafe_code)] // copies bodies between the memory of two ranks

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::multihost::link::{Broken, Done, LONGEST_MAIL, Link, Mail, Mailbox, Transfer};
use super::pieces::{Pieces, transfer};
use super::shm::memory::area::Area;
use super::shm::memory::layout::Layout;
use super::shm::memory::segment::Segment;
use super::shm::nodes::Nodes;
use crate::engine::Polled;
use crate::error::{Error, Result};
use crate::types::Span;

/// One area per rank, all on the same memory.
pub fn areas(ranks: usize) -> Result<Vec<Arc<Area>>> {
    let layout = Layout::within(ranks, 1, usize::MAX)
        .ok_or_else(|| Error::invalid(format!("sagellm: no layout for {ranks} ranks in one process")))?;
    areas_of(layout, &Nodes::none())
}

/// Like `areas`, with a layout, for ranks on these nodes.
pub fn areas_of(layout: Layout, nodes: &Nodes) -> Result<Vec<Arc<Area>>> {
    let segment = Arc::new(Segment::anonymous(layout.total())?);
    Ok((0..layout.ranks).map(|me| Arc::new(Area::new(Arc::clone(&segment), layout, me, nodes.clone()))).collect())
}

/// Makes links between ranks that are threads, one link per rank. A message is copied into the receiver's queue. A
/// thread of the links, or `Mail::poll`, delivers mail and bodies.
pub fn links(ranks: usize) -> Vec<Arc<dyn Link>> {
    let post = Arc::new(Post::default());
    post.lock().links = ranks;
    let theirs = Arc::clone(&post);
    std::thread::spawn(move || {
        let mut boxes = theirs.lock();
        while boxes.links > 0 {
            drop(boxes);
            (0..ranks).for_each(|me| while theirs.deliver(me) {});
            boxes = theirs.lock();
            if boxes.links > 0 && !(0..ranks).any(|me| boxes.has_mail(me)) {
                boxes = theirs.changed.wait(boxes).unwrap_or_else(PoisonError::into_inner);
            }
        }
    });
    (0..ranks).map(|me| Arc::new(LocalLink { me, post: Arc::clone(&post) }) as Arc<dyn Link>).collect()
}

/// Sender, receiver and tag of a message.
type Address = (usize, usize, u32);

#[derive(Default)]
struct Boxes {
    messages: HashMap<Address, VecDeque<Vec<u8>>>,
    /// Ranks that have cut their link.
    cut: HashSet<usize>,
    /// Number of links that are not dropped.
    links: usize,
    mailboxes: HashMap<usize, Arc<dyn Mailbox>>,
    /// What has to be delivered to each rank, in order.
    mail: HashMap<usize, VecDeque<News>>,
    /// Bodies whose receive was posted and that were not sent, by sender, receiver and number.
    bodies: BTreeMap<(usize, usize, u64), Posted>,
    /// Ranks to which a thread is delivering now.
    served: BTreeSet<usize>,
}

enum News {
    Came(usize, Vec<u8>),
    Lost(usize),
    /// A body has ended.
    Ended(Done, std::result::Result<(), String>),
    /// A body was sent: copy it.
    Copy {
        from: Vec<Span>,
        to: Vec<Span>,
        done: [Done; 2],
    },
}

struct Posted {
    pieces: Vec<Span>,
    done: Done,
}

const CUT: &str = "Connection closed by peer";

impl Boxes {
    fn tell(&mut self, rank: usize, news: News) {
        self.mail.entry(rank).or_default().push_back(news);
    }

    /// Whether there is something that can be delivered to a rank.
    fn has_mail(&self, rank: usize) -> bool {
        let next = self.mail.get(&rank).and_then(VecDeque::front);
        next.is_some_and(|news| match news {
            News::Came(..) | News::Lost(_) => self.mailboxes.contains_key(&rank),
            _ => true,
        }) && !self.served.contains(&rank)
    }

    fn are_cut(&self, a: usize, b: usize) -> bool {
        self.cut.contains(&a) || self.cut.contains(&b)
    }

    /// Whether the message with this address can no longer arrive. As over a network, a receive fails only after its
    /// rank has got all mail, because the mail may say why the sender has cut its link.
    fn is_lost(&self, (from, to, _): Address) -> bool {
        let has_read = !self.mailboxes.contains_key(&to) || self.mail.get(&to).is_none_or(VecDeque::is_empty);
        self.cut.contains(&to) || (self.cut.contains(&from) && has_read && !self.served.contains(&to))
    }
}

#[derive(Default)]
struct Post {
    boxes: Mutex<Boxes>,
    changed: Condvar,
}

impl Post {
    fn lock(&self) -> MutexGuard<'_, Boxes> {
        self.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Post {
    /// Delivers one entry to a rank. Returns false if there is none, or if another thread is delivering to that rank.
    fn deliver(&self, rank: usize) -> bool {
        let mut boxes = self.lock();
        if !boxes.has_mail(rank) {
            return false;
        }
        let news = boxes.mail.get_mut(&rank).and_then(VecDeque::pop_front).expect("just seen");
        boxes.served.insert(rank);
        let mailbox = boxes.mailboxes.get(&rank).cloned();
        drop(boxes);
        match (news, mailbox) {
            (News::Came(from, message), Some(mailbox)) => mailbox.came(from, message),
            (News::Lost(from), Some(mailbox)) => mailbox.lost(from, CUT),
            (News::Ended(done, outcome), _) => done(outcome),
            (News::Copy { from, to, done }, _) => {
                let bytes = Pieces(&from).bytes();
                // SAFETY: both callers keep their memory until `done`, and the two ranks share no memory.
                unsafe { transfer(Pieces(&from), 0, Pieces(&to), 0, bytes) };
                done.into_iter().for_each(|done| done(Ok(())));
            }
            _ => (),
        }
        self.lock().served.remove(&rank);
        self.changed.notify_all();
        true
    }

    fn send_body(&self, (from, to, number): (usize, usize, u64), pieces: Vec<Span>, done: Done) -> Result<()> {
        let mut boxes = self.lock();
        if boxes.are_cut(from, to) {
            return Err(Error::system(CUT.to_string()));
        }
        let posted = boxes.bodies.remove(&(from, to, number));
        let posted = posted.unwrap_or_else(|| panic!("body {number} from {from} to {to} was sent before its receive"));
        assert_eq!(Pieces(&posted.pieces).bytes(), Pieces(&pieces).bytes(), "the sides agreed on the size");
        boxes.tell(to, News::Copy { from: pieces, to: posted.pieces, done: [done, posted.done] });
        drop(boxes);
        self.changed.notify_all();
        Ok(())
    }

    fn receive_body(&self, (from, to, number): (usize, usize, u64), posted: Posted) -> Result<()> {
        let mut boxes = self.lock();
        if boxes.are_cut(from, to) {
            return Err(Error::system(CUT.to_string()));
        }
        let twice = boxes.bodies.insert((from, to, number), posted);
        assert!(twice.is_none(), "body {number} from {from} to {to} was posted twice");
        Ok(())
    }
}

struct LocalLink {
    me: usize,
    post: Arc<Post>,
}

impl Mail for LocalLink {
    fn open_mailbox(&self, mailbox: Arc<dyn Mailbox>) {
        let mut boxes = self.post.lock();
        boxes.mailboxes.insert(self.me, mailbox);
        let gone: Vec<usize> = boxes.cut.iter().copied().filter(|peer| *peer != self.me).collect();
        gone.into_iter().for_each(|peer| boxes.tell(self.me, News::Lost(peer)));
        drop(boxes);
        self.post.changed.notify_all();
    }

    fn mail(&self, peer: usize, message: Vec<u8>) -> Result<()> {
        assert!(message.len() <= LONGEST_MAIL);
        let mut boxes = self.post.lock();
        if boxes.are_cut(self.me, peer) {
            return Err(Error::system(CUT.to_string()));
        }
        boxes.tell(peer, News::Came(self.me, message));
        drop(boxes);
        self.post.changed.notify_all();
        Ok(())
    }

    unsafe fn send_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()> {
        self.post.send_body((self.me, peer, number), pieces, done)
    }

    unsafe fn receive_body(&self, peer: usize, number: u64, pieces: Vec<Span>, done: Done) -> Result<()> {
        self.post.receive_body((peer, self.me, number), Posted { pieces, done })
    }

    fn abandon_body(&self, peer: usize, number: u64) {
        let half = self.post.lock().bodies.remove(&(peer, self.me, number));
        drop(half); // without the lock
    }

    fn keep_driven(&self) -> Box<dyn Send> {
        Box::new(()) // the links' thread reads mail anyway
    }

    fn poll(&self, _sleep: Duration) -> Polled {
        if self.post.deliver(self.me) { Polled::Advanced } else { Polled::Elsewhere }
    }
}

impl Drop for LocalLink {
    fn drop(&mut self) {
        self.cut();
        self.post.lock().links -= 1;
        self.post.changed.notify_all();
    }
}

enum LocalTransfer {
    Sent(Vec<u8>),
    Awaited { post: Arc<Post>, address: Address, buffer: Vec<u8>, bytes: usize },
}

/// A receive into memory that consists of pieces; `wait` copies the message into this memory. A real link may write the
/// memory as soon as the receive is posted. So until `wait` the memory is filled with `POSTED`: code that reads it too
/// early gets these bytes, and `wait` panics if code has written it. If the receive is given up, the old contents are
/// restored.
struct LocalInto {
    received: Option<Box<dyn Transfer>>,
    pieces: Vec<Span>,
    /// What the memory held before.
    before: Vec<u8>,
}

/// The value of every byte in the memory of a posted receive.
const POSTED: u8 = 0xa5;

impl LocalInto {
    /// # Safety
    /// As for `Link::receive_into`.
    unsafe fn new(received: Box<dyn Transfer>, pieces: Vec<Span>) -> LocalInto {
        let mut one = LocalInto { received: Some(received), before: vec![0; Pieces(&pieces).bytes()], pieces };
        one.before = one.replace(&vec![POSTED; one.before.len()]);
        one
    }

    /// Writes all of the memory. Returns what it held.
    fn replace(&self, new: &[u8]) -> Vec<u8> {
        let pieces = Pieces(&self.pieces);
        let mut old = vec![0; new.len()];
        // SAFETY: the caller of `receive_into` vouches for the memory until the transfer was waited for or dropped.
        // Both buffers have the size of that memory.
        unsafe {
            pieces.read(0, old.as_mut_ptr(), old.len());
            pieces.write(0, new.as_ptr(), new.len());
        }
        old
    }
}

impl Transfer for LocalInto {
    fn wait(mut self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        let received = self.received.take().expect("waited for once");
        let message = received.wait(timeout).inspect_err(|_| drop(self.replace(&self.before)))?;
        let held = self.replace(&message[..self.before.len()]);
        assert!(held.iter().all(|byte| *byte == POSTED), "memory of a posted receive was written");
        Ok(Vec::new())
    }

    fn ends_within(&self, timeout: Duration) -> bool {
        self.received.as_ref().is_none_or(|received| received.ends_within(timeout))
    }
}

impl Drop for LocalInto {
    fn drop(&mut self) {
        if self.received.is_some() {
            self.replace(&self.before);
        }
    }
}

impl Link for LocalLink {
    fn receive(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>> {
        Ok(Box::new(LocalTransfer::Awaited {
            post: Arc::clone(&self.post),
            address: (peer, self.me, tag),
            buffer,
            bytes,
        }))
    }

    fn send(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>> {
        self.post.lock().messages.entry((self.me, peer, tag)).or_default().push_back(buffer[..bytes].to_vec());
        self.post.changed.notify_all();
        Ok(Box::new(LocalTransfer::Sent(buffer)))
    }

    fn has_unread(&self, peer: usize, tag: u32) -> bool {
        self.post.lock().messages.get(&(peer, self.me, tag)).is_some_and(|messages| !messages.is_empty())
    }

    unsafe fn receive_into(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>> {
        let bytes = Pieces(&pieces).bytes();
        let received = self.receive(peer, tag, vec![0; bytes], bytes)?;
        // SAFETY: the caller vouches for the memory.
        Ok(Box::new(unsafe { LocalInto::new(received, pieces) }))
    }

    unsafe fn send_from(&self, peer: usize, tag: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>> {
        let mut copy = vec![0; Pieces(&pieces).bytes()];
        let bytes = copy.len();
        // SAFETY: the caller vouches for the memory during this call. The copy has the size of that memory.
        unsafe { Pieces(&pieces).read(0, copy.as_mut_ptr(), bytes) };
        self.send(peer, tag, copy, bytes)
    }

    fn cut(&self) {
        let mut boxes = self.post.lock();
        if boxes.cut.insert(self.me) {
            let me = self.me;
            let peers: Vec<usize> = boxes.mailboxes.keys().copied().filter(|peer| *peer != me).collect();
            peers.into_iter().for_each(|peer| boxes.tell(peer, News::Lost(me)));
            let mine: Vec<_> = boxes.bodies.keys().filter(|(from, to, _)| *from == me || *to == me).copied().collect();
            for key in mine {
                let posted = boxes.bodies.remove(&key).expect("just seen");
                boxes.tell(key.1, News::Ended(posted.done, Err(CUT.to_string())));
            }
        }
        drop(boxes);
        self.post.changed.notify_all();
    }
}

impl Transfer for LocalTransfer {
    fn wait(self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        let (post, address, mut buffer, bytes) = match *self {
            LocalTransfer::Sent(buffer) => return Ok(buffer),
            LocalTransfer::Awaited { post, address, buffer, bytes } => (post, address, buffer, bytes),
        };
        let until = Instant::now().checked_add(timeout);
        let mut boxes = post.lock();
        loop {
            if let Some(message) = boxes.messages.get_mut(&address).and_then(VecDeque::pop_front) {
                if message.len() > bytes {
                    return Err(format!("a message of {} bytes matched a receive of {bytes}", message.len()).into());
                }
                buffer[..message.len()].copy_from_slice(&message);
                return Ok(buffer);
            }
            if boxes.is_lost(address) {
                return Err(CUT.to_string().into());
            }
            let left = until.map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Broken::late("Timed out".to_string()));
            }
            boxes = post.changed.wait_timeout(boxes, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn ends_within(&self, timeout: Duration) -> bool {
        let LocalTransfer::Awaited { post, address, .. } = self else { return true };
        let until = Instant::now() + timeout;
        let mut boxes = post.lock();
        loop {
            let is_there = boxes.messages.get(address).is_some_and(|messages| !messages.is_empty());
            let left = until.saturating_duration_since(Instant::now());
            let would_end = is_there || boxes.is_lost(*address);
            if would_end || left.is_zero() {
                return would_end;
            }
            boxes = post.changed.wait_timeout(boxes, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
