//! What all_reduce costs in two levels: ranks of a host bring their numbers together, leaders exchange them with the
//! leaders of other hosts, and the host gets the result; in segments, so that these three overlap. Pure, for `sagellm
//! simulate`.
//!
//! Inside a host the prices are those of direct exchange, which is how shared memory works: every rank reads the others.
//! With one leader a host: reduce, exchange all, broadcast. With every rank a leader: reduce_scatter, each exchanges its
//! share, all_gather; their bytes share the host's link. Segments pass through the three like through a pipeline: the
//! slowest of the three decides, and the others are seen once. Hosts count as equal: the fullest stands for all.

use super::cost::{Link, Model, Priced};
use crate::algorithms::{Algorithm, Schedule};
use crate::types::Kind;

/// What leaders may use among each other.
const BETWEEN: [Algorithm; 6] =
    [Algorithm::Doubling, Algorithm::Halving, Algorithm::Ring, Algorithm::Torus, Algorithm::Direct, Algorithm::TwoStep];
const SEGMENTS: [usize; 5] = [1, 2, 4, 16, 64];

/// One way to do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Between the leaders.
    pub algorithm: Algorithm,
    /// Of each host.
    pub leaders: usize,
    /// That the vector is cut into.
    pub segments: usize,
}

/// Prices of every way, for any size and any links.
pub struct Levels {
    per_host: usize,
    reduce: Priced,
    broadcast: Priced,
    scatter: Priced,
    gather: Priced,
    between: Vec<Priced>,
}

impl Levels {
    /// None where there are no ranks.
    pub fn new(ranks: usize, ranks_per_host: usize) -> Option<Levels> {
        let per_host = ranks_per_host.clamp(1, ranks.max(1));
        let hosts = ranks.div_ceil(per_host);
        let priced = |algorithm, kind, ranks, per_host| {
            Some(Priced::new(Schedule::new(algorithm, kind, ranks, 0, 1)?, per_host))
        };
        let inside = |kind| priced(Algorithm::Direct, kind, per_host, per_host);
        Some(Levels {
            per_host,
            reduce: inside(Kind::Reduce)?,
            broadcast: inside(Kind::Broadcast)?,
            scatter: inside(Kind::ReduceScatter)?,
            gather: inside(Kind::AllGather)?,
            between: BETWEEN
                .into_iter()
                .map(|algorithm| priced(algorithm, Kind::AllReduce, hosts, 1))
                .collect::<Option<_>>()?,
        })
    }

    /// The fastest way for this size, and its predicted seconds.
    pub fn fastest(&self, bytes: f64, model: &Model) -> (Way, f64) {
        let leaders = if self.per_host > 1 { vec![1, self.per_host] } else { vec![1] };
        let mut best: Option<(Way, f64)> = None;
        for between in &self.between {
            for leaders in &leaders {
                for segments in SEGMENTS {
                    let algorithm = between.schedule.algorithm;
                    let choice = Way { algorithm, leaders: *leaders, segments };
                    let seconds = self.seconds(between, choice, bytes, model);
                    if best.is_none_or(|(_, least)| seconds < least) {
                        best = Some((choice, seconds));
                    }
                }
            }
        }
        best.expect("there is always a way to look at")
    }

    fn seconds(&self, between: &Priced, choice: Way, bytes: f64, model: &Model) -> f64 {
        let bytes = bytes / choice.segments as f64;
        let (first, last) =
            if choice.leaders == 1 { (&self.reduce, &self.broadcast) } else { (&self.scatter, &self.gather) };
        let leaders = choice.leaders as f64;
        let shared = Model { network: Link { beta: model.network.beta * leaders, ..model.network }, ..*model };
        let stages =
            [first.seconds(bytes, model), between.seconds(bytes / leaders, &shared), last.seconds(bytes, model)];
        let slowest = stages.iter().copied().fold(0.0, f64::max);
        stages.iter().sum::<f64>() + (choice.segments - 1) as f64 * slowest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::cost;

    fn model(ranks_per_host: usize) -> Model {
        Model {
            host: Link { alpha: 1e-6, overhead: 2e-7, beta: 1e-10 },
            network: Link { alpha: 1e-3, overhead: 5e-6, beta: 8e-9 },
            gamma: 1e-10,
            ranks_per_host,
        }
    }

    #[test]
    fn small_ones_take_one_latency_and_large_ones_fill_the_link() {
        let (levels, model) = (Levels::new(4, 2).unwrap(), model(2));
        let (small, seconds) = levels.fastest(8.0, &model);
        assert_eq!(small.segments, 1);
        assert!(seconds < 1.1e-3, "one latency, not {seconds} s");
        let bytes = 16.0 * 1024.0 * 1024.0;
        let (large, seconds) = levels.fastest(bytes, &model);
        let bound = bytes * model.network.beta; // of two hosts: all bytes once in each direction
        assert!(seconds > bound && seconds < bound / 0.9, "{large:?}: {seconds} s, bound {bound} s");
    }

    #[test]
    fn two_levels_beat_one_where_hosts_are_far_apart() {
        let (levels, model) = (Levels::new(64, 8).unwrap(), model(8));
        let flat = cost::candidates(Kind::AllReduce, 64, 0, 8, &Algorithm::ALL);
        for bytes in [8.0, 1e4, 1e6, 1e9] {
            let (_, one) = cost::fastest(&flat, bytes, &model).unwrap();
            let (choice, two) = levels.fastest(bytes, &model);
            assert!(two <= one * 1.01, "{bytes} bytes: {choice:?} {two} s, flat {one} s");
        }
    }

    #[test]
    fn one_host_needs_no_link() {
        let (levels, model) = (Levels::new(4, 8).unwrap(), model(8));
        let (_, seconds) = levels.fastest(1e6, &model);
        assert!(seconds < model.network.alpha, "{seconds}");
        assert!(Levels::new(0, 8).is_none());
    }
}
