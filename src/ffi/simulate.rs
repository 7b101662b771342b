//! What `sagellm simulate` asks for: predicted times, and one rank's messages. Names become numbers here, and back.

use super::bridge::{ffi, guarded};
use crate::algorithms;
use crate::algorithms::{Algorithm, How, Schedule};
use crate::error::{Error, Result};
use crate::select::cost;
use crate::select::cost::Levels;
use crate::select::cost::{Link, Model};
use crate::types::Kind;

/// Beside the algorithms: all_reduce in two levels, as the engine does it over several hosts.
const TWO_LEVELS: &str = "hierarchical";

fn kind_named(name: &str) -> Result<Kind> {
    let kinds = (0..=u8::MAX).filter_map(Kind::from_u8).filter(|kind| !kind.is_p2p());
    let known = || kinds.clone().map(Kind::name).collect::<Vec<_>>().join(", ");
    kinds
        .clone()
        .find(|kind| kind.name() == name)
        .ok_or_else(|| Error::Invalid(format!("sagellm: no collective is called {name:?}; there are {}", known())))
}

fn algorithm_named(name: &str) -> Result<Algorithm> {
    Algorithm::from_name(name).ok_or_else(|| {
        let known: Vec<_> = Algorithm::ALL.into_iter().map(Algorithm::name).collect();
        Error::Invalid(format!("sagellm: no algorithm is called {name:?}; there are {}", known.join(", ")))
    })
}

fn not_served(kind: &str, algorithm: &str, ranks: usize) -> Error {
    Error::Invalid(format!("sagellm: {algorithm} has no schedule for {kind} of {ranks} ranks"))
}

pub fn algorithms(kind: &str) -> std::result::Result<Vec<String>, String> {
    guarded(|| {
        let kind = kind_named(kind)?;
        let serving = Algorithm::ALL.into_iter().filter(|algorithm| algorithm.serves(kind)).map(Algorithm::name);
        let two_levels = (kind == Kind::AllReduce).then_some(TWO_LEVELS);
        Ok(serving.chain(two_levels).map(str::to_string).collect())
    })
}

pub fn predict(
    kind: &str,
    algorithm: &str,
    ranks: usize,
    sizes: &[f64],
    model: &ffi::CostModel,
) -> std::result::Result<Vec<ffi::Prediction>, String> {
    guarded(|| {
        let link = |alpha, overhead, beta| Link { alpha, overhead, beta };
        let costs = Model {
            host: link(model.host_alpha, model.host_overhead, model.host_beta),
            network: link(model.network_alpha, model.network_overhead, model.network_beta),
            gamma: model.gamma,
            ranks_per_host: model.ranks_per_host,
        };
        if algorithm == TWO_LEVELS && kind_named(kind)? == Kind::AllReduce {
            let levels = Levels::new(ranks, model.ranks_per_host).ok_or_else(|| not_served(kind, algorithm, ranks))?;
            let one = |bytes: &f64| {
                let (choice, seconds) = levels.fastest(*bytes, &costs);
                ffi::Prediction { seconds, segments: choice.segments }
            };
            return Ok(sizes.iter().map(one).collect());
        }
        let only = [algorithm_named(algorithm)?];
        let candidates = cost::candidates(kind_named(kind)?, ranks, 0, model.ranks_per_host, &only);
        let one = |bytes: &f64| {
            cost::fastest(&candidates, *bytes, &costs)
                .map(|(priced, seconds)| ffi::Prediction { seconds, segments: priced.schedule.segments })
                .ok_or_else(|| not_served(kind, algorithm, ranks))
        };
        sizes.iter().map(one).collect()
    })
}

pub fn program(
    kind: &str,
    algorithm: &str,
    ranks: usize,
    segments: usize,
    rank: usize,
    parts: &mut usize,
) -> std::result::Result<Vec<ffi::ProgramLine>, String> {
    guarded(|| {
        let schedule = Schedule::new(algorithm_named(algorithm)?, kind_named(kind)?, ranks, 0, segments)
            .filter(|_| rank < ranks)
            .ok_or_else(|| not_served(kind, algorithm, ranks))?;
        *parts = schedule.parts();
        let numbers = |ranges: Vec<std::ops::Range<usize>>| ranges.into_iter().flatten().collect();
        let mut transfers = Vec::new();
        for step in 0..schedule.steps() {
            let algorithms::Step { sends, recvs } = schedule.step(rank, step);
            transfers.extend(sends.into_iter().map(|send| ffi::ProgramLine {
                step,
                sends: true,
                peer: send.peer,
                parts: numbers(send.parts),
                how: "copy".to_string(),
            }));
            transfers.extend(recvs.into_iter().map(|recv| {
                ffi::ProgramLine {
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
