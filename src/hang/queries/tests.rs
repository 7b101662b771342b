//! Tests queries of several ranks over a store. A test can let requests fail, and control their order.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar};

use super::*;
use crate::hang::places::Asked;
use crate::hang::reply::Speaker;
use crate::hang::status::Status;
use crate::hang::store_keys::{Outcome, QueryResult};
use crate::host::{Counting, Memory, Store};

const PAUSE: Duration = Duration::from_millis(500);
/// Interval between two checks of a waiting rank.
const TICK: u64 = SHORTEST.as_nanos() as u64 / 2;
const LIMIT: u64 = (PAUSE.as_nanos() + SILENCE.as_nanos()) as u64;

/// Called at each request of a rank. If it returns an error, the request fails.
type Rule = dyn Fn(&str) -> Result<()> + Send + Sync;

/// A rank's connection to the store, which all ranks share.
struct Connection {
    store: Memory,
    rule: Box<Rule>,
    requests: Arc<AtomicUsize>,
}

impl Connection {
    fn before(&self, key: &str) -> Result<()> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        (self.rule)(key)
    }
}

impl Store for Connection {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.before(key)?;
        self.store.set(key, value)
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.before(key)?;
        self.store.try_get(key)
    }
}

impl Counting for Connection {
    fn add(&self, key: &str, by: i64) -> Result<i64> {
        self.before(key)?;
        self.store.add(key, by)
    }
    fn remove(&self, key: &str) -> Result<()> {
        self.before(key)?;
        self.store.remove(key)
    }
    fn connection(&self) -> usize {
        self.store.connection()
    }
}

/// A rank that has issued some operations. If it waits, it waits in the last of them.
struct Rank {
    rank: usize,
    ranks: usize,
    issued: u64,
    waits: bool,
    /// Native code holds the interpreter's lock.
    locked: bool,
    requests: Arc<AtomicUsize>,
    queries: Queries,
    learned: RefCell<Vec<QueryResult>>,
}

impl Speaker for Rank {
    fn status(&self, question: u32) -> (Status, u64) {
        (Status { question, issued: self.issued, ..Status::default() }, 0)
    }
    fn ask(&self, _: u64) -> Asked {
        let asked = Asked::default();
        if !self.locked {
            asked.is_at(None);
        }
        asked
    }
}

impl Participant for Rank {
    fn rank(&self) -> usize {
        self.rank
    }
    fn ranks(&self) -> usize {
        self.ranks
    }
    fn speaker(&self) -> &dyn Speaker {
        self
    }
    fn concerned(&self, result: &QueryResult) -> Vec<usize> {
        let late = result.behind.iter().filter(|(_, (issued, _))| *issued < self.issued).map(|(rank, _)| *rank);
        result.silent.iter().copied().chain(late).take(6).collect()
    }
    fn receive(&self, Outcome { result, answers, .. }: &Outcome) {
        assert!(self.concerned(result).iter().all(|rank| {
            result.silent.contains(rank) || answers.get(rank).is_some_and(|status| status.issued < self.issued)
        }));
        self.learned.borrow_mut().push(result.clone());
    }
}

impl Rank {
    fn look(&self, now: u64) -> Option<Duration> {
        self.queries.look(self, self.waits, now, PAUSE)
    }
    fn collects(&self) -> bool {
        self.queries.state.lock().unwrap().query.as_ref().is_some_and(|query| query.collects())
    }
}

/// Makes `issued.len()` ranks; rank r has issued `issued[r]` operations. The ranks that have issued the largest
/// number wait for the others. `rule` makes the rule for each rank.
fn ranks(store: &Memory, issued: &[u64], rule: impl Fn(usize) -> Box<Rule>) -> Vec<Rank> {
    let most = *issued.iter().max().unwrap();
    let rank = |(rank, issued_here): (usize, &u64)| {
        let requests = Arc::new(AtomicUsize::new(0));
        let connection = Connection { store: store.clone(), rule: rule(rank), requests: Arc::clone(&requests) };
        let queries = Queries::new(Arc::new(connection), "test", Arc::default());
        let (issued, ranks, waits) = (*issued_here, issued.len(), *issued_here == most);
        Rank { rank, ranks, issued, waits, locked: false, requests, queries, learned: RefCell::default() }
    };
    issued.iter().enumerate().map(rank).collect()
}

fn works(_: usize) -> Box<Rule> {
    Box::new(|_| Ok(()))
}

fn look<'a>(ranks: impl IntoIterator<Item = &'a Rank>, now: u64) {
    for rank in ranks {
        rank.look(now);
    }
}

/// All ranks except `gone` check repeatedly from time `from`, until each waiting one has received a result.
fn go_on(ranks: &[Rank], from: u64, gone: Option<usize>) {
    let left: Vec<&Rank> = ranks.iter().filter(|rank| Some(rank.rank) != gone).collect();
    let mut now = from;
    while left.iter().any(|rank| rank.waits && rank.learned.borrow().is_empty()) {
        assert!(now < from + 5 * LIMIT, "no result after {} ms", (now - from) / 1_000_000);
        look(left.iter().copied(), now);
        now += TICK;
    }
}

/// Forces the requests of two ranks, each on its own thread, into a given order. After one rank has made its last
/// request, the other continues without order.
#[derive(Default)]
struct Turns(Mutex<(Vec<usize>, BTreeSet<usize>)>, Condvar);

impl Turns {
    fn take(&self, rank: usize) {
        let mut state = self.0.lock().unwrap();
        while state.0.last().is_some_and(|next| *next != rank && !state.1.contains(next)) {
            state = self.1.wait_timeout(state, Duration::from_secs(20)).unwrap().0;
        }
        state.0.pop();
        self.1.notify_all();
    }
    fn leave(&self, rank: usize) {
        self.0.lock().unwrap().1.insert(rank);
        self.1.notify_all();
    }
}

#[test]
fn of_two_ranks_that_ask_at_once_one_collects_and_no_rank_that_answers_is_called_silent() {
    // Tries every order of the first ten requests of both ranks. A rank that asks has written its answer by then.
    for order in 0..1 << 10 {
        let turns = Arc::new(Turns::default());
        turns.0.lock().unwrap().0 = (0..10).map(|turn| order >> turn & 1).collect();
        let rule = |rank| -> Box<Rule> {
            let turns = Arc::clone(&turns);
            Box::new(move |_| {
                turns.take(rank);
                Ok(())
            })
        };
        let store = Memory::default();
        let mut all = ranks(&store, &[5, 5, 4, 4, 4, 4, 4, 3], |rank| if rank < 2 { rule(rank) } else { works(rank) });
        std::thread::scope(|scope| {
            for rank in &mut all[..2] {
                let turns = &turns;
                scope.spawn(move || {
                    rank.look(TICK);
                    turns.leave(rank.rank);
                });
            }
        });
        go_on(&all, 2 * TICK, None);
        let expected = QueryResult {
            behind: (2..8).map(|rank| (rank, (if rank < 7 { 4 } else { 3 }, 0))).collect(),
            ..QueryResult::default()
        };
        for rank in &all[..2] {
            assert_eq!(
                rank.learned.borrow().as_slice(),
                std::slice::from_ref(&expected),
                "order {order:b}, rank {}",
                rank.rank
            );
        }
        assert_eq!(all.iter().filter(|rank| rank.collects()).count(), 1, "order {order:b}");
    }
}

#[test]
fn ranks_that_ask_at_once_make_requests_by_their_number_and_not_by_its_square() {
    for (asking, silent) in [(2, 0), (8, 1), (40, 3), (40, 9)] {
        // All ranks check for a question before any of them asks one.
        let looked = Arc::new(std::sync::Barrier::new(asking));
        let rule = |rank| -> Box<Rule> {
            let (looked, first) = (Arc::clone(&looked), AtomicUsize::new(0));
            Box::new(move |key| {
                if rank < asking && key.contains("claimed") && first.fetch_add(1, Ordering::Relaxed) == 0 {
                    looked.wait();
                }
                Ok(())
            })
        };
        let issued: Vec<u64> = (0..asking + silent).map(|rank| if rank < asking { 5 } else { 4 }).collect();
        let mut all = ranks(&Memory::default(), &issued, rule);
        all.truncate(asking);
        std::thread::scope(|scope| {
            for rank in &mut all {
                scope.spawn(move || rank.look(TICK));
            }
        });
        go_on(&all, 2 * TICK, None);
        let expected: BTreeSet<usize> = (asking..asking + silent).collect();
        assert!(all.iter().all(|rank| rank.learned.borrow()[0].silent == expected));
        // Until the ranks give up on the silent ones, each check of a waiting rank makes two requests, and the
        // collecting rank also tries to read the silent ranks' answers.
        let looks = if silent == 0 { 3 } else { (LIMIT / TICK) as usize + 3 };
        let requests: usize = all.iter().map(|rank| rank.requests.load(Ordering::Relaxed)).sum();
        let most = asking * (2 * looks + 30) + silent * looks;
        assert!(requests <= most, "{asking} ranks that ask: {requests} requests, at most {most} expected");
    }
}

#[test]
fn a_rank_that_collects_publishes_the_result_also_where_its_own_operation_has_ended() {
    let mut all = ranks(&Memory::default(), &[5, 5, 5, 4], works);
    look(&all[..3], TICK);
    assert!(all[0].collects());
    all[0].waits = false;
    // Rank 3 makes no checks, so the result is published when it has been silent for the limit.
    for tick in 2..LIMIT / TICK + 4 {
        look(&all[..3], tick * TICK);
    }
    for rank in &all[1..3] {
        let learned = rank.learned.borrow();
        assert_eq!(learned.iter().map(|found| found.silent.clone()).collect::<Vec<_>>(), [BTreeSet::from([3])]);
    }
}

#[test]
fn a_rank_that_asks_and_ends_before_it_publishes_the_result_is_the_only_silent_one() {
    let issued = [5, 5, 5, 4, 4, 4, 4, 4, 4, 4];
    let mut requests = 0;
    loop {
        // Rank 0 asks first, and its store fails after `requests` requests.
        let (left, ended) = (AtomicUsize::new(requests), Arc::new(AtomicUsize::new(0)));
        let left = Arc::new(left);
        let rule = |rank| -> Box<Rule> {
            let (left, ended) = (Arc::clone(&left), Arc::clone(&ended));
            Box::new(move |_| {
                let is_left = |left: usize| left.checked_sub(1);
                if rank == 0 && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_left).is_err() {
                    ended.store(1, Ordering::Relaxed);
                    return Err(Error::system("ended"));
                }
                Ok(())
            })
        };
        let all = ranks(&Memory::default(), &issued, rule);
        for now in 1..4 {
            all[0].look(now * TICK);
            look(&all[3..], now * TICK);
        }
        go_on(&all, 4 * TICK, Some(0));
        for rank in &all[1..3] {
            let found = &rank.learned.borrow()[0];
            // Rank 0 may have answered before its store failed.
            assert!(found.silent.iter().all(|rank| *rank == 0), "{requests} requests: {found:?}");
            assert_eq!(found.behind.keys().copied().collect::<Vec<_>>(), [3, 4, 5, 6, 7, 8, 9], "{requests} requests");
        }
        if ended.load(Ordering::Relaxed) == 0 {
            break;
        }
        requests += 1;
    }
    assert!(requests > 15, "it asked, answered and read nine answers");
}

#[test]
fn a_question_of_another_rank_serves_and_the_next_one_has_another_number() {
    let all = ranks(&Memory::default(), &[5, 5, 4], works);
    let two = nanoseconds(PAUSE * 2);
    all[0].look(0);
    (1..6).for_each(|turn| look(&all, turn * TICK));
    assert!(all[0].collects() && !all[1].collects());
    assert_eq!((all[0].learned.borrow().len(), all[1].learned.borrow().len()), (1, 1));
    // Rank 1 is the first rank that finds the question old.
    all[1].look(two + 2 * TICK);
    (3..7).for_each(|turn| look(all.iter().rev(), two + turn * TICK));
    assert!(!all[0].collects() && all[1].collects());
    assert_eq!((all[0].learned.borrow().len(), all[1].learned.borrow().len()), (2, 2));
}

#[test]
fn the_numbers_of_questions_go_round() {
    let store = Memory::default();
    store.add("hang/test/count", i64::from(u32::MAX) - 1).unwrap();
    let all = ranks(&store, &[5, 4, 5], works);
    for query in 0..4 {
        let begin = 1 + query * nanoseconds(PAUSE * 3);
        (0..4).for_each(|turn| look(&all, begin + turn * TICK));
        for rank in [0, 2] {
            let learned = all[rank].learned.borrow();
            assert_eq!(learned.len() as u64, query + 1, "rank {rank}");
            assert!(learned.iter().all(|found| found.silent.is_empty() && found.behind.len() == 1), "{learned:?}");
        }
    }
}

#[test]
fn keys_are_bounded_while_the_group_lives_and_gone_after_its_last_rank_has_left() {
    let store = Memory::default();
    let all = ranks(&store, &[5, 4, 5], works);
    look(&all, 0);
    let processes = ["hang/test/who/0", "hang/test/who/1", "hang/test/who/2"];
    let kept = |begin: &str| store.keys(&format!("hang/test/{begin}"));
    (0..3).for_each(|rank| store.set(&format!("wire/{rank}"), b"127.0.0.1").unwrap());
    for query in 0..40 {
        let begin = 1 + query * nanoseconds(PAUSE * 3);
        (0..4).for_each(|turn| look(&all, begin + turn * TICK));
        assert_eq!(all[0].learned.borrow().len() as u64, query + 1);
        assert!(kept("claimed").len() <= 2 * KEPT && kept("found").len() <= 2 * KEPT, "{:?}", store.keys(""));
    }
    all[1].queries.publish_fault(1, &Error::system("sagellm: late"));
    assert!(matches!(all[0].queries.fault(true), FaultRead::Told(_)));
    assert_eq!((kept("who"), kept("said").len()), (processes.map(String::from).to_vec(), 3));
    for rank in [2, 0] {
        all[rank].queries.leave(3, &[format!("wire/{rank}")]);
        assert!(matches!(all[1].queries.fault(true), FaultRead::Told(_)), "rank 1 has not left");
    }
    assert_eq!(store.keys("wire"), ["wire/1"]);
    all[1].queries.leave(3, &["wire/1".to_string()]);
    assert_eq!(store.keys(""), Vec::<String>::new());
}

#[test]
fn after_an_error_of_the_store_no_further_request_is_made() {
    // The test runs once for each request of the first two checks; in that run the request fails.
    for well in 0..20 {
        let rule = |_| -> Box<Rule> {
            let made = AtomicUsize::new(0);
            Box::new(move |_| match made.fetch_add(1, Ordering::Relaxed) < well {
                true => Ok(()),
                false => Err(Error::system("the store is gone")),
            })
        };
        let all = ranks(&Memory::default(), &[5, 4], rule);
        for (rank, now) in (1..100).flat_map(|turn| all.iter().map(move |rank| (rank, turn * TICK))) {
            let next = rank.look(now);
            let made = rank.requests.load(Ordering::Relaxed);
            assert_eq!(next.is_none(), made > well);
            assert!(made <= well + 1, "{made} requests, of which number {} failed", well + 1);
        }
    }
}
