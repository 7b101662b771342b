//! The thread that answers for a rank when another rank asks what it is doing (`engine::Inquiry`). It sleeps until then:
//! a rank whose peers never wait for long never wakes it.
//!
//! It waits for nothing but questions: each is answered at once as far as this rank knows, and again when the place that the
//! program is at is known (`places`). Groups whose ranks share no memory are asked over their stores (`stores`).

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::domain::{Domain, Driven};
use super::{places, stores};
use crate::engine::Control;
use crate::error::contained;
use crate::os::futex;

/// Between two looks at the questions where the kernel cannot watch the words of all groups.
const LOOK: Duration = Duration::from_millis(250);
/// How long the end of the process waits for its threads that give answers.
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

/// Ends the threads that answer, for the end of the process. Those that wait for the interpreter's lock or for a store are
/// left behind.
pub fn stop(domain: &Domain) {
    domain.silent.store(true, Ordering::Release);
    let mut threads: Vec<_> =
        domain.answering.lock().unwrap_or_else(PoisonError::into_inner).take().into_iter().collect();
    threads.extend(places::stop(&domain.places));
    threads.extend(stores::stop(domain));
    domain.look_again();
    let until = Instant::now() + PATIENCE;
    while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn answer(domain: &Domain) {
    loop {
        let changed = domain.groups_changed.word().load(Ordering::Acquire);
        // What was held in the last turn has been dropped.
        domain.released.store(domain.removed.load(Ordering::Acquire), Ordering::Release);
        if domain.silent.load(Ordering::Acquire) {
            return;
        }
        // The controls and not the groups, so that this thread keeps no group alive while it sleeps.
        let asked: Vec<Asked> = domain.groups().iter().filter_map(|group| serve(&**group)).collect();
        let words = asked.iter().filter_map(|(control, seen)| Some((control.inquiry()?.question(), *seen)));
        let mut words: Vec<_> = std::iter::once((domain.groups_changed.word(), changed)).chain(words).collect();
        let all = words.len() == 1 || words.len() <= futex::MOST && futex::watches_several();
        words.truncate(if all { futex::MOST } else { 1 });
        futex::wait(&words, if all { Duration::from_secs(3600) } else { LOOK });
    }
}

/// Looks at the questions to one group and answers them. Returns the question that it has answered. A panic does not keep
/// the other groups from being served.
fn serve(group: &dyn Driven) -> Option<Asked> {
    let mut asked = None;
    let served = contained(|| {
        let Some(control) = group.inquiry() else { return Ok(()) };
        let Some(question) = control.inquiry().map(|inquiry| inquiry.question().load(Ordering::Acquire)) else {
            return Ok(());
        };
        asked = Some((control, question)); // also where the answer panics: the same question is not tried for ever
        group.answer(question);
        Ok(())
    });
    served.unwrap_or_else(|bug| log::error!("{bug}"));
    asked
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::engine::{Inquiry, WakeAddress};
    use crate::host::Host;
    use crate::progress::domain::{LongWait, SpinPolicy};
    use crate::progress::places::Asked;
    use crate::progress::waits::Waits;

    /// How a rank is kept from answering in a group.
    #[derive(Clone, Copy, PartialEq)]
    enum Trouble {
        None,
        Panics,
        /// The store in which the group's ranks ask does not answer.
        StoreIsStopped,
    }

    /// A question in shared memory, and the answers to it.
    #[derive(Default)]
    struct Words {
        question: AtomicU32,
        said: Mutex<Vec<String>>,
    }

    impl Inquiry for Words {
        fn ask(&self, _: usize) -> u32 {
            self.question.fetch_add(1, Ordering::Release) + 1
        }
        fn question(&self) -> &AtomicU32 {
            &self.question
        }
        fn answer(&self, text: &str) {
            self.said.lock().unwrap().push(text.into());
        }
        fn heard(&self, _: usize) -> String {
            self.said.lock().unwrap().last().cloned().unwrap_or_default()
        }
    }

    impl Control for Words {
        fn inquiry(&self) -> Option<&dyn Inquiry> {
            Some(self)
        }
    }

    /// Native code keeps the interpreter's lock until it is told to give it back.
    #[derive(Default)]
    struct Program(Mutex<bool>, std::sync::Condvar);

    impl Program {
        fn give_back(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_all();
        }
    }

    impl Host for Program {
        fn interrupted(&self) -> bool {
            false
        }
        fn place(&self, _: u64) -> Option<String> {
            drop(self.1.wait_while(self.0.lock().unwrap(), |free| !*free));
            Some("train.py:7".into())
        }
    }

    struct Group {
        domain: Arc<Domain>,
        host: Arc<dyn Host>,
        trouble: Trouble,
        words: Arc<Words>,
        owed: Mutex<Option<Asked>>,
        answered: AtomicU32,
        looks: AtomicU32,
    }

    impl Group {
        fn new(domain: &Arc<Domain>, host: &Arc<Program>, trouble: Trouble) -> Arc<Group> {
            let host: Arc<dyn Host> = Arc::<Program>::clone(host);
            let (words, owed) = (Arc::default(), Mutex::default());
            let (answered, looks) = (AtomicU32::new(0), AtomicU32::new(0));
            let group = Arc::new(Group { domain: Arc::clone(domain), host, trouble, words, owed, answered, looks });
            let driven: Arc<dyn Driven> = Arc::<Group>::clone(&group);
            domain.register(&driven);
            group
        }

        /// Asks as a peer does, whose wake of the shared word this stands for.
        fn ask(&self) {
            self.words.ask(0);
            futex::wake_all(&self.words.question);
        }

        fn hears(&self, text: &str) {
            let until = Instant::now() + Duration::from_secs(20);
            while self.words.heard(0) != text {
                assert!(Instant::now() < until, "{:?}, expected {text}", self.words.heard(0));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
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
            Some(Arc::<Words>::clone(&self.words))
        }
        fn store(&self) -> Option<usize> {
            Some(self.trouble as usize)
        }
        fn look_at_board(&self) -> Option<Duration> {
            self.looks.fetch_add(1, Ordering::Relaxed);
            assert!(self.trouble != Trouble::Panics, "a bug in one group");
            if self.trouble == Trouble::StoreIsStopped {
                std::thread::sleep(Duration::from_secs(3600)); // its thread is left behind
            }
            Some(Duration::from_millis(1))
        }
        fn answer(&self, question: u32) {
            assert!(self.trouble != Trouble::Panics, "a bug in one group");
            let mut owed = self.owed.lock().unwrap();
            if self.answered.swap(question, Ordering::Relaxed) != question {
                self.words.answer(&format!("{question} locked"));
                owed.get_or_insert_with(|| self.domain.ask_place(0, &self.host));
            }
            if let Some(place) = owed.as_ref().and_then(Asked::place) {
                *owed = None;
                self.words.answer(&format!("{question} at {}", place.unwrap()));
            }
        }
        fn waits(&self, _: Option<&LongWait>) -> Option<Waits> {
            None
        }
    }

    #[test]
    fn what_keeps_one_group_from_its_answer_keeps_no_other_from_being_served() {
        let (domain, program) = (Arc::new(Domain::default()), Arc::new(Program::default()));
        let troubles = [Trouble::Panics, Trouble::StoreIsStopped, Trouble::None, Trouble::None];
        let groups = troubles.map(|trouble| Group::new(&domain, &program, trouble));
        start(&domain);
        for trouble in [Trouble::Panics, Trouble::StoreIsStopped, Trouble::None] {
            stores::start(&domain, trouble as usize);
        }
        groups.iter().for_each(|group| group.ask());
        // The interpreter's lock is kept: every group says so, the one that was asked last as well.
        groups[1..].iter().for_each(|group| group.hears("1 locked"));
        groups[3].ask();
        groups[3].hears("2 locked");
        program.give_back();
        for (group, text) in groups[1..].iter().zip(["1 at train.py:7", "1 at train.py:7", "2 at train.py:7"]) {
            group.hears(text);
        }
        let until = Instant::now() + Duration::from_secs(20);
        while groups.iter().any(|group| {
            let looks = group.looks.load(Ordering::Relaxed);
            looks < if group.trouble == Trouble::None { 5 } else { 1 }
        }) {
            assert!(Instant::now() < until, "a store was not looked at");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(groups[1].looks.load(Ordering::Relaxed), 1, "it still waits for its store");
        stop(&domain);
    }
}
