//! Who lives where: the hosts of a group, and the ranks that speak for them. Pure.

/// The same on every rank but for `me` and what follows from it.
#[derive(Clone, Debug)]
pub struct Place {
    /// The ranks of each host, ascending.
    pub hosts: Vec<Vec<usize>>,
    pub host_of: Vec<usize>,
    pub me: usize,
    /// This rank's host, and its position there.
    pub host: usize,
    pub index: usize,
}

impl Place {
    /// `host_of`: each rank's host, numbered without gaps.
    pub fn new(host_of: Vec<usize>, me: usize) -> Place {
        let count = host_of.iter().max().map_or(0, |last| last + 1);
        let mut hosts = vec![Vec::new(); count];
        for (rank, host) in host_of.iter().enumerate() {
            hosts[*host].push(rank);
        }
        let host = host_of[me];
        let index = hosts[host].iter().position(|rank| *rank == me).expect("a rank lives on its host");
        Place { hosts, host_of, me, host, index }
    }

    /// As `host_of`, with the ranks of each host for which `shares` is false on hosts of their own.
    pub fn apart(host_of: &[usize], shares: impl Fn(usize) -> bool) -> Vec<usize> {
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

    /// The ranks of this host.
    pub fn neighbours(&self) -> &[usize] {
        &self.hosts[self.host]
    }

    /// The most leaders that every host can offer.
    pub fn fewest(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// All hosts have as many ranks.
    pub fn is_even(&self) -> bool {
        self.hosts.iter().all(|ranks| ranks.len() == self.hosts[0].len())
    }

    /// The `index`-th rank of every host.
    pub fn leaders(&self, index: usize) -> Vec<usize> {
        self.hosts.iter().map(|ranks| ranks[index]).collect()
    }

    /// One rank a host, `root` for its own.
    pub fn leaders_with(&self, root: usize) -> Vec<usize> {
        (0..self.hosts.len()).map(|host| if self.host_of[root] == host { root } else { self.hosts[host][0] }).collect()
    }

    /// The ranks at one position of every host, position by position; all ranks where hosts are even.
    pub fn columns(&self) -> impl Iterator<Item = Vec<usize>> + '_ {
        (0..self.fewest()).map(|index| self.leaders(index))
    }

    /// Ranks in the order of their hosts: how blocks lie while they travel between hosts.
    pub fn by_host(&self) -> impl Iterator<Item = usize> + '_ {
        self.hosts.iter().flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_dealt_over_hosts_are_found_again() {
        let place = Place::new(vec![0, 1, 0, 1, 1], 3);
        assert_eq!(place.hosts, [vec![0, 2], vec![1, 3, 4]]);
        assert_eq!((place.host, place.index, place.fewest()), (1, 1, 2));
        assert!(!place.is_even() && Place::new(vec![1, 0, 0, 1], 0).is_even());
        assert_eq!(place.leaders(1), [2, 3]);
        assert_eq!(place.leaders_with(4), [0, 4]);
        assert_eq!(place.by_host().collect::<Vec<_>>(), [0, 2, 1, 3, 4]);
        assert_eq!(Place::apart(&[0, 1, 0, 1], |host| host == 1), [0, 1, 2, 1]);
    }
}
