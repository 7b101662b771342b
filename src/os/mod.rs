pub mod clock;
pub mod event_count;
pub mod futex;
pub mod topology;
pub mod watch;
