//! Explains which algorithms a group would choose and which it chose for its operations, and estimates their times.
//! Exports its statistics: copies for callers, and a file when the group fails.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use super::estimate::{by_bytes, scaled};
use super::{CoreOp, Group, Op, check};
use crate::error::{Error, Result};
use crate::op::Route;
use crate::os::clock;
use crate::rendezvous::decision::on_this_host;
use crate::select::explain;
use crate::select::explain::{Batch, CallsOf, Explanation, Past, Scaled};
use crate::select::start::{Start, Topology};
use crate::select::{Choice, Class, GroupShape, OpDesc, Path, Policy};
use crate::stats::Stats;
use crate::stats::Total;
use crate::stats::Typical;
use crate::stats::export;
use crate::stats::export::{Moment, Names};
use crate::stats::history::{History, Record, State};
use crate::stats::kept::Alike;
use crate::types::{Dtype, Kind, Request, Span};
use crate::{config, select};

/// Like `Group::explain`, for a hypothetical group of `ranks` ranks on this host.
pub fn explain_without_group(
    kind: Kind,
    bytes: u64,
    dtype: Dtype,
    ranks: usize,
    algorithm: &str,
) -> Result<Explanation> {
    let (shape, policy) = on_this_host(ranks, algorithm)?;
    let desc = OpDesc { kind, bytes, class: Class::of(kind, dtype) }.normal();
    let found = explain::explain(desc, &shape, &policy);
    let predicted = |desc| explain::explain(desc, &shape, &policy).predicted_ns;
    let scaled = payload(desc, bytes, ranks)
        .and_then(|payload| Usual::earlier(kind, &shape, &policy)?.scaled(desc, payload, predicted));
    Ok(Explanation { scaled, ..found })
}

/// Returns the payload of an operation whose size, as `explain` counts it, is `bytes`. None if the payload depends on
/// the rank, or on sizes that no rank knows alone.
fn payload(desc: OpDesc, bytes: u64, ranks: usize) -> Option<f64> {
    match desc.kind {
        Kind::AllReduce | Kind::Broadcast | Kind::Reduce | Kind::ReduceScatter | Kind::Barrier => Some(bytes as f64),
        Kind::AllGather => Some((bytes * ranks as u64) as f64),
        _ => None,
    }
}

/// The usual times of calls of one kind.
struct Usual {
    typical: Vec<Typical>,
    by: CallsOf,
}

impl Usual {
    /// The usual times in earlier groups of this shape and policy. None if none were kept.
    fn earlier(kind: Kind, shape: &GroupShape, policy: &Policy) -> Option<Usual> {
        let typical = alike(shape, policy)?.load().of(kind);
        (!typical.is_empty()).then_some(Usual { typical, by: CallsOf::EarlierGroups })
    }

    /// The model's time for a call with this payload, scaled to the usual times. `predicted`: the model's nanoseconds
    /// for an operation, or 0.
    fn scaled(&self, own: OpDesc, payload: f64, predicted: impl Fn(OpDesc) -> u64) -> Option<Scaled> {
        let ns = scaled(&self.typical, model(own, payload, predicted), payload) as u64;
        Some(Scaled { ns, by: self.by })
    }
}

/// Returns the properties that identify the kept call times of a group. None if no times are kept: for one rank,
/// between hosts, and without our own engine.
fn alike(shape: &GroupShape, policy: &Policy) -> Option<Alike> {
    let GroupShape { ranks, hosts, cores, threads, stage_bytes, .. } = *shape;
    (hosts == 1 && ranks > 1 && stage_bytes > 0).then(|| Alike { ranks, cores, threads, policy: policy.hash() })
}

/// Returns the model's nanoseconds as a function of the payload, for operations like `own`, which has this `payload`.
fn model(own: OpDesc, payload: f64, predicted: impl Fn(OpDesc) -> u64) -> impl Fn(f64) -> f64 {
    // The size by which algorithms are chosen is a fixed fraction of the payload.
    let part = if payload > 0.0 { own.bytes as f64 / payload } else { 0.0 };
    move |payload: f64| {
        let desc = OpDesc { bytes: (payload * part) as u64, ..own };
        // The algorithm for an all_to_all is chosen without its size.
        let found = if own.kind == Kind::AllToAll { 0 } else { predicted(desc) };
        if found > 0 { found as f64 } else { by_bytes(payload) }
    }
}

/// The algorithm that the start rules choose, and why.
pub struct StartRule {
    pub start: Start,
    pub topology: Topology,
    pub decided: String,
}

/// What the start rules choose for an operation of `bytes` bytes over `ranks` devices. `topology` is in text form.
pub fn start_rule(kind: Kind, bytes: u64, ranks: usize, topology: &str) -> Result<StartRule> {
    let wrong = |what: String| Err(Error::invalid(format!("sagellm: {what}")));
    let topology = match Topology::parse(topology) {
        Ok(Some(topology)) => topology,
        Ok(None) => return wrong("a topology is missing".into()),
        Err(what) => return wrong(format!("the topology is {topology:?}: {what}")),
    };
    if kind != Kind::AllReduce {
        return wrong(format!("the start rules name algorithms of all_reduce, and were asked about {kind}"));
    }
    if ranks < topology.hosts {
        return wrong(format!("{ranks} devices cannot be on the {} hosts of the topology", topology.hosts));
    }
    let start = Start::of(bytes, ranks, topology.hosts, topology.full_nvlink);
    let policy = Policy { topology: Some(topology), ..Policy::default() };
    Ok(StartRule { start, topology, decided: explain::by_start_rule(start, &policy) })
}

/// All choices that a hypothetical group of `ranks` ranks on this host would make.
pub fn table_without_group(ranks: usize, algorithm: &str) -> Result<explain::Table> {
    let (shape, policy) = on_this_host(ranks, algorithm)?;
    Ok(explain::table(&shape, &policy))
}

impl Group {
    /// Explains the choice for an operation. `bytes` is the size on one rank: its block for an all_gather or gather,
    /// the whole input for a scatter or reduce_scatter.
    pub fn explain(&self, kind: Kind, bytes: u64, dtype: Dtype) -> Explanation {
        let desc = OpDesc { kind, bytes, class: Class::of(kind, dtype) }.normal();
        let found = self.explain_op(desc, false);
        let predicted = |desc| self.explain_op(desc, false).predicted_ns;
        let scaled = payload(desc, bytes, self.config.size)
            .and_then(|payload| self.usual(kind, &found.shape)?.scaled(desc, payload, predicted));
        Explanation { scaled, ..found }
    }

    /// Returns the usual times of this group's calls or, before the group has made enough calls, those of earlier
    /// groups.
    fn usual(&self, kind: Kind, shape: &GroupShape) -> Option<Usual> {
        let typical = self.lock().stats.typical(kind);
        match typical.is_empty() {
            true => Usual::earlier(kind, shape, &self.policy),
            false => Some(Usual { typical, by: CallsOf::ThisGroup }),
        }
    }

    /// Returns the usual times of the calls. A rank that leaves the group in order keeps them for later groups
    /// (`Alike::save`). None if this rank keeps none.
    pub(super) fn times_to_keep(&self) -> Option<(Alike, Vec<(Kind, Typical)>)> {
        let speaks =
            self.config.rank == 0 && self.id != [0; 16] && !self.faults.role().is_inside() && !self.has_failed();
        if !speaks || self.delegate_reason().is_some() {
            return None;
        }
        let barrier = OpDesc { kind: Kind::Barrier, bytes: 0, class: Class::Moved };
        let alike = alike(&self.explain_op(barrier, false).shape, &self.policy)?;
        let mut inner = self.lock();
        let of_kind = |kind: Kind| inner.stats.typical(kind).into_iter().map(move |typical| (kind, typical));
        let times = Kind::COLLECTIVES.into_iter().flat_map(of_kind).collect();
        Some((alike, times))
    }

    /// Explains the collective with this number, if it is pending or the history still contains its record.
    pub fn explain_number(&self, number: u64) -> Result<Explanation> {
        let inner = self.lock();
        let history = inner.stats.history();
        let (pending, whole) = (inner.engine.collective(number), inner.engine.delegate_reason().is_some());
        let ranks = self.config.size;
        let called = match pending {
            Some(op) => Some(Called::of_op(&op, ranks)),
            None => recorded(history, number, whole).map(|record| Called::of_record(record, ranks)),
        };
        let called =
            called.ok_or_else(|| not_there(history, number, inner.counters.collectives(), &self.config.name))?;
        drop(inner);
        Ok(self.explain_called(called))
    }

    /// Computes the choice again, from the recorded description.
    fn explain_called(&self, called: Called) -> Explanation {
        let Called { number, own, route, well, host_staged, took_ns } = called;
        let choice = (route.choice != 0).then(|| Choice::from_code(route.choice));
        let batched = called.batched();
        let desc = OpDesc::from_load(own.kind, route.load);
        let found = self.explain_op(desc, batched);
        let (count, (first, last)) = (route.fused_with.count(), route.fused_with.numbers(number));
        // Over several hosts, an operation's batch is recorded together with its choice. On one host, the batch is
        // recorded only when the operation ends.
        let known = well || choice.is_some_and(|choice| matches!(choice.path, Path::Hosts { .. }));
        let batch = Batch { count, first, last, bytes: batched.then_some(desc.bytes) };
        let past = Past { number, choice, batch: known.then_some(batch), host_staged, took_ns };
        let found = if choice == Some(Choice::MAPPED) { mapped(found) } else { found };
        Explanation { desc: own, past: Some(past), ..found }
    }

    /// Returns the nanoseconds that such a call would take from its issue to its end. Sends nothing.
    pub fn estimate(&self, request: &Request) -> Result<u64> {
        self.not_forked()?;
        check::validate(request, (self.config.rank, self.config.size))?;
        let (kind, size) = (request.kind, self.config.size);
        let whole = |spans: &[Span]| spans.iter().map(|span| span.bytes as f64).sum::<f64>();
        let payload = whole(request.inputs()).max(whole(request.outputs()));
        let own = OpDesc::of(request, size);
        let predicted = |desc| self.explain_op(desc, false).predicted_ns;
        // Uses only calls of this group, not times of earlier groups: those may differ between ranks, and programs
        // decide by estimates.
        let typical = self.lock().stats.typical(kind);
        if typical.is_empty() && kind.is_p2p() {
            return Err(Error::invalid(format!(
                "sagellm: no {kind} can be estimated in group '{}' before it has made some",
                self.config.name
            )));
        }
        Ok(scaled(&typical, model(own, payload, predicted), payload) as u64)
    }

    fn explain_op(&self, desc: OpDesc, batched: bool) -> Explanation {
        self.lock().engine.explain(desc, batched)
    }
}

/// Returns the explanation of an operation that accessed its peers' tensors directly (`Choice::MAPPED`). That choice
/// depends on the tensors' addresses, which are not recorded. `staged` is the explanation that was computed again
/// without them.
fn mapped(staged: Explanation) -> Explanation {
    let decided = Choice::MAPPED.reason.text().to_string();
    let (predicted_ns, measured_ns) = (0, None);
    Explanation { choice: Choice::MAPPED, decided, predicted_ns, measured_ns, rejected: Vec::new(), ..staged }
}

/// What was recorded about a call.
struct Called {
    number: u64,
    own: OpDesc,
    route: Route,
    /// Whether it ended without an error.
    well: bool,
    host_staged: bool,
    /// Nanoseconds from issue to end. 0 while it runs.
    took_ns: u64,
}

impl Called {
    fn of_op(op: &CoreOp, ranks: usize) -> Called {
        let well = op.is_done() && op.error().is_none();
        let (host_staged, took_ns) = (op.request.note.host_staged, op.duration().as_nanos() as u64);
        let own = OpDesc::of(&op.request, ranks);
        Called { number: op.number, own, route: op.route(), well, host_staged, took_ns }
    }

    fn of_record(record: &Record, ranks: usize) -> Called {
        let Record { number, kind, dtype, read, written, route, state, .. } = *record;
        let bytes = match kind {
            Kind::Broadcast => read.max(written),
            Kind::Scatter => written * ranks as u64,
            _ => read,
        };
        let sizes = OpDesc { kind, bytes, class: Class::of(kind, dtype) }.normal();
        let (own, well) = (OpDesc::from_load(kind, route.load), state == State::Done);
        let (host_staged, took_ns) = (record.note.host_staged, record.took());
        let called = Called { number, own, route, well, host_staged, took_ns };
        match Choice::from_code(route.choice) {
            Choice::DELEGATE => Called { own: sizes, route: Route { load: sizes.load(), ..route }, ..called },
            _ if called.batched() => Called { own: sizes, ..called }, // the recorded load is that of the whole batch
            _ => called,
        }
    }

    /// Whether the algorithm was chosen for a whole batch.
    fn batched(&self) -> bool {
        let path = Choice::from_code(self.route.choice).path;
        self.route.fused_with.count() > 1 && matches!(path, Path::Hosts { .. })
    }
}

/// Returns the record of a collective that has started or ended. Skips two kinds of records: if only some operations
/// are delegated (not the `whole` group), that of a delegated operation, which has the number of the operation before
/// it; and that of a composed call, which has the number of the call's first operation.
fn recorded(history: &History, number: u64, whole: bool) -> Option<&Record> {
    let ours = |record: &&Record| {
        let choice = Choice::from_code(record.route.choice);
        record.number == number && choice != Choice::COMPOSED && (whole || choice != Choice::DELEGATE)
    };
    history.collectives().find(ours).filter(|record| record.route.choice != 0 || record.state != State::Pending)
}

/// The error for a missing record of collective `number`. `last` is the number of the last collective that was issued.
fn not_there(history: &History, number: u64, last: u64, group: &str) -> Error {
    let kept = history.collectives().map(|record| record.number).min();
    Error::invalid(match kept {
        _ if number == 0 || number > last => format!(
            "sagellm explain: group '{group}' has issued {last} collectives on this rank, and none has number {number}; they \
             are counted from 1"
        ),
        Some(kept) if number >= kept => {
            format!("sagellm explain: {number} of group '{group}' is just ending; ask again when its wait has returned")
        }
        kept => format!(
            "sagellm explain: collective {number} of group '{group}' is forgotten: the last {} operations are kept, {}. \
             SAGELLM_RING makes it more",
            history.room(),
            kept.map_or("and no collective is among them".to_string(), |kept| format!("collectives from {kept} on"))
        ),
    })
}

impl Op {
    /// Explains the choice. It is computed again from the operation's description and from the batch that the operation
    /// was fused with.
    pub fn explain(&self) -> Explanation {
        self.group.explain_called(Called::of_op(&self.core, self.group.config.size))
    }

    /// The choice that was recorded when the operation started; `Unknown` before.
    pub fn choice(&self) -> Choice {
        Choice::from_code(self.core.route().choice)
    }
}

/// Functions that return the names of codes in records.
pub const NAMES: Names = Names { path: select::path_name, reason: select::reason_name };

impl Moment {
    fn now() -> Moment {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Moment { now: clock::stamp(), wall: wall.as_nanos() as u64 }
    }
}

impl Group {
    /// Returns counters, times and waits, and the time at which they were read. Holds the lock only while it copies
    /// them.
    pub fn stats(&self) -> (Stats, Moment) {
        let stats = self.lock().stats.counts();
        (stats, Moment::now())
    }

    /// Returns the sums of each kind since creation or the last reset, and the time of that event (`Stats::since`).
    pub fn totals(&self) -> (u64, Vec<Total>) {
        let stats = &mut self.lock().stats;
        (stats.since(), stats.totals())
    }

    /// A copy of the history of the last operations.
    pub fn records(&self) -> History {
        self.lock().stats.history().clone()
    }

    pub fn rank(&self) -> usize {
        self.config.rank
    }

    pub fn size(&self) -> usize {
        self.config.size
    }

    /// Resets all counters.
    pub fn reset_stats(&self) {
        self.lock().stats.reset();
    }

    /// Sets, for each rank of the group, its rank in the default group; only for records. Only the first call has an
    /// effect.
    pub fn set_members(&self, members: Vec<u32>) {
        self.watch.set_members(members);
    }

    /// Writes the records of a group that has just failed to the folder that the environment names, if any.
    pub(super) fn dump_records(&self) {
        let Some(folder) = config::dump_folder() else { return };
        let (rank, name) = (self.config.rank, &self.config.name);
        if self.faults.role().is_inside() {
            return; // the program has not made this group
        }
        let members = self.watch.members().map_or_else(|| (0..self.config.size as u32).collect(), <[u32]>::to_vec);
        let fault = self.fault().map(|error| error.text().to_string()).unwrap_or_default();
        let text = export::dump(name, &fault, (rank, &members), Moment::now(), self.records().iter(), NAMES);
        let safe: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let whose = members.get(rank).copied().unwrap_or(rank as u32);
        let path = PathBuf::from(folder).join(format!("sagellm-{safe}-{whose}.json"));
        if let Err(error) = std::fs::write(&path, text) {
            log::warn!("group '{name}' rank {rank}: cannot write its last operations to {}: {error}", path.display());
        }
    }
}
