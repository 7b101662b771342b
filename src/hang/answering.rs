//! The thread that answers for a rank when a peer asks, through shared memory, what the rank is doing. It sleeps until
//! a question arrives. If no peer ever waits for long, no question wakes it.
//!
//! It waits only for questions. It answers each question immediately with what this rank knows, and again when `places`
//! has found where the program is. Ranks that share no memory are asked through their store (`store_threads`).

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::channel::{Channel, Member};
use super::responder::Responder;
use super::{places, store_threads};
use crate::error::contained;
use crate::os::{futex, watch};

/// If the kernel cannot wait on the words of all groups in one call, the thread checks for questions at this interval.
const LOOK: Duration = Duration::from_millis(250);
/// How long the end of the process waits for the threads that answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Starts the answering thread, unless it already runs. If it cannot be started, the rank answers no questions, and its
/// peers must do without answers.
pub fn start(responder: &Arc<Responder>) {
    let mut thread = responder.thread.lock().unwrap_or_else(PoisonError::into_inner);
    if thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
        return;
    }
    responder.stopping.store(false, Ordering::Release);
    let theirs = Arc::clone(responder);
    *thread = watch::spawn("sagellm-answer", move || answer(&theirs))
        .inspect_err(|error| log::warn!("cannot start the thread that tells other ranks what this one does: {error}"))
        .ok();
}

/// Ends the answering threads at the end of the process. Waits at most `PATIENCE`, because a thread may be blocked by
/// the interpreter's lock or by a store.
pub fn stop(responder: &Responder) {
    responder.stopping.store(true, Ordering::Release);
    let mut threads: Vec<_> =
        responder.thread.lock().unwrap_or_else(PoisonError::into_inner).take().into_iter().collect();
    threads.extend(places::stop(&responder.places));
    threads.extend(store_threads::stop(responder));
    responder.look_again();
    let until = Instant::now() + PATIENCE;
    while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The channel of a group, and the number of the last question to it.
type Question = (Arc<dyn Channel>, u32);

fn answer(responder: &Responder) {
    loop {
        let changed = responder.changed.word().load(Ordering::Acquire);
        // By now this thread has dropped the references to removed groups that the previous iteration held.
        responder.released.store(responder.removed.load(Ordering::Acquire), Ordering::Release);
        if responder.stopping.load(Ordering::Acquire) {
            return;
        }
        // Holds channels, not groups, so that this thread keeps no group alive while it sleeps.
        let asked: Vec<Question> = responder.members().iter().filter_map(|member| serve(&**member)).collect();
        let words = asked.iter().filter_map(|(channel, seen)| Some((channel.memory()?.question(), *seen)));
        let mut words: Vec<_> = std::iter::once((responder.changed.word(), changed)).chain(words).collect();
        let all = words.len() == 1 || words.len() <= futex::MOST && futex::watches_several();
        words.truncate(if all { futex::MOST } else { 1 });
        futex::wait(&words, if all { Duration::from_secs(3600) } else { LOOK });
    }
}

/// Reads the last question to one group, answers it and returns it. Catches a panic, so that the other groups are still
/// served.
fn serve(me: &dyn Member) -> Option<Question> {
    let channel = me.channel()?;
    let memory = channel.memory()?;
    let question = memory.question().load(Ordering::Acquire);
    let served = contained(|| {
        memory.reply(me, question);
        Ok(())
    });
    served.unwrap_or_else(|bug| log::error!("{bug}"));
    Some((channel, question)) // also after a panic, so that this question is not retried for ever
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::engine::Told;
    use crate::error::Error;
    use crate::hang::channel::{LongWait, MemoryChannel, StoreAccess};
    use crate::hang::monitor::Watched;
    use crate::hang::places::Asked;
    use crate::hang::query::Participant;
    use crate::hang::reply::Speaker;
    use crate::hang::status::{Status, Waits};
    use crate::hang::store_keys::{Outcome, QueryResult};
    use crate::host::Host;

    /// What keeps a rank from answering in a group.
    #[derive(Clone, Copy, PartialEq)]
    enum Trouble {
        None,
        Panics,
        /// The store through which the group's ranks ask does not respond.
        StoreIsStopped,
    }

    /// The last question to one group, and the answers to it.
    struct Words {
        trouble: Trouble,
        host: Arc<dyn Host>,
        responder: Arc<Responder>,
        question: AtomicU32,
        said: Mutex<Vec<String>>,
        owed: Mutex<Option<Asked>>,
        answered: AtomicU32,
        looks: AtomicU32,
        left: AtomicU32,
    }

    impl Words {
        /// Asks as a peer would. A peer would wake the word in shared memory in the same way.
        fn ask(&self) {
            self.question.fetch_add(1, Ordering::Release);
            futex::wake_all(&self.question);
        }

        fn say(&self, text: String) {
            self.said.lock().unwrap().push(text);
        }

        fn said(&self) -> String {
            self.said.lock().unwrap().last().cloned().unwrap_or_default()
        }

        fn hears(&self, text: &str) {
            let until = Instant::now() + Duration::from_secs(20);
            while self.said() != text {
                assert!(Instant::now() < until, "{:?}, expected {text}", self.said());
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    impl Channel for Words {
        fn has_all(&self, _: &Watched) -> bool {
            false
        }
        fn takes(&self, _: Duration) -> Duration {
            Duration::ZERO
        }
        fn memory(&self) -> Option<&dyn MemoryChannel> {
            Some(self)
        }
        fn store(&self) -> Option<&dyn StoreAccess> {
            Some(self)
        }
    }

    impl StoreAccess for Words {
        fn connection(&self) -> usize {
            self.trouble as usize
        }
        fn leave(&self, _: usize) {
            self.left.fetch_add(1, Ordering::Relaxed);
        }
        fn look(&self, _: &dyn Member) -> Option<Duration> {
            self.looks.fetch_add(1, Ordering::Relaxed);
            assert!(self.trouble != Trouble::Panics, "a bug in one group");
            if self.trouble == Trouble::StoreIsStopped {
                std::thread::sleep(Duration::from_secs(3600)); // blocks for ever, so `stop` leaves this thread behind
            }
            Some(Duration::from_millis(1))
        }
        fn look_again(&self) {}
        fn obstacle(&self) -> Option<String> {
            None
        }
        fn ask_for_fault(&self) {}
        fn had_no_fault_at(&self, _: Instant) -> bool {
            true
        }
        fn has_published(&self) -> bool {
            true
        }
        fn told(&self) -> Option<Told> {
            None
        }
    }

    impl MemoryChannel for Words {
        fn ask(&self, _: usize) -> u32 {
            unreachable!("the test asks by itself")
        }
        fn answer(&self, _: usize, _: u32) -> Option<Status> {
            unreachable!("the test reads the answers by itself")
        }
        fn question(&self) -> &AtomicU32 {
            &self.question
        }
        fn reply(&self, me: &dyn Speaker, question: u32) {
            assert!(self.trouble != Trouble::Panics, "a bug in one group");
            let mut owed = self.owed.lock().unwrap();
            if self.answered.swap(question, Ordering::Relaxed) != question {
                self.say(format!("{question} locked"));
                owed.get_or_insert_with(|| me.ask(0));
            }
            if let Some(place) = owed.as_ref().and_then(Asked::place) {
                *owed = None;
                self.say(format!("{question} at {}", place.unwrap()));
            }
        }
    }

    /// A program in which native code holds the interpreter's lock until `give_back`.
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

    /// A group in which nothing is pending.
    struct Group(Arc<Words>);

    impl Group {
        fn new(responder: &Arc<Responder>, program: &Arc<Program>, trouble: Trouble) -> Arc<Group> {
            let (host, responder_of): (Arc<dyn Host>, _) = (Arc::<Program>::clone(program), Arc::clone(responder));
            let [question, answered, looks, left] = [0; 4].map(AtomicU32::new);
            let (said, owed) = (Mutex::default(), Mutex::default());
            let words = Words { trouble, host, responder: responder_of, question, said, owed, answered, looks, left };
            let group = Arc::new(Group(Arc::new(words)));
            let member: Arc<dyn Member> = Arc::<Group>::clone(&group);
            responder.add(&member);
            group
        }
    }

    impl Speaker for Group {
        fn status(&self, _: u32) -> (Status, u64) {
            unreachable!("its channel does not ask for it")
        }
        fn ask(&self, thread: u64) -> Asked {
            self.0.responder.ask_place(thread, &self.0.host)
        }
    }

    impl Participant for Group {
        fn speaker(&self) -> &dyn Speaker {
            self
        }
        fn rank(&self) -> usize {
            0
        }
        fn ranks(&self) -> usize {
            1
        }
        fn concerned(&self, _: &QueryResult) -> Vec<usize> {
            Vec::new()
        }
        fn receive(&self, _: &Outcome) {}
    }

    impl Member for Group {
        fn id(&self) -> u64 {
            0
        }
        fn channel(&self) -> Option<Arc<dyn Channel>> {
            Some(Arc::<Words>::clone(&self.0))
        }
        fn waits(&self, _: Option<&LongWait>) -> Option<Waits> {
            None
        }
        fn waits_long(&self) -> bool {
            false
        }
        fn look_external(&self) {}
        fn timeout(&self) -> Duration {
            Duration::ZERO
        }
        fn fault(&self) -> Option<Error> {
            None
        }
        fn has_ended(&self) -> bool {
            false
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "starts a thread that blocks signals, which Miri lacks")]
    fn the_keys_of_a_group_are_removed_after_its_end_while_another_group_uses_the_store() {
        let (responder, program) = (Arc::new(Responder::default()), Arc::new(Program::default()));
        let groups = [(); 3].map(|()| Group::new(&responder, &program, Trouble::None));
        store_threads::start(&responder, Trouble::None as usize);
        let remove = |group: &Arc<Group>| responder.remove(&(Arc::<Group>::clone(group) as Arc<dyn Member>));
        let left = || groups.each_ref().map(|group| group.0.left.load(Ordering::Relaxed));
        let wait = |holds: &dyn Fn() -> bool| {
            let until = Instant::now() + Duration::from_secs(20);
            while !holds() {
                assert!(Instant::now() < until, "{:?}", left());
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        remove(&groups[0]);
        wait(&|| left()[0] == 1);
        // The last groups end together, as at the end of a program.
        remove(&groups[1]);
        remove(&groups[2]);
        wait(&|| responder.store_threads.lock().unwrap().is_empty());
        assert_eq!(left(), [1, 0, 0]);
        assert!(groups.iter().all(|group| Arc::strong_count(&group.0) == 1), "nothing keeps a store alive");
    }

    #[test]
    #[cfg_attr(miri, ignore = "starts a thread that blocks signals, which Miri lacks")]
    fn what_keeps_one_group_from_its_answer_keeps_no_other_from_being_served() {
        let (responder, program) = (Arc::new(Responder::default()), Arc::new(Program::default()));
        let troubles = [Trouble::Panics, Trouble::StoreIsStopped, Trouble::None, Trouble::None];
        let groups = troubles.map(|trouble| Group::new(&responder, &program, trouble));
        start(&responder);
        for trouble in [Trouble::Panics, Trouble::StoreIsStopped, Trouble::None] {
            store_threads::start(&responder, trouble as usize);
        }
        let words: Vec<&Words> = groups.iter().map(|group| &*group.0).collect();
        words.iter().for_each(|group| group.ask());
        // The interpreter's lock is held, and the answer of every group says so, including that of the group asked
        // last.
        words[1..].iter().for_each(|group| group.hears("1 locked"));
        words[3].ask();
        words[3].hears("2 locked");
        program.give_back();
        for (group, text) in words[1..].iter().zip(["1 at train.py:7", "1 at train.py:7", "2 at train.py:7"]) {
            group.hears(text);
        }
        let until = Instant::now() + Duration::from_secs(20);
        while words.iter().any(|group| {
            let looks = group.looks.load(Ordering::Relaxed);
            looks < if group.trouble == Trouble::None { 5 } else { 1 }
        }) {
            assert!(Instant::now() < until, "a store was not looked at");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(words[1].looks.load(Ordering::Relaxed), 1, "it still waits for its store");
        stop(&responder);
    }
}
