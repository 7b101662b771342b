//! What runs an operation once it is known what it is: `shm` between the processes of one host, `solo` for a group of
//! one, `local` for ranks that are threads of one process (tests, and learning the API without processes).

pub mod local;
pub mod shm;
pub mod solo;
