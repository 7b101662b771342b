//! The graph of which rank waits for which, over all groups of a job, and the search for a cycle in it.

use std::collections::{BTreeMap, VecDeque};

/// Rank `from` waits, in an operation of a group, for a call that rank `to` has not made. Ranks are numbered as in the
/// default group, because two ranks may meet in several groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    pub from: u32,
    pub to: u32,
    pub group: String,
    /// The operation and its number, as text.
    pub what: String,
}

/// Returns the shortest cycle that contains `rank` or, if there is none, a cycle that `rank` waits for. The edges are
/// in the order of the cycle, and begin with `rank` if it is part of the cycle.
pub fn cycle(edges: &[Edge], rank: u32) -> Option<Vec<Edge>> {
    let reached = reach(edges, rank);
    let mut starts: Vec<u32> = reached.keys().copied().filter(|start| *start != rank).collect();
    starts.insert(0, rank);
    starts.into_iter().find_map(|start| path_back(edges, start))
}

/// Breadth-first search: for each rank, the edge by which it is first reached from `start`. The map contains `start`
/// only if a cycle leads back to it.
fn reach(edges: &[Edge], start: u32) -> BTreeMap<u32, &Edge> {
    let mut reached = BTreeMap::new();
    let mut next = VecDeque::from([start]);
    while let Some(at) = next.pop_front() {
        for edge in edges.iter().filter(|edge| edge.from == at) {
            if let std::collections::btree_map::Entry::Vacant(free) = reached.entry(edge.to) {
                free.insert(edge);
                next.push_back(edge.to);
            }
        }
    }
    reached
}

fn path_back(edges: &[Edge], start: u32) -> Option<Vec<Edge>> {
    let reached = reach(edges, start);
    let mut path = vec![(*reached.get(&start)?).clone()];
    while path.last().is_some_and(|edge| edge.from != start) {
        let before = path.last().map(|edge| edge.from)?;
        path.push((*reached.get(&before)?).clone());
    }
    path.reverse();
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(pairs: &[(u32, u32)]) -> Vec<Edge> {
        let edge = |(from, to): &(u32, u32)| Edge { from: *from, to: *to, group: "g".into(), what: "w".into() };
        pairs.iter().map(edge).collect()
    }

    fn ranks(pairs: &[(u32, u32)], rank: u32) -> Option<Vec<u32>> {
        cycle(&edges(pairs), rank).map(|path| path.iter().map(|edge| edge.from).collect())
    }

    #[test]
    fn the_shortest_cycle_is_found_and_begins_with_the_asking_rank() {
        assert_eq!(ranks(&[(0, 1), (1, 0)], 0), Some(vec![0, 1]));
        assert_eq!(ranks(&[(0, 1), (1, 0)], 1), Some(vec![1, 0]));
        assert_eq!(ranks(&[(0, 1), (1, 2), (2, 0), (1, 3)], 0), Some(vec![0, 1, 2]));
        assert_eq!(ranks(&[(0, 1), (1, 2), (2, 0), (0, 2)], 0), Some(vec![0, 2]), "the shorter of two");
    }

    #[test]
    fn a_cycle_among_others_is_found_and_a_chain_is_none() {
        assert_eq!(ranks(&[(0, 1), (1, 2), (2, 1)], 0), Some(vec![1, 2]));
        assert_eq!(ranks(&[(0, 1), (1, 2), (0, 2)], 0), None);
        assert_eq!(ranks(&[(1, 2), (2, 1)], 0), None, "this rank does not wait for them");
        assert_eq!(ranks(&[], 0), None);
    }
}
