//! What `torch-sagellm simulate` asks for: predicted times, and one rank's messages. Names become numbers, and back.

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

/// Beside the algorithms: all_reduce in two levels, as the engine does it over several hosts.
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
            let link = |alpha, overhead, beta| Link { alpha, overhead, beta };
            let costs = Model {
                host: link(model.host_alpha, model.host_overhead, model.host_beta),
                network: link(model.network_alpha, model.network_overhead, model.network_beta),
                gamma: model.gamma,
                ranks_per_host: model.ranks_per_host,
            };
            let names = if algorithm.is_empty() { serving(kind) } else { vec![algorithm] };
            names.into_iter().map(|name| priced(kind, name, ranks, sizes, &costs)).collect()
        })
    }

    pub(super) fn program(
        kind: &str,
        algorithm: &str,
        ranks: usize,
        segments: usize,
        rank: usize,
        parts: &mut usize,
    ) -> Outcome<Vec<observed::ProgramLine>> {
        guarded(|| {
            let schedule = Schedule::new(algorithm_named(algorithm)?, collective_named(kind)?, ranks, 0, segments)
                .filter(|_| rank < ranks)
                .ok_or_else(|| not_served(kind, algorithm, ranks))?;
            *parts = schedule.parts();
            let numbers = |ranges: Vec<std::ops::Range<usize>>| ranges.into_iter().flatten().collect();
            let mut transfers = Vec::new();
            for step in 0..schedule.steps() {
                let algorithms::Step { sends, recvs } = schedule.step(rank, step);
                transfers.extend(sends.into_iter().map(|send| observed::ProgramLine {
                    step,
                    sends: true,
                    peer: send.peer,
                    parts: numbers(send.parts),
                    how: "copy".to_string(),
                }));
                transfers.extend(recvs.into_iter().map(|recv| {
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
            Ok(transfers)
        })
    }
}

/// Names of what has a schedule for a kind.
fn serving(kind: Kind) -> Vec<&'static str> {
    let serving = Algorithm::ALL.into_iter().filter(|algorithm| algorithm.serves(kind)).map(Algorithm::name);
    serving.chain((kind == Kind::AllReduce).then_some(TWO_LEVELS)).collect()
}

fn priced(kind: Kind, name: &str, ranks: usize, sizes: &[f64], costs: &Model) -> Result<observed::Prediction> {
    let refused = || not_served(kind.name(), name, ranks);
    let found: Vec<(f64, usize)> = if name == TWO_LEVELS && kind == Kind::AllReduce {
        if sizes.is_empty() {
            Vec::new()
        } else {
            let hierarchical = HierarchicalCosts::new(ranks, costs.ranks_per_host).ok_or_else(refused)?;
            let one = |bytes: &f64| hierarchical.fastest(*bytes, costs);
            sizes.iter().map(one).map(|(choice, seconds)| (seconds, choice.segments)).collect()
        }
    } else {
        let only = [algorithm_named(name)?];
        let candidates = cost::candidates(kind, ranks, 0, costs.ranks_per_host, &only);
        let one = |bytes: &f64| cost::fastest(&candidates, *bytes, costs).ok_or_else(refused);
        let all = sizes.iter().map(one).map(|found| found.map(|(priced, time)| (time, priced.schedule.segments)));
        all.collect::<Result<_>>()?
    };
    let (seconds, segments) = found.into_iter().unzip();
    Ok(observed::Prediction { algorithm: name.to_string(), seconds, segments })
}
