//! Ranks as coroutines whose order shuttle chooses at random. If a rank fails, shuttle prints the panic and the
//! schedule; `SAGELLM_TEST_SEED` and `SAGELLM_TEST_SCHEDULES` repeat the run.

use std::sync::Arc;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};

/// If a schedule takes more steps than this, some rank counts as waiting for ever.
const MOST_STEPS: usize = 2_000_000;

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Runs `body` under as many schedules as `SAGELLM_TEST_SCHEDULES` says, or under `count` if it is not set. Half of the
/// schedules choose the next rank uniformly. The others prefer some ranks and change their preference at a few random
/// moments, so that ranks fall far behind.
pub fn under_schedules(count: u64, body: impl Fn() + Send + Sync + 'static) {
    let (seed, count) = (number("SAGELLM_TEST_SEED", 1), number("SAGELLM_TEST_SCHEDULES", count) as usize);
    println!("SAGELLM_TEST_SEED={seed} SAGELLM_TEST_SCHEDULES={count}"); // libtest shows it if the test fails
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config.max_steps = MaxSteps::FailAfter(MOST_STEPS);
    config.silence_warnings = true;
    let body = Arc::new(body);
    let theirs = Arc::clone(&body);
    Runner::new(RandomScheduler::new_from_seed(seed, count.div_ceil(2)), config.clone()).run(move || theirs());
    Runner::new(PctScheduler::new_from_seed(seed, 5, count.div_ceil(2)), config).run(move || body());
}

/// Runs `body(rank)` as one coroutine per rank, and returns the results.
pub fn ranks<T: Send + 'static>(count: usize, body: impl Fn(usize) -> T + Send + Sync + 'static) -> Vec<T> {
    let body = Arc::new(body);
    let each = (0..count).map(|rank| {
        let body = Arc::clone(&body);
        shuttle::thread::spawn(move || body(rank))
    });
    let each: Vec<_> = each.collect();
    each.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
}

/// Returns the rank that runs now, if `ranks` started it.
pub fn rank_now() -> Option<usize> {
    usize::from(shuttle::current::me()).checked_sub(1)
}
