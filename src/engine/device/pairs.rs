//! Lets two ranks agree when to make the communicators for their messages.
//!
//! A vendor's library makes a communicator while both ranks are in its call, and a rank in that call answers no other
//! rank. If ranks entered the call without agreement, three ranks that each send to the next in a ring would deadlock.
//! So a rank that needs a communicator invites its peer through the group's store, and enters the call only after the
//! peer has accepted. While it waits, it accepts invitations of other ranks to pairs that precede its own in one global
//! order of pairs:
//!
//! - Ranks never wait in a circle. A rank that has accepted enters the call immediately. The inviter is then in the
//!   call too, or it is still making another pair, which it accepted while it waited. That other pair precedes the
//!   accepted pair in the order. So in a circle of waiting ranks each pair would precede the previous one, which is
//!   impossible. (If the inviter's wait was interrupted, the inviter is not in the call. Then the rank that accepted
//!   waits until the inviter begins a first message with any rank, or until its own deadline.)
//! - No rank waits for ever, if its peer also begins a first message with it. Of all pairs for which ranks wait,
//!   consider the first in the order. Of its two ranks, the one that asked second accepts the invitation of the other,
//!   even while it waits for another pair.
//!
//! Keys in the store. All have a prefix that is unique to this attempt to create the group:
//!
//! | key | |
//! | --- | --- |
//! | `pair/<low>-<high>/asked` | counter: the rank with an odd value asked first and invites; its peer gets the next |
//! | `mail/<rank>/count`, `mail/<rank>/<n>` | invitations to a rank, deleted by it: inviter, number of the making |
//! | `pair/<low>-<high>/<making>` | set when the invitation to this making was accepted |
//!
//! All keys but the invitations stay after the group has ended: two or three for each pair of ranks that sent a message
//! on a device. No rank deletes them, because an interrupt may have ended the wait of its peer, and the peer may wait
//! again.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::host::Counting;

/// Two ranks, the lower first.
type Pair = (usize, usize);

fn pair(a: usize, b: usize) -> Pair {
    (a.min(b), a.max(b))
}

/// The state of one rank. Used by one thread at a time.
pub struct Pairs {
    store: Arc<dyn Counting + Send + Sync>,
    prefix: String,
    rank: usize,
    /// Number of invitations that were read from this rank's mail.
    read: i64,
    /// Invitations that this rank has not accepted yet: the inviter, and the number of the making (1 when the pair
    /// first makes its communicators, 2 when it does so for its second device, ...).
    invited: BTreeMap<Pair, (usize, i64)>,
    /// Pairs for which this rank has asked and that are not made yet: for each, the number of the making, and whether
    /// this rank asked first and is therefore the inviter. An entry stays if the wait is interrupted.
    asked: BTreeMap<Pair, (i64, bool)>,
}

impl Pairs {
    pub fn new(store: Arc<dyn Counting + Send + Sync>, prefix: String, rank: usize) -> Pairs {
        Pairs { store, prefix, rank, read: 0, invited: BTreeMap::new(), asked: BTreeMap::new() }
    }

    /// Returns the rank with which this rank now makes communicators; that rank does the same. It is `peer`, or another
    /// rank that must be served first; in the second case the caller must call `next` again. Never returns a rank in
    /// `known`, except `peer`. `pause` is called between two polls of the store; if it returns an error, the wait ends.
    pub fn next(&mut self, peer: usize, known: &[u32], pause: &mut dyn FnMut() -> Result<()>) -> Result<usize> {
        let own = pair(self.rank, peer);
        self.ask(own, peer)?;
        loop {
            self.read_mail()?;
            let serves = |from: usize| from == peer || !known.contains(&(from as u32));
            let found = self.invited.range(..=own).find(|(_, (from, _))| serves(*from));
            if let Some((&other, &(from, making))) = found {
                self.invited.remove(&other);
                // Count this rank as the second to ask, unless it has already asked.
                if self.asked.remove(&other).is_none() {
                    self.store.add(&self.key(other, "asked"), 1)?;
                }
                self.store.set(&self.key(other, &making.to_string()), b"accepted")?;
                return Ok(from);
            }
            if let Some(accepted) = self.accepted()? {
                self.asked.remove(&accepted);
                return Ok(if accepted.0 == self.rank { accepted.1 } else { accepted.0 });
            }
            pause()?;
        }
    }

    fn key(&self, (low, high): Pair, what: &str) -> String {
        format!("{}/pair/{low}-{high}/{what}", self.prefix)
    }

    /// Returns a pair whose other rank has accepted this rank's invitation and has therefore entered the library's
    /// call.
    fn accepted(&self) -> Result<Option<Pair>> {
        for (pair, (making, first)) in &self.asked {
            if *first && self.store.try_get(&self.key(*pair, &making.to_string()))?.is_some() {
                return Ok(Some(*pair));
            }
        }
        Ok(None)
    }

    /// Announces that this rank needs the pair. If it is the first of the two ranks to do so, invites the other.
    fn ask(&mut self, own: Pair, peer: usize) -> Result<()> {
        if self.asked.contains_key(&own) {
            return Ok(());
        }
        let turn = self.store.add(&self.key(own, "asked"), 1)?;
        let (making, first) = ((turn + 1) / 2, turn % 2 == 1);
        if first {
            let count = self.store.add(&format!("{}/mail/{peer}/count", self.prefix), 1)?;
            let text = format!("{} {making}", self.rank);
            self.store.set(&format!("{}/mail/{peer}/{count}", self.prefix), text.as_bytes())?;
        }
        self.asked.insert(own, (making, first));
        Ok(())
    }

    fn read_mail(&mut self) -> Result<()> {
        while let Some(mail) = self.store.try_get(&format!("{}/mail/{}/{}", self.prefix, self.rank, self.read + 1))? {
            self.read += 1;
            // No other rank reads this key, and no rank writes it again. If the store cannot delete, the key stays.
            let _ = self.store.remove(&format!("{}/mail/{}/{}", self.prefix, self.rank, self.read));
            let text = String::from_utf8_lossy(&mail);
            let words =
                text.split_once(' ').and_then(|(from, making)| Some((from.parse().ok()?, making.parse().ok()?)));
            let (from, making) =
                words.ok_or_else(|| Error::system(format!("sagellm: {text:?} in the store is no invitation")))?;
            self.invited.insert(pair(self.rank, from), (from, making));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::sync::{Barrier, Condvar, Mutex};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::error::ErrorKind;
    use crate::host::Memory;

    /// A library whose call returns when both ranks of a pair are in the call. It makes each pair at most once.
    #[derive(Default)]
    struct Library(Mutex<(HashMap<Pair, u32>, HashSet<Pair>)>, Condvar);

    impl Library {
        fn make(&self, pair: Pair, until: Instant) {
            let mut state = self.0.lock().unwrap();
            assert!(!state.1.contains(&pair), "{pair:?} is made a second time");
            let inside = state.0.entry(pair).or_default();
            *inside += 1;
            if *inside == 2 {
                state.1.insert(pair);
                self.1.notify_all();
            }
            while !state.1.contains(&pair) {
                let left = until.checked_duration_since(Instant::now());
                let left = left.unwrap_or_else(|| panic!("alone in the making of {pair:?}"));
                state = self.1.wait_timeout(state, left).unwrap().0;
            }
        }
    }

    /// Checks that ranks which need pairs in the given orders get all of them.
    fn run(wanted: &[Vec<usize>]) {
        let store = Memory::default();
        let library = Library::default();
        let start = Barrier::new(wanted.len());
        let until = Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            for (rank, peers) in wanted.iter().enumerate() {
                let (store, library, start) = (store.clone(), &library, &start);
                scope.spawn(move || {
                    let mut pairs = Pairs::new(Arc::new(store), "g".into(), rank);
                    let mut known: Vec<u32> = Vec::new();
                    start.wait();
                    for peer in peers {
                        while !known.contains(&(*peer as u32)) {
                            let next = pairs.next(*peer, &known, &mut || {
                                assert!(Instant::now() < until, "rank {rank} waits for rank {peer} of {wanted:?}");
                                std::thread::yield_now();
                                Ok(())
                            });
                            let next = next.unwrap();
                            library.make(pair(rank, next), until);
                            known.push(next as u32);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn rings_of_any_length_that_all_begin_with_the_next() {
        for ranks in 2..=9 {
            run(&(0..ranks).map(|rank| vec![(rank + 1) % ranks, (rank + ranks - 1) % ranks]).collect::<Vec<_>>());
        }
    }

    #[test]
    fn every_pair_in_random_orders() {
        let mut seed = 7_u64;
        let mut random = move |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below
        };
        for round in 0..200 {
            let ranks = 2 + round % 6;
            // Each rank asks for each of its pairs at some time. An invitation is accepted while the peer waits for
            // another rank, or when the peer asks for the same pair. So the run ends if ranks do not wait in a circle.
            let wanted: Vec<Vec<usize>> = (0..ranks)
                .map(|rank| {
                    let mut peers: Vec<usize> = (0..ranks).filter(|peer| *peer != rank).collect();
                    (1..peers.len()).rev().for_each(|at| peers.swap(at, random(at + 1)));
                    peers
                })
                .collect();
            run(&wanted);
        }
    }

    #[test]
    fn a_wait_that_was_interrupted_goes_on_with_its_invitation() {
        let store = Memory::default();
        let mut low = Pairs::new(Arc::new(store.clone()), "g".into(), 0);
        let mut high = Pairs::new(Arc::new(store.clone()), "g".into(), 1);
        let mut stop = || Err(Error::interrupted("stop"));
        for _ in 0..3 {
            assert!(matches!(low.next(1, &[], &mut stop), Err(ref error) if error.kind() == ErrorKind::Interrupted));
        }
        assert_eq!(high.next(0, &[], &mut stop).unwrap(), 0);
        assert_eq!(low.next(1, &[], &mut stop).unwrap(), 1);
        // The other rank begins the next making of the same pair, for another device.
        assert!(high.next(0, &[], &mut stop).is_err());
        assert_eq!(low.next(1, &[], &mut stop).unwrap(), 1);
        assert_eq!(high.next(0, &[], &mut stop).unwrap(), 0);
    }

    #[test]
    fn mail_that_was_read_is_deleted() {
        let store = Memory::default();
        let mut stop = || Err(Error::interrupted("stop"));
        let of = |rank| Pairs::new(Arc::new(store.clone()), "g".into(), rank);
        let (mut low, mut high) = (of(0), of(1));
        for _ in 0..3 {
            assert!(high.next(0, &[], &mut stop).is_err());
            assert_eq!(low.next(1, &[], &mut stop).unwrap(), 1);
            assert_eq!(high.next(0, &[], &mut stop).unwrap(), 0);
        }
        assert_eq!(store.keys("g/mail/"), ["g/mail/0/count"]);
    }

    #[test]
    fn an_interrupted_invitation_is_kept_when_its_inviter_comes_to_another_message() {
        let store = Memory::default();
        let of = |rank| Pairs::new(Arc::new(store.clone()), "g".into(), rank);
        let (mut low, mut high, mut last) = (of(0), of(1), of(2));
        let mut stop = || Err(Error::interrupted("stop"));
        assert!(low.next(2, &[], &mut stop).is_err());
        assert_eq!(last.next(0, &[], &mut stop).unwrap(), 0);
        // Rank 2 is in the call now, so rank 0 must join it although rank 0 asks for rank 1.
        assert_eq!(low.next(1, &[], &mut stop).unwrap(), 2);
        assert!(low.next(1, &[2], &mut stop).is_err());
        assert_eq!(high.next(0, &[], &mut stop).unwrap(), 0);
        assert_eq!(low.next(2, &[], &mut stop).unwrap(), 1);
    }

    #[test]
    fn who_has_a_pair_on_its_device_does_not_serve_another_making_of_it() {
        let store = Memory::default();
        let of = |rank| Pairs::new(Arc::new(store.clone()), "g".into(), rank);
        let (mut low, mut high, mut last) = (of(0), of(1), of(2));
        let mut stop = || Err(Error::interrupted("stop"));
        assert!(low.next(1, &[], &mut stop).is_err());
        assert!(last.next(1, &[], &mut stop).is_err());
        // Rank 1 waits for rank 2. Its pair with rank 0 precedes that pair, but is already made on this device.
        assert_eq!(high.next(2, &[0], &mut stop).unwrap(), 2);
        assert_eq!(high.next(2, &[], &mut stop).unwrap(), 0);
    }
}
