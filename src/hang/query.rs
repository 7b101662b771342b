//! One question over the store, as a waiting rank takes part in it: the rank collects the answers of all ranks and
//! publishes their result, or waits for the result of the rank that collects. If that rank is silent for too long, the
//! waiting ranks collect the answers themselves; the rank that claimed the question second does so first.

use std::collections::BTreeMap;

use super::reply::Speaker;
use super::status::{Place, Status, is_since};
use super::store_keys::{Outcome, QueryResult, StoreKeys};
use crate::error::Result;

/// This rank, as a participant in queries.
pub trait Participant {
    fn speaker(&self) -> &dyn Speaker;
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;
    /// The ranks whose answers this rank needs for its texts.
    fn concerned(&self, result: &QueryResult) -> Vec<usize>;
    /// Processes the result of a question.
    fn receive(&self, outcome: &Outcome);
}

/// A question whose result this rank waits for.
pub struct Query {
    question: u32,
    /// This rank's place among the ranks that claimed the question: 1 for the rank that claimed it first.
    place: u32,
    collects: bool,
    /// In nanoseconds of `clock::stamp`.
    begun: u64,
    done: bool,
    answers: BTreeMap<usize, Status>,
}

impl Query {
    /// `place`: this rank's place among the ranks that claimed `question`. The first one collects the answers.
    pub fn new(question: u32, place: u32, now: u64) -> Query {
        Query { question, place, collects: place <= 1, begun: now, done: false, answers: BTreeMap::new() }
    }

    pub fn question(&self) -> u32 {
        self.question
    }

    /// Whether this rank collects the answers.
    pub fn collects(&self) -> bool {
        self.collects
    }

    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Whether this rank has the result.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Reads what has arrived: the answers if this rank collects them, otherwise the result. `last`: the last question
    /// that this rank answered. `limit`: for how many nanoseconds a rank may be silent.
    pub fn go_on(
        &mut self,
        keys: &StoreKeys,
        me: &dyn Participant,
        last: Option<u32>,
        now: u64,
        limit: u64,
    ) -> Result<()> {
        let waited = now.saturating_sub(self.begun);
        let found = if self.collects {
            self.collect(keys, me.ranks(), waited >= limit)?
        } else if let Some(found) = keys.result(self.question, me.ranks())? {
            let read = me.concerned(&found).into_iter().chain([me.rank()]);
            self.answers = keys.answers(self.question, read)?;
            Some(found)
        } else {
            // The second rank waits `limit * 2` for the first rank's result; further ranks wait `limit * 4`.
            if waited > limit * if self.place == 2 { 2 } else { 4 } {
                self.collects = true;
                if last.is_none_or(|last| !is_since(last, self.question)) {
                    keys.ask()?; // the first rank claimed the question but did not ask it
                    self.begun = now;
                }
            }
            None
        };
        let Some(found) = found else { return Ok(()) };
        self.done = true;
        let silent = me.concerned(&found).into_iter().filter(|rank| !self.answers.contains_key(rank));
        let silent = keys.processes(silent)?;
        me.receive(&Outcome { result: found, answers: std::mem::take(&mut self.answers), silent });
        Ok(())
    }

    /// Reads the answers that have arrived. When all have arrived, or `late` is set, publishes their result and returns
    /// it.
    fn collect(&mut self, keys: &StoreKeys, ranks: usize, late: bool) -> Result<Option<QueryResult>> {
        let whole = |status: &Status| status.place != Place::Locked;
        let open = |answers: &BTreeMap<usize, Status>| -> Vec<usize> {
            (0..ranks).filter(|rank| !answers.get(rank).is_some_and(whole)).collect()
        };
        let answers = keys.answers(self.question, open(&self.answers).into_iter())?;
        self.answers.extend(answers);
        if !late && !open(&self.answers).is_empty() {
            return Ok(None);
        }
        let found = QueryResult::of(ranks, &self.answers);
        keys.publish(self.question, &found)?;
        Ok(Some(found))
    }
}
