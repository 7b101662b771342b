//! The functions behind `torch-sagellm simulate`: predicted times, and one rank's messages. Names are translated to
//! enums and back.

use super::convert::{Outcome, guarded};
use super::handles::Core;
use super::observe::ffi as observed;
use crate::algorithms;
use crate::algorithms::{Algorithm, How, Schedule};
use crate::error::{Error, Result};
use crate::select::cost;
use crate::select::cost::HierarchicalCosts;
use crate::select::cost::{Link, Model};
use crate::types::Kind;

/// A name in addition to those of the algorithms: the all_reduce in two levels that the engine uses over several hosts.
const TWO_LEVELS: &str = "hierarchical";

fn collective_named(name: &str) -> Result<Kind> {
    let known = || Kind::COLLECTIVES.map(Kind::name).join(", ");
    let unknown = || Error::invalid(format!("sagellm: no collective is called {name:?}; there are {}", known()));
    Kind::COLLECTIVES.into_iter().find(|kind| kind.name() == name).ok_or_else(unknown)
}

fn algorithm_named(name: &str) -> Result<Algorithm> {
    Algorithm::from_name(name).ok_or_else(|| {
        let known: Vec<_> = Algorithm::ALL.into_iter().map(Algorithm::name).collect();
        Error::invalid(format!("sagellm: no algorithm is called {name:?}; there are {}", known.join(", ")))
    })
}

fn not_served(kind: &str, algorithm: &str, ranks: usize) -> Error {
    Error::invalid(format!("sagellm: {algorithm} has no schedule for {kind} of {ranks} ranks"))
}

impl Core {
    pub(super) fn predict(
        kind: &str,
        algorithm: &str,
        ranks: usize,
        sizes: &[f64],
        model: &observed::CostModel,
    ) -> Outcome<Vec<observed::Prediction>> {
        guarded(|| {
            let kind = collective_named(kind)?;
            let link = |alpha, overhead, beta| Link { alpha, overhead, beta, short_bytes: f64::INFINITY };
            let costs = Model {
                host: link(model.host_alpha, model.host_overhead, model.host_beta),
                network: link(model.network_alpha, model.network_overhead, model.network_beta),
                gamma: model.gamma,
                ranks_per_host: model.ranks_per_host,
            };
            priced(kind, algorithm, ranks, sizes, &costs)
        })
    }

    pub(super) fn algorithms_of(kind: &str) -> Outcome<Vec<String>> {
        guarded(|| Ok(serving(collective_named(kind)?).into_iter().map(str::to_string).collect()))
    }

    pub(super) fn program(
        kind: &str,
        algorithm: &str,
        ranks: usize,
        segments: usize,
        rank: usize,
    ) -> Outcome<observed::Program> {
        guarded(|| {
            let schedule = Schedule::new(algorithm_named(algorithm)?, collective_named(kind)?, ranks, 0, segments)
                .filter(|_| rank < ranks)
                .ok_or_else(|| not_served(kind, algorithm, ranks))?;
            let numbers = |ranges: Vec<std::ops::Range<usize>>| ranges.into_iter().flatten().collect();
            let mut messages = Vec::new();
            for step in 0..schedule.steps() {
                let algorithms::Step { sends, recvs } = schedule.step(rank, step);
                messages.extend(sends.into_iter().map(|send| observed::ProgramLine {
                    step,
                    sends: true,
                    peer: send.peer,
                    parts: numbers(send.parts),
                    how: "copy".to_string(),
                }));
                messages.extend(recvs.into_iter().map(|recv| {
                    observed::ProgramLine {
                        step,
                        sends: false,
                        peer: recv.peer,
                        parts: numbers(recv.parts),
                        how: match recv.how {
                            How::Copy => "copy",
                            How::ReduceAfter => "reduce_after",
                            How::ReduceBefore => "reduce_before",
                            How::InRankOrder => "in_rank_order",
                        }
                        .to_string(),
                    }
                }));
            }
            Ok(observed::Program { parts: schedule.parts(), messages })
        })
    }
}

/// Names of the algorithms that have a schedule for a kind.
fn serving(kind: Kind) -> Vec<&'static str> {
    let serving = Algorithm::ALL.into_iter().filter(|algorithm| algorithm.serves(kind)).map(Algorithm::name);
    serving.chain((kind == Kind::AllReduce).then_some(TWO_LEVELS)).collect()
}

fn priced(kind: Kind, name: &str, ranks: usize, sizes: &[f64], costs: &Model) -> Result<Vec<observed::Prediction>> {
    let refused = || not_served(kind.name(), name, ranks);
    if name == TWO_LEVELS && kind == Kind::AllReduce {
        let hierarchical = HierarchicalCosts::new(ranks, costs.ranks_per_host).ok_or_else(refused)?;
        let fastest = sizes.iter().map(|bytes| hierarchical.fastest(*bytes, costs));
        return Ok(fastest
            .map(|(choice, seconds)| observed::Prediction { seconds, segments: choice.segments })
            .collect());
    }
    let candidates = cost::candidates(kind, ranks, 0, costs.ranks_per_host, &[algorithm_named(name)?]);
    let fastest = sizes.iter().map(|bytes| cost::fastest(&candidates, *bytes, costs).ok_or_else(refused));
    fastest
        .map(|found| found.map(|(of, seconds)| observed::Prediction { seconds, segments: of.schedule.segments }))
        .collect()
}
