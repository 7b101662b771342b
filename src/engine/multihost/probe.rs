//! Measures latency and bandwidth between hosts when the group is created; all ranks agree on the result. If rank 0's
//! policy turns measuring off, each host only exchanges one message with each neighbour, to compare the options of the
//! group.
//!
//! The first ranks of the hosts exchange messages in rounds. Each rank sends its next message after it has received all
//! messages of the round, so no rank can be more than one round ahead, and n rounds take n latencies. A single round
//! measures nothing, because a rank that starts it late finds its message already there.
//!
//! 1. Latency: each host exchanges empty messages with the previous and the next host. The slowest link determines
//!    everyone's pace.
//! 2. Rate: pairs of neighbours exchange messages, so that a host's link carries one exchange at a time. The messages
//!    have two sizes; the difference between the two times is the time of the bytes alone. Before that, a few large
//!    messages open TCP's windows.
//!
//! All hosts use the worst values that any host measured, because a schedule is as slow as its slowest link. They agree
//! on these values before each decision about further rounds. Measuring takes about 60 latencies on a fast link, 25 on
//! a slow one. A later group of the same processes reuses the values, which takes three latencies and lets equal groups
//! make equal choices.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::batch::HostGroup;
use super::frames::FrameHeader;
use super::host_map::HostMap;
use super::step::{Arrived, Incoming, Outgoing, Take};
use super::transport::Transport;
use super::vector::{span, written};
use crate::error::{Error, ErrorKind, Result, laid_out};
use crate::os::clock;
use crate::os::watch::PerProcess;
use crate::select::inter::LinkFacts;
use crate::types::{Kind, Request};

/// Both are sent without waiting for a request (`wire/peer`), so that their times differ by that of the bytes only.
const SMALL: usize = 64 << 10;
const LARGE: usize = 256 << 10;
/// If the latency, or the time of the bytes of a large message, is above this many nanoseconds, fewer rounds suffice,
/// because disturbances are short in comparison.
const SLOW_LATENCY: u64 = 2_000_000;
const SLOW_RATE: u64 = 8_000_000;
/// After this many large messages, TCP's windows are wide enough to send the next one at once. The windows start at
/// about 14 KiB and double with each round trip.
const OPENS: u32 = 5;
/// The latencies of those large messages may add up to this many nanoseconds. On an intercontinental link the
/// measurement is not worth a longer start.
const OPENING: u64 = 10_000_000;

pub struct Opening {
    /// A hash of the options and everything else that all ranks must agree on.
    pub chain: u64,
    /// Whether the link is measured. If it is not, its latency and bandwidth are unknown. Equal on all ranks.
    pub measures: bool,
    /// The processes of the other hosts' first ranks as text, in the order of the hosts. Empty if one of them is
    /// unknown.
    pub processes: Vec<String>,
    pub timeout: Duration,
}

/// Link facts that this process has measured. The keys are the processes of the other hosts' first ranks. A forked
/// child starts empty, because it is another process.
static KNOWN: PerProcess<Mutex<HashMap<Vec<String>, LinkFacts>>> = PerProcess::new();

/// Measures the link. Blocks until all hosts have called it.
#[allow(unsafe_code)] // makes a call over its own buffer, and waits for its end
pub fn probe(
    host_map: &HostMap,
    transport: &mut Transport,
    inside: Option<&Arc<dyn HostGroup>>,
    Opening { chain, measures, processes, timeout }: Opening,
) -> Result<LinkFacts> {
    let mut agreed = [0u8; 16];
    if host_map.local_rank == 0 {
        let mut probe = Probe { host_map, transport, chain, number: 0, timeout };
        let worst = if measures { probe.know(processes)? } else { probe.compare()? };
        agreed[..8].copy_from_slice(&worst.alpha_ns.to_le_bytes());
        agreed[8..].copy_from_slice(&worst.beta_ps_per_byte.to_le_bytes());
    }
    if let Some(inside) = inside {
        let leads = host_map.local_rank == 0;
        let piece = if leads { span(&agreed) } else { written(&mut agreed) };
        let (inputs, outputs) = if leads { (vec![piece], Vec::new()) } else { (Vec::new(), vec![piece]) };
        // SAFETY: `agreed` outlives the operation, which has ended when `run` returns. Nothing else refers to it.
        let mut request = unsafe { Request::new(Kind::Broadcast, inputs, outputs) };
        request.timeout_ms = Some(timeout.as_millis() as u64);
        inside.run(request)?;
    }
    Ok(facts(&agreed))
}

fn facts(bytes: &[u8]) -> LinkFacts {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    LinkFacts { alpha_ns: word(0), beta_ps_per_byte: word(8) }
}

/// The partner of `host` in each turn; None if it has no partner in that turn. Pair k consists of hosts k and k + 1.
/// Even pairs use the first turn and odd pairs the second. If the number of hosts is odd, the pair that closes the ring
/// uses a third turn.
fn turns_of(hosts: usize, host: usize) -> Vec<Option<usize>> {
    let (pairs, turns) = if hosts == 2 { (1, 1) } else { (hosts, 2 + hosts % 2) };
    let turn_of = |pair: usize| if hosts % 2 == 1 && pair == hosts - 1 { 2 } else { pair % 2 };
    let partner = |turn: usize| {
        let mut of_turn = (0..pairs).filter(|pair| turn_of(*pair) == turn).map(|pair| (pair, (pair + 1) % hosts));
        of_turn.find_map(|(a, b)| (a == host).then_some(b).or_else(|| (b == host).then_some(a)))
    };
    (0..turns).map(partner).collect()
}

struct Probe<'a> {
    host_map: &'a HostMap,
    transport: &'a mut Transport,
    chain: u64,
    number: u64,
    timeout: Duration,
}

impl Probe<'_> {
    /// Sends `data` to the ranks in `to`, and receives the same number of bytes from each rank in `from`.
    #[allow(unsafe_code)] // sends from a buffer, and waits for the end
    fn exchange(&mut self, to: &[usize], from: &[usize], data: &[u8], mut take: impl FnMut(&[u8])) -> Result<()> {
        self.number += 1;
        let header = FrameHeader { chain: self.chain, number: self.number, ..FrameHeader::default() };
        let timeout = u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX);
        let deadline = clock::now().saturating_add(timeout);
        let sends: Vec<Outgoing> =
            to.iter().map(|peer| Outgoing { peer: *peer, pieces: vec![span(data)], stays: true }).collect();
        let receives = from.iter().map(|peer| Incoming { peer: *peer, bytes: data.len(), into: None }).collect();
        let mut take = |_, arrived: Arrived| take(arrived.data);
        // SAFETY: `data` outlives the call, and nothing writes it.
        let exchanged =
            unsafe { self.transport.exchange(header, deadline, &sends, receives, usize::MAX, Take::Each(&mut take)) };
        match exchanged {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::Mismatch => {
                let head =
                    format!("rank {} and a rank on another host have other options for their group", self.host_map.me);
                let what =
                    "fusion, strict or the rules of algorithms differ (pg_options, SAGELLM_FUSION, SAGELLM_STRICT)";
                Err(Error::mismatch(laid_out(&head, &[what.to_string()], "All ranks must have the same")))
            }
            Err(error) => Err(error),
        }
    }

    /// The first ranks of the next and the previous host, without duplicates.
    fn neighbours(&self) -> Vec<usize> {
        let (hosts, host) = (&self.host_map.hosts, self.host_map.host);
        let mut both = vec![hosts[(host + 1) % hosts.len()][0], hosts[(host + hosts.len() - 1) % hosts.len()][0]];
        both.dedup();
        both
    }

    /// Average nanoseconds of a round with the ranks `with`. If one rank is ahead of the other by a part of a latency,
    /// its rounds are too long and too short by this part in turn, so a measurement needs an even number of them. If
    /// `with` is empty, rounds only advance `number`, which must stay equal on all hosts.
    fn rounds(&mut self, with: &[usize], bytes: usize, times: usize) -> Result<u64> {
        let data = vec![1; bytes];
        let begin = Instant::now();
        for _ in 0..times {
            self.exchange(with, with, &data, |_| ())?;
        }
        Ok((begin.elapsed().as_nanos() as u64 / times as u64).max(1))
    }

    /// Exchanges one message with each neighbour. This posts receives for the next frames and compares the options.
    fn compare(&mut self) -> Result<LinkFacts> {
        let neighbours = self.neighbours();
        self.rounds(&neighbours, 0, 1).map(|_| LinkFacts::default())
    }

    /// Returns the values that an earlier group measured, if all hosts have such values. Otherwise measures.
    fn know(&mut self, processes: Vec<String>) -> Result<LinkFacts> {
        self.compare()?;
        let known = || KNOWN.get().lock().unwrap_or_else(PoisonError::into_inner);
        let own = known().get(&processes).copied();
        let [missing, _] = self.worst([u64::from(own.is_none()), 0])?;
        let [alpha_ns, beta_ps_per_byte] = match own {
            Some(own) if missing == 0 => self.worst([own.alpha_ns, own.beta_ps_per_byte])?,
            _ => self.measure()?,
        };
        let facts = LinkFacts { alpha_ns, beta_ps_per_byte };
        if !processes.is_empty() {
            known().insert(processes, facts);
        }
        Ok(facts)
    }

    /// Returns the latency in nanoseconds, and picoseconds per byte.
    fn measure(&mut self) -> Result<[u64; 2]> {
        let neighbours = self.neighbours();
        // These rounds synchronize the hosts.
        self.rounds(&neighbours, 0, self.host_map.hosts.len().min(8))?;
        let [mut alpha_ns, _] = self.rounds(&neighbours, 0, 4).and_then(|own| self.worst([own, 0]))?;
        if alpha_ns < SLOW_LATENCY {
            // A thread may be preempted in one block of rounds. The minimum over several blocks ignores that block.
            let times = if alpha_ns < SLOW_LATENCY / 10 { 8 } else { 4 };
            let blocks: Result<Vec<u64>> = (0..3).map(|_| self.rounds(&neighbours, 0, times)).collect();
            let own = blocks?.into_iter().min().expect("three blocks");
            [alpha_ns, _] = self.worst([own, 0])?;
        }
        let HostMap { hosts, host, .. } = self.host_map;
        let turns: Vec<Option<usize>> =
            turns_of(hosts.len(), *host).into_iter().map(|partner| partner.map(|at| hosts[at][0])).collect();
        let mut first = 0;
        for partner in &turns {
            first = self.rounds(partner.as_slice(), LARGE, 1)?.max(first);
        }
        let [_, first] = self.worst([0, first])?;
        // Subtract the round trips in which TCP opens its window. The rest is the time of the bytes.
        let slow = first.saturating_sub(2 * u64::from(OPENS) * alpha_ns) > SLOW_RATE;
        let (opening, blocks, times) = if slow { (0, 1, 2) } else { (u64::from(OPENS).min(OPENING / alpha_ns), 2, 4) };
        let mut slowest = 0;
        for partner in &turns {
            for _ in 0..opening {
                self.rounds(partner.as_slice(), LARGE, 1)?;
            }
            let (mut small, mut large) = (u64::MAX, u64::MAX);
            for _ in 0..blocks {
                small = self.rounds(partner.as_slice(), SMALL, times)?.min(small);
                large = self.rounds(partner.as_slice(), LARGE, times)?.min(large);
            }
            let per_byte = large.saturating_sub(small).max(1) as f64 / (LARGE - SMALL) as f64;
            slowest = slowest.max((per_byte * 1000.0) as u64);
        }
        let [_, beta_ps_per_byte] = self.worst([0, slowest.max(1)])?;
        Ok([alpha_ns, beta_ps_per_byte])
    }

    /// The worst values that any host measured; the same on every host.
    fn worst(&mut self, own: [u64; 2]) -> Result<[u64; 2]> {
        let data: Vec<u8> = own.iter().flat_map(|value| value.to_le_bytes()).collect();
        let others: Vec<usize> =
            self.host_map.leaders(0).into_iter().filter(|rank| *rank != self.host_map.me).collect();
        let mut worst = own;
        self.exchange(&others, &others, &data, |theirs| {
            let LinkFacts { alpha_ns, beta_ps_per_byte } = facts(theirs);
            worst = [worst[0].max(alpha_ns), worst[1].max(beta_ps_per_byte)];
        })?;
        Ok(worst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that every pair of neighbours has a turn, that each partner names the other one, and that no host has two
    /// partners in a turn.
    #[test]
    fn pairs_of_neighbours_meet_in_turns() {
        for count in 2..10 {
            let turns: Vec<Vec<Option<usize>>> = (0..count).map(|host| turns_of(count, host)).collect();
            let mut met = std::collections::BTreeSet::new();
            for (host, partners) in turns.iter().enumerate() {
                for (turn, partner) in partners.iter().enumerate().filter_map(|(turn, one)| Some((turn, (*one)?))) {
                    assert_eq!(turns[partner][turn], Some(host), "{count} hosts, turn {turn}");
                    met.insert((host.min(partner), host.max(partner)));
                }
            }
            let all = (0..count).map(|host| (host.min((host + 1) % count), host.max((host + 1) % count)));
            assert_eq!(met, all.collect(), "{count} hosts");
        }
    }
}
