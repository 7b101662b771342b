//! Whose group it is.

#[derive(Clone, Debug)]
pub(super) enum Role {
    /// The program has made it.
    Program,
    /// It is inside a host of a larger group, which asks and tells for it. For each rank its rank there: the ranks of its
    /// errors have these numbers, because the user knows no others.
    Inside(Vec<usize>),
}

impl Role {
    pub fn is_inside(&self) -> bool {
        matches!(self, Role::Inside(_))
    }

    /// The number of a rank in errors.
    pub fn number(&self, rank: usize) -> usize {
        match self {
            Role::Program => rank,
            Role::Inside(ranks) => ranks.get(rank).copied().unwrap_or(rank),
        }
    }
}
