//! Devices of a group over the bridge: plain numbers for handles, lists for recipes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::bridge::{RustGroup, coded, ffi, guarded, kind_and_dtype, spans, unknown};
use super::callbacks::StoreHook;
use crate::engine::device::{Asked, Event, Hints, Launched, Local, Message, Recipe, Stream};
use crate::group::devices::{Devices, Member};
use crate::types::{Dtype, Kind, ReduceOp};

type Outcome<T> = std::result::Result<T, String>;

pub struct RustDevices(Arc<Devices>);
pub struct RustMember(Member);
pub struct RustRecipe(Recipe);
/// Host memory of calls that are on a stream.
pub struct RustLaunched(#[allow(dead_code)] Launched);

impl RustGroup {
    pub(super) fn open_devices(
        &self,
        device_type: &str,
        vendor: &str,
        library: &str,
        folders: &[String],
    ) -> Outcome<Box<RustDevices>> {
        let hints = Hints {
            path: (!library.is_empty()).then(|| PathBuf::from(library)),
            folders: folders.iter().map(PathBuf::from).collect(),
        };
        guarded(|| Ok(Box::new(RustDevices(Arc::new(Devices::open(&self.0, device_type, vendor, &hints)?)))))
    }
}

impl RustDevices {
    pub(super) fn describe(&self) -> String {
        self.0.describe()
    }
    pub(super) fn unique_id(&self) -> Outcome<Vec<u8>> {
        guarded(|| self.0.unique_id())
    }
    pub(super) fn id_bytes(&self) -> usize {
        self.0.capabilities().id_bytes
    }
    pub(super) fn next_pair(
        &self,
        store: cxx::SharedPtr<ffi::Store>,
        peer: u32,
        known: &[u32],
        passed_ms: u64,
        timeout_ms: u64,
    ) -> Outcome<u32> {
        let times = (Duration::from_millis(passed_ms), Duration::from_millis(timeout_ms));
        guarded(|| self.0.next_pair(peer, known, times, || Box::new(StoreHook(store))))
    }
    pub(super) fn join(
        &self,
        whose: &str,
        id: &[u8],
        device: i32,
        rank: u32,
        ranks: u32,
        timeout_ms: u64,
    ) -> Outcome<Box<RustMember>> {
        let deadline = patience(timeout_ms);
        guarded(|| Ok(Box::new(RustMember(self.0.join(whose, id, device, (rank, ranks), deadline)?))))
    }
    pub(super) fn recipe(&self, asked: &ffi::DeviceAsked) -> Outcome<Box<RustRecipe>> {
        guarded(|| {
            let (kind, dtype) = kind_and_dtype(asked.kind, asked.dtype)?;
            let op = ReduceOp::from_u8(asked.op, asked.factor).ok_or_else(|| unknown("reduce op", asked.op))?;
            let ffi::DeviceAsked { ranks, even, plain, bytes, .. } = *asked;
            let asked = Asked { kind, dtype, op, ranks: ranks as usize, even, plain };
            Ok(Box::new(RustRecipe(self.0.recipe(&asked, bytes)?)))
        })
    }
    pub(super) fn set_device(&self, device: i32) -> Outcome<()> {
        guarded(|| self.0.set_device(device))
    }
    pub(super) fn capturing(&self, stream: usize) -> Outcome<bool> {
        guarded(|| self.0.capturing(Stream(stream)))
    }
    pub(super) fn spare_captures(&self, device: i32) -> Outcome<u32> {
        guarded(|| self.0.spare_captures(device))
    }
    pub(super) fn capture_as_before(&self, mode: u32) -> Outcome<()> {
        guarded(|| self.0.capture_as_before(mode))
    }
    pub(super) fn raw_stream(&self, device: i32, lane: i32) -> Outcome<usize> {
        guarded(|| Ok(self.0.stream(device, lane)?.0))
    }
    pub(super) fn raw_wait(&self, stream: usize, event: usize) -> Outcome<()> {
        guarded(|| self.0.wait(Stream(stream), Event(event)))
    }
    pub(super) fn raw_record(&self, device: i32, stream: usize) -> Outcome<usize> {
        guarded(|| Ok(self.0.record(device, Stream(stream))?.0))
    }
    pub(super) fn raw_release(&self, device: i32, event: usize) {
        self.0.release(device, Event(event));
    }
    pub(super) fn next_number(&self, kind: u8) -> Outcome<u64> {
        guarded(|| self.0.next_number(Kind::from_u8(kind).ok_or_else(|| unknown("kind", kind))?))
    }
    pub(super) fn fail(&self, text: &str) {
        self.0.fail(text);
    }
    pub(super) fn trouble(&self, what: &str, only: i64) -> String {
        guarded(|| Ok(self.0.trouble(what, usize::try_from(only).ok())))
            .map_or_else(|panic| panic, |error| error.as_ref().map(coded).unwrap_or_default())
    }
    pub(super) fn stall(&self, what: &str, number: u64, after_ms: u64) -> String {
        guarded(|| Err::<(), _>(self.0.stall(what, number, Duration::from_millis(after_ms)))).err().unwrap_or_default()
    }
}

/// For the making of a communicator. None at all is one of a year: somebody has to look in between.
fn patience(timeout_ms: u64) -> Duration {
    Duration::from_millis(if timeout_ms == 0 { 365 * 24 * 3_600_000 } else { timeout_ms })
}

fn local(step: &Local) -> ffi::Local {
    let none = ffi::Local { step: ffi::LocalStep::Cast, dtype: Dtype::Bytes as u8, op: 0, factor: 1.0, count: 1 };
    match *step {
        Local::Cast(dtype) => ffi::Local { dtype: dtype as u8, ..none },
        Local::Scale(factor) => ffi::Local { step: ffi::LocalStep::Scale, factor, ..none },
        Local::Divide(count) => ffi::Local { step: ffi::LocalStep::Divide, count, ..none },
        Local::Fold(op) => ffi::Local { step: ffi::LocalStep::Fold, op: op.code(), ..none },
    }
}

impl RustRecipe {
    pub(super) fn facts(&self) -> ffi::RecipeFacts {
        let Recipe { kind, dtype, op, flat, apart, spoils, ref before, ref after, .. } = self.0;
        ffi::RecipeFacts {
            kind: kind as u8,
            dtype: dtype as u8,
            flat,
            apart,
            spoils,
            local: !before.is_empty() || !after.is_empty(),
            premul: matches!(op, ReduceOp::PremulSum(_)),
        }
    }
    pub(super) fn before(&self) -> Vec<ffi::Local> {
        self.0.before.iter().map(local).collect()
    }
    pub(super) fn after(&self) -> Vec<ffi::Local> {
        self.0.after.iter().map(local).collect()
    }
    pub(super) fn why(&self) -> String {
        self.0.why.clone()
    }
}

impl RustMember {
    pub(super) fn can_split(&self, members: &[u32]) -> bool {
        self.0.can_split(members)
    }
    pub(super) fn split(&self, child: &RustDevices, members: &[u32], timeout_ms: u64) -> Outcome<Box<RustMember>> {
        let deadline = patience(timeout_ms);
        guarded(|| Ok(Box::new(RustMember(self.0.split(&child.0, members, deadline)?))))
    }
    pub(super) fn stay_out(&self, members: &[u32], timeout_ms: u64) -> Outcome<()> {
        guarded(|| self.0.stay_out(members, patience(timeout_ms)))
    }
    pub(super) fn can_shrink(&self) -> bool {
        self.0.can_shrink()
    }
    pub(super) fn shrink(&self, child: &RustDevices, exclude: &[u32], timeout_ms: u64) -> Outcome<Box<RustMember>> {
        let deadline = patience(timeout_ms);
        guarded(|| Ok(Box::new(RustMember(self.0.shrink(&child.0, exclude, deadline)?))))
    }
    pub(super) fn launch(
        &self,
        recipe: &RustRecipe,
        root: u32,
        factor: usize,
        send: &[ffi::Piece],
        recv: &[ffi::Piece],
        stream: usize,
    ) -> Outcome<Box<RustLaunched>> {
        guarded(|| {
            let (send, recv) = (spans(send), spans(recv));
            let launched = self.0.launch(&recipe.0, (root, factor), (&send, &recv), Stream(stream))?;
            Ok(Box::new(RustLaunched(launched)))
        })
    }
    pub(super) fn exchange(
        &self,
        peers: &[u32],
        sends: &[bool],
        pieces: &[ffi::Piece],
        stream: usize,
    ) -> Outcome<Box<RustLaunched>> {
        let messages: Vec<Message> = peers
            .iter()
            .zip(sends)
            .zip(pieces)
            .filter(|(_, piece)| piece.bytes > 0)
            .map(|((peer, sends), piece)| Message { peer: *peer, sends: *sends, addr: piece.addr, bytes: piece.bytes })
            .collect();
        guarded(|| Ok(Box::new(RustLaunched(self.0.exchange(&messages, Stream(stream))?))))
    }
    pub(super) fn start_group(&self) -> Outcome<()> {
        guarded(|| self.0.start_group())
    }
    pub(super) fn end_group(&self) -> Outcome<()> {
        guarded(|| self.0.end_group())
    }
    pub(super) fn ran(&self, kind: u8, bytes: u64) -> String {
        Kind::from_u8(kind).map(|kind| self.0.ran(kind, bytes)).unwrap_or_default()
    }
    pub(super) fn poll(&self) -> String {
        guarded(|| self.0.poll()).err().unwrap_or_default()
    }
    pub(super) fn abort(&self) {
        let _ = guarded(|| {
            self.0.abort();
            Ok(())
        });
    }
    pub(super) fn close(&self, timeout_ms: u64) -> bool {
        guarded(|| Ok(self.0.close(Duration::from_millis(timeout_ms)))).unwrap_or(true)
    }
}
