//! Holds what is known of a waiting operation: where this rank is, which ranks it waits for, what those ranks do, and
//! the cycle of ranks that wait for each other. `StallReport` holds it as data; its functions format it as the lines of
//! the error at the deadline and of the log line at the soft limit.

use std::time::Duration;

use super::cycle::Edge;
use super::status::{Place, Status, Waits};
use super::{MOST, SILENCE, seconds};
use crate::engine::PeerProgress;
use crate::os::watch;

/// Why a process cannot make progress: it is stopped, or it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Stopped,
    Ended,
}

pub fn life_of(pid: i32) -> Option<Life> {
    match watch::process_state(pid) {
        Some('T' | 't') => Some(Life::Stopped),
        None | Some('Z' | 'X') if pid > 0 => Some(Life::Ended),
        _ => None,
    }
}

/// Description of a rank's process, and why the process makes no progress, if this rank can see that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessReport {
    pub who: String,
    pub life: Option<Life>,
}

impl ProcessReport {
    /// The description in parentheses, to follow the rank in a sentence.
    pub fn text(&self) -> String {
        let ProcessReport { who, life } = self;
        match life {
            Some(Life::Stopped) => format!(" ({who}, its process is stopped)"),
            Some(Life::Ended) => format!(" ({who}, its process has ended)"),
            None => format!(" ({who})"),
        }
    }
}

/// How old the questions and answers are, for a watched operation and one rank that it waits for. All 0 if the
/// operation is not watched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ages {
    /// Time since this rank first asked about the operation.
    pub asked: Duration,
    /// Time since this rank last asked about the operation.
    pub asked_again: Duration,
    /// Time since the other rank's last answer over the store, or, if it has not answered, since the first question.
    pub answered: Duration,
}

/// How long ago the last operation of a missing rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastEnd {
    Unknown,
    /// Milliseconds since it ended on the missing rank, as that rank reports.
    There(u64),
    /// Milliseconds since it ended on this rank.
    Here(u64),
}

/// A rank that must still do its part before the operation can complete.
#[derive(Clone, Debug)]
pub struct MissingRank {
    pub rank: usize,
    pub process: ProcessReport,
    pub progress: PeerProgress,
    pub last_end: LastEnd,
    /// The rank's last answer.
    pub status: Option<Status>,
    /// Whether the answer has the number of the first question that was sent to that rank.
    pub answers_first: bool,
    pub ages: Ages,
}

#[derive(Clone, Debug)]
pub enum WaitsFor {
    /// At most `MOST` missing ranks, and the numbers of the remaining ones.
    Ranks(Vec<MissingRank>, Vec<usize>),
    /// An earlier operation of this rank, as text.
    Earlier(String),
    Unknown(String),
}

#[derive(Clone, Debug)]
pub struct StallReport {
    /// Source line at which the operation was called.
    pub called: Option<String>,
    /// This rank's own status.
    pub own: Option<Status>,
    pub on_device: bool,
    pub waits_for: WaitsFor,
    /// Only over the store: whether all ranks were asked and had time to answer.
    pub complete: bool,
    pub cycle: Vec<Edge>,
    /// Whether each rank of the group has the same number in the default group.
    pub in_default_numbers: bool,
}

impl StallReport {
    pub fn lines(&self) -> Vec<String> {
        let missing = match &self.waits_for {
            WaitsFor::Ranks(ranks, others) => {
                let mut each: Vec<String> = ranks.iter().map(|missing| missing.text(self.complete)).collect();
                let others: Vec<String> = others.iter().map(ToString::to_string).collect();
                if !others.is_empty() {
                    each.push(format!("and the same of rank {}", others.join(", ")));
                }
                each
            }
            WaitsFor::Earlier(first) => vec![format!("it must follow {first}, which has not ended here")],
            WaitsFor::Unknown(text) => vec![text.clone()],
        };
        std::iter::once(self.here()).chain(missing).chain([self.deadlock()]).collect()
    }

    /// Where the operation was called, and where this rank's program is now.
    fn here(&self) -> String {
        let text = self.called.as_ref().map_or_else(String::new, |site| format!("called at {site}"));
        match &self.own {
            Some(Status { place: Place::At(place), waits, .. }) if self.called.as_ref() != Some(place) => {
                // If the device waits, the program may be doing something else.
                let how = if waits.is_some() && !self.on_device { "waiting" } else { "while its program is" };
                let text = if text.is_empty() { text } else { text + ", " };
                format!("{text}{how} at {place}")
            }
            _ => text,
        }
    }

    fn deadlock(&self) -> String {
        if self.cycle.is_empty() {
            return String::new();
        }
        let step = |(at, edge): (usize, &Edge)| {
            let waits = if at == 0 { " waits" } else { "" };
            format!("rank {}{waits} for rank {} in {} of group '{}'", edge.from, edge.to, edge.what, edge.group)
        };
        let steps: Vec<String> = self.cycle.iter().enumerate().map(step).collect();
        let numbers = if self.in_default_numbers { "" } else { ", in numbers of the default group" };
        format!("deadlock{numbers}: {}", steps.join(", "))
    }
}

impl MissingRank {
    /// One line about what the missing rank is doing. `complete` is `StallReport::complete`.
    fn text(&self, complete: bool) -> String {
        let MissingRank { rank, process, progress, status, ages, .. } = self;
        let ended = match self.last_end {
            LastEnd::Unknown => String::new(),
            LastEnd::There(ago) => format!(", its last operation ended {} ago", seconds(ago)),
            LastEnd::Here(ago) => format!(", which ended here {} ago", seconds(ago)),
        };
        let silent = match ages.answered.as_millis() as u64 {
            0 => "has said nothing".to_string(),
            silent => format!("has said nothing for {}", seconds(silent)),
        };
        let stands = match progress {
            PeerProgress::Unknown if process.life.is_some() => silent,
            PeerProgress::Unknown if !complete => "has not said what it does".to_string(),
            PeerProgress::Unknown => format!("{silent}: its process is stopped, or the store cannot be reached"),
            PeerProgress::Entered => "entered it and stopped inside it".to_string(),
            PeerProgress::CalledOther => "has made another call under this number or a later one".to_string(),
            PeerProgress::NotEntered(None) => "has not entered it, and nothing before it in this group".to_string(),
            PeerProgress::NotEntered(Some(last)) => {
                format!("has not entered it, its last collective is {}{ended}", last.text)
            }
            PeerProgress::NotInMessage(None) => "did not answer, it has called no collective in this group".to_string(),
            PeerProgress::NotInMessage(Some(last)) => format!("did not answer, its last collective is {last}{ended}"),
        };
        let now = match status {
            _ if process.life.is_some() => String::new(),
            None if ages.asked < SILENCE || *progress == PeerProgress::Unknown => String::new(),
            None => format!(", and it has not said what it does for {}", seconds(ages.asked.as_millis() as u64)),
            Some(Status { place, waits: Some(Waits { group, what, milliseconds, .. }), .. }) => {
                let place = if let Place::At(place) = place { format!(" at {place}") } else { String::new() };
                format!(", and it waits in {what} of group '{group}'{place}, since {}", seconds(*milliseconds))
            }
            Some(Status { place: Place::At(place), .. }) => format!(", and it is at {place}"),
            Some(Status { place: Place::Locked, .. }) => {
                // The lock has been held since the rank was first asked or, if the rank has answered since then, since
                // it was last asked.
                let held = if self.answers_first { ages.asked } else { ages.asked.min(ages.asked_again) };
                let held = seconds(held.as_millis() as u64);
                format!(", and native code has kept its interpreter's lock for {held}, so that its line is not known")
            }
            Some(_) => String::new(),
        };
        format!("rank {rank}{} {stands}{now}", process.text())
    }
}

/// The ranks that a report describes, and the numbers of the remaining ranks.
pub fn described<T>(ranks: Vec<(usize, T)>) -> (Vec<(usize, T)>, Vec<usize>) {
    let others = ranks.iter().skip(MOST).map(|(rank, _)| *rank).collect();
    (ranks.into_iter().take(MOST).collect(), others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::LastCall;

    fn missing(progress: PeerProgress, status: Option<Status>) -> MissingRank {
        let process = ProcessReport { who: "pid 5".into(), life: None };
        let ages = Ages { asked: Duration::from_secs(3), ..Ages::default() };
        MissingRank { rank: 1, process, progress, last_end: LastEnd::Here(2500), status, answers_first: true, ages }
    }

    fn report(missing: MissingRank) -> StallReport {
        StallReport {
            called: Some("a.py:3 in step".into()),
            own: Some(Status {
                place: Place::At("a.py:9 in wait".into()),
                waits: Some(Waits::default()),
                ..Status::default()
            }),
            on_device: false,
            waits_for: WaitsFor::Ranks(vec![missing], vec![7, 8]),
            complete: false,
            cycle: Vec::new(),
            in_default_numbers: true,
        }
    }

    #[test]
    fn a_report_says_where_this_rank_is_and_what_each_missing_one_does() {
        let last = LastCall { number: 2, text: "barrier number 2".into() };
        let lines = report(missing(PeerProgress::NotEntered(Some(last)), None)).lines();
        assert_eq!(lines[0], "called at a.py:3 in step, waiting at a.py:9 in wait");
        let silent = "has not entered it, its last collective is barrier number 2, which ended here 2.5 s ago, and it has not \
                      said what it does for 3.0 s";
        assert_eq!(lines[1], format!("rank 1 (pid 5) {silent}"));
        assert_eq!(lines[2..], ["and the same of rank 7, 8", ""]);
        let status = Status { place: Place::Locked, ..Status::default() };
        let lines = report(missing(PeerProgress::NotEntered(None), Some(status.clone()))).lines();
        assert!(lines[1].contains("native code has kept its interpreter's lock for 3.0 s"), "{lines:?}");
        let mut stopped = missing(PeerProgress::Unknown, Some(status));
        stopped.process.life = Some(Life::Stopped);
        assert_eq!(report(stopped).lines()[1], "rank 1 (pid 5, its process is stopped) has said nothing");
    }

    #[test]
    fn a_cycle_names_its_ranks_by_their_numbers_in_the_default_group() {
        let edge = |from, to| Edge { from, to, group: "g".into(), what: "recv".into() };
        let cycle = vec![edge(4, 6), edge(6, 4)];
        let found = StallReport { cycle, in_default_numbers: false, ..report(missing(PeerProgress::Entered, None)) };
        let both = "rank 4 waits for rank 6 in recv of group 'g', rank 6 for rank 4 in recv of group 'g'";
        assert_eq!(found.lines().last().unwrap(), &format!("deadlock, in numbers of the default group: {both}"));
    }
}
