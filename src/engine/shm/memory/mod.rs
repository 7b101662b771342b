pub mod area;
pub mod layout;
pub mod presence;
pub mod segment;
