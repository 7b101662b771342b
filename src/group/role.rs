//! Whether the program or another group has created a group.

#[derive(Clone, Debug)]
pub(super) enum Role {
    /// The program has made the group.
    Program,
    /// The group consists of the ranks of one host of a larger group. The larger group asks and answers for it
    /// (`hang`). Element r is the number of rank r in the larger group. Errors use these numbers, because the user
    /// knows only them.
    Inside(Vec<usize>),
}

impl Role {
    pub fn is_inside(&self) -> bool {
        matches!(self, Role::Inside(_))
    }

    /// The number by which errors name a rank.
    pub fn number(&self, rank: usize) -> usize {
        match self {
            Role::Program => rank,
            Role::Inside(ranks) => ranks.get(rank).copied().unwrap_or(rank),
        }
    }
}
