//! Double tree: two binary trees at the same time, each for one half of the vector, which is pipelined in segments. An
//! inner rank of one tree is a leaf of the other, so all ranks send and receive the same amount.
//!
//! p ranks, numbered from the root as places 0 to p - 1; D = ceil(log2 p) levels; N bytes; each half in S segments.
//! Both trees contain the places 1 to p - 1. The first is the in-order binary tree: odd places are leaves, and a
//! place's level is its number of trailing zeros. The second tree is the first one in reverse (if p is odd) or shifted
//! by one (if p is even). Place 0 is the parent of the top of each tree.
//!
//! - broadcast: S + D - 1 steps; N bytes received by all except the root, at most N sent.
//! - reduce: the same in reverse.
//! - all_reduce: reduce to rank 0, then broadcast: 2 (S + D - 1) steps; at most 2 N sent and received (N for 2 ranks,
//!   1.5 N for 3). Reduce and broadcast do not overlap: because there are two trees, each alone already fills the links
//!   in both directions.
//!
//! Order of summation: a rank first combines the numbers of children at lower places, on the left, with its own, and
//! then the result with the numbers of children at higher places, on the right: (lower op own) op higher. At place 0:
//! own op tree. The two halves of the vector have different trees, so the order depends on an element's position in the
//! vector. Source: Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
//! (2009). The trees are those of NCCL's double binary trees.

use super::{How, Pattern, Schedule, Step, Volume, ceil_log2, one};
use crate::types::Kind;

pub(super) struct DoubleTree;

impl Pattern for DoubleTree {
    fn serves(&self, kind: Kind) -> bool {
        matches!(kind, Kind::AllReduce | Kind::Broadcast | Kind::Reduce)
    }

    fn pipelines(&self, _kind: Kind) -> bool {
        true
    }

    fn cuts(&self, s: &Schedule) -> usize {
        2 * s.segments
    }

    fn steps(&self, s: &Schedule) -> usize {
        let once = s.segments + ceil_log2(s.ranks) - 1;
        if s.kind == Kind::AllReduce { 2 * once } else { once }
    }

    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step {
        let once = s.segments + ceil_log2(s.ranks) - 1;
        let mut step = Step::default();
        for second in [false, true] {
            let tree = Tree { nodes: s.ranks - 1, second };
            match s.kind {
                Kind::Broadcast => down(s, tree, rank, k, &mut step),
                Kind::AllReduce if k >= once => down(s, tree, rank, k - once, &mut step),
                _ => up(s, tree, rank, k, &mut step),
            }
        }
        step
    }

    fn volume(&self, s: &Schedule) -> Volume {
        let halves = match (s.kind, s.ranks) {
            (Kind::AllReduce, 3..) => s.ranks.min(4),
            _ => 2,
        };
        Volume { sent: halves * s.segments, received: halves * s.segments }
    }

    /// From the step in which the first segments have filled the pipeline until the last segment starts, every level is
    /// busy.
    fn alike(&self, s: &Schedule, k: usize) -> usize {
        let levels = ceil_log2(s.ranks);
        let k = k % (s.segments + levels - 1);
        if k + 1 >= levels && k < s.segments { s.segments - k } else { 1 }
    }

    /// One place of every level, in both trees.
    fn busiest(&self, s: &Schedule, _k: usize) -> Vec<usize> {
        let places = (0..ceil_log2(s.ranks)).map(|level| 1 << level).flat_map(|place| [place, s.ranks - place]);
        std::iter::once(s.root).chain(places.map(|place| s.rank_at(place))).collect()
    }
}

#[derive(Clone, Copy)]
struct Tree {
    nodes: usize,
    second: bool,
}

impl Tree {
    /// The second tree is the first tree with its places renumbered. Returns the number that a place has in the first
    /// tree. `place` is the inverse.
    fn label(self, place: usize) -> usize {
        match (self.second, self.nodes % 2) {
            (false, _) => place,
            (true, 0) => self.nodes + 1 - place,
            (true, _) => place % self.nodes + 1,
        }
    }

    fn place(self, label: usize) -> usize {
        match (self.second, self.nodes % 2) {
            (false, _) => label,
            (true, 0) => self.nodes + 1 - label,
            (true, _) => (label + self.nodes - 2) % self.nodes + 1,
        }
    }

    /// The parent's place. 0 for the top of the tree.
    fn parent(self, place: usize) -> usize {
        let label = self.label(place);
        let bit = label & label.wrapping_neg();
        let up = (label & !bit) | (bit << 1);
        let up = if up > self.nodes { label & !bit } else { up };
        if up == 0 { 0 } else { self.place(up) }
    }

    /// The children's places, in ascending order.
    fn children(self, place: usize) -> Vec<usize> {
        if place == 0 {
            return Vec::from([self.place(1 << self.nodes.ilog2())]);
        }
        let label = self.label(place);
        let mut reach = (label & label.wrapping_neg()) / 2;
        let mut children = Vec::new();
        if reach > 0 {
            children.push(self.place(label - reach));
        }
        while reach > 0 && label + reach > self.nodes {
            reach /= 2;
        }
        if reach > 0 {
            children.push(self.place(label + reach));
        }
        children.sort_unstable();
        children
    }

    /// Number of edges to place 0.
    fn depth(self, place: usize) -> usize {
        let mut depth = 0;
        let mut at = place;
        while at > 0 {
            at = self.parent(at);
            depth += 1;
        }
        depth
    }
}

/// The part number of the segment that is sent in step `k` if each segment is delayed by `wait` steps.
fn due(s: &Schedule, tree: Tree, k: usize, wait: usize) -> Option<usize> {
    let segment = k.checked_sub(wait).filter(|segment| *segment < s.segments)?;
    Some(usize::from(tree.second) * s.segments + segment)
}

fn down(s: &Schedule, tree: Tree, rank: usize, k: usize, step: &mut Step) {
    let place = s.place_of(rank);
    let depth = tree.depth(place);
    if let Some(part) = due(s, tree, k, depth) {
        for child in tree.children(place) {
            add_send(step, s.rank_at(child), part);
        }
    }
    if depth > 0
        && let Some(part) = due(s, tree, k, depth - 1)
    {
        add_recv(step, s.rank_at(tree.parent(place)), part, How::Copy);
    }
}

fn up(s: &Schedule, tree: Tree, rank: usize, k: usize, step: &mut Step) {
    let place = s.place_of(rank);
    let above_lowest = ceil_log2(s.ranks) - tree.depth(place);
    if place > 0
        && let Some(part) = due(s, tree, k, above_lowest)
    {
        add_send(step, s.rank_at(tree.parent(place)), part);
    }
    if above_lowest > 0
        && let Some(part) = due(s, tree, k, above_lowest - 1)
    {
        for child in tree.children(place) {
            let how = if child < place { How::ReduceBefore } else { How::ReduceAfter };
            add_recv(step, s.rank_at(child), part, how);
        }
    }
}

/// Two ranks are neighbours in both trees only if there are just two ranks. Then both parts are sent in one message.
fn add_send(step: &mut Step, peer: usize, part: usize) {
    match step.sends.iter_mut().find(|send| send.peer == peer) {
        Some(send) => send.parts.push(part..part + 1),
        None => step.send(peer, one(part)),
    }
}

fn add_recv(step: &mut Step, peer: usize, part: usize, how: How) {
    match step.recvs.iter_mut().find(|recv| recv.peer == peer && recv.how == how) {
        Some(recv) => recv.parts.push(part..part + 1),
        None => step.recv(peer, one(part), how),
    }
}
