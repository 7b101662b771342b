//! Tests several paths of a network that the test itself drives.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use super::super::assembly::{Assembly, Came, Sink};
use super::super::frame::{Frame, Kind};
use super::super::path::Progress;
use super::super::transfer::Slot;
use super::*;

/// A path of a network that the test itself drives. It holds the bytes that were sent and have not arrived.
#[derive(Default)]
struct Cable {
    bytes: VecDeque<u8>,
    room: usize,
    acked: u64,
    fails: bool,
}

type Shared = Rc<RefCell<Cable>>;

impl Path for Shared {
    unsafe fn send(&self, pieces: &[Span]) -> io::Result<usize> {
        let mut cable = self.borrow_mut();
        if cable.fails {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let mut sent = 0;
        for piece in pieces {
            let here = piece.bytes.min(cable.room);
            // SAFETY: the caller vouches for the pieces.
            cable.bytes.extend(unsafe { std::slice::from_raw_parts(piece.addr as *const u8, here) });
            cable.room -= here;
            sent += here;
        }
        Ok(sent)
    }
    fn backlog(&self) -> usize {
        self.borrow().bytes.len()
    }
    fn progress(&self) -> Progress {
        let cable = self.borrow();
        Progress { acked: cable.acked, owes: !cable.bytes.is_empty(), round_trip: Duration::ZERO }
    }
}

/// The receiver of the frames, in order. Data of the current frame may be stored before its turn.
#[derive(Default)]
struct Frames {
    position: u64,
    head: Vec<u8>,
    start: u64,
    current: Option<(Frame, Vec<u8>, usize)>,
    ended: Vec<(u64, Vec<u8>)>,
}

impl Frames {
    fn end(&mut self) {
        if self.current.as_ref().is_some_and(|(_, data, got)| *got == data.len()) {
            let (frame, data, _) = self.current.take().unwrap();
            self.ended.push((frame.number, data));
        }
    }
}

impl Sink for Frames {
    fn position(&self) -> u64 {
        self.position
    }
    fn feed(&mut self, data: &[u8]) -> Result<(), String> {
        for byte in data {
            self.position += 1;
            match &mut self.current {
                Some((_, data, got)) => {
                    data[*got] = *byte;
                    *got += 1;
                }
                None => self.head.push(*byte),
            }
            if self.head.len() == FRAME_HEAD {
                let frame = Frame::read(self.head.as_slice().try_into().unwrap()).ok_or("no frame")?;
                self.head.clear();
                self.start = self.position;
                self.current = Some((frame, vec![0; frame.data()], 0));
            }
            self.end();
        }
        Ok(())
    }
    fn current(&self) -> Option<Range<u64>> {
        self.current.as_ref().map(|(_, data, _)| self.start..self.start + data.len() as u64)
    }
    fn store(&mut self, at: u64, bytes: &[u8]) {
        let from = (at - self.start) as usize;
        self.current.as_mut().unwrap().1[from..from + bytes.len()].copy_from_slice(bytes);
    }
    fn skip(&mut self, bytes: u64) {
        self.position += bytes;
        self.current.as_mut().unwrap().2 += bytes as usize;
        self.end();
    }
}

/// One direction between two processes.
struct Network {
    cables: Vec<Shared>,
    stripes: Stripes<Shared>,
    /// For each cable, the segment that is arriving: its offset, and how many of its bytes are missing.
    arriving: Vec<(u64, usize)>,
    assembly: Assembly,
    frames: Frames,
    now: Instant,
}

impl Network {
    fn new(paths: usize) -> Network {
        let cables: Vec<Shared> = (0..paths).map(|_| Shared::default()).collect();
        let mut stripes = Stripes::new();
        cables.iter().enumerate().for_each(|(number, cable)| stripes.attach(number, Rc::clone(cable)));
        let (assembly, frames, arriving) = (Assembly::default(), Frames::default(), vec![(0, 0); paths]);
        Network { cables, stripes, arriving, assembly, frames, now: Instant::now() }
    }

    fn push(&mut self, number: u64, data: Vec<u8>) -> Arc<Slot> {
        let bytes = data.len();
        self.push_from(number, Memory::Owned(data), bytes)
    }

    fn push_from(&mut self, number: u64, memory: Memory, bytes: usize) -> Arc<Slot> {
        let slot = Arc::new(Slot::default());
        let frame = Frame { number, ..Frame::new(Kind::Mail, 1, bytes) };
        self.stripes.push(Outgoing::new(frame, memory, End::Slot(Arc::clone(&slot))));
        slot
    }

    /// Lets up to `bytes` bytes arrive on one path.
    fn carry(&mut self, number: usize, bytes: usize) {
        let mut came: Vec<u8> = {
            let mut cable = self.cables[number].borrow_mut();
            let bytes = bytes.min(cable.bytes.len());
            cable.acked += bytes as u64;
            cable.bytes.drain(..bytes).collect()
        };
        // If a header has arrived only in part, it waits for the rest.
        while !came.is_empty() {
            let (at, left) = &mut self.arriving[number];
            if *left == 0 {
                while came.len() < HEAD {
                    let mut cable = self.cables[number].borrow_mut();
                    let Some(byte) = cable.bytes.pop_front() else {
                        cable.bytes.extend(came);
                        return;
                    };
                    cable.acked += 1;
                    came.push(byte);
                }
                let segment = Segment::read(came[..HEAD].try_into().unwrap()).unwrap();
                came.drain(..HEAD);
                (*at, *left) = (segment.at, segment.bytes as usize);
                continue;
            }
            let here = came.len().min(*left);
            let data: Vec<u8> = came.drain(..here).collect();
            self.assembly.arrived(&mut self.frames, *at, Came::Data(&data)).unwrap();
            *at += here as u64;
            *left -= here;
        }
        self.stripes.acknowledged(self.frames.position, &mut Events::default()).unwrap();
    }

    fn open(&mut self, number: usize, room: usize) {
        self.cables[number].borrow_mut().room = room;
        self.stripes.writable(number);
    }

    fn pass_time(&mut self, time: Duration) -> Vec<Change> {
        let mut changes = Vec::new();
        for _ in 0..time.as_millis() / LOOK.as_millis() {
            self.now += LOOK;
            changes.extend(self.stripes.look(self.now));
        }
        changes
    }
}

fn data(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| ((at * (seed + 3)) >> 3) as u8).collect()
}

#[test]
fn a_long_frame_is_spread_over_all_paths_and_short_ones_stay_on_the_first() {
    let mut network = Network::new(4);
    for number in 0..4 {
        network.open(number, usize::MAX / 2);
    }
    network.push(0, data(100, 0));
    assert!(network.cables[1..].iter().all(|cable| cable.borrow().bytes.is_empty()));
    network.carry(0, usize::MAX);
    let slot = network.push(1, data(1 << 20, 1));
    for cable in &network.cables {
        let bytes = cable.borrow().bytes.len();
        assert!((200 << 10..320 << 10).contains(&bytes), "{bytes} bytes");
    }
    assert!(!slot.has_ended());
    // The last path delivers first.
    for number in [3, 2, 1, 0] {
        network.carry(number, usize::MAX);
    }
    assert!(slot.has_ended() && network.stripes.is_flushed());
    assert!(network.frames.ended[1].1 == data(1 << 20, 1));
}

#[test]
fn a_path_that_stalls_is_taken_over_and_used_again_when_it_advances() {
    let mut network = Network::new(2);
    network.open(0, 100_000);
    network.open(1, 1 << 30);
    let slot = network.push(7, data(1 << 20, 2));
    network.carry(1, usize::MAX);
    assert!(!slot.has_ended());
    assert_eq!(network.pass_time(Duration::from_millis(100)), []);
    assert_eq!(network.pass_time(Duration::from_millis(40)), [Change::Stalled(0)]);
    network.carry(1, usize::MAX);
    assert!(slot.has_ended(), "within 140 ms, by the other path");
    // Short frames avoid that path, too.
    network.push(8, data(10, 0));
    network.carry(1, usize::MAX);
    assert_eq!(network.frames.ended.len(), 2);
    // What that path still carries arrives late and does no harm; the segment that was begun is completed from a copy.
    network.open(0, 1 << 30);
    network.carry(0, usize::MAX);
    assert_eq!(network.arriving[0].1, 0);
    assert_eq!(network.pass_time(LOOK), [Change::Advances(0)]);
    network.push(9, data(50, 1));
    assert!(network.cables[0].borrow().bytes.len() > 50);
    network.carry(0, usize::MAX);
    let numbers: Vec<u64> = network.frames.ended.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [7, 8, 9]);
    assert!(network.frames.ended[0].1 == data(1 << 20, 2));
}

/// Both sides send in each step of an operation. The side that notices the dead path first tells the other.
#[test]
fn a_path_that_the_peer_suspects_gets_nothing_new_and_is_taken_over_at_the_next_check() {
    let mut network = Network::new(2);
    network.open(0, 1 << 30);
    network.open(1, 1 << 30);
    let slot = network.push(1, data(200_000, 1));
    network.carry(1, usize::MAX);
    network.stripes.peer_suspects(1 << 0);
    assert_eq!(network.pass_time(LOOK), [], "the bytes may just have been sent");
    assert_eq!(network.pass_time(LOOK), [Change::Stalled(0)]);
    network.carry(1, usize::MAX);
    assert!(slot.has_ended(), "after 40 ms, by the other path");
    // The peer may be wrong: a path that advances is not suspected, but it gets nothing new for as long as the peer
    // suspects it.
    let mut network = Network::new(2);
    network.open(0, 1 << 30);
    network.open(1, 1 << 30);
    network.push(1, data(100, 1));
    network.stripes.peer_suspects(1 << 0);
    network.carry(0, usize::MAX);
    assert_eq!(network.pass_time(LOOK * 4), []);
    network.push(2, data(200_000, 2));
    assert!(network.cables[0].borrow().bytes.is_empty() && !network.cables[1].borrow().bytes.is_empty());
    network.carry(1, usize::MAX);
    network.stripes.peer_suspects(0);
    network.push(3, data(10, 3));
    assert!(!network.cables[0].borrow().bytes.is_empty());
    // If this side trusts only paths that the peer suspects, it uses these.
    network.stripes.peer_suspects(1 << 0 | 1 << 1);
    network.push(4, data(200_000, 4));
    assert!(!network.cables[1].borrow().bytes.is_empty());
}

/// What a side suspects is in the next segment that it sends, an empty one if there is nothing to send.
#[test]
fn the_peer_is_told_which_paths_are_suspected() {
    let mut network = Network::new(2);
    network.open(0, 100);
    network.open(1, 1 << 30);
    network.push(1, data(1000, 1));
    network.pass_time(Duration::from_millis(200));
    let told = |cable: &Shared| {
        let head: Vec<u8> = cable.borrow().bytes.iter().take(HEAD).copied().collect();
        let segment = Segment::read(head.as_slice().try_into().unwrap()).unwrap();
        (segment.suspected, segment.changes)
    };
    assert_eq!((told(&network.cables[0]), told(&network.cables[1])), ((0, 0), (1 << 0, 1)));
    network.carry(1, usize::MAX);
    network.open(0, 1 << 30);
    network.carry(0, usize::MAX);
    assert_eq!(network.pass_time(LOOK), [Change::Advances(0)]);
    assert_eq!(told(&network.cables[0]), (0, 2));
}

#[test]
fn when_all_paths_stall_each_keeps_what_it_has() {
    let mut network = Network::new(2);
    network.open(0, 1 << 30);
    network.open(1, 1 << 30);
    let slot = network.push(1, data(500_000, 4));
    let before: Vec<usize> = network.cables.iter().map(Path::backlog).collect();
    assert_eq!(network.pass_time(Duration::from_millis(400)).len(), 2);
    assert_eq!(before, network.cables.iter().map(Path::backlog).collect::<Vec<_>>());
    network.carry(0, usize::MAX);
    network.pass_time(LOOK);
    network.carry(0, usize::MAX);
    assert!(slot.has_ended(), "the first that advances takes over");
}

#[test]
fn when_a_path_ends_and_the_others_are_silent_the_peer_is_gone() {
    let mut network = Network::new(3);
    (0..3).for_each(|number| network.open(number, 1 << 30));
    network.push(1, data(300_000, 3));
    (0..3).for_each(|number| network.carry(number, usize::MAX));
    network.pass_time(LOOK);
    // One path ends, and the others still carry what is sent.
    let begin = network.now;
    assert!(network.stripes.lose(2, begin) && network.stripes.is_doubted());
    (0..2).for_each(|number| network.carry(number, usize::MAX));
    assert_eq!(network.pass_time(SILENT * 2), []);
    assert!(!network.stripes.is_doubted());
    // The next path ends, and nothing arrives on the last one.
    let begin = network.now;
    assert!(network.stripes.lose(1, begin));
    let changes = network.pass_time(SILENT);
    assert_eq!(changes, [Change::Stalled(0), Change::Gone]);
    // If this process was stopped, it knows nothing about its peer.
    network.now += SILENT * 3;
    assert_eq!(network.pass_time(SILENT - LOOK * 2), []);
}

/// A frame of the test below. Its owner writes to its memory as soon as this is allowed.
struct Given {
    slot: Arc<Slot>,
    sent: Vec<u8>,
    memory: Box<[u8]>,
    given_up: bool,
    /// Whether the frame was given up before a byte of it was sent.
    removed: bool,
}

impl Given {
    fn is_over(&mut self) -> bool {
        let is_over = self.given_up || self.slot.has_ended();
        if is_over {
            self.memory.fill(0xee);
        }
        is_over
    }
}

/// Frames are random, and some are given up; paths stall, fail and come back in any order. Each frame must arrive once,
/// in order, as sent, and its memory must not be used after its transfer has ended.
#[test]
fn frames_arrive_once_and_in_order_whatever_happens_to_the_paths() {
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut below = |bound: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) % bound
    };
    for round in 0..300 {
        let paths = 2 + below(3) as usize;
        let mut network = Network::new(paths);
        let frames = 1 + below(12) as usize;
        let mut alive: Vec<usize> = (0..paths).collect();
        let (mut steps, mut given) = (0, Vec::<Given>::new());
        loop {
            let over = given.iter_mut().filter_map(|one| one.is_over().then_some(())).count();
            if over == frames && network.stripes.is_flushed() {
                break;
            }
            steps += 1;
            assert!(steps < 200_000, "round {round} does not end");
            let path = alive[below(alive.len() as u64) as usize];
            match below(20) {
                0..3 if given.len() < frames => {
                    let bytes = [0, 5, 3000, 70_000, 300_000][below(5) as usize] + below(30) as usize;
                    let sent = data(bytes, given.len());
                    let mut memory = sent.clone().into_boxed_slice();
                    let half = bytes / 2;
                    let spans = [(0, half), (half, bytes - half)];
                    let spans = spans.map(|(from, bytes)| Span { addr: memory[from..].as_mut_ptr() as usize, bytes });
                    let slot = network.push_from(given.len() as u64, Memory::Borrowed(spans.to_vec()), bytes);
                    given.push(Given { slot, sent, memory, given_up: false, removed: false });
                }
                3 if alive.len() > 1 && below(6) == 0 => {
                    network.cables[path].borrow_mut().fails = true;
                    alive.retain(|one| *one != path);
                    assert!(network.stripes.lose(path, network.now));
                }
                4 => drop(network.pass_time(Duration::from_millis(60))),
                13 => network.stripes.peer_suspects(below(1 << paths) as u16),
                5 if !given.is_empty() && below(4) == 0 => {
                    let number = below(given.len() as u64);
                    let is_it = |one: &Outgoing| one.frame.number == number;
                    let gone = network.stripes.remove(is_it, |_| false, |one| one.end = End::Nobody);
                    let one = &mut given[number as usize];
                    one.removed |= !gone.is_empty();
                    one.given_up = true;
                }
                6..13 => network.open(path, below(100_000) as usize),
                _ => network.carry(path, below(100_000) as usize),
            }
        }
        let sent = given.iter().enumerate().filter(|(_, one)| !one.removed);
        let sent: Vec<(u64, &Vec<u8>)> = sent.map(|(number, one)| (number as u64, &one.sent)).collect();
        let came: Vec<(u64, &Vec<u8>)> = network.frames.ended.iter().map(|(number, data)| (*number, data)).collect();
        assert!(came == sent, "round {round}");
    }
}
