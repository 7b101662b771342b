//! The functions of the bridge that C++ calls, but for those of devices and simulation: each hands over to the core and
//! keeps errors and panics from crossing as anything but text.

use std::sync::Arc;
use std::time::Duration;

use super::bridge::ffi;
use super::callbacks::{CompletionHook, LinkHook, PythonHook, PythonLog, StoreHook};
use super::convert::{
    Outcome, coded, dtype_named, explanation, guarded, kind, kind_named, record, request, stats, strided, table,
};
use crate::config::{Config, Settings};
use crate::engine::multihost::transport::Link;
use crate::group;
use crate::group::{Group, Op};
use crate::op::overlap::Reach;
use crate::rendezvous::Rendezvous;
use crate::types::{CallNote, Dtype, Kind};

/// What the ranks decided, until the group is built, and the store.
pub struct RustRendezvous(Rendezvous, cxx::SharedPtr<ffi::Store>);
/// A group, and its store: groups that are made later over the same one talk to it over the same connection.
pub struct RustGroup(pub(super) Arc<Group>, #[allow(dead_code)] cxx::SharedPtr<ffi::Store>);
pub struct RustOp(Arc<Op>);
pub struct RustExternalOp(group::ExternalOp);

pub(super) fn set_log_level(level: u8) {
    let _ = log::set_logger(&PythonLog);
    log::set_max_level(match level {
        0 => log::LevelFilter::Off,
        1 => log::LevelFilter::Error,
        2 => log::LevelFilter::Warn,
        3 => log::LevelFilter::Info,
        4 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    });
}

pub(super) fn rendezvous(setup: &ffi::Setup, store: cxx::SharedPtr<ffi::Store>) -> Outcome<Box<RustRendezvous>> {
    guarded(|| {
        let config = Config {
            rank: setup.rank as usize,
            size: setup.size as usize,
            timeout: Duration::from_millis(setup.timeout_ms),
            name: setup.name.clone(),
            delegate_reason: Some(setup.delegate_reason.clone()).filter(|reason| !reason.is_empty()),
            delegate: setup.delegate.clone(),
            algorithm: setup.algorithm.clone(),
            policy: String::new(),
            settings: Settings { fusion: setup.fusion, strict: setup.strict },
        };
        let decided = Rendezvous::new(config, &StoreHook(store.clone()), Arc::new(PythonHook))?;
        Ok(Box::new(RustRendezvous(decided, store)))
    })
}

pub(super) fn build_group(decided: Box<RustRendezvous>, link: cxx::SharedPtr<ffi::Link>) -> Outcome<Box<RustGroup>> {
    guarded(|| {
        let RustRendezvous(decided, store) = *decided;
        let link = (!link.is_null()).then(|| Arc::new(LinkHook(link)) as Arc<dyn Link>);
        Ok(Box::new(RustGroup(Group::build(decided, link)?, store)))
    })
}

impl RustRendezvous {
    pub(super) fn delegate_reason(&self) -> String {
        self.0.delegate_reason().unwrap_or_default().to_string()
    }

    pub(super) fn id(&self) -> String {
        self.0.id()
    }

    pub(super) fn spans_hosts(&self) -> bool {
        self.0.spans_hosts()
    }
}

pub(super) fn memory_meets(one: &[ffi::Strided], other: &[ffi::Strided]) -> bool {
    let reach =
        |all: &[ffi::Strided]| Reach::of_all(Vec::new(), Vec::new(), &all.iter().map(strided).collect::<Vec<_>>());
    reach(one).conflicts_with(&reach(other))
}

fn hook(call: &ffi::Call, completion: cxx::SharedPtr<ffi::Completion>) -> Option<Box<dyn group::Completion>> {
    (!completion.is_null())
        .then(|| Box::new(CompletionHook { inner: completion, staged: call.staged }) as Box<dyn group::Completion>)
}

impl RustGroup {
    pub(super) fn wait_for_memory(&self, memory: &ffi::Piece, writes: bool) -> Outcome<()> {
        let span = crate::types::Span { addr: memory.addr, bytes: memory.bytes };
        guarded(|| self.0.wait_for_memory(span, writes))
    }

    #[allow(clippy::too_many_arguments)] // as above
    pub(super) fn issue(
        &self,
        call: &ffi::Call,
        inputs: &[ffi::Piece],
        outputs: &[ffi::Piece],
        in_blocks: &[usize],
        out_blocks: &[usize],
        also_touched: &[ffi::Strided],
        completion: cxx::SharedPtr<ffi::Completion>,
    ) -> Outcome<Box<RustOp>> {
        guarded(|| {
            let request = request(call, inputs, outputs, in_blocks, out_blocks, also_touched)?;
            Ok(Box::new(RustOp(self.0.issue(request, hook(call, completion))?)))
        })
    }

    #[allow(clippy::too_many_arguments)] // as above
    pub(super) fn run(
        &self,
        call: &ffi::Call,
        inputs: &[ffi::Piece],
        outputs: &[ffi::Piece],
        in_blocks: &[usize],
        out_blocks: &[usize],
        also_touched: &[ffi::Strided],
        completion: cxx::SharedPtr<ffi::Completion>,
    ) -> Outcome<()> {
        guarded(|| {
            let request = request(call, inputs, outputs, in_blocks, out_blocks, also_touched)?;
            self.0.run(request, hook(call, completion))
        })
    }

    pub(super) fn monitored_barrier(&self, timeout_ms: i64, wait_all_ranks: bool) -> Outcome<()> {
        guarded(|| {
            let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
            self.0.monitored_barrier(timeout, wait_all_ranks)
        })
    }

    pub(super) fn sequence(&self) -> u64 {
        self.0.sequence()
    }
    pub(super) fn set_timeout(&self, timeout_ms: u64) {
        self.0.set_timeout(Duration::from_millis(timeout_ms));
    }
    pub(super) fn abort(&self, reason: &str) {
        let _ = guarded(|| {
            self.0.abort(reason);
            Ok(())
        });
    }
    pub(super) fn shutdown(&self) {
        let _ = guarded(|| {
            self.0.shutdown();
            Ok(())
        });
    }
    pub(super) fn fault(&self) -> String {
        self.0.fault().as_ref().map(coded).unwrap_or_default()
    }
    pub(super) fn describe(&self) -> Outcome<String> {
        guarded(|| self.0.not_forked().map(|()| self.0.describe()))
    }
    pub(super) fn explain(&self, kind: &str, bytes: u64, dtype: &str) -> Outcome<ffi::Explanation> {
        guarded(|| Ok(explanation(&self.0.explain(kind_named(kind)?, bytes, dtype_named(dtype)?))))
    }
    pub(super) fn explain_number(&self, number: u64) -> Outcome<ffi::Explanation> {
        guarded(|| {
            self.0.not_forked()?;
            Ok(explanation(&self.0.explain_number(number)?))
        })
    }
    pub(super) fn stats(&self) -> Outcome<ffi::Stats> {
        guarded(|| {
            self.0.not_forked()?;
            let (counts, moment) = self.0.stats();
            Ok(stats(&counts, self.0.rank(), self.0.size(), moment))
        })
    }
    pub(super) fn records(&self) -> Outcome<Vec<ffi::Record>> {
        guarded(|| self.0.not_forked().map(|()| self.0.records().iter().map(record).collect()))
    }
    pub(super) fn reset_stats(&self) {
        if self.0.not_forked().is_ok() {
            self.0.reset_stats();
        }
    }
    pub(super) fn set_members(&self, members: &[u32]) {
        self.0.set_members(members.to_vec());
    }
    pub(super) fn external_op(&self, call: &ffi::ExternalOp) -> Outcome<Box<RustExternalOp>> {
        guarded(|| {
            self.0.not_forked()?;
            let kind = kind(call.kind)?;
            let note = CallNote {
                counts: true,
                tensors: call.tensors,
                element: call.element,
                site: call.site,
                host_staged: call.host_staged,
            };
            let (peer, bytes) = ((call.root, call.tag), (call.read, call.written));
            let carrier = if call.composed { group::Carrier::Composed } else { group::Carrier::Delegate };
            Ok(Box::new(RustExternalOp(self.0.external_op(kind, carrier, peer, bytes, note))))
        })
    }
}

impl RustOp {
    pub(super) fn is_done(&self) -> bool {
        self.0.is_done()
    }
    pub(super) fn wait(&self, timeout_ms: i64) -> Outcome<()> {
        guarded(|| self.0.wait(u64::try_from(timeout_ms).ok().map(Duration::from_millis)))
    }
    pub(super) fn error(&self) -> String {
        self.0.error().map(coded).unwrap_or_default()
    }
    pub(super) fn facts(&self) -> ffi::OpFacts {
        ffi::OpFacts {
            number: self.0.number(),
            source: self.0.source(),
            duration_ns: self.0.duration().as_nanos() as u64,
            timeout_ms: self.0.timeout().as_millis() as u64,
        }
    }
    pub(super) fn explain(&self) -> ffi::Explanation {
        explanation(&self.0.explain())
    }
    pub(super) fn cancel(&self) {
        self.0.cancel();
    }
}

impl RustExternalOp {
    pub(super) fn ended(&self, well: bool, timed: bool) {
        let _ = guarded(|| {
            self.0.end(well, timed);
            Ok(())
        });
    }
}

pub(super) fn names() -> ffi::Names {
    let combined = Dtype::ALL.into_iter().filter(|dtype| *dtype != Dtype::Bytes);
    ffi::Names {
        kinds: Kind::ALL.map(|kind| kind.name().to_string()).to_vec(),
        dtypes: combined.map(|dtype| dtype.name().to_string()).collect(),
    }
}

pub(super) fn doctor() -> Vec<ffi::Fact> {
    crate::os::topology::report().into_iter().map(|(name, value)| ffi::Fact { name, value }).collect()
}

pub(super) fn explain_without_group(
    kind: &str,
    bytes: u64,
    dtype: &str,
    ranks: usize,
    algorithm: &str,
) -> Outcome<ffi::Explanation> {
    guarded(|| {
        let found = group::explain_without_group(kind_named(kind)?, bytes, dtype_named(dtype)?, ranks, algorithm)?;
        Ok(explanation(&found))
    })
}

pub(super) fn table_without_group(ranks: usize, algorithm: &str) -> Outcome<ffi::ChoiceTable> {
    guarded(|| Ok(table(group::table_without_group(ranks, algorithm)?)))
}

pub(super) fn list_operations(of: ffi::Kind, by_vendor: bool, elements: &[u8], bytes: &[usize]) -> Outcome<Vec<u32>> {
    guarded(|| {
        let list = elements.iter().copied().zip(bytes.iter().copied());
        Ok(crate::fusion::lists::operations(kind(of)?, by_vendor, list))
    })
}

pub(super) fn save_table(ranks: usize, made: &str, lines: &str) -> Outcome<String> {
    guarded(|| crate::select::table::make(ranks, made, lines))
}

pub(super) fn at_exit() {
    let _ = guarded(|| {
        group::at_exit();
        Ok(())
    });
}
