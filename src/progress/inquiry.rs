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
