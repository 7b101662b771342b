//! Decides which operations are sent together. Pure, and no other module decides this; all ranks get equal results.
//!
//! | what | decided | carried out |
//! | --- | --- | --- |
//! | a list that one call names | `lists`: how many operations, of which tensors | `cpp/lower` |
//! | single operations between hosts | `planner`: which consecutive ones are a batch | `engine/multihost` |
//! | single operations on one host | nothing: each is published immediately (rule 14) | `engine/shm` |
//! | a coalescing region, a batch of messages | device: one launch, CPU: nothing (rule 16) | `cpp/c10d/region.hpp` |

pub mod lists;
pub mod planner;
