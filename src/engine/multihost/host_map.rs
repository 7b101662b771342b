//! Maps ranks to hosts, and selects the leaders, the ranks of a host that talk to other hosts. Pure.

/// Which ranks are on which hosts. Equal on every rank except for `me`, `host` and `local_rank`.
#[derive(Clone, Debug)]
pub struct HostMap {
    /// The ranks of each host, in ascending order.
    pub hosts: Vec<Vec<usize>>,
    pub host_of: Vec<usize>,
    pub me: usize,
    /// This rank's host. `local_rank` is its position among the ranks of that host.
    pub host: usize,
    pub local_rank: usize,
}

impl HostMap {
    /// `host_of` has each rank's host. Hosts are numbered without gaps.
    pub fn new(host_of: Vec<usize>, me: usize) -> HostMap {
        let count = host_of.iter().max().map_or(0, |last| last + 1);
        let mut hosts = vec![Vec::new(); count];
        for (rank, host) in host_of.iter().enumerate() {
            hosts[*host].push(rank);
        }
        let host = host_of[me];
        let local_rank = hosts[host].iter().position(|rank| *rank == me).expect("a rank lives on its host");
        HostMap { hosts, host_of, me, host, local_rank }
    }

    /// Renumbers `host_of`: if `shares` is false for a host, each rank of that host becomes a host by itself.
    pub fn split_hosts(host_of: &[usize], shares: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut numbers = std::collections::HashMap::new();
        let mut next = 0;
        let mut number = |key| {
            *numbers.entry(key).or_insert_with(|| {
                next += 1;
                next - 1
            })
        };
        host_of
            .iter()
            .enumerate()
            .map(|(rank, host)| number((*host, if shares(*host) { usize::MAX } else { rank })))
            .collect()
    }

    pub fn ranks(&self) -> usize {
        self.host_of.len()
    }

    /// Returns the ranks of this host.
    pub fn local_ranks(&self) -> &[usize] {
        &self.hosts[self.host]
    }

    /// Returns the smallest number of ranks on any host, which limits the number of leaders per host.
    pub fn min_local_size(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// Whether all hosts have the same number of ranks.
    pub fn is_even(&self) -> bool {
        self.hosts.iter().all(|ranks| ranks.len() == self.hosts[0].len())
    }

    /// Returns each host's rank that has this local rank.
    pub fn leaders(&self, local_rank: usize) -> Vec<usize> {
        self.hosts.iter().map(|ranks| ranks[local_rank]).collect()
    }

    /// Returns one rank per host: `root` on its own host, the first rank on each other host.
    pub fn leaders_with(&self, root: usize) -> Vec<usize> {
        (0..self.hosts.len()).map(|host| if self.host_of[root] == host { root } else { self.hosts[host][0] }).collect()
    }

    /// Returns the rails. A rail consists of the ranks that have the same local rank, one per host; the local rank must
    /// exist on every host.
    pub fn rails(&self) -> impl Iterator<Item = Vec<usize>> + '_ {
        (0..self.min_local_size()).map(|local_rank| self.leaders(local_rank))
    }

    /// All ranks, grouped by host. Blocks in messages between hosts have this order, unless the hosts use `rails`.
    pub fn by_host(&self) -> impl Iterator<Item = usize> + '_ {
        self.hosts.iter().flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_dealt_over_hosts_are_found_again() {
        let host_map = HostMap::new(vec![0, 1, 0, 1, 1], 3);
        assert_eq!(host_map.hosts, [vec![0, 2], vec![1, 3, 4]]);
        assert_eq!((host_map.host, host_map.local_rank, host_map.min_local_size()), (1, 1, 2));
        assert!(!host_map.is_even() && HostMap::new(vec![1, 0, 0, 1], 0).is_even());
        assert_eq!(host_map.leaders(1), [2, 3]);
        assert_eq!(host_map.leaders_with(4), [0, 4]);
        assert_eq!(host_map.by_host().collect::<Vec<_>>(), [0, 2, 1, 3, 4]);
        assert_eq!(HostMap::split_hosts(&[0, 1, 0, 1], |host| host == 1), [0, 1, 2, 1]);
    }
}
