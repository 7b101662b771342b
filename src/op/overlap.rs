//! Compares the memory that operations read and write, to find those operations of one rank that must run in order
//! (rule 4).

use crate::types::{Request, Span, Strided};

/// The memory that an operation reads and the memory that it writes. Each list is sorted by address, and adjacent
/// pieces are merged. Strided tensors are compared by their contiguous runs, so different columns of a matrix do not
/// overlap.
#[derive(Debug)]
pub struct Reach {
    reads: Vec<Span>,
    writes: Vec<Span>,
}

impl Reach {
    pub fn of(request: &Request) -> Reach {
        Reach::of_all(request.inputs().to_vec(), request.outputs().to_vec(), &request.also_touched)
    }

    pub fn of_all(mut reads: Vec<Span>, mut writes: Vec<Span>, runs_of: &[Strided]) -> Reach {
        for strided in runs_of {
            runs(strided, if strided.written { &mut writes } else { &mut reads });
        }
        Reach { reads: sorted(reads), writes: sorted(writes) }
    }

    /// Whether one of the two writes memory that the other reads or writes.
    pub fn conflicts_with(&self, other: &Reach) -> bool {
        meet(&self.writes, &other.writes) || meet(&self.writes, &other.reads) || meet(&self.reads, &other.writes)
    }
}

/// The same as `Reach::conflicts_with`, for two short requests. Compares their spans pair by pair, because sorting
/// would take longer.
pub fn conflict_in_pairs(one: &Request, other: &Request) -> bool {
    let touch = |a: &[Span], b: &[Span]| a.iter().any(|x| b.iter().any(|y| x.overlaps(y)));
    touch(one.outputs(), other.outputs())
        || touch(one.outputs(), other.inputs())
        || touch(one.inputs(), other.outputs())
}

/// Whether a request has few pieces and no strided tensors, so that `conflict_in_pairs` applies.
pub fn is_short(request: &Request) -> bool {
    request.inputs().len() + request.outputs().len() <= 4 && request.also_touched.is_empty()
}

/// The address range from the first to the last byte that a request uses. Empty if it uses none.
pub fn extent(request: &Request) -> (usize, usize) {
    let join = |(low, high): (usize, usize), span: &Span| (low.min(span.addr), high.max(span.addr + span.bytes));
    let plain = request.inputs().iter().chain(request.outputs()).filter(|span| span.bytes > 0);
    let extent = plain.fold((usize::MAX, 0), join);
    request.also_touched.iter().map(Strided::extent).fold(extent, |extent, span| join(extent, &span))
}

/// Adds the contiguous runs of a strided tensor. If there are more than `MOST`, adds the tensor's extent instead.
fn runs(strided: &Strided, to: &mut Vec<Span>) {
    const MOST: usize = 1 << 22;
    let Strided { addr, run, counts, strides, .. } = *strided;
    let many = counts.iter().try_fold(1usize, |all, count| all.checked_mul(*count)).is_none_or(|all| all > MOST);
    if many {
        to.push(strided.extent());
        return;
    }
    fn repeat(dims: &[(usize, usize)], addr: usize, run: usize, to: &mut Vec<Span>) {
        match dims {
            [] => to.push(Span { addr, bytes: run }),
            [(count, stride), rest @ ..] => (0..*count).for_each(|i| repeat(rest, addr + i * stride, run, to)),
        }
    }
    let dims: Vec<(usize, usize)> = counts.into_iter().zip(strides).filter(|(count, _)| *count != 1).collect();
    repeat(&dims, addr, run, to);
}

fn sorted(mut all: Vec<Span>) -> Vec<Span> {
    all.retain(|span| span.bytes > 0);
    all.sort_unstable_by_key(|span| span.addr);
    all.dedup_by(|next, last| {
        let touches = next.addr <= last.addr + last.bytes;
        if touches {
            last.bytes = last.bytes.max(next.addr + next.bytes - last.addr);
        }
        touches
    });
    all
}

/// Whether two sorted lists have a byte in common. Checks each span of the shorter list once, and finds the span's
/// position in the longer list by steps of doubling length. In total this takes at most about as many steps as there
/// are spans in both lists, and far fewer if one list is short.
fn meet(one: &[Span], other: &[Span]) -> bool {
    let (few, mut rest) = if one.len() <= other.len() { (one, other) } else { (other, one) };
    for span in few {
        let before = |other: &Span| {
            looked();
            other.addr + other.bytes <= span.addr
        };
        let mut step = 1;
        while step < rest.len() && before(&rest[step - 1]) {
            step *= 2;
        }
        let (from, to) = (step / 2, step.min(rest.len()));
        // If a span of the longer list ends before this span, it also ends before all later ones.
        rest = &rest[from + rest[from..to].partition_point(before)..];
        match rest.first() {
            None => return false,
            Some(next) if next.addr < span.addr + span.bytes => return true,
            Some(_) => (),
        }
    }
    false
}

#[cfg(not(test))]
fn looked() {}

#[cfg(test)]
thread_local! {
    static LOOKS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
fn looked() {
    LOOKS.with(|looks| looks.set(looks.get() + 1));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(list: &[(usize, usize)]) -> Vec<Span> {
        list.iter().map(|&(addr, bytes)| Span { addr, bytes }).collect()
    }

    #[test]
    fn lists_meet_exactly_where_a_pair_of_their_pieces_does() {
        let mut state = 1u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        let (mut met, turns) = (0, if cfg!(miri) { 100 } else { 20_000 });
        for _ in 0..turns {
            let mut list = |most: u64| -> Vec<Span> {
                (0..below(most)).map(|_| Span { addr: below(300) as usize + 1, bytes: below(6) as usize }).collect()
            };
            let (one, other) = (list(4), list(30));
            let pairs = one.iter().any(|a| other.iter().any(|b| a.overlaps(b)));
            let (a, b) = (sorted(one.clone()), sorted(other.clone()));
            assert_eq!((meet(&a, &b), meet(&b, &a)), (pairs, pairs), "{one:?} and {other:?}");
            met += usize::from(pairs);
        }
        assert!((turns / 10..turns / 10 * 9).contains(&met), "the lists do not try both: {met}");
    }

    #[test]
    fn pieces_that_touch_become_one() {
        let joined = sorted(spans(&[(10, 5), (1, 4), (15, 0), (5, 5), (30, 1), (2, 1)]));
        assert_eq!(joined, spans(&[(1, 14), (30, 1)]));
    }

    #[test]
    fn strided_tensors_that_lie_between_each_other_are_apart() {
        // A tensor of 5 x 6 x 7 numbers of 4 bytes.
        let (planes, rows, size) = (5, 6, 4);
        let face = |addr, run, counts: [usize; 2], strides: [usize; 2]| Strided {
            addr,
            run,
            counts: [counts[0], counts[1], 1, 1],
            strides: [strides[0], strides[1], 0, 0],
            written: true,
        };
        let (row, plane) = (7 * size, 6 * 7 * size);
        let column = |at: usize| face(1000 + at * size, size, [planes, rows], [plane, row]);
        let line = |at: usize| face(1000 + at * row, row, [planes, 1], [plane, 0]);
        let reach = |strided: &Strided| {
            let mut all = Vec::new();
            runs(strided, &mut all);
            sorted(all)
        };
        assert_eq!(reach(&column(1)).iter().map(|span| span.bytes).sum::<usize>(), planes * rows * size);
        assert_eq!(column(6).extent(), Span { addr: 1000 + 6 * size, bytes: planes * plane - 6 * size });
        for (one, other, share) in [
            (column(0), column(1), false),
            (column(3), column(3), true),
            (line(0), line(5), false),
            (line(2), column(4), true),
        ] {
            assert_eq!(meet(&reach(&one), &reach(&other)), share, "{one:?} and {other:?}");
        }
    }

    /// Twenty lists, each of a thousand tensors; the lists are interleaved in memory. Every list is compared with every
    /// other list. (Fewer and shorter ones under Miri.)
    #[test]
    fn rule_04_long_lists_are_compared_in_about_as_many_steps_as_they_have_pieces() {
        let (lists, tensors) = if cfg!(miri) { (4, 50) } else { (20, 1000) };
        let list = |list| (0..tensors).map(move |i| Span { addr: 64 + (i * lists + list) * 16, bytes: 8 }).collect();
        let all: Vec<Vec<Span>> = (0..lists).map(|number| sorted(list(number))).collect();
        LOOKS.with(|looks| looks.set(0));
        for (at, one) in all.iter().enumerate() {
            assert!(all[..at].iter().all(|other| !meet(one, other)));
        }
        let looks = LOOKS.with(std::cell::Cell::get);
        let pairs = lists * (lists - 1) / 2;
        assert!(looks <= pairs * 3 * tensors, "{looks} looks for {pairs} pairs of {tensors} pieces");
        // One tensor is compared with a list.
        LOOKS.with(|looks| looks.set(0));
        assert!(!meet(&all[0], &spans(&[(64 + 16 * 10_001, 8)])));
        assert!(LOOKS.with(std::cell::Cell::get) < 40);
    }
}
