//! The connections between processes. Ranks are threads, each with its own wire, over the loopback interface.

#![allow(unsafe_code)] // bodies use memory of the tests through raw pointers

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use sagellm::engine::multihost::link::{Link, Mail, Mailbox, Transfer};
use sagellm::engine::multihost::ucx::Wanted;
use sagellm::engine::multihost::wire::{Over, Place, Wire, WireLink, join};
use sagellm::error::Result;
use sagellm::host::Store;
use sagellm::types::Span;

use crate::common::host::Memory;

const PATIENT: Duration = Duration::from_secs(20);

fn place<'a>(store: &'a Memory, group: u8, rank: usize, size: usize) -> Place<'a> {
    Place { store, id: [group; 16], rank, size, address: "127.0.0.1", paths: &[], timeout: PATIENT }
}

fn wires(count: usize) -> Vec<Arc<Wire>> {
    wires_over(&Over::Tcp, count)
}

pub fn wires_over(over: &Over, count: usize) -> Vec<Arc<Wire>> {
    (0..count).map(|_| Wire::new(over).unwrap()).collect()
}

/// Returns what can carry the frames: TCP and, if UCX is installed, UCX over TCP and UCX over shared memory.
pub fn carriers() -> Vec<Over> {
    let by_ucx = |settings: &[(&str, &str)]| {
        let settings = settings.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        Over::Ucx(Wanted { settings, ..Wanted::default() })
    };
    let mut all = vec![Over::Tcp];
    match Wire::new(&by_ucx(&[("TLS", "tcp")])) {
        Err(error) => println!("skipped with UCX: {}", error.text()),
        Ok(_) => all.extend([&[("TLS", "tcp")][..], &[("TLS", "shm,tcp")]].map(by_ucx)),
    }
    all
}

/// Runs `body` as each rank of a group over these wires. Returns the results by rank.
pub fn as_ranks<T: Send>(
    wires: &[Arc<Wire>],
    store: &Memory,
    group: u8,
    body: impl Fn(usize, WireLink) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = wires
            .iter()
            .enumerate()
            .map(|(rank, wire)| {
                let body = &body;
                scope.spawn(move || body(rank, join(wire, &place(store, group, rank, wires.len())).unwrap()))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Bytes that differ for each sender, receiver, tag and turn.
fn data(bytes: usize, words: [usize; 4]) -> Vec<u8> {
    let seed = words.iter().fold(7usize, |seed, word| seed.wrapping_mul(31).wrapping_add(word + 1));
    (0..bytes).map(|at| (seed.wrapping_mul(at + 13) >> 5) as u8).collect()
}

fn size(turn: usize) -> usize {
    [0, 1, 8, 100, 16 << 10, (16 << 10) + 1, 65_000, 256 << 10, 700_001, 1 << 20, (1 << 20) + 1, 3_000_001][turn % 12]
}

#[test]
fn messages_of_each_tag_arrive_in_order_whatever_their_size() {
    for over in carriers() {
        println!("{over:?}");
        let (wires, store) = (wires_over(&over, 3), Memory::default());
        as_ranks(&wires, &store, 1, |me, link| {
            let mut sending: Vec<Box<dyn Transfer>> = Vec::new();
            let peers: Vec<usize> = (0..3).filter(|peer| *peer != me).collect();
            for turn in 0..60 {
                let bytes = size(turn);
                let tag = (turn % 2) as u32;
                // Some receives are posted before the message is sent, some when it may have arrived.
                let receive = |peer| (peer, link.receive(peer, tag, vec![0; bytes.max(1)], bytes).unwrap());
                let ahead: Vec<_> =
                    if turn % 3 == me { Vec::new() } else { peers.iter().map(|peer| receive(*peer)).collect() };
                for peer in &peers {
                    let message = data(bytes.max(1), [me, *peer, turn, 0]);
                    sending.push(link.send(*peer, tag, message, bytes).unwrap());
                }
                if turn % 5 == 0 {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let all = if ahead.is_empty() { peers.iter().map(|peer| receive(*peer)).collect() } else { ahead };
                for (peer, transfer) in all {
                    let came = transfer.wait(PATIENT).unwrap();
                    assert!(
                        came[..bytes] == data(bytes.max(1), [peer, me, turn, 0])[..bytes],
                        "turn {turn} from {peer}"
                    );
                }
            }
            sending.into_iter().for_each(|one| drop(one.wait(PATIENT).unwrap()));
        });
    }
}

/// Sends short messages, bodies that may be sent before they are asked for, and longer bodies. The messages of each
/// sort have more bytes in total than may be in flight.
#[test]
fn a_rank_that_is_far_ahead_waits_until_its_messages_are_taken() {
    for over in carriers() {
        for (bytes, count) in [(200, 20_000), (100_000, 60), (300_000, 10), (1_200_000, 4)] {
            println!("{over:?}, {bytes} bytes");
            let (wires, store) = (wires_over(&over, 2), Memory::default());
            let begin = AtomicBool::new(false);
            as_ranks(&wires, &store, 1, |me, link| {
                let message = |turn| data(bytes, [turn, 0, 0, 0]);
                if me == 0 {
                    let sending: Vec<_> =
                        (0..count).map(|turn| link.send(1, 0, message(turn), bytes).unwrap()).collect();
                    assert!(!sending[count - 1].ends_within(Duration::from_millis(100)), "nobody receives yet");
                    begin.store(true, Ordering::Relaxed);
                    sending.into_iter().for_each(|one| drop(one.wait(PATIENT).unwrap()));
                } else {
                    while !begin.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    for turn in 0..count {
                        let came = link.receive(0, 0, vec![0; bytes], bytes).unwrap().wait(PATIENT).unwrap();
                        assert!(came == message(turn), "message {turn}");
                    }
                }
            });
        }
    }
}

/// A rank that leaves waits until its peers have taken what it sent, because a body that was sent before its request
/// may still be on the way.
#[test]
fn a_sender_knows_when_what_it_sent_ahead_was_taken() {
    for bytes in [100_000, 1_000_000] {
        let (wires, store) = (wires_over(&Over::Tcp, 2), Memory::default());
        let begin = AtomicBool::new(false);
        as_ranks(&wires, &store, 1, |me, link| {
            let message = data(bytes, [0, 0, 0, 0]);
            if me == 0 {
                assert!(link.await_taken(1, Duration::ZERO), "nothing was sent");
                let sent = link.send(1, 0, message, bytes).unwrap();
                sent.wait(PATIENT).unwrap(); // the system has accepted it
                assert!(!link.await_taken(1, Duration::from_millis(100)), "nobody receives yet");
                begin.store(true, Ordering::Relaxed);
                assert!(link.await_taken(1, PATIENT));
            } else {
                while !begin.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let came = link.receive(0, 0, vec![0; bytes], bytes).unwrap().wait(PATIENT).unwrap();
                assert!(came == message);
            }
        });
    }
}

/// A mailbox that passes everything on to a channel.
struct Box_(Mutex<Sender<(usize, Option<Vec<u8>>)>>);

impl Mailbox for Box_ {
    fn came(&self, peer: usize, message: Vec<u8>) {
        let _ = self.0.lock().unwrap().send((peer, Some(message)));
    }
    fn lost(&self, peer: usize, _why: &str) {
        let _ = self.0.lock().unwrap().send((peer, None));
    }
}

#[test]
fn mail_arrives_in_order_and_bodies_in_their_memory_although_nobody_waits_in_the_link() {
    for over in carriers() {
        println!("{over:?}");
        let (wires, store) = (wires_over(&over, 3), Memory::default());
        as_ranks(&wires, &store, 1, |me, link| {
            const TURNS: usize = 40;
            let (sender, mail) = channel();
            link.open_mailbox(Arc::new(Box_(Mutex::new(sender))));
            let awaited = link.keep_driven();
            let peers: Vec<usize> = (0..3).filter(|peer| *peer != me).collect();
            let ended = Arc::new(AtomicUsize::new(0));
            let done = || {
                let ended = Arc::clone(&ended);
                Box::new(move |outcome: std::result::Result<(), String>| {
                    outcome.unwrap();
                    ended.fetch_add(1, Ordering::SeqCst);
                })
            };
            let mut sources: Vec<Vec<u8>> = Vec::new();
            let mut targets: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
            for turn in 0..TURNS {
                for &peer in &peers {
                    let bytes = size(turn);
                    let mut target = vec![0u8; bytes];
                    let pieces = vec![Span { addr: target.as_mut_ptr() as usize, bytes }];
                    // SAFETY: `targets` keeps the memory until all bodies have ended; moving a vector does not move its
                    // memory.
                    unsafe { link.receive_body(peer, turn as u64, pieces, done()) }.unwrap();
                    targets.push((target, data(bytes, [peer, me, turn, 2])));
                    // Says that the receive was posted.
                    link.mail(peer, data(turn * 100, [me, peer, turn, 1])).unwrap();
                }
            }
            let mut next = [0; 3];
            while peers.iter().any(|peer| next[*peer] < TURNS) {
                let (peer, message) = mail.recv_timeout(PATIENT).unwrap();
                let Some(message) = message else {
                    assert_eq!(next[peer], TURNS, "rank {peer} is lost before its mail came");
                    continue; // all mail of this peer has come
                };
                let turn = next[peer];
                assert!(message == data(turn * 100, [peer, me, turn, 1]), "from {peer}");
                next[peer] += 1;
                let bytes = size(turn);
                let source = data(bytes, [me, peer, turn, 2]);
                let half = bytes / 3;
                let at = source.as_ptr() as usize;
                let pieces = vec![Span { addr: at, bytes: half }, Span { addr: at + half, bytes: bytes - half }];
                // SAFETY: `sources` keeps the memory until all bodies have ended.
                unsafe { link.send_body(peer, turn as u64, pieces, done()) }.unwrap();
                sources.push(source);
            }
            let until = Instant::now() + PATIENT;
            while ended.load(Ordering::SeqCst) < TURNS * 4 {
                assert!(Instant::now() < until, "{} bodies have ended", ended.load(Ordering::SeqCst));
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(targets.iter().all(|(came, expected)| came == expected));
            drop(awaited);
        });
    }
}

#[test]
fn a_wait_ends_when_the_link_is_cut_on_either_side() {
    for over in carriers() {
        println!("{over:?}");
        let (wires, store) = (wires_over(&over, 2), Memory::default());
        as_ranks(&wires, &store, 1, |me, link| {
            if me == 0 {
                std::thread::sleep(Duration::from_millis(50));
                link.cut();
                assert!(link.send(1, 0, vec![0; 8], 8).is_err());
                return;
            }
            let long = link.receive(0, 1, vec![0; 1 << 20], 1 << 20).unwrap();
            let short = link.receive(0, 0, vec![0; 8], 8).unwrap();
            let begin = Instant::now();
            assert_eq!(short.wait(PATIENT).unwrap_err().words, "Connection closed by peer");
            assert_eq!(long.wait(PATIENT).unwrap_err().words, "Connection closed by peer");
            assert!(begin.elapsed() < PATIENT / 2);
            assert!(link.receive(0, 0, vec![0; 8], 8).is_err());
        });
        // Another thread of the same rank cuts the link.
        as_ranks(&wires, &store, 2, |me, link| {
            if me == 1 {
                let link = Arc::new(link);
                let other = Arc::clone(&link);
                let cutting = std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(50));
                    other.cut();
                });
                let text = link.receive(0, 0, vec![0; 8], 8).unwrap().wait(PATIENT).unwrap_err().words;
                assert!(text.contains("ended on this rank"), "{text}");
                cutting.join().unwrap();
            } else {
                let text = link.receive(1, 0, vec![0; 8], 8).unwrap().wait(PATIENT).unwrap_err().words;
                assert_eq!(text, "Connection closed by peer");
            }
        });
    }
}

/// A mailbox that is slow, and counts the mail that it has taken.
#[derive(Default)]
struct Slow(AtomicUsize);

impl Mailbox for Slow {
    fn came(&self, _peer: usize, _message: Vec<u8>) {
        std::thread::sleep(Duration::from_millis(100));
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn lost(&self, _peer: usize, _why: &str) {}
}

/// Ends the sending direction of each connection of this process that has this address at its own end.
fn end_sending(address: &str) {
    let ip: Ipv4Addr = address.parse().unwrap();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let fd: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: the buffer has room for the address of an IPv4 socket; the calls refuse a descriptor that is no
        // socket.
        unsafe {
            let mut name: libc::sockaddr_in = std::mem::zeroed();
            let mut length = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            let named = libc::getsockname(fd, (&raw mut name).cast(), &raw mut length) == 0;
            if named && name.sin_addr.s_addr == u32::from_ne_bytes(ip.octets()) {
                libc::shutdown(fd, libc::SHUT_WR); // fails for a listening socket
            }
        }
    }
}

/// A rank mails why its group has failed, and leaves. Its peer reads the mail and the end of the connection in one
/// pass. The mail must have been handed over before any thread of the peer learns, by a failed transfer or a refused
/// call, that the rank is gone. Otherwise that thread would blame the rank that only reported the failure.
#[test]
fn the_mail_of_a_rank_that_leaves_is_handed_over_before_any_call_fails() {
    type Leave = fn(WireLink, &str);
    let ways: [Leave; 3] = [
        |link, _| link.cut(),
        |link, _| drop(link), // closes the connection
        |link, address| {
            end_sending(address); // as if the process had ended
            std::thread::sleep(Duration::from_secs(1));
            drop(link);
        },
    ];
    let cases = carriers().into_iter().map(|over| (over, 0)).chain([(Over::Tcp, 2)]);
    for (case, (over, paths)) in cases.enumerate() {
        println!("{over:?}, {paths} paths");
        for (way, leave) in ways.iter().enumerate() {
            let (wires, store, address) =
                (wires_over(&over, 2), Memory::default(), own_address(40 + 8 * way as u8 + case as u8));
            let paths = vec![address.clone(); paths];
            let join = |rank: usize| {
                let place = Place { paths: &paths, address: &address, ..place(&store, 1, rank, 2) };
                join(&wires[rank], &place).unwrap()
            };
            let posted = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let link = join(1);
                    posted.wait();
                    link.mail(0, vec![1]).unwrap();
                    std::thread::sleep(Duration::from_millis(50)); // rank 0 is taking the mail, and reads nothing
                    link.mail(0, vec![2]).unwrap();
                    leave(link, &address);
                });
                let (link, mailbox) = (join(0), Arc::new(Slow::default()));
                link.open_mailbox(Arc::clone(&mailbox) as Arc<dyn Mailbox>);
                let check = || assert_eq!(mailbox.0.load(Ordering::SeqCst), 2, "way {way}, {} paths", paths.len());
                let receive = |bytes: usize| link.receive(1, bytes as u32, vec![0; bytes], bytes).unwrap();
                let receives = [8, 1 << 20].map(receive);
                posted.wait();
                std::thread::scope(|scope| {
                    for receive in receives {
                        scope.spawn(|| {
                            receive.wait(PATIENT).unwrap_err();
                            check();
                        });
                    }
                    scope.spawn(|| {
                        until("calls are refused", || link.receive(1, 3, vec![0; 8], 8).is_err());
                        check();
                    });
                });
            });
        }
    }
}

#[test]
fn what_was_sent_before_the_link_was_cut_is_received() {
    for over in carriers() {
        println!("{over:?}");
        let (wires, store) = (wires_over(&over, 2), Memory::default());
        as_ranks(&wires, &store, 1, |me, link| {
            if me == 0 {
                for turn in 0..100 {
                    link.send(1, 0, data(1000, [turn, 0, 0, 0]), 1000).unwrap().wait(PATIENT).unwrap();
                }
                return; // drops the link
            }
            for turn in 0..100 {
                let came = link.receive(0, 0, vec![0; 1000], 1000).unwrap().wait(PATIENT).unwrap();
                assert!(came == data(1000, [turn, 0, 0, 0]));
            }
            assert!(link.receive(0, 0, vec![0; 8], 8).map(|one| one.wait(PATIENT).is_err()).unwrap_or(true));
        });
    }
}

#[test]
fn memory_of_a_body_is_not_used_after_the_link_was_cut() {
    for over in carriers() {
        println!("{over:?}");
        let (wires, store) = (wires_over(&over, 2), Memory::default());
        as_ranks(&wires, &store, 1, |me, link| {
            let (sender, ended) = channel();
            let done = move |outcome: std::result::Result<(), String>| drop(sender.send(outcome));
            let (sender, mail) = channel();
            link.open_mailbox(Arc::new(Box_(Mutex::new(sender))));
            let mut memory = vec![me as u8 + 1; 64 << 20];
            let pieces = vec![Span { addr: memory.as_mut_ptr() as usize, bytes: memory.len() }];
            let _awaited = link.keep_driven();
            if me == 1 {
                // SAFETY: the memory is kept until the body has ended.
                unsafe { link.receive_body(0, 5, pieces, Box::new(done)) }.unwrap();
                link.mail(0, b"posted".to_vec()).unwrap();
                // The cut comes in the middle: the rest of the 64 MiB takes longer than this thread needs to see the first
                // byte.
                let until = Instant::now() + PATIENT;
                // SAFETY: the memory is valid. The link writes it meanwhile, so it is read as volatile.
                while unsafe { std::ptr::read_volatile(memory.as_ptr()) } != 1 {
                    assert!(Instant::now() < until, "the body does not come");
                }
                link.cut();
                assert!(ended.recv_timeout(PATIENT).is_ok());
                let before = memory.clone();
                std::thread::sleep(Duration::from_millis(30));
                assert!(before == memory, "received after the cut");
            } else {
                let (_, posted) = mail.recv_timeout(PATIENT).unwrap();
                assert_eq!(posted.as_deref(), Some(&b"posted"[..]));
                // SAFETY: as above.
                unsafe { link.send_body(1, 5, pieces, Box::new(done)) }.unwrap();
                assert!(ended.recv_timeout(PATIENT).is_ok(), "the peer cut it, so it ends one way or the other");
            }
        });
    }
}

/// A lane may drop its transfer at any time: before the peer has called, in the middle of the data, or afterwards. Its
/// group fails then, but other groups must be able to use the connection.
#[test]
fn memory_of_a_lanes_transfer_is_not_used_after_it_was_dropped() {
    for over in carriers() {
        println!("{over:?}");
        let (wires, store) = (wires_over(&over, 2), Memory::default());
        for round in 0..72u64 {
            // The shorter bodies are sent before they are asked for.
            let bytes = [8 << 20, 200_000, 1_000_000][round as usize / 24];
            let (drops_first, late) = (round % 2 == 0, Duration::from_micros(300 * (round % 24 / 2)));
            as_ranks(&wires, &store, 1 + round as u8, |me, link| {
                let (mut memory, number) = (vec![me as u8 + 1; bytes], 7);
                let middle = memory.len() / 2;
                let base = memory.as_mut_ptr() as usize;
                let pieces = vec![Span { addr: base, bytes: middle }, Span { addr: base + middle, bytes: middle }];
                // SAFETY: the memory outlives the transfer, and is read only after the transfer has ended or was dropped.
                let transfer = unsafe {
                    match me {
                        0 => link.send_from(1, number, pieces),
                        _ => link.receive_into(0, number, pieces),
                    }
                };
                // The rank that drops its transfer may have left before a late peer calls.
                let Ok(transfer) = transfer else {
                    assert!((me == 0) != drops_first, "nobody has left yet");
                    return;
                };
                if (me == 0) == drops_first {
                    std::thread::sleep(late);
                    drop(transfer);
                    let before = memory.clone();
                    memory.fill(9);
                    std::thread::sleep(Duration::from_millis(20));
                    assert!(memory.iter().all(|byte| *byte == 9), "received after the transfer was dropped");
                    assert!(before.iter().all(|byte| *byte == 1 || (me == 1 && *byte == 2)), "other bytes");
                    link.cut();
                } else if transfer.wait(PATIENT).is_ok() && me == 1 {
                    assert!(memory.iter().all(|byte| *byte == 1), "what was sent is not what came");
                }
            });
        }
        // The connection still works: transfers that had begun continued from a copy, or their data was discarded.
        as_ranks(&wires, &store, 99, |me, link| {
            let next = link.send(1 - me, 0, vec![me as u8; 8], 8).unwrap();
            assert_eq!(link.receive(1 - me, 0, vec![0; 8], 8).unwrap().wait(PATIENT).unwrap()[0] as usize, 1 - me);
            next.wait(PATIENT).unwrap();
        });
    }
}

#[test]
fn further_groups_use_the_same_connections_and_the_last_one_closes_them() {
    for over in carriers() {
        println!("{over:?}");
        let (wires, store) = (wires_over(&over, 4), Memory::default());
        let open = || wires.iter().map(|wire| wire.open_connections()).collect::<Vec<_>>();
        let first = as_ranks(&wires, &store, 1, |_, link| link);
        assert_eq!(open(), [3, 3, 3, 3]);
        let mut others: Vec<Vec<WireLink>> =
            (2..8).map(|group| as_ranks(&wires, &store, group, |_, link| link)).collect();
        others.push(as_ranks(&wires[1..3], &store, 8, |_, link| link));
        assert_eq!(open(), [3, 3, 3, 3]);
        drop((first, others));
        assert_eq!(open(), [0, 0, 0, 0]);
        // Creates groups again while the old connections are being closed.
        for group in 10..30 {
            as_ranks(&wires, &store, group, |me, link| {
                let next = link.send((me + 1) % 4, 0, vec![me as u8; 8], 8).unwrap();
                let came = link.receive((me + 3) % 4, 0, vec![0; 8], 8).unwrap().wait(PATIENT).unwrap();
                assert_eq!(came[0] as usize, (me + 3) % 4);
                next.wait(PATIENT).unwrap();
            });
        }
    }
}

/// A store that hides one rank's entry until `shows` is set.
struct Hiding<'a> {
    store: &'a Memory,
    rank: usize,
    shows: AtomicBool,
}

impl<'a> Hiding<'a> {
    fn new(store: &'a Memory, rank: usize) -> Hiding<'a> {
        Hiding { store, rank, shows: AtomicBool::new(false) }
    }
}

impl Store for Hiding<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value)
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let hidden = key.ends_with(&format!("/{}", self.rank)) && !self.shows.load(Ordering::SeqCst);
        if hidden { Ok(None) } else { self.store.try_get(key) }
    }
}

fn until(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + PATIENT;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Two wires, of which the first connects to the second, because its id is smaller.
fn caller_and_called() -> (Arc<Wire>, Arc<Wire>) {
    let mut two = wires(2);
    two.sort_by_key(|wire| wire.id);
    let called = two.pop().unwrap();
    (two.pop().unwrap(), called)
}

/// Returns an address that only one test uses, so that `sockets_at` counts only that test's sockets.
fn own_address(test: u8) -> String {
    let pid = std::process::id();
    format!("127.{}.{}.{}", 100 + test, pid >> 8 & 0xff, pid & 0xff)
}

/// Returns how many listening sockets and how many connections have this address at one end and are still held by a
/// process.
fn sockets_at(address: &str) -> (usize, usize) {
    let ip: std::net::Ipv4Addr = address.parse().unwrap();
    let ip = format!("{:08X}:", u32::from_le_bytes(ip.octets()));
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let (mut listening, mut connected) = (0, 0);
    // While other tests open and close sockets, the kernel may list a socket twice.
    let mut inodes = HashSet::new();
    for line in table.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if !inodes.insert(words[9]) {
            continue;
        }
        if (words[1].starts_with(&ip) || words[2].starts_with(&ip)) && words[9] != "0" {
            if words[3] == "0A" { listening += 1 } else { connected += 1 }
        }
    }
    (listening, connected)
}

/// Exchanges a short and a long message with the next and the previous rank of `size` ranks.
fn exchange(link: &WireLink, me: usize, size: usize, tag: u32) {
    let (next, before) = ((me + 1) % size, (me + size - 1) % size);
    for bytes in [24, 40_000] {
        let words = [tag as usize, bytes, 0];
        let message = |rank: usize| data(bytes, [rank, words[0], words[1], words[2]]);
        let sent = link.send(next, tag, message(me), bytes).unwrap();
        let came = link.receive(before, tag, vec![0; bytes], bytes).unwrap().wait(PATIENT).unwrap();
        assert!(came == message(before), "{bytes} bytes from {before}");
        sent.wait(PATIENT).unwrap();
    }
}

#[test]
fn a_group_is_made_although_the_last_other_one_ends_meanwhile() {
    let (caller, called) = caller_and_called();
    let address = own_address(0);
    for (round, [first, second]) in [[&caller, &called], [&called, &caller]].into_iter().enumerate() {
        let store = Memory::default();
        let hiding = Hiding::new(&store, 0);
        let place = |store, group, rank| Place { address: &address, ..place_in(store, group, rank) };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| join(second, &place(&store, 1, 1)).unwrap());
            let mut old = [join(first, &place(&store, 1, 0)).unwrap(), other.join().unwrap()];
            // When rank 1's only group ends, rank 1 has published its address for the new group but has no channel for
            // it yet.
            let late = scope.spawn(|| join(second, &place(&hiding, 2, 1)).unwrap());
            let key = format!("wire/{:032x}/1", u128::from_be_bytes([2; 16]));
            until("rank 1 does not say where it listens", || store.try_get(&key).unwrap().is_some());
            let [_, ended] = &mut old;
            ended.close();
            let early = scope.spawn(|| join(first, &place(&store, 2, 0)).unwrap());
            std::thread::sleep(Duration::from_millis(20)); // rank 0 finds the connection closed and connects anew
            hiding.shows.store(true, Ordering::SeqCst);
            let (late, early) = (late.join().unwrap(), early.join().unwrap());
            let other = scope.spawn(move || exchange(&late, 1, 2, 0));
            exchange(&early, 0, 2, 0);
            other.join().unwrap();
        });
        assert_eq!((first.open_connections(), second.open_connections()), (0, 0), "round {round}");
    }
    until("sockets are left", || sockets_at(&address) == (0, 0));
}

fn place_in(store: &dyn Store, group: u8, rank: usize) -> Place<'_> {
    Place { store, id: [group; 16], rank, size: 2, address: "", paths: &[], timeout: PATIENT }
}

/// A mailbox that blocks the thread which reads the connections.
struct Blocking(Mutex<Receiver<()>>);

impl Mailbox for Blocking {
    fn came(&self, _peer: usize, _message: Vec<u8>) {
        let _ = self.0.lock().unwrap().recv_timeout(PATIENT);
    }
    fn lost(&self, _peer: usize, _why: &str) {}
}

#[test]
fn groups_that_are_made_at_once_share_one_connection() {
    let (caller, called) = caller_and_called();
    let third = Wire::new(&Over::Tcp).unwrap();
    let (store, address) = (Memory::default(), own_address(1));
    let place = |group, rank| Place { address: &address, ..place_in(&store, group, rank) };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(&third, &place(1, 1)).unwrap());
        let busy = (join(&called, &place(1, 0)).unwrap(), other.join().unwrap());
        // Two threads of `caller` request a connection. The reading thread is blocked, so neither request is answered
        // before both are sent.
        let (goes_on, slow) = channel();
        busy.0.open_mailbox(Arc::new(Blocking(Mutex::new(slow))));
        let awaited = busy.0.keep_driven();
        busy.1.mail(0, vec![0; 8]).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let ranks: Vec<_> = [(&caller, 2, 0), (&caller, 3, 0), (&called, 2, 1), (&called, 3, 1)]
            .into_iter()
            .map(|(wire, group, rank)| scope.spawn(move || (rank, join(wire, &place(group, rank)).unwrap())))
            .collect();
        std::thread::sleep(Duration::from_millis(100));
        goes_on.send(()).unwrap();
        let links: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        // Both ends of the connection to `caller`, and both ends of the one to `third`.
        assert_eq!(sockets_at(&address).1, 4);
        let exchanging: Vec<_> =
            links.into_iter().map(|(rank, link)| scope.spawn(move || exchange(&link, rank, 2, 0))).collect();
        exchanging.into_iter().for_each(|rank| rank.join().unwrap());
        drop((awaited, busy));
    });
    until("sockets are left", || sockets_at(&address) == (0, 0));
}

#[test]
fn a_rank_that_was_early_and_gave_up_is_known_to_have_left() {
    let (wires, store) = (wires(2), Memory::default());
    let _open = as_ranks(&wires, &store, 1, |_, link| link); // keeps the connection open
    let hiding = Hiding::new(&store, 0);
    std::thread::scope(|scope| {
        let late = scope.spawn(|| {
            let place = Place { address: "127.0.0.1", ..place_in(&hiding, 2, 1) };
            join(&wires[1], &place)
        });
        let key = format!("wire/{:032x}/1", u128::from_be_bytes([2; 16]));
        until("rank 1 does not say where it listens", || store.try_get(&key).unwrap().is_some());
        let impatient = Place { timeout: Duration::from_millis(50), ..place(&store, 2, 0, 2) };
        assert!(join(&wires[0], &impatient).is_err());
        std::thread::sleep(Duration::from_millis(20));
        hiding.shows.store(true, Ordering::SeqCst);
        let link = late.join().unwrap().unwrap();
        let begin = Instant::now();
        let gone = link.receive(0, 0, vec![0; 8], 8).map(|one| one.wait(PATIENT).unwrap_err().words);
        let text = gone.unwrap_or_else(|error| error.text().to_string());
        assert!(text.contains("Connection closed by peer"), "{text}");
        assert!(begin.elapsed() < PATIENT / 2);
    });
}

#[test]
fn a_group_that_fails_before_it_has_a_channel_leaves_no_socket() {
    let (caller, called) = caller_and_called();
    let (store, address) = (Memory::default(), own_address(3));
    let hiding = Hiding::new(&store, 0);
    let place =
        |store, rank, ms| Place { address: &address, timeout: Duration::from_millis(ms), ..place_in(store, 1, rank) };
    std::thread::scope(|scope| {
        let fails = scope.spawn(|| join(&called, &place(&hiding, 1, 500)).is_err());
        let other = scope.spawn(|| join(&caller, &place(&store, 0, 2000)).is_err());
        // On a busy machine rank 1 may reach its deadline before rank 0 has connected.
        until("rank 0 does not connect", || called.open_connections() == 1 || fails.is_finished());
        assert!(fails.join().unwrap() && other.join().unwrap());
    });
    until("sockets are left", || sockets_at(&address) == (0, 0));
}

/// xorshift; the test prints the seed.
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
    /// Pauses for up to half a millisecond, or not at all.
    fn pause(&mut self) {
        if self.below(2) == 0 {
            std::thread::sleep(Duration::from_micros(self.below(500)));
        }
    }
}

/// A store that delays its answers at random.
struct Late<'a>(&'a Memory, Mutex<Random>);

impl Store for Late<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut random = self.1.lock().unwrap().clone();
        random.pause();
        *self.1.lock().unwrap() = random;
        self.0.try_get(key)
    }
}

/// Threads of four processes create and end groups of any of the processes. Thread i of a process shares groups only
/// with thread i of the others. Groups of different threads are unrelated, and a rank may leave a group that other
/// ranks still join or use.
#[test]
fn groups_come_and_go_on_several_threads() {
    for (number, over) in carriers().iter().enumerate() {
        println!("{over:?}");
        come_and_go(over, &own_address(16 + number as u8));
    }
}

fn come_and_go(over: &Over, address: &str) {
    const PROCESSES: usize = 4;
    const THREADS: u64 = 3;
    const GROUPS: u64 = 40;
    let seed = std::env::var("SAGELLM_TEST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_nanos() as u64 | 1
    });
    println!("SAGELLM_TEST_SEED={seed}");
    let (wires, store) = (wires_over(over, PROCESSES), Memory::default());
    let program = |process: usize, thread: u64| {
        let mut shared = Random(seed.wrapping_mul(thread + 3) | 1); // the same sequence on all processes
        let mut own = Random((seed ^ (process as u64 + 1) << 32).wrapping_mul(thread + 7) | 1);
        let mut living: Vec<WireLink> = Vec::new();
        for group in 0..GROUPS {
            let chosen = 1 + shared.below((1 << PROCESSES) - 1);
            let members: Vec<usize> = (0..PROCESSES).filter(|one| chosen >> one & 1 == 1).collect();
            let (talks, lives) = (shared.below(3) > 0, own.below(3));
            let Some(rank) = members.iter().position(|one| *one == process) else { continue };
            if members.len() < 2 {
                living.clear();
                continue;
            }
            let mut id = [thread as u8 + 1; 16];
            id[..2].copy_from_slice(&(group as u16).to_le_bytes());
            let slow = Late(&store, Mutex::new(own.clone()));
            let place = Place { store: &slow, id, rank, size: members.len(), address, paths: &[], timeout: PATIENT };
            own.pause();
            let link = match join(&wires[process], &place) {
                Ok(link) => link,
                Err(error) => panic!("thread {thread}, group {group}, rank {rank} of {members:?}: {}", error.text()),
            };
            if talks {
                exchange(&link, rank, members.len(), group as u32);
            }
            own.pause();
            living.push(link);
            while living.len() as u64 > lives {
                living.swap_remove(own.below(living.len() as u64) as usize);
            }
        }
    };
    std::thread::scope(|scope| {
        let program = &program;
        for process in 0..PROCESSES {
            for thread in 0..THREADS {
                scope.spawn(move || program(process, thread));
            }
        }
    });
    assert!(wires.iter().all(|wire| wire.open_connections() == 0));
    until("sockets are left", || sockets_at(address) == (0, 0));
}

#[test]
fn strangers_are_turned_away_and_harm_nobody() {
    let (wires, store) = (wires(2), Memory::default());
    as_ranks(&wires, &store, 1, |me, link| {
        let port: u16 = String::from_utf8(
            store.try_get(&format!("wire/{:032x}/{me}", u128::from_be_bytes([1; 16]))).unwrap().unwrap(),
        )
        .unwrap()
        .split(' ')
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
        let mut strangers = Vec::new();
        for said in [
            &b"GET / HTTP/1.1\r\nHost: anybody, and more of it\r\n\r\n"[..],
            &[0; 40],
            b"sagewir1",
            b"sagewir1 but of another process that is",
        ] {
            let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stranger.write_all(said).unwrap();
            strangers.push((stranger, said.len()));
        }
        for turn in 0..50 {
            let sent = link.send(1 - me, 0, data(5000, [me, turn, 0, 0]), 5000).unwrap();
            let came = link.receive(1 - me, 0, vec![0; 5000], 5000).unwrap().wait(PATIENT).unwrap();
            assert!(came == data(5000, [1 - me, turn, 0, 0]));
            sent.wait(PATIENT).unwrap();
        }
        for (mut stranger, said) in strangers.into_iter().filter(|(_, said)| *said >= 40) {
            stranger.set_read_timeout(Some(PATIENT)).unwrap();
            let mut answer = Vec::new();
            // The connection must be closed, with or without a reset, and without an answer.
            let _ = stranger.read_to_end(&mut answer);
            assert!(answer.is_empty(), "{said} bytes were answered");
        }
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    let (wires, store) = (wires(1), Memory::default());
    let place = Place { timeout: Duration::from_millis(100), ..place(&store, 1, 0, 2) };
    let text = join(&wires[0], &place).err().expect("nobody else comes").text().to_string();
    assert!(text.contains("Timed out after 100 ms: rank 1 has not said where it listens"), "{text}");
    // Rank 1 has published its address and died.
    let gone = format!("wire/{:032x}/1", u128::from_be_bytes([1; 16]));
    store.set(&gone, format!("{:032x} 1 127.0.0.1", u128::MAX).as_bytes()).unwrap();
    // A refusal ends the attempt immediately, so this attempt needs no short deadline. A short deadline could even end
    // it before the refusal.
    let place = Place { timeout: PATIENT, ..place };
    let text = join(&wires[0], &place).err().expect("nobody listens there").text().to_string();
    assert!(text.contains("rank 1 at 127.0.0.1:1: Connection refused"), "{text}");
}
