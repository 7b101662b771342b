//! How an operation travels between hosts. Pure: all ranks of the group get the same answer.

use crate::schedule::Algorithm;
use crate::types::Kind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostsChoice {
    pub algorithm: Algorithm,
    /// Ranks of each host that talk to other hosts.
    pub leaders: usize,
    /// Batches that it is cut into.
    pub segments: usize,
}

/// `bytes`: what one rank contributes; `fewest`: ranks of the host that has the fewest.
pub fn between_hosts(kind: Kind, bytes: usize, hosts: usize, fewest: usize, strict: bool) -> HostsChoice {
    const SMALL: usize = 64 << 10;
    const SEGMENT: usize = 2 << 20;
    let algorithm = match kind {
        _ if strict => Algorithm::Direct,
        Kind::AllReduce if bytes <= SMALL || hosts == 2 => Algorithm::Doubling,
        Kind::AllReduce if hosts.is_power_of_two() => Algorithm::Halving,
        Kind::AllReduce => Algorithm::Ring,
        Kind::Broadcast | Kind::Reduce => Algorithm::Binomial,
        _ => Algorithm::Direct,
    };
    let leaders = if kind == Kind::AllReduce && bytes > SMALL { fewest } else { 1 };
    let segments = bytes.div_ceil(SEGMENT).max(1);
    HostsChoice { algorithm, leaders, segments }
}
