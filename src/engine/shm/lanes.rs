//! Assigns a receiver's lanes to senders. A lane carries the large messages of one sender at a time; a receiver has
//! fewer lanes than there may be senders.
//!
//! A lane is lent with the grant for a message and returned when the receiver has read the whole message. A granted
//! message was matched by a receive, so both ranks move it whatever else they wait for: every lane comes back. Senders
//! that find no free lane get one in the order in which they asked. A sender keeps its lane for its next messages as
//! long as no other sender waits.
//!
//! Only the receiver has this state; a sender reads the number of its lane in the grant (`p2p.rs`).

use std::collections::VecDeque;

pub struct Lanes {
    free: Vec<usize>,
    /// By sender: its lane, and how many of its granted messages are not fully read.
    lent: Vec<Option<(usize, usize)>>,
    waiting: VecDeque<usize>,
}

impl Lanes {
    pub fn new(lanes: usize, ranks: usize) -> Lanes {
        Lanes { free: (0..lanes).rev().collect(), lent: vec![None; ranks], waiting: VecDeque::new() }
    }

    /// A lane for one more message of `from`; `None` if it must ask again after a lane was returned.
    pub fn lend(&mut self, from: usize) -> Option<usize> {
        if self.waiting.front().is_none_or(|first| *first == from) {
            let lane = self.of(from).or_else(|| self.free.pop());
            if let Some(lane) = lane {
                let messages = self.lent[from].map_or(0, |(_, messages)| messages);
                self.lent[from] = Some((lane, messages + 1));
                self.waiting.pop_front(); // empty, or this one's turn
                return Some(lane);
            }
        }
        if !self.waiting.contains(&from) {
            self.waiting.push_back(from);
        }
        None
    }

    /// The lane that messages of `from` use now.
    pub fn of(&self, from: usize) -> Option<usize> {
        self.lent[from].map(|(lane, _)| lane)
    }

    /// One message of `from` was fully read.
    pub fn give_back(&mut self, from: usize) {
        match self.lent[from] {
            Some((lane, 1)) => {
                self.lent[from] = None;
                self.free.push(lane); // the next one finds it in the cache
            }
            Some((lane, messages)) => self.lent[from] = Some((lane, messages - 1)),
            None => debug_assert!(false, "rank {from} has no lane"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_kept_while_nobody_waits_and_then_goes_round() {
        let mut lanes = Lanes::new(1, 4);
        assert_eq!((lanes.lend(1), lanes.lend(1)), (Some(0), Some(0)));
        assert_eq!((lanes.lend(2), lanes.lend(3)), (None, None));
        assert_eq!(lanes.lend(1), None, "others wait");
        lanes.give_back(1);
        assert_eq!(lanes.lend(2), None, "its last message is still under way");
        lanes.give_back(1);
        assert_eq!((lanes.lend(3), lanes.lend(1), lanes.lend(2)), (None, None, Some(0)), "in the order of asking");
        lanes.give_back(2);
        assert_eq!((lanes.lend(2), lanes.lend(1), lanes.lend(3)), (None, None, Some(0)));
        lanes.give_back(3);
        assert_eq!(lanes.lend(1), Some(0));
    }

    #[test]
    fn one_that_waits_does_not_keep_free_lanes_from_others() {
        let mut lanes = Lanes::new(2, 4);
        assert_eq!((lanes.lend(1), lanes.lend(2), lanes.lend(3)), (Some(1 - 1), Some(1), None));
        assert_eq!(lanes.lend(1), None, "rank 3 waits");
        lanes.give_back(2);
        assert_eq!((lanes.lend(3), lanes.lend(1)), (Some(1), Some(0)), "its own, because it is its turn");
        assert_eq!(lanes.of(1), Some(0));
    }
}
