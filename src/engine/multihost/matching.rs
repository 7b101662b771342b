//! Messages that wait for a receive, and receives that wait for a message.
//!
//! Receives match in the order in which they were posted, first in first out per (source, tag). A receive with
//! `ANY_RANK` takes the message that arrived first. Receives and messages are looked up by source and tag, so the cost
//! of a match does not depend on how many of them wait.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::op::Op;
use crate::types::ANY_RANK;

/// A receive that waits for its message.
pub(super) enum Receive {
    Waits(Arc<Op>),
    /// The link already has the receive's memory, under this body number. The second value is the size in bytes; the
    /// operation is in `Messages::bodies`.
    Ready(u64, usize),
}

pub(super) struct Message<'a> {
    pub tag: u32,
    pub bytes: usize,
    /// The data itself, or the number under which the sender keeps the body.
    pub content: Content<'a>,
}

pub(super) enum Content<'a> {
    /// Borrows the bytes of the letter that is being handled, so data for a waiting receive is copied only once.
    Data(Cow<'a, [u8]>),
    Number(u64),
}

impl Message<'_> {
    fn owned(self) -> Message<'static> {
        let content = match self.content {
            Content::Data(data) => Content::Data(Cow::Owned(data.into_owned())),
            Content::Number(number) => Content::Number(number),
        };
        Message { content, ..self }
    }
}

/// A queue of entries, each with its sequence number among the entries of all queues.
type InLine<T> = VecDeque<(u64, T)>;

/// Empty queues are removed.
#[derive(Default)]
pub(super) struct Matching {
    /// Receives by source (or `ANY_RANK`) and tag, each with its position among all receives posted.
    posted: HashMap<(u32, u32), InLine<Receive>>,
    posts: u64,
    /// Messages by source and tag, each with its position in the order of arrival.
    arrived: HashMap<(usize, u32), InLine<Message<'static>>>,
    /// The same messages for `ANY_RANK` receives: for each tag, the sources by order of arrival.
    by_arrival: HashMap<u32, BTreeMap<u64, usize>>,
    arrivals: u64,
}

impl Matching {
    /// Adds a receive for which no message has arrived.
    pub fn post(&mut self, root: u32, tag: u32, receive: Receive) {
        self.posts += 1;
        self.posted.entry((root, tag)).or_default().push_back((self.posts, receive));
    }

    /// Returns how many receives with this source and tag wait.
    pub fn count_posted(&self, root: u32, tag: u32) -> usize {
        self.posted.get(&(root, tag)).map_or(0, VecDeque::len)
    }

    /// Adds a message that no receive matches.
    pub fn keep(&mut self, source: usize, message: Message<'_>) {
        let tag = message.tag;
        self.arrivals += 1;
        self.arrived.entry((source, tag)).or_default().push_back((self.arrivals, message.owned()));
        self.by_arrival.entry(tag).or_default().insert(self.arrivals, source);
    }

    /// Removes the message that a new receive matches, and returns it with its source.
    pub fn take_arrived(&mut self, root: u32, tag: u32) -> Option<(usize, Message<'static>)> {
        let source = match root {
            ANY_RANK => *self.by_arrival.get(&tag)?.first_key_value()?.1,
            root => root as usize,
        };
        let waiting = self.arrived.get_mut(&(source, tag))?;
        let (place, message) = waiting.pop_front().expect("empty queues are removed");
        if waiting.is_empty() {
            self.arrived.remove(&(source, tag));
        }
        let places = self.by_arrival.get_mut(&tag).expect("it has every message that arrived");
        places.remove(&place);
        if places.is_empty() {
            self.by_arrival.remove(&tag);
        }
        Some((source, message))
    }

    /// Removes the receive that a new message matches: the one that was posted first among the receives from its source
    /// and the receives from `ANY_RANK`.
    pub fn take_posted(&mut self, source: usize, tag: u32) -> Option<Receive> {
        let place =
            |root: u32| self.posted.get(&(root, tag)).and_then(|ops| ops.front()).map(|(place, _)| (*place, root));
        let (_, root) = place(source as u32).into_iter().chain(place(ANY_RANK)).min()?;
        let ops = self.posted.get_mut(&(root, tag))?;
        let (_, op) = ops.pop_front()?;
        if ops.is_empty() {
            self.posted.remove(&(root, tag));
        }
        Some(op)
    }

    /// Removes the receive from `peer` whose memory the link has under the body number `number`. Returns whether the
    /// receive was still there.
    pub fn unpost(&mut self, peer: usize, tag: u32, number: u64) -> bool {
        let key = (peer as u32, tag);
        let Some(receives) = self.posted.get_mut(&key) else { return false };
        let is_it = |receive: &Receive| matches!(receive, Receive::Ready(body, _) if *body == number);
        let Some(at) = receives.iter().position(|(_, receive)| is_it(receive)) else { return false };
        receives.remove(at);
        if receives.is_empty() {
            self.posted.remove(&key);
        }
        true
    }

    /// Removes all receives from `root`. Returns the operations of those whose memory the link does not have.
    pub fn take_posted_from(&mut self, root: u32) -> Vec<Arc<Op>> {
        let removed = self.posted.extract_if(|(source, _), _| *source == root);
        removed.flat_map(|(_, receives)| receives).filter_map(|(_, receive)| waiting(receive)).collect()
    }

    /// Removes everything. Returns the operations of receives whose memory the link does not have.
    pub fn take_all(&mut self) -> Vec<Arc<Op>> {
        (self.arrived, self.by_arrival) = Default::default();
        self.posted.drain().flat_map(|(_, receives)| receives).filter_map(|(_, receive)| waiting(receive)).collect()
    }

    pub fn has_posted(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Returns the operations of the receives whose memory the link does not have.
    pub fn waiting(&self) -> impl Iterator<Item = &Arc<Op>> {
        self.posted.values().flatten().filter_map(|(_, receive)| match receive {
            Receive::Waits(op) => Some(op),
            Receive::Ready(..) => None,
        })
    }
}

fn waiting(receive: Receive) -> Option<Arc<Op>> {
    match receive {
        Receive::Waits(op) => Some(op),
        Receive::Ready(..) => None,
    }
}
