//! Watches operations that take long. It asks the ranks that an operation waits for what they are doing, logs one line
//! after the soft limit, and names these ranks in the error at the deadline. `answer` builds this rank's own answers, `findings` the texts.
//!
//! Nothing here runs for an operation that ends before the first look at deadlines (`driver`).

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::account::{Account, Place};
use super::board;
use super::board::{Found, Outcome, Process};
use super::outside::Outside;
use super::pending::{Pending, nanoseconds};
use super::{Group, Inner};
use crate::config;
use crate::config::Config;
use crate::engine::delegate::Says;
use crate::engine::{Inquiry, Lacks, LastCall, Standing};
use crate::error::{Error, GO_ON, laid_out};
use crate::op::Op;
use crate::os::{clock, watch};
use crate::progress::waits::Edge;
use crate::types::{ANY_RANK, Kind};

/// At most this many ranks are asked and described; further ones are listed by number.
pub(super) const MOST: usize = 6;
/// The interval between two questions to one rank is clamped to these limits.
pub(super) const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(10);
/// All ranks are asked a last time this long before the deadline, or a tenth of the timeout if that is less.
const LAST: Duration = Duration::from_millis(500);
/// A rank that has not answered for this long is reported as silent.
pub(super) const SILENCE: Duration = Duration::from_secs(1);
/// Edges of the wait graph are used up to this age. With each question they travel one rank further.
pub(super) const YOUNG: Duration = Duration::from_secs(30);

/// Which one is watched.
#[derive(Default)]
enum Subject {
    #[default]
    None,
    Own(Weak<Op>),
    /// Its record's id.
    Outside(u64),
}

/// The operation that has been pending longest, once that is longer than the first look. Used under the group's lock.
#[derive(Default)]
pub(super) struct Watched {
    subject: Subject,
    /// The ranks that were asked, this one included, each with the number of its first question.
    pub asked: Vec<(usize, u32)>,
    /// When the ranks were asked first and last, and when they will be asked next, on `clock::now`.
    pub since: u64,
    pub last: u64,
    next: u64,
    told: bool,
    /// Over the store only: the answers that were read, the result of all answers, and whether that is complete.
    pub heard: BTreeMap<usize, Account>,
    pub found: Found,
    /// Per rank: when the last result arrived that included its answer.
    pub answered: BTreeMap<usize, u64>,
    pub collected: bool,
    /// The processes of ranks that have not answered, as far as they are known.
    pub silent: BTreeMap<usize, Process>,
    /// When the last line was logged.
    line: Option<u64>,
}

impl Watched {
    /// Stops watching an operation that no engine runs, if it is the watched one: its record's id may be used again.
    pub fn forget_outside(&mut self, id: u64) {
        if matches!(self.subject, Subject::Outside(subject) if subject == id) {
            *self = Watched::default();
        }
    }

    pub fn is(&self, pending: &Pending) -> bool {
        match (&self.subject, pending) {
            (Subject::Own(op), Pending::Own(other)) => std::ptr::eq(op.as_ptr(), Arc::as_ptr(other)),
            (Subject::Outside(id), Pending::Outside(other)) => *id == other.id,
            _ => false,
        }
    }
}

impl Inner {
    pub(super) fn watched(&mut self, pending: &Pending) -> &mut Watched {
        match pending {
            Pending::Own(_) => &mut self.watched,
            Pending::Outside(_) => &mut self.watched_outside,
        }
    }

    pub(super) fn watched_of(&self, pending: &Pending) -> &Watched {
        match pending {
            Pending::Own(_) => &self.watched,
            Pending::Outside(_) => &self.watched_outside,
        }
    }

    /// Stores the result of a question over the store. `me` is this rank.
    pub(super) fn learn(&mut self, result: &Outcome, me: usize) {
        let own = result.answers.get(&me).map(|account| (account.issued, account.launched));
        // Answers that are older than the operation say nothing about it.
        let asked_in_it =
            |pending: &Pending| pending.kind().is_p2p() || own.is_some_and(|own| pending.is_entered_by(own));
        let pending: Vec<Pending> = self.long_pending().filter(asked_in_it).collect();
        let now = clock::now();
        for pending in &pending {
            let watched = self.watched(pending);
            watched.answered.extend(result.answers.keys().map(|rank| (*rank, now)));
            (watched.found, watched.heard) = (result.found.clone(), result.answers.clone());
            watched.silent = result.silent.clone();
            watched.collected = true;
        }
    }

    /// The watched operations, of an engine and external, that are still pending.
    pub(super) fn long_pending(&self) -> impl Iterator<Item = Pending> + '_ {
        let own = match &self.watched.subject {
            Subject::Own(op) => op.upgrade().filter(|op| !op.is_done()).map(Pending::Own),
            _ => None,
        };
        own.into_iter().chain(self.long_outside())
    }

    pub(super) fn long_outside(&self) -> Option<Pending> {
        match &self.watched_outside.subject {
            Subject::Outside(id) => self.outside.get(*id).cloned().map(Pending::Outside),
            _ => None,
        }
    }
}

impl Group {
    /// Asks the other ranks about an operation that has been pending for long. Call with the lock held.
    pub(super) fn look_at_long_wait(&self, inner: &mut Inner, pending: &Pending, now: u64) {
        if self.members.get().is_none() {
            return; // a group inside a host of a larger one, which does this
        }
        let (age, timeout, soft) = (pending.age(now), pending.timeout(), self.soft_timeout());
        if age < pending.patience(soft) {
            return;
        }
        let watched = inner.watched(pending);
        if !watched.is(pending) {
            let subject = match pending {
                Pending::Own(op) => Subject::Own(Arc::downgrade(op)),
                Pending::Outside(outside) => Subject::Outside(outside.id),
            };
            *watched = Watched { subject, since: now, line: watched.line, ..Watched::default() };
            if self.board.get().is_some() {
                self.domain.look_again();
            }
        }
        if now >= inner.watched_of(pending).next {
            self.listen(inner.watched_of(pending), now);
            self.ask(inner, pending);
            let watched = inner.watched(pending);
            watched.last = now;
            watched.next = next_question(now, age, timeout);
        }
        let enough = match self.board.get() {
            None if timeout.is_zero() => LAST,
            None => LAST.min(timeout / 10),
            Some(_) => board::interval(timeout) * 2 + SILENCE,
        };
        let watched = inner.watched_of(pending);
        let heard = now.saturating_sub(watched.since) >= nanoseconds(enough) || self.all_answered(watched);
        if soft.is_zero() || watched.told || !heard {
            return;
        }
        let watched = inner.watched(pending);
        watched.told = true;
        // One line per soft limit, however many operations are pending.
        if watched.line.is_some_and(|line| now.saturating_sub(line) < nanoseconds(soft)) {
            return;
        }
        watched.line = Some(now);
        self.listen(inner.watched_of(pending), now);
        let end = if timeout.is_zero() {
            "it has no timeout".to_string()
        } else {
            format!("it fails after {}", seconds(timeout.as_millis() as u64))
        };
        let (rank, name, waited) = (self.config.rank, &self.config.name, seconds(age / 1_000_000));
        let head = format!("rank {rank} of group '{name}' has waited {waited} in {}", pending.what());
        let lines = self.findings(inner, pending, now);
        log::warn!("{}", laid_out(&head, &lines, &end).in_one_line());
    }

    /// The soft limit: the group's, or that of the process.
    fn soft_timeout(&self) -> Duration {
        self.config.soft_timeout.unwrap_or_else(config::soft_timeout)
    }

    /// The error text of an operation whose deadline passed: the missing ranks, what they do, and where.
    pub(super) fn stall(&self, inner: &Inner, op: &Arc<Op>, now: u64) -> Error {
        let pending = Pending::Own(Arc::clone(op));
        self.listen(&inner.watched, now);
        Error::timeout(self.story((inner, &pending), (&pending.what(), &timed_out(op.timeout)), "", now))
    }

    /// Checks the deadline of the operation of `outside` that ends first. Threads that wait in an engine check their own.
    pub(super) fn look_outside(&self) {
        let mut inner = self.lock();
        if let Some(outside) = inner.outside.most_urgent().cloned() {
            self.look_at_long_wait(&mut inner, &Pending::Outside(outside), clock::now());
        }
    }

    /// The error text of a delegate's operation that failed with `words`; None if the ranks know nothing more about it. Call
    /// with the lock held.
    pub(super) fn failure_outside(&self, inner: &Inner, outside: &Outside, words: &str) -> Option<Error> {
        self.standing().ok()?; // an abort ends operations, too
        let now = clock::now();
        let pending = Pending::Outside(outside.clone());
        let age = Duration::from_nanos(pending.age(now));
        let name = if self.config.delegate.is_empty() { Config::LINK } else { &self.config.delegate };
        let says = Says::of(words);
        let words = format!("{name}: {}", words.lines().next().unwrap_or_default());
        // If another rank's deadline came first, a delegate reports a lost connection instead of a deadline.
        let is_late = says == Says::TimedOut || age > outside.timeout * 9 / 10;
        if inner.watched_outside.is(&pending) && inner.watched_outside.collected {
            let how = if is_late { timed_out(age) } else { format!("failed after {}", in_seconds(age)) };
            let text = self.story((inner, &pending), (&pending.what(), &how), &words, now);
            return Some(if is_late { Error::timeout(text) } else { Error::system(text) });
        }
        let names_a_peer = outside.kind.is_p2p() && outside.root != ANY_RANK;
        (says == Says::LostAPeer && !is_late && names_a_peer).then(|| {
            let rank = outside.root as usize;
            let (process, _) = self.process_of(&inner.watched_outside, rank, None);
            let (me, name, what) = (self.config.rank, &self.config.name, pending.what());
            let after = in_seconds(age);
            let head = format!("rank {me} of group '{name}' lost rank {rank}{process} after {after} in {what}");
            let why = "its process ended, an operation of it failed, or so did the network between them";
            let text = laid_out(&head, &[why.to_string(), words], GO_ON);
            Error::rank_failed(rank, text)
        })
    }

    /// Asks this rank and the ranks that the operation waits for.
    fn ask(&self, inner: &mut Inner, pending: &Pending) {
        let Some(inquiry) = self.control.inquiry() else { return };
        let missing = match self.lacks(inner, pending) {
            Lacks::Ranks(ranks) => ranks,
            _ => Vec::new(),
        };
        let missing = missing.into_iter().map(|(rank, _)| rank).take(MOST);
        for rank in std::iter::once(self.config.rank).chain(missing) {
            let question = inquiry.ask(rank);
            let asked = &mut inner.watched(pending).asked;
            // An answer to any question since the first one is about this operation.
            if !asked.iter().any(|(asked, _)| *asked == rank) {
                asked.push((rank, question));
            }
        }
    }

    /// Adds the edges in the answers to the wait graph.
    fn listen(&self, watched: &Watched, now: u64) {
        let Some(inquiry) = self.control.inquiry() else { return };
        for (rank, question) in watched.asked.iter().filter(|(rank, _)| *rank != self.config.rank) {
            if let Some(account) = answer_of(inquiry, *rank, *question) {
                self.domain.hear(self.global(*rank), &account.edges, now);
            }
        }
    }

    fn all_answered(&self, watched: &Watched) -> bool {
        let Some(inquiry) = self.control.inquiry() else {
            return self.board.get().is_none() || watched.collected;
        };
        watched.asked.iter().all(|(rank, question)| {
            answer_of(inquiry, *rank, *question).is_some_and(|account| account.place != Place::Locked)
        })
    }

    /// What is known about a rank that was asked about the operation.
    pub(super) fn account_of(&self, watched: &Watched, pending: &Pending, rank: usize) -> Option<Account> {
        if self.board.get().is_some() {
            return watched.heard.get(&rank).filter(|_| watched.is(pending)).cloned();
        }
        let (_, question) = watched.asked.iter().find(|(asked, _)| watched.is(pending) && *asked == rank)?;
        answer_of(self.control.inquiry()?, rank, *question)
    }

    /// The ranks that the operation waits for: as the engine sees them or, over the store, as the ranks have answered.
    pub(super) fn lacks(&self, inner: &Inner, pending: &Pending) -> Lacks {
        let watched = inner.watched_of(pending);
        let lacks = match pending {
            Pending::Own(op) => inner.engine.lacks(op),
            Pending::Outside(outside) => self.lacks_outside(watched, outside),
        };
        if !matches!(lacks, Lacks::Unknown(_)) || !(watched.is(pending) || pending.kind().is_p2p()) {
            return lacks;
        }
        let ranks: Vec<_> = if pending.kind().is_p2p() {
            let standing = |rank: usize| match watched.heard.get(&rank).filter(|_| watched.is(pending)) {
                Some(account) => Standing::Silent(pending.last_of(account).map(|last| last.text)),
                None => Standing::Unheard,
            };
            self.peers_of(pending).map(|rank| (rank, standing(rank))).collect()
        } else {
            late_for(pending, &watched.found, &watched.heard, self.config.rank)
        };
        if ranks.is_empty() { lacks } else { Lacks::Ranks(ranks) }
    }

    /// The ranks that a message may come from or go to.
    pub(super) fn peers_of(&self, pending: &Pending) -> impl Iterator<Item = usize> + use<'_> {
        let (is_message, root) = (pending.kind().is_p2p(), pending.root());
        let others = (0..self.config.size).filter(|rank| *rank != self.config.rank);
        others.filter(move |rank| is_message && (root == ANY_RANK || *rank == root as usize))
    }

    /// The ranks that the texts about an operation describe, from the answers of all ranks over the store.
    pub(super) fn concerned_by(&self, pending: &Pending, found: &Found) -> Vec<usize> {
        if pending.kind().is_p2p() {
            return self.peers_of(pending).take(MOST).collect();
        }
        let late = late_for(pending, found, &BTreeMap::new(), self.config.rank);
        late.into_iter().map(|(rank, _)| rank).take(MOST).collect()
    }

    /// The ranks that an operation of no engine waits for, as far as this rank sees them without asking.
    fn lacks_outside(&self, watched: &Watched, outside: &Outside) -> Lacks {
        let pending = Pending::Outside(outside.clone());
        if self.control.inquiry().is_none() {
            let heard = watched.is(&pending) && watched.collected;
            let text = if heard { "no rank is known to be missing" } else { "the ranks have not said what they do" };
            return Lacks::Unknown(text.to_string());
        }
        // The number of each rank's last collective on a device is in the memory that the ranks share.
        let described = |number: u64, kind: u8| {
            let kind = Kind::from_u8(kind).filter(|_| number > 0);
            kind.map(|kind| format!("{kind} number {number} on a device"))
        };
        let others = (0..self.config.size).filter(|rank| *rank != self.config.rank);
        let others = others.filter_map(|rank| Some((rank, self.control.launched(rank)?)));
        if outside.kind.is_p2p() {
            let peers = others.filter(|(rank, _)| *rank == outside.root as usize);
            let peers = peers.map(|(rank, (number, kind))| (rank, Standing::Silent(described(number, kind))));
            return Lacks::Ranks(peers.collect());
        }
        let (late, entered): (Vec<_>, Vec<_>) = others.partition(|(_, (number, _))| *number < outside.number);
        if late.is_empty() {
            let each = entered.iter().take(MOST).map(|(rank, _)| {
                let (process, _) = self.process_of(watched, *rank, None);
                let instead = self.called_instead(*rank, outside.number);
                format!("rank {rank}{process} {}", instead.as_deref().unwrap_or("has issued it"))
            });
            return Lacks::Unknown(each.collect::<Vec<_>>().join("; "));
        }
        let before = |(rank, (number, kind))| {
            let last = described(number, kind).map(|text| LastCall { number, text });
            (rank, Standing::Before(last))
        };
        Lacks::Ranks(late.into_iter().map(before).collect())
    }

    /// The rank in the default group of a rank of this group.
    pub(super) fn global(&self, rank: usize) -> u32 {
        self.members.get().and_then(|members| members.get(rank).copied()).unwrap_or(rank as u32)
    }

    pub(super) fn edges_of(&self, lacks: &Lacks, pending: &Pending) -> Vec<Edge> {
        // A receive from anyone waits for none of them in particular.
        let Lacks::Ranks(ranks) = lacks else { return Vec::new() };
        let anyone = pending.kind() == Kind::Recv && pending.root() == ANY_RANK;
        let absent = ranks.iter().filter(|(_, standing)| standing.is_absent() && !anyone);
        let edge = |(rank, _): &(usize, Standing)| Edge {
            from: self.global(self.config.rank),
            to: self.global(*rank),
            group: self.config.name.clone(),
            what: pending.what(),
        };
        absent.take(MOST).map(edge).collect()
    }
}

/// The ranks that have not called a collective that is pending on rank `me`, as their answers over the store show. Ranks that
/// have not answered come first, then the others in order of the last collective they called. `heard`: the answers that this
/// rank has read.
fn late_for(pending: &Pending, found: &Found, heard: &BTreeMap<usize, Account>, me: usize) -> Vec<(usize, Standing)> {
    let mut behind: Vec<(usize, u64)> =
        found.behind.iter().map(|(rank, counts)| (*rank, pending.count_of(*counts))).collect();
    behind.sort_by_key(|(_, count)| *count);
    let silent = found.silent.iter().map(|rank| (*rank, None));
    let all = silent.chain(behind.into_iter().map(|(rank, count)| (rank, Some(count))));
    let standing = |(rank, count): (usize, Option<u64>)| {
        let standing = match (heard.get(&rank), count) {
            (Some(account), _) if pending.is_entered_by((account.issued, account.launched)) => return None,
            (Some(account), _) => Standing::Before(pending.last_of(account)),
            (None, Some(count)) if count >= pending.number() => return None,
            (None, Some(0)) => Standing::Before(None),
            (None, Some(number)) => Standing::Before(Some(LastCall { number, text: format!("number {number}") })),
            (None, None) => Standing::Unheard,
        };
        Some((rank, standing))
    };
    all.filter(|(rank, _)| *rank != me).filter_map(standing).collect()
}

/// Why a process cannot make progress: it is stopped, or it has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    Stopped,
    Ended,
}

pub(super) fn life_of(pid: i32) -> Option<Life> {
    match watch::process_state(pid) {
        Some('T' | 't') => Some(Life::Stopped),
        None | Some('Z' | 'X') if pid > 0 => Some(Life::Ended),
        _ => None,
    }
}

/// When to ask next, on `clock::now`, about an operation that has been pending for `age`: repeatedly, and a last time before
/// its deadline.
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

/// A rank's answer to this question or a later one.
fn answer_of(inquiry: &dyn Inquiry, rank: usize, question: u32) -> Option<Account> {
    Account::decode(&inquiry.heard(rank)).filter(|account| account.answers(question))
}

pub(super) fn timed_out(after: Duration) -> String {
    format!("Timed out after {}", in_seconds(after))
}

fn in_seconds(time: Duration) -> String {
    seconds(time.as_millis() as u64)
}

pub(super) fn seconds(milliseconds: u64) -> String {
    format!("{:.1} s", milliseconds as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_waiting_rank_names_those_that_its_own_operation_lacks() {
        let reduce = |number| {
            let (kind, root, tag, bytes, site, timeout) = (Kind::AllReduce, 0, 0, 4, 0, Duration::ZERO);
            let on_device = false;
            Pending::Outside(Outside { id: 0, kind, number, root, tag, bytes, site, on_device, begun: None, timeout })
        };
        // Of 16 ranks number 0 has issued 10, number 15 has issued 2, and 14 has not answered.
        let account = |issued| Account { issued, ..Account::default() };
        let issued = (0..14).map(|rank| (rank, account(if rank == 0 { 10 } else { 9 })));
        let mut answers: BTreeMap<usize, Account> = issued.chain([(15, account(2))]).collect();
        let found = Found::of(16, &answers);
        let before = |number: u64| Standing::Before(Some(LastCall { number, text: format!("number {number}") }));
        let none = BTreeMap::new();
        assert_eq!(late_for(&reduce(3), &found, &none, 5), [(14, Standing::Unheard), (15, before(2))]);
        assert_eq!(late_for(&reduce(3), &found, &none, 14), [(15, before(2))], "a rank does not name itself");
        let all = late_for(&reduce(10), &found, &none, 0);
        assert_eq!(all[..3], [(14, Standing::Unheard), (15, before(2)), (1, before(9))]);
        assert_eq!(all.len(), 15);
        // An answer that came after the result was published replaces what the result says.
        let later =
            BTreeMap::from([(14, account(3)), (15, Account { last: Some("barrier number 2".into()), ..account(2) })]);
        let named = Standing::Before(Some(LastCall { number: 2, text: "barrier number 2".into() }));
        assert_eq!(late_for(&reduce(3), &found, &later, 5), [(15, named)]);
        let forgotten = BTreeMap::from([(14, account(3)), (15, account(2))]);
        assert_eq!(late_for(&reduce(3), &found, &forgotten, 5), [(15, before(2))], "known by its number alone");
        answers.insert(15, account(0));
        let found = Found::of(16, &answers);
        assert_eq!(late_for(&reduce(3), &found, &none, 5)[1], (15, Standing::Before(None)), "nothing before it");
    }

    #[test]
    fn ranks_are_asked_at_times_and_a_last_time_before_the_deadline() {
        let second = 1_000_000_000;
        let at = |now: u64, age: u64| next_question(now * second, age * second, Duration::from_secs(16));
        assert_eq!(at(100, 8), 101 * second, "a sixteenth of the timeout");
        assert_eq!(at(107, 15), 107 * second + second / 2, "half a second before the deadline at 108");
        assert_eq!(
            next_question(108 * second - 1, 16 * second - 1, Duration::from_secs(16)),
            u64::MAX,
            "that was the last"
        );
        assert_eq!(next_question(second, 5 * second, Duration::ZERO), second + second / 4, "without a deadline");
    }
}
