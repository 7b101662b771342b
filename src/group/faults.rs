//! What a group knows of peers that died, left or are late, and the texts in which it says so.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Group;
use crate::engine::shm::Shm;
use crate::engine::shm::p2p::Ended;
use crate::error::Error;
use crate::op;
use crate::op::Op;
use crate::os::watch;
use crate::types::{ANY_RANK, Kind};

impl Group {
    /// Called by the watch thread.
    pub(super) fn peer_ended(&self, rank: usize) {
        if let Some(peer) = self.peers.get(rank) {
            peer.dead.store(true, Ordering::Release);
            self.any_dead.store(true, Ordering::Release);
            self.domain.announce_work();
        }
    }

    pub(super) fn dead_ranks(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.peers.len()).filter(|rank| self.peers[*rank].dead.load(Ordering::Acquire))
    }

    pub(super) fn death_of(&self, rank: usize, during: &str) -> Error {
        let peer = &self.peers[rank];
        let left = self.area.as_ref().is_some_and(|area| area.left(rank));
        let how = if left {
            "left the group (destroy_process_group or the end of its program)"
        } else {
            "ended (killed, crashed, or exited without leaving its group)"
        };
        Error::RankFailed {
            rank,
            text: format!(
                "sagellm: rank {rank} (pid {}, host {}) of group '{}' {how}: rank {} {during}. Make a new group without it \
                 to go on",
                peer.pid, peer.host, self.config.name, self.config.rank
            ),
        }
    }

    /// What this rank was doing when a peer was missed.
    pub(super) fn within(op: Option<&Arc<Op>>) -> String {
        op.map_or_else(
            || "had nothing pending".to_string(),
            |op| format!("is in {} number {}", op.request.kind, op.number),
        )
    }

    /// With the lock held and nothing movable: fails the group if a rank that ended is still needed.
    pub(super) fn check_ended_peers(&self, shm: &mut Shm, ended: &mut Ended) -> Option<Error> {
        let area = self.area.as_ref()?;
        for rank in (0..area.ranks).filter(|rank| *rank != area.me) {
            if !self.is_gone(rank) {
                continue;
            }
            // Its last words may have come after our last look: complete what they satisfy. They fit into the segment,
            // so a bounded number of passes takes them in.
            for _ in 0..1024 {
                match shm.poll(ended) {
                    Ok(true) => (),
                    Ok(false) => break,
                    Err(error) => return Some(error),
                }
            }
            if let Some(op) = shm.blocked_by(rank, |rank| self.is_gone(rank)).next().cloned() {
                return Some(self.death_of(rank, &Group::within(Some(&op))));
            }
        }
        None
    }

    /// True when nothing new comes from `rank`: it left or died.
    fn is_gone(&self, rank: usize) -> bool {
        self.peers[rank].dead.load(Ordering::Acquire) || self.area.as_ref().is_some_and(|area| area.left(rank))
    }

    /// The text of a deadline that passed: who is missing and what they did last.
    pub(super) fn stall(&self, shm: &Shm, op: &Op) -> Error {
        let Some(area) = &self.area else { return Error::Bug("sagellm: a stall without peers".to_string()) };
        let mut missing = Vec::new();
        for rank in (0..area.ranks).filter(|rank| *rank != area.me) {
            // A receive from anyone that timed out lacks all of them.
            let anyone = op.request.root == ANY_RANK;
            if !shm.blocked_by(rank, |_| anyone).any(|blocked| std::ptr::eq(&**blocked, op)) {
                continue;
            }
            let (last, call) = shm.last_call(rank);
            let entered = !op.request.kind.is_p2p() && last >= op.number;
            let state = match watch::process_state(self.peers[rank].pid) {
                Some('T' | 't') => ", its process is stopped",
                _ => "",
            };
            let pid = self.peers[rank].pid;
            missing.push(if entered {
                format!("rank {rank} (pid {pid}{state}) entered it and stopped on the way")
            } else if op.request.kind.is_p2p() {
                format!("rank {rank} (pid {pid}{state}) did not answer, its last collective is {call}")
            } else {
                format!("rank {rank} (pid {pid}{state}) has not entered it, its last operation is {call}")
            });
        }
        if missing.is_empty() {
            missing.push(match shm.behind(op) {
                Some(first) => {
                    format!("it must follow {} number {}, which has not ended here", first.request.kind, first.number)
                }
                None => "every rank entered it".to_string(),
            });
        }
        let what = match op.request.kind {
            Kind::Send => format!("send to rank {} with tag {}", op.request.root, op.request.tag),
            Kind::Recv if op.request.root == ANY_RANK => format!("recv from any rank with tag {}", op.request.tag),
            Kind::Recv => format!("recv from rank {} with tag {}", op.request.root, op.request.tag),
            _ => format!("{} number {}", op::describe(op.signature), op.number),
        };
        Error::Timeout(format!(
            "sagellm: rank {} of group '{}' Timed out after {:.1} s in {what}: {}. Every rank must call the same operations in the \
             same order; where a rank needs longer, pass a larger timeout",
            self.config.rank,
            self.config.name,
            op.timeout.as_secs_f64(),
            missing.join("; ")
        ))
    }

    /// The fault that a peer reported, as this rank's error; `shm` tells what of this rank it ends.
    pub(super) fn reported(&self, shm: Option<&Shm>) -> Option<Error> {
        let (rank, code, text) = self.area.as_ref()?.fault()?;
        if let Some(own) = self.fault.get() {
            return Some(own.clone()); // another thread of this rank found it
        }
        // A death that this rank saw itself is closer than hearsay.
        if let Some(dead) = self.dead_ranks().find(|dead| !self.area.as_ref().is_some_and(|area| area.left(*dead))) {
            let op = shm
                .and_then(|shm| shm.blocked_by(dead, |rank| self.is_gone(rank)).next().or_else(|| shm.next_deadline()));
            return Some(self.death_of(dead, &Group::within(op)));
        }
        Some(Error::told(code, rank, format!("{text} (reported by rank {rank})")))
    }
}
