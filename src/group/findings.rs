//! The text about a pending operation in the error at the deadline and in the log line of the soft limit: where this rank is,
//! the missing ranks and what they do, and the cycle of ranks that wait for each other. `hang` says when.

use std::time::Duration;

use super::account::{Account, Place};
use super::hang::{Life, MOST, SILENCE, Watched, YOUNG, life_of, seconds};
use super::pending::{Pending, nanoseconds};
use super::{Group, Inner};
use crate::engine::{Lacks, Standing};
use crate::error::{GO_ON, Text, laid_out};
use crate::os::clock;
use crate::progress::waits;
use crate::progress::waits::{Edge, Waits};
use crate::select::Choice;
use crate::stats::history::{History, State};

const LATE: &str = "Every rank must call the same operations in the same order; a rank that needs longer needs a larger \
                    timeout.";

/// Times of a watched operation and of a rank that it waits for; 0 if the operation is not watched.
struct Ages {
    /// Since the ranks were first asked.
    asked: Duration,
    /// Since they were last asked.
    asked_again: Duration,
    /// Since the rank's last answer over the store or, if it has not answered, since it was first asked.
    heard: Duration,
}

impl Group {
    /// The error text of an operation that failed: `how` it ended, what the missing ranks do, and where. `what` is the
    /// operation in words; `words` is the name and the message of what carried it, or empty.
    pub(super) fn story(
        &self,
        (inner, pending): (&Inner, &Pending),
        (what, how): (&str, &str),
        words: &str,
        now: u64,
    ) -> Text {
        let head = format!("rank {} of group '{}' {how} in {what}", self.config.rank, self.config.name);
        let mut lines = self.findings(inner, pending, now);
        lines.push(words.to_string());
        laid_out(&head, &lines, &format!("{LATE} {GO_ON}"))
    }

    /// Lines about a pending operation: where this rank is, each rank that it waits for, and the cycle.
    pub(super) fn findings(&self, inner: &Inner, pending: &Pending, now: u64) -> Vec<String> {
        let watched = inner.watched_of(pending);
        let ago = |then: u64| Duration::from_nanos(if watched.is(pending) { now.saturating_sub(then) } else { 0 });
        let lacks = self.lacks(inner, pending);
        let missing: Vec<String> = match &lacks {
            Lacks::Ranks(ranks) => {
                let each = ranks.iter().take(MOST).map(|(rank, standing)| {
                    let account = self.account_of(watched, pending, *rank);
                    let ended = end_of_last(inner.stats.history(), pending, standing, account.as_ref());
                    let heard = watched.answered.get(rank).copied().unwrap_or(watched.since);
                    let ages = Ages { asked: ago(watched.since), asked_again: ago(watched.last), heard: ago(heard) };
                    self.absence(watched, (*rank, standing, &ended), account.as_ref(), ages)
                });
                let mut each: Vec<String> = each.collect();
                let rest: Vec<String> = ranks.iter().skip(MOST).map(|(rank, _)| rank.to_string()).collect();
                if !rest.is_empty() {
                    each.push(format!("and the same of rank {}", rest.join(", ")));
                }
                each
            }
            Lacks::Earlier(first) => vec![format!("it must follow {}, which has not ended here", first.what())],
            Lacks::Unknown(text) => vec![text.clone()],
        };
        let own = self.account_of(watched, pending, self.config.rank);
        let circle = self.circle(&lacks, pending, now);
        std::iter::once(self.here(pending, own.as_ref())).chain(missing).chain([circle]).collect()
    }

    /// Where the operation was called, and where this rank is now.
    fn here(&self, pending: &Pending, own: Option<&Account>) -> String {
        let called = self.host.call_site(pending.site());
        let text = called.as_ref().map_or_else(String::new, |site| format!("called at {site}"));
        match own {
            Some(Account { place: Place::At(place), waits, .. }) if called.as_ref() != Some(place) => {
                // The device waits, and the program may be doing something else.
                let how = if waits.is_some() && !pending.on_device() { "waiting" } else { "while its program is" };
                let text = if text.is_empty() { text } else { text + ", " };
                format!("{text}{how} at {place}")
            }
            _ => text,
        }
    }

    /// What a missing rank does. `ended` says when its last operation ended (`end_of_last`).
    fn absence(
        &self,
        watched: &Watched,
        (rank, standing, ended): (usize, &Standing, &str),
        account: Option<&Account>,
        ages: Ages,
    ) -> String {
        let (process, state) = self.process_of(watched, rank, account);
        let silent = match ages.heard.as_millis() as u64 {
            0 => "has said nothing".to_string(),
            heard => format!("has said nothing for {}", seconds(heard)),
        };
        let stands = match standing {
            Standing::Unheard if state.is_some() => silent,
            Standing::Unheard if !watched.collected => "has not said what it does".to_string(),
            Standing::Unheard => format!("{silent}: its process is stopped, or the store cannot be reached"),
            Standing::Inside => "entered it and stopped inside it".to_string(),
            Standing::Before(None) => "has not entered it, and nothing before it in this group".to_string(),
            Standing::Before(Some(last)) => format!("has not entered it, its last collective is {}{ended}", last.text),
            Standing::Silent(None) => "did not answer, it has called no collective in this group".to_string(),
            Standing::Silent(Some(last)) => format!("did not answer, its last collective is {last}{ended}"),
        };
        let now = match account {
            _ if state.is_some() => String::new(),
            None if ages.asked < SILENCE || *standing == Standing::Unheard => String::new(),
            None => format!(", and it has not said what it does for {}", seconds(ages.asked.as_millis() as u64)),
            Some(Account { place, waits: Some(Waits { group, what, milliseconds, .. }), .. }) => {
                let place = if let Place::At(place) = place { format!(" at {place}") } else { String::new() };
                format!(", and it waits in {what} of group '{group}'{place}, since {}", seconds(*milliseconds))
            }
            Some(Account { place: Place::At(place), .. }) => format!(", and it is at {place}"),
            Some(Account { place: Place::Locked, question, .. }) => {
                // Since it was first asked, unless it has answered since then.
                let first = watched.asked.iter().any(|(asked, number)| *asked == rank && number == question);
                let held = if first { ages.asked } else { ages.asked.min(ages.asked_again) };
                let held = seconds(held.as_millis() as u64);
                format!(", and native code has kept its interpreter's lock for {held}, so that its line is not known")
            }
            Some(_) => String::new(),
        };
        format!("rank {rank}{process} {stands}{now}")
    }

    /// A rank's process as text, and whether it is stopped or has ended, if this rank can see that.
    pub(super) fn process_of(
        &self,
        watched: &Watched,
        rank: usize,
        account: Option<&Account>,
    ) -> (String, Option<Life>) {
        let mate = self.mates.iter().find(|(mate, _)| *mate == rank).map(|(_, pid)| *pid);
        let silent = watched.silent.get(&rank);
        let pid = self.peers.get(rank).map(|peer| peer.pid).or(mate);
        let who = match (pid, account, silent) {
            (Some(pid), ..) => format!("pid {pid}"),
            (None, Some(account), _) => account.who.clone(),
            (None, None, Some(process)) => process.who.clone(),
            (None, None, None) if self.mates.is_empty() && !self.control.has_threads() => {
                "its process is not known".to_string()
            }
            (None, None, None) => "on another host".to_string(),
        };
        let life = if watched.found.stopped.contains(&rank) {
            Some(Life::Stopped)
        } else {
            pid.or_else(|| silent?.local_pid()).and_then(life_of)
        };
        match life {
            Some(Life::Stopped) => (format!(" ({who}, its process is stopped)"), life),
            Some(Life::Ended) => (format!(" ({who}, its process has ended)"), life),
            None => (format!(" ({who})"), life),
        }
    }

    /// The cycle of ranks that wait for each other, if this rank is in it or waits for one of them.
    fn circle(&self, lacks: &Lacks, pending: &Pending, now: u64) -> String {
        let mut edges = self.edges_of(lacks, pending);
        let me = self.global(self.config.rank);
        let known = self.domain.heard(now, nanoseconds(YOUNG)).into_iter().map(|(edge, _)| edge);
        edges.extend(known.filter(|edge| edge.from != me));
        let Some(circle) = waits::circle(&edges, me) else { return String::new() };
        let step = |(at, edge): (usize, &Edge)| {
            let waits = if at == 0 { " waits" } else { "" };
            format!("rank {}{waits} for rank {} in {} of group '{}'", edge.from, edge.to, edge.what, edge.group)
        };
        let steps: Vec<String> = circle.iter().enumerate().map(step).collect();
        let is_default =
            self.members.get().is_none_or(|members| members.iter().zip(0..).all(|(member, at)| *member == at));
        let numbers = if is_default { "" } else { ", in numbers of the default group" };
        format!("deadlock{numbers}: {}", steps.join(", "))
    }
}

/// When the last operation of a missing rank ended, as the end of a sentence about its last collective: from the rank's answer
/// or, without one, from `history`, which says when that collective ended on this rank.
fn end_of_last(history: &History, pending: &Pending, standing: &Standing, account: Option<&Account>) -> String {
    if let Some(idle) = account.and_then(|account| account.idle) {
        return format!(", its last operation ended {} ago", seconds(idle));
    }
    let Standing::Before(Some(last)) = standing else { return String::new() };
    let on_device = Choice::DEVICE.code();
    let mut alike = history.collectives().filter(|record| (record.route.choice == on_device) == pending.on_device());
    let record = alike.find(|record| record.number == last.number);
    record.filter(|record| record.state != State::Pending && record.timed).map_or_else(String::new, |record| {
        format!(", which ended here {} ago", seconds(clock::stamp().saturating_sub(record.ended) / 1_000_000))
    })
}
