//! This rank's answers when another rank asks what it is doing, and its part in questions over the store, for ranks that share
//! no memory. `hang` decides what follows from them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::Group;
use super::account::{Account, Place};
use super::board;
use super::board::{Found, Outcome, Process, SharedStore};
use super::hang::{Life, SHORTEST, YOUNG, life_of};
use super::pending::{Pending, nanoseconds};
use super::questions::{Member, Questions};
use super::reply::Speaker;
use crate::engine::Control;
use crate::os::clock;
use crate::progress::domain::{Driven, LongWait};
use crate::progress::places::Asked;
use crate::progress::stores;
use crate::progress::waits::Waits;
use crate::select::Choice;
use crate::stats::history::{Record, State};

/// Interval between two reads of the store for a fault that another rank has published.
const WHY: Duration = Duration::from_millis(25);

impl Group {
    /// What holds the questions to this rank.
    pub(super) fn questions(&self) -> Option<Arc<dyn Control>> {
        self.control.inquiry().is_some().then(|| Arc::clone(&self.control))
    }

    /// Answers with what is known now, and once more when the place that the program is at is known.
    pub(super) fn answer_question(&self, question: u32) {
        let Some(inquiry) = self.control.inquiry() else { return };
        let mut reply = self.reply.lock().unwrap_or_else(PoisonError::into_inner);
        if self.answered.swap(question, Ordering::Relaxed) != question {
            inquiry.answer(&reply.at_once(self, question).encode());
        }
        if let Some(account) = reply.with_place(self) {
            inquiry.answer(&account.encode());
        }
    }
}

impl Speaker for Group {
    fn account(&self, question: u32) -> (Account, u64) {
        let address = |group: &Arc<dyn Driven>| Arc::as_ptr(group).cast::<()>() as usize;
        let groups = self.domain.groups();
        let own = std::ptr::from_ref(self).cast::<()>() as usize;
        let mut long_waits = self.domain.long_waits();
        long_waits.sort_by_key(|wait| wait.group != own); // one in this group first
        let waits = long_waits.iter().find_map(|wait| {
            let group = groups.iter().find(|group| address(group) == wait.group)?;
            Some((wait.thread, group.waits(Some(wait))?))
        });
        // A device may wait although no thread waits.
        let waits = waits.or_else(|| groups.iter().find_map(|group| Some((0, group.waits(None)?))));
        let thread = waits.as_ref().map_or(0, |(thread, _)| *thread);
        (self.account_of_this(question, waits.map(|(_, waits)| waits)), thread)
    }

    fn ask(&self, thread: u64) -> Asked {
        self.domain.ask_place(thread, &self.host)
    }
}

impl Group {
    /// This rank's answer. `waits`: what one of its threads waits for, if any does.
    fn account_of_this(&self, question: u32, mut waits: Option<Waits>) -> Account {
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
        // An answer in shared memory has little room, and the other ranks read the signatures there anyway.
        let signed = if self.board.get().is_some() { self.own_launches().into() } else { Vec::new() };
        let who = Process::own().who;
        let stopped = self.mates.iter().filter(|(_, pid)| life_of(*pid) == Some(Life::Stopped));
        let stopped = stopped.map(|(rank, _)| *rank).collect();
        let own = waits.as_mut().map(|waits| std::mem::take(&mut waits.edges)).unwrap_or_default();
        let me = self.global(self.config.rank);
        let known = self.domain.heard(clock::now(), nanoseconds(YOUNG));
        let known = known.into_iter().filter(|(edge, _)| edge.from != me);
        let edges = own.into_iter().map(|edge| (edge, 0)).chain(known).collect();
        let place = Place::Unknown;
        Account { question, issued, last, launched, launched_last, signed, who, stopped, idle, place, waits, edges }
    }

    /// What a thread waits for in this group or, if none waits, the operation that a device has been running for long.
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
    /// Lets ranks that share no memory ask each other over this store.
    pub fn set_board(&self, store: SharedStore) {
        // Without the id that ranks agree on when they meet, the keys of two groups could not be told apart.
        let needs_one = self.config.size > 1 && self.control.inquiry().is_none() && self.id != [0; 16];
        let connection = store.connection();
        if needs_one && self.board.set(Questions::new(store, &self.id())).is_ok() {
            stores::start(&self.domain, connection);
        }
    }

    /// As `Driven::look_at_board`.
    pub(super) fn look_for_questions(&self) -> Option<Duration> {
        let questions = self.board.get()?;
        if let Some(fault) = self.fault.get() {
            // A rank that got the fault from another one would only repeat it.
            if self.told.get().is_none() {
                questions.tell_fault(self.config.rank, fault);
            }
            return None;
        }
        self.standing().ok()?;
        let pause = board::interval(Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed)));
        self.look_outside(); // what a delegate runs has no other thread that would
        let waits = self.lock().long_pending().next().is_some();
        let next = questions.look(self, waits, clock::stamp(), pause);
        let asks_why = self.asks_why.load(Ordering::Relaxed) && self.told.get().is_none();
        if let Some(told) = questions.fault(asks_why) {
            let _ = self.told.set(told);
        }
        self.look_outside(); // for the line of the soft limit, which comes without the store, too
        // This thread reads the clock often while something waits: the clock takes a long gap between readings for a stop.
        let next = next.unwrap_or(if waits { SHORTEST } else { pause });
        Some(if asks_why { next.min(WHY) } else { next })
    }
}

impl Member for Group {
    fn rank(&self) -> usize {
        self.config.rank
    }
    fn ranks(&self) -> usize {
        self.config.size
    }
    fn speaker(&self) -> &dyn Speaker {
        self
    }
    fn concerned(&self, found: &Found) -> Vec<usize> {
        let pending: Vec<Pending> = self.lock().long_pending().collect();
        let mut ranks: Vec<usize> = pending.iter().flat_map(|pending| self.concerned_by(pending, found)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
    fn learn(&self, result: &Outcome) {
        for (rank, account) in &result.answers {
            self.domain.hear(self.global(*rank), &account.edges, clock::now());
        }
        self.lock().learn(result, self.config.rank);
        if let Some(difference) = &result.found.difference {
            self.poison(difference.error(&self.config.name));
        }
    }
}
