//! Decides whether an operation on a device will complete. It uses the operation's deadline, the library's errors, and
//! which peers are gone.
//!
//! The shim's thread queries an event to see whether the device has passed an operation, and calls `look` to interpret
//! the answer. If `look` fails the group (`DeviceGroup::fail`), it does so with the error that it returns, and only
//! when that error is final.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::group::{DeviceGroup, Watched};
use crate::error::{Error, GO_ON, Result, laid_out};

/// While operations are pending, the group is asked for dead peers at this interval.
const ASK_EVERY: Duration = Duration::from_millis(10);
/// If an operation has been pending longer than this, the watchdog lets the group ask the peers what they do.
const LONG: Duration = Duration::from_millis(100);
/// In a group over several hosts, an operation counts as held up when it has been the oldest of its stream for this
/// long, or for a quarter of its timeout if that is less. It may then end because a rank on another host has aborted.
/// When the device passes a held-up operation, this rank looks for reports of other ranks, for at most `HELD_UP`.
const HELD_UP: Duration = Duration::from_secs(1);
/// After a peer is gone, its data may take this long to arrive, and the library has this long to report the peer's end
/// itself.
pub(super) const ON_ITS_WAY: Duration = Duration::from_millis(500);
/// After a library has reported a failure, this rank looks for the cause at this interval. The library may notice a
/// dead peer before the kernel reports it, and does not know which peer died. Or a peer has ended its communicators,
/// and its reason has not arrived yet.
pub(super) const TURN: Duration = Duration::from_millis(5);

/// State of the communicator that an operation uses.
pub enum Library {
    /// The communicator is in use; the result is what its `poll` returned.
    Lives(Result<()>),
    /// The communicator has ended. `drained`: no operation was pending in it.
    Ended { drained: bool },
}

/// The watchdog of all operations of a group on its devices. It never waits, because one thread checks the operations
/// of all groups.
#[derive(Default)]
pub struct Watchdog(Mutex<State>);

#[derive(Default)]
struct State {
    /// When the group was last asked for dead peers.
    asked: Option<Instant>,
    /// When the watchdog first saw that the group has failed or that a peer is gone.
    trouble_since: Option<Instant>,
    /// When the search for the cause ends. It begins when the library reports a failure or the communicator has ended.
    /// `None` before that.
    cause_until: Option<Instant>,
    /// When the group was last asked for the cause of a failure that the library reported.
    asked_for_cause: Option<Instant>,
}

/// The result of one check of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The operation is running or has succeeded.
    Nothing,
    /// The operation may have failed. The caller must check it again, even if the device has passed it.
    Undecided,
    /// The operation will not complete, or has failed. The group has failed with this error, except if only the
    /// communicator has ended.
    Failed(Error),
}

/// State of one operation on the device, whether other operations are pending, and whether a failed operation hangs.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Set if the device has executed the operation.
    pub passed: Option<Passed>,
    /// Other operations of the group are pending too.
    pub among_others: bool,
    /// A failed operation does not complete before its communicator is aborted.
    pub hangs_when_failed: bool,
}

/// An operation that the device has executed.
#[derive(Clone, Copy, Debug)]
pub struct Passed {
    /// When it was first seen to have passed.
    pub at: Instant,
    /// How long it had been checked by then. Checks begin when it is the oldest operation of its stream.
    pub after: Duration,
}

impl Watchdog {
    /// Checks one operation. After `Failed`, the caller reports the error to the program and then ends all
    /// communicators.
    pub fn look(
        &self,
        group: &dyn DeviceGroup,
        watched: &Watched,
        library: Library,
        seen: Seen,
        now: Instant,
    ) -> Found {
        let has_passed = seen.passed.is_some();
        if !has_passed && !watched.timeout.is_zero() && now.saturating_duration_since(watched.issued) > watched.timeout
        {
            return Found::Failed(fail_group(group, group.deadline_passed(watched)));
        }
        match library {
            Library::Ended { drained: true } if has_passed => Found::Nothing,
            Library::Ended { .. } => self.ended(group, watched, now),
            // This operation succeeded, so another pending operation has failed; the other one is checked separately.
            Library::Lives(Err(_)) if has_passed && seen.among_others && seen.hangs_when_failed => Found::Nothing,
            // Checked even if the device has passed the operation, because some libraries report a failure only then.
            Library::Lives(Err(bad)) => self.library_failed(group, watched, &bad, seen, now),
            Library::Lives(Ok(())) => match seen.passed {
                Some(at) => passed(group, watched, at, now),
                None => match self.peers(group, watched, now) {
                    Some(error) => Found::Failed(fail_group(group, error)),
                    None => Found::Nothing,
                },
            },
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles an operation that was pending when its communicator ended. `shrink` ends the communicator first and sets
    /// the group's fault right after that, so the operation stays undecided for up to `ON_ITS_WAY` until the fault is
    /// known.
    fn ended(&self, group: &dyn DeviceGroup, watched: &Watched, now: Instant) -> Found {
        if let Some(error) = fault_or_death_in(group, watched) {
            return Found::Failed(fail_group(group, error));
        }
        if now < *self.state().cause_until.get_or_insert_with(|| now + ON_ITS_WAY) {
            return Found::Undecided;
        }
        Found::Failed(Error::aborted(format!("sagellm: {}: the communicator was aborted", watched.what())))
    }

    /// Returns the error if the group has failed or a needed peer is gone. A peer may leave right after its last
    /// operation while its data is still in flight, so the error counts only `ON_ITS_WAY` after it was first seen.
    fn peers(&self, group: &dyn DeviceGroup, watched: &Watched, now: Instant) -> Option<Error> {
        let mut state = self.state();
        if state.asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASK_EVERY) {
            return None;
        }
        state.asked = Some(now);
        if now.saturating_duration_since(watched.issued) >= LONG {
            group.look_at_long_waits();
        }
        let error = fault_or_death_in(group, watched)?;
        let since = *state.trouble_since.get_or_insert(now);
        (now.saturating_duration_since(since) >= ON_ITS_WAY).then_some(error)
    }

    /// Handles an error that the library reported. Until `cause_until`, looks for a better explanation: a fault that a
    /// peer reported, or a peer's death. After that, reports the missing ranks or, if none is known, the library's own
    /// error.
    fn library_failed(
        &self,
        group: &dyn DeviceGroup,
        watched: &Watched,
        bad: &Error,
        seen: Seen,
        now: Instant,
    ) -> Found {
        let looking = {
            let mut state = self.state();
            let looking = now < *state.cause_until.get_or_insert_with(|| now + group.ask_for_fault());
            let soon = state.asked_for_cause.is_some_and(|asked| now.saturating_duration_since(asked) < TURN);
            if soon && looking {
                return Found::Undecided;
            }
            state.asked_for_cause = Some(now);
            looking
        };
        if let Some(error) = fault_or_death_in(group, watched) {
            return Found::Failed(fail_group(group, error));
        }
        if looking {
            return Found::Undecided;
        }
        let error = group.failed_within(watched, &bad.text()).unwrap_or_else(|| {
            let or_later = if seen.passed.is_some() && seen.among_others { " or a later call" } else { "" };
            let seen = format!("seen at {}{or_later}", watched.what());
            Error::system(laid_out(&bad.in_one_line(), &[seen], GO_ON))
        });
        Found::Failed(fail_group(group, error))
    }
}

/// Handles an operation that the device has executed. It needs no peer any more, even if a peer has left since. But if
/// a peer aborts its communicator, NCCL may end an operation on this rank without an error and without that peer's
/// data. A rank aborts only after it has reported why, so an operation that passes before that report is correct. On
/// one host this rank sees the report immediately. Between hosts it must read the report, and does so only if the
/// operation was held up.
fn passed(group: &dyn DeviceGroup, watched: &Watched, passed: Passed, now: Instant) -> Found {
    if let Some(fault) = group.fault() {
        return Found::Failed(fail_group(group, fault));
    }
    let held_up = if watched.timeout.is_zero() { HELD_UP } else { HELD_UP.min(watched.timeout / 4) };
    let read_long = now.saturating_duration_since(passed.at) >= HELD_UP;
    if passed.after < held_up || group.had_no_fault_at(passed.at) || read_long {
        Found::Nothing
    } else {
        Found::Undecided
    }
}

/// Fails the group with the error, on all ranks.
fn fail_group(group: &dyn DeviceGroup, error: Error) -> Error {
    group.fail(error.clone());
    error
}

/// Returns why a pending operation will not complete: the group has failed, or a peer is gone and its part may be
/// missing. This does not fail the group.
pub(super) fn fault_or_death_in(group: &dyn DeviceGroup, watched: &Watched) -> Option<Error> {
    group.fault().or_else(|| {
        let is_needed = |rank: &usize| match watched.peer {
            Some(peer) if watched.with_peer_alone => *rank == peer as usize || !group.left(*rank),
            Some(_) => true,
            // A rank that leaves in order first waits until everything that it has launched has completed.
            None => !(group.left(*rank) && group.launched(*rank) >= Some(watched.number)),
        };
        let rank = group.dead_ranks().into_iter().find(is_needed)?;
        Some(group.death_of(rank, &format!("waits for {}", watched.what())))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::engine::device::group::{Agreed, Counted, DeviceRequest, Place};
    use crate::engine::{BlockSizes, Signed};
    use crate::select::Policy;
    use crate::types::Kind;

    /// How long the search for the cause of a library's error lasts.
    const WHO_DIED: Duration = Duration::from_millis(250);

    /// Rank 0 of three ranks. Rank 2 may have ended.
    #[derive(Default)]
    struct Three {
        dead: bool,
        left: bool,
        /// Number of the last collective that rank 2 has launched.
        launched: Option<u64>,
        /// The rank that has not issued the operation.
        missing: Option<usize>,
        /// The fault that a peer reports when it is asked.
        tells: Mutex<Option<Error>>,
        /// `other_hosts`: reports of other ranks must be read. `read`: they were read.
        other_hosts: bool,
        read: Mutex<bool>,
        failed: Mutex<Option<Error>>,
        looked: Mutex<u32>,
        policy: Arc<Policy>,
    }

    impl DeviceGroup for Three {
        fn name(&self) -> &str {
            "three"
        }
        fn rank(&self) -> usize {
            0
        }
        fn size(&self) -> usize {
            3
        }
        fn id(&self) -> Option<String> {
            None
        }
        fn policy(&self) -> &Arc<Policy> {
            &self.policy
        }
        fn timeout(&self) -> Duration {
            Duration::ZERO
        }
        fn usable(&self, _what: &str) -> Result<()> {
            Ok(())
        }
        fn fault(&self) -> Option<Error> {
            self.failed.lock().unwrap().clone()
        }
        fn fail(&self, error: Error) {
            self.failed.lock().unwrap().get_or_insert(error);
        }
        fn ask_for_fault(&self) -> Duration {
            if let Some(fault) = self.tells.lock().unwrap().take() {
                *self.failed.lock().unwrap() = Some(fault); // the fault of a peer, seen only after it was asked for
            }
            WHO_DIED
        }
        fn had_no_fault_at(&self, _at: Instant) -> bool {
            !self.other_hosts || *self.read.lock().unwrap()
        }
        fn await_report(&self) {}
        fn failed_within(&self, _watched: &Watched, words: &str) -> Option<Error> {
            self.missing.map(|rank| Error::system(format!("rank {rank} has not entered it. The library says: {words}")))
        }
        fn interrupted(&self) -> bool {
            false
        }
        fn dead_ranks(&self) -> Vec<usize> {
            if self.dead { vec![2] } else { Vec::new() }
        }
        fn left(&self, rank: usize) -> bool {
            self.left && rank == 2
        }
        fn launched(&self, rank: usize) -> Option<u64> {
            (rank == 2).then_some(self.launched)?
        }
        fn death_of(&self, rank: usize, during: &str) -> Error {
            Error::rank_failed(rank, format!("rank {rank} ended: rank 0 {during}"))
        }
        fn next_number(&self, _signed: Signed, _sizes: Option<&BlockSizes<'_>>) -> u64 {
            1
        }
        fn compare(&self, _first: u64, _last: u64) -> Agreed {
            Agreed::SoFar
        }
        fn look_at_long_waits(&self) {
            *self.looked.lock().unwrap() += 1;
        }
        fn deadline_passed(&self, watched: &Watched) -> Error {
            Error::timeout(format!("{} timed out", watched.what()))
        }
        fn count(&self, _call: &DeviceRequest<'_>) -> Box<dyn Counted> {
            unreachable!("nothing is issued here")
        }
    }

    fn watched(peer: Option<u32>) -> Watched {
        Watched {
            op: "all_reduce".into(),
            kind: Kind::AllReduce,
            number: 7,
            device: Place { device_type: "npu".into(), index: 0 },
            peer,
            with_peer_alone: peer.is_some(),
            issued: Instant::now(),
            timeout: Duration::from_secs(60),
        }
    }

    const WELL: Library = Library::Lives(Ok(()));
    const RUNS: Seen = Seen { passed: None, among_others: false, hangs_when_failed: true };

    /// The device passed the operation immediately.
    fn passed(watched: &Watched) -> Seen {
        passed_after(watched, Duration::ZERO)
    }

    fn passed_after(watched: &Watched, after: Duration) -> Seen {
        Seen { passed: Some(Passed { at: watched.issued + after, after }), ..RUNS }
    }

    fn error(found: Found) -> Option<Error> {
        match found {
            Found::Failed(error) => Some(error),
            Found::Nothing | Found::Undecided => None,
        }
    }

    #[test]
    fn a_peer_that_is_gone_fails_nothing_before_what_it_sent_can_have_arrived() {
        let (group, dog, work) = (Three { dead: true, ..Three::default() }, Watchdog::default(), watched(None));
        let begin = work.issued;
        assert_eq!(error(dog.look(&group, &work, WELL, RUNS, begin)), None);
        assert_eq!(error(dog.look(&group, &work, WELL, RUNS, begin + ON_ITS_WAY / 2)), None);
        assert_eq!(group.fault(), None, "the library may report an error itself, or the work may end");
        assert_eq!(error(dog.look(&group, &work, WELL, passed(&work), begin + ON_ITS_WAY / 2)), None);
        assert_eq!(group.fault(), None, "it ended well");
        let late = error(dog.look(&group, &work, WELL, RUNS, begin + ON_ITS_WAY));
        assert!(late.as_ref().and_then(Error::rank) == Some(2), "{late:?}");
        assert_eq!(group.fault(), late);
    }

    fn bad() -> Library {
        Library::Lives(Err(Error::system("sagellm: the network is gone")))
    }

    #[test]
    fn an_error_of_the_library_waits_for_who_died_and_holds_up_nobody() {
        let (dog, work, alone) = (Watchdog::default(), watched(None), Three::default());
        let begin = work.issued;
        for later in [Duration::ZERO, TURN, WHO_DIED / 2] {
            assert_eq!(dog.look(&alone, &work, bad(), passed(&work), begin + later), Found::Undecided);
        }
        assert_eq!(alone.fault(), None);
        let told = error(dog.look(&alone, &work, bad(), passed(&work), begin + WHO_DIED)).unwrap();
        assert_eq!(
            told.text(),
            format!("sagellm: the network is gone\n  seen at all_reduce number 7 on npu:0\n  {GO_ON}")
        );
        assert_eq!(alone.fault(), Some(told));
        let (dog, group) = (Watchdog::default(), Three { dead: true, ..Three::default() });
        let told = error(dog.look(&group, &work, bad(), RUNS, begin));
        assert!(told.as_ref().and_then(Error::rank) == Some(2));
    }

    #[test]
    fn the_error_names_the_call_that_failed_and_not_one_that_ended_well() {
        let (dog, work, group) = (Watchdog::default(), watched(None), Three::default());
        let (first, later) = (Seen { among_others: true, ..passed(&work) }, work.issued + WHO_DIED);
        assert_eq!(
            dog.look(&group, &work, bad(), first, work.issued),
            Found::Nothing,
            "what fails would not have passed"
        );
        assert_eq!(dog.look(&group, &work, bad(), RUNS, work.issued), Found::Undecided);
        assert!(error(dog.look(&group, &work, bad(), RUNS, later)).is_some());
        // If a failed call completes by itself, each call that the device has passed may be the failed one.
        let (dog, ends) = (Watchdog::default(), Seen { hangs_when_failed: false, ..first });
        let fault = group.fault().unwrap();
        assert_eq!(dog.look(&group, &work, bad(), ends, work.issued), Found::Failed(fault));
        let (dog, group) = (Watchdog::default(), Three::default());
        assert_eq!(dog.look(&group, &work, bad(), ends, work.issued), Found::Undecided);
        let told = error(dog.look(&group, &work, bad(), ends, later)).unwrap();
        assert!(told.text().contains("seen at all_reduce number 7 on npu:0 or a later call\n"), "{told:?}");
    }

    #[test]
    fn what_a_peer_tells_of_its_failure_counts_more_than_the_error_of_the_library_and_then_who_is_missing() {
        let bad = || Library::Lives(Err(Error::system("sagellm: a remote rank failed")));
        let cause = Error::timeout("rank 1 has not entered it (reported by rank 2)");
        let told = Three { missing: Some(1), tells: Mutex::new(Some(cause.clone())), ..Three::default() };
        let work = watched(None);
        assert_eq!(Watchdog::default().look(&told, &work, bad(), RUNS, work.issued), Found::Failed(cause));
        let (dog, silent) = (Watchdog::default(), Three { missing: Some(1), ..Three::default() });
        assert_eq!(dog.look(&silent, &work, bad(), RUNS, work.issued), Found::Undecided);
        let error = error(dog.look(&silent, &work, bad(), RUNS, work.issued + WHO_DIED)).unwrap();
        assert_eq!(error.text(), "rank 1 has not entered it. The library says: sagellm: a remote rank failed");
        assert_eq!(silent.fault(), Some(error));
    }

    #[test]
    fn an_operation_that_passes_after_a_peer_has_reported_a_failure_is_not_trusted() {
        let (group, dog, work) = (Three::default(), Watchdog::default(), watched(None));
        assert_eq!(dog.look(&group, &work, WELL, passed(&work), work.issued), Found::Nothing);
        let fault = Error::timeout("rank 2 waited for too long");
        group.fail(fault.clone());
        assert_eq!(dog.look(&group, &work, WELL, passed(&work), work.issued), Found::Failed(fault));
    }

    #[test]
    fn an_operation_that_was_held_up_and_passes_waits_until_reports_of_other_hosts_were_read() {
        let (dog, work) = (Watchdog::default(), watched(None));
        let group = || Three { other_hosts: true, ..Three::default() };
        let (short, long) = (passed_after(&work, HELD_UP / 2), passed_after(&work, HELD_UP));
        let at = work.issued + HELD_UP;
        assert_eq!(dog.look(&group(), &work, WELL, short, at), Found::Nothing, "nobody's deadline can have passed");
        assert_eq!(dog.look(&Three::default(), &work, WELL, long, at), Found::Nothing, "a report is seen at once");
        let (well, failed, silent) = (group(), group(), group());
        for group in [&well, &failed, &silent] {
            assert_eq!(dog.look(group, &work, WELL, long, at), Found::Undecided);
        }
        *well.read.lock().unwrap() = true;
        assert_eq!(dog.look(&well, &work, WELL, long, at + TURN), Found::Nothing);
        failed.fail(Error::timeout("rank 2 waited for too long"));
        assert!(matches!(dog.look(&failed, &work, WELL, long, at + TURN), Found::Failed(_)));
        assert_eq!(dog.look(&silent, &work, WELL, long, at + HELD_UP), Found::Nothing, "the store does not answer");
        let hurried = Watched { timeout: HELD_UP, ..watched(None) };
        let seen = passed_after(&hurried, HELD_UP / 4);
        assert_eq!(dog.look(&group(), &hurried, WELL, seen, hurried.issued + HELD_UP / 4), Found::Undecided);
    }

    #[test]
    fn a_message_outlives_a_third_rank_that_left_in_order() {
        let dog = Watchdog::default();
        let group = Three { dead: true, left: true, ..Three::default() };
        let (other, its) = (watched(Some(1)), watched(Some(2)));
        for later in [Duration::ZERO, ON_ITS_WAY, ON_ITS_WAY * 3] {
            assert_eq!(error(dog.look(&group, &other, WELL, RUNS, other.issued + later)), None);
        }
        let first = dog.look(&group, &its, WELL, RUNS, its.issued + ON_ITS_WAY * 4);
        assert_eq!(first, Found::Nothing, "seen for the first time");
        assert!(error(dog.look(&group, &its, WELL, RUNS, its.issued + ON_ITS_WAY * 5)).is_some());
    }

    #[test]
    fn a_collective_outlives_a_rank_that_left_in_order_after_its_part() {
        let work = watched(None);
        let fails = |left, launched| {
            let (dog, group) = (Watchdog::default(), Three { dead: true, left, launched, ..Three::default() });
            assert_eq!(dog.look(&group, &work, WELL, RUNS, work.issued), Found::Nothing);
            error(dog.look(&group, &work, WELL, RUNS, work.issued + ON_ITS_WAY)).is_some()
        };
        assert!(!fails(true, Some(work.number)) && !fails(true, Some(work.number + 1)), "its part is on the way");
        assert!(fails(true, Some(work.number - 1)) && fails(true, None), "its part is missing, or not known");
        assert!(fails(false, Some(work.number)), "what had been launched when its process died may not have been sent");
    }

    #[test]
    fn a_deadline_counts_only_where_the_device_has_not_passed() {
        let (group, dog, work) = (Three::default(), Watchdog::default(), watched(None));
        let late = work.issued + Duration::from_secs(61);
        assert_eq!(error(dog.look(&group, &work, WELL, passed(&work), late)), None, "the device has passed it");
        let told = error(dog.look(&group, &work, WELL, RUNS, late)).unwrap();
        assert_eq!(told, Error::timeout("all_reduce number 7 on npu:0 timed out"));
        assert_eq!(group.fault(), Some(told));
    }

    #[test]
    fn the_group_looks_at_what_takes_long_and_at_nothing_else() {
        let (group, dog, work) = (Three::default(), Watchdog::default(), watched(None));
        for (after, looked) in [(Duration::ZERO, 0), (LONG / 2, 0), (LONG, 1), (LONG * 2, 2)] {
            assert_eq!(error(dog.look(&group, &work, WELL, RUNS, work.issued + after)), None);
            assert_eq!(*group.looked.lock().unwrap(), looked, "after {after:?}");
        }
    }

    #[test]
    fn the_reason_for_an_end_may_come_after_it() {
        let (group, dog, work) = (Three::default(), Watchdog::default(), watched(None));
        let look = || dog.look(&group, &work, Library::Ended { drained: false }, RUNS, work.issued);
        assert_eq!(look(), Found::Undecided);
        let reason = Error::aborted("shrink() was called on rank 0");
        group.fail(reason.clone());
        assert_eq!(look(), Found::Failed(reason));
    }

    #[test]
    fn what_was_drained_before_its_end_is_well_and_the_rest_was_aborted() {
        let (group, dog, work) = (Three::default(), Watchdog::default(), watched(None));
        assert_eq!(error(dog.look(&group, &work, Library::Ended { drained: true }, passed(&work), work.issued)), None);
        for (drained, seen) in [(true, RUNS), (false, passed(&work)), (false, RUNS)] {
            let dog = Watchdog::default();
            let look = |after| dog.look(&group, &work, Library::Ended { drained }, seen, work.issued + after);
            assert_eq!(look(Duration::ZERO), Found::Undecided);
            let told = error(look(ON_ITS_WAY));
            assert!(told.is_some_and(|told| told.text().contains("the communicator was aborted")));
        }
    }
}
