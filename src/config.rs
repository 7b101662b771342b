//! What a group is made from, and the environment variables that change how it works. Read once, plain data.

use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Config {
    pub rank: usize,
    pub size: usize,
    /// Deadline of operations that bring none of their own.
    pub timeout: Duration,
    /// Name for messages.
    pub name: String,
    /// Why this group must not use shared memory, if so.
    pub delegate_reason: Option<String>,
    /// The option `algorithm`: rules that come before those of the environment (`select::rules`).
    pub algorithm: String,
    /// What rank 0 tells the others about choosing (`select::policy`), as text; filled when the group is made.
    pub policy: String,
}
