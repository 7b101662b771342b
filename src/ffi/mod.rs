pub mod bridge;
pub mod callbacks;
pub mod devices;
pub mod simulate;
