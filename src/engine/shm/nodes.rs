//! Which ranks of a group run on which NUMA node. Pure.
//!
//! Memory of another node is slower, and all accesses to it share the links between the nodes. If the option `numa` asks
//! for it and the ranks are bound to nodes in their order, sums and broadcasts of tensors that peers can reach move less
//! data between nodes (`mapped`), and slices of the stage buffers are placed for staged sums (`Layout::readers`).
//!
//! This is not the default, because no machine with several nodes was available to measure it, and on one with a single
//! node it takes longer (docs/internals/benchmarks.md).

use std::ops::Range;

/// In smaller groups each rank's part is large enough that two levels would cost more than they save.
const LEAST_RANKS: usize = 13;

/// The node of each rank: on each node as many ranks as on each other, with consecutive numbers. Empty if nodes make no
/// difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    of: Vec<u32>,
    /// Number of ranks on each node.
    each: usize,
}

impl Nodes {
    /// The nodes of ranks for which they make no difference.
    pub const fn none() -> Nodes {
        Nodes { of: Vec::new(), each: 0 }
    }

    /// Returns the nodes of all ranks, as `list` returned them, or None if the ranks are not on several nodes as
    /// described above.
    pub fn of_list(list: &[u32]) -> Option<Nodes> {
        let first = *list.first()?;
        let each = list.iter().take_while(|node| **node == first).count();
        let groups = list.chunks(each);
        let mut numbers: Vec<u32> = groups.clone().map(|group| group[0]).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let regular = groups.clone().all(|group| group.len() == each && group.iter().all(|node| *node == group[0]));
        (regular && numbers.len() > 1 && numbers.len() * each == list.len()).then(|| Nodes { of: list.to_vec(), each })
    }

    /// Returns the nodes of a group whose option asks for them; `nodes` has None for a rank that is not bound to one. The
    /// error says why the nodes make no difference. It is a warning if the user can change that.
    pub fn of_group(nodes: &[Option<u32>]) -> Result<Nodes, (log::Level, String)> {
        use log::Level::{Info, Warn};
        if nodes.len() < LEAST_RANKS {
            let text =
                format!("this host has {} ranks of the group, and at least {LEAST_RANKS} are needed", nodes.len());
            return Err((Info, text));
        }
        let known: Option<Vec<u32>> = nodes.iter().copied().collect();
        let Some(known) = known else {
            let unbound = nodes.iter().filter(|node| node.is_none()).count();
            let text = format!(
                "{unbound} of {} processes on this host may run on several NUMA nodes, or the kernel does not report \
                 nodes; bind each to one node (numactl, taskset)",
                nodes.len()
            );
            return Err((Warn, text));
        };
        if known.iter().all(|node| *node == known[0]) {
            return Err((Info, "all ranks of this host are on one NUMA node".to_string()));
        }
        Nodes::of_list(&known).ok_or_else(|| {
            let text = format!(
                "each NUMA node needs equally many ranks with consecutive numbers, and the nodes of the ranks are {known:?}"
            );
            (Warn, text)
        })
    }

    pub fn list(&self) -> &[u32] {
        &self.of
    }

    /// Number of nodes; 0 if they make no difference.
    pub fn count(&self) -> usize {
        self.of.len().checked_div(self.each).unwrap_or(0)
    }

    /// The place of rank `me`. None if nodes make no difference.
    pub fn neighbours(&self, me: usize) -> Option<Neighbours> {
        let (ranks, each) = (self.of.len(), self.each);
        let first = me.checked_div(each)? * each;
        Some(Neighbours {
            mates: first..first + each,
            before: me.checked_sub(each),
            after: (me + each < ranks).then_some(me + each),
        })
    }
}

/// The place of a rank in a sum that is made node by node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbours {
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

    #[test]
    fn nodes_make_a_difference_if_they_have_equally_many_ranks_with_consecutive_numbers() {
        let all = |of: &[u32]| -> Option<Vec<Neighbours>> {
            let nodes = Nodes::of_list(of)?;
            assert_eq!(nodes.list(), of);
            (0..of.len()).map(|me| nodes.neighbours(me)).collect()
        };
        let of = |mates, before, after| Neighbours { mates, before, after };
        assert_eq!(
            all(&[0, 0, 1, 1, 5, 5]),
            Some(vec![
                of(0..2, None, Some(2)),
                of(0..2, None, Some(3)),
                of(2..4, Some(0), Some(4)),
                of(2..4, Some(1), Some(5)),
                of(4..6, Some(2), None),
                of(4..6, Some(3), None),
            ])
        );
        assert!(all(&[1, 1, 0, 0]).is_some(), "the numbers of the nodes do not matter");
        for other in [&[][..], &[0, 1, 0, 1], &[0, 0, 1], &[0, 0, 0, 1], &[0, 0, 1, 1, 0, 0], &[3, 3, 3, 3], &[2]] {
            assert_eq!(all(other), None, "{other:?}");
        }
        assert_eq!((Nodes::none().neighbours(0), Nodes::none().count()), (None, 0));
        assert_eq!(Nodes::of_list(&[0, 0, 1, 1, 5, 5]).unwrap().count(), 3);
    }

    #[test]
    fn a_group_is_told_why_its_nodes_make_no_difference() {
        let known = |nodes: &[u32]| nodes.iter().copied().map(Some).collect::<Vec<_>>();
        let why = |nodes: &[Option<u32>]| Nodes::of_group(nodes).unwrap_err();
        let two = [known(&[0; 7]), known(&[1; 7])].concat();
        assert_eq!(Nodes::of_group(&two).unwrap().count(), 2);
        assert!(why(&two[1..13]).1.contains("12 ranks"));
        assert!(why(&known(&[1; 13])).1.contains("one NUMA node"));
        let (level, text) = why(&[&two[..13], &[None]].concat());
        assert!(level == log::Level::Warn && text.starts_with("1 of 14 processes"), "{text}");
        let (level, text) = why(&[&two[..], &[Some(1)]].concat());
        assert!(level == log::Level::Warn && text.contains("equally many"), "{text}");
    }
}
