//! Handles the questions over the store, from the first check to the result: decides which rank asks, which rank
//! collects the answers, and what the other ranks read. `query` is one question.
//!
//! A rank that waits and knows of no recent question claims the next number. The first rank to claim a number asks the
//! question and collects the answers. Ranks pass the soft limit at the same time, so many may claim one number; all
//! except the first wait for the first rank's result. If another rank has just asked a question, a waiting rank uses
//! that question. If the collecting rank dies or is stopped before it has published the result, the rank that claimed
//! second takes over, and after it the others.
//!
//! For each question, each rank writes one answer. Each waiting rank also makes one claim and reads a few ranks'
//! answers, and the collecting rank reads every answer. So the number of requests grows linearly with the number of
//! ranks.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use once_cell::sync::OnceCell;

use super::query::{Participant, Query};
use super::reply::Reply;
use super::status::is_since;
use super::store_keys::{Request, SharedStore, StoreKeys};
use super::waiting::nanoseconds;
use super::{SHORTEST, SILENCE};
use crate::engine::Told;
use crate::error::{Error, Result};

/// Of the questions that a rank has collected, the last `KEPT` keep their keys in the store; the rank removes the keys
/// of older ones. If another rank still waits for the result of an older question, it does not find the result and
/// collects the answers itself.
const KEPT: usize = 4;

/// All times are in nanoseconds of `clock::stamp`.
#[derive(Default)]
struct State {
    /// The last question that this rank answered, and the time of that answer. `None`: it has answered no question.
    answered: Option<u32>,
    answered_at: u64,
    reply: Reply,
    query: Option<Query>,
    /// The questions that this rank has collected and whose keys are in the store, oldest first.
    collected: VecDeque<u32>,
    /// Whether this rank has published its process.
    introduced: bool,
    /// Time of the next check.
    next: u64,
    /// Whether this rank has published why the group failed.
    fault_told: bool,
    /// Whether a question has arrived since this rank last looked for a fault.
    asked_anew: bool,
}

/// What this rank found when it looked for another rank's fault.
pub enum FaultRead {
    Told(Told),
    NoFault,
    /// The store was not read.
    NotRead,
    /// The store has failed (`Queries::failure`).
    Impossible,
}

pub struct Queries {
    keys: StoreKeys,
    connection: usize,
    /// Used only by the thread that reads the store. The lock is never contended; it only makes the type `Sync`.
    state: Mutex<State>,
    /// Why the store failed. Set by the thread that reads the store; read by any thread, also while that thread waits
    /// for the store.
    failure: OnceCell<String>,
}

impl Queries {
    /// `id` is unique to this attempt to create the group.
    pub fn new(store: SharedStore, id: &str, request: Arc<Request>) -> Queries {
        let connection = store.connection();
        Queries {
            keys: StoreKeys::new(store, id, request),
            connection,
            state: Mutex::default(),
            failure: OnceCell::new(),
        }
    }

    /// The connection to the store.
    pub fn connection(&self) -> usize {
        self.connection
    }

    /// Why the store failed. After that this rank makes no further requests, and the group works without answers.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Records that the store has failed.
    fn fail(&self, doing: &str, error: &Error) {
        let text = error.reason();
        log::debug!("{doing}: {text}");
        let _ = self.failure.set(text);
    }

    /// Publishes, once, why the group failed on this rank.
    pub fn publish_fault(&self, rank: usize, fault: &Error) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.failure().is_none() && !state.fault_told {
            state.fault_told = true;
            if let Err(error) = self.keys.publish_fault(rank, fault) {
                self.fail("the fault was not told over the store", &error);
            }
        }
    }

    /// Called after this rank has left the group of `ranks` ranks. Removes the rank's keys: `own` and those of the
    /// questions that it has collected. The last rank to leave also removes the keys that all ranks read.
    pub fn leave(&self, ranks: usize, own: &[String]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.failure().is_none() {
            let forgotten = state.collected.drain(..).try_for_each(|question| self.keys.forget(question));
            let left = forgotten.and_then(|()| self.keys.leave(ranks, own));
            let _ = left.inspect_err(|error| log::debug!("keys of a group stay in the store: {error}"));
        }
    }

    /// Looks for the fault that another rank has published. Reads the store only if `asks` is set, or if a question has
    /// arrived since the last read.
    pub fn fault(&self, asks: bool) -> FaultRead {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let looks = std::mem::take(&mut state.asked_anew) || asks;
        if self.failure().is_some() {
            return FaultRead::Impossible;
        }
        if !looks {
            return FaultRead::NotRead;
        }
        match self.keys.fault() {
            Ok(Some(told)) => FaultRead::Told(told),
            Ok(None) => FaultRead::NoFault,
            Err(error) => {
                self.fail("no fault was read from the store", &error);
                FaultRead::Impossible
            }
        }
    }

    /// If the next check is due or this rank `waits`, answers a new question, asks a question, and collects answers.
    /// Returns how long to wait until the next call; `None` if the store has failed.
    pub fn look(&self, me: &dyn Participant, waits: bool, now: u64, pause: Duration) -> Option<Duration> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.failure().is_some() {
            return None;
        }
        let due = now >= state.next || waits;
        let looked = state.give_place(&self.keys, me).and_then(|()| match due {
            true => state.look(&self.keys, me, waits, now, pause),
            false => Ok(Duration::from_nanos(state.next - now)),
        });
        match looked {
            Ok(next) => {
                state.next = now.saturating_add(nanoseconds(next));
                Some(next)
            }
            Err(error) => {
                self.fail("no questions over the store any more", &error);
                None
            }
        }
    }
}

impl State {
    fn look(
        &mut self,
        keys: &StoreKeys,
        me: &dyn Participant,
        waits: bool,
        now: u64,
        pause: Duration,
    ) -> Result<Duration> {
        if !self.introduced {
            keys.introduce(me.rank())?;
            self.introduced = true;
        }
        let question = keys.question()?;
        if let Some(question) = question.filter(|question| Some(*question) != self.answered) {
            self.asked_anew = true;
            self.answer(keys, me, question, now)?;
        }
        // Other ranks wait for the result of a question that this rank collects, even if this rank's own operation has
        // ended.
        let collects = self.query.as_ref().is_some_and(|query| query.collects() && !query.is_done());
        if !waits && !collects {
            self.query = None;
            return Ok(pause);
        }
        let old = |begun: u64| now.saturating_sub(begun) >= nanoseconds(pause * 2);
        if self.query.as_ref().is_none_or(|query| query.is_done() && old(query.begun())) {
            let known = |question: u32| self.query.as_ref().is_some_and(|query| query.question() == question);
            let serves = |question: &u32| !known(*question) && !old(self.answered_at);
            let next = question.map_or(1, |question| question.wrapping_add(1));
            self.begin(keys, me, question.filter(serves).unwrap_or(next), now)?;
        }
        let query = self.query.as_mut().expect("begun above");
        if !query.is_done() {
            query.go_on(keys, me, self.answered, now, nanoseconds(pause + SILENCE))?;
        }
        let next = if query.is_done() { pause } else { SHORTEST / 2 };
        if query.collects() && self.collected.back() != Some(&query.question()) {
            self.collected.push_back(query.question());
            let old = if self.collected.len() > KEPT { self.collected.pop_front() } else { None };
            // Not an error of the query: a store of the program may be unable to delete keys.
            let forgotten = old.map_or(Ok(()), |question| keys.forget(question));
            let _ = forgotten.inspect_err(|error| log::debug!("an old question stays in the store: {error}"));
        }
        Ok(next)
    }

    fn answer(&mut self, keys: &StoreKeys, me: &dyn Participant, question: u32, now: u64) -> Result<()> {
        (self.answered, self.answered_at) = (Some(question), now);
        keys.answer(me.rank(), &self.reply.at_once(me.speaker(), question))?;
        self.give_place(keys, me)
    }

    /// Answers again, with the source line at which the program is, if that has become known.
    fn give_place(&mut self, keys: &StoreKeys, me: &dyn Participant) -> Result<()> {
        let status = self.reply.with_place(me.speaker());
        status.map_or(Ok(()), |status| keys.answer(me.rank(), &status))
    }

    /// Claims `question`, which is either the last question that was asked or the one after it. The first rank to claim
    /// it collects the answers. That rank also asks the question and answers it, unless it has already answered this
    /// question or a later one.
    fn begin(&mut self, keys: &StoreKeys, me: &dyn Participant, question: u32, now: u64) -> Result<()> {
        let query = Query::new(question, keys.claim(question)?, now);
        if query.collects() && self.answered.is_none_or(|last| !is_since(last, question)) {
            keys.ask()?;
            self.answer(keys, me, question, now)?;
        }
        self.query = Some(query);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
