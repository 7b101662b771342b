//! Which ranks of a group share a NUMA node, or on one NUMA node a last-level cache. Pure.
//!
//! Memory of another node is slower, and all accesses to it share the links between the nodes. The same holds for data in
//! another cache, so below a node is a NUMA node or a last-level cache (`Level`). If the option `numa` asks for it and the
//! ranks are bound to nodes in their order, sums and broadcasts of tensors that peers can reach move less data between
//! nodes (`mapped`), and slices of the stage buffers are placed on NUMA nodes for staged sums (`Layout::readers`).
//!
//! This is not the default, because no machine with several nodes was available to measure it, and on one with a single
//! node it takes longer (docs/internals/benchmarks.md).

use std::ops::Range;

/// In smaller groups each rank's part is large enough that two levels would cost more than they save.
const LEAST_RANKS: usize = 13;

/// What the ranks of a node share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Numa = 1,
    Cache,
}

impl Level {
    pub fn from_code(code: u8) -> Option<Level> {
        [Level::Numa, Level::Cache].into_iter().find(|level| *level as u8 == code)
    }

    pub const fn plural(self) -> &'static str {
        match self {
            Level::Numa => "NUMA nodes",
            Level::Cache => "last-level caches",
        }
    }
}

/// The node of each rank: on each node as many ranks as on each other, with consecutive numbers. Empty if nodes make no
/// difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    level: Level,
    of: Vec<u32>,
    /// Number of ranks on each node.
    each: usize,
}

impl Nodes {
    /// The nodes of ranks for which they make no difference.
    pub const fn none() -> Nodes {
        Nodes { level: Level::Numa, of: Vec::new(), each: 0 }
    }

    /// Returns the nodes of all ranks, as `list` returned them, or None if the ranks are not on several nodes as
    /// described above.
    pub fn of_list(level: Level, list: &[u32]) -> Option<Nodes> {
        let first = *list.first()?;
        let each = list.iter().take_while(|node| **node == first).count();
        let groups = list.chunks(each);
        let mut numbers: Vec<u32> = groups.clone().map(|group| group[0]).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let regular = groups.clone().all(|group| group.len() == each && group.iter().all(|node| *node == group[0]));
        (regular && numbers.len() > 1 && numbers.len() * each == list.len()).then(|| Nodes {
            level,
            of: list.to_vec(),
            each,
        })
    }

    /// Returns the nodes of a group whose option asks for them. `places` has the NUMA node and the last-level cache of each
    /// rank, None where a rank may use several. The caches matter only if all ranks are on one NUMA node. The error says
    /// why nodes make no difference. It is a warning if the user can change that.
    pub fn of_group(places: &[(Option<u32>, Option<u32>)]) -> Result<Nodes, (log::Level, String)> {
        use log::Level::{Info, Warn};
        let ranks = places.len();
        if ranks < LEAST_RANKS {
            let text = format!("this host has {ranks} ranks of the group, and at least {LEAST_RANKS} are needed");
            return Err((Info, text));
        }
        let (nodes, caches): (Vec<Option<u32>>, Vec<Option<u32>>) = places.iter().copied().unzip();
        let one_node = nodes.iter().all(|node| *node == nodes[0]);
        // Without nodes the caches count: a kernel without NUMA reports only them, and the ranks of a cache that spans nodes
        // have no node.
        let use_caches = one_node && (nodes[0].is_some() || caches.iter().any(Option::is_some));
        // Nobody can bind ranks to caches that the kernel does not report.
        let unknown = use_caches && caches.iter().all(Option::is_none);
        let (level, numbers) = if use_caches { (Level::Cache, caches) } else { (Level::Numa, nodes) };
        let what = level.plural();
        let Some(known) = numbers.iter().copied().collect::<Option<Vec<u32>>>() else {
            let unbound = numbers.iter().filter(|number| number.is_none()).count();
            let text = format!(
                "{unbound} of {ranks} processes on this host may run on several {what}, or the kernel does not report \
                 {what}; bind each to one (numactl, taskset)"
            );
            return Err((if unknown { Info } else { Warn }, text));
        };
        if known.iter().all(|number| *number == known[0]) {
            return Err((Info, "all ranks of this host share one NUMA node and one last-level cache".to_string()));
        }
        Nodes::of_list(level, &known).filter(|nodes| nodes.each > 1).ok_or_else(|| {
            let text = format!(
                "{what} need equally many ranks each, at least two, with consecutive numbers, and those of the ranks are \
                 {known:?}"
            );
            (Warn, text)
        })
    }

    pub fn level(&self) -> Level {
        self.level
    }

    pub fn list(&self) -> &[u32] {
        &self.of
    }

    /// The NUMA node of each rank. Empty if nodes make no difference or are caches.
    pub fn numa(&self) -> &[u32] {
        match self.level {
            Level::Numa => &self.of,
            Level::Cache => &[],
        }
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
            let nodes = Nodes::of_list(Level::Numa, of)?;
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
        assert_eq!(Nodes::of_list(Level::Numa, &[0, 0, 1, 1, 5, 5]).unwrap().count(), 3);
    }

    #[test]
    fn a_group_is_told_why_its_nodes_make_no_difference() {
        use log::Level::{Info, Warn};
        let known = |nodes: &[u32]| nodes.iter().map(|node| (Some(*node), Some(node / 2))).collect::<Vec<_>>();
        let why = |places: &[(Option<u32>, Option<u32>)]| Nodes::of_group(places).unwrap_err();
        let two = [known(&[2; 7]), known(&[3; 7])].concat();
        let nodes = Nodes::of_group(&two).unwrap();
        assert_eq!((nodes.count(), nodes.level(), nodes.numa()), (2, Level::Numa, nodes.list()));
        assert!(why(&two[1..13]).1.contains("12 ranks"));
        let (level, text) = why(&known(&[1; 13]));
        assert!(level == Info && text.contains("one NUMA node and one last-level cache"), "{text}");
        let (level, text) = why(&[&two[..13], &[(None, Some(1))]].concat());
        assert!(level == Warn && text.starts_with("1 of 14 processes"), "{text}");
        assert!(text.contains("several NUMA nodes"), "{text}");
        let (level, text) = why(&[&two[..], &two[7..8]].concat());
        assert!(level == Warn && text.starts_with("NUMA nodes need equally many"), "{text}");
        let (level, text) = why(&known(&(0..13).collect::<Vec<_>>()));
        assert!(level == Warn && text.contains("at least two"), "{text}");
    }

    #[test]
    fn caches_make_a_difference_on_one_numa_node() {
        let on =
            |node: Option<u32>, caches: &[u32]| caches.iter().map(|cache| (node, Some(*cache))).collect::<Vec<_>>();
        for node in [Some(3), None] {
            let places = [on(node, &[0; 7]), on(node, &[64; 7])].concat();
            let nodes = Nodes::of_group(&places).unwrap();
            assert_eq!((nodes.count(), nodes.level(), nodes.numa()), (2, Level::Cache, &[][..]));
            let (level, text) = Nodes::of_group(&[&places[..13], &[(node, None)]].concat()).unwrap_err();
            assert!(level == log::Level::Warn && text.contains("several last-level caches"), "{text}");
        }
        let (level, text) = Nodes::of_group(&[(Some(0), None); 14]).unwrap_err();
        assert!(level == log::Level::Info && text.contains("the kernel does not report last-level caches"), "{text}");
        let (_, text) = Nodes::of_group(&[(None, None); 14]).unwrap_err();
        assert!(text.starts_with("14 of 14 processes on this host may run on several NUMA nodes"), "{text}");
        // With several NUMA nodes the caches do not matter.
        let places = [on(Some(0), &[0; 4]), on(Some(0), &[8; 4]), on(Some(1), &[16; 8])].concat();
        let nodes = Nodes::of_group(&places).unwrap();
        assert_eq!((nodes.count(), nodes.level()), (2, Level::Numa));
        assert_eq!([1, 2, 0, 3].map(Level::from_code), [Some(Level::Numa), Some(Level::Cache), None, None]);
    }
}
