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

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::difference::Difference;
use super::status::Status;
use crate::engine::{Signed, Told};
use crate::error::{Error, Result, cleaned};
use crate::host::Counting;
use crate::os::topology;

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

    fn encode(&self) -> String {
        format!("{}\t{}\t{}", self.pid, self.place, self.who)
    }

    fn decode(text: &str) -> Option<Process> {
        let text = cleaned(text, &['\t']);
        let fields: Vec<&str> = text.split('\t').collect();
        let [pid, place, who] = fields[..] else { return None };
        Some(Process { pid: pid.parse().ok()?, place: place.to_string(), who: who.to_string() })
    }
}

/// The result of a question, from all its answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueryResult {
    /// Ranks that have issued fewer collectives than another rank: the number of their last collective on the CPU, and
    /// on a device.
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

    fn encode(&self) -> String {
        let behind =
            self.behind.iter().map(|(rank, (issued, launched))| format!("behind\t{rank}\t{issued}\t{launched}\n"));
        let silent = self.silent.iter().map(|rank| format!("silent\t{rank}\n"));
        let stopped = self.stopped.iter().map(|rank| format!("stopped\t{rank}\n"));
        let difference = self.difference.iter().map(|Difference { number, ranks: [a, b], signed: [one, other] }| {
            let words = [one, other].map(|signed| format!("{}\t{}", signed.signature, signed.lists));
            format!("differs\t{number}\t{a}\t{}\t{b}\t{}\n", words[0], words[1])
        });
        behind.chain(silent).chain(stopped).chain(difference).collect()
    }

    /// Entries for ranks outside `0..ranks` are skipped, because anyone with access to the store can write them.
    fn decode(text: &str, ranks: usize) -> QueryResult {
        let in_group = |rank: u64| usize::try_from(rank).ok().filter(|rank| *rank < ranks);
        let mut found = QueryResult::default();
        for line in text.lines() {
            let mut fields = line.split('\t');
            let kind = fields.next();
            let numbers: Option<Vec<u64>> = fields.map(|field| field.parse().ok()).collect();
            match (kind, numbers.as_deref()) {
                (Some("behind"), Some([rank, issued, launched])) => {
                    found.behind.extend(in_group(*rank).map(|rank| (rank, (*issued, *launched))));
                }
                (Some("silent"), Some([rank])) => found.silent.extend(in_group(*rank)),
                (Some("differs"), Some([number, a, one, one_lists, b, other, other_lists])) => {
                    let signed = |signature: u64, lists: u64| Signed { signature, lists: lists as u32 };
                    let signed = [signed(*one, *one_lists), signed(*other, *other_lists)];
                    let both = in_group(*a).zip(in_group(*b));
                    found.difference = both.map(|(a, b)| Difference { number: *number, ranks: [a, b], signed });
                }
                (Some("stopped"), Some([rank])) => found.stopped.extend(in_group(*rank)),
                _ => (),
            }
        }
        found
    }
}

/// The result of a question, as one rank receives it.
pub struct Outcome {
    pub result: QueryResult,
    /// On the rank that collected: all answers. On other ranks: their own answer and those of the ranks that
    /// `Participant::concerned` lists.
    pub answers: BTreeMap<usize, Status>,
    /// The processes of the listed ranks that have not answered, as far as known.
    pub silent: BTreeMap<usize, Process>,
}

pub struct StoreKeys {
    store: SharedStore,
    /// Common prefix of all keys.
    prefix: String,
}

impl StoreKeys {
    /// `id` is unique to this attempt to make the group.
    pub fn new(store: SharedStore, id: &str) -> StoreKeys {
        StoreKeys { store, prefix: format!("hang/{id}") }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        let value = self.store.try_get(&self.key(key))?;
        // Keeps tabs and line ends, which separate the fields and lines of a status; a field contains neither.
        Ok(value.map(|bytes| cleaned(&String::from_utf8_lossy(&bytes), &['\t', '\n'])))
    }

    fn put(&self, key: &str, text: &str) -> Result<()> {
        self.store.set(&self.key(key), text.as_bytes())
    }

    /// Number of the last question; `None` before the first.
    pub fn question(&self) -> Result<Option<u32>> {
        Ok(self.text("count")?.and_then(|text| text.parse::<i64>().ok()).map(|count| count as u32))
    }

    /// Claims the question with this number. Returns how many ranks have claimed it, including this one.
    pub fn claim(&self, question: u32) -> Result<u32> {
        Ok(self.store.add(&format!("{}/claimed/{question}", self.prefix), 1)? as u32)
    }

    /// Asks all ranks the next question.
    pub fn ask(&self) -> Result<()> {
        self.store.add(&format!("{}/count", self.prefix), 1).map(drop)
    }

    pub fn introduce(&self, rank: usize) -> Result<()> {
        self.put(&format!("who/{rank}"), &Process::own().encode())
    }

    /// The processes of these ranks, as far as they have set `who`.
    pub fn processes(&self, ranks: impl Iterator<Item = usize>) -> Result<BTreeMap<usize, Process>> {
        let mut found = BTreeMap::new();
        for rank in ranks {
            let process = self.text(&format!("who/{rank}"))?.and_then(|text| Process::decode(&text));
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
            let text = self.text(&format!("said/{rank}"))?;
            let status = text.and_then(|text| Status::decode(&text)).filter(|status| status.answers(question));
            found.extend(status.map(|status| (rank, status)));
        }
        Ok(found)
    }

    /// Publishes the result for the other ranks that wait.
    pub fn publish(&self, question: u32, found: &QueryResult) -> Result<()> {
        self.put(&format!("found/{question}"), &found.encode())
    }

    pub fn result(&self, question: u32, ranks: usize) -> Result<Option<QueryResult>> {
        Ok(self.text(&format!("found/{question}"))?.map(|text| QueryResult::decode(&text, ranks)))
    }

    /// Publishes why the group failed on this rank, unless another rank has already published a fault. Then asks a
    /// question, so that the other ranks read the fault. If two ranks fail at the same time, either fault may remain.
    pub fn publish_fault(&self, rank: usize, fault: &Error) -> Result<()> {
        match self.fault()? {
            Some(_) => Ok(()),
            None => {
                let bytes = [&(rank as u32).to_le_bytes()[..], &fault.encode(LONGEST_FAULT)].concat();
                self.store.set(&self.key("fault"), &bytes)?;
                self.ask()
            }
        }
    }

    /// The published fault, and the rank that published it.
    pub fn fault(&self) -> Result<Option<Told>> {
        let stored = self.store.try_get(&self.key("fault"))?;
        let read = |bytes: Vec<u8>| {
            let (rank, fault) = bytes.split_first_chunk()?;
            Some((u32::from_le_bytes(*rank) as usize, Error::decode(fault)?))
        };
        Ok(stored.and_then(read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hang::status::Place;

    proptest::proptest! {
        /// Anyone with access to the store can write this key.
        #[test]
        fn random_bytes_in_the_store_are_read_without_panic_or_control_characters(
            kind in 0..6usize, bytes in proptest::prelude::any::<Vec<u8>>()
        ) {
            let kinds = ["", "who\t", "question\t1\nat\t", "question\t1\nwaits\t", "behind\t", "7\tplace\t"];
            let store: SharedStore = std::sync::Arc::new(crate::host::Memory::default());
            let keys = StoreKeys::new(store.clone(), "x");
            store.set("hang/x/key", &[kinds[kind].as_bytes(), &bytes].concat()).unwrap();
            let text = keys.text("key").unwrap().unwrap();
            let plain = |text: &str| !text.contains(char::is_control);
            let _ = QueryResult::decode(&text, 4);
            let process = Process::decode(&text).map(|process| format!("{}{}", process.place, process.who));
            proptest::prop_assert!(plain(&process.unwrap_or_default()));
            if let Some(status) = Status::decode(&text) {
                proptest::prop_assert!(plain(&status.who));
                proptest::prop_assert!(!matches!(&status.place, Place::At(place) if !plain(place)));
                proptest::prop_assert!(status.waits.iter().all(|waits| plain(&waits.group) && plain(&waits.what)));
                proptest::prop_assert!(status.edges.iter().all(|(edge, _)| plain(&edge.group) && plain(&edge.what)));
            }
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
        for text in ["", "7", "x\tplace\twho", "7\tplace"] {
            assert_eq!(Process::decode(text), None, "{text:?}");
        }
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
        assert_eq!(QueryResult::decode(&all.encode(), 5), all);
        let signed = |signature| Status { signed: vec![(5, Signed { signature, lists: 1 })], ..status(3, 1) };
        let differ = QueryResult::of(2, &BTreeMap::from([(0, signed(u64::MAX)), (1, signed(8))]));
        assert!(differ.difference.is_some_and(|difference| (difference.number, difference.ranks) == (5, [0, 1])));
        assert_eq!(QueryResult::decode(&differ.encode(), 2), differ);
        assert_eq!(QueryResult::of(2, &BTreeMap::new()).silent, BTreeSet::from([0, 1]), "nobody has answered");
        assert_eq!(QueryResult::decode("behind\t1\nsilent\tx\nnonsense\n\n", 2), QueryResult::default());
    }

    #[test]
    fn ranks_that_the_group_does_not_have_are_passed_over() {
        for rank in [2, 1 << 32, u64::MAX] {
            let text = format!(
                "behind\t{rank}\t1\t1\nsilent\t{rank}\nstopped\t{rank}\n\
                 differs\t5\t{rank}\t1\t0\t1\t2\t0\ndiffers\t5\t0\t1\t0\t{rank}\t2\t0\n"
            );
            assert_eq!(QueryResult::decode(&text, 2), QueryResult::default(), "{rank}");
            let said = Status { stopped: vec![rank as usize, 1], ..Status::default() };
            let found = QueryResult::of(2, &BTreeMap::from([(0, said.clone()), (1, said)]));
            assert_eq!(found.stopped, BTreeSet::from([1]), "{rank}");
        }
        let found = QueryResult::decode("behind\t1\t3\t1\nsilent\t0\nstopped\t1\n", 2);
        assert_eq!((found.behind.len(), found.silent.len(), found.stopped.len()), (1, 1, 1));
    }
}
