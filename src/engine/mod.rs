//! What runs an operation once it is known what it is: `shm` between the processes of one host, `hierarchical` where the
//! ranks live on several hosts (over a `link` between them), `solo` for a group of one, `local` for ranks that are threads
//! of one process (tests, and learning the API without processes).

pub mod device;
pub mod local;
pub mod multihost;
pub mod shm;
pub mod solo;
