//! Decides when to ask the other ranks about an operation and when to log a line about it, and keeps what is known of
//! it. Pure: the caller passes the time. `Watch` acts on the decisions.

use std::collections::BTreeMap;
use std::time::Duration;

use super::status::Status;
use super::store_keys::{Outcome, Process, QueryResult};
use super::waiting::{Waiting, Which, first_question, nanoseconds};
use super::{LAST, LONGEST, SHORTEST};
use crate::engine::{Blockers, LastCall, PeerProgress};

/// What is known of one operation that has been pending for long. Times are in nanoseconds of `clock::now`.
#[derive(Clone, Default)]
pub struct Watched {
    which: Option<Which>,
    /// Ranks that were asked individually, including this rank, each with the number of the first question to it.
    pub asked: Vec<(usize, u32)>,
    /// `since`: time of the first question. `last`: time of the last question. `next`: time of the next question.
    pub since: u64,
    pub last: u64,
    next: u64,
    warned: bool,
    /// For each rank: the last answer that was read.
    pub statuses: BTreeMap<usize, Status>,
    /// Only over the store: the result that the collecting rank made from all answers, and whether it has arrived.
    pub result: QueryResult,
    pub complete: bool,
    /// For each rank: time of the last result that included that rank's answer.
    pub answered: BTreeMap<usize, u64>,
    /// The processes of ranks that have not answered, if they are known.
    pub silent: BTreeMap<usize, Process>,
    /// Time of the last log line.
    line: Option<u64>,
}

impl Watched {
    pub fn is(&self, which: &Which) -> bool {
        self.which.as_ref() == Some(which)
    }
}

/// What to do now about a waiting operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// This is the first step of the operation.
    pub begins: bool,
    /// Ask the ranks that the operation waits for.
    pub asks: bool,
}

/// Up to two operations of a group that have been pending for long: the one with the next deadline that the engine
/// runs, and the one with the next deadline that no engine runs. An operation is watched from its first question on.
#[derive(Default)]
pub struct Monitor {
    engine: Watched,
    external: Watched,
}

impl Monitor {
    /// What is known of this operation; `None` if it is not watched.
    pub fn of(&self, which: &Which) -> Option<&Watched> {
        Some(match which {
            Which::Engine(_) => &self.engine,
            Which::External { .. } => &self.external,
        })
        .filter(|watched| watched.is(which))
    }

    fn slot(&mut self, which: &Which) -> &mut Watched {
        match which {
            Which::Engine(_) => &mut self.engine,
            Which::External { .. } => &mut self.external,
        }
    }

    /// The watched operations.
    pub fn watched(&self) -> impl Iterator<Item = &Which> {
        [&self.engine, &self.external].into_iter().filter_map(|watched| watched.which.as_ref())
    }

    /// What is known of the watched operation that no engine runs.
    pub fn external(&self) -> &Watched {
        &self.external
    }

    pub fn watched_external(&self) -> Option<&Which> {
        self.external.which.as_ref()
    }

    /// Decides what to do at time `now`. `None` before the time of the first question.
    pub fn step(&mut self, waiting: &Waiting, soft: Duration, now: u64) -> Option<Step> {
        if waiting.age < first_question(waiting.timeout, soft) {
            return None;
        }
        let watched = self.slot(&waiting.which);
        let begins = !watched.is(&waiting.which);
        if begins {
            let which = Some(waiting.which.clone());
            *watched = Watched { which, since: now, line: watched.line, ..Watched::default() };
        }
        let asks = now >= watched.next;
        if asks {
            watched.last = now;
            watched.next = next_question(now, waiting.age, waiting.timeout);
        }
        Some(Step { begins, asks })
    }

    /// Records that a rank was asked. Any answer to this question or a later one is about this operation, so only the
    /// first question is kept.
    pub fn asked(&mut self, which: &Which, rank: usize, question: u32) {
        let asked = &mut self.slot(which).asked;
        if !asked.iter().any(|(asked, _)| *asked == rank) {
            asked.push((rank, question));
        }
    }

    /// Whether to log a line now about an operation. Called after the operation's `step`. Decides once for each
    /// operation: when all answers have arrived (`has_all`), or when the time that answers may take (`takes`) has
    /// passed. If the last line is then younger than the soft limit `soft`, the operation never gets a line. The
    /// engine's operations and those that no engine runs each have their own last line.
    pub fn warns(&mut self, which: &Which, soft: Duration, (has_all, takes): (bool, Duration), now: u64) -> bool {
        let watched = self.slot(which);
        let heard = has_all || now.saturating_sub(watched.since) >= nanoseconds(takes);
        if soft.is_zero() || watched.warned || !heard {
            return false;
        }
        watched.warned = true;
        if watched.line.is_some_and(|line| now.saturating_sub(line) < nanoseconds(soft)) {
            return false;
        }
        watched.line = Some(now);
        true
    }

    /// Records a rank's answer to a question about an operation.
    pub fn answered(&mut self, which: &Which, rank: usize, status: Status) {
        self.slot(which).statuses.insert(rank, status);
    }

    /// Stores a query's result, which came over the store, for the watched operations in `pending`. `me` is this rank.
    pub fn receive(&mut self, outcome: &Outcome, pending: &[Waiting], me: usize, now: u64) {
        let own = outcome.answers.get(&me).map(|status| (status.issued, status.launched));
        // Skip operations that this rank issued after it had answered, because other ranks' answers may be older than
        // such an operation.
        let asked_in_it =
            |waiting: &&Waiting| waiting.kind.is_p2p() || own.is_some_and(|own| waiting.is_entered_by(own));
        for waiting in pending.iter().filter(asked_in_it) {
            let watched = self.slot(&waiting.which);
            watched.answered.extend(outcome.answers.keys().map(|rank| (*rank, now)));
            (watched.result, watched.statuses) = (outcome.result.clone(), outcome.answers.clone());
            watched.silent = outcome.silent.clone();
            watched.complete = true;
        }
    }

    /// Returns the ranks for which an operation waits. If the engine knows them without asking, they are `seen`;
    /// otherwise they come from the ranks' answers.
    pub fn blockers(&self, waiting: &Waiting, seen: Blockers, (ranks, me): (usize, usize)) -> Blockers {
        let watched = self.of(&waiting.which);
        if !matches!(seen, Blockers::Unknown(_)) || !(watched.is_some() || waiting.kind.is_p2p()) {
            return seen;
        }
        let unknown = Watched::default();
        let watched = watched.unwrap_or(&unknown);
        let found: Vec<_> = if waiting.kind.is_p2p() {
            let progress = |rank: usize| match watched.statuses.get(&rank) {
                Some(status) => PeerProgress::NotInMessage(waiting.last_of(status).map(|last| last.text)),
                None => PeerProgress::Unknown,
            };
            waiting.peers(ranks, me).map(|rank| (rank, progress(rank))).collect()
        } else {
            let late = late_for(waiting, &watched.result, &watched.statuses, me);
            if late.is_empty() { elsewhere(waiting, &watched.statuses, me) } else { late }
        };
        if found.is_empty() { seen } else { Blockers::Ranks(found) }
    }
}

/// Returns the ranks that have not called a collective that is pending on rank `me`, according to their answers over
/// the store. Ranks that have not answered come first. The others follow, sorted by the last collective that each has
/// called. `statuses`: the answers that this rank has read.
pub fn late_for(
    waiting: &Waiting,
    result: &QueryResult,
    statuses: &BTreeMap<usize, Status>,
    me: usize,
) -> Vec<(usize, PeerProgress)> {
    let mut behind: Vec<(usize, u64)> =
        result.behind.iter().map(|(rank, counts)| (*rank, waiting.count_of(*counts))).collect();
    behind.sort_by_key(|(_, count)| *count);
    let silent = result.silent.iter().map(|rank| (*rank, None));
    let all = silent.chain(behind.into_iter().map(|(rank, count)| (rank, Some(count))));
    let progress = |(rank, count): (usize, Option<u64>)| {
        let progress = match (statuses.get(&rank), count) {
            (Some(status), _) if waiting.is_entered_by((status.issued, status.launched)) => return None,
            (Some(status), _) => PeerProgress::NotEntered(waiting.last_of(status)),
            (None, Some(count)) if count >= waiting.number => return None,
            (None, Some(0)) => PeerProgress::NotEntered(None),
            (None, Some(number)) => {
                PeerProgress::NotEntered(Some(LastCall { number, text: format!("number {number}") }))
            }
            (None, None) => PeerProgress::Unknown,
        };
        Some((rank, progress))
    };
    all.filter(|(rank, _)| *rank != me).filter_map(progress).collect()
}

/// Returns the ranks whose answers say that they wait in another operation. Called if every rank has called a
/// collective with this number. An engine compares calls by the data that the ranks exchange, but no data arrives if,
/// for instance, each rank believes that another rank is the root of a broadcast. Ranks that made the same call have
/// the same signature under the same number.
fn elsewhere(waiting: &Waiting, statuses: &BTreeMap<usize, Status>, me: usize) -> Vec<(usize, PeerProgress)> {
    if !matches!(waiting.which, Which::Engine(_)) {
        return Vec::new();
    }
    let others = statuses.iter().filter(|(rank, _)| **rank != me);
    let called = (waiting.signature, waiting.number);
    let waits = others.filter(|(_, status)| status.waits.as_ref().is_some_and(|waits| waits.called != called));
    waits.map(|(rank, _)| (*rank, PeerProgress::CalledOther)).collect()
}

/// Time (`clock::now`) of the next question about an operation that has been pending for `age`. Ranks are asked
/// repeatedly, and a last time before the deadline.
fn next_question(now: u64, age: u64, timeout: Duration) -> u64 {
    let interval = (timeout / 16).clamp(SHORTEST, LONGEST);
    let next = now.saturating_add(nanoseconds(interval));
    if timeout.is_zero() {
        return next;
    }
    let deadline = now.saturating_add(nanoseconds(timeout).saturating_sub(age));
    let last = deadline.saturating_sub(nanoseconds(LAST.min(timeout / 10)));
    if now >= last { u64::MAX } else { next.min(last) }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;
    use crate::hang::status::Waits;
    use crate::types::Kind;

    const SECOND: u64 = 1_000_000_000;

    /// An all_reduce that no engine runs, with this number, pending for `age`.
    fn all_reduce(number: u64, age: u64, timeout: Duration) -> Waiting {
        Waiting {
            which: Which::External { id: number, issued: 1 },
            kind: Kind::AllReduce,
            root: 0,
            number,
            signature: None,
            what: format!("all_reduce(4 bytes) number {number}"),
            site: 0,
            timeout,
            age,
            on_device: false,
        }
    }

    #[test]
    fn a_rank_that_waits_in_another_call_of_the_same_number_is_named() {
        // Texts decide nothing.
        let waits = |signature| Waits { what: "op".into(), called: (Some(signature), 3), ..Waits::default() };
        let status = |signature: Option<u64>| Status { issued: 3, waits: signature.map(waits), ..Status::default() };
        let statuses: BTreeMap<usize, Status> =
            [(0, status(Some(4))), (1, status(Some(8))), (2, status(Some(4))), (3, status(None))].into();
        let which = Which::Engine(Weak::new());
        let of_an_engine = Waiting { which, signature: Some(4), ..all_reduce(3, 0, Duration::ZERO) };
        assert_eq!(elsewhere(&of_an_engine, &statuses, 0), [(1, PeerProgress::CalledOther)]);
        assert_eq!(elsewhere(&of_an_engine, &statuses, 1), [], "a rank does not name itself");
        assert_eq!(elsewhere(&all_reduce(3, 0, Duration::ZERO), &statuses, 0), [], "it is not compared between ranks");
    }

    #[test]
    fn each_waiting_rank_names_those_that_its_own_operation_lacks() {
        let reduce = |number| all_reduce(number, 0, Duration::ZERO);
        // Of 16 ranks, rank 0 has issued 10 operations, rank 15 has issued 2, and rank 14 has not answered.
        let status = |issued| Status { issued, ..Status::default() };
        let issued = (0..14).map(|rank| (rank, status(if rank == 0 { 10 } else { 9 })));
        let mut answers: BTreeMap<usize, Status> = issued.chain([(15, status(2))]).collect();
        let result = QueryResult::of(16, &answers);
        let before =
            |number: u64| PeerProgress::NotEntered(Some(LastCall { number, text: format!("number {number}") }));
        let none = BTreeMap::new();
        assert_eq!(late_for(&reduce(3), &result, &none, 5), [(14, PeerProgress::Unknown), (15, before(2))]);
        assert_eq!(late_for(&reduce(3), &result, &none, 14), [(15, before(2))], "a rank does not name itself");
        let all = late_for(&reduce(10), &result, &none, 0);
        assert_eq!(all[..3], [(14, PeerProgress::Unknown), (15, before(2)), (1, before(9))]);
        assert_eq!(all.len(), 15);
        // An answer that was read after the result was published replaces the result's entry for its rank.
        let later =
            BTreeMap::from([(14, status(3)), (15, Status { last: Some("barrier number 2".into()), ..status(2) })]);
        let named = PeerProgress::NotEntered(Some(LastCall { number: 2, text: "barrier number 2".into() }));
        assert_eq!(late_for(&reduce(3), &result, &later, 5), [(15, named)]);
        let forgotten = BTreeMap::from([(14, status(3)), (15, status(2))]);
        assert_eq!(late_for(&reduce(3), &result, &forgotten, 5), [(15, before(2))], "known by its number alone");
        answers.insert(15, status(0));
        let result = QueryResult::of(16, &answers);
        let nothing = PeerProgress::NotEntered(None);
        assert_eq!(late_for(&reduce(3), &result, &none, 5)[1], (15, nothing), "nothing before it");
    }

    #[test]
    fn ranks_are_asked_at_times_and_a_last_time_before_the_deadline() {
        let at = |now: u64, age: u64| next_question(now * SECOND, age * SECOND, Duration::from_secs(16));
        assert_eq!(at(100, 8), 101 * SECOND, "a sixteenth of the timeout");
        assert_eq!(at(107, 15), 107 * SECOND + SECOND / 2, "half a second before the deadline at 108");
        assert_eq!(
            next_question(108 * SECOND - 1, 16 * SECOND - 1, Duration::from_secs(16)),
            u64::MAX,
            "that was the last"
        );
        assert_eq!(next_question(SECOND, 5 * SECOND, Duration::ZERO), SECOND + SECOND / 4, "without a deadline");
    }

    #[test]
    fn one_line_is_logged_for_an_operation_and_one_for_each_soft_limit() {
        let (soft, timeout) = (Duration::from_secs(10), Duration::from_secs(160));
        let mut monitor = Monitor::default();
        let waiting = |number, age: u64| all_reduce(number, age * SECOND, timeout);
        let answers = (false, Duration::from_secs(1));
        assert_eq!(monitor.step(&waiting(1, 9), soft, 100 * SECOND), None, "before the soft limit");
        let first = waiting(1, 10);
        assert_eq!(monitor.step(&first, soft, 101 * SECOND), Some(Step { begins: true, asks: true }));
        assert!(!monitor.warns(&first.which, soft, answers, 101 * SECOND), "the ranks have not answered");
        assert_eq!(monitor.step(&waiting(1, 11), soft, 102 * SECOND), Some(Step::default()));
        assert!(monitor.warns(&first.which, soft, answers, 102 * SECOND), "they have had the time");
        assert!(!monitor.warns(&first.which, soft, answers, 103 * SECOND), "once");
        assert_eq!(monitor.step(&waiting(1, 20), soft, 111 * SECOND), Some(Step { begins: false, asks: true }));
        // The first operation has ended.
        let second = waiting(2, 10);
        assert_eq!(monitor.step(&second, soft, 111 * SECOND), Some(Step { begins: true, asks: true }));
        assert!(monitor.of(&first.which).is_none() && monitor.of(&second.which).is_some());
        assert!(!monitor.warns(&second.which, soft, (true, answers.1), 111 * SECOND), "the last line is young");
        let third = waiting(3, 10);
        monitor.step(&third, soft, 113 * SECOND);
        assert!(monitor.warns(&third.which, soft, (true, answers.1), 113 * SECOND));
    }

    #[test]
    fn answers_from_before_an_operation_say_nothing_about_it() {
        let mut monitor = Monitor::default();
        let waiting = all_reduce(5, SECOND, Duration::from_secs(1));
        monitor.step(&waiting, Duration::ZERO, SECOND);
        let outcome = |issued| {
            let answers = BTreeMap::from([(0, Status { issued, ..Status::default() })]);
            Outcome { result: QueryResult::of(2, &answers), answers, silent: BTreeMap::new() }
        };
        let blockers = |monitor: &Monitor| monitor.blockers(&waiting, Blockers::Unknown(None), (2, 0));
        monitor.receive(&outcome(4), std::slice::from_ref(&waiting), 0, SECOND);
        assert!(matches!(blockers(&monitor), Blockers::Unknown(_)));
        monitor.receive(&outcome(5), std::slice::from_ref(&waiting), 0, SECOND);
        let Blockers::Ranks(ranks) = blockers(&monitor) else { panic!() };
        assert_eq!(ranks, [(1, PeerProgress::Unknown)]);
    }
}
