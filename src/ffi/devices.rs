//! Devices of a group over the bridge: plain numbers for handles, lists for recipes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::bridge::ffi;
use super::convert::{Outcome, dtype, guarded, kind, spans, unknown};
use super::handles::{RustCall, RustDevices, RustGroup, RustRetired, SharedStore};
use super::observe::ffi as observed;
use crate::engine::device::{
    Asked, DeviceEngine, DeviceGroup, DeviceRequest, Event, Exchange, Hints, Local, Lowered, Placed, Ranks, Recipe,
    Stream, Terms,
};
use crate::error::{Error, Result};
use crate::types::{CallNote, Dtype, ReduceOp};

/// Answers the engine by the shim's group.
struct ExchangeHook<'a>(&'a ffi::IdExchange, &'a SharedStore);

impl Exchange for ExchangeHook<'_> {
    fn share(&self, id: &mut [u8], ranks: Ranks) -> Result<()> {
        let (from, to) = match ranks {
            Ranks::All => (-1, -1),
            Ranks::Way { from, to } => (from.min(to) as i32, from.max(to) as i32),
        };
        // The shim keeps its exception and raises that one.
        self.0.share(id, from, to).map_err(|error| Error::System(error.what().to_string()))
    }
    fn store(&self) -> SharedStore {
        Arc::clone(self.1)
    }
}

fn milliseconds(count: u64) -> Duration {
    Duration::from_millis(count)
}

impl RustGroup {
    pub(super) fn open_devices(
        &self,
        device_type: &str,
        vendor: &str,
        library: &str,
        folders: &[String],
    ) -> Outcome<ffi::DevicesOpened> {
        let hints = Hints {
            path: (!library.is_empty()).then(|| PathBuf::from(library)),
            folders: folders.iter().map(PathBuf::from).collect(),
        };
        let (group, store): (Arc<dyn DeviceGroup>, _) = (self.group.clone(), self.store.clone());
        guarded(|| {
            let engine = Arc::new(DeviceEngine::open(group, device_type, vendor, &hints)?);
            let description = engine.describe();
            Ok(ffi::DevicesOpened { devices: Box::new(RustDevices { engine, store }), description })
        })
    }
}

fn request<'a>(call: &ffi::DeviceRequest<'a>) -> Result<DeviceRequest<'a>> {
    let (kind, dtype) = (kind(call.kind)?, dtype(call.dtype)?);
    let op = ReduceOp::from_u8(call.op.repr, call.factor).ok_or_else(|| unknown("reduce op", call.op.repr))?;
    let ffi::DeviceRequest { name, root, tag, read, written, even, plain, .. } = *call;
    let (counts, tensors, element, site) = (call.counts, call.tensors, call.element, call.site);
    Ok(DeviceRequest {
        name,
        asked: Asked { kind, dtype, op, ranks: 0, even, plain },
        root,
        tag,
        read,
        written,
        note: CallNote { counts, tensors, element, site, host_staged: false },
    })
}

impl RustDevices {
    pub(super) fn begin(
        &self,
        calls: &[ffi::DeviceRequest<'_>],
        terms: &ffi::DeviceTerms,
        exchange: &ffi::IdExchange,
    ) -> Outcome<ffi::DeviceBegun> {
        let ffi::DeviceTerms { device, region, capturing, timeout_ms, join_timeout_ms } = *terms;
        let (timeout, join_timeout) = (milliseconds(timeout_ms), milliseconds(join_timeout_ms));
        let terms = Terms { device: device.into(), region, capturing, timeout, join_timeout };
        let exchange = ExchangeHook(exchange, &self.store);
        guarded(|| {
            let calls = calls.iter().map(request).collect::<Result<Vec<_>>>()?;
            let begun = if calls.is_empty() {
                self.engine.communicator(terms.device, Ranks::All, &exchange, join_timeout)?;
                self.engine.behind(terms.device, timeout)
            } else {
                self.engine.begin(&calls, &terms, &exchange)?
            };
            let recipes = begun.calls().iter().map(lowered).collect();
            Ok(ffi::DeviceBegun { number: begun.number(), recipes, call: Box::new(RustCall(begun)) })
        })
    }
    pub(super) fn behind(&self, device: i32, timeout_ms: u64) -> Box<RustCall> {
        Box::new(RustCall(self.engine.behind(device, milliseconds(timeout_ms))))
    }
    pub(super) fn raw_stream(
        &self,
        step: ffi::RawStep,
        device: i32,
        at: usize,
        lane: i32,
        told: &[usize],
    ) -> Outcome<usize> {
        guarded(|| match step {
            ffi::RawStep::kCapturing => Ok(self.engine.capturing(device, Stream(at))?.into()),
            ffi::RawStep::kMark => Ok(self.engine.mark(device, Stream(at))?.0),
            _ => {
                let told: Vec<Event> = told.iter().copied().map(Event).collect();
                Ok(self.engine.stream_behind(device, lane, Event(at), &told)?.0)
            }
        })
    }
    pub(super) fn split(
        &self,
        asks: bool,
        child: &RustDevices,
        is_member: bool,
        device: i32,
        members: &[u32],
        timeout_ms: u64,
    ) -> Outcome<bool> {
        let child = is_member.then_some(&*child.engine);
        guarded(|| {
            if asks {
                return Ok(self.engine.can_split(device, members));
            }
            self.engine.split(child, device, members, milliseconds(timeout_ms)).map(|()| true)
        })
    }
    pub(super) fn retire(&self, device: i32, drained: bool) -> ffi::DevicesRetired {
        let retired = self.engine.retire(device, drained);
        let can_shrink = retired.can_shrink();
        ffi::DevicesRetired { communicator: Box::new(RustRetired(retired)), can_shrink }
    }
    pub(super) fn leave(&self, how: ffi::Leave, timeout_ms: u64, drained: bool) -> bool {
        let left = guarded(|| match how {
            ffi::Leave::kInOrder => Ok(self.engine.close(milliseconds(timeout_ms), drained)),
            _ => {
                self.engine.abort();
                Ok(true)
            }
        });
        left.unwrap_or(true)
    }
}

/// The numbers are equal: `convert` checks that.
fn shared_dtype(dtype: Dtype) -> ffi::Dtype {
    ffi::Dtype { repr: dtype as u8 }
}

fn local(step: &Local) -> ffi::Local {
    let (dtype, op) = (ffi::Dtype::kBytes, ffi::ReduceOp::kSum);
    let none = ffi::Local { step: ffi::LocalStep::Cast, dtype, op, factor: 1.0, count: 1 };
    match *step {
        Local::Cast(dtype) => ffi::Local { dtype: shared_dtype(dtype), ..none },
        Local::Scale(factor) => ffi::Local { step: ffi::LocalStep::Scale, factor, ..none },
        Local::Divide(count) => ffi::Local { step: ffi::LocalStep::Divide, count, ..none },
        Local::Fold(op) => ffi::Local { step: ffi::LocalStep::Fold, op: ffi::ReduceOp { repr: op.code() }, ..none },
    }
}

fn lowered(call: &Lowered) -> ffi::DeviceRecipe {
    let Recipe { kind, dtype, flat, apart, spoils, ref before, ref after, .. } = call.recipe;
    ffi::DeviceRecipe {
        kind: ffi::Kind { repr: kind as u8 },
        dtype: shared_dtype(dtype),
        flat,
        apart,
        spoils,
        premul: call.is_premul(),
        before: before.iter().map(local).collect(),
        after: after.iter().map(local).collect(),
    }
}

impl RustCall {
    pub(super) fn launch(&self, placed: &[ffi::DevicePlaced], pieces: &[ffi::Piece], stream: usize) -> Outcome<()> {
        guarded(|| {
            let all = spans(pieces);
            let mut rest = &all[..];
            let mut take = |count: usize| {
                let (taken, left) = rest.split_at_checked(count)?;
                rest = left;
                Some(taken)
            };
            let placed: Option<Vec<Placed<'_>>> = placed
                .iter()
                .map(|one| Some(Placed { factor: one.factor, send: take(one.sends)?, recv: take(one.receives)? }))
                .collect();
            let missing = || Error::Bug("sagellm: fewer pieces of memory came over the bridge than were named".into());
            self.0.launch(&placed.ok_or_else(missing)?, Stream(stream))
        })
    }
    pub(super) fn before_poll(&self) -> Outcome<u32> {
        guarded(|| self.0.before_poll())
    }
    pub(super) fn poll(&self, passed: bool, mode: u32) -> String {
        guarded(|| self.0.poll(passed, mode)).err().unwrap_or_default()
    }
    pub(super) fn ended(&self, well: bool, timed: bool) {
        let _ = guarded(|| {
            self.0.ended(well, timed);
            Ok(())
        });
    }
    pub(super) fn explain(&self) -> Vec<observed::Explanation> {
        let found = self.0.explain().into_iter();
        let found = found.map(|call| observed::Explanation {
            kind: call.name,
            bytes: call.bytes,
            ranks: call.ranks,
            past: true,
            number: call.number,
            library: call.library,
            decided: call.why,
            ran: call.ran,
            ..Default::default()
        });
        found.collect()
    }
}

impl RustRetired {
    pub(super) fn shrink(&self, child: &RustDevices, excluded: &[u32], timeout_ms: u64) -> Outcome<()> {
        guarded(|| self.0.shrink(&child.engine, excluded, milliseconds(timeout_ms)))
    }
}
