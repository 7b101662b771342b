//! Holds the calls of one launch, and puts them on a raw stream.

use std::sync::{Arc, Mutex};

use super::communicator::{Call, Message};
use super::communicators::DeviceComm;
use super::engine::DeviceEngine;
use super::launch::{Job, Launched, launch};
use super::lock;
use super::lowered::{Lowered, Placed};
use super::runtime::Stream;
use crate::error::Result;
use crate::types::Few;

/// The calls of one launch, and the host memory that the library reads for these calls.
pub(super) struct Parts {
    pub calls: Few<Lowered>,
    /// Host memory that was passed to the library. It is kept until the device has completed the calls.
    launched: Mutex<Vec<Launched>>,
}

impl Parts {
    pub fn of(calls: Few<Lowered>) -> Arc<Parts> {
        Arc::new(Parts { calls, launched: Mutex::default() })
    }

    /// Whether the library reads host memory that `launched` keeps.
    pub fn keeps_memory(&self) -> bool {
        !lock(&self.launched).is_empty()
    }

    fn keep(&self, launched: Launched) {
        if !launched.is_empty() {
            lock(&self.launched).push(launched);
        }
    }

    /// Puts the calls on a raw stream. Several calls become one launch.
    pub fn put(
        &self,
        engine: &DeviceEngine,
        communicator: &DeviceComm,
        placed: &[Placed],
        stream: Stream,
    ) -> Result<()> {
        engine.runtime.set_device(communicator.library().device())?;
        if let ([call], [place]) = (&self.calls[..], placed) {
            return self.one(engine, communicator, call, place, stream);
        }
        communicator.library().group_start()?;
        let launched = self.several(engine, communicator, placed, stream);
        // Called after an error too, because a library group that stays open would include this thread's later calls.
        let ended = communicator.library().group_end();
        launched.and(ended)
    }

    fn one(
        &self,
        engine: &DeviceEngine,
        communicator: &DeviceComm,
        call: &Lowered,
        place: &Placed,
        stream: Stream,
    ) -> Result<()> {
        let library = communicator.library();
        let (send, recv) = call.memory(place);
        let (lowering, root, factor) = (&call.lowering, call.root, place.factor);
        let job =
            Job { lowering, rank: library.rank(), ranks: library.ranks(), root, factor, send: &send, recv: &recv };
        self.keep(launch(library, &*engine.runtime, &job, stream)?);
        Ok(())
    }

    fn several(
        &self,
        engine: &DeviceEngine,
        communicator: &DeviceComm,
        placed: &[Placed],
        stream: Stream,
    ) -> Result<()> {
        let me = engine.group.rank() as u32;
        let mut messages = Vec::new();
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for (call, place) in self.calls.iter().zip(placed) {
            if !call.kind.is_p2p() {
                self.one(engine, communicator, call, place, stream)?;
                continue;
            }
            let (send, recv) = call.memory(place);
            let own = call.peer == me;
            for (sends, span) in send.iter().map(|span| (true, span)).chain(recv.iter().map(|span| (false, span))) {
                match (own, sends) {
                    _ if span.bytes == 0 => {}
                    (false, _) => messages.push(Message { peer: call.root, sends, addr: span.addr, bytes: span.bytes }),
                    (true, true) => sent.push(*span),
                    (true, false) => received.push(*span),
                }
            }
        }
        // A rank's messages to itself bypass the library. The n-th send matches the n-th receive; `begin` has checked
        // that.
        for (from, to) in sent.iter().zip(&received) {
            engine.runtime.copy(to.addr, from.addr, from.bytes, stream)?;
        }
        // All messages of an exchange are in flight at the same time, so none waits for another, whatever their order
        // on the ranks.
        if !messages.is_empty() {
            let kept = communicator.library().call(&Call::Exchange(&messages), stream)?;
            self.keep(Launched::of(kept));
        }
        Ok(())
    }
}
