pub mod area;
pub mod arena;
pub mod extents;
pub mod forks;
pub mod layout;
pub mod presence;
pub mod reach;
pub mod segment;
