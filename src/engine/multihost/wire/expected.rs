//! Counts, for each channel, the posted receives whose body has not begun to arrive. Used where UCX carries the frames.
//!
//! UCX sends a long body only while the receiver calls it. A rank that leaves its group no longer waits for the bodies
//! that it has asked for, but a sender that has begun one waits for UCX. So this process drives the wire until each of
//! them has begun to arrive, and was discarded, or until the peer has left the channel too. If the peer neither sends
//! nor leaves, the background thread looks every 50 ms.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::driving::{Counted, Driving};
use super::locked;

#[derive(Default)]
struct Bodies {
    missing: u64,
    /// Set once this process has left the channel.
    left: Option<Counted>,
}

/// Its lock is held only within these functions, which take no other lock.
#[derive(Default)]
pub struct Expected(Mutex<HashMap<u64, Bodies>>);

impl Expected {
    /// Counts a body whose receive was posted.
    pub fn expect(&self, channel: u64) {
        locked(&self.0).entry(channel).or_default().missing += 1;
    }

    /// Called when a body has begun to arrive, or when its receive was given up and the peer will not send it.
    pub fn began(&self, channel: u64) {
        let mut channels = locked(&self.0);
        let Some(bodies) = channels.get_mut(&channel) else { return };
        bodies.missing -= 1;
        if bodies.missing == 0 {
            channels.remove(&channel);
        }
    }

    /// Called when the peer sends no more bodies of the channel.
    pub fn ended(&self, channel: u64) {
        locked(&self.0).remove(&channel);
    }

    /// Called when this process has left the channel. The wire is driven as long as a body is missing.
    pub fn leave(&self, channel: u64, driving: &Arc<Driving>) {
        let mut channels = locked(&self.0);
        let Some(bodies) = channels.get_mut(&channel) else { return };
        bodies.left.get_or_insert_with(|| Counted::new(driving));
        drop(channels);
        driving.wake_for_pending();
    }

    /// Called when the connection has failed.
    pub fn clear(&self) {
        locked(&self.0).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::multihost::wire::sockets::Epoll;

    #[test]
    fn a_left_channel_is_driven_until_its_bodies_have_arrived_or_the_peer_has_left() {
        let driving = Arc::new(Driving::new(Epoll::new().unwrap(), 0).unwrap());
        let expected = Expected::default();
        let drives = || Arc::strong_count(&driving) - 1; // each `Counted` holds it
        (0..2).for_each(|_| expected.expect(7));
        expected.expect(8);
        expected.leave(9, &driving); // it has asked for nothing
        assert_eq!(drives(), 0);
        [7, 7, 8].into_iter().for_each(|channel| expected.leave(channel, &driving));
        assert_eq!(drives(), 2);
        expected.began(7);
        expected.began(9);
        assert_eq!(drives(), 2);
        expected.began(7);
        assert_eq!(drives(), 1);
        expected.ended(8);
        assert_eq!(drives(), 0);
        expected.expect(7);
        expected.leave(7, &driving);
        expected.clear();
        assert_eq!(drives(), 0);
    }
}
