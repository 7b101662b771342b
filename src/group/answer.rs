//! What this rank says when another one asks what it is doing, and the questions and answers over the store, where the
//! ranks share no memory. `hang` says what follows from them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Group;
use super::account::{Account, Place};
use super::board;
use super::board::{Board, Found, Process, Round, SharedStore, State as BoardState};
use super::hang::{Life, MOST, SHORTEST, SILENCE, YOUNG, life_of};
use super::pending::{Pending, nanoseconds};
use crate::engine::Control;
use crate::error::Result;
use crate::os::clock;
use crate::progress::domain::{Driven, LongWait};
use crate::progress::inquiry;
use crate::progress::waits::Waits;
use crate::select::Choice;
use crate::stats::history::{Record, State};

impl Group {
    /// What holds the questions to this rank.
    pub(super) fn questions(&self) -> Option<Arc<dyn Control>> {
        self.control.inquiry().is_some().then(|| Arc::clone(&self.control))
    }

    /// Answers as far as it can without the interpreter, and then with the place that the program is at.
    pub(super) fn answer_question(&self, question: u32) {
        let Some(inquiry) = self.control.inquiry() else { return };
        if self.answered.swap(question, Ordering::Relaxed) == question {
            return;
        }
        let _ = self.give_account(question, |account| {
            inquiry.answer(&account.encode());
            Ok(())
        });
    }

    /// Hands out what this rank says about itself: as far as it can without the interpreter, and then with the place that
    /// the program is at.
    fn give_account(&self, question: u32, publish: impl Fn(&Account) -> Result<()>) -> Result<()> {
        let address = |group: &Arc<dyn Driven>| Arc::as_ptr(group).cast::<()>() as usize;
        let groups = self.domain.groups();
        let own = std::ptr::from_ref(self).cast::<()>() as usize;
        let mut long_waits = self.domain.long_waits();
        long_waits.sort_by_key(|wait| wait.group != own); // one in this group first
        let waits = long_waits.iter().find_map(|wait| {
            let group = groups.iter().find(|group| address(group) == wait.group)?;
            Some((wait.thread, group.waits(Some(wait))?))
        });
        // A device may wait although no thread of ours does.
        let waits = waits.or_else(|| groups.iter().find_map(|group| Some((0, group.waits(None)?))));
        let thread = waits.as_ref().map_or(0, |(thread, _)| *thread);
        let mut account = self.account(question, waits.map(|(_, waits)| waits));
        drop(groups);
        account.place = Place::Locked;
        publish(&account)?;
        account.place = self.host.place(thread).map_or(Place::Unknown, Place::At);
        publish(&account)
    }

    /// What this rank says about itself; a thread of it waits, or none.
    fn account(&self, question: u32, mut waits: Option<Waits>) -> Account {
        let inner = self.lock();
        let history = inner.stats.history();
        let newest = history.iter().next_back().filter(|last| last.state != State::Pending);
        let idle = newest.map(|last| clock::stamp().saturating_sub(last.ended) / 1_000_000);
        let device = Choice::DEVICE.code();
        let on_device = |last: &&Record| last.route.choice == device;
        let named = |last: &Record| format!("{} number {}", last.kind, last.number);
        let last = history.collectives().find(|last| !on_device(last)).map(named);
        let launched_last = history.collectives().find(on_device).map(|last| format!("{} on a device", named(last)));
        let issued = inner.number;
        drop(inner);
        let launched = self.device_number.load(Ordering::Relaxed);
        let who = Process::own().who;
        let stopped = self.mates.iter().filter(|(_, pid)| life_of(*pid) == Some(Life::Stopped));
        let stopped = stopped.map(|(rank, _)| *rank).collect();
        let own = waits.as_mut().map(|waits| std::mem::take(&mut waits.edges)).unwrap_or_default();
        let me = self.global(self.config.rank);
        let known = self.domain.heard(clock::now(), nanoseconds(YOUNG));
        let known = known.into_iter().filter(|(edge, _)| edge.from != me);
        let edges = own.into_iter().map(|edge| (edge, 0)).chain(known).collect();
        let place = Place::Unknown;
        Account { question, issued, last, launched, launched_last, who, stopped, idle, place, waits, edges }
    }

    /// What a thread waits for in this group or, for none, a device that has been at it for long.
    pub(super) fn awaited(&self, wait: Option<&LongWait>) -> Option<Waits> {
        let inner = self.lock();
        self.members.get()?; // a group inside a host of a larger one waits for it
        let pending = match wait.map(|wait| wait.outside) {
            Some(Some(id)) => inner.outside.get(id).cloned().map(Pending::Outside),
            Some(None) => inner.engine.next_deadline().map(Pending::Own),
            None => inner.long_outside().filter(Pending::on_device),
        }?;
        let edges = self.edges_of(&self.lacks(&inner, &pending), &pending);
        let milliseconds = pending.age(clock::now()) / 1_000_000;
        Some(Waits { group: self.config.name.clone(), what: pending.what(), milliseconds, edges })
    }
}

// -------------------------------------------------------------------------------------------------- over the store

impl Group {
    /// Lets the ranks ask each other over this store, where they share no memory.
    pub fn set_board(&self, store: SharedStore) {
        // Without an id, which ranks have that have met, nothing would tell the keys of two groups apart.
        let needs_one = self.config.size > 1 && self.control.inquiry().is_none() && self.id != [0; 16];
        if needs_one && self.board.set(Board::new(store, &self.id())).is_ok() {
            inquiry::start(&self.domain);
            self.domain.look_again(); // the thread may have looked before there was a board
        }
    }

    /// As `Driven::look_at_board`. An error of the store ends it: the ranks do without.
    pub(super) fn look_for_questions(&self) -> Option<Duration> {
        let board = self.board.get().filter(|_| self.standing().is_ok())?;
        let pause = board::interval(Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed)));
        let mut state = board.state();
        self.look_outside(); // what a delegate runs has no other thread that would
        let (now, waits) = (clock::stamp(), self.lock().long_pending().next().is_some());
        if now < state.next && !waits {
            return Some(Duration::from_nanos(state.next - now));
        }
        let looked = self.look_once(board, &mut state, waits, pause);
        self.look_outside(); // for the line of the soft limit
        let next = looked.inspect_err(|error| log::debug!("no questions over the store any more: {error}")).ok()?;
        state.next = clock::stamp() + nanoseconds(next);
        Some(next)
    }

    /// Answers, asks where an operation has been pending for long, and collects answers. Returns when to look next.
    fn look_once(&self, board: &Board, state: &mut BoardState, waits: bool, pause: Duration) -> Result<Duration> {
        let now = clock::stamp();
        if !state.introduced {
            board.introduce(self.config.rank)?;
            state.introduced = true;
        }
        let mut question = board.question()?;
        if question != state.answered {
            (state.answered, state.answered_at) = (question, now);
            self.give_account(question, |account| board.answer(self.config.rank, account))?;
        }
        if !waits {
            state.round = None;
            return Ok(pause);
        }
        let old = |begun: u64| now.saturating_sub(begun) >= nanoseconds(pause * 2);
        if state.round.as_ref().is_none_or(|round| round.done && old(round.begun)) {
            // What another rank has just asked serves as well.
            let collects = question == 0
                || old(state.answered_at)
                || state.round.as_ref().is_some_and(|round| round.question == question);
            if collects {
                question = board.ask()?;
                (state.answered, state.answered_at) = (question, now);
                self.give_account(question, |account| board.answer(self.config.rank, account))?;
            }
            state.round = Some(Round { question, collects, begun: now, done: false, answers: BTreeMap::new() });
        }
        let round = state.round.as_mut().expect("set above");
        if !round.done {
            self.collect_answers(board, round, pause)?;
        }
        Ok(if round.done { pause } else { SHORTEST / 2 })
    }

    /// Reads the answers that have come. The rank that asked reads all, other ranks only those of the ranks found.
    fn collect_answers(&self, board: &Board, round: &mut Round, pause: Duration) -> Result<()> {
        let (me, ranks) = (self.config.rank, self.config.size);
        let limit = nanoseconds(pause + SILENCE);
        let waited = clock::stamp().saturating_sub(round.begun);
        let pending: Vec<Pending> = self.lock().long_pending().collect();
        let peers = pending.iter().flat_map(|pending| self.peers_of(pending).take(MOST));
        let found = if round.collects {
            let whole = |account: &Account| account.place != Place::Locked;
            let open = (0..ranks).filter(|rank| !round.answers.get(rank).is_some_and(whole));
            let answers = board.answers(round.question, open)?;
            round.answers.extend(answers);
            if waited < limit && (0..ranks).any(|rank| !round.answers.get(&rank).is_some_and(whole)) {
                return Ok(());
            }
            let found = found_by(ranks, &round.answers);
            board.tell(round.question, &found)?;
            found
        } else if let Some(found) = board.told(round.question)? {
            let absent = found.absent.iter().copied().filter(|rank| *rank != me).take(MOST);
            round.answers = board.answers(round.question, absent.chain([me]).chain(peers))?;
            found
        } else {
            round.collects = waited > 2 * limit; // the rank that asked is gone, or stopped itself
            return Ok(());
        };
        round.done = true;
        let quiet = (0..ranks).filter(|rank| !round.answers.contains_key(rank));
        let quiet = quiet.filter(|rank| found.absent.contains(rank)).take(MOST);
        let silent = board.processes(quiet)?;
        for (rank, account) in &round.answers {
            self.domain.hear(self.global(*rank), &account.edges, clock::now());
        }
        let mut inner = self.lock();
        for pending in &pending {
            let watched = inner.watched(pending);
            if watched.is(pending) {
                (watched.found, watched.heard) = (found.clone(), round.answers.clone());
                watched.silent = silent.clone();
                watched.collected = true;
            }
        }
        Ok(())
    }
}

/// The result of the answers, the same on all ranks: a rank is absent where another one has issued more in the group.
fn found_by(ranks: usize, answers: &BTreeMap<usize, Account>) -> Found {
    let most = |count: fn(&Account) -> u64| answers.values().map(count).max().unwrap_or(0);
    let (issued, launched) = (most(|account| account.issued), most(|account| account.launched));
    let late =
        |rank: &usize| answers.get(rank).is_none_or(|account| account.issued < issued || account.launched < launched);
    let mut stopped: Vec<usize> = answers.values().flat_map(|account| account.stopped.clone()).collect();
    stopped.sort_unstable();
    stopped.dedup();
    Found { absent: (0..ranks).filter(late).collect(), stopped }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_absent_where_another_has_issued_more_or_it_says_nothing() {
        let account = |issued, launched| Account { issued, launched, ..Account::default() };
        let answers = BTreeMap::from([(0, account(3, 1)), (1, account(2, 1)), (3, account(3, 0))]);
        let stopping = Account { stopped: vec![5, 2], ..account(3, 1) };
        let mut all = answers.clone();
        all.insert(4, stopping);
        assert_eq!(found_by(4, &answers), Found { absent: vec![1, 2, 3], stopped: vec![] });
        assert_eq!(found_by(5, &all), Found { absent: vec![1, 2, 3], stopped: vec![2, 5] });
        assert_eq!(found_by(2, &BTreeMap::new()).absent, [0, 1], "nobody has answered");
    }
}
