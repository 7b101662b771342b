//! The functions of the bridge that C++ calls, except those of devices and simulation. Each calls the core, and turns
//! errors and panics into text.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::bridge::ffi;
use super::callbacks::{CompletionHook, PythonHook, PythonLog, StoreHook};
use super::convert::{
    Outcome, coded, dtype_named, explanation, guarded, kind, kind_named, record, request, start, stats, table,
};
use super::handles::{Core, RustExternalOp, RustGroup, RustOp, RustRendezvous};
use super::observe::ffi as observed;
use crate::config::{Config, Settings};
use crate::engine::device::Vendor;
use crate::engine::multihost::link::Link;
use crate::engine::multihost::wire::{Place, Wire, join};
use crate::error::Result;
use crate::group;
use crate::group::Group;
use crate::rendezvous::Rendezvous;
use crate::types::{CallNote, Dtype, Kind};

impl RustRendezvous {
    pub(super) fn meet(setup: &ffi::Setup, store: cxx::SharedPtr<ffi::Store>) -> Outcome<ffi::Decision> {
        guarded(|| {
            Vendor::check_option(&setup.vendor)?;
            let config = Config {
                rank: setup.rank as usize,
                size: setup.size as usize,
                timeout: Duration::from_millis(setup.timeout_ms),
                name: setup.name.clone(),
                delegate_reason: Some(setup.delegate_reason.clone()).filter(|reason| !reason.is_empty()),
                delegate: setup.delegate.clone(),
                algorithm: setup.algorithm.clone(),
                topology: setup.topology.clone(),
                policy: String::new(),
                settings: Settings { fusion: setup.fusion, strict: setup.strict, measure_link: setup.measure_link },
                soft_timeout: u64::try_from(setup.soft_timeout_ms).ok().map(Duration::from_millis),
                addresses: setup.addresses.clone(),
            };
            let store = Arc::new(StoreHook(store));
            let decided = Rendezvous::new(config, &*store, Arc::new(PythonHook))?;
            Ok(ffi::Decision {
                id: decided.id(),
                delegate_reason: decided.delegate_reason().unwrap_or_default().to_string(),
                spans_hosts: decided.spans_hosts(),
                network: decided.network.map_or_else(String::new, |network| network.text()),
                rendezvous: Box::new(RustRendezvous {
                    decided,
                    store,
                    members: setup.members.clone(),
                    link: Mutex::default(),
                }),
            })
        })
    }
}

impl RustRendezvous {
    pub(super) fn connect(&self, address: &str, timeout_ms: u64) -> Outcome<()> {
        guarded(|| {
            let place = Place {
                store: &*self.store,
                id: self.decided.id,
                rank: self.decided.config.rank,
                size: self.decided.config.size,
                address,
                timeout: Duration::from_millis(timeout_ms),
            };
            let link = join(&Wire::of_process()?, &place)?;
            *self.link.lock().unwrap_or_else(PoisonError::into_inner) = Some(link);
            Ok(())
        })
    }
}

fn hook(request: &ffi::Request<'_>, inner: cxx::SharedPtr<ffi::Completion>) -> Option<Box<dyn group::Completion>> {
    let staged = request.call.staged;
    (!inner.is_null()).then(|| Box::new(CompletionHook { inner, staged }) as Box<dyn group::Completion>)
}

impl RustGroup {
    pub(super) fn build(decided: Box<RustRendezvous>) -> Outcome<ffi::Built> {
        guarded(|| {
            let RustRendezvous { decided, store, members, link } = *decided;
            let link = link.into_inner().unwrap_or_else(PoisonError::into_inner);
            let link = link.map(|link| Arc::new(link) as Arc<dyn Link>);
            let group = Group::build(decided, link)?;
            group.set_members(members);
            group.set_board(Arc::clone(&store));
            let description = group.describe();
            Ok(ffi::Built { group: Box::new(RustGroup { group, store }), description })
        })
    }

    pub(super) fn issue(
        &self,
        asked: &ffi::Request<'_>,
        completion: cxx::SharedPtr<ffi::Completion>,
    ) -> Outcome<Box<RustOp>> {
        guarded(|| Ok(Box::new(RustOp(self.group.issue(request(asked)?, hook(asked, completion))?))))
    }

    pub(super) fn run(&self, asked: &ffi::Request<'_>, completion: cxx::SharedPtr<ffi::Completion>) -> Outcome<()> {
        guarded(|| self.group.run(request(asked)?, hook(asked, completion)))
    }

    pub(super) fn monitored_barrier(&self, timeout_ms: i64, wait_all_ranks: bool) -> Outcome<()> {
        guarded(|| {
            let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
            self.group.monitored_barrier(timeout, wait_all_ranks)
        })
    }

    pub(super) fn state(&self) -> ffi::GroupState {
        let fault = self.group.fault().as_ref().map(coded).unwrap_or_default();
        let watched = self.group.watched();
        let gone = watched.iter().filter(|(_, gone)| *gone).map(|(rank, _)| *rank as u32).collect();
        let watched = watched.iter().map(|(rank, _)| *rank as u32).collect();
        ffi::GroupState { sequence: self.group.sequence(), fault, failed: self.group.has_failed(), watched, gone }
    }
    pub(super) fn set_timeout(&self, timeout_ms: u64) {
        self.group.set_timeout(Duration::from_millis(timeout_ms));
    }
    pub(super) fn add_ephemeral_timeout(&self, more_ms: u64) {
        self.group.add_ephemeral_timeout(Duration::from_millis(more_ms));
    }
    pub(super) fn leave(&self, how: ffi::Leave, reason: &str) {
        let _ = guarded(|| {
            match how {
                ffi::Leave::kInOrder => self.group.shutdown(),
                _ => self.group.abort(reason),
            }
            Ok(())
        });
    }
    pub(super) fn explain(&self, asked: &observed::OpDesc<'_>) -> Outcome<observed::Explanation> {
        guarded(|| {
            let found = match u64::try_from(asked.number) {
                Ok(number) => {
                    self.group.not_forked()?;
                    self.group.explain_number(number)?
                }
                Err(_) => self.group.explain(kind_named(asked.kind)?, asked.bytes, dtype_named(asked.dtype)?),
            };
            Ok(explanation(&found))
        })
    }
    pub(super) fn stats(&self, part: observed::StatsPart) -> Outcome<observed::Stats> {
        let group = &self.group;
        guarded(|| match part {
            observed::StatsPart::kReset => {
                if group.not_forked().is_ok() {
                    group.reset_stats();
                }
                Ok(observed::Stats::default())
            }
            observed::StatsPart::kRecords => {
                group.not_forked()?;
                Ok(observed::Stats { records: group.records().iter().map(record).collect(), ..Default::default() })
            }
            _ => {
                group.not_forked()?;
                let (counts, moment) = group.stats();
                Ok(stats(&counts, group.rank(), group.size(), moment))
            }
        })
    }
    pub(super) fn external_op(&self, call: &ffi::ExternalOp) -> Outcome<Box<RustExternalOp>> {
        guarded(|| {
            self.group.not_forked()?;
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
            let timeout = u64::try_from(call.timeout_ms).ok().map(Duration::from_millis);
            Ok(Box::new(RustExternalOp(self.group.external_op(kind, carrier, peer, bytes, note, timeout))))
        })
    }
}

impl RustGroup {
    pub(super) fn list_operations(
        of: ffi::Kind,
        by_vendor: bool,
        elements: &[u8],
        bytes: &[usize],
    ) -> Outcome<Vec<u32>> {
        guarded(|| {
            let list = elements.iter().copied().zip(bytes.iter().copied());
            Ok(crate::fusion::lists::operations(kind(of)?, by_vendor, list))
        })
    }
}

impl RustOp {
    pub(super) fn wait(&self, timeout_ms: i64) -> Outcome<()> {
        guarded(|| self.0.wait(u64::try_from(timeout_ms).ok().map(Duration::from_millis)))
    }
    pub(super) fn facts(&self) -> ffi::OpFacts {
        ffi::OpFacts {
            done: self.0.is_done(),
            number: self.0.number(),
            source: self.0.source(),
            duration_ns: self.0.duration().as_nanos() as u64,
            timeout_ms: self.0.timeout().as_millis() as u64,
            error: self.0.error().map(coded).unwrap_or_default(),
        }
    }
    pub(super) fn explain(&self) -> observed::Explanation {
        explanation(&self.0.explain())
    }
}

impl RustExternalOp {
    pub(super) fn reached(&self, stage: ffi::ExternalStage, words: &str) -> String {
        let failure = guarded(|| {
            match stage {
                ffi::ExternalStage::kAwaited => self.0.awaited(true),
                ffi::ExternalStage::kLeft => self.0.awaited(false),
                ffi::ExternalStage::kUntimed => self.0.end(true, false),
                ffi::ExternalStage::kDone => self.0.end(true, true),
                ffi::ExternalStage::kRefused => self.0.refused(),
                _ => return Ok(self.0.fail(words).as_ref().map(coded)),
            }
            Ok(None)
        });
        failure.ok().flatten().unwrap_or_default()
    }
}

impl Core {
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

    pub(super) fn at_exit() {
        let _ = guarded(|| {
            group::at_exit();
            Ok(())
        });
    }

    pub(super) fn facts(of: observed::Facts) -> Vec<observed::Fact> {
        let named = |name: &str| observed::Fact { name: name.to_string(), value: String::new() };
        match of {
            observed::Facts::kKinds => Kind::ALL.iter().map(|kind| named(kind.name())).collect(),
            observed::Facts::kDtypes => {
                let combined = Dtype::ALL.iter().filter(|dtype| **dtype != Dtype::Bytes);
                combined.map(|dtype| named(dtype.name())).collect()
            }
            _ => {
                let kernels = crate::reduce::Level::available().last().map_or("", |level| level.name());
                let facts = crate::os::topology::report().into_iter().chain([("kernels".into(), kernels.into())]);
                facts.map(|(name, value)| observed::Fact { name, value }).collect()
            }
        }
    }

    pub(super) fn choices(
        ranks: usize,
        algorithm: &str,
        topology: &str,
        asked: &[observed::OpDesc<'_>],
    ) -> Outcome<observed::ChoiceTable> {
        guarded(|| {
            if asked.is_empty() {
                return Ok(table(group::table_without_group(ranks, algorithm)?));
            }
            let explain = |one: &observed::OpDesc<'_>| {
                let (kind, dtype) = (kind_named(one.kind)?, dtype_named(one.dtype)?);
                if !topology.is_empty() {
                    return group::start_rule(kind, one.bytes, ranks, topology)
                        .map(|found| start(&found, one.bytes, ranks));
                }
                group::explain_without_group(kind, one.bytes, dtype, ranks, algorithm).map(|found| explanation(&found))
            };
            Ok(observed::ChoiceTable {
                explained: asked.iter().map(explain).collect::<Result<_>>()?,
                ..Default::default()
            })
        })
    }

    pub(super) fn save_table(ranks: usize, made: &str, lines: &str) -> Outcome<String> {
        guarded(|| crate::select::table::make(ranks, made, lines))
    }
}
