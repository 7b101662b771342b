//! Computes where the rows of a mixture of experts go: which tokens are sent to which rank, and at which place each row
//! is stored there.
//!
//! An assignment is a token that is sent to one of its experts. Experts are numbered over all ranks: those of rank r
//! begin with number r * experts / ranks. The inputs are the experts of this rank's tokens, and a table of how many
//! rows each rank sends to each expert. The time is linear in the numbers of assignments, received rows and table
//! entries.

use crate::error::{Error, Result};

/// Sorts assignments by expert, and counts the assignments of each expert. Assignments of the same expert keep their
/// order.
pub fn sort(experts: &[i64], counts: &mut [i64], order: &mut [i64]) -> Result<()> {
    sizes("order", order.len(), experts.len())?;
    counts.fill(0);
    for &expert in experts {
        let Some(count) = usize::try_from(expert).ok().and_then(|expert| counts.get_mut(expert)) else {
            let (least, most) = (experts.iter().min().unwrap_or(&0), experts.iter().max().unwrap_or(&0));
            return Err(Error::invalid(format!(
                "sagellm MoEDispatcher: experts from {least} to {most}, expected 0 to {}",
                counts.len() as i64 - 1
            )));
        };
        *count += 1;
    }
    let mut next: Vec<usize> = begins(counts);
    for (assignment, &expert) in experts.iter().enumerate() {
        order[next[expert as usize]] = assignment as i64;
        next[expert as usize] += 1;
    }
    Ok(())
}

/// Returns the index at which each part begins, if parts of these sizes are stored one after the other.
fn begins(counts: &[i64]) -> Vec<usize> {
    counts.iter().scan(0, |next, &count| Some(std::mem::replace(next, *next + count as usize))).collect()
}

/// What `Table::leaving` writes.
pub struct Leaving<'a> {
    /// For each row that is sent, its assignment; -1 for padding.
    pub rows: &'a mut [i64],
    /// For each row that is sent, its token; 0 for padding.
    pub sources: &'a mut [i64],
    /// For each assignment, its row; -1 if the assignment is not sent.
    pub places: &'a mut [i64],
}

/// The table of how many rows each rank sends to each expert (`taken`, one rank after the other), and this rank.
pub struct Table<'a> {
    taken: &'a [i64],
    experts: usize,
    rank: usize,
}

impl<'a> Table<'a> {
    pub fn new(taken: &'a [i64], experts: usize, rank: usize) -> Result<Table<'a>> {
        let ranks = taken.len().checked_div(experts).unwrap_or(0);
        let whole = rank < ranks && taken.len().is_multiple_of(experts) && experts.is_multiple_of(ranks);
        if !whole || taken.iter().any(|&count| count < 0) {
            return Err(Error::bug(format!(
                "sagellm: a table of {} counts for {experts} experts has no rank {rank}",
                taken.len()
            )));
        }
        Ok(Table { taken, experts, rank })
    }

    fn ranks(&self) -> usize {
        self.taken.len() / self.experts
    }

    /// How many rows rank `from` sends to each expert of rank `to`.
    fn counts(&self, from: usize, to: usize) -> &'a [i64] {
        let each = self.experts / self.ranks();
        &self.taken[from * self.experts + to * each..][..each]
    }

    /// Writes to `found`, in this order, the number of rows for each rank, from each rank, and for each expert of this
    /// rank. Then come the largest number of rows for one expert, and the number of all rows of all ranks.
    pub fn figures(&self, found: &mut [i64]) -> Result<()> {
        let ranks = self.ranks();
        sizes("figures", found.len(), 2 * ranks + self.experts / ranks + 2)?;
        let (sent, rest) = found.split_at_mut(ranks);
        let (received, rest) = rest.split_at_mut(ranks);
        let (rows, of_all) = rest.split_at_mut(rest.len() - 2);
        let of_expert = |expert: usize| self.taken.iter().skip(expert).step_by(self.experts).sum();
        of_all[0] = (0..self.experts).map(of_expert).max().unwrap_or(0);
        of_all[1] = self.taken.iter().sum();
        rows.fill(0);
        for (other, (to, from)) in sent.iter_mut().zip(received).enumerate() {
            *to = self.counts(self.rank, other).iter().sum();
            *from = self.counts(other, self.rank).iter().sum();
            for (row, count) in rows.iter_mut().zip(self.counts(other, self.rank)) {
                *row += count;
            }
        }
        Ok(())
    }

    /// Computes which rows this rank sends. `order` and `wanted` are the order and the counts that `sort` has written.
    /// Each token has `choices` assignments.
    pub fn leaving(&self, order: &[i64], wanted: &[i64], choices: usize, to: Leaving) -> Result<()> {
        let Leaving { rows, sources, places } = to;
        sizes("wanted", wanted.len(), self.experts)?;
        sizes("places", places.len(), order.len())?;
        sizes("order", order.len(), wanted.iter().sum::<i64>() as usize)?;
        let total: i64 = self.taken[self.rank * self.experts..][..self.experts].iter().sum();
        sizes("rows", rows.len(), total as usize)?;
        sizes("sources", sources.len(), rows.len())?;
        let (begins, each) = (begins(wanted), self.experts / self.ranks());
        places.fill(-1);
        let mut row = 0;
        for to in 0..self.ranks() {
            for (at, &count) in self.counts(self.rank, to).iter().enumerate() {
                let expert = to * each + at;
                let own = &order[begins[expert]..][..count.min(wanted[expert]) as usize];
                let (filled, empty) = rows[row..row + count as usize].split_at_mut(own.len());
                filled.copy_from_slice(own);
                empty.fill(-1);
                for (behind, &assignment) in own.iter().enumerate() {
                    places[assignment as usize] = (row + behind) as i64;
                }
                row += count as usize;
            }
        }
        for (source, row) in sources.iter_mut().zip(rows) {
            *source = (*row).max(0) / choices.max(1) as i64;
        }
        Ok(())
    }

    /// Computes the permutation that sorts the received rows by expert, then by rank. Received rows are stored in
    /// groups, one for each rank that sent them, in rank order. `sorting[i]` is the place of the row that comes i-th
    /// when sorted. `unsorted` is the inverse permutation.
    pub fn coming(&self, sorting: &mut [i64], unsorted: &mut [i64]) -> Result<()> {
        let total: i64 = (0..self.ranks()).map(|from| self.counts(from, self.rank).iter().sum::<i64>()).sum();
        sizes("sorting", sorting.len(), total as usize)?;
        sizes("unsorted", unsorted.len(), total as usize)?;
        let mut next = vec![0; self.ranks()];
        let mut behind = 0;
        for (from, next) in next.iter_mut().enumerate() {
            *next = behind;
            behind += self.counts(from, self.rank).iter().sum::<i64>() as usize;
        }
        let mut row = 0;
        for expert in 0..self.experts / self.ranks() {
            for (from, place) in next.iter_mut().enumerate() {
                for _ in 0..self.counts(from, self.rank)[expert] {
                    sorting[row] = *place as i64;
                    unsorted[*place] = row as i64;
                    *place += 1;
                    row += 1;
                }
            }
        }
        Ok(())
    }
}

fn sizes(what: &str, have: usize, wanted: usize) -> Result<()> {
    if have != wanted {
        return Err(Error::bug(format!("sagellm: {what} has the size {have}, expected {wanted}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_every_assignment_is_found() {
        let experts = [3, 0, 2, 3, 1, 0, 3];
        let (mut counts, mut order) = ([0; 4], [0; 7]);
        sort(&experts, &mut counts, &mut order).unwrap();
        assert_eq!((counts, order), ([2, 1, 1, 3], [1, 5, 4, 2, 0, 3, 6]));
        assert!(
            sort(&[4], &mut counts, &mut [0]).unwrap_err().to_string().contains("experts from 4 to 4, expected 0 to 3")
        );
        assert!(sort(&[-1], &mut counts, &mut [0]).is_err());
    }

    #[test]
    fn rows_are_in_rank_order_and_padding_fills() {
        let taken = [2, 2, 2, 2, 1, 0, 0, 3];
        let table = Table::new(&taken, 4, 0).unwrap();
        let mut figures = [0; 8];
        table.figures(&mut figures).unwrap();
        assert_eq!(figures, [4, 4, 4, 1, 3, 2, 5, 12]);
        let (mut rows, mut sources, mut places) = ([0; 8], [0; 8], [0; 7]);
        let to = Leaving { rows: &mut rows, sources: &mut sources, places: &mut places };
        table.leaving(&[1, 5, 4, 2, 0, 3, 6], &[2, 1, 1, 3], 2, to).unwrap();
        assert_eq!(rows, [1, 5, 4, -1, 2, -1, 0, 3]);
        assert_eq!(sources, [0, 2, 2, 0, 1, 0, 0, 1]);
        assert_eq!(places, [6, 0, 4, 7, 2, 1, -1]);
        let (mut sorting, mut unsorted) = ([0; 5], [0; 5]);
        table.coming(&mut sorting, &mut unsorted).unwrap();
        assert_eq!((sorting, unsorted), ([0, 1, 4, 2, 3], [0, 1, 3, 4, 2]));
        assert!(Table::new(&taken, 3, 0).is_err() && Table::new(&taken, 4, 2).is_err());
    }
}
