//! Connects `messages` with the link: runs errands, receives this rank's mail, and ends messages. Also handles the
//! other mail between ranks: goodbyes, faults, and the letters of monitored barriers.
//!
//! Errands run in order, without the lock, on one thread at a time, so that letters stay in order. If a thread adds an
//! errand while another thread runs errands, the running thread runs the new errand too. Because no lock is held, the
//! link may call back at any time, even within a call of this rank. Its callbacks take the lock, advance the state and
//! release the lock.

#![allow(unsafe_code)] // passes the memory of operations to the link

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::lanes::Lanes;
use super::letters::{EAGER, Letter};
use super::link::Mailbox;
use super::messages::{Body, Errand, Gone};
use super::queue::State;
use crate::engine::{Ended, Monitor};
use crate::error::{Error, Result, contained};

/// When this rank's group ends, the rank waits at most this long until the link no longer uses the memory of messages.
const GIVEN_BACK: Duration = Duration::from_secs(5);

impl Lanes {
    /// Runs the errands, and stores back the results of messages that have ended. Returns these messages, and the
    /// group's fault if one was found. Must be called after everything that may add errands, without the lock. If
    /// another thread is running errands, that thread runs the new ones too.
    pub fn run_errands(&self) -> (Ended, Option<Error>) {
        let mut ended = Ended::new();
        if std::mem::replace(&mut self.lock().talk.busy, true) {
            return (ended, None);
        }
        let outcome = contained(|| Ok(self.run_all_errands(&mut ended)));
        match outcome {
            Ok(failure) => (ended, failure),
            Err(bug) => {
                self.lock().talk.busy = false;
                (ended, Some(bug))
            }
        }
    }

    fn run_all_errands(&self, ended: &mut Ended) -> Option<Error> {
        let mut failure = None;
        loop {
            let mut state = self.lock();
            if state.hand_over_held() {
                // A collective may have waited for the memory of a send that now continues from a copy.
                state.extend_promise();
                self.turn.notify_all();
            }
            let errands = std::mem::take(&mut state.messages.errands);
            let over = std::mem::take(&mut state.messages.over);
            failure = failure.or(state.messages.failure.take());
            if errands.is_empty() && over.is_empty() {
                self.await_letters(&mut state);
                state.talk.busy = false;
                return failure;
            }
            drop(state);
            errands.into_iter().for_each(|errand| self.run_errand(errand));
            for (op, outcome) in over {
                let outcome = outcome.and_then(|()| {
                    contained(|| {
                        op.store_back();
                        Ok(())
                    })
                    .inspect_err(|bug| failure = failure.take().or(Some(bug.clone())))
                });
                let mut state = self.lock();
                state.retire(&op);
                state.extend_promise();
                // Idle lanes are not woken: they would compete for the cores with the thread that waits for the
                // message.
                let awaited = state.memory_awaited > 0 || state.talk.leaving || state.stopping;
                drop(state);
                if awaited {
                    self.turn.notify_all();
                }
                ended.push((op, outcome));
            }
        }
    }

    /// Makes the link read mail while messages are pending. Otherwise mail would stay unread while this rank computes.
    pub fn await_letters(&self, state: &mut State) {
        let awaited = state.has_messages() || state.talk.is_awaited();
        match &state.talk.awaiting {
            None if awaited => state.talk.awaiting = Some(self.link.keep_driven()),
            Some(_) if !awaited => state.talk.awaiting = None,
            _ => (),
        }
    }

    fn run_errand(&self, errand: Errand) {
        match errand {
            Errand::Mail(peer, letter) => {
                if let Err(error) = self.link.mail(peer, letter) {
                    self.lose(peer, Gone::Lost(error.text()));
                }
            }
            Errand::Abandon(body, error) => {
                let (_, peer, number) = body;
                self.link.abandon_body(peer, number);
                self.lock().messages.abandon(body, error);
            }
            Errand::Body(body) => {
                if let Err(error) = self.give_body(body) {
                    self.body_ended(body, Err(error.text()));
                }
            }
        }
    }

    /// Passes the memory of an operation to the link.
    fn give_body(&self, body: Body) -> Result<()> {
        let Some(op) = self.lock().messages.bodies.get(&body).map(Arc::clone) else { return Ok(()) };
        let (sends, peer, number) = body;
        let pieces = if sends { op.sent() } else { op.request.outputs() }.to_vec();
        let lanes = self.home().this.upgrade();
        let done = Box::new(move |outcome: std::result::Result<(), String>| {
            if let Some(lanes) = lanes {
                lanes.body_ended(body, outcome);
                lanes.settle();
            }
            drop(op); // keeps its memory, or that of its copy, alive until here
        });
        // SAFETY: the memory belongs to the operation, which is in `Messages::bodies` and does not end while it is
        // there. It is removed only after `done` was called, or after the link has refused or given up the body. Later
        // operations on this memory wait for it (`Order`).
        unsafe {
            match sends {
                true => self.link.send_body(peer, number, pieces, done),
                false => self.link.receive_body(peer, number, pieces, done),
            }
        }
    }

    /// Called when the link has ended a body or failed to start it.
    fn body_ended(&self, body: Body, outcome: std::result::Result<(), String>) {
        let mut state = self.lock();
        let fault = state.fault.clone();
        state.messages.end_body(body, outcome, fault.as_ref());
    }

    /// Runs the errands (`run_errands`), and reports the messages that ended and the fault, if one was found. The
    /// caller must hold no lock of the group.
    pub fn settle(&self) {
        let (ended, failure) = self.run_errands();
        let report = &self.home().report;
        if let Some(error) = failure {
            report.failed(error); // before its operations end: a thread that sees them end sees the fault
        }
        // Ended one by one, because these messages were not a batch.
        ended.into_iter().for_each(|one| report.ended(vec![one]));
    }

    fn lose(&self, peer: usize, how: Gone) {
        let mut state = self.lock();
        if state.fault.is_none() {
            let leaves = state.stopping;
            state.messages.lose(peer, how, leaves);
        }
    }

    /// Handles a letter. An error fails the group.
    fn take_letter(&self, peer: usize, mail: &[u8]) -> Result<()> {
        let letter = Letter::decode(peer, mail)?;
        let mut state = self.lock();
        if state.fault.is_some() {
            return Ok(());
        }
        match letter {
            Letter::Bye => {
                let leaves = state.stopping;
                state.messages.lose(peer, Gone::Left, leaves);
                state.messages.mail(peer, &Letter::Heard);
            }
            Letter::Heard => {
                state.talk.heard.insert(peer);
            }
            Letter::Fault(fault) => {
                let fault = Error::decode(&fault).ok_or_else(|| Letter::none(peer, mail))?;
                return Err(fault.as_told().reported_by(peer));
            }
            Letter::Come { turn } => {
                state.talk.came.insert(peer, turn);
            }
            Letter::Decided { turn, failed } => state.talk.decided[turn as usize % 2] = (turn, failed),
            message => return state.messages.take(peer, &message),
        }
        drop(state);
        self.turn.notify_all(); // this rank may be waiting to leave
        self.home().report.changed(); // a thread may wait in a monitored barrier
        Ok(())
    }

    /// Mails the fault of this rank's group to every rank; delivery is not guaranteed. A fault that another rank
    /// reported is mailed too: this rank cuts its link next, and a rank that waits for this rank must not see the cut
    /// before the fault. Returns true if a letter was sent.
    pub fn tell_by_mail(&self, error: &Error) -> bool {
        let present = self.lock().messages.present();
        let letter = Letter::Fault(error.encode(EAGER).into()).encode();
        // Bypasses the errands, which another thread may be running.
        present.into_iter().filter(|peer| self.link.mail(*peer, letter.clone()).is_ok()).count() > 0
    }

    /// Tells all ranks that this rank leaves. Waits until each rank in `messages.wrote` is gone or has answered; an
    /// answer means that the rank has read this rank's letters. Ends early at `until` or at a fault.
    pub fn say_goodbye(&self, until: Instant, interrupted: &dyn Fn() -> bool) {
        self.await_answers(until, interrupted);
        let mut state = self.lock();
        state.talk.leaving = false;
        self.await_letters(&mut state);
    }

    fn await_answers(&self, until: Instant, interrupted: &dyn Fn() -> bool) {
        let mut state = self.lock();
        let wrote = state.messages.wrote.clone();
        state.talk.leaving = true;
        state.messages.mail_all(&Letter::Bye);
        drop(state);
        self.settle();
        loop {
            self.link.poll(Duration::ZERO);
            let state = self.lock();
            let has_all = |peer: &usize| state.talk.heard.contains(peer) || state.messages.gone(*peer).is_some();
            if wrote.iter().all(has_all) || state.fault.is_some() || Instant::now() >= until {
                return;
            }
            drop(self.turn.wait_timeout(state, Duration::from_millis(20)));
            if interrupted() {
                return;
            }
        }
    }

    /// Waits, after the link was cut, until the link no longer uses the memory of any body.
    pub fn await_bodies(&self) {
        let until = Instant::now() + GIVEN_BACK;
        loop {
            self.link.poll(Duration::ZERO);
            let state = self.lock();
            if state.messages.bodies.is_empty() {
                return;
            }
            if Instant::now() >= until {
                log::error!("the link keeps the memory of {} messages", state.messages.bodies.len());
                return;
            }
            drop(self.turn.wait_timeout(state, Duration::from_millis(5)));
        }
    }
}

/// The mailbox of a group. The reference is weak, because the group owns the link, which owns the mailbox.
pub(super) struct Inbox(pub Weak<Lanes>);

impl Mailbox for Inbox {
    fn came(&self, peer: usize, message: Vec<u8>) {
        let Some(lanes) = self.0.upgrade() else { return };
        if let Err(error) = contained(|| lanes.take_letter(peer, &message)) {
            lanes.home().report.failed(error);
        }
        lanes.settle();
    }

    fn lost(&self, peer: usize, why: &str) {
        let Some(lanes) = self.0.upgrade() else { return };
        lanes.lose(peer, Gone::Lost(why.to_string()));
        lanes.settle();
        lanes.turn.notify_all(); // this rank may be waiting to leave
        lanes.home().report.changed(); // a thread may wait in a monitored barrier
    }
}

impl Monitor for Lanes {
    fn come(&self, turn: u64) {
        let mut state = self.lock();
        state.talk.in_barrier = true;
        match self.host_map.me {
            0 => drop(state.talk.came.insert(0, turn)),
            _ => state.messages.mail(0, &Letter::Come { turn }),
        }
        drop(state);
        self.settle();
    }

    fn has_come(&self, rank: usize, turn: u64) -> bool {
        self.lock().talk.came.get(&rank).is_some_and(|came| *came >= turn)
    }

    fn decide(&self, turn: u64, failed: bool) {
        let mut state = self.lock();
        state.talk.in_barrier = false;
        state.messages.mail_all(&Letter::Decided { turn, failed });
        state.messages.expect_to_be_read();
        drop(state);
        self.settle();
    }

    fn decision(&self, turn: u64) -> Option<bool> {
        let (decided, failed) = self.lock().talk.decided[turn as usize % 2];
        (decided >= turn).then_some(decided != turn || failed)
    }

    fn hopeless(&self, turn: u64) -> Option<Error> {
        let state = self.lock();
        let missing = |rank: &usize| match self.host_map.me {
            0 => state.talk.came.get(rank).is_none_or(|came| *came < turn),
            _ => *rank == 0,
        };
        let gone = (0..self.host_map.ranks()).filter(missing).find(|rank| state.messages.gone(*rank).is_some())?;
        Some(state.messages.why_gone(gone, "is in monitored_barrier"))
    }

    fn left_off(&self) {
        self.lock().talk.in_barrier = false;
        self.settle();
    }
}
