//! Ranks as threads of one process: the engines of one host and of several over anonymous memory, and links that copy. For
//! tests alone, which need neither processes nor a network. It runs no schedule itself, and its links say nothing of real
//! ones, so `simulate --check` has its own executor (`torch_ext/torch_sagellm/cli/measure.py`).

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::multihost::link::{Link, Transfer};
use super::shm::memory::area::Area;
use super::shm::memory::layout::Layout;
use super::shm::memory::segment::Segment;
use crate::error::{Error, Result};

/// One area per rank, all over the same memory.
pub fn areas(ranks: usize) -> Result<Vec<Arc<Area>>> {
    let layout = Layout::within(ranks, usize::MAX)
        .ok_or_else(|| Error::Invalid(format!("sagellm: no layout for {ranks} ranks in one process")))?;
    let segment = Arc::new(Segment::anonymous(layout.total())?);
    Ok((0..ranks).map(|me| Arc::new(Area::new(Arc::clone(&segment), layout, me))).collect())
}

/// Links between ranks that are threads, one per rank. A message is copied into the receiver's queue.
pub fn links(ranks: usize) -> Vec<Arc<dyn Link>> {
    let post = Arc::new(Post::default());
    (0..ranks).map(|me| Arc::new(LocalLink { me, post: Arc::clone(&post) }) as Arc<dyn Link>).collect()
}

/// From, to and tag of messages.
type Address = (usize, usize, u32);

#[derive(Default)]
struct Boxes {
    messages: HashMap<Address, VecDeque<Vec<u8>>>,
    /// Ranks that cut their link.
    cut: HashSet<usize>,
}

#[derive(Default)]
struct Post {
    boxes: Mutex<Boxes>,
    changed: Condvar,
}

impl Post {
    fn lock(&self) -> MutexGuard<'_, Boxes> {
        self.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct LocalLink {
    me: usize,
    post: Arc<Post>,
}

enum LocalTransfer {
    Sent(Vec<u8>),
    Awaited { post: Arc<Post>, address: Address, buffer: Vec<u8>, bytes: usize },
}

impl Link for LocalLink {
    fn receive(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>> {
        Ok(Box::new(LocalTransfer::Awaited {
            post: Arc::clone(&self.post),
            address: (peer, self.me, tag),
            buffer,
            bytes,
        }))
    }

    fn send(&self, peer: usize, tag: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>> {
        self.post.lock().messages.entry((self.me, peer, tag)).or_default().push_back(buffer[..bytes].to_vec());
        self.post.changed.notify_all();
        Ok(Box::new(LocalTransfer::Sent(buffer)))
    }

    fn cut(&self) {
        self.post.lock().cut.insert(self.me);
        self.post.changed.notify_all();
    }
}

impl Transfer for LocalTransfer {
    fn wait(self: Box<Self>, timeout: Duration) -> std::result::Result<Vec<u8>, String> {
        let (post, address, mut buffer, bytes) = match *self {
            LocalTransfer::Sent(buffer) => return Ok(buffer),
            LocalTransfer::Awaited { post, address, buffer, bytes } => (post, address, buffer, bytes),
        };
        let until = Instant::now().checked_add(timeout);
        let mut boxes = post.lock();
        loop {
            if let Some(message) = boxes.messages.get_mut(&address).and_then(VecDeque::pop_front) {
                if message.len() > bytes {
                    return Err(format!("a message of {} bytes matched a receive of {bytes}", message.len()));
                }
                buffer[..message.len()].copy_from_slice(&message);
                return Ok(buffer);
            }
            if boxes.cut.contains(&address.0) || boxes.cut.contains(&address.1) {
                return Err("Connection closed by peer".to_string());
            }
            let left = until.map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err("Timed out".to_string());
            }
            boxes = post.changed.wait_timeout(boxes, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
