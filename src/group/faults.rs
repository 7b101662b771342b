//! Peers that died or left, faults that they report, and the error texts about them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Group;
use crate::engine::{Ended, Engine};
use crate::error::{Error, GO_ON, LEFT, laid_out};
use crate::op::Op;

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
        let how =
            if self.control.left(rank) { LEFT } else { "ended (killed, crashed, or exited without leaving its group)" };
        let head = format!("rank {rank} (pid {}, host {}) of group '{}' {how}", peer.pid, peer.host, self.config.name);
        Error::rank_failed(rank, laid_out(&head, &[], GO_ON)).while_rank(self.config.rank, during)
    }

    /// What this rank was doing when a peer was found missing.
    pub(super) fn within(&self, op: Option<&Arc<Op>>) -> String {
        let Some(op) = op else { return "had nothing pending".to_string() };
        let called =
            self.host.call_site(op.request.note.site).map_or(String::new(), |site| format!(", called at {site}"));
        format!("is in {}{called}", op.what())
    }

    /// Fails the group if a rank that died or left is still needed. Called with the lock held when nothing can advance.
    pub(super) fn check_ended_peers(&self, engine: &mut dyn Engine, ended: &mut Ended) -> Option<Error> {
        let others = || (0..self.peers.len()).filter(|rank| *rank != self.config.rank);
        // Blame ranks that died before ranks that left: a receive from any rank is missing the dead rank's message.
        let died = others().filter(|rank| !self.control.left(*rank));
        let left = others().filter(|rank| self.control.left(*rank));
        for rank in died.chain(left).filter(|rank| self.is_gone(*rank)) {
            // The peer's last data may have arrived after our last pass: complete the operations that it satisfies. It fits
            // into the shared memory, so a bounded number of passes is enough.
            for _ in 0..1024 {
                match engine.poll(ended) {
                    Ok(true) => (),
                    Ok(false) => break,
                    Err(error) => return Some(error),
                }
            }
            if let Some(op) = engine.needs(rank, &|rank| self.is_gone(rank)) {
                return Some(self.death_of(rank, &self.within(Some(&op))));
            }
        }
        None
    }

    /// Whether nothing more comes from `rank`, because it left or died.
    fn is_gone(&self, rank: usize) -> bool {
        self.peers[rank].dead.load(Ordering::Acquire) || self.control.left(rank)
    }

    /// The other ranks on this host, whose end this rank detects, and whether each has died or left the group.
    pub fn watched(&self) -> Vec<(usize, bool)> {
        if self.peers.is_empty() {
            return self.control.watched();
        }
        let others = (0..self.peers.len()).filter(|rank| *rank != self.config.rank);
        others.map(|rank| (rank, self.is_gone(rank))).collect()
    }
    /// The fault that a peer reported, as this rank's error; `engine` says which operation of this rank it ends.
    pub(super) fn reported(&self, engine: Option<&dyn Engine>) -> Option<Error> {
        let (rank, fault) = self.control.reported().or_else(|| self.watch.channel()?.told())?;
        if let Some(own) = self.fault.get() {
            return Some(own.clone()); // another thread of this rank found it
        }
        // A death that this rank saw itself is more reliable than a peer's report.
        if let Some(dead) = self.dead_ranks().find(|dead| !self.control.left(*dead)) {
            let op = engine
                .and_then(|engine| engine.needs(dead, &|rank| self.is_gone(rank)).or_else(|| engine.next_deadline()));
            return Some(self.death_of(dead, &self.within(op.as_ref())));
        }
        Some(fault.as_told().reported_by(rank))
    }
}
