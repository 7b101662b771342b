pub mod cncl;
pub mod hccl;
pub mod loader;
pub mod nccl;
