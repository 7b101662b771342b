//! Chooses the addresses at which the processes of a group reach each other, for connections between hosts and
//! connections of a delegate. Pure.
//!
//! Each rank lists in its record the addresses at which it could listen, best first. Both ends of a connection must
//! have the same address family, so rank 0 chooses one family (`Way`) for all ranks. A loopback address reaches only
//! its own host, so it is used only if all ranks are in one network namespace.

/// An address family, and whether the addresses are on the loopback interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Way {
    V4 = 4,
    V6 = 6,
    Loopback4 = 14,
    Loopback6 = 16,
}

impl Way {
    pub fn from_code(code: u8) -> Option<Way> {
        [Way::V4, Way::V6, Way::Loopback4, Way::Loopback6].into_iter().find(|way| *way as u8 == code)
    }

    pub fn is_loopback(self) -> bool {
        matches!(self, Way::Loopback4 | Way::Loopback6)
    }

    fn family(self) -> &'static str {
        if matches!(self, Way::V4 | Way::Loopback4) { "IPv4" } else { "IPv6" }
    }
}

/// The addresses that a rank lists in its record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Best first. Each way has at least one address, and its addresses are on different interfaces. Empty if the
    /// caller specifies none.
    pub ways: Vec<(Way, Vec<String>)>,
    /// Why the rank has no address, as a text for the user. Empty if the rank has an address or specifies none.
    pub problem: String,
}

impl Addresses {
    /// Parses the caller's text: one way per line, its code and its addresses ("4 10.0.0.1"), or a line with the
    /// problem ("! the interface is missing").
    pub fn parse(text: &str) -> Option<Addresses> {
        if let Some(problem) = text.strip_prefix("! ") {
            return Some(Addresses { ways: Vec::new(), problem: problem.into() });
        }
        let way = |line: &str| {
            let mut words = line.split_whitespace();
            let way = Way::from_code(words.next()?.parse().ok()?)?;
            let places: Vec<String> = words.map(str::to_string).collect();
            (!places.is_empty()).then_some((way, places))
        };
        let ways = text.lines().map(way).collect::<Option<Vec<_>>>()?;
        Some(Addresses { ways, problem: String::new() })
    }

    fn places(&self, wanted: Way) -> usize {
        self.ways.iter().find(|(way, _)| *way == wanted).map_or(0, |(_, places)| places.len())
    }

    fn reaches_hosts(&self) -> bool {
        self.ways.iter().any(|(way, _)| !way.is_loopback())
    }
}

/// The way that all ranks of a group use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    pub way: Way,
    /// Every rank has at least this many addresses for `way`. There is one set of connections for each.
    pub places: usize,
}

impl Network {
    /// Returns the code of `way` and the number `places`, for the caller, who knows its own addresses.
    pub fn text(&self) -> String {
        format!("{} {}", self.way as u8, self.places)
    }
}

const REMEDY: &str = "Set GLOO_SOCKET_IFNAME on every rank to the interface that leads to the other hosts";

/// The facts about a rank on which the choice depends.
#[derive(Clone, Copy, Debug)]
pub struct Rank<'a> {
    pub addresses: &'a Addresses,
    pub hostname: &'a str,
    /// The boot id of the rank's host, and its network namespace.
    pub place: (&'a str, u64),
}

/// Returns the first way in rank 0's list that all ranks have. None if a rank has listed no way. The error names a rank
/// that has a problem, or ranks that have no common way, and says what to do.
pub fn common(ranks: &[Rank]) -> Result<Option<Network>, String> {
    let who = |rank: usize| format!("rank {rank} on host {}", ranks[rank].hostname);
    if let Some(rank) = ranks.iter().position(|rank| !rank.addresses.problem.is_empty()) {
        return Err(format!("{}: {}. {REMEDY}", who(rank), ranks[rank].addresses.problem));
    }
    if ranks.iter().any(|rank| rank.addresses.ways.is_empty()) {
        return Ok(None);
    }
    let first = ranks[0].addresses;
    // Hosts that report no boot id may compare as equal, and then loopback counts as usable between them.
    let one_network = ranks.iter().all(|rank| rank.place == ranks[0].place);
    for (way, _) in first.ways.iter().filter(|(way, _)| one_network || !way.is_loopback()) {
        let places = ranks.iter().map(|rank| rank.addresses.places(*way)).min().unwrap_or(0);
        if places > 0 {
            return Ok(Some(Network { way: *way, places }));
        }
    }
    let shown = |rank: usize| {
        let ways = ranks[rank].addresses.ways.iter();
        let listed =
            ways.flat_map(|(way, places)| places.iter().map(move |place| format!("{place} ({})", way.family())));
        listed.collect::<Vec<_>>().join(", ")
    };
    if let Some(rank) = ranks.iter().position(|rank| !rank.addresses.reaches_hosts()).filter(|_| !one_network) {
        let (who, shown) = (who(rank), shown(rank));
        return Err(format!("{who} can listen at {shown} alone, where no other host reaches it. {REMEDY}"));
    }
    let lacks = |rank: &Rank| first.ways.iter().all(|(way, _)| rank.addresses.places(*way) == 0);
    let other = ranks.iter().position(lacks).unwrap_or(ranks.len() - 1);
    Err(format!(
        "the ranks have no family of addresses in common: {} can listen at {}, {} at {}. {REMEDY}, and give it an address \
         of the same family everywhere",
        who(0),
        shown(0),
        who(other),
        shown(other)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the choice for two ranks. If `apart`, they are on different hosts.
    fn common(first: &str, second: &str, apart: bool) -> Result<Option<Network>, String> {
        let addresses = [first, second].map(|text| Addresses::parse(text).unwrap());
        let rank = |addresses, host| Rank { addresses, hostname: ["h1", "h2"][host], place: ("boot", host as u64) };
        super::common(&[rank(&addresses[0], 0), rank(&addresses[1], usize::from(apart))])
    }

    #[test]
    fn all_ranks_take_the_first_way_of_rank_0_that_all_have() {
        let network = |way, places| Ok(Some(Network { way, places }));
        assert_eq!(common("4 10.0.0.1\n6 fd77::1", "6 fd77::2\n4 10.0.0.2", true), network(Way::V4, 1));
        assert_eq!(common("4 10.0.0.1\n6 fd77::1", "6 fd77::2", true), network(Way::V6, 1));
        assert_eq!(common("4 10.0.0.1 10.1.0.1", "4 10.0.0.2 10.1.0.2", true), network(Way::V4, 2));
        assert_eq!(common("4 10.0.0.1 10.1.0.1", "4 10.0.0.2", true), network(Way::V4, 1), "as many as all have");
        assert_eq!(common("14 127.0.0.1\n4 10.0.0.1", "14 127.0.0.1\n4 10.0.0.2", true), network(Way::V4, 1));
        assert_eq!(common("14 127.0.0.1\n4 10.0.0.1", "14 127.0.0.1", false), network(Way::Loopback4, 1));
        assert_eq!(common("4 10.0.0.1", "", true), Ok(None), "a rank that does not say");
        let text = common("14 127.0.0.1", "14 127.0.0.1", true).unwrap_err();
        assert!(text.starts_with("rank 0 on host h1 can listen at 127.0.0.1 (IPv4) alone, where no other"), "{text}");
        let text = common("4 10.0.0.1", "6 fd77::2", true).unwrap_err();
        assert!(text.contains("rank 0 on host h1 can listen at 10.0.0.1 (IPv4), rank 1 on host h2 at fd77::2 (IPv6)"));
    }

    #[test]
    fn the_first_rank_with_a_problem_is_named_with_the_remedy() {
        let text = common("4 10.0.0.1", "! GLOO_SOCKET_IFNAME names 'eth9'", true).unwrap_err();
        assert!(
            text.starts_with("rank 1 on host h2: GLOO_SOCKET_IFNAME names 'eth9'. Set GLOO_SOCKET_IFNAME"),
            "{text}"
        );
    }

    #[test]
    fn what_is_no_list_of_addresses_is_refused() {
        for wrong in ["5 10.0.0.1", "4", "four 10.0.0.1", "\n"] {
            assert_eq!(Addresses::parse(wrong), None, "{wrong:?}");
        }
        assert_eq!(Addresses::parse(""), Some(Addresses::default()));
    }
}
