//! The channels of this process, and the peers that joined a channel before this rank did.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::channel::Channel;
use super::connection::Connection;
use super::frame::{Frame, Kind};
use super::receiver::{Origin, Receiver, Routes};
use super::transfer::Events;
use super::{ProcessId, locked};

/// A peer that joined a channel before this rank did.
struct Early {
    peer: ProcessId,
    /// The connection on which its Hello came.
    token: u64,
    /// Whether it has left the channel since.
    left: bool,
}

#[derive(Default)]
pub struct Channels {
    all: RwLock<HashMap<u64, Arc<Channel>>>,
    /// Peers that joined a channel before this rank did, by channel. Locked while `all` is locked, so that a frame
    /// either finds the channel or is recorded here before the channel reads this list.
    early: Mutex<HashMap<u64, Vec<Early>>>,
}

impl Channels {
    pub fn all(&self) -> Vec<Arc<Channel>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Adds a channel, whose frames are handled from now on. `connections` are all connections of this process; the
    /// caller holds their lock.
    pub fn add<'a>(&self, channel: &Arc<Channel>, connections: impl Iterator<Item = &'a Arc<Connection>>) {
        // The write lock keeps other threads from finding the channel before it has its connections and knows who was
        // early. `connect` sends Hello to each peer, so every frame that a peer sends in answer finds the channel. A
        // peer that was early may answer with everything that it has to send, leave, and close its connection.
        let mut channels = self.all.write().unwrap_or_else(PoisonError::into_inner);
        channels.insert(channel.id, Arc::clone(channel));
        connections.for_each(|connection| channel.connect(connection));
        let early = locked(&self.early).remove(&channel.id).unwrap_or_default();
        early.iter().for_each(|one| channel.was_early(one.peer, one.token, one.left));
    }

    /// Removes a channel. Returns false if it was removed before.
    pub fn remove(&self, id: u64) -> bool {
        self.all.write().unwrap_or_else(PoisonError::into_inner).remove(&id).is_some()
    }

    /// Forgets which peers were early in a channel. Called when this rank has the channel or gave up joining it.
    pub fn forget_early(&self, id: u64) {
        locked(&self.early).remove(&id);
    }
}

impl Routes for Channels {
    fn receiver(&self, channel: u64) -> Option<Arc<dyn Receiver>> {
        let channels = self.all.read().unwrap_or_else(PoisonError::into_inner);
        channels.get(&channel).cloned().map(|channel| channel as Arc<dyn Receiver>)
    }

    /// Handles a frame whose channel was not found, because this rank has not joined the channel yet or has left it.
    fn of_none(&self, from: Origin, frame: Frame, events: &mut Events) -> Result<(), String> {
        const MOST: usize = 1 << 16; // beyond this number, entries are of groups that failed
        let channels = self.all.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = channels.get(&frame.channel).cloned() {
            drop(channels);
            return known.control(from, frame, events); // this rank has joined it meanwhile
        }
        let mut early = locked(&self.early);
        match frame.kind {
            Kind::Hello => {
                if early.len() >= MOST {
                    early.clear();
                }
                let one = Early { peer: from.peer, token: from.token, left: false };
                early.entry(frame.channel).or_default().push(one);
            }
            Kind::Cut => {
                let said = early.get_mut(&frame.channel).into_iter().flatten();
                said.filter(|one| one.token == from.token).for_each(|one| one.left = true);
            }
            _ => (), // the group has ended here
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
