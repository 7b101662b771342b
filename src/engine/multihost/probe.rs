//! Measures how long a message takes between hosts: once when the group is made, agreed between all ranks. Where rank 0
//! says that nothing is measured, one message is exchanged, which compares the options of the group.
//!
//! The first rank of each host exchanges messages with those of the next and the previous host: some without data, for
//! the latency, and two sizes with data; their difference is the time of the bytes alone. Every host uses the worst
//! values that any host measured, because a schedule is as slow as its slowest link. Takes about ten latencies.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch::{HostGroup, written};
use super::host_map::HostMap;
use super::transport::{FrameHeader, Transport};
use super::vector::span;
use crate::error::{Error, Result};
use crate::os::clock;
use crate::select::inter::LinkFacts;
use crate::types::{Kind, Request};

const TIMES: usize = 3;
const SMALL: usize = 64 << 10;
const LARGE: usize = 320 << 10;

pub struct Opening {
    /// A hash of the options and everything else that all ranks must agree on.
    pub chain: u64,
    /// Whether the link is measured; else its facts are unknown. The same on all ranks.
    pub measures: bool,
    pub timeout: Duration,
}

/// Blocks until all hosts have called it.
#[allow(unsafe_code)] // makes a call over its own buffer, and waits for its end
pub fn probe(
    host_map: &HostMap,
    transport: &mut Transport,
    inside: Option<&Arc<dyn HostGroup>>,
    Opening { chain, measures, timeout }: Opening,
) -> Result<LinkFacts> {
    let mut agreed = [0u8; 16];
    if host_map.local_rank == 0 {
        let mut probe = Probe { host_map, transport, chain, number: 0, timeout };
        probe.quickest(0, 1)?; // makes the connections and posts receives
        let worst = if measures { probe.measure().and_then(|own| probe.worst(own))? } else { LinkFacts::default() };
        agreed[..8].copy_from_slice(&worst.alpha_ns.to_le_bytes());
        agreed[8..].copy_from_slice(&worst.beta_ps_per_byte.to_le_bytes());
    }
    if let Some(inside) = inside {
        let leads = host_map.local_rank == 0;
        let piece = if leads { span(&agreed) } else { written(&mut agreed) };
        let (inputs, outputs) = if leads { (vec![piece], Vec::new()) } else { (Vec::new(), vec![piece]) };
        // SAFETY: `agreed` outlives the operation, which has ended when `run` returns, and nothing else refers to it.
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

struct Probe<'a> {
    host_map: &'a HostMap,
    transport: &'a mut Transport,
    chain: u64,
    number: u64,
    timeout: Duration,
}

impl Probe<'_> {
    /// Sends `data` to the ranks in `to` and receives as many bytes from those in `from`.
    fn exchange(&mut self, to: &[usize], from: &[usize], data: &[u8], mut take: impl FnMut(&[u8])) -> Result<()> {
        self.number += 1;
        let header = FrameHeader { chain: self.chain, number: self.number, ..FrameHeader::default() };
        let timeout = u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX);
        let deadline = clock::now().saturating_add(timeout);
        let list = |ranks: &[usize]| ranks.iter().map(|rank| (*rank, data.len())).collect::<Vec<_>>();
        let fill = |_: usize, out: &mut [u8]| out.copy_from_slice(data);
        let exchanged = self.transport.exchange(header, deadline, &list(to), fill, &list(from), |_, arrived| {
            take(arrived.data);
            Ok(())
        });
        match exchanged {
            Ok(_) => Ok(()),
            Err(Error::Mismatch(_)) => Err(Error::Mismatch(format!(
                "sagellm: rank {} and a rank on another host have other options for their group: fusion, strict or the \
                 rules of algorithms differ (pg_options, SAGELLM_FUSION, SAGELLM_STRICT). All ranks must have the same",
                self.host_map.me
            ))),
            Err(error) => Err(error),
        }
    }

    /// Nanoseconds of the fastest of some exchanges of `bytes` with the next and previous host.
    fn quickest(&mut self, bytes: usize, times: usize) -> Result<u64> {
        let (hosts, host) = (&self.host_map.hosts, self.host_map.host);
        let (next, previous) = (hosts[(host + 1) % hosts.len()][0], hosts[(host + hosts.len() - 1) % hosts.len()][0]);
        let data = vec![1; bytes];
        let mut best = u64::MAX;
        for _ in 0..times {
            let begin = Instant::now();
            self.exchange(&[next], &[previous], &data, |_| ())?;
            best = best.min(begin.elapsed().as_nanos() as u64);
        }
        Ok(best)
    }

    fn measure(&mut self) -> Result<LinkFacts> {
        let alpha_ns = self.quickest(0, TIMES)?.max(1);
        let (small, large) = (self.quickest(SMALL, TIMES)?, self.quickest(LARGE, TIMES)?);
        let beta = large.saturating_sub(small).max(1) as f64 / (LARGE - SMALL) as f64;
        Ok(LinkFacts { alpha_ns, beta_ps_per_byte: (beta * 1000.0).max(1.0) as u64 })
    }

    /// The worst values that any host measured; the same on every host.
    fn worst(&mut self, own: LinkFacts) -> Result<LinkFacts> {
        let mut data = own.alpha_ns.to_le_bytes().to_vec();
        data.extend(own.beta_ps_per_byte.to_le_bytes());
        let others: Vec<usize> =
            self.host_map.leaders(0).into_iter().filter(|rank| *rank != self.host_map.me).collect();
        let mut worst = own;
        self.exchange(&others, &others, &data, |theirs| {
            let theirs = facts(theirs);
            worst.alpha_ns = worst.alpha_ns.max(theirs.alpha_ns);
            worst.beta_ps_per_byte = worst.beta_ps_per_byte.max(theirs.beta_ps_per_byte);
        })?;
        Ok(worst)
    }
}
