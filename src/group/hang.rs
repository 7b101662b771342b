//! An operation that takes long: its rank asks those that it waits for what they are doing, logs one line when the soft
//! limit has passed, and names them in the error at the deadline. And the other side: what this rank answers.
//!
//! Nothing here runs for an operation that ends before the first look at deadlines (`driver`).

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::account::{Account, Place};
use super::board;
use super::board::{Board, Found, Round, SharedStore, State as BoardState};
use super::{Group, Inner};
use crate::config;
use crate::engine::{Control, Inquiry, Lacks, Standing};
use crate::error::{Error, Result};
use crate::op;
use crate::op::Op;
use crate::os::{clock, topology, watch};
use crate::progress::domain::Driven;
use crate::progress::inquiry;
use crate::progress::waits;
use crate::progress::waits::{Edge, Waits};
use crate::stats::history::State;
use crate::types::{ANY_RANK, Kind};

/// Most ranks that are asked and described; of more, their numbers must do.
const MOST: usize = 6;
/// Between two questions to a rank: at most once in the shorter time, at least once in the longer one.
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(10);
/// So long before the deadline everyone is asked a last time, or a tenth of the timeout where that is less.
const LAST: Duration = Duration::from_millis(500);
/// After so long without an answer the text says that there was none.
const SILENCE: Duration = Duration::from_secs(1);
/// What ranks said about who waits for whom counts for so long; it goes one rank further with each question.
const YOUNG: Duration = Duration::from_secs(30);

/// The operation that has been pending longest, once it has been so for long. Used under the group's lock.
#[derive(Default)]
pub(super) struct Watched {
    op: Weak<Op>,
    /// The ranks that were asked, this one included, with the numbers of their first questions.
    asked: Vec<(usize, u32)>,
    /// When they were asked first and last, and when they will be asked next, on `clock::now`.
    since: u64,
    last: u64,
    next: u64,
    told: bool,
    /// Over the store: what was heard of the ranks that matter, and what all answers come to; whether that is so.
    heard: BTreeMap<usize, Account>,
    found: Found,
    collected: bool,
    /// When the last line was logged.
    line: Option<u64>,
}

impl Watched {
    fn is(&self, op: &Arc<Op>) -> bool {
        std::ptr::eq(self.op.as_ptr(), Arc::as_ptr(op))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// When ranks are first asked, after its issue: at the soft limit, but early enough for the deadline.
fn patience(op: &Op) -> Duration {
    let half = op.timeout / 2;
    let soft = config::soft_timeout();
    if soft.is_zero() { half } else { soft.min(half) }
}

/// The texts about what a pending operation waits for.
struct Findings {
    /// Where this rank is.
    here: String,
    missing: String,
    circle: String,
}

impl Group {
    /// With the lock held: asks about the operation with the earliest deadline once it has been pending for long.
    pub(super) fn look_at_long_wait(&self, inner: &mut Inner, op: &Arc<Op>, now: u64) {
        if self.members.get().is_none() {
            return; // a group inside a host of a larger one, which does this
        }
        let timeout = nanoseconds(op.timeout);
        let begun = op.deadline.saturating_sub(timeout);
        if now.saturating_sub(begun) < nanoseconds(patience(op)) {
            return;
        }
        if !inner.watched.is(op) {
            let line = inner.watched.line;
            inner.watched = Watched { op: Arc::downgrade(op), since: now, line, ..Watched::default() };
            if self.board.get().is_some() {
                self.domain.look_again();
            }
        }
        if now >= inner.watched.next {
            self.listen(&inner.watched, now);
            self.ask(inner, op);
            inner.watched.last = now;
            let interval = (op.timeout / 16).clamp(SHORTEST, LONGEST);
            let last = op.deadline.saturating_sub(nanoseconds(LAST.min(op.timeout / 10)));
            let next = now.saturating_add(nanoseconds(interval));
            inner.watched.next = if now >= last { u64::MAX } else { next.min(last) };
        }
        let soft = nanoseconds(config::soft_timeout());
        let enough = match self.board.get() {
            None => LAST.min(op.timeout / 10),
            Some(_) => board::interval(op.timeout) * 2 + SILENCE,
        };
        let heard = now - inner.watched.since >= nanoseconds(enough) || self.all_answered(inner);
        if soft == 0 || inner.watched.told || !heard {
            return;
        }
        inner.watched.told = true;
        // One line in that time, however many operations are pending.
        if inner.watched.line.is_some_and(|line| now.saturating_sub(line) < soft) {
            return;
        }
        inner.watched.line = Some(now);
        self.listen(&inner.watched, now);
        let Findings { here, missing, circle } = self.findings(inner, op, now);
        log::warn!(
            "rank {} of group '{}' has waited {} in {}{here}: {missing}.{circle} It fails after {}",
            self.config.rank,
            self.config.name,
            seconds((now - begun) / 1_000_000),
            what(op),
            seconds(timeout / 1_000_000),
        );
    }

    /// The error text of a deadline that passed: the missing ranks, what they do, and where.
    pub(super) fn stall(&self, inner: &Inner, op: &Arc<Op>, now: u64) -> Error {
        self.listen(&inner.watched, now);
        let Findings { here, missing, circle } = self.findings(inner, op, now);
        Error::Timeout(format!(
            "sagellm: rank {} of group '{}' Timed out after {} in {}{here}: {missing}.{circle} Every rank must call the same \
             operations in the same order; where a rank needs longer, pass a larger timeout",
            self.config.rank,
            self.config.name,
            seconds(op.timeout.as_millis() as u64),
            what(op),
        ))
    }

    /// Asks this rank and those that the operation waits for.
    fn ask(&self, inner: &mut Inner, op: &Op) {
        let Some(inquiry) = self.control.inquiry() else { return };
        let missing = match inner.engine.lacks(op) {
            Lacks::Ranks(ranks) => ranks,
            _ => Vec::new(),
        };
        let missing = missing.into_iter().map(|(rank, _)| rank).take(MOST);
        for rank in std::iter::once(self.config.rank).chain(missing) {
            let question = inquiry.ask(rank);
            // An answer to any question since the first is one about this operation.
            if !inner.watched.asked.iter().any(|(asked, _)| *asked == rank) {
                inner.watched.asked.push((rank, question));
            }
        }
    }

    /// Remembers who waits for whom, from the answers that have come.
    fn listen(&self, watched: &Watched, now: u64) {
        let Some(inquiry) = self.control.inquiry() else { return };
        for (rank, question) in watched.asked.iter().filter(|(rank, _)| *rank != self.config.rank) {
            if let Some(account) = answer_of(inquiry, *rank, *question) {
                self.domain.hear(self.global(*rank), &account.edges, now);
            }
        }
    }

    fn all_answered(&self, inner: &Inner) -> bool {
        let Some(inquiry) = self.control.inquiry() else {
            return self.board.get().is_none() || inner.watched.collected;
        };
        inner.watched.asked.iter().all(|(rank, question)| {
            answer_of(inquiry, *rank, *question).is_some_and(|account| account.place != Place::Locked)
        })
    }

    /// What is known of a rank that was asked about `op`.
    fn account_of(&self, watched: &Watched, op: &Arc<Op>, rank: usize) -> Option<Account> {
        if self.board.get().is_some() {
            return watched.heard.get(&rank).filter(|_| watched.is(op)).cloned();
        }
        let (_, question) = watched.asked.iter().find(|(asked, _)| watched.is(op) && *asked == rank)?;
        answer_of(self.control.inquiry()?, rank, *question)
    }

    /// What the operation waits for: as the engine sees it or, over the store, by what the ranks have said.
    fn lacks(&self, inner: &Inner, op: &Arc<Op>) -> Lacks {
        let (lacks, watched) = (inner.engine.lacks(op), &inner.watched);
        if !watched.is(op) || !matches!(lacks, Lacks::Unknown(_)) {
            return lacks;
        }
        let late =
            watched.heard.iter().filter(|(rank, account)| account.issued < op.number && **rank != self.config.rank);
        let late = late.map(|(rank, account)| (*rank, Standing::Before(account.last.clone())));
        let unheard = watched.found.absent.iter().filter(|rank| !watched.heard.contains_key(rank));
        let ranks: Vec<_> = late.chain(unheard.map(|rank| (*rank, Standing::Unheard))).collect();
        if ranks.is_empty() { lacks } else { Lacks::Ranks(ranks) }
    }

    fn findings(&self, inner: &Inner, op: &Arc<Op>, now: u64) -> Findings {
        let watched = &inner.watched;
        let ago = |then: u64| Duration::from_nanos(if watched.is(op) { now.saturating_sub(then) } else { 0 });
        let (asked_for, since_last) = (ago(watched.since), ago(watched.last));
        let lacks = self.lacks(inner, op);
        let missing = match &lacks {
            Lacks::Ranks(ranks) => {
                let each = ranks.iter().take(MOST).map(|(rank, standing)| {
                    self.absence(
                        watched,
                        *rank,
                        standing,
                        self.account_of(watched, op, *rank).as_ref(),
                        (asked_for, since_last),
                    )
                });
                let mut each: Vec<String> = each.collect();
                let rest: Vec<String> = ranks.iter().skip(MOST).map(|(rank, _)| rank.to_string()).collect();
                if !rest.is_empty() {
                    each.push(format!("and the same of rank {}", rest.join(", ")));
                }
                each.join("; ")
            }
            Lacks::Earlier(first) => {
                format!("it must follow {} number {}, which has not ended here", first.request.kind, first.number)
            }
            Lacks::Unknown(text) => text.clone(),
        };
        let own = self.account_of(watched, op, self.config.rank);
        Findings { here: self.here(op, own.as_ref()), missing, circle: self.circle(&lacks, op, now) }
    }

    /// Where the operation was called, and where this rank is now.
    fn here(&self, op: &Op, own: Option<&Account>) -> String {
        let called = self.host.call_site(op.request.note.site);
        let text = called.as_ref().map_or_else(String::new, |site| format!(", called at {site}"));
        match own {
            Some(Account { place: Place::At(place), waits, .. }) if called.as_ref() != Some(place) => {
                let how = if waits.is_some() { "waiting" } else { "while its program is" };
                format!("{text}, {how} at {place}")
            }
            _ => text,
        }
    }

    /// What a missing rank does.
    fn absence(
        &self,
        watched: &Watched,
        rank: usize,
        standing: &Standing,
        account: Option<&Account>,
        (asked_for, since_last): (Duration, Duration),
    ) -> String {
        let mate = self.mates.iter().find(|(mate, _)| *mate == rank).map(|(_, pid)| *pid);
        let pid = self.peers.get(rank).map(|peer| peer.pid).or(mate);
        let is_stopped = watched.found.stopped.contains(&rank) || pid.is_some_and(is_stopped);
        let mut process = match (pid, account) {
            (None, Some(account)) => account.who.clone(),
            (None, None) => "on another host".to_string(),
            (Some(pid), _) => format!("pid {pid}"),
        };
        if is_stopped {
            process.push_str(", its process is stopped");
        }
        let idle = account.and_then(|account| account.idle).map(seconds);
        let stands = match (standing, idle) {
            (Standing::Unheard, _) if is_stopped => "has said nothing".to_string(),
            (Standing::Unheard, _) => {
                "has said nothing: its process is stopped, or the store cannot be reached".to_string()
            }
            (Standing::Inside, _) => "entered it and stopped inside it".to_string(),
            (Standing::Before(None), _) => "has not entered it, and nothing before it in this group".to_string(),
            (Standing::Before(Some(call)), None) => format!("has not entered it, its last operation is {call}"),
            (Standing::Before(Some(call)), Some(idle)) => {
                format!("has not entered it, its last operation is {call}, which ended {idle} ago")
            }
            (Standing::Silent(None), _) => "did not answer, it has called no collective in this group".to_string(),
            (Standing::Silent(Some(call)), None) => format!("did not answer, its last collective is {call}"),
            (Standing::Silent(Some(call)), Some(idle)) => {
                format!("did not answer, its last collective is {call}, its last operation ended {idle} ago")
            }
        };
        let now = match account {
            _ if is_stopped => String::new(),
            None if asked_for < SILENCE || *standing == Standing::Unheard => String::new(),
            None => format!(", and it has not said what it does for {}", seconds(asked_for.as_millis() as u64)),
            Some(Account { place, waits: Some(Waits { group, what, milliseconds, .. }), .. }) => {
                let place = if let Place::At(place) = place { format!(" at {place}") } else { String::new() };
                format!(", and it waits in {what} of group '{group}'{place}, since {}", seconds(*milliseconds))
            }
            Some(Account { place: Place::At(place), .. }) => format!(", and it is at {place}"),
            Some(Account { place: Place::Locked, question, .. }) => {
                // Since it was asked first, unless it has answered after that.
                let first = watched.asked.iter().any(|(asked, number)| *asked == rank && number == question);
                let held = if first || asked_for < since_last { asked_for } else { since_last };
                let held = seconds(held.as_millis() as u64);
                format!(", and native code has kept its interpreter's lock for {held}, so that its line is not known")
            }
            Some(_) => String::new(),
        };
        format!("rank {rank} ({process}) {stands}{now}")
    }

    /// The ranks that wait for each other, where this one is among them or waits for them.
    fn circle(&self, lacks: &Lacks, op: &Op, now: u64) -> String {
        let mut edges = self.edges_of(lacks, op);
        let me = self.global(self.config.rank);
        let known = self.domain.heard(now, nanoseconds(YOUNG)).into_iter().map(|(edge, _)| edge);
        edges.extend(known.filter(|edge| edge.from != me));
        let Some(circle) = waits::circle(&edges, me) else { return String::new() };
        let step = |edge: &Edge| format!("{} for {} in {} of group '{}'", edge.from, edge.to, edge.what, edge.group);
        let steps: Vec<String> = circle.iter().map(step).collect();
        format!(" These ranks of the default group wait for each other: {}.", steps.join(", "))
    }

    /// The rank of the default group that a rank of this one is.
    fn global(&self, rank: usize) -> u32 {
        self.members.get().and_then(|members| members.get(rank).copied()).unwrap_or(rank as u32)
    }

    fn edges_of(&self, lacks: &Lacks, op: &Op) -> Vec<Edge> {
        // A receive from anyone waits for none of them in particular.
        let Lacks::Ranks(ranks) = lacks else { return Vec::new() };
        let anyone = op.request.kind == Kind::Recv && op.request.root == ANY_RANK;
        let absent = ranks.iter().filter(|(_, standing)| standing.is_absent() && !anyone);
        let edge = |(rank, _): &(usize, Standing)| Edge {
            from: self.global(self.config.rank),
            to: self.global(*rank),
            group: self.config.name.clone(),
            what: what(op),
        };
        absent.take(MOST).map(edge).collect()
    }

    // ---------------------------------------------------------------------------------------------- the other side

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
            Some((wait.thread, group.waits()?))
        });
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
        let newest = inner.stats.history().iter().next_back().filter(|last| last.state != State::Pending);
        let idle = newest.map(|last| clock::stamp().saturating_sub(last.ended) / 1_000_000);
        let last = inner.stats.history().collectives().next();
        let last = last.map(|last| format!("{} number {}", last.kind, last.number));
        let issued = inner.number;
        drop(inner);
        let who = format!("pid {}, host {}", std::process::id(), topology::hostname());
        let stopped = self.mates.iter().filter(|(_, pid)| is_stopped(*pid)).map(|(rank, _)| *rank).collect();
        let own = waits.as_mut().map(|waits| std::mem::take(&mut waits.edges)).unwrap_or_default();
        let me = self.global(self.config.rank);
        let known = self.domain.heard(clock::now(), nanoseconds(YOUNG));
        let known = known.into_iter().filter(|(edge, _)| edge.from != me);
        let edges = own.into_iter().map(|edge| (edge, 0)).chain(known).collect();
        Account { question, issued, last, who, stopped, idle, place: Place::Unknown, waits, edges }
    }

    /// What a thread that waits in this group waits for.
    pub(super) fn awaited(&self) -> Option<Waits> {
        let inner = self.lock();
        self.members.get()?; // a group inside a host of a larger one waits for it
        let op = inner.engine.next_deadline()?;
        let edges = self.edges_of(&self.lacks(&inner, &op), &op);
        let milliseconds = clock::stamp().saturating_sub(op.issued) / 1_000_000;
        Some(Waits { group: self.config.name.clone(), what: what(&op), milliseconds, edges })
    }
}

// -------------------------------------------------------------------------------------------------- over the store

impl Group {
    /// Lets the ranks ask each other over this store, where they share no memory.
    pub fn set_board(&self, store: SharedStore) {
        if self.config.size > 1 && self.control.has_threads() && self.board.set(Board::new(store, &self.id())).is_ok() {
            inquiry::start(&self.domain);
            self.domain.look_again(); // the thread may have looked before there was a board
        }
    }

    /// As `Driven::look_at_board`. An error of the store ends it: the ranks do without.
    pub(super) fn look_for_questions(&self) -> Option<Duration> {
        let board = self.board.get().filter(|_| self.standing().is_ok())?;
        let pause = board::interval(Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed)));
        let mut state = board.state();
        let (now, op) = (clock::stamp(), self.watched_op());
        if now < state.next && op.is_none() {
            return Some(Duration::from_nanos(state.next - now));
        }
        let looked = self.look_once(board, &mut state, op, pause);
        let next = looked.inspect_err(|error| log::debug!("no questions over the store any more: {error}")).ok()?;
        state.next = clock::stamp() + nanoseconds(next);
        Some(next)
    }

    /// The operation that has been pending for long, if it still is.
    fn watched_op(&self) -> Option<Arc<Op>> {
        self.lock().watched.op.upgrade().filter(|op| !op.is_done())
    }

    /// Answers, asks where an operation has been pending for long, and collects answers. Returns when to look next.
    fn look_once(
        &self,
        board: &Board,
        state: &mut BoardState,
        op: Option<Arc<Op>>,
        pause: Duration,
    ) -> Result<Duration> {
        let now = clock::stamp();
        let mut question = board.question()?;
        if question != state.answered {
            (state.answered, state.answered_at) = (question, now);
            self.give_account(question, |account| board.answer(self.config.rank, account))?;
        }
        let Some(op) = op else {
            state.round = None;
            return Ok(pause);
        };
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
            self.collect_answers(board, round, &op, pause)?;
        }
        Ok(if round.done { pause } else { SHORTEST / 2 })
    }

    /// Reads the answers that have come. The rank that asked reads all, the others those that it found to matter.
    fn collect_answers(&self, board: &Board, round: &mut Round, op: &Arc<Op>, pause: Duration) -> Result<()> {
        let (me, ranks) = (self.config.rank, self.config.size);
        let limit = nanoseconds(pause + SILENCE);
        let waited = clock::stamp().saturating_sub(round.begun);
        let found = if round.collects {
            let whole = |account: &Account| account.place != Place::Locked;
            let open = (0..ranks).filter(|rank| !round.answers.get(rank).is_some_and(whole));
            let answers = board.answers(round.question, open)?;
            round.answers.extend(answers);
            if waited < limit && (0..ranks).any(|rank| !round.answers.get(&rank).is_some_and(whole)) {
                return Ok(());
            }
            let late = |rank: &usize| round.answers.get(rank).is_none_or(|account| account.issued < op.number);
            let absent: Vec<usize> = (0..ranks).filter(|rank| *rank != me).filter(late).collect();
            let mut stopped: Vec<usize> = round.answers.values().flat_map(|account| account.stopped.clone()).collect();
            stopped.sort_unstable();
            stopped.dedup();
            let found = Found { absent, stopped };
            board.tell(round.question, &found)?;
            found
        } else if let Some(found) = board.told(round.question)? {
            round.answers = board.answers(round.question, found.absent.iter().copied().take(MOST).chain([me]))?;
            found
        } else {
            round.collects = waited > 2 * limit; // the rank that asked is gone, or stopped itself
            return Ok(());
        };
        round.done = true;
        for (rank, account) in &round.answers {
            self.domain.hear(self.global(*rank), &account.edges, clock::now());
        }
        let mut inner = self.lock();
        if inner.watched.is(op) {
            inner.watched.found = found;
            inner.watched.heard = round.answers.clone();
            inner.watched.collected = true;
        }
        Ok(())
    }
}

fn is_stopped(pid: i32) -> bool {
    matches!(watch::process_state(pid), Some('T' | 't'))
}

/// The answer of a rank to this question or a later one.
fn answer_of(inquiry: &dyn Inquiry, rank: usize, question: u32) -> Option<Account> {
    Account::decode(&inquiry.heard(rank)).filter(|account| account.answers(question))
}

/// The operation as its rank called it, and its number.
fn what(op: &Op) -> String {
    match op.request.kind {
        Kind::Send => format!("send to rank {} with tag {}", op.request.root, op.request.tag),
        Kind::Recv if op.request.root == ANY_RANK => format!("recv from any rank with tag {}", op.request.tag),
        Kind::Recv => format!("recv from rank {} with tag {}", op.request.root, op.request.tag),
        _ => format!("{} number {}", op::describe(op.signature), op.number),
    }
}

fn seconds(milliseconds: u64) -> String {
    format!("{:.1} s", milliseconds as f64 / 1e3)
}
