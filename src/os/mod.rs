pub mod clock;
pub mod futex;
pub mod topology;
pub mod watch;
