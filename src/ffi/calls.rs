//! The functions of `bridge` and `observe` that C++ calls, except those for devices and simulation. Each calls the
//! core, and turns errors and panics into text.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::bridge::ffi;
use super::callbacks::{CompletionHook, PythonHook, PythonLog, StoreHook};
use super::convert::{
    Outcome, coded, dtype_named, elements_and_bytes, guarded, kind, kind_named, note, quietly, request,
};
use super::handles::{Core, RustExternalOp, RustGroup, RustOp, RustRendezvous};
use crate::config::{Config, Settings, Threads, Verify};
use crate::engine::device::Vendor;
use crate::engine::multihost::link::Link;
use crate::engine::multihost::wire::{Over, Place, Wire, join};
use crate::error::Error;
use crate::fusion::lists;
use crate::group;
use crate::group::{Group, StartRule};
use crate::json;
use crate::rendezvous::Rendezvous;
use crate::select::export as explained;
use crate::stats::export as counted;
use crate::types::{Dtype, Kind};

impl RustRendezvous {
    pub(super) fn meet(setup: &ffi::Setup, store: cxx::SharedPtr<ffi::Store>) -> Outcome<ffi::Decision> {
        guarded(|| {
            Vendor::check_option(&setup.vendor)?;
            let verify = Verify::parse(&setup.verify).ok_or_else(|| {
                let said = &setup.verify;
                Error::invalid(format!("sagellm: the option verify is {said:?}, expected one of {}", Verify::TEXTS))
            })?;
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
                settings: Settings {
                    fusion: setup.fusion,
                    strict: setup.strict,
                    measure_link: setup.measure_link,
                    numa: setup.numa,
                    verify,
                },
                threads: Threads { most: setup.threads, named: setup.threads_named },
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
    pub(super) fn connect(
        &self,
        address: &str,
        paths: &str,
        link: &str,
        folders: &[String],
        timeout_ms: u64,
    ) -> Outcome<()> {
        guarded(|| {
            let over = Over::named(link, folders)?;
            let paths: Vec<String> = paths.split_whitespace().map(str::to_string).collect();
            let place = Place {
                store: &*self.store,
                id: self.decided.id,
                rank: self.decided.config.rank,
                size: self.decided.config.size,
                address,
                paths: &paths,
                timeout: Duration::from_millis(timeout_ms),
            };
            let link = join(&Wire::of_process(&over)?, &place)?;
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
    pub(super) fn shutdown(&self) {
        quietly(|| self.group.shutdown());
    }
    pub(super) fn abort(&self, reason: &str) {
        quietly(|| self.group.abort(reason));
    }
    pub(super) fn explain_number(&self, number: u64) -> Outcome<String> {
        guarded(|| {
            self.group.not_forked()?;
            Ok(explained::explanation(&self.group.explain_number(number)?))
        })
    }
    pub(super) fn explain(&self, kind: &str, bytes: u64, dtype: &str) -> Outcome<String> {
        guarded(|| Ok(explained::explanation(&self.group.explain(kind_named(kind)?, bytes, dtype_named(dtype)?))))
    }
    pub(super) fn estimate(&self, asked: &ffi::Request<'_>) -> Outcome<u64> {
        guarded(|| self.group.estimate(&request(asked)?))
    }
    pub(super) fn stats(&self) -> Outcome<String> {
        let group = &self.group;
        guarded(|| {
            group.not_forked()?;
            let (counts, moment) = group.stats();
            Ok(counted::counts(&counts, (group.rank(), group.size()), moment, group::NAMES))
        })
    }
    pub(super) fn totals(&self) -> Outcome<String> {
        guarded(|| {
            self.group.not_forked()?;
            let (since, totals) = self.group.totals();
            Ok(counted::totals(since, &totals))
        })
    }
    pub(super) fn records(&self, last: usize) -> Outcome<String> {
        guarded(|| {
            self.group.not_forked()?;
            Ok(counted::last_records(&self.group.records(), last, group::NAMES))
        })
    }
    pub(super) fn reset_stats(&self) {
        quietly(|| {
            if self.group.not_forked().is_ok() {
                self.group.reset_stats();
            }
        });
    }
    pub(super) fn delegate_op(&self, call: &ffi::ExternalOp) -> Outcome<Box<RustExternalOp>> {
        self.external_op(call, group::Carrier::Delegate)
    }
    pub(super) fn composed_op(&self, call: &ffi::ExternalOp) -> Outcome<Box<RustExternalOp>> {
        self.external_op(call, group::Carrier::Composed)
    }
    fn external_op(&self, call: &ffi::ExternalOp, carrier: group::Carrier) -> Outcome<Box<RustExternalOp>> {
        guarded(|| {
            self.group.not_forked()?;
            let kind = kind(call.kind)?;
            let note = note(call.note);
            let (peer, bytes) = ((call.root, call.tag), (call.read, call.written));
            let timeout = u64::try_from(call.timeout_ms).ok().map(Duration::from_millis);
            Ok(Box::new(RustExternalOp(self.group.external_op(kind, carrier, peer, bytes, note, timeout))))
        })
    }
}

impl RustGroup {
    pub(super) fn list_operations(of: ffi::Kind, elements: &[u8], bytes: &[usize]) -> Outcome<Vec<u32>> {
        guarded(|| Ok(lists::operations(kind(of)?, false, elements_and_bytes(elements, bytes))))
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
    pub(super) fn explain(&self) -> String {
        explained::explanation(&self.0.explain())
    }
}

impl RustExternalOp {
    pub(super) fn wait_begins(&self) {
        quietly(|| self.0.awaited(true));
    }
    pub(super) fn wait_ends(&self) {
        quietly(|| self.0.awaited(false));
    }
    pub(super) fn ended(&self) {
        quietly(|| self.0.end(true, true));
    }
    pub(super) fn ended_unseen(&self) {
        quietly(|| self.0.end(true, false));
    }
    pub(super) fn failed(&self, words: &str) -> String {
        guarded(|| Ok(self.0.fail(words).as_ref().map(coded))).ok().flatten().unwrap_or_default()
    }
    pub(super) fn refused(&self) {
        quietly(|| self.0.refused());
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
        quietly(group::at_exit);
    }

    pub(super) fn kind_names() -> Vec<String> {
        Kind::ALL.iter().map(|kind| kind.name().to_string()).collect()
    }

    pub(super) fn dtype_names() -> Vec<String> {
        let combined = Dtype::ALL.iter().filter(|dtype| **dtype != Dtype::Bytes);
        combined.map(|dtype| dtype.name().to_string()).collect()
    }

    pub(super) fn machine_facts() -> String {
        let kernels = crate::reduce::Level::available().last().map_or("", |level| level.name());
        json::text(|to| {
            for (name, value) in crate::os::topology::report() {
                to.string(&name, &value);
            }
            to.string("kernels", kernels);
        })
    }

    pub(super) fn explain_without_group(
        ranks: usize,
        algorithm: &str,
        kind: &str,
        bytes: u64,
        dtype: &str,
    ) -> Outcome<String> {
        guarded(|| {
            let (kind, dtype) = (kind_named(kind)?, dtype_named(dtype)?);
            Ok(explained::explanation(&group::explain_without_group(kind, bytes, dtype, ranks, algorithm)?))
        })
    }

    pub(super) fn table_without_group(ranks: usize, algorithm: &str) -> Outcome<String> {
        guarded(|| Ok(explained::table(&group::table_without_group(ranks, algorithm)?)))
    }

    pub(super) fn start_rule(ranks: usize, topology: &str, kind: &str, bytes: u64) -> Outcome<String> {
        guarded(|| {
            let StartRule { start, topology, decided } = group::start_rule(kind_named(kind)?, bytes, ranks, topology)?;
            Ok(explained::start_rule(bytes, ranks, start, &topology, &decided))
        })
    }

    pub(super) fn save_table(ranks: usize, made: &str, lines: &str) -> Outcome<String> {
        guarded(|| crate::select::table::make(ranks, made, lines))
    }
}
