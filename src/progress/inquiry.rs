//! The thread that answers for a rank when another rank asks what it is doing (`engine::Inquiry`). It sleeps until then:
//! a rank whose peers never wait for long never wakes it.
//!
//! It is apart from the progress thread because an answer names the line that the program is at, for which it takes the
//! interpreter's lock, and native code may keep that for minutes. It holds no lock of ours meanwhile, and nothing waits
//! for it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::domain::{Domain, Driven};
use crate::engine::Control;
use crate::error::contained;
use crate::os::event_count::WakeWords;
use crate::os::futex;

/// Between two looks at the questions where the kernel cannot watch the words of all groups.
const LOOK: Duration = Duration::from_millis(250);
/// How long the end of the process waits for an answer that is being given.
const PATIENCE: Duration = Duration::from_secs(1);

/// A question to a group, behind the object that holds it.
type Asked = (Arc<dyn Control>, u32);

/// Starts the thread of a domain, unless it runs. Without it the rank answers nothing, which its peers can live with.
pub fn start(domain: &Arc<Domain>) {
    let mut thread = domain.answering.lock().unwrap_or_else(PoisonError::into_inner);
    if thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
        return;
    }
    domain.silent.store(false, Ordering::Release);
    let theirs = Arc::clone(domain);
    *thread = crate::os::watch::spawn("sagellm-answer", move || answer(&theirs))
        .inspect_err(|error| log::warn!("cannot start the thread that tells other ranks what this one does: {error}"))
        .ok();
}

/// Ends the thread, for the end of the process. One that waits for the interpreter's lock is left behind.
pub fn stop(domain: &Domain) {
    domain.silent.store(true, Ordering::Release);
    domain.groups_changed.wake(0);
    let thread = domain.answering.lock().unwrap_or_else(PoisonError::into_inner).take();
    let until = Instant::now() + PATIENCE;
    while thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn answer(domain: &Arc<Domain>) {
    loop {
        let changed = domain.groups_changed.word().load(Ordering::Acquire);
        // What was held in the last turn has been dropped.
        domain.released.store(domain.removed.load(Ordering::Acquire), Ordering::Release);
        if domain.silent.load(Ordering::Acquire) {
            return;
        }
        // The controls and not the groups, so that this thread keeps no group alive while it sleeps.
        let mut asked: Vec<Asked> = Vec::new();
        let mut pause = Duration::from_secs(3600);
        for group in domain.groups() {
            let (next, question) = serve(&*group);
            pause = next.map_or(pause, |next| next.min(pause));
            asked.extend(question);
        }
        let words = asked.iter().filter_map(|(control, seen)| Some((control.inquiry()?.question(), *seen)));
        let mut words: Vec<_> = std::iter::once((domain.groups_changed.word(), changed)).chain(words).collect();
        let all = words.len() == 1 || words.len() <= futex::MOST && futex::watches_several();
        words.truncate(if all { futex::MOST } else { 1 });
        futex::wait(&words, if all { pause } else { LOOK.min(pause) });
    }
}

/// Looks at the questions to one group and answers them. Returns when to look at its store next, and the question that it
/// has answered. A panic does not keep the other groups from being served.
fn serve(group: &dyn Driven) -> (Option<Duration>, Option<Asked>) {
    let (mut next, mut asked) = (None, None);
    let served = contained(|| {
        next = group.look_at_board();
        let Some(control) = group.inquiry() else { return Ok(()) };
        let Some(question) = control.inquiry().map(|inquiry| inquiry.question().load(Ordering::Acquire)) else {
            return Ok(());
        };
        asked = Some((control, question)); // also where the answer panics: the same question is not tried for ever
        group.answer(question);
        Ok(())
    });
    served.unwrap_or_else(|bug| log::error!("{bug}"));
    (next, asked)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::engine::WakeAddress;
    use crate::progress::domain::{LongWait, SpinPolicy};
    use crate::progress::waits::Waits;

    /// A group whose questions are in a store.
    struct Group {
        domain: Arc<Domain>,
        looks: AtomicU32,
        panics: bool,
    }

    impl Driven for Group {
        fn drive(&self) -> bool {
            false
        }
        fn check_deadlines_and_peers(&self) {}
        fn pending(&self) -> usize {
            0
        }
        fn wake_address(&self) -> Option<WakeAddress<'_>> {
            None
        }
        fn domain(&self) -> &Arc<Domain> {
            &self.domain
        }
        fn spin_policy(&self) -> SpinPolicy {
            SpinPolicy::none()
        }
        fn shares_core(&self) -> bool {
            false
        }
        fn leave(&self) {}
        fn inquiry(&self) -> Option<Arc<dyn Control>> {
            None
        }
        fn look_at_board(&self) -> Option<Duration> {
            self.looks.fetch_add(1, Ordering::Relaxed);
            assert!(!self.panics, "a bug in one group");
            Some(Duration::from_millis(1))
        }
        fn answer(&self, _: u32) {}
        fn waits(&self, _: Option<&LongWait>) -> Option<Waits> {
            None
        }
    }

    #[test]
    fn a_panic_in_the_turn_of_one_group_keeps_no_other_from_being_served() {
        let domain = Arc::new(Domain::default());
        let groups = [true, false].map(|panics| {
            let group = Arc::new(Group { domain: Arc::clone(&domain), looks: AtomicU32::new(0), panics });
            let driven: Arc<dyn Driven> = Arc::<Group>::clone(&group);
            domain.register(&driven);
            group
        });
        start(&domain);
        let until = Instant::now() + Duration::from_secs(20);
        while groups.iter().any(|group| group.looks.load(Ordering::Relaxed) < 5) {
            assert!(Instant::now() < until, "the thread that answers has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        stop(&domain);
    }
}
