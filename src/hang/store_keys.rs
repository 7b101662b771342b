//! The store keys for questions and answers between ranks that share no memory. The store is the one in which the ranks
//! met. `queries` decides which rank asks, collects and reads.
//!
//! | key | |
//! | --- | --- |
//! | `count` | a counter: the number of the last question. Every rank reads it at intervals |
//! | `claimed/<question>` | a counter: the first rank to increment it asks the question and collects the answers |
//! | `who/<rank>` | a rank's process. Set at its first read of `count`; describes the rank if it never answers |
//! | `said/<rank>` | a rank's last answer (`status`) |
//! | `found/<question>` | the result of all answers (`QueryResult`), written by the rank that collected them |
//! | `fault` | why the group failed, written by the first rank that failed |
//! | `left` | a counter: how many ranks have left the group for good |
//!
//! While the group lives, each rank keeps the keys of the last few questions that it has collected (`queries`). A
//! leaving rank removes these, and the last rank to leave removes all other keys, because no rank of the group is there
//! to read them (`leave`). Keys stay if a rank has died, because `left` then never counts all ranks. They also stay if
//! no other group of a rank uses the same connection to the store, because the store may be gone before the ranks have
//! left (`store_threads`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::difference::Difference;
use super::status::Status;
use crate::engine::{Signed, Told};
use crate::error::{Error, Result};
use crate::fields::{Reader, Writer};
use crate::host::Counting;
use crate::os::{clock, topology};

pub type SharedStore = Arc<dyn Counting + Send + Sync>;

/// Largest size of a fault in the store, in bytes.
const LONGEST_FAULT: usize = 64 << 10;

/// Interval between two reads of the store: a sixteenth of the group's timeout, within these limits.
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(10);

pub fn interval(timeout: Duration) -> Duration {
    (timeout / 16).clamp(SHORTEST, LONGEST)
}

/// A rank's process, and where its process id is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pid: i32,
    /// Boot id of the machine, and the namespace of the process id.
    place: String,
    /// Description in texts.
    pub who: String,
}

impl Process {
    pub fn own() -> Process {
        let place = format!("{}/{}", topology::boot_id(), topology::pidns());
        let pid = std::process::id();
        Process { pid: pid as i32, place, who: format!("pid {pid}, host {}", topology::hostname()) }
    }

    /// The process id, or None if it belongs to another namespace or boot.
    pub fn local_pid(&self) -> Option<i32> {
        let here = Process::own();
        (self.place == here.place && !topology::boot_id().is_empty()).then_some(self.pid)
    }

    fn encode(&self) -> Vec<u8> {
        Writer::default().u32(self.pid as u32).text(&self.place).text(&self.who).0
    }

    fn decode(bytes: &[u8]) -> Option<Process> {
        let mut from = Reader(bytes);
        Some(Process { pid: from.u32()? as i32, place: from.text()?, who: from.text()? })
    }
}

/// The result of a question, from all its answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueryResult {
    /// For each rank that has issued fewer collectives than another rank: the number of its last collective on the CPU,
    /// and of that on a device.
    pub behind: BTreeMap<usize, (u64, u64)>,
    /// The ranks that have not answered.
    pub silent: BTreeSet<usize>,
    /// Ranks whose processes are stopped, as reported by ranks on their hosts.
    pub stopped: BTreeSet<usize>,
    /// Two ranks that called different operations on their devices under one number.
    pub difference: Option<Difference>,
}

impl QueryResult {
    /// Computes the result from the answers of `ranks` ranks.
    pub fn of(ranks: usize, answers: &BTreeMap<usize, Status>) -> QueryResult {
        let counts = |status: &Status| (status.issued, status.launched);
        let most = |count: fn(&Status) -> u64| answers.values().map(count).max().unwrap_or(0);
        let (issued, launched) = (most(|status| status.issued), most(|status| status.launched));
        let late = answers.iter().filter(|(_, status)| status.issued < issued || status.launched < launched);
        QueryResult {
            behind: late.map(|(rank, status)| (*rank, counts(status))).collect(),
            silent: (0..ranks).filter(|rank| !answers.contains_key(rank)).collect(),
            stopped: answers
                .values()
                .flat_map(|status| &status.stopped)
                .copied()
                .filter(|rank| *rank < ranks)
                .collect(),
            difference: Difference::among(ranks, answers.iter().map(|(rank, status)| (*rank, &status.signed[..]))),
        }
    }

    fn encode(&self) -> Vec<u8> {
        let rank = |to: Writer, rank: &usize| to.u32(*rank as u32);
        let behind = |to, (late, (issued, launched)): (_, &(u64, u64))| rank(to, late).u64(*issued).u64(*launched);
        let to = Writer::default().list(&self.behind, behind).list(&self.silent, rank).list(&self.stopped, rank);
        let side = |to, (of, signed): (&usize, &Signed)| rank(to, of).u64(signed.signature).u32(signed.lists);
        to.list(&self.difference, |to, found| found.ranks.iter().zip(&found.signed).fold(to.u64(found.number), side)).0
    }

    /// Skips ranks outside `0..ranks`, because anyone with access to the store can write such numbers.
    fn decode(bytes: &[u8], ranks: usize) -> Option<QueryResult> {
        let mut from = Reader(bytes);
        let rank = |from: &mut Reader| Some(from.u32()? as usize);
        let in_group = |rank: &usize| *rank < ranks;
        let behind = from.list(|from| Some((rank(from)?, (from.u64()?, from.u64()?))))?;
        let (silent, stopped) = (from.list(rank)?, from.list(rank)?);
        let side = |from: &mut Reader| Some((rank(from)?, Signed { signature: from.u64()?, lists: from.u32()? }));
        let differ = from.list(|from| Some((from.u64()?, side(from)?, side(from)?)))?;
        let mut differ = differ.into_iter().map(|(number, one, other)| Difference {
            number,
            ranks: [one.0, other.0],
            signed: [one.1, other.1],
        });
        Some(QueryResult {
            behind: behind.into_iter().filter(|(rank, _)| in_group(rank)).collect(),
            silent: silent.into_iter().filter(in_group).collect(),
            stopped: stopped.into_iter().filter(in_group).collect(),
            difference: differ.find(|found| found.ranks.iter().all(in_group)),
        })
    }
}

/// The result of a question, as one rank receives it.
pub struct Outcome {
    pub result: QueryResult,
    /// On the rank that collected, all answers. On another rank, its own answer and those of the ranks that
    /// `Participant::concerned` lists.
    pub answers: BTreeMap<usize, Status>,
    /// The processes of the listed ranks that have not answered, as far as known.
    pub silent: BTreeMap<usize, Process>,
}

/// The request to a store that a thread waits for. All groups of a connection share it, because one thread makes all
/// their requests.
#[derive(Default)]
pub struct Request {
    /// When the request began (`clock::now`); 0 if there is none. Written by the thread that makes the requests, read
    /// by other threads for texts. Relaxed, because it guards no other data.
    since: AtomicU64,
}

impl Request {
    /// Makes a request.
    fn of<T>(&self, make: impl FnOnce() -> T) -> T {
        self.since.store(clock::now().max(1), Ordering::Relaxed);
        let made = make();
        self.since.store(0, Ordering::Relaxed);
        made
    }

    /// How long the request has waited for the store. `None` if there is none.
    pub fn waits(&self) -> Option<Duration> {
        let since = self.since.load(Ordering::Relaxed);
        (since > 0).then(|| Duration::from_nanos(clock::now().saturating_sub(since)))
    }
}

pub struct StoreKeys {
    store: SharedStore,
    request: Arc<Request>,
    /// Common prefix of all keys.
    prefix: String,
}

impl StoreKeys {
    /// `id` is unique to this attempt to make the group.
    pub fn new(store: SharedStore, id: &str, request: Arc<Request>) -> StoreKeys {
        StoreKeys { store, request, prefix: format!("hang/{id}") }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.request.of(|| self.store.try_get(&self.key(key)))
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.request.of(|| self.store.set(&self.key(key), bytes))
    }

    /// Adds to a counter and returns its value.
    fn add(&self, key: &str, more: i64) -> Result<i64> {
        self.request.of(|| self.store.add(&self.key(key), more))
    }

    /// Number of the last question; `None` before the first.
    pub fn question(&self) -> Result<Option<u32>> {
        let count = |bytes: Vec<u8>| Some(String::from_utf8(bytes).ok()?.parse::<i64>().ok()? as u32);
        Ok(self.get("count")?.and_then(count))
    }

    /// Claims the question with this number. Returns how many ranks have claimed it, including this one.
    pub fn claim(&self, question: u32) -> Result<u32> {
        Ok(self.add(&format!("claimed/{question}"), 1)? as u32)
    }

    /// Asks all ranks the next question.
    pub fn ask(&self) -> Result<()> {
        self.add("count", 1).map(drop)
    }

    pub fn introduce(&self, rank: usize) -> Result<()> {
        self.put(&format!("who/{rank}"), &Process::own().encode())
    }

    /// The processes of these ranks, as far as they have set `who`.
    pub fn processes(&self, ranks: impl Iterator<Item = usize>) -> Result<BTreeMap<usize, Process>> {
        let mut found = BTreeMap::new();
        for rank in ranks {
            let process = self.get(&format!("who/{rank}"))?.and_then(|bytes| Process::decode(&bytes));
            found.extend(process.map(|process| (rank, process)));
        }
        Ok(found)
    }

    pub fn answer(&self, rank: usize, status: &Status) -> Result<()> {
        self.put(&format!("said/{rank}"), &status.encode())
    }

    /// The answers of these ranks to this question or a later one.
    pub fn answers(&self, question: u32, ranks: impl Iterator<Item = usize>) -> Result<BTreeMap<usize, Status>> {
        let mut found = BTreeMap::new();
        for rank in ranks {
            let status = self.get(&format!("said/{rank}"))?.and_then(|bytes| Status::decode(&bytes));
            found.extend(status.filter(|status| status.answers(question)).map(|status| (rank, status)));
        }
        Ok(found)
    }

    /// Publishes the result for the other ranks that wait.
    pub fn publish(&self, question: u32, found: &QueryResult) -> Result<()> {
        self.put(&format!("found/{question}"), &found.encode())
    }

    /// Removes the claim and the result of a question.
    pub fn forget(&self, question: u32) -> Result<()> {
        self.remove(&format!("claimed/{question}"))?;
        self.remove(&format!("found/{question}"))
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.remove_whole(&self.key(key))
    }

    /// Removes the key with this full name. No prefix is added.
    fn remove_whole(&self, name: &str) -> Result<()> {
        self.request.of(|| self.store.remove(name))
    }

    /// Called once by each of the `ranks` ranks, after it has left the group. Each removes its `own` keys, which no
    /// rank reads any more; the last one also removes the keys that all ranks read.
    pub fn leave(&self, ranks: usize, own: &[String]) -> Result<()> {
        own.iter().try_for_each(|key| self.remove_whole(key))?;
        if self.add("left", 1)? < ranks as i64 {
            return Ok(());
        }
        (0..ranks).try_for_each(|rank| self.remove(&format!("who/{rank}")))?;
        if self.question()?.is_some() {
            (0..ranks).try_for_each(|rank| self.remove(&format!("said/{rank}")))?;
            self.remove("fault")?;
            self.remove("count")?;
        }
        self.remove("left")
    }

    pub fn result(&self, question: u32, ranks: usize) -> Result<Option<QueryResult>> {
        let found = self.get(&format!("found/{question}"))?;
        Ok(found.map(|bytes| QueryResult::decode(&bytes, ranks).unwrap_or_default()))
    }

    /// Publishes why the group failed on this rank, unless another rank has already published a fault. Then asks a
    /// question, so that the other ranks read the fault. If two ranks fail at the same time, either fault may remain.
    pub fn publish_fault(&self, rank: usize, fault: &Error) -> Result<()> {
        match self.fault()? {
            Some(_) => Ok(()),
            None => {
                self.put("fault", &Writer::default().u32(rank as u32).raw(&fault.encode(LONGEST_FAULT)).0)?;
                self.ask()
            }
        }
    }

    /// The published fault, and the rank that published it.
    pub fn fault(&self) -> Result<Option<Told>> {
        let read = |bytes: Vec<u8>| {
            let mut from = Reader(&bytes);
            Some((from.u32()? as usize, Error::decode(from.0)?))
        };
        Ok(self.get("fault")?.and_then(read))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hang::status::Place;

    proptest! {
        /// Anyone with access to the store can write these keys.
        #[test]
        fn random_bytes_in_the_store_are_read_without_panic_or_control_characters(
            kind in 0..3usize, bytes in any::<Vec<u8>>(), at in any::<prop::sample::Index>()
        ) {
            let status = Status { place: Place::At("a.py:3".into()), who: "pid 5".into(), ..Status::default() };
            let found = QueryResult { silent: [3].into(), ..QueryResult::default() };
            let mut written = [status.encode(), found.encode(), Process::own().encode()][kind].clone();
            written.truncate(at.index(written.len() + 1));
            let bytes = [written, bytes].concat();
            let plain = |text: &str| !text.contains(char::is_control);
            let _ = QueryResult::decode(&bytes, 4);
            let process = Process::decode(&bytes).map(|process| format!("{}{}", process.place, process.who));
            prop_assert!(plain(&process.unwrap_or_default()));
            if let Some(status) = Status::decode(&bytes) {
                prop_assert!(plain(&status.who));
                prop_assert!(!matches!(&status.place, Place::At(place) if !plain(place)));
                prop_assert!(status.waits.iter().all(|waits| plain(&waits.group) && plain(&waits.what)));
                prop_assert!(status.edges.iter().all(|(edge, _)| plain(&edge.group) && plain(&edge.what)));
            }
        }

        #[test]
        fn the_result_of_a_question_is_read_as_it_was_written(
            behind in any::<Vec<(u16, u64, u64)>>(), silent in any::<BTreeSet<u16>>(), stopped in any::<BTreeSet<u16>>(),
            differ in any::<Option<(u64, [u16; 2], [(u64, u32); 2])>>(),
        ) {
            let all = |ranks: BTreeSet<u16>| ranks.into_iter().map(usize::from).collect();
            let found = QueryResult {
                behind: behind.into_iter().map(|(rank, one, other)| (rank.into(), (one, other))).collect(),
                silent: all(silent),
                stopped: all(stopped),
                difference: differ.map(|(number, ranks, signed)| {
                    let signed = signed.map(|(signature, lists)| Signed { signature, lists });
                    Difference { number, ranks: ranks.map(usize::from), signed }
                }),
            };
            prop_assert_eq!(QueryResult::decode(&found.encode(), 1 << 16), Some(found));
        }
    }

    #[test]
    fn a_process_is_read_as_it_was_written_and_known_here_by_its_place() {
        let own = Process::own();
        let read = Process::decode(&own.encode()).unwrap();
        assert_eq!(read, own);
        assert_eq!(read.local_pid(), Some(std::process::id() as i32));
        let far = Process { place: "another boot/4026531836".into(), ..own };
        assert_eq!(Process::decode(&far.encode()).unwrap().local_pid(), None);
        let bytes = far.encode();
        assert!((0..bytes.len()).all(|end| Process::decode(&bytes[..end]).is_none()));
    }

    #[test]
    fn a_rank_is_behind_where_another_has_issued_more_and_silent_where_it_says_nothing() {
        let status = |issued, launched| Status { issued, launched, ..Status::default() };
        let answers = BTreeMap::from([(0, status(3, 1)), (1, status(2, 1)), (3, status(3, 0))]);
        let behind = BTreeMap::from([(1, (2, 1)), (3, (3, 0))]);
        let found = QueryResult { behind, silent: BTreeSet::from([2]), ..QueryResult::default() };
        assert_eq!(QueryResult::of(4, &answers), found);
        let mut all = answers.clone();
        all.insert(4, Status { stopped: vec![4, 2], ..status(3, 1) });
        let all = QueryResult::of(5, &all);
        assert_eq!(all, QueryResult { stopped: BTreeSet::from([2, 4]), ..found });
        let signed = |signature| Status { signed: vec![(5, Signed { signature, lists: 1 })], ..status(3, 1) };
        let differ = QueryResult::of(2, &BTreeMap::from([(0, signed(u64::MAX)), (1, signed(8))]));
        assert!(differ.difference.is_some_and(|difference| (difference.number, difference.ranks) == (5, [0, 1])));
        assert_eq!(QueryResult::of(2, &BTreeMap::new()).silent, BTreeSet::from([0, 1]), "nobody has answered");
    }

    #[test]
    fn ranks_that_the_group_does_not_have_are_passed_over() {
        for rank in [2, u32::MAX as usize] {
            let signed = [Signed { signature: 1, lists: 0 }; 2];
            for ranks in [[0, rank], [rank, 0]] {
                let difference = Some(Difference { number: 5, ranks, signed });
                let behind = BTreeMap::from([(rank, (1, 1)), (1, (3, 1))]);
                let (silent, stopped) = (BTreeSet::from([rank, 1]), BTreeSet::from([rank]));
                let found = QueryResult { behind, silent, stopped, difference };
                let read = QueryResult::decode(&found.encode(), 2).unwrap();
                assert_eq!((read.behind.len(), read.silent.len(), read.stopped.len()), (1, 1, 0), "{rank}");
                assert_eq!(read.difference, None, "{rank}");
            }
            let said = Status { stopped: vec![rank, 1], ..Status::default() };
            let found = QueryResult::of(2, &BTreeMap::from([(0, said.clone()), (1, said)]));
            assert_eq!(found.stopped, BTreeSet::from([1]), "{rank}");
        }
    }
}
