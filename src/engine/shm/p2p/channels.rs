//! Assigns a receiver's channels to senders. A channel carries the large messages of one sender at a time. A receiver
//! may have fewer channels than senders.
//!
//! A channel is lent with the grant for a message (the receiver's answer to its envelope) and returned when the
//! receiver has read the whole message. A granted message was matched by a receive, so both ranks move it whatever else
//! they wait for. Therefore every channel is returned. Senders that find no free channel get one in the order in which
//! they asked. As long as no other sender waits, a sender keeps its channel for its next messages.
//!
//! Only the receiver has this state. A sender reads the number of its channel from the grant (`outgoing.rs`).

use std::collections::VecDeque;

pub struct Channels {
    free: Vec<usize>,
    /// For each sender: its channel, and how many of its granted messages are not fully read.
    lent: Vec<Option<(usize, usize)>>,
    waiting: VecDeque<usize>,
}

impl Channels {
    pub fn new(channels: usize, ranks: usize) -> Channels {
        Channels { free: (0..channels).rev().collect(), lent: vec![None; ranks], waiting: VecDeque::new() }
    }

    /// Lends a channel for one more message of `from`. `None` if no channel is free; the caller must ask again after a
    /// channel was returned.
    pub fn lend(&mut self, from: usize) -> Option<usize> {
        if self.waiting.front().is_none_or(|first| *first == from) {
            let channel = self.of(from).or_else(|| self.free.pop());
            if let Some(channel) = channel {
                let messages = self.lent[from].map_or(0, |(_, messages)| messages);
                self.lent[from] = Some((channel, messages + 1));
                self.waiting.pop_front(); // the queue is empty or `from` is its first entry
                return Some(channel);
            }
        }
        if !self.waiting.contains(&from) {
            self.waiting.push_back(from);
        }
        None
    }

    /// The channel that `from` has now.
    pub fn of(&self, from: usize) -> Option<usize> {
        self.lent[from].map(|(channel, _)| channel)
    }

    /// Records that one message of `from` was fully read. After the last message, frees the channel of `from`.
    pub fn give_back(&mut self, from: usize) {
        match self.lent[from] {
            Some((channel, 1)) => {
                self.lent[from] = None;
                self.free.push(channel); // last in, first out: its buffers are still in the cache
            }
            Some((channel, messages)) => self.lent[from] = Some((channel, messages - 1)),
            None => debug_assert!(false, "rank {from} has no channel"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_is_kept_while_no_sender_waits_and_then_goes_round() {
        let mut channels = Channels::new(1, 4);
        assert_eq!((channels.lend(1), channels.lend(1)), (Some(0), Some(0)));
        assert_eq!((channels.lend(2), channels.lend(3)), (None, None));
        assert_eq!(channels.lend(1), None, "others wait");
        channels.give_back(1);
        assert_eq!(channels.lend(2), None, "its last message is still under way");
        channels.give_back(1);
        assert_eq!(
            (channels.lend(3), channels.lend(1), channels.lend(2)),
            (None, None, Some(0)),
            "in the order of asking"
        );
        channels.give_back(2);
        assert_eq!((channels.lend(2), channels.lend(1), channels.lend(3)), (None, None, Some(0)));
        channels.give_back(3);
        assert_eq!(channels.lend(1), Some(0));
    }

    #[test]
    fn one_that_waits_does_not_keep_free_lanes_from_others() {
        let mut channels = Channels::new(2, 4);
        assert_eq!((channels.lend(1), channels.lend(2), channels.lend(3)), (Some(1 - 1), Some(1), None));
        assert_eq!(channels.lend(1), None, "rank 3 waits");
        channels.give_back(2);
        assert_eq!((channels.lend(3), channels.lend(1)), (Some(1), Some(0)), "its own, because it is its turn");
        assert_eq!(channels.of(1), Some(0));
    }
}
