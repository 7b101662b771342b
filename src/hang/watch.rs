//! Watches the operations of one group while this rank waits: asks other ranks, logs a line after the soft limit, and
//! makes the error at the deadline. `answer` makes the watch's answers to other ranks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::channel::{Channel, LongWait, MemoryChannel, StoreAccess};
use super::cycle::{self, Edge};
use super::monitor::{Monitor, Watched};
use super::report::{Ages, LastEnd, Life, MissingRank, ProcessReport, StallReport, WaitsFor, described, life_of};
use super::responder::Responder;
use super::status::Status;
use super::subject::{Subject, Who};
use super::waiting::{Waiting, Which, nanoseconds};
use super::{FAULT_READ, FAULT_SEEN, MOST, YOUNG, in_seconds, seconds, timed_out};
use crate::engine::delegate::Says;
use crate::engine::{Blockers, PeerProgress};
use crate::error::{Error, GO_ON, Text, laid_out};
use crate::host::Host;
use crate::os::clock;
use crate::types::{ANY_RANK, Kind};

const LATE: &str = "Every rank must call the same operations in the same order; a rank that needs longer needs a larger \
                    timeout.";

/// Watches the operations of one group.
pub struct Watch {
    /// Number of this watch in its responder.
    pub(super) id: u64,
    pub who: Who,
    pub(super) host: Arc<dyn Host>,
    pub(super) responder: Arc<Responder>,
    channel: OnceCell<Arc<dyn Channel>>,
    monitor: Mutex<Monitor>,
    /// For each rank of this group, its rank in the default group. Set after the group was created.
    members: OnceCell<Vec<u32>>,
    /// The group, which owns this watch.
    pub(super) subject: Weak<dyn Subject>,
}

impl Watch {
    pub fn new(
        who: Who,
        subject: Weak<dyn Subject>,
        host: Arc<dyn Host>,
        responder: Arc<Responder>,
        channel: Option<Arc<dyn Channel>>,
    ) -> Watch {
        let channel = channel.map_or_else(OnceCell::new, OnceCell::with_value);
        let (id, monitor, members) = (responder.next_id(), Mutex::default(), OnceCell::new());
        Watch { id, who, host, responder, channel, monitor, members, subject }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Monitor> {
        self.monitor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn responder(&self) -> &Arc<Responder> {
        &self.responder
    }

    pub fn channel(&self) -> Option<&Arc<dyn Channel>> {
        self.channel.get()
    }

    /// The channel, if it uses a store.
    pub fn store(&self) -> Option<&dyn StoreAccess> {
        self.channel()?.store()
    }

    /// The channel, if it is in shared memory.
    fn memory(&self) -> Option<&dyn MemoryChannel> {
        self.channel()?.memory()
    }

    /// Returns false if the watch already has a channel.
    pub fn set_channel(&self, channel: Arc<dyn Channel>) -> bool {
        self.channel.set(channel).is_ok()
    }

    /// Only the first call has an effect.
    pub fn set_members(&self, members: Vec<u32>) {
        let _ = self.members.set(members);
    }

    /// For each rank, its rank in the default group. `None` if the program has not set it.
    pub fn members(&self) -> Option<&[u32]> {
        self.members.get().map(Vec::as_slice)
    }

    /// The rank in the default group for a rank of this group.
    pub(super) fn global(&self, rank: usize) -> u32 {
        self.members.get().and_then(|members| members.get(rank).copied()).unwrap_or(rank as u32)
    }

    /// Starts to look for another rank's fault. Returns how long this takes at most.
    pub fn ask_for_fault(&self) -> Duration {
        let Some(store) = self.store() else { return FAULT_SEEN };
        store.ask_for_fault();
        FAULT_READ
    }

    /// Whether this rank knows that no other rank had published a fault at this time. In shared memory a rank always
    /// knows, because a fault is visible there immediately (`StoreAccess::had_no_fault_at`). Never waits.
    pub fn had_no_fault_at(&self, at: Instant) -> bool {
        self.store().is_none_or(|store| store.had_no_fault_at(at))
    }

    /// Waits for at most `FAULT_READ` until the other ranks can read why the group failed on this rank.
    pub fn await_published(&self) {
        let until = Instant::now() + FAULT_READ;
        while self.store().is_some_and(|store| !store.has_published()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Records a waiting thread (`more`), or removes it when it has stopped waiting. `external` is the operation, if no
    /// engine runs it.
    pub fn count_long_wait(&self, thread: u64, external: Option<u64>, more: bool) {
        self.responder.count_long_wait(LongWait { thread, watch: self.id, external }, more);
    }
}

impl Watch {
    /// Asks the other ranks about an operation that has been pending for long, and logs a line after the soft limit.
    pub fn look(&self, subject: &dyn Subject, waiting: &Waiting, now: u64) {
        if self.who.is_inside {
            return;
        }
        let (which, soft) = (&waiting.which, self.who.soft);
        let mut monitor = self.lock();
        let Some(step) = monitor.step(waiting, soft, now) else { return };
        if step.begins
            && let Some(store) = self.store()
        {
            store.look_again();
        }
        if step.asks {
            self.read_answers(&mut monitor, which);
            self.learn_edges(&monitor, which, now);
            self.ask(subject, &mut monitor, waiting);
        }
        let (has_all, takes) = match self.channel() {
            Some(channel) => {
                self.read_answers(&mut monitor, which);
                (monitor.of(which).is_none_or(|watched| channel.has_all(watched)), channel.takes(waiting.timeout))
            }
            None => (true, Duration::ZERO),
        };
        if !monitor.warns(which, soft, (has_all, takes), now) {
            return;
        }
        let end = if waiting.timeout.is_zero() {
            "it has no timeout".to_string()
        } else {
            format!("it fails after {}", in_seconds(waiting.timeout))
        };
        let (rank, name, waited) = (self.who.rank, &self.who.name, seconds(waiting.age / 1_000_000));
        let head = format!("rank {rank} of group '{name}' has waited {waited} in {}", waiting.what);
        self.learn_edges(&monitor, which, now);
        let report = self.report(subject, &monitor, waiting, now);
        drop(monitor);
        log::warn!("{}", laid_out(&head, &report.lines(), &end).in_one_line());
    }

    /// Calls `look` for the operation with the next deadline among those that no engine runs.
    pub fn look_external(&self, subject: &dyn Subject) {
        if let Some(waiting) = subject.next_external() {
            self.look(subject, &waiting, clock::now());
        }
    }

    /// Asks this rank and the ranks that the operation waits for. Through a store, the thread that reads it asks all
    /// ranks.
    fn ask(&self, subject: &dyn Subject, monitor: &mut Monitor, waiting: &Waiting) {
        let Some(memory) = self.memory() else { return };
        let missing = match self.blockers(subject, monitor, waiting) {
            Blockers::Ranks(ranks) => ranks,
            _ => Vec::new(),
        };
        let missing = missing.into_iter().map(|(rank, _)| rank).take(MOST);
        for rank in std::iter::once(self.who.rank).chain(missing) {
            monitor.asked(&waiting.which, rank, memory.ask(rank));
        }
    }

    /// Reads the answers of the ranks that were asked individually.
    fn read_answers(&self, monitor: &mut Monitor, which: &Which) {
        let Some(memory) = self.memory() else { return };
        let asked = monitor.of(which).map_or_else(Vec::new, |watched| watched.asked.clone());
        for (rank, question) in asked {
            if let Some(status) = memory.answer(rank, question) {
                monitor.answered(which, rank, status);
            }
        }
    }

    /// Adds the edges in the answers that `read_answers` has read to the wait graph.
    fn learn_edges(&self, monitor: &Monitor, which: &Which, now: u64) {
        let Some(watched) = monitor.of(which) else { return };
        for (rank, _) in watched.asked.iter().filter(|(rank, _)| *rank != self.who.rank) {
            if let Some(status) = watched.statuses.get(rank) {
                self.responder.receive(self.global(*rank), &status.edges, now);
            }
        }
    }

    pub(super) fn blockers(&self, subject: &dyn Subject, monitor: &Monitor, waiting: &Waiting) -> Blockers {
        let seen = match subject.blockers(waiting) {
            Blockers::Unknown(None) => {
                let complete = monitor.of(&waiting.which).is_some_and(|watched| watched.complete);
                Blockers::Unknown(Some(match complete {
                    true => "no rank is known to be missing".to_string(),
                    false => {
                        let why = self.store().and_then(StoreAccess::obstacle);
                        let why = why.map_or_else(String::new, |why| format!(", because {why}"));
                        format!("the ranks have not said what they do{why}")
                    }
                }))
            }
            seen => seen,
        };
        monitor.blockers(waiting, seen, (self.who.ranks, self.who.rank))
    }

    /// The error of an engine's operation whose deadline has passed.
    pub fn late(&self, subject: &dyn Subject, waiting: &Waiting, now: u64) -> Error {
        Error::timeout(self.story(subject, waiting, (&waiting.what, &timed_out(waiting.timeout)), "", now))
    }

    /// The text for an operation that failed. It says how the operation ended (`how`), and where the missing ranks are
    /// and what they do. `what` describes the operation. `words` is the name and message of the delegate or library
    /// that ran it, or empty.
    pub fn story(
        &self,
        subject: &dyn Subject,
        waiting: &Waiting,
        (what, how): (&str, &str),
        words: &str,
        now: u64,
    ) -> Text {
        let mut monitor = self.lock();
        self.read_answers(&mut monitor, &waiting.which);
        self.learn_edges(&monitor, &waiting.which, now);
        let report = self.report(subject, &monitor, waiting, now);
        drop(monitor);
        let head = format!("rank {} of group '{}' {how} in {what}", self.who.rank, self.who.name);
        let mut lines = report.lines();
        lines.push(words.to_string());
        laid_out(&head, &lines, &format!("{LATE} {GO_ON}"))
    }

    /// The error of a delegate's operation that failed with the text `words`; `None` if the ranks know nothing more
    /// about it.
    pub fn failed_delegate(&self, subject: &dyn Subject, waiting: &Waiting, words: &str) -> Option<Error> {
        let (now, age) = (clock::now(), Duration::from_nanos(waiting.age));
        let says = Says::of(words);
        let words = format!("{}: {}", self.who.delegate, words.lines().next().unwrap_or_default());
        // If another rank's deadline passed first, the delegate reports a lost connection here instead of a timeout.
        let is_late = says == Says::TimedOut || age > waiting.timeout * 9 / 10;
        if self.lock().of(&waiting.which).is_some_and(|watched| watched.complete) {
            let how = if is_late { timed_out(age) } else { format!("failed after {}", in_seconds(age)) };
            let text = self.story(subject, waiting, (&waiting.what, &how), &words, now);
            return Some(if is_late { Error::timeout(text) } else { Error::system(text) });
        }
        let names_a_peer = waiting.kind.is_p2p() && waiting.root != ANY_RANK;
        (says == Says::LostAPeer && !is_late && names_a_peer).then(|| {
            let rank = waiting.root as usize;
            let process = self.process(self.lock().external(), rank, None).text();
            let (me, name, what) = (self.who.rank, &self.who.name, &waiting.what);
            let after = in_seconds(age);
            let head = format!("rank {me} of group '{name}' lost rank {rank}{process} after {after} in {what}");
            let why = "its process ended, an operation of it failed, or so did the network between them";
            Error::rank_failed(rank, laid_out(&head, &[why.to_string(), words], GO_ON))
        })
    }

    /// The error of an operation on a device whose library failed with the text `words`; `what` describes the
    /// operation. `None` if no rank is known to be missing, or if the ranks were not asked yet: a rank that has not
    /// issued the operation may merely be late.
    pub fn failed_on_device(
        &self,
        subject: &dyn Subject,
        waiting: &Waiting,
        (what, words): (&str, &str),
        (age, timeout): (Duration, Duration),
    ) -> Option<Error> {
        let monitor = self.lock();
        monitor.of(&waiting.which)?;
        let is_known = matches!(self.blockers(subject, &monitor, waiting), Blockers::Ranks(_));
        drop(monitor);
        if !is_known {
            return None;
        }
        let is_late = !timeout.is_zero() && age > timeout * 9 / 10;
        let how = if is_late { timed_out(age) } else { format!("failed after {}", in_seconds(age)) };
        let text = self.story(subject, waiting, (what, &how), words, clock::now());
        Some(if is_late { Error::timeout(text) } else { Error::system(text) })
    }

    /// What is known about a waiting operation.
    fn report(&self, subject: &dyn Subject, monitor: &Monitor, waiting: &Waiting, now: u64) -> StallReport {
        let nothing = Watched::default();
        let known = monitor.of(&waiting.which);
        let watched = known.unwrap_or(&nothing);
        let ago = |then: u64| Duration::from_nanos(if known.is_some() { now.saturating_sub(then) } else { 0 });
        let blockers = self.blockers(subject, monitor, waiting);
        let cycle = self.cycle(&blockers, waiting, now);
        let waits_for = match blockers {
            Blockers::Ranks(ranks) => {
                let (ranks, others) = described(ranks);
                let missing = |(rank, progress): (usize, PeerProgress)| {
                    let status = watched.statuses.get(&rank).cloned();
                    let answered = watched.answered.get(&rank).copied().unwrap_or(watched.since);
                    let ages =
                        Ages { asked: ago(watched.since), asked_again: ago(watched.last), answered: ago(answered) };
                    let first = watched.asked.iter().find(|(asked, _)| *asked == rank).map(|(_, question)| *question);
                    MissingRank {
                        rank,
                        process: self.process(watched, rank, status.as_ref()),
                        last_end: last_end(subject, waiting, &progress, status.as_ref()),
                        answers_first: status.as_ref().is_some_and(|status| Some(status.question) == first),
                        progress,
                        status,
                        ages,
                    }
                };
                WaitsFor::Ranks(ranks.into_iter().map(missing).collect(), others)
            }
            Blockers::Earlier(first) => WaitsFor::Earlier(first.what()),
            Blockers::Unknown(text) => WaitsFor::Unknown(text.unwrap_or_default()),
        };
        StallReport {
            called: self.host.call_site(waiting.site),
            own: watched.statuses.get(&self.who.rank).cloned(),
            on_device: waiting.on_device,
            waits_for,
            complete: watched.complete,
            cycle,
            in_default_numbers: self
                .members()
                .is_none_or(|members| members.iter().zip(0..).all(|(member, at)| *member == at)),
        }
    }

    /// A rank's process, and whether it is stopped or has ended, if this rank can see that.
    fn process(&self, watched: &Watched, rank: usize, status: Option<&Status>) -> ProcessReport {
        let pid = self.who.processes.get(&rank).copied();
        let silent = watched.silent.get(&rank);
        let who = match (pid, status, silent) {
            (Some(pid), ..) => format!("pid {pid}"),
            (None, Some(status), _) => status.who.clone(),
            (None, None, Some(process)) => process.who.clone(),
            (None, None, None) if !self.who.spans_hosts => "its process is not known".to_string(),
            (None, None, None) => "on another host".to_string(),
        };
        let life = if watched.result.stopped.contains(&rank) {
            Some(Life::Stopped)
        } else {
            pid.or_else(|| silent?.local_pid()).and_then(life_of)
        };
        ProcessReport { who, life }
    }

    /// A rank's process as part of a sentence, as far as this rank knows it without asking.
    pub fn process_of(&self, rank: usize) -> String {
        self.process(&Watched::default(), rank, None).text()
    }

    /// The cycle of ranks that wait for each other, if this rank is in it or waits for one of its ranks.
    fn cycle(&self, blockers: &Blockers, waiting: &Waiting, now: u64) -> Vec<Edge> {
        let mut edges = self.edges(blockers, waiting);
        let me = self.global(self.who.rank);
        let known = self.responder.edges(now, nanoseconds(YOUNG)).into_iter().map(|(edge, _)| edge);
        edges.extend(known.filter(|edge| edge.from != me));
        cycle::cycle(&edges, me).unwrap_or_default()
    }

    pub(super) fn edges(&self, blockers: &Blockers, waiting: &Waiting) -> Vec<Edge> {
        // A receive from any rank waits for no particular rank, so it gives no edge.
        let Blockers::Ranks(ranks) = blockers else { return Vec::new() };
        let anyone = waiting.kind == Kind::Recv && waiting.root == ANY_RANK;
        let absent = ranks.iter().filter(|(_, progress)| progress.is_absent() && !anyone);
        let edge = |(rank, _): &(usize, PeerProgress)| Edge {
            from: self.global(self.who.rank),
            to: self.global(*rank),
            group: self.who.name.clone(),
            what: waiting.what.clone(),
        };
        absent.take(MOST).map(edge).collect()
    }
}

/// How long ago the last operation of a missing rank ended: by that rank's answer or, without one, by the time at which
/// that rank's last collective ended here.
fn last_end(subject: &dyn Subject, waiting: &Waiting, progress: &PeerProgress, status: Option<&Status>) -> LastEnd {
    if let Some(idle) = status.and_then(|status| status.idle) {
        return LastEnd::There(idle);
    }
    let PeerProgress::NotEntered(Some(last)) = progress else { return LastEnd::Unknown };
    subject.ended_ago(last.number, waiting.on_device).map_or(LastEnd::Unknown, LastEnd::Here)
}
