//! Keeps the Ready letters of a peer, and finds the message of this rank to which each letter belongs.
//!
//! A receiver that posts a large receive before its message has arrived passes the memory to the link immediately and
//! says so by a Ready letter. A send that finds such a letter sends its body immediately: one exchange instead of three
//! (announcement, grant, body). Messages that were sent before the letter arrived may cross it. Both sides know the
//! order of the messages of a tag, so two numbers in the letter identify the message for the receive. `seen` is how
//! many messages of this rank the receiver had seen. `ahead` is how many earlier receives from this rank with this tag
//! still waited. The messages that were in flight take these receives in order. If one of these messages takes the
//! receive that the letter announces, the letter grants that message.

use std::collections::{HashMap, VecDeque};

/// This many of the last messages are remembered, because a Ready letter may cross them. A letter is dropped if the
/// peer had not seen all forgotten messages when it wrote the letter.
const REMEMBERED: usize = 512;

/// A Ready letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    pub tag: u32,
    pub bytes: u64,
    /// Number of messages of this rank, of any tag, that the receiver had seen.
    pub seen: u64,
    /// Number of earlier receives from this rank with this tag that still waited for a message.
    pub ahead: u64,
    /// The body number under which the receiver's link has the memory.
    pub body: u64,
}

/// What this rank knows of the receives of one peer.
#[derive(Default)]
pub struct Receives {
    /// Number of messages sent to the peer.
    sent: u64,
    /// Numbers and tags of the last messages sent, oldest first, except those that the peer is known to have seen.
    last: VecDeque<(u64, u32)>,
    /// Number of the newest message that was removed from `last` because `last` was full.
    forgotten: u64,
    /// By tag. A tag without letters has no entry.
    lines: HashMap<u32, Line>,
}

/// The letters of one tag.
#[derive(Default)]
struct Line {
    /// Number of messages sent with this tag since this entry was created.
    passed: u64,
    /// For each letter, in order: the value that `passed` has when its message is sent, the bytes of its receive, and
    /// its body.
    letters: VecDeque<(u64, u64, u64)>,
}

impl Receives {
    /// Counts a message that is being sent, and returns its number. If the peer has posted its receive, also returns
    /// the body under which the message can be sent immediately.
    pub fn send(&mut self, tag: u32, bytes: u64) -> (u64, Option<u64>) {
        self.sent += 1;
        if self.last.len() == REMEMBERED {
            self.forgotten = self.last.pop_front().map_or(0, |(number, _)| number);
        }
        self.last.push_back((self.sent, tag));
        // It is an error if the message has a different size than the receive. The message is then announced, so that
        // both sides report the error.
        let body = self.letter_for(tag).filter(|(room, _)| *room == bytes).map(|(_, body)| body);
        (self.sent, body)
    }

    /// Finds the letter for the message that is being sent with this tag. Returns the bytes of its receive, and its
    /// body.
    fn letter_for(&mut self, tag: u32) -> Option<(u64, u64)> {
        let line = self.lines.get_mut(&tag)?;
        let at = line.passed;
        line.passed += 1;
        let letter = if line.letters.front()?.0 == at { line.letters.pop_front() } else { None };
        if line.letters.is_empty() {
            self.lines.remove(&tag);
        }
        letter.map(|(_, room, body)| (room, body))
    }

    /// Adds a Ready letter of the peer. If this rank has already sent the message that the announced receive will take,
    /// returns the number of that message.
    pub fn add(&mut self, ready: Ready) -> Option<u64> {
        while self.last.front().is_some_and(|(number, _)| *number <= ready.seen) {
            self.last.pop_front();
        }
        if ready.seen < self.forgotten {
            return None;
        }
        let mut in_flight = self.last.iter().filter(|(_, tag)| *tag == ready.tag).map(|(number, _)| *number);
        let mut before = 0;
        for number in in_flight.by_ref() {
            if before == ready.ahead {
                return Some(number);
            }
            before += 1;
        }
        let line = self.lines.entry(ready.tag).or_default();
        line.letters.push_back((line.passed + ready.ahead - before, ready.bytes, ready.body));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(seen: u64, ahead: u64, body: u64) -> Ready {
        Ready { tag: 7, bytes: 100, seen, ahead, body }
    }

    fn body(receives: &mut Receives, tag: u32, bytes: u64) -> Option<u64> {
        receives.send(tag, bytes).1
    }

    #[test]
    fn a_posted_receive_gets_the_next_message_of_its_tag_and_size() {
        let mut receives = Receives::default();
        assert_eq!(receives.add(ready(0, 0, 1)), None);
        assert_eq!(body(&mut receives, 8, 100), None, "another tag");
        assert_eq!(receives.send(7, 100), (2, Some(1)));
        assert_eq!(body(&mut receives, 7, 100), None, "it was used");
        receives.add(ready(3, 0, 2));
        assert_eq!(body(&mut receives, 7, 99), None, "another size");
        assert_eq!(body(&mut receives, 7, 100), None, "that message takes the receive all the same");
    }

    #[test]
    fn a_letter_that_crosses_the_message_for_its_receive_grants_that_message() {
        let mut receives = Receives::default();
        assert_eq!(receives.send(7, 100), (1, None));
        assert_eq!(receives.send(8, 100), (2, None));
        assert_eq!(receives.send(7, 100), (3, None));
        assert_eq!(receives.add(ready(0, 0, 1)), Some(1));
        assert_eq!(receives.add(ready(1, 0, 2)), Some(3));
        receives.add(ready(1, 1, 3)); // message 3 takes the receive ahead of it
        assert_eq!(receives.send(7, 100), (4, Some(3)));
    }

    #[test]
    fn receives_ahead_take_the_messages_before() {
        let mut receives = Receives::default();
        receives.add(ready(0, 2, 1)); // two short receives wait, for which there are no letters
        receives.add(ready(0, 4, 2));
        let sent: Vec<_> = (0..5).map(|_| body(&mut receives, 7, 100)).collect();
        assert_eq!(sent, [None, None, Some(1), None, Some(2)]);
        assert!(receives.lines.is_empty());
    }

    #[test]
    fn a_letter_from_before_what_is_remembered_is_dropped() {
        let mut receives = Receives::default();
        for _ in 0..=REMEMBERED {
            receives.send(1, 5);
        }
        assert_eq!(receives.add(ready(0, 0, 1)), None);
        assert_eq!(body(&mut receives, 7, 100), None, "message 1 may have had this tag");
        assert_eq!(receives.add(ready(1, 0, 2)), None);
        assert_eq!(body(&mut receives, 7, 100), None, "so may message 2, which is forgotten now");
        receives.add(ready(REMEMBERED as u64 + 3, 0, 3));
        assert_eq!((body(&mut receives, 7, 100), receives.last.len()), (Some(3), 1));
    }

    /// Simulates both sides at random, with letters and messages in flight in both directions: each letter that is used
    /// must belong to the receive that takes the message.
    #[test]
    fn a_letter_is_used_for_the_receive_that_takes_the_message() {
        for seed in 1..if cfg!(miri) { 8 } else { 2000u64 } {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut below = |n: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % n
            };
            let mut receives = Receives::default();
            let (mut letters, mut messages) = (VecDeque::new(), VecDeque::<(u32, (u64, Option<u64>))>::new());
            let mut granted = HashMap::new(); // by letters that crossed their message
            let (mut waiting, mut seen, mut posted) = (HashMap::<u32, VecDeque<u64>>::new(), 0, 0);
            let mut unmatched = HashMap::<u32, u64>::new();
            let mut taken = HashMap::new();
            for _ in 0..200 {
                let tag = below(3) as u32;
                match below(4) {
                    0 => messages.push_back((tag, receives.send(tag, 100))),
                    1 => {
                        let Some(letter) = letters.pop_front() else { continue };
                        if let Some(number) = receives.add(letter) {
                            assert_eq!(granted.insert(number, letter.body), None, "seed {seed}");
                        }
                    }
                    2 => {
                        let arrived = unmatched.entry(tag).or_default();
                        if *arrived > 0 {
                            *arrived -= 1;
                            continue;
                        }
                        posted += 1;
                        let line = waiting.entry(tag).or_default();
                        if below(3) > 0 {
                            letters.push_back(Ready { tag, bytes: 100, seen, ahead: line.len() as u64, body: posted });
                        }
                        line.push_back(posted);
                    }
                    _ => {
                        let Some((tag, (number, body))) = messages.pop_front() else { continue };
                        seen += 1;
                        assert_eq!(number, seen, "messages arrive in order");
                        match waiting.entry(tag).or_default().pop_front() {
                            Some(receive) => {
                                assert!(body.is_none_or(|body| body == receive), "seed {seed}");
                                taken.insert(number, receive);
                            }
                            None => {
                                assert_eq!(body, None, "seed {seed}: no receive waits");
                                *unmatched.entry(tag).or_default() += 1;
                            }
                        }
                    }
                }
            }
            for (number, body) in granted {
                assert!(taken.get(&number).is_none_or(|receive| *receive == body), "seed {seed}, message {number}");
            }
        }
    }
}
