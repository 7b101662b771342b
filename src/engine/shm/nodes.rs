//! Which ranks of a group run on which NUMA node. Pure.
//!
//! Memory of another node is slower, and all accesses to it share the links between the nodes. If the option `numa` asks
//! for it and every rank is bound to one node, large operations on tensors that peers can reach move less data between
//! nodes (`mapped`), and the slices of a stage buffer lie on the nodes of the ranks that read them
//! (`memory/presence.rs`).
//!
//! This is not the default, because no machine with several nodes was available to measure it, and on one with a single
//! node two levels take longer (docs/internals/benchmarks.md).

use std::ops::Range;

/// In smaller groups each rank's part is large enough that two levels would cost more than they save.
const LEAST_RANKS: usize = 13;

/// The node of each rank. Empty if it makes no difference: if the node of a rank is unknown, or if all are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes(Vec<u32>);

impl Nodes {
    /// The nodes of ranks for which they make no difference.
    pub const fn none() -> Nodes {
        Nodes(Vec::new())
    }

    /// `nodes` has each rank's node, as all ranks agree; None if a rank may run on several nodes.
    pub fn of(nodes: &[Option<u32>]) -> Nodes {
        let known: Vec<u32> = nodes.iter().copied().collect::<Option<_>>().unwrap_or_default();
        let differ = known.iter().any(|node| *node != known[0]);
        Nodes(if differ { known } else { Vec::new() })
    }

    /// Like `of`, for a group whose option asks for it. The error says why the nodes make no difference. It is a warning
    /// if the user can change that.
    pub fn of_group(nodes: &[Option<u32>]) -> Result<Nodes, (log::Level, String)> {
        let (told, warned) = (|text| Err((log::Level::Info, text)), |text| Err((log::Level::Warn, text)));
        if nodes.len() < LEAST_RANKS {
            return told(format!(
                "this host has {} ranks of the group, and at least {LEAST_RANKS} are needed",
                nodes.len()
            ));
        }
        if let Some(rank) = nodes.iter().position(Option::is_none) {
            return warned(format!("rank {rank} may run on several NUMA nodes; bind it with numactl or taskset"));
        }
        let found = Nodes::of(nodes);
        if found.are_known() { Ok(found) } else { told("all ranks are on one NUMA node".to_string()) }
    }

    /// Returns the nodes of `ranks` ranks from what `list` returned on another rank. None if it is not such a list.
    pub fn of_list(list: &[u32], ranks: usize) -> Option<Nodes> {
        (list.is_empty() || list.len() == ranks).then(|| Nodes(list.to_vec()))
    }

    pub fn list(&self) -> &[u32] {
        &self.0
    }

    pub fn are_known(&self) -> bool {
        !self.0.is_empty()
    }

    /// The node of a rank. None if it makes no difference.
    pub fn of_rank(&self, rank: usize) -> Option<u32> {
        self.0.get(rank).copied()
    }

    /// The ranks on the node of `me`, in order. None if it makes no difference.
    pub fn mates(&self, me: usize) -> Option<Vec<usize>> {
        let own = self.of_rank(me)?;
        Some((0..self.0.len()).filter(|rank| self.0[*rank] == own).collect())
    }

    /// The place of `me` if the ranks can be combined node by node, in rank order: if each node has as many ranks as
    /// each other, with consecutive numbers.
    pub fn link(&self, me: usize) -> Option<Link> {
        let mates = self.mates(me)?;
        let (each, ranks) = (mates.len(), self.0.len());
        let groups = self.0.chunks(each);
        let consecutive = groups.clone().all(|group| group.len() == each && group.iter().all(|node| *node == group[0]));
        let mut firsts: Vec<u32> = groups.map(|group| group[0]).collect();
        firsts.sort_unstable();
        firsts.dedup();
        if !consecutive || firsts.len() * each != ranks {
            return None;
        }
        Some(Link {
            mates: mates[0]..mates[0] + each,
            before: me.checked_sub(each),
            after: (me + each < ranks).then_some(me + each),
        })
    }

    /// For the text that describes a group: " on 2 NUMA nodes". Empty if it makes no difference.
    pub fn described(&self) -> String {
        let mut distinct = self.0.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.is_empty() { String::new() } else { format!(", ranks on {} NUMA nodes", distinct.len()) }
    }
}

/// The place of a rank in a sum that is made node by node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The ranks of its node.
    pub mates: Range<usize>,
    /// The rank with its position on the node before, from whose sums it continues. None on the first node.
    pub before: Option<usize>,
    /// The rank with its position on the next node, which continues from its sums. None on the last node.
    pub after: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(of: &[u32]) -> Nodes {
        Nodes::of(&of.iter().map(|node| Some(*node)).collect::<Vec<_>>())
    }

    #[test]
    fn nodes_make_a_difference_only_if_all_are_known_and_two_differ() {
        assert!(!nodes(&[]).are_known() && !nodes(&[1, 1, 1]).are_known());
        assert!(!Nodes::of(&[Some(0), None, Some(1)]).are_known());
        let two = nodes(&[0, 1, 0]);
        assert_eq!((two.of_rank(1), two.mates(0), two.mates(1)), (Some(1), Some(vec![0, 2]), Some(vec![1])));
        assert_eq!(two.described(), ", ranks on 2 NUMA nodes");
        let many = [Some(0), Some(1)].repeat(6);
        let why = |nodes: &[Option<u32>]| Nodes::of_group(nodes).unwrap_err();
        assert!(why(&many).1.contains("12 ranks"));
        assert!(why(&[Some(1); 13]).1.contains("one NUMA node"));
        let (level, text) = why(&[many.clone(), vec![None]].concat());
        assert!(level == log::Level::Warn && text.starts_with("rank 12 may run on several"), "{text}");
        assert!(Nodes::of_group(&[many, vec![Some(0)]].concat()).unwrap().are_known());
    }

    #[test]
    fn ranks_are_linked_in_order_if_the_nodes_have_equally_many_with_consecutive_numbers() {
        let links = |of: &[u32]| -> Option<Vec<Link>> { (0..of.len()).map(|me| nodes(of).link(me)).collect() };
        let link = |mates, before, after| Link { mates, before, after };
        assert_eq!(
            links(&[0, 0, 1, 1, 5, 5]),
            Some(vec![
                link(0..2, None, Some(2)),
                link(0..2, None, Some(3)),
                link(2..4, Some(0), Some(4)),
                link(2..4, Some(1), Some(5)),
                link(4..6, Some(2), None),
                link(4..6, Some(3), None),
            ])
        );
        assert!(links(&[1, 1, 0, 0]).is_some(), "the numbers of the nodes do not matter");
        for other in [&[0, 1, 0, 1][..], &[0, 0, 1], &[0, 0, 0, 1], &[0, 0, 1, 1, 0, 0], &[3, 3, 3, 3]] {
            assert_eq!(links(other), None, "{other:?}");
        }
    }
}
