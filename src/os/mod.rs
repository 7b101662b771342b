pub mod clock;
pub mod environment;
pub mod event_count;
pub mod futex;
mod random;
pub mod topology;
pub mod watch;

pub use self::random::random;
