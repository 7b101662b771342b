//! Begins a call on a device: checks and lowers it, finds its communicator, and takes its number.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use once_cell::sync::OnceCell;

use super::call::{DeviceCall, Numbers, Stage};
use super::communicators::{Exchange, Ranks};
use super::engine::DeviceEngine;
use super::group::{Counted, DeviceRequest, Terms, Watched};
use super::layout::Layout;
use super::lowered::Lowered;
use super::lowering::{LoweringInput, lower};
use super::parts::Parts;
use super::rules;
use crate::error::{Error, Result};
use crate::types::{Few, Kind};

impl DeviceEngine {
    /// Checks and lowers the calls of one launch, finds their communicator, and takes their numbers. The first call
    /// that needs a communicator waits until all ranks of the communicator have called; later calls do not wait. If
    /// this fails, nothing was sent.
    pub fn begin(
        self: &Arc<Self>,
        calls: &[DeviceRequest<'_>],
        terms: &Terms,
        exchange: &dyn Exchange,
    ) -> Result<DeviceCall> {
        let first = calls.first().ok_or_else(|| Error::bug("sagellm: a launch of no calls"))?;
        self.check(calls, terms)?;
        let ranks = self.ranks_of(first, terms.region);
        let lowered = calls.iter().map(|call| self.lower(call, ranks)).collect::<Result<Few<Lowered>>>()?;
        if terms.capturing && !self.communicators.has(terms.device, ranks) {
            return Err(Error::invalid(format!(
                "sagellm {}: the current stream of {} is being captured into a graph, and the group has no communicator \
                 for it yet; make one such call before the capture",
                first.name,
                self.place(terms.device)
            )));
        }
        let communicator = self.communicator(terms.device, ranks, exchange)?;
        let (numbers, notes) = self.count(calls)?;
        let watched = Watched {
            op: Arc::clone(&lowered[0].name),
            kind: first.asked.kind,
            number: numbers.last,
            device: self.place(terms.device),
            peer: first.asked.kind.is_p2p().then_some(first.root),
            with_peer_alone: ranks != Ranks::All,
            issued: Instant::now(),
            timeout: self.group.timeout_of_call(first.timeout),
        };
        Ok(DeviceCall {
            engine: Arc::clone(self),
            device: terms.device,
            stream_key: self.stream_key_of(ranks),
            communicator: Some(communicator),
            watched,
            parts: Parts::of(lowered),
            notes,
            numbers,
            stage: Stage::begun(),
            connects: AtomicBool::new(false),
            polled: OnceCell::new(),
            passed: OnceCell::new(),
        })
    }

    /// Returns a barrier that follows all collectives on the streams of a device. The barrier calls no function of the
    /// library. The watchdog watches it until those collectives have completed.
    pub fn behind(self: &Arc<Self>, device: i32) -> DeviceCall {
        DeviceCall {
            engine: Arc::clone(self),
            device,
            stream_key: 0,
            communicator: self.communicators.find(device, Ranks::All),
            watched: Watched {
                op: "barrier behind the collectives".into(),
                kind: Kind::Barrier,
                number: self.last_number.load(Ordering::Relaxed),
                device: self.place(device),
                peer: None,
                with_peer_alone: false,
                issued: Instant::now(),
                timeout: self.group.timeout(),
            },
            parts: Parts::of(Few::default()),
            notes: Few::default(),
            stage: Stage::nothing_to_launch(),
            connects: AtomicBool::new(false),
            polled: OnceCell::new(),
            passed: OnceCell::new(),
            numbers: Numbers::default(),
        }
    }

    /// A single message uses a communicator that only its pair and direction use, so that two ranks that both send
    /// first do not deadlock.
    fn ranks_of(&self, first: &DeviceRequest<'_>, region: bool) -> Ranks {
        let me = self.group.rank() as u32;
        match first.asked.kind {
            Kind::Send if !region => Ranks::OneDirection { from: me, to: first.root },
            Kind::Recv if !region => Ranks::OneDirection { from: first.root, to: me },
            _ => Ranks::All,
        }
    }

    /// Returns the key of the stream for a call. Messages between two ranks use one stream for each direction, so that
    /// two ranks that both send first do not deadlock.
    fn stream_key_of(&self, ranks: Ranks) -> i32 {
        match ranks {
            Ranks::All => 0,
            Ranks::OneDirection { from, to } => 1 + from as i32 * self.group.size() as i32 + to as i32,
        }
    }

    /// Refuses calls that must fail before anything is sent to a peer.
    fn check(&self, calls: &[DeviceRequest<'_>], terms: &Terms) -> Result<()> {
        let first = &calls[0];
        if terms.capturing && first.asked.kind == Kind::Barrier {
            return Err(Error::invalid(format!(
                "sagellm {}: the current stream of {} is being captured into a graph, which cannot hold a barrier: the host \
                 waits for it; call it outside of the capture",
                first.name,
                self.place(terms.device)
            )));
        }
        if !terms.region {
            return Ok(());
        }
        let me = self.group.rank();
        let own = |kind: Kind| {
            let own = calls.iter().filter(move |call| call.asked.kind == kind && call.root as usize == me);
            own.map(move |call| if kind == Kind::Send { call.read() } else { call.written() }).collect::<Vec<u64>>()
        };
        let (sent, received) = (own(Kind::Send), own(Kind::Recv));
        if sent == received {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "sagellm batch_isend_irecv: rank {me} sends itself messages of {sent:?} bytes, and receives {received:?} from \
             itself in the same batch; expected equal lists"
        )))
    }

    /// Chooses the library calls for one operation. The error says why the library cannot run it.
    fn lower(&self, call: &DeviceRequest<'_>, ranks: Ranks) -> Result<Lowered> {
        let (me, size) = (self.group.rank() as u32, self.group.size());
        let asked = LoweringInput { ranks: ranks.count(size), ..call.asked };
        let mut lowering = lower(&asked, self.capabilities()).map_err(Error::invalid)?;
        let decides = rules::decides(self.group.policy(), self.api.takes_topologies(), asked.kind, call.read());
        if lowering.why.is_empty() && !decides.is_empty() {
            lowering.why = format!("one call of the library; {decides}");
        }
        // In the communicator of a pair, the lower rank is rank 0.
        let root = if ranks == Ranks::All { call.root } else { u32::from(call.root > me) };
        Ok(Lowered {
            name: call.name.into(),
            kind: asked.kind,
            root,
            peer: call.root,
            tensors: call.note.tensors,
            bytes: call.read().max(call.written()),
            layout: Layout::of(asked.kind, asked.dtype, asked.ranks, &call.buffers, &lowering),
            lowering,
        })
    }

    /// Takes the number that these calls share, and publishes the signature on which all ranks must agree.
    fn next_number(&self, calls: &[DeviceRequest<'_>]) -> u64 {
        let group = &self.group;
        let sizes = match calls {
            [call] => call.block_sizes((group.rank(), group.size())),
            _ => None,
        };
        group.next_number(DeviceRequest::signed(calls, sizes.as_ref()), sizes.as_ref())
    }

    /// Takes the numbers of the calls and records the calls in the statistics. Messages take no number.
    fn count(&self, calls: &[DeviceRequest<'_>]) -> Result<(Numbers, Few<Box<dyn Counted>>)> {
        let mut number = 0;
        let mut numbers = Numbers::default();
        // Checked here, directly before the first number is taken: from then on, a call that is not launched fails the
        // group.
        self.group.usable(calls[0].asked.kind.name())?;
        let enter = |(at, call): (usize, &DeviceRequest<'_>)| {
            let kind = call.asked.kind;
            if call.note.counts || number == 0 {
                let with_it = |next: &&DeviceRequest<'_>| !next.note.counts && !next.asked.kind.is_p2p();
                let end = at + 1 + calls[at + 1..].iter().take_while(with_it).count();
                number = if kind.is_p2p() { 0 } else { self.next_number(&calls[at..end]) };
                numbers.add(number);
            }
            self.group.count(call)
        };
        let notes = calls.iter().enumerate().map(enter).collect();
        if numbers.last != 0 {
            self.last_number.store(numbers.last, Ordering::Relaxed);
        }
        Ok((numbers, notes))
    }
}
