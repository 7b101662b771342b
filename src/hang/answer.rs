//! The answers of a `Watch` to other ranks that ask about this rank (`Speaker`), to queries over the store
//! (`Participant`), and to the threads of its process (`Member`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::channel::{Channel, LongWait, Member};
use super::monitor::late_for;
use super::places::Asked;
use super::query::Participant;
use super::reply::Speaker;
use super::report::{Life, life_of};
use super::status::{Place, Status, Waits};
use super::store_keys::{Outcome, Process, QueryResult};
use super::subject::{Progress, Subject};
use super::waiting::{Waiting, Which, nanoseconds};
use super::watch::Watch;
use super::{MOST, YOUNG};
use crate::error::Error;
use crate::os::clock;

impl Speaker for Watch {
    fn status(&self, question: u32) -> (Status, u64) {
        let members = self.responder.members();
        let mut long_waits = self.responder.long_waits();
        long_waits.sort_by_key(|wait| wait.watch != self.id); // waits in this group come first
        let waits = long_waits.iter().find_map(|wait| {
            let member = members.iter().find(|member| member.id() == wait.watch)?;
            Some((wait.thread, member.waits(Some(wait))?))
        });
        // A device can have a pending operation while no thread waits.
        let on_device = || members.iter().find_map(|member| Some((0, member.waits(None)?)));
        let waits = waits.or_else(on_device);
        let thread = waits.as_ref().map_or(0, |(thread, _)| *thread);
        (self.status_while(question, waits.map(|(_, waits)| waits)), thread)
    }

    fn ask(&self, thread: u64) -> Asked {
        self.responder.ask_place(thread, &self.host)
    }
}

impl Watch {
    fn subject(&self) -> Option<Arc<dyn Subject>> {
        self.subject.upgrade()
    }

    /// `waits`: what one of this rank's threads or devices waits for, if any.
    fn status_while(&self, question: u32, mut waits: Option<Waits>) -> Status {
        let Progress { issued, last, launched, launched_last, signed, idle } =
            self.subject().map_or_else(Progress::default, |subject| subject.progress());
        // Ranks with shared memory read signatures there, and see by themselves which processes are stopped.
        let is_detailed = self.store().is_some();
        let signed = if is_detailed { signed } else { Vec::new() };
        let others = self.who.processes.iter().filter(|(rank, _)| is_detailed && **rank != self.who.rank);
        let stopped = others.filter(|(_, pid)| life_of(**pid) == Some(Life::Stopped)).map(|(rank, _)| *rank).collect();
        let own = waits.as_mut().map(|waits| std::mem::take(&mut waits.edges)).unwrap_or_default();
        let me = self.global(self.who.rank);
        let known = self.responder.edges(clock::now(), nanoseconds(YOUNG));
        let known = known.into_iter().filter(|(edge, _)| edge.from != me);
        let edges = own.into_iter().map(|edge| (edge, 0)).chain(known).collect();
        let (who, place) = (Process::own().who, Place::Unknown);
        Status { question, issued, last, launched, launched_last, signed, who, stopped, idle, place, waits, edges }
    }

    /// The watched operations that are still pending.
    fn pending(&self) -> Vec<Waiting> {
        let Some(subject) = self.subject() else { return Vec::new() };
        let watched: Vec<Which> = self.lock().watched().cloned().collect();
        watched.iter().filter_map(|which| subject.waiting(which)).collect()
    }
}

impl Participant for Watch {
    fn speaker(&self) -> &dyn Speaker {
        self
    }
    fn rank(&self) -> usize {
        self.who.rank
    }
    fn ranks(&self) -> usize {
        self.who.ranks
    }
    fn concerned(&self, result: &QueryResult) -> Vec<usize> {
        let (ranks, me, none) = (self.who.ranks, self.who.rank, BTreeMap::new());
        let of_one = |waiting: &Waiting| -> Vec<usize> {
            if waiting.kind.is_p2p() {
                return waiting.peers(ranks, me).take(MOST).collect();
            }
            let late = late_for(waiting, result, &none, me);
            let late: Vec<usize> = late.into_iter().map(|(rank, _)| rank).take(MOST).collect();
            // If no rank is late, some rank may have called another collective under this number.
            if late.is_empty() { (0..ranks).filter(|rank| *rank != me).take(MOST).collect() } else { late }
        };
        let mut concerned: Vec<usize> = self.pending().iter().flat_map(of_one).collect();
        concerned.sort_unstable();
        concerned.dedup();
        concerned
    }

    fn receive(&self, outcome: &Outcome) {
        let now = clock::now();
        for (rank, status) in &outcome.answers {
            self.responder.receive(self.global(*rank), &status.edges, now);
        }
        let pending = self.pending();
        self.lock().receive(outcome, &pending, self.who.rank, now);
        if let Some(difference) = &outcome.result.difference
            && let Some(subject) = self.subject()
        {
            subject.fail(difference.error(&self.who.name));
        }
    }
}

impl Member for Watch {
    fn id(&self) -> u64 {
        self.id
    }
    fn channel(&self) -> Option<Arc<dyn Channel>> {
        Watch::channel(self).cloned()
    }
    fn waits(&self, wait: Option<&LongWait>) -> Option<Waits> {
        let subject = self.subject()?;
        if self.who.is_inside {
            return None; // the larger group, which waits for this one, reports it
        }
        let waiting = match wait.map(|wait| wait.external) {
            Some(Some(id)) => subject.external(id),
            Some(None) => subject.next_of_engine(),
            None => {
                let which = self.lock().watched_external().cloned()?;
                subject.waiting(&which).filter(|waiting| waiting.on_device)
            }
        }?;
        let blockers = self.blockers(&*subject, &self.lock(), &waiting);
        let edges = self.edges(&blockers, &waiting);
        let called = (waiting.signature, waiting.number);
        let (group, milliseconds) = (self.who.name.clone(), waiting.age / 1_000_000);
        Some(Waits { group, milliseconds, what: waiting.what, called, edges })
    }
    fn waits_long(&self) -> bool {
        !self.pending().is_empty()
    }
    fn look_external(&self) {
        if let Some(subject) = self.subject() {
            Watch::look_external(self, &*subject);
        }
    }
    fn timeout(&self) -> Duration {
        self.subject().map_or(Duration::ZERO, |subject| subject.timeout())
    }
    fn fault(&self) -> Option<Error> {
        self.subject()?.fault()
    }
    fn has_ended(&self) -> bool {
        self.subject().is_none_or(|subject| subject.has_ended())
    }
}
