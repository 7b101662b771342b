//! Measures latency and bandwidth between hosts when the group is created; all ranks agree on the result. If rank 0's
//! policy turns measuring off, each host only exchanges one message with each neighbour, to compare the options of the
//! group.
//!
//! The first ranks of the hosts exchange messages in rounds. Each rank sends its next message after it has received all
//! messages of the round, so no rank can be more than one round ahead, and n rounds take n latencies. A single round
//! measures nothing, because a rank that starts late finds the other's message already there.
//!
//! 1. Pace: each host exchanges empty messages with the previous and the next host. The slowest link determines
//!    everyone's pace.
//! 2. Latency: then pairs of neighbours do the same. A round with two neighbours takes longer than a round with one by
//!    the cost of one more message, which is processor time rather than delay. Two hosts, and hosts on a slow link,
//!    skip this step.
//! 3. Rate: the pairs exchange messages with data, so that a host's link carries one exchange at a time. The messages
//!    have two sizes; the difference between the two times is the time of the bytes alone. Before that, a few large
//!    messages open TCP's windows.
//!
//! All hosts use the worst values that any host measured, because a schedule is as slow as its slowest link. The ranks
//! that exchange messages agree on the times before each decision about further rounds. Measuring takes about 60
//! latencies on two hosts and 140 to 190 on more, half of that on a slow link. A later group of the same processes
//! reuses the values, which takes three latencies and lets equal groups make equal choices.

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

/// Messages of both sizes are sent without waiting for a request (`wire/peer`), so that their times differ only by the
/// time of the bytes.
const SMALL: usize = 64 << 10;
const LARGE: usize = 256 << 10;
/// If the latency, or the time of the bytes of a large message, is above this many nanoseconds, fewer rounds suffice,
/// because disturbances are short in comparison.
const SLOW_LATENCY: u64 = 2_000_000;
const SLOW_RATE: u64 = 8_000_000;
/// After this many large messages, TCP's windows are wide enough to send the next one without a pause. The windows
/// start at about 14 KiB and double with each round trip.
const OPENS: u32 = 5;
/// Limits the messages that open TCP's windows: their latencies add up to at most this many nanoseconds. On an
/// intercontinental link the measurement is not worth a longer start.
const OPENING: u64 = 10_000_000;
/// A pair makes fewer exchanges than this in one turn.
const MOST_EXCHANGES: u64 = 100;

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
    let mut agreed = [0u8; 24];
    if host_map.local_rank == 0 {
        let mut probe = Probe { host_map, transport, chain, number: 0, timeout };
        agreed = bytes(if measures { probe.know(processes)? } else { probe.compare()? });
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
    LinkFacts { alpha_ns: word(0), beta_ps_per_byte: word(8), message_ns: word(16) }
}

fn bytes(facts: LinkFacts) -> [u8; 24] {
    let words = [facts.alpha_ns, facts.beta_ps_per_byte, facts.message_ns];
    std::array::from_fn(|at| words[at / 8].to_le_bytes()[at % 8])
}

/// Returns the partner of `host` in each turn; None for a turn without a partner. Pair k consists of hosts k and k + 1.
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
        let begun = unsafe { self.transport.begin(header, deadline, &sends, receives, usize::MAX) };
        match begun.and_then(|begun| self.transport.complete(begun, Take::Each(&mut take))) {
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

    /// Returns the first ranks of the next and the previous host, without duplicates.
    fn neighbours(&self) -> Vec<usize> {
        let (hosts, host) = (&self.host_map.hosts, self.host_map.host);
        let mut both = vec![hosts[(host + 1) % hosts.len()][0], hosts[(host + hosts.len() - 1) % hosts.len()][0]];
        both.dedup();
        both
    }

    /// Returns the average nanoseconds of a round with the ranks `with`. If one rank is ahead of the other by a part of
    /// a latency, its rounds are alternately too long and too short by this part, so a measurement needs an even number
    /// of rounds. Two rounds are an echo: the partner sends its second message after it has received our first one.
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
        let missing = self.slowest(&self.others(), u64::from(own.is_none()))?;
        let facts = match own {
            Some(own) if missing == 0 => self.worst(&self.others(), own)?,
            _ => self.measure()?,
        };
        if !processes.is_empty() {
            known().insert(processes, facts);
        }
        Ok(facts)
    }

    /// Measures the link; the result is the same on all hosts.
    fn measure(&mut self) -> Result<LinkFacts> {
        let (neighbours, everyone) = (self.neighbours(), self.others());
        // These rounds synchronize the hosts.
        self.rounds(&neighbours, 0, self.host_map.hosts.len().min(8))?;
        let own = self.rounds(&neighbours, 0, 4)?;
        let mut pace = self.slowest(&everyone, own)?;
        let slow = pace >= SLOW_LATENCY;
        let echoes = if pace < SLOW_LATENCY / 10 { 12 } else { 6 };
        if !slow {
            let own = self.latency(&neighbours, echoes)?;
            pace = self.slowest(&everyone, own)?;
        }
        let HostMap { hosts, host, .. } = self.host_map;
        let mut found = LinkFacts { alpha_ns: 1, beta_ps_per_byte: 1, message_ns: 0 };
        for partner in turns_of(hosts.len(), *host) {
            let begin = self.number;
            if let Some(with) = partner.map(|at| [hosts[at][0]]) {
                // The partner may still be busy with another host.
                self.rounds(&with, 0, 1)?;
                let alpha_ns = match (hosts.len(), slow) {
                    (2, _) | (_, true) => pace,
                    _ => self.latency(&with, echoes)?,
                };
                found.alpha_ns = found.alpha_ns.max(alpha_ns.min(pace));
                found.beta_ps_per_byte = found.beta_ps_per_byte.max(self.rate(&with, pace)?);
            }
            // Other pairs may need fewer or more exchanges.
            debug_assert!(self.number < begin + MOST_EXCHANGES);
            self.number = begin + MOST_EXCHANGES;
        }
        let found = self.worst(&everyone, found)?;
        let message_ns = pace.saturating_sub(found.alpha_ns).min(found.alpha_ns);
        Ok(LinkFacts { message_ns, ..found })
    }

    /// Returns picoseconds per byte of messages to and from the rank in `with`. `pace`: the nanoseconds of a round.
    fn rate(&mut self, with: &[usize; 1], pace: u64) -> Result<u64> {
        // After a pause a rate limiter, such as a token bucket, lets some bytes pass without a limit. The first large
        // message uses up this allowance.
        let first = self.rounds(with, LARGE, 1)?;
        let first = self.slowest(with, first)?;
        // Subtract the round trips in which TCP opens its window. The rest is the time of the bytes.
        let slow = first.saturating_sub(2 * u64::from(OPENS) * pace) > SLOW_RATE;
        let (opening, echoes) = if slow { (0, 1) } else { (u64::from(OPENS).min(OPENING / pace), 4) };
        for _ in 0..opening {
            self.rounds(with, LARGE, 1)?;
        }
        let (mut small, mut large) = (u64::MAX, u64::MAX);
        for _ in 0..echoes {
            large = self.rounds(with, LARGE, 2)?.min(large);
            small = self.rounds(with, SMALL, 2)?.min(small);
        }
        // A rank that is ahead of its partner measures too much, and the partner too little.
        let (small, large) = (self.mean(with, small)?, self.mean(with, large)?);
        let nanoseconds = large.saturating_sub(small).max(1);
        Ok((nanoseconds as f64 * 1000.0 / (LARGE - SMALL) as f64) as u64)
    }

    /// Returns the nanoseconds of a round of empty messages: the lower quartile of several echoes, because a thread may
    /// be preempted in some of them.
    fn latency(&mut self, with: &[usize], echoes: usize) -> Result<u64> {
        let all: Result<Vec<u64>> = (0..echoes).map(|_| self.rounds(with, 0, 2)).collect();
        let mut all = all?;
        all.sort_unstable();
        Ok(all[all.len() / 4])
    }

    /// Returns the mean of the values of this rank and its partner.
    fn mean(&mut self, with: &[usize; 1], own: u64) -> Result<u64> {
        let mut sum = own;
        self.exchange(with, with, &own.to_le_bytes(), |theirs| {
            sum += u64::from_le_bytes(theirs.try_into().expect("eight bytes"));
        })?;
        Ok(sum / 2)
    }

    /// Returns the first ranks of all other hosts.
    fn others(&self) -> Vec<usize> {
        self.host_map.leaders(0).into_iter().filter(|rank| *rank != self.host_map.me).collect()
    }

    /// Returns the worst values that this rank and the ranks `with` measured; the same on all of them.
    fn worst(&mut self, with: &[usize], own: LinkFacts) -> Result<LinkFacts> {
        let mut worst = own;
        self.exchange(with, with, &bytes(own), |theirs| {
            let theirs = facts(theirs);
            worst = LinkFacts {
                alpha_ns: worst.alpha_ns.max(theirs.alpha_ns),
                beta_ps_per_byte: worst.beta_ps_per_byte.max(theirs.beta_ps_per_byte),
                message_ns: worst.message_ns.max(theirs.message_ns),
            };
        })?;
        Ok(worst)
    }

    /// Returns the largest of the values of this rank and the ranks `with`; the same on all of them.
    fn slowest(&mut self, with: &[usize], own: u64) -> Result<u64> {
        self.worst(with, LinkFacts { alpha_ns: own, ..LinkFacts::default() }).map(|worst| worst.alpha_ns)
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
