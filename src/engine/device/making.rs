//! Makes communicators. A communicator is made when a call first needs it, and only one is made at a time, even if two
//! threads ask. Two ranks that exchange messages have one communicator for each direction. Both ranks make these two
//! communicators in the same order; they agree through [`Pairs`] when to begin.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::communicator::{Call, Communicator, GoOn, Message, Setup};
use super::communicators::{DeviceComm, Exchange, Ranks, patience};
use super::engine::DeviceEngine;
use super::first_use;
use super::first_use::Connected;
use super::lock;
use super::pairs::Pairs;
use super::runtime::SPARES_CAPTURES;
use super::watchdog::{ON_ITS_WAY, TURN};
use crate::error::{Error, ErrorKind, Result};
use crate::os::watch;

/// Key of the engine's stream for the bytes that connect pairs. Stream keys of calls are not negative.
const CONNECTS: i32 = -1;

/// The longest pause between two polls of the store while a rank waits for another rank that has not begun its first
/// message. The pause limits the load of the store, because every rank that waits for a late rank polls the store.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

impl DeviceEngine {
    /// Returns the communicator of these ranks for a device. If it does not exist, makes it first and waits until all
    /// its ranks have joined.
    pub fn communicator(
        self: &Arc<Self>,
        device: i32,
        ranks: Ranks,
        exchange: &dyn Exchange,
    ) -> Result<Arc<DeviceComm>> {
        let own = &self.communicators;
        if let Some(found) = own.find(device, ranks) {
            return Ok(found);
        }
        let mut pairs = lock(&own.making);
        if let Some(found) = own.find(device, ranks) {
            return Ok(found);
        }
        let (me, timeout) = (self.group.rank() as u32, self.group.timeout());
        match ranks {
            Ranks::All => own.add(device, ranks, self.make(device, ranks, exchange, timeout)?),
            Ranks::OneDirection { from, to } => {
                self.make_pair(device, if from == me { to } else { from }, exchange, timeout, &mut pairs)?;
            }
        }
        own.find(device, ranks).ok_or_else(|| Error::aborted("sagellm: the group was destroyed meanwhile"))
    }

    /// Makes the communicators for both directions of messages with `peer`. May first make communicators with other
    /// ranks that wait for this rank.
    fn make_pair(
        self: &Arc<Self>,
        device: i32,
        peer: u32,
        exchange: &dyn Exchange,
        timeout: Duration,
        pairs: &mut Option<Pairs>,
    ) -> Result<()> {
        let me = self.group.rank() as u32;
        let mut known = self.communicators.partners(device, me);
        let begin = Instant::now();
        loop {
            let next = self.next_pair(peer, &known, (begin, timeout), exchange, pairs)?;
            let (low, high) = (me.min(next), me.max(next));
            // Both ranks may begin with a send, so both directions are made together: first the direction in which the
            // lower rank sends.
            let ways = [Ranks::OneDirection { from: low, to: high }, Ranks::OneDirection { from: high, to: low }];
            let up = self.make(device, ways[0], exchange, timeout)?;
            let down = self.make(device, ways[1], exchange, timeout)?;
            for (ranks, made) in ways.into_iter().zip(self.connect_pair(device, next, [up, down], timeout)?) {
                self.communicators.add(device, ranks, made);
            }
            if next == peer {
                return Ok(());
            }
            known.push(next);
        }
    }

    /// Connects the communicators of both directions with one byte each, in the same order on both ranks. Otherwise the
    /// first message would block the host thread until the peer launches its part, and two ranks that both send first
    /// would deadlock.
    fn connect_pair(
        self: &Arc<Self>,
        device: i32,
        peer: u32,
        [up, down]: [DeviceComm; 2],
        timeout: Duration,
    ) -> Result<[DeviceComm; 2]> {
        let is_low = (self.group.rank() as u32) < peer;
        let other = u32::from(is_low);
        let communicators = [&up, &down].map(|each| Arc::clone(&each.communicator));
        let (engine, begin) = (Arc::clone(self), Instant::now());
        let connected = first_use::watched(
            &format!("the first message with rank {peer}"),
            patience(timeout),
            &|| self.may_wait_for(peer as usize, begin.elapsed(), timeout),
            move || {
                let runtime = &engine.runtime;
                runtime.set_device(device)?;
                // In this mode, allocating memory does not invalidate a capture on another thread.
                runtime.exchange_capture_mode(SPARES_CAPTURES)?;
                let (addr, stream) = (runtime.spare(device)?, engine.own_stream(device, CONNECTS)?);
                for (each, sends) in communicators.iter().zip([is_low, !is_low]) {
                    // The transfer may still be running when this returns. Later calls of the communicator are ordered
                    // behind it.
                    each.call(&Call::Exchange(&[Message { peer: other, sends, addr, bytes: 1 }]), stream)?;
                }
                Ok(())
            },
        );
        if let Err(error) = connected {
            let error = self.cause_of(error, &|| self.may_wait_for(peer as usize, begin.elapsed(), timeout).err());
            self.group.fail(error.clone());
            // Runs on a new thread, because a library may need long for the abort.
            let _ = watch::spawn("sagellm-abort", move || [up, down].iter().for_each(DeviceComm::abort));
            return Err(error);
        }
        up.connected.add_way((other, is_low));
        down.connected.add_way((other, !is_low));
        Ok([up, down])
    }

    /// Returns the rank with which this rank now makes message communicators: `peer`, or another rank that already
    /// waits for this rank. The returned rank makes them at the same time. `known`: ranks for which communicators
    /// already exist on this device.
    fn next_pair(
        &self,
        peer: u32,
        known: &[u32],
        (begin, timeout): (Instant, Duration),
        exchange: &dyn Exchange,
        pairs: &mut Option<Pairs>,
    ) -> Result<u32> {
        // Without an id, the keys of this group cannot be distinguished from those of an earlier group.
        let Some(id) = self.group.id() else { return Ok(peer) };
        let pairs = match pairs {
            Some(pairs) => pairs,
            None => {
                let place = format!("pairs/{}/{id}", self.device_type);
                pairs.insert(Pairs::new(exchange.store(), place, self.group.rank()))
            }
        };
        let may_wait = || self.may_wait_for(peer as usize, begin.elapsed(), timeout);
        let mut pause = Duration::from_micros(200);
        let next = pairs.next(peer as usize, known, &mut || {
            may_wait()?;
            std::thread::sleep(pause);
            pause = (pause * 3 / 2).min(LONGEST_PAUSE);
            Ok(())
        });
        match next {
            Ok(next) => Ok(next as u32),
            Err(error) => {
                // The rank that served the store may have died.
                let error = self.cause_of(error, &|| may_wait().err());
                if error.kind() == ErrorKind::System {
                    self.group.fail(error.clone());
                }
                Err(error)
            }
        }
    }

    /// Fails if the wait for the other rank of a pair must end.
    fn may_wait_for(&self, peer: usize, waited: Duration, timeout: Duration) -> Result<()> {
        let group = &self.group;
        let (rank, name) = (group.rank(), group.name());
        if let Some(fault) = group.fault() {
            return Err(fault);
        }
        if group.left(peer) || group.dead_ranks().contains(&peer) {
            let error = group.death_of(peer, "waits for its first message with it");
            group.fail(error.clone());
            return Err(error);
        }
        if group.interrupted() {
            return Err(Error::interrupted(format!(
                "sagellm: rank {rank} of group '{name}': interrupted in its first message with rank {peer}"
            )));
        }
        if !timeout.is_zero() && waited >= timeout {
            let error = Error::timeout(format!(
                "sagellm: rank {rank} of group '{name}' Timed out after {:.1} s in its first message with rank {peer} on \
                 {}: rank {peer} has not begun one with rank {rank}, or waits for another rank itself. Each send needs \
                 the receive of its peer",
                timeout.as_secs_f64(),
                self.device_type
            ));
            group.fail(error.clone());
            return Err(error);
        }
        Ok(())
    }

    /// Makes a communicator from an id. Returns when all its ranks have joined.
    fn make(
        self: &Arc<Self>,
        device: i32,
        ranks: Ranks,
        exchange: &dyn Exchange,
        timeout: Duration,
    ) -> Result<DeviceComm> {
        let (me, size) = (self.group.rank() as u32, self.group.size() as u32);
        let (rank, count) = match ranks {
            Ranks::All => (me, size),
            Ranks::OneDirection { from, to } => (u32::from(me > from.min(to)), 2),
        };
        let mut id = vec![0; self.capabilities().id_bytes];
        if rank == 0 {
            // Some libraries need a selected device even to make an id.
            let made = self.runtime.set_device(device).and_then(|()| self.api.unique_id());
            id = made.inspect_err(|error| self.end_the_wait_of_others(error))?;
        }
        if size > 1 {
            exchange.share(&mut id, ranks)?;
        }
        let whose = ranks.words();
        self.named(&whose, device, |name, algorithm| {
            let go_on = self.joining(&whose, ranks);
            let setup = Setup {
                id,
                rank,
                ranks: count,
                device,
                deadline: patience(timeout),
                go_on: Arc::clone(&go_on),
                name,
                algorithm,
                runtime: Arc::clone(&self.runtime),
            };
            Arc::clone(&self.api).create(setup).map_err(|error| self.cause_of(error, &|| go_on().err()))
        })
    }

    /// Makes a communicator under a unique name. The tuner finds this group's rules by that name.
    pub(super) fn named(
        &self,
        whose: &str,
        device: i32,
        make: impl FnOnce(String, String) -> Result<Arc<dyn Communicator>>,
    ) -> Result<DeviceComm> {
        // Some libraries require the same name on all ranks of a communicator. Each value of `whose` has its own
        // counter: ranks make the communicators that they have in common in the same order, but not all of their
        // communicators.
        let made = &self.communicators.made;
        let count = lock(made).entry(whose.to_string()).and_modify(|count| *count += 1).or_insert(0).to_owned();
        let group = self.group.name();
        let name = format!("sagellm:{group}:{whose}:{count}");
        let policy = self.group.policy();
        let algorithm = self.api.algorithm(policy).to_string();
        let steering = self.api.steer(&name, policy);
        let made = self.runtime.set_device(device).and_then(|()| make(name.clone(), algorithm));
        let communicator = made.inspect_err(|error| self.end_the_wait_of_others(error))?;
        if let Some(problem) = steering.as_ref().and_then(|steering| steering.problem()) {
            log::warn!("group '{group}': {problem}");
        }
        let (rank, ranks) = (communicator.rank(), communicator.ranks());
        log::info!("group '{group}': {} {device} is rank {rank} of {ranks} in '{name}'", self.device_type);
        let (ended, drained) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(DeviceComm {
            communicator,
            name,
            parts: AtomicU32::new(0),
            ended,
            drained,
            connected: Connected::default(),
            _steering: steering,
        })
    }

    /// Fails the group if this rank could not make a communicator. The communicator's other ranks may be in the
    /// library's call or wait for the id; the fault ends either wait.
    fn end_the_wait_of_others(&self, error: &Error) {
        let theirs = matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Interrupted | ErrorKind::System);
        if theirs && self.group.size() > 1 {
            self.group.fail(error.clone());
        }
    }

    /// Returns why a library call that waits for other ranks failed: the error that `look` finds, otherwise the
    /// library's own `error`. The library may notice before this rank that another rank has failed or died, but the
    /// library does not know the reason.
    pub(super) fn cause_of(&self, error: Error, look: &dyn Fn() -> Option<Error>) -> Error {
        if error.kind() != ErrorKind::System {
            return error;
        }
        let until = Instant::now() + self.group.ask_for_fault();
        loop {
            if let Some(cause) = look() {
                return cause;
            }
            if Instant::now() >= until {
                return error;
            }
            std::thread::sleep(TURN);
        }
    }

    /// Returns a function that ends the wait for the other ranks of a communicator if a signal arrived, the group has
    /// failed, or one of these ranks is gone. A rank may leave right after it has joined and made its calls, while this
    /// rank is still joining. So a rank counts as gone only `ON_ITS_WAY` after its end was first seen.
    pub(super) fn joining(&self, whose: &str, ranks: Ranks) -> GoOn {
        let (group, whose) = (Arc::downgrade(&self.group), whose.to_string());
        let gone_since = OnceCell::new();
        Arc::new(move || {
            let Some(group) = group.upgrade() else { return Ok(()) };
            if let Some(fault) = group.fault() {
                return Err(fault);
            }
            if group.interrupted() {
                let (rank, name) = (group.rank(), group.name());
                return Err(Error::interrupted(format!(
                    "sagellm: rank {rank} of group '{name}': interrupted while it joined the communicator '{whose}'"
                )));
            }
            let Some(gone) = group.dead_ranks().into_iter().find(|rank| ranks.contain(*rank)) else { return Ok(()) };
            if gone_since.get_or_init(Instant::now).elapsed() < ON_ITS_WAY {
                return Ok(());
            }
            let error = group.death_of(gone, &format!("joins the communicator '{whose}' with it"));
            group.fail(error.clone());
            Err(error)
        })
    }
}
