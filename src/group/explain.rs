//! What a group and an operation say about the ways they choose.

use super::{CoreOp, Group, Op};
use crate::error::{Error, Result};
use crate::op::Route;
use crate::rendezvous::decision::on_this_host;
use crate::select::explain;
use crate::select::explain::{Batch, Explanation, Past};
use crate::select::{Choice, Class, OpDesc, Path};
use crate::stats::ring::{History, Record, State};
use crate::types::{Dtype, Kind};

/// As `Group::explain`, for a group of `ranks` ranks of this host that is not there.
pub fn explain_without_group(
    kind: Kind,
    bytes: u64,
    dtype: Dtype,
    ranks: usize,
    algorithm: &str,
) -> Result<Explanation> {
    let (shape, policy) = on_this_host(ranks, algorithm)?;
    let desc = OpDesc { kind, bytes, class: Class::of(kind, dtype) }.normal();
    Ok(explain::explain(desc, &shape, &policy))
}

/// All choices of such a group.
pub fn table_without_group(ranks: usize, algorithm: &str) -> Result<explain::Table> {
    let (shape, policy) = on_this_host(ranks, algorithm)?;
    Ok(explain::table(&shape, &policy))
}

impl Group {
    /// How an operation would travel. `bytes` are those that one rank gives: its block of an all_gather or gather, the
    /// whole input of a scatter or reduce_scatter.
    pub fn explain(&self, kind: Kind, bytes: u64, dtype: Dtype) -> Explanation {
        self.explain_op(OpDesc { kind, bytes, class: Class::of(kind, dtype) }.normal(), false)
    }

    /// How the collective with this number travels or travelled: while it runs, and afterwards as long as the ring has its
    /// record.
    pub fn explain_number(&self, number: u64) -> Result<Explanation> {
        let inner = self.lock();
        let history = inner.stats.history();
        let (pending, whole) = (inner.engine.collective(number), inner.engine.delegate_reason().is_some());
        let ranks = self.config.size;
        let called = match pending {
            Some(op) => Some(Called::of_op(&op, ranks)),
            None => recorded(history, number, whole).map(|record| Called::of_record(record, ranks)),
        };
        let called = called.ok_or_else(|| not_there(history, number, inner.number, &self.config.name))?;
        drop(inner);
        Ok(self.explain_called(called))
    }

    /// The way is worked out anew, from what was recorded beside it.
    fn explain_called(&self, called: Called) -> Explanation {
        let Called { number, own, route, well, host_staged } = called;
        let choice = (route.choice != 0).then(|| Choice::from_code(route.choice));
        let batched = called.batched();
        let desc = OpDesc::from_load(own.kind, route.load);
        let found = self.explain_op(desc, batched);
        let (count, (first, last)) = (route.fused_with.count(), route.fused_with.numbers(number));
        // Between hosts it is known when the batch is made, on one host when the operation has ended.
        let known = well || choice.is_some_and(|choice| matches!(choice.path, Path::Hosts { .. }));
        let batch = Batch { count, first, last, bytes: batched.then_some(desc.bytes) };
        let past = Past { number, choice, batch: known.then_some(batch), host_staged };
        Explanation { desc: own, past: Some(past), ..found }
    }

    fn explain_op(&self, desc: OpDesc, batched: bool) -> Explanation {
        self.lock().engine.explain(desc, batched)
    }
}

/// A call, as far as it was recorded.
struct Called {
    number: u64,
    own: OpDesc,
    route: Route,
    /// It has ended, and not failed.
    well: bool,
    host_staged: bool,
}

impl Called {
    fn of_op(op: &CoreOp, ranks: usize) -> Called {
        let well = op.is_done() && op.error().is_none();
        let host_staged = op.request.note.host_staged;
        Called { number: op.number, own: OpDesc::of(&op.request, ranks), route: op.route(), well, host_staged }
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
        let called = Called { number, own, route, well, host_staged: record.note.host_staged };
        match Choice::from_code(route.choice) {
            Choice::DELEGATE => Called { own: sizes, route: Route { load: sizes.load(), ..route }, ..called },
            _ if called.batched() => Called { own: sizes, ..called }, // the load is that of all
            _ => called,
        }
    }

    /// The way was chosen for all of a batch.
    fn batched(&self) -> bool {
        let path = Choice::from_code(self.route.choice).path;
        self.route.fused_with.count() > 1 && matches!(path, Path::Hosts { .. })
    }
}

/// The record of a collective that set out or ended. Where not the `whole` group is a delegate's, what one carried has the
/// number of the operation before it, and a call that is made of several that of its first.
fn recorded(history: &History, number: u64, whole: bool) -> Option<&Record> {
    let ours = |record: &&Record| {
        let choice = Choice::from_code(record.route.choice);
        record.number == number && choice != Choice::COMPOSED && (whole || choice != Choice::DELEGATE)
    };
    history.collectives().find(ours).filter(|record| record.route.choice != 0 || record.state != State::Pending)
}

/// Why there is no record of `number` in a group that has issued collectives up to `last`.
fn not_there(history: &History, number: u64, last: u64, group: &str) -> Error {
    let kept = history.collectives().map(|record| record.number).min();
    Error::Invalid(match kept {
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
    /// How it travels or travelled, worked out anew from what it asked for and with whom it went.
    pub fn explain(&self) -> Explanation {
        self.group.explain_called(Called::of_op(&self.core, self.group.config.size))
    }

    /// The way that was recorded when it set out; `Unknown` before.
    pub fn choice(&self) -> Choice {
        Choice::from_code(self.core.route().choice)
    }
}
