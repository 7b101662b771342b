//! One process group: sequence numbers, signatures, deadlines, faults, and the group's end.
//!
//! Both `run` and `issue` call `start`, which checks an operation, gives it the group's next number and passes it to
//! the engine. The engine is driven under the group's lock (`progress::driver`). The ends of operations are reported to
//! their owners outside that lock, because an owner may then issue further operations. The first fault poisons the
//! group here and on the peers: all pending and later operations fail with it.
//!
//! `builder` makes a group. `handle` is an operation as its caller holds it. `check` refuses inconsistent calls.
//! `counters` numbers the operations. `faults` records why the group is unusable, and names ranks that ended. `role`
//! says whether the program or another group created the group. `external` has the operations that no engine runs,
//! `launches` the signatures of launches on devices, and `extensions` the timeouts. `barrier` is the monitored barrier.
//! `explain` (with `estimate`) serves explanations and statistics. `ties` ties the group to its process and to its
//! peers' processes, and `waiters` says how threads wait for the group. Lower layers see the group only through a
//! trait: the diagnosis of hangs (`crate::hang`) through `subject`, the device engine through `devices`, and the
//! threads of a group over several hosts through `lanes`. `local` makes groups of threads, for tests.

mod barrier;
mod builder;
mod check;
mod counters;
mod devices;
mod estimate;
mod explain;
mod extensions;
mod external;
mod faults;
mod handle;
mod lanes;
mod launches;
#[cfg(feature = "testing")]
mod local;
mod role;
mod subject;
mod ties;
mod waiters;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;

use self::counters::Counters;
pub use self::explain::{NAMES, StartRule, explain_without_group, start_rule, table_without_group};
use self::extensions::{Extensions, Owner, Timeouts};
use self::external::Externals;
pub use self::external::{Carrier, ExternalOp};
use self::faults::Faults;
pub use self::handle::Op;
use self::launches::Launches;
use self::ties::Ties;
use self::waiters::Waiters;
use crate::config::Config;
use crate::engine::{Control, Ended, Engine, Polled, WakeAddress};
use crate::error::{Error, GO_ON, Result, contained, laid_out};
use crate::hang;
use crate::hang::Watch;
use crate::hang::channel::Member;
use crate::hang::responder::Responder;
use crate::hang::waiting::Waiting;
use crate::host::NoSignals;
pub use crate::host::{Completion, Host, Store};
pub use crate::op::Op as CoreOp;
use crate::op::signature;
use crate::os::{clock, watch};
use crate::progress::domain::{Domain, Driven, SpinPolicy};
use crate::progress::driver;
use crate::progress::driver::Outcome;
use crate::select::Policy;
use crate::stats::Stats;
use crate::threads;
use crate::threads::Helpers;
use crate::types::Request;

/// The state that the group's lock protects.
struct Inner {
    engine: Box<dyn Engine>,
    counters: Counters,
    stats: Stats,
    external: Externals,
    extensions: Extensions,
}

pub struct Group {
    config: Config,
    /// The domain of all groups of this rank. A thread that waits drives all of them.
    domain: Arc<Domain>,
    /// A random number that is equal on all ranks; zeros if the ranks held no rendezvous.
    id: [u8; 16],
    ties: Ties,
    waiters: Waiters,
    /// The part of the engine that is used without the group's lock.
    control: Arc<dyn Control>,
    /// How algorithms are chosen. If the ranks held a rendezvous, this is rank 0's policy.
    policy: Arc<Policy>,
    host: Arc<dyn Host>,
    faults: Faults,
    inner: Mutex<Inner>,
    /// Number of operations that have not ended. Incremented under the lock of `inner`, decremented after that lock was
    /// released. Any thread reads it as a hint (relaxed).
    pending: AtomicUsize,
    /// Number of the last collective. Written under the lock of `inner`, read without it. Relaxed, because it guards no
    /// other data.
    last_number: AtomicU64,
    launches: Launches,
    timeouts: Timeouts,
    /// Number of monitored barriers that this rank has entered.
    monitored: AtomicU64,
    /// Asks the other ranks about operations that wait for long, and answers their questions.
    watch: Arc<Watch>,
    /// A reference to the group itself, which the operations that the group returns need.
    this: Weak<Group>,
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // If a thread panicked under the lock, the group has failed but can still be ended.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The group's id (the field `id`) in hexadecimal, for keys in the store.
    pub fn id(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Why another backend serves the whole group; `None` if none does.
    pub fn delegate_reason(&self) -> Option<String> {
        self.lock().engine.delegate_reason().map(str::to_string)
    }

    pub fn describe(&self) -> String {
        let (rank, size, name) = (self.config.rank, self.config.size, &self.config.name);
        let engine = self.lock().engine.describe();
        format!("group '{name}' rank {rank} of {size}: {engine}{}", self.waiters.describe(&*self.control))
    }

    /// Starts an operation. Never waits for a peer.
    pub fn issue(&self, request: Request, completion: Option<Box<dyn Completion>>) -> Result<Arc<Op>> {
        let core = self.start(request, completion)?;
        if !core.is_done() {
            self.waiters.helpers.iter().for_each(Helpers::note_issue);
            driver::issued(&self.domain);
        }
        Ok(Arc::new(Op { core, group: self.this.upgrade().expect("a group that is used is alive") }))
    }

    /// Starts an operation and completes it on this thread.
    pub fn run(&self, request: Request, completion: Option<Box<dyn Completion>>) -> Result<()> {
        let _lending = self.helpers().map(threads::lend);
        let core = self.start(request, completion)?;
        if core.is_done() {
            return core.outcome(); // usual on the rank that enters last; waiting would read the clock
        }
        let error = match contained(|| Ok(driver::wait_until(self, &*self.host, None, || core.is_done()))) {
            Ok(Outcome::Done) => return core.outcome(),
            Ok(_) => Error::interrupted(format!(
                "sagellm: rank {} was interrupted in {} number {} of group '{}'",
                self.config.rank, core.request.kind, core.number, self.config.name
            )),
            Err(bug) => bug,
        };
        // The caller gets an error and may free the tensors, so the group cannot continue this operation.
        self.poison(error.clone());
        if self.waiters.has_threads {
            // A thread of the engine may be in the middle of a copy. `poison` has ended everything that the engine's
            // thread waits for.
            driver::wait_until(self, &NoSignals, None, || core.is_done());
        }
        Err(error)
    }

    fn start(&self, request: Request, completion: Option<Box<dyn Completion>>) -> Result<Arc<CoreOp>> {
        self.usable(request.kind.name())?;
        let place = (self.config.rank, self.config.size);
        check::validate(&request, place)?;
        let kernel = check::kernel(&request, self.config.size)?;
        let mut timeout = Duration::from_millis(request.timeout_ms.unwrap_or_else(|| self.timeouts.milliseconds()));
        let signature = signature::of(&request, self.config.size);
        let mut ended = Ended::new();
        let mut guard = self.lock();
        self.faults.standing()?; // the group may have failed while this thread waited for the lock
        let inner = &mut *guard;
        let extends = self.timeouts.extends();
        if extends {
            timeout = self.timeouts.extended(&mut inner.extensions, |id| inner.external.get(id).is_some(), timeout);
        }
        let number = inner.counters.next(request.kind, request.root);
        let op = Arc::new(CoreOp::new(request, number, signature, timeout, completion));
        if extends {
            inner.extensions.own(Owner::Op(Arc::downgrade(&op)));
        }
        if !op.request.kind.is_p2p() {
            self.last_number.store(number, Ordering::Relaxed);
        }
        self.pending.fetch_add(1, Ordering::Relaxed);
        self.domain.add_pending(1);
        inner.stats.issued(&op);
        let begun = contained(|| inner.engine.submit(Arc::clone(&op), kernel, &mut ended));
        if !contains(&ended, &op) {
            match &begun {
                // The operation failed before the engine took it, so the engine will not end it.
                Err(fault) if !inner.engine.holds(&op) => ended.push((Arc::clone(&op), Err(fault.clone()))),
                _ => op.timing.set_blocked(),
            }
        }
        let at = inner.record_end(&ended);
        drop(guard);
        self.tell_owners(ended, at);
        if let Err(fault) = begun {
            self.poison(fault);
        }
        Ok(op)
    }

    /// Records operations that a thread of the engine has ended, and reports the ends to their owners.
    fn finish(&self, ended: Ended) {
        let at = self.lock().record_end(&ended);
        self.tell_owners(ended, at);
    }

    /// Reports to the owners that their operations ended at time `at` (`Inner::record_end`). Must not be called under
    /// the lock.
    fn tell_owners(&self, ended: Ended, at: Option<u64>) {
        let Some(at) = at else { return };
        self.pending.fetch_sub(ended.len(), Ordering::Relaxed);
        self.domain.remove_pending(ended.len());
        for (op, outcome) in ended {
            // If one owner's code panics, the other owners must still get their reports.
            let told = contained(|| {
                op.end(outcome, at);
                Ok(())
            });
            told.unwrap_or_else(|bug| log::error!("{bug}"));
        }
        // Other threads of this rank may sleep while they wait for one of these operations.
        self.domain.announce_ended();
    }

    /// Fails in a forked child, which must not use its parent's group: threads that do not exist in the child may hold
    /// the locks.
    pub fn not_forked(&self) -> Result<()> {
        if self.ties.is_inherited() {
            return Err(Error::invalid(
                "sagellm: a forked child cannot use its parent's process group. Start the child with the 'spawn' method"
                    .to_string(),
            ));
        }
        Ok(())
    }

    /// Fails if no new operation may start. Must not be called under the lock, because this function fails the group if
    /// it finds a fault.
    fn usable(&self, what: &str) -> Result<()> {
        self.not_forked()?;
        self.faults.standing()?;
        if self.control.is_poisoned() {
            // A peer has announced a fault, and this rank had no pending operation in which it would have seen the
            // fault: the failed operation had already succeeded here, or this rank has not called it yet.
            let fault = self.reported(None).unwrap_or_else(|| Error::aborted("sagellm: the group failed"));
            self.poison(fault.clone());
            return Err(fault);
        }
        if self.faults.any_dead()
            && self.pending.load(Ordering::Relaxed) == 0
            && let Some(fault) = self.faults.death_before(what)
        {
            self.poison(fault.clone());
            return Err(fault);
        }
        Ok(())
    }

    pub fn sequence(&self) -> u64 {
        self.last_number.load(Ordering::Relaxed) + self.launches.number()
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.timeouts.set(timeout);
    }

    /// Adds `more` to the timeouts of operations issued from now on, until the first of these operations has ended.
    pub fn add_ephemeral_timeout(&self, more: Duration) {
        self.timeouts.extend(&mut self.lock().extensions, more);
    }

    /// The group's fault, if it has failed.
    pub fn fault(&self) -> Option<Error> {
        self.faults.first().cloned()
    }

    /// The fault that a peer reported, as an error of this rank. With `engine`, the error names the operation of this
    /// rank that the fault ends.
    fn reported(&self, engine: Option<&dyn Engine>) -> Option<Error> {
        self.faults.reported(|| self.watch.store()?.told(), engine)
    }

    /// Called by the thread that watches processes.
    fn peer_ended(&self, rank: usize) {
        self.faults.peer_ended(rank);
        self.domain.announce_work();
    }

    /// The other ranks on this host that this rank watches, and for each of them whether it has died or left the group.
    pub fn watched(&self) -> Vec<(usize, bool)> {
        self.faults.watched()
    }

    /// Whether the group has failed, or a call of its delegate has. A failed delegate call sets no fault, because the
    /// group's own engine may continue.
    pub fn has_failed(&self) -> bool {
        self.faults.has_failed()
    }

    /// Fails everything that is pending here and on the peers. Does nothing in a forked child, because the group
    /// belongs to the parent.
    pub fn abort(&self, reason: &str) {
        if self.not_forked().is_err() {
            return;
        }
        let reason = if reason.is_empty() { "abort was called" } else { reason };
        let head = format!("rank {} aborted group '{}': {reason}", self.config.rank, self.config.name);
        self.poison(Error::aborted(laid_out(&head, &[], GO_ON)));
    }

    /// Leaves the group in order: published data stays readable for the peers, and pending operations fail.
    pub fn shutdown(&self) {
        if self.not_forked().is_err() || self.faults.close() {
            return;
        }
        let destroyed = Error::aborted(format!(
            "sagellm: group '{}' was destroyed on rank {} while the operation was pending",
            self.config.name, self.config.rank
        ));
        let times = self.times_to_keep();
        self.faults.await_announced();
        self.control.leave(&destroyed, &|| self.host.interrupted());
        self.fail_all(&destroyed);
        if let Some(driven) = self.this.upgrade() {
            let driven: Arc<dyn Driven> = driven;
            self.domain.unregister(&driven);
        }
        let member: Arc<dyn Member> = Arc::<Watch>::clone(&self.watch);
        self.watch.responder().remove(&member);
        self.ties.let_go();
        // Last, because a file system may block this thread.
        if let Some((alike, times)) = times {
            alike.save(times);
        }
    }

    fn fail_all(&self, error: &Error) {
        let mut inner = self.lock();
        let ended: Ended = inner.engine.take_pending(error).into_iter().map(|op| (op, Err(error.clone()))).collect();
        let at = inner.record_end(&ended);
        drop(inner);
        self.tell_owners(ended, at);
    }

    /// Sets the group's fault, unless the group has one, and announces the fault to the peers. Then all pending
    /// operations fail with the group's fault.
    fn poison(&self, error: Error) {
        let first = self.faults.set(error.clone());
        if first {
            let (name, rank) = (&self.config.name, self.config.rank);
            log::debug!("group '{name}' rank {rank} failed: {}", error.in_one_line());
            self.control.announce(&error);
            self.faults.set_announced();
            if let Some(store) = self.watch.store() {
                store.look_again(); // so that the thread that reads the store publishes the fault
            }
        }
        // If another thread has set its fault first, the pending operations fail with that fault.
        let fault = self.faults.first().unwrap_or(&error);
        self.fail_all(fault);
        if first {
            self.dump_records();
        }
    }
}

fn contains(ended: &Ended, op: &Arc<CoreOp>) -> bool {
    ended.iter().any(|(done, _)| Arc::ptr_eq(done, op))
}

impl Inner {
    /// Adds operations that ended to the statistics, before the ends are reported to their owners. Returns the time of
    /// their end, or `None` if there are none.
    fn record_end(&mut self, ended: &Ended) -> Option<u64> {
        if ended.is_empty() {
            return None;
        }
        let at = clock::stamp();
        self.stats.ended(ended, at);
        Some(at)
    }
}

impl Group {
    /// Makes one pass over the engine, with the lock held. Returns true if something advanced. An error is the group's
    /// fault.
    fn advance(&self, engine: &mut dyn Engine, ended: &mut Ended) -> Result<bool> {
        if engine.poll(ended)? {
            return Ok(true);
        }
        // This check comes before the one for ended peers: a rank that has reported a fault and then left has left
        // because of that fault.
        if self.control.is_poisoned() {
            return self.reported(Some(engine)).map_or(Ok(true), Err);
        }
        if self.faults.any_dead() || self.control.has_leavers() {
            self.faults.of_ended_peers(engine, ended).map_or(Ok(()), Err)?;
        }
        Ok(!ended.is_empty())
    }

    /// With the lock held: fails if a rank that ended is still needed. Returns the operation with the next deadline.
    fn look_at_peers(&self, engine: &mut dyn Engine, ended: &mut Ended) -> Result<Option<Arc<CoreOp>>> {
        if !self.control.is_poisoned() {
            self.faults.of_ended_peers(engine, ended).map_or(Ok(()), Err)?; // `drive` handles a reported fault
        }
        Ok(engine.next_deadline())
    }

    /// Without the lock: fails if the deadline of an operation has passed. If the operation has waited for long, asks
    /// the other ranks about it.
    fn look_at_deadline(&self, op: &Arc<CoreOp>, now: u64) -> Result<()> {
        let waiting = Waiting::of(op, now);
        if now < op.deadline {
            self.watch.look(self, &waiting, now);
            return Ok(());
        }
        let late = self.watch.late(self, &waiting, now);
        if op.is_done() { Ok(()) } else { Err(late) } // it may have ended while the text was made
    }
}

impl Driven for Group {
    fn drive(&self) -> bool {
        if self.waiters.has_threads {
            let polled = contained(|| Ok(self.control.poll(Duration::ZERO)));
            return polled.map_or_else(
                |bug| {
                    self.poison(bug);
                    true
                },
                |polled| polled == Polled::Advanced,
            );
        }
        let mut inner = match self.inner.try_lock() {
            Ok(inner) => inner,
            // Another thread is driving or issuing. It releases the lock after one pass.
            Err(TryLockError::WouldBlock) => return false,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        if !inner.engine.has_pending() {
            return false;
        }
        let mut ended = Ended::new();
        let moved = contained(|| self.advance(&mut *inner.engine, &mut ended));
        if matches!(moved, Ok(false)) {
            inner.stats.catch_up();
        }
        let at = inner.record_end(&ended);
        drop(inner);
        self.tell_owners(ended, at);
        moved.unwrap_or_else(|fault| {
            self.poison(fault);
            true
        })
    }

    fn rest(&self, pause: Duration) -> Polled {
        if !self.waiters.has_threads {
            return Polled::Elsewhere;
        }
        contained(|| Ok(self.control.poll(pause))).unwrap_or_else(|bug| {
            self.poison(bug);
            Polled::Advanced
        })
    }

    fn check_deadlines_and_peers(&self) {
        let now = clock::now();
        let mut inner = self.lock();
        let mut ended = Ended::new();
        let next = contained(|| self.look_at_peers(&mut *inner.engine, &mut ended));
        let at = inner.record_end(&ended);
        drop(inner);
        self.tell_owners(ended, at);
        let looked = next.and_then(|next| match next {
            Some(op) => contained(|| self.look_at_deadline(&op, now)),
            None => Ok(()),
        });
        if let Err(fault) = looked {
            self.poison(fault);
        }
    }

    fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }
    fn wake_address(&self) -> Option<WakeAddress<'_>> {
        self.control.wake_address()
    }
    fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }
    fn helpers(&self) -> Option<Helpers> {
        self.waiters.helpers.clone()
    }

    fn spin_policy(&self) -> SpinPolicy {
        self.waiters.spins(&*self.control)
    }
    fn waited(&self, took: Duration) {
        self.waiters.waited(took);
    }
    fn shares_core(&self) -> bool {
        self.control.shares_core()
    }
    fn leave(&self) {
        self.shutdown();
    }
    fn count_long_wait(&self, thread: u64, more: bool) {
        self.watch.count_long_wait(thread, None, more);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.ties.is_inherited() || self.faults.is_closed() {
            return;
        }
        // Pending operations must be removed from the domain's count, and their owners must get a report.
        let dropped = Error::aborted(format!("sagellm: group '{}' was dropped", self.config.name));
        self.faults.await_announced();
        self.control.leave(&dropped, &|| self.host.interrupted());
        self.fail_all(&dropped);
        self.watch.responder().look_again();
    }
}

/// Ends the core's threads in this process. Groups that are still open leave in order.
pub fn at_exit() {
    // In a forked child, only groups and threads that the child itself has made are in these lists.
    for domain in Domain::all() {
        // Newest first, because a group over several hosts is made after the groups inside its host, which it uses.
        domain.groups().iter().rev().for_each(|group| group.leave());
        driver::stop(&domain);
    }
    Responder::all().iter().for_each(|responder| hang::stop(responder));
    watch::stop();
}
