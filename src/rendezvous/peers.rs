//! Keeps the processes that share a group, and the descriptors that report the end of each process, with their entries
//! in the watch. All groups among the same processes share these (rule 25), so a further group needs no more
//! descriptors. Each group has its own callback and its own memory.
//!
//! Known peers live as long as one of their groups. During the rendezvous, rank 0 decides whether a group is created
//! among known peers; no other process decides this from its own knowledge.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use once_cell::sync::OnceCell;

use super::messages::Nonce;
use crate::error::Result;
use crate::os::watch;
use crate::os::watch::{End, PerProcess, WatchGuard};

/// A rank names at most this many sets of known peers in its record: the oldest, because they usually include those of
/// the largest groups.
const MOST_NAMED: usize = 32;

/// A process as another process sees it.
#[derive(Clone, Debug)]
pub struct Process {
    /// 0 if the process is in another pid namespace.
    pub pid: i32,
    pub host: String,
}

pub struct KnownPeers {
    /// The id of the rendezvous in which these processes met.
    id: Nonce,
    /// This process's place among these processes: its rank in the group for which they met.
    place: usize,
    /// By place.
    processes: Vec<Process>,
    news: Mutex<News>,
    guard: OnceCell<WatchGuard>,
}

#[derive(Default)]
struct News {
    /// The places of processes whose end was reported, each with the reason.
    ended: Vec<(usize, &'static str)>,
    followers: Vec<(u64, Arc<Follower>)>,
    next: u64,
}

struct Follower {
    /// For each rank: its place among the known peers.
    places: Vec<usize>,
    told: Box<dyn Fn(usize, &'static str) + Send + Sync>,
}

impl Follower {
    fn tell(&self, (place, reason): (usize, &'static str)) {
        if let Some(rank) = self.places.iter().position(|other| *other == place) {
            (self.told)(rank, reason);
        }
    }
}

/// All known peers of this process. Weak, because the groups own them.
static KNOWN: PerProcess<Mutex<Vec<Weak<KnownPeers>>>> = PerProcess::new();

impl KnownPeers {
    /// Starts to watch processes that have just met. In `ends`, `End::rank` is an index into `processes`.
    pub fn new(id: Nonce, place: usize, processes: Vec<Process>, ends: Vec<End>) -> Result<Arc<KnownPeers>> {
        let (news, guard) = (Mutex::default(), OnceCell::new());
        let known_peers = Arc::new(KnownPeers { id, place, processes, news, guard });
        let weak = Arc::downgrade(&known_peers);
        let guard = watch::watch(ends, move |place, reason| {
            if let Some(known_peers) = weak.upgrade() {
                known_peers.spread(place, reason);
            }
        })?;
        // The object was just made, so no other code can have set its guard.
        let _ = known_peers.guard.set(guard);
        let mut known = KNOWN.get().lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|weak| weak.strong_count() > 0);
        known.push(Arc::downgrade(&known_peers));
        Ok(known_peers)
    }

    /// Returns the known peers that this process can name in its record, the oldest first. If several entries have the
    /// same id, their ranks are threads of this process, which cannot tell them apart. Such entries are left out.
    pub fn known() -> Vec<Arc<KnownPeers>> {
        let known = KNOWN.get().lock().unwrap_or_else(PoisonError::into_inner);
        let held: Vec<Arc<KnownPeers>> = known.iter().filter_map(Weak::upgrade).collect();
        drop(known);
        let alone = |one: &&Arc<KnownPeers>| held.iter().filter(|other| other.id == one.id).count() == 1;
        held.iter().filter(alone).take(MOST_NAMED).cloned().collect()
    }

    pub fn id(&self) -> Nonce {
        self.id
    }

    pub fn place(&self) -> usize {
        self.place
    }

    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports an end to all groups, without holding a lock. Called on the watch's thread.
    fn spread(&self, place: usize, reason: &'static str) {
        let mut news = self.news();
        news.ended.push((place, reason));
        let followers: Vec<_> = news.followers.iter().map(|(_, follower)| Arc::clone(follower)).collect();
        drop(news);
        followers.iter().for_each(|follower| follower.tell((place, reason)));
    }
}

impl fmt::Debug for KnownPeers {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "known peers {:032x}, place {} of {:?}", u128::from_le_bytes(self.id), self.place, self.processes)
    }
}

/// The ranks of one group among known peers.
#[derive(Clone, Debug)]
pub struct GroupPeers {
    known_peers: Arc<KnownPeers>,
    /// For each rank: its place among the known peers.
    places: Vec<usize>,
}

impl GroupPeers {
    /// Returns `None` if `places` cannot belong to the ranks of a group in which this process is `rank`.
    pub fn new(known_peers: &Arc<KnownPeers>, places: Vec<usize>, rank: usize) -> Option<GroupPeers> {
        let each = places.iter().enumerate();
        let fit = each.clone().all(|(at, place)| *place < known_peers.processes.len() && !places[..at].contains(place));
        (fit && places.get(rank) == Some(&known_peers.place))
            .then(|| GroupPeers { known_peers: Arc::clone(known_peers), places })
    }

    /// Makes a group of all processes that have just met.
    pub fn of_all(known_peers: Arc<KnownPeers>) -> GroupPeers {
        let places = (0..known_peers.processes.len()).collect();
        GroupPeers { known_peers, places }
    }

    pub fn id(&self) -> Nonce {
        self.known_peers.id
    }

    pub fn places(&self) -> &[usize] {
        &self.places
    }

    pub fn peer(&self, rank: usize) -> &Process {
        &self.known_peers.processes[self.places[rank]]
    }

    /// Returns false only if it is known that `rank` is not the process `pid`. Pid 0 means that the process cannot be
    /// seen from here.
    pub fn may_be(&self, rank: usize, pid: i32) -> bool {
        let known = self.peer(rank).pid;
        known == pid || known == 0 || pid == 0
    }

    /// Whether none of these ranks is known to have ended.
    pub fn lives(&self) -> bool {
        !self.known_peers.news().ended.iter().any(|(place, _)| self.places.contains(place))
    }

    /// Calls `told(rank, reason)` at most once per rank: on the watch's thread when the rank's process ends, or during
    /// this call if the process has already ended. `told` may still be running while the guard is dropped, so it must
    /// not own anything that the drop of the guard is meant to protect.
    pub fn follow(&self, told: impl Fn(usize, &'static str) + Send + Sync + 'static) -> Following {
        let follower = Arc::new(Follower { places: self.places.clone(), told: Box::new(told) });
        let mut news = self.known_peers.news();
        let number = news.next;
        news.next += 1;
        news.followers.push((number, Arc::clone(&follower)));
        let before = news.ended.clone();
        drop(news);
        before.into_iter().for_each(|end| follower.tell(end));
        Following { known_peers: Arc::clone(&self.known_peers), number, generation: watch::generation() }
    }
}

/// Keeps alive known peers and the callback that reports their ends. A thread that drops this must not hold a lock that
/// the callback acquires.
pub struct Following {
    known_peers: Arc<KnownPeers>,
    number: u64,
    generation: u32,
}

impl Drop for Following {
    fn drop(&mut self) {
        if watch::generation() != self.generation {
            return; // a thread that the forked child does not have may hold the lock
        }
        let mut news = self.known_peers.news();
        let at = news.followers.iter().position(|(number, _)| *number == self.number);
        let gone = at.map(|at| news.followers.swap_remove(at));
        drop(news);
        drop(gone); // may own objects with locks of their own
    }
}
