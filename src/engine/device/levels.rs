//! all_reduce in two levels of communicators: inside each host, between hosts, inside again. For groups over several hosts
//! with equally many ranks, and only where a rule says so: libraries know the links, and where this is faster was not
//! measured.
//!
//! Idea: what passes between hosts is brought together inside each of them first, and all its ranks share that work.
//! Steps, with `n` ranks a host, the numbers in `n` equal blocks and a rest of fewer than `n`:
//! 1. inside, reduce_scatter: the rank at place `i` has block `i` of its host;
//! 2. between hosts, all_reduce: the ranks at place `i` have block `i` of all;
//! 3. inside, all_gather of the blocks;
//! 4. of all ranks, all_reduce of the rest.
//!
//! Bytes: of B a rank sends B (n - 1) / n inside, twice, and for B / n its part of an all_reduce between hosts.
//! Order: the library's inside a host, then its order of the hosts; all ranks get the same bits where its all_reduce and
//! all_gather do. Source: Cho et al., BlueConnect (2019), with two levels.

use super::communicator::{Call, Communicator};
use super::launch::{Job, Launched};
use super::lowering::{Capabilities, Method, Recipe};
use super::runtime::Stream;
use crate::error::Result;
use crate::select::Policy;
use crate::select::rules::{Rule, Way};
use crate::types::{Kind, ReduceOp};

/// Where a rank stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub hosts: u32,
    /// Ranks on each of them.
    pub per_host: u32,
    pub host: u32,
    /// Place of the rank on its host.
    pub place: u32,
}

/// Which communicator a call goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Inside,
    /// Of the ranks at one place of every host.
    Between,
    All,
}

/// What the rules, else the table, say to a library about an operation: the first that names a way of libraries.
pub fn said(policy: &Policy, kind: Kind, bytes: u64) -> Option<Way> {
    let means = |rule: &&Rule| match rule.way {
        Way::Start | Way::Hosts { .. } => true,
        Way::Hierarchical => kind == Kind::AllReduce,
        Way::Slots | Way::Rounds { .. } => false,
    };
    let rule = policy.rules.0.iter().filter(|rule| rule.fits(kind, bytes)).find(means);
    let line = || policy.table.as_ref().and_then(|table| table.find(kind, bytes)).map(|line| &line.rule).filter(means);
    rule.or_else(line).map(|rule| rule.way).filter(|way| *way != Way::Start)
}

/// Whether some operation is to go in two levels, so that their communicators are made.
pub fn wanted(policy: &Policy) -> bool {
    let all_reduces = |rule: &Rule| rule.kind.is_none_or(|kind| kind == Kind::AllReduce);
    let lines = policy.table.iter().flat_map(|table| table.lines.iter().map(|line| &line.rule));
    policy.rules.0.iter().chain(lines).any(|rule| rule.way == Way::Hierarchical && all_reduces(rule))
}

/// An operation that would go to the communicator of all, in two levels; or why it does not.
pub fn in_levels(whole: &Recipe, able: &Capabilities) -> std::result::Result<Recipe, String> {
    let Recipe { kind, op, method, .. } = *whole;
    if kind != Kind::AllReduce || method != Method::Native {
        return Err(format!("it is no all_reduce of {}", able.name));
    }
    if !matches!(op, ReduceOp::Sum | ReduceOp::Product | ReduceOp::Min | ReduceOp::Max) {
        return Err(format!("the library's own {} is not the same in two levels", ReduceOp::name_of(op.code())));
    }
    // Without blocks in place the input serves as the memory in between.
    let apart = !able.blocks_in_place;
    Ok(Recipe { method: Method::Levels, apart, spoils: apart, ..whole.clone() })
}

/// The calls of one rank, in order.
pub fn calls(job: &Job<'_>, shape: &Shape, run: &mut dyn FnMut(Level, &Call<'_>) -> Result<()>) -> Result<()> {
    let Recipe { dtype, op, spoils, .. } = *job.recipe;
    let (sent, received) = (job.run(job.send)?, job.run(job.recv)?);
    if sent.bytes != received.bytes {
        return Err(job.wrong("the sizes do not belong together"));
    }
    let all = job.count(sent.bytes)?;
    let count = all / shape.per_host as usize;
    let (send, recv) = (sent.addr, received.addr);
    if count > 0 {
        let own = shape.place as usize * count * dtype.size();
        let block = recv + own;
        let summed = if spoils { send + own } else { block };
        run(Level::Inside, &Call::ReduceScatter { send, recv: block, count, dtype, op })?;
        run(Level::Between, &Call::AllReduce { send: block, recv: summed, count, dtype, op })?;
        run(Level::Inside, &Call::AllGather { send: summed, recv, count, dtype })?;
    }
    let done = count * shape.per_host as usize;
    if done < all {
        let from = done * dtype.size();
        run(Level::All, &Call::AllReduce { send: send + from, recv: recv + from, count: all - done, dtype, op })?;
    }
    Ok(())
}

/// Puts an operation on the stream. `between` and `inside` are this rank's, beside the communicator of all.
pub fn launch(
    (all, inside, between): (&dyn Communicator, &dyn Communicator, &dyn Communicator),
    job: &Job<'_>,
    shape: &Shape,
    stream: Stream,
) -> Result<Launched> {
    let mut launched = Launched::default();
    calls(job, shape, &mut |level, call| {
        let communicator = match level {
            Level::Inside => inside,
            Level::Between => between,
            Level::All => all,
        };
        launched.keep(communicator.call(call, stream)?);
        Ok(())
    })?;
    Ok(launched)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::device::libs::nccl;
    use crate::engine::device::lowering;
    use crate::select::rules::Rules;
    use crate::types::{Dtype, Span};

    /// Blocking calls of all ranks at once on plain memory: each step is a list of the ranks' calls.
    fn add(world: &mut [Vec<i64>], members: &[usize], step: &[Call<'_>]) {
        let base = |rank: usize| world_base(rank);
        let at = |world: &[Vec<i64>], rank: usize, addr: usize, count: usize| -> Vec<i64> {
            let from = (addr - base(rank)) / 8;
            world[rank][from..from + count].to_vec()
        };
        let mut writes = Vec::new();
        match step[0] {
            Call::AllReduce { count, .. } => {
                let mut sum = vec![0; count];
                for (rank, call) in members.iter().zip(step) {
                    let Call::AllReduce { send, .. } = *call else { panic!("{call:?}") };
                    at(world, *rank, send, count).iter().zip(&mut sum).for_each(|(value, sum)| *sum += value);
                }
                for (rank, call) in members.iter().zip(step) {
                    let Call::AllReduce { recv, .. } = *call else { unreachable!() };
                    writes.push((*rank, recv, sum.clone()));
                }
            }
            Call::ReduceScatter { count, .. } => {
                for (place, (rank, call)) in members.iter().zip(step).enumerate() {
                    let Call::ReduceScatter { recv, .. } = *call else { panic!("{call:?}") };
                    let mut sum = vec![0; count];
                    for (other, call) in members.iter().zip(step) {
                        let Call::ReduceScatter { send, .. } = *call else { unreachable!() };
                        let block = at(world, *other, send + place * count * 8, count);
                        block.iter().zip(&mut sum).for_each(|(value, sum)| *sum += value);
                    }
                    writes.push((*rank, recv, sum));
                }
            }
            Call::AllGather { count, .. } => {
                let blocks: Vec<i64> = members
                    .iter()
                    .zip(step)
                    .flat_map(|(rank, call)| {
                        let Call::AllGather { send, .. } = *call else { panic!("{call:?}") };
                        at(world, *rank, send, count)
                    })
                    .collect();
                for (rank, call) in members.iter().zip(step) {
                    let Call::AllGather { recv, .. } = *call else { unreachable!() };
                    writes.push((*rank, recv, blocks.clone()));
                }
            }
            ref other => panic!("{other:?}"),
        }
        for (rank, addr, values) in writes {
            let from = (addr - base(rank)) / 8;
            world[rank][from..from + values.len()].copy_from_slice(&values);
        }
    }

    fn world_base(rank: usize) -> usize {
        (rank + 1) << 20
    }

    /// Every rank's memory is its input, then its output; returns what each rank has where its result belongs.
    fn run(hosts: u32, per_host: u32, count: usize, in_place: bool, recipe: &Recipe) -> Vec<Vec<i64>> {
        let ranks = (hosts * per_host) as usize;
        let mut world: Vec<Vec<i64>> =
            (0..ranks).map(|rank| (0..2 * count).map(|i| (i * ranks + rank) as i64).collect()).collect();
        let mut steps: Vec<Vec<(Level, Call<'_>)>> = Vec::new();
        for rank in 0..ranks {
            let shape = Shape { hosts, per_host, host: rank as u32 / per_host, place: rank as u32 % per_host };
            let send = [Span { addr: world_base(rank), bytes: count * 8 }];
            let to = if in_place { 0 } else { count * 8 };
            let recv = [Span { addr: world_base(rank) + to, bytes: count * 8 }];
            let job =
                Job { factor: 0, recipe, rank: rank as u32, ranks: ranks as u32, root: 0, send: &send, recv: &recv };
            let mut own = Vec::new();
            calls(&job, &shape, &mut |level, call| {
                own.push((level, plain(call)));
                Ok(())
            })
            .unwrap();
            steps.push(own);
        }
        let levels: Vec<Level> = steps[0].iter().map(|(level, _)| *level).collect();
        for (step, level) in levels.into_iter().enumerate() {
            let parts: Vec<Vec<usize>> = match level {
                Level::All => vec![(0..ranks).collect()],
                Level::Inside => (0..hosts as usize)
                    .map(|host| (host * per_host as usize..(host + 1) * per_host as usize).collect())
                    .collect(),
                Level::Between => (0..per_host as usize)
                    .map(|place| (0..hosts as usize).map(|host| host * per_host as usize + place).collect())
                    .collect(),
            };
            for members in parts {
                let these: Vec<Call<'_>> = members.iter().map(|rank| plain(&steps[*rank][step].1)).collect();
                assert!(members.iter().all(|rank| steps[*rank][step].0 == level));
                add(&mut world, &members, &these);
            }
        }
        let from = if in_place { 0 } else { count };
        world.into_iter().map(|memory| memory[from..from + count].to_vec()).collect()
    }

    fn plain(call: &Call<'_>) -> Call<'static> {
        match *call {
            Call::AllReduce { send, recv, count, dtype, op } => Call::AllReduce { send, recv, count, dtype, op },
            Call::ReduceScatter { send, recv, count, dtype, op } => {
                Call::ReduceScatter { send, recv, count, dtype, op }
            }
            Call::AllGather { send, recv, count, dtype } => Call::AllGather { send, recv, count, dtype },
            ref other => panic!("{other:?}"),
        }
    }

    fn sum(able: &Capabilities, op: ReduceOp) -> Recipe {
        let asked = lowering::Asked { kind: Kind::AllReduce, dtype: Dtype::I64, op, ranks: 4, even: true, plain: true };
        lowering::recipe(&asked, able).unwrap()
    }

    #[test]
    fn every_shape_and_size_gives_the_sum_of_all() {
        for able in
            [nccl::communicator::capabilities(), nccl::communicator::capabilities(), nccl::communicator::capabilities()]
        {
            let recipe = in_levels(&sum(&able, ReduceOp::Sum), &able).unwrap();
            assert_eq!((recipe.apart, recipe.spoils), (!able.blocks_in_place, !able.blocks_in_place));
            for (hosts, per_host) in [(2, 2), (3, 2), (2, 4), (4, 3), (5, 1)] {
                for count in [1, 2, 3, 5, 8, 12, 31] {
                    for in_place in [false, able.blocks_in_place] {
                        let ranks = (hosts * per_host) as usize;
                        let expected: Vec<i64> =
                            (0..count).map(|i| (0..ranks).map(|rank| (i * ranks + rank) as i64).sum()).collect();
                        for found in run(hosts, per_host, count, in_place, &recipe) {
                            assert_eq!(found, expected, "{hosts} hosts of {per_host}, {count} numbers");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_cut_into_levels_says_why() {
        let able = nccl::communicator::capabilities();
        let why = |recipe: &Recipe| in_levels(recipe, &able).unwrap_err();
        assert_eq!(why(&sum(&able, ReduceOp::Avg)), "the library's own AVG is not the same in two levels");
        assert!(why(&sum(&able, ReduceOp::Bxor)).starts_with("it is no all_reduce of NCCL"));
        // Summed and divided by ourselves it can.
        let able = nccl::communicator::capabilities();
        let recipe = in_levels(&sum(&able, ReduceOp::Avg), &able).unwrap();
        assert_eq!((recipe.op, recipe.after.len()), (ReduceOp::Sum, 1));
    }

    #[test]
    fn rules_of_other_engines_are_passed_over() {
        let policy = |rules: &str| Policy { rules: Rules::parse(rules).unwrap(), ..Policy::default() };
        let said = |rules: &str, bytes| said(&policy(rules), Kind::AllReduce, bytes);
        let rules = "*:0-4KiB=slots;all_reduce:0-1KiB=start;all_reduce:0-1MiB=hierarchical;*:0-=ring";
        assert_eq!(said(rules, 8), None);
        let broadcast = super::said(&policy("*:0-=hierarchical;*:0-=ring"), Kind::Broadcast, 8);
        assert!(matches!(broadcast, Some(Way::Hosts { .. })));
        assert_eq!(said(rules, 2000), Some(Way::Hierarchical));
        assert!(matches!(said(rules, 1 << 21), Some(Way::Hosts { .. })));
        assert!(wanted(&policy(rules)) && !wanted(&policy("*:0-=ring")));
        assert!(wanted(&policy("*:0-=hierarchical")) && !wanted(&policy("reduce:0-=ring")));
    }
}
