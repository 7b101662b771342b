//! The bridge functions for a group's devices. Handles are plain numbers, and the steps of a lowering are lists.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::bridge::ffi;
use super::convert::{Outcome, dtype, elements_and_bytes, guarded, kind, listed, note, quietly, spans, unknown};
use super::handles::{RustCall, RustDevices, RustGroup, RustRetired, SharedStore};
use crate::engine::device::{
    Buffers, Carried, DeviceCall, DeviceEngine, DeviceGroup, DeviceRequest, Event, Exchange, Found, Hints, Local,
    Lowered, LoweringInput, Placed, Ranks, Stream, Terms,
};
use crate::error::{Error, Result};
use crate::fusion::lists as tensor_lists;
use crate::op::lists;
use crate::types::{Dtype, Few, Listed, ReduceOp, Spans};

/// Implements the engine's `Exchange` by functions of the shim's group.
struct ExchangeHook<'a>(&'a ffi::IdExchange, &'a SharedStore);

impl Exchange for ExchangeHook<'_> {
    fn share(&self, id: &mut [u8], ranks: Ranks) -> Result<()> {
        let shared = match ranks {
            Ranks::All => self.0.broadcast(id),
            Ranks::OneDirection { from, to } => self.0.pass(id, from.min(to) as i32, from.max(to) as i32),
        };
        // The shim keeps its exception and raises that exception instead of this error.
        shared.map_err(|error| Error::system(error.what().to_string()))
    }
    fn store(&self) -> SharedStore {
        Arc::clone(self.1)
    }
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

/// The memory of a call. The request that `request` makes refers to this memory in `buffers`.
struct Parts {
    inputs: Spans,
    outputs: Spans,
}

impl Parts {
    fn of(call: &ffi::DeviceRequest<'_>) -> Parts {
        Parts { inputs: spans(call.request.inputs), outputs: spans(call.request.outputs) }
    }

    fn request<'a>(&'a self, asked: &'a ffi::DeviceRequest<'_>) -> Result<DeviceRequest<'a>> {
        let ffi::DeviceRequest { name, request: ffi::Request { call, in_blocks, out_blocks, list, .. }, dense } = asked;
        let ffi::Call { root, tag, timeout_ms, .. } = *call;
        let (kind, dtype) = (kind(call.kind)?, dtype(call.dtype)?);
        let op = ReduceOp::from_u8(call.op.repr, call.factor).ok_or_else(|| unknown("reduce op", call.op.repr))?;
        let list: Vec<Listed> = list.iter().map(listed).collect::<Result<_>>()?;
        let equal_counts = in_blocks.is_empty() && out_blocks.is_empty();
        Ok(DeviceRequest {
            name,
            asked: LoweringInput { kind, dtype, op, ranks: 0, equal_counts, dense: *dense },
            root,
            tag,
            timeout: u64::try_from(timeout_ms).ok().map(Duration::from_millis),
            buffers: Buffers { inputs: &self.inputs, outputs: &self.outputs, in_blocks, out_blocks },
            list: if list.is_empty() { 0 } else { lists::of_tensors(&list) },
            note: note(call.note),
        })
    }
}

fn begun(call: DeviceCall, captured: bool) -> ffi::DeviceBegun {
    ffi::DeviceBegun {
        number: call.number(),
        timeout_ms: call.timeout().as_millis() as u64,
        stream_key: call.stream_key(),
        lowerings: call.calls().iter().map(lowering).collect(),
        call: Box::new(RustCall { call, captured }),
    }
}

impl RustDevices {
    pub(super) fn connect(&self, device: i32, exchange: &ffi::IdExchange) -> Outcome<()> {
        let exchange = ExchangeHook(exchange, &self.store);
        guarded(|| self.engine.communicator(device, Ranks::All, &exchange).map(drop))
    }
    pub(super) fn begin(
        &self,
        calls: &[ffi::DeviceRequest<'_>],
        terms: &ffi::DeviceTerms,
        exchange: &ffi::IdExchange,
    ) -> Outcome<ffi::DeviceBegun> {
        let ffi::DeviceTerms { device, region, capturing } = *terms;
        let terms = Terms { device: device.into(), region, capturing };
        let exchange = ExchangeHook(exchange, &self.store);
        guarded(|| {
            let parts: Few<Parts> = calls.iter().map(Parts::of).collect();
            let calls =
                calls.iter().zip(&*parts).map(|(call, parts)| parts.request(call)).collect::<Result<Few<_>>>()?;
            Ok(begun(self.engine.begin(&calls, &terms, &exchange)?, capturing))
        })
    }
    pub(super) fn begin_barrier(&self, device: i32) -> Outcome<ffi::DeviceBegun> {
        guarded(|| Ok(begun(self.engine.behind(device), false)))
    }
    pub(super) fn is_capturing(&self, device: i32, stream: usize) -> Outcome<bool> {
        guarded(|| self.engine.capturing(device, Stream(stream)))
    }
    pub(super) fn stream_behind(
        &self,
        device: i32,
        stream_key: i32,
        event: usize,
        recycled: &[usize],
    ) -> Outcome<usize> {
        let recycled: Vec<Event> = recycled.iter().copied().map(Event).collect();
        guarded(|| Ok(self.engine.stream_behind(device, stream_key, Event(event), &recycled)?.0))
    }
    pub(super) fn record_event(&self, device: i32, stream: usize) -> Outcome<usize> {
        guarded(|| Ok(self.engine.mark(device, Stream(stream))?.0))
    }
    pub(super) fn can_split(&self, device: i32, members: &[u32]) -> Outcome<bool> {
        guarded(|| Ok(self.engine.can_split(device, members)))
    }
    pub(super) fn split(&self, child: &RustDevices, device: i32, members: &[u32]) -> Outcome<()> {
        guarded(|| self.engine.split(Some(&child.engine), device, members))
    }
    pub(super) fn split_without_child(&self, device: i32, members: &[u32]) -> Outcome<()> {
        guarded(|| self.engine.split(None, device, members))
    }
    pub(super) fn retire(&self, device: i32, drained: bool) -> ffi::DevicesRetired {
        let retired = self.engine.retire(device, drained);
        let can_shrink = retired.can_shrink();
        ffi::DevicesRetired { communicator: Box::new(RustRetired(retired)), can_shrink }
    }
    pub(super) fn close(&self, timeout_ms: u64, drained: bool) -> bool {
        guarded(|| Ok(self.engine.close(Duration::from_millis(timeout_ms), drained))).unwrap_or(true)
    }
    pub(super) fn abort(&self) {
        quietly(|| self.engine.abort());
    }
    pub(super) fn list_operations(of: ffi::Kind, elements: &[u8], bytes: &[usize]) -> Outcome<Vec<u32>> {
        guarded(|| Ok(tensor_lists::operations(kind(of)?, true, elements_and_bytes(elements, bytes))))
    }
}

/// The two enums have equal numbers; `convert` checks that.
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

fn lowering(call: &Lowered) -> ffi::DeviceLowering {
    let (lowering, layout) = (&call.lowering, &call.layout);
    ffi::DeviceLowering {
        dtype: shared_dtype(lowering.dtype),
        premul: call.is_premul(),
        gathers: layout.send.temporary.is_some(),
        before: lowering.before.iter().map(local).collect(),
        receives: layout.recv.temporary.unwrap_or(0),
        in_place: layout.in_place,
        after: lowering.after.iter().map(local).collect(),
    }
}

impl RustCall {
    pub(super) fn launch(&self, placed: &[ffi::DevicePlaced], stream: usize) -> Outcome<()> {
        let place = |at: &ffi::DevicePlaced| Placed { factor: at.factor, send: at.send, recv: at.recv };
        guarded(|| {
            self.call.launch(&placed.iter().map(place).collect::<Few<_>>(), Stream(stream))?;
            if self.captured {
                self.call.ended(true, false);
            }
            Ok(())
        })
    }
    pub(super) fn failed_here(&self, why: &str) {
        quietly(|| self.call.failed_here(why));
    }
    pub(super) fn before_poll(&self) -> Outcome<u32> {
        guarded(|| self.call.before_poll())
    }
    pub(super) fn poll_running(&self, capture_mode: u32) -> String {
        let looked = guarded(|| match self.call.poll(false, capture_mode)? {
            Found::Nothing | Found::Undecided => Ok(()),
            Found::Failed(error) => {
                self.call.ended(false, true);
                Err(error)
            }
        });
        looked.err().unwrap_or_default()
    }
    pub(super) fn poll_passed(&self, capture_mode: u32) -> ffi::DevicePassed {
        let looked = guarded(|| match self.call.poll(true, capture_mode)? {
            Found::Undecided => Ok(true),
            Found::Nothing => {
                self.call.ended(true, true);
                Ok(false)
            }
            Found::Failed(error) => {
                self.call.ended(false, true);
                Err(error)
            }
        });
        match looked {
            Ok(undecided) => ffi::DevicePassed { undecided, error: String::new() },
            Err(error) => ffi::DevicePassed { undecided: false, error },
        }
    }
    pub(super) fn keeps_memory(&self) -> bool {
        self.call.keeps_memory()
    }
    pub(super) fn look_at_replays(&self) -> String {
        let looked = guarded(|| match self.call.look_at_replays()? {
            Found::Failed(error) => Err(error),
            Found::Nothing | Found::Undecided => Ok(()),
        });
        looked.err().unwrap_or_default()
    }
    pub(super) fn abort(&self) {
        quietly(|| self.call.abort());
    }
    pub(super) fn look_at_launch(&self) -> String {
        guarded(|| self.call.look_at_launch().map_or(Ok(()), Err)).err().unwrap_or_default()
    }
    pub(super) fn explain(&self) -> Vec<String> {
        self.call.explain().iter().map(Carried::json).collect()
    }
}

impl RustRetired {
    pub(super) fn shrink(&self, child: &RustDevices, excluded: &[u32]) -> Outcome<()> {
        guarded(|| self.0.shrink(&child.engine, excluded))
    }
}
