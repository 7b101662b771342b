//! Connections that consist of several TCP connections, called paths. Here the paths use loopback addresses, and some
//! of them fail.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use crate::common::host::Memory;
use sagellm::engine::multihost::link::{Link, Transfer};
use sagellm::engine::multihost::wire::{Over, Place, Wire, WireLink, join};

const PATIENT: Duration = Duration::from_secs(20);

/// Addresses that only one test uses.
fn addresses(test: u8, count: usize) -> Vec<String> {
    (0..count).map(|path| format!("127.{test}.{}.{}", std::process::id() % 251, path + 1)).collect()
}

/// Runs `body` as the two ranks of a group, each with these paths.
fn as_ranks(test: u8, wires: &[Arc<Wire>], paths: [&[String]; 2], body: impl Fn(usize, WireLink) + Sync) {
    let store = Memory::default();
    std::thread::scope(|scope| {
        for (rank, wire) in wires.iter().enumerate() {
            let (body, store, paths) = (&body, &store, paths[rank]);
            scope.spawn(move || {
                let (address, timeout) = ("127.0.0.1", PATIENT);
                let place = Place { store, id: [test; 16], rank, size: wires.len(), address, paths, timeout };
                body(rank, join(wire, &place).unwrap());
            });
        }
    });
}

fn wires() -> Vec<Arc<Wire>> {
    (0..2).map(|_| Wire::new(&Over::Tcp).unwrap()).collect()
}

fn data(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(seed * 2 + 13) >> 5) as u8).collect()
}

/// Returns how many established connections in this network namespace have this local address and belong to a process.
fn between(address: &str) -> usize {
    let ip: Ipv4Addr = address.parse().unwrap();
    let ip = format!("{:08X}:", u32::from_le_bytes(ip.octets()));
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let words = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    words.filter(|words| words[1].starts_with(&ip) && words[3] == "01" && words[9] != "0").count()
}

/// Resets the connections of this process whose peer has this address.
fn reset(address: &str) {
    let ip: Ipv4Addr = address.parse().unwrap();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let fd: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        #[allow(unsafe_code)] // reads the addresses of a socket, and disconnects it
        // SAFETY: the calls write at most `length` bytes, read a whole address, and refuse a descriptor that is no
        // socket.
        unsafe {
            let mut name: libc::sockaddr_in = std::mem::zeroed();
            let mut length = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            let own = libc::getpeername(fd, (&raw mut name).cast(), &raw mut length);
            if own == 0
                && name.sin_family == libc::AF_INET as libc::sa_family_t
                && name.sin_addr.s_addr == u32::from_ne_bytes(ip.octets())
            {
                let nobody = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
                libc::connect(fd, &raw const nobody, size_of::<libc::sockaddr>() as libc::socklen_t);
            }
        }
    }
}

/// Sends messages of all sizes between both ranks, in both directions.
fn talk(me: usize, link: &WireLink, turns: std::ops::Range<usize>) {
    for turn in turns {
        let bytes = [8, 3_000_001, 16 << 10, 100_000, 1, 8 << 20, 700_001][turn % 7];
        let sends: Vec<Box<dyn Transfer>> =
            (0..2).map(|tag| link.send(1 - me, tag, data(bytes, turn * 2 + me), bytes).unwrap()).collect();
        for tag in 0..2 {
            let came = link.receive(1 - me, tag, vec![0; bytes], bytes).unwrap().wait(PATIENT).unwrap();
            assert!(came == data(bytes, turn * 2 + 1 - me), "turn {turn}");
        }
        sends.into_iter().for_each(|one| drop(one.wait(PATIENT).unwrap()));
    }
}

/// Waits until no connection at these addresses is left.
fn none_is_left(paths: &[String]) {
    let until = Instant::now() + PATIENT;
    while paths.iter().any(|address| between(address) > 0) {
        assert!(Instant::now() < until, "sockets are left");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn two_processes_make_as_many_paths_as_the_one_that_wants_fewer() {
    for (test, wanted, made) in [(211, [4, 4], 4), (212, [2, 3], 2), (213, [3, 1], 0), (214, [0, 4], 0)] {
        let wires = wires();
        let paths = wanted.map(|count| addresses(test, count));
        as_ranks(test, &wires, [&paths[0], &paths[1]], |me, link| {
            talk(me, &link, 0..4);
            let count = addresses(test, 4).iter().filter(|address| between(address) > 0).count();
            assert_eq!(count, made, "{wanted:?}");
            talk(me, &link, 4..6);
        });
        assert!(wires.iter().all(|wire| wire.open_connections() == 0));
        none_is_left(&addresses(test, 4));
    }
}

#[test]
fn messages_arrive_although_paths_are_reset_as_long_as_one_is_left() {
    for round in 0..6u8 {
        let wires = wires();
        let paths = addresses(221 + round, 3);
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (paths, ended) = (&paths, &ended);
            scope.spawn(move || {
                for path in [round as usize % 3, (round as usize + 1) % 3] {
                    while between(&paths[path]) == 0 && !ended.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    std::thread::sleep(Duration::from_millis(7 + 9 * u64::from(round)));
                    reset(&paths[path]);
                }
            });
            as_ranks(221 + round, &wires, [paths, paths], |me, link| talk(me, &link, 0..24));
            ended.store(true, Ordering::Relaxed);
        });
    }
}

#[test]
fn groups_are_made_and_closed_while_paths_are_reset() {
    let (wires, paths) = (wires(), addresses(241, 3));
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                // The first path is not reset: until the others are added, no path could replace it.
                paths[1..].iter().for_each(|path| reset(path));
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        for group in 0..30 {
            as_ranks(group, &wires, [&paths, &paths], |me, link| talk(me, &link, 0..group as usize % 3));
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert!(wires.iter().all(|wire| wire.open_connections() == 0));
    none_is_left(&paths);
}

#[test]
fn when_the_last_path_is_gone_the_peer_is_lost() {
    let (wires, paths) = (wires(), addresses(231, 2));
    let both = Barrier::new(2);
    as_ranks(231, &wires, [&paths, &paths], |me, link| {
        talk(me, &link, 0..2);
        both.wait(); // all data that was sent is acknowledged
        if me == 0 {
            paths.iter().for_each(|path| reset(path));
        }
        let begin = Instant::now();
        let waits = link
            .receive(1 - me, 5, vec![0; 8], 8)
            .and_then(|one| one.wait(PATIENT).map_err(|broken| sagellm::error::Error::system(broken.words)));
        let text = waits.map(drop).expect_err("no path is left").text().to_string();
        assert!(text.contains("onnect"), "{text}"); // "connection reset", or "not connected"
        assert!(begin.elapsed() < PATIENT / 4);
    });
}
