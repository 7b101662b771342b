pub mod domain;
pub mod driver;
pub mod inquiry;
pub mod roles;
pub mod waits;
