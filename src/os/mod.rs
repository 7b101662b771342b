pub mod clock;
pub mod environment;
pub mod event_count;
pub mod fault_points;
pub mod futex;
pub mod numa;
mod random;
pub mod topology;
pub mod watch;
pub mod yielding;

pub use self::random::random;
