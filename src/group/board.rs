//! Questions and answers where ranks share no memory, because they are on several hosts: as rare keys in the store that the
//! ranks met in. `hang` says when to ask and what follows.
//!
//! | key | |
//! | --- | --- |
//! | `count` | questions so far, a counter |
//! | `ask` | the number of the last question, which every rank looks at from time to time |
//! | `who/<rank>` | a rank's process, which it sets when it first looks, for the case that it says nothing more |
//! | `said/<rank>` | a rank's last answer (`account`) |
//! | `found/<question>` | the absent ranks and the stopped ranks, as found by the rank that asked the question |
//!
//! A question costs each rank one answer, the asking rank one look at each answer, and every other waiting rank one
//! look at the answers of the ranks found: the number of requests grows with the ranks and not with their square.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::account::Account;
use crate::error::Result;
use crate::host::Counting;
use crate::os::topology;

pub type SharedStore = Arc<dyn Counting + Send + Sync>;

/// Between two looks at the store: a sixteenth of the group's timeout, within these limits.
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(10);

pub fn interval(timeout: Duration) -> Duration {
    (timeout / 16).clamp(SHORTEST, LONGEST)
}

/// A question for which answers are being collected.
pub struct Round {
    pub question: u32,
    /// This rank asked, and so reads all answers.
    pub collects: bool,
    /// On `clock::stamp`.
    pub begun: u64,
    pub done: bool,
    pub answers: BTreeMap<usize, Account>,
}

/// A rank's process, and where its number is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pid: i32,
    /// The boot of the machine and the namespace of process numbers.
    place: String,
    /// In words.
    pub who: String,
}

impl Process {
    pub fn own() -> Process {
        let place = format!("{}/{}", topology::boot_id(), topology::pidns());
        let pid = std::process::id();
        Process { pid: pid as i32, place, who: format!("pid {pid}, host {}", topology::hostname()) }
    }

    /// Its number, where that names the same process here.
    pub fn local_pid(&self) -> Option<i32> {
        let here = Process::own();
        (self.place == here.place && !topology::boot_id().is_empty()).then_some(self.pid)
    }

    fn encode(&self) -> String {
        format!("{}\t{}\t{}", self.pid, self.place, self.who)
    }

    fn decode(text: &str) -> Option<Process> {
        let fields: Vec<&str> = text.split('\t').collect();
        let [pid, place, who] = fields[..] else { return None };
        Some(Process { pid: pid.parse().ok()?, place: place.to_string(), who: who.to_string() })
    }
}

/// The result of a question, from all its answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The ranks that have come less far than others, or said nothing.
    pub absent: Vec<usize>,
    /// The ranks whose processes are stopped, as other ranks of their hosts see.
    pub stopped: Vec<usize>,
}

/// Used by the thread that answers alone; the lock is for the compiler.
#[derive(Default)]
pub struct State {
    /// The last question that this rank answered.
    pub answered: u32,
    /// The time of that answer, on `clock::stamp`.
    pub answered_at: u64,
    pub round: Option<Round>,
    /// The others can read which process this rank is.
    pub introduced: bool,
    /// When to look next, on `clock::stamp`.
    pub next: u64,
}

pub struct Board {
    store: SharedStore,
    /// Prefix of all keys.
    prefix: String,
    state: Mutex<State>,
}

impl Board {
    /// `id`: unique to this attempt to make the group.
    pub fn new(store: SharedStore, id: &str) -> Board {
        Board { store, prefix: format!("hang/{id}"), state: Mutex::default() }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        let value = self.store.try_get(&format!("{}/{key}", self.prefix))?;
        Ok(value.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn put(&self, key: &str, text: &str) -> Result<()> {
        self.store.set(&format!("{}/{key}", self.prefix), text.as_bytes())
    }

    /// The number of the last question; 0 before the first.
    pub fn question(&self) -> Result<u32> {
        Ok(self.text("ask")?.and_then(|text| text.parse().ok()).unwrap_or(0))
    }

    /// Asks all ranks, and returns the number of the question.
    pub fn ask(&self) -> Result<u32> {
        let number = self.store.add(&format!("{}/count", self.prefix), 1)? as u32;
        self.put("ask", &number.to_string())?;
        Ok(number)
    }

    pub fn introduce(&self, rank: usize) -> Result<()> {
        self.put(&format!("who/{rank}"), &Process::own().encode())
    }

    /// The processes of these ranks, as far as they have introduced themselves.
    pub fn processes(&self, ranks: impl Iterator<Item = usize>) -> Result<BTreeMap<usize, Process>> {
        let mut found = BTreeMap::new();
        for rank in ranks {
            let process = self.text(&format!("who/{rank}"))?.and_then(|text| Process::decode(&text));
            found.extend(process.map(|process| (rank, process)));
        }
        Ok(found)
    }

    pub fn answer(&self, rank: usize, account: &Account) -> Result<()> {
        self.put(&format!("said/{rank}"), &account.encode())
    }

    /// The answers of these ranks to this question or a later one.
    pub fn answers(&self, question: u32, ranks: impl Iterator<Item = usize>) -> Result<BTreeMap<usize, Account>> {
        let mut found = BTreeMap::new();
        for rank in ranks {
            let text = self.text(&format!("said/{rank}"))?;
            let account = text.and_then(|text| Account::decode(&text)).filter(|account| account.answers(question));
            found.extend(account.map(|account| (rank, account)));
        }
        Ok(found)
    }

    /// Publishes the result for the other ranks that wait.
    pub fn tell(&self, question: u32, found: &Found) -> Result<()> {
        let list = |ranks: &[usize]| ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        self.put(&format!("found/{question}"), &format!("{}\n{}", list(&found.absent), list(&found.stopped)))
    }

    pub fn told(&self, question: u32) -> Result<Option<Found>> {
        let list = |line: Option<&str>| -> Vec<usize> {
            line.unwrap_or_default().split_whitespace().filter_map(|rank| rank.parse().ok()).collect()
        };
        Ok(self.text(&format!("found/{question}"))?.map(|text| {
            let mut lines = text.lines();
            Found { absent: list(lines.next()), stopped: list(lines.next()) }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
